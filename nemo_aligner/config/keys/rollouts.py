# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Keys of policies that generate, and of what rewards them."""

from typing import Any, Literal

from nemo_aligner.config.fields import Section, inert, key, section
from nemo_aligner.config.keys.common import Alarms, Loop
from nemo_aligner.core.estimators import ROLLOUT_REDUCTIONS


class SamplingParams(Section):
    """How tokens are chosen.

    use_greedy, temperature, top_k, top_p, repetition_penalty: sampling; 0 and 1.0 mean off
    end_strings: strings that end a response, beside the end token
    """

    use_greedy: bool = key(False)
    temperature: float = key(1.0, above=0)
    top_k: int = key(0, at_least=0)
    top_p: float = key(1.0, above=0, at_most=1)
    repetition_penalty: float = key(1.0, above=0)
    end_strings: Any = key(["<|endoftext|>", "<extra_id_1>"])


class PolicySampling(SamplingParams):
    """How the tokens of a rollout are chosen."""

    add_BOS: Any = inert(None)
    all_probs: Any = inert(False)
    compute_logprob: Any = inert(False)


class LengthParams(Section):
    """How long responses are.

    max_length, min_length: generated tokens
    """

    max_length: int = key("${int_div:${model.encoder_seq_length},2}", at_least=1)
    min_length: int = key(1, at_least=0)


class Generation(Section):
    """How the engine works.

    reshard: **new**: `auto`: the ranks of a pipeline gather the weights of all its stages for each
        rollout and divide the responses, instead of passing each token through the stages. `{tp:
        N, pp: M}`: responses are generated at these parallel sizes, with the weights moved once
        per rollout; see [parallelism.md](parallelism.md). In `model.ppo`, `model.rs`,
        `model.reinforce` and `model.spin`
    kv_cache_gb: **new**: GB (10^9 bytes) of each rank for the keys and values of responses: as
        many are generated together as fit in when all become `encoder_seq_length` long (no more
        than a rank's share of the prompts of PPO and REINFORCE). null: `rollout_micro_batch_size`
        of them. Responses are sent to be scored in groups of that size in either case
    cuda_graphs: **new**: run a decoding step on a GPU as one CUDA graph: the same numbers in less
        time. auto: where one rank holds all the weights, without experts and with adapters merged;
        the log says so. True: refuse to run otherwise
    """

    reshard: Any = key("none", free=True, required=True)
    kv_cache_gb: float | None = key(None, above=0)
    cuda_graphs: Literal["auto", True, False] | None = key("auto")


class Environment(Section):
    """What replies to responses.

    path: **new**: `path/to/file.py:Class`, a Python class that replies to responses and gives the
        rewards ([environments](rewards.md#environments)); null: a response is a sample
    max_turns: **new**: responses in a conversation, at most
    workers, timeout_s: **new**: processes that run the class, for each copy of the policy's
        weights; seconds for a reply
    fallback: **new**: reward of a response to which the class fails to reply, or two agents one
        after the other; its conversation ends. null: the job ends with one line that shows the
        response and the cause
    port: **new**: in place of `path`, where agents find the policy as a chat model over HTTP
        ([agents](rewards.md#agents)); of several copies of the weights the second listens at the
        next port, and so on
    host, token_file: **new**: where it listens, this machine alone unless told otherwise; file
        with the token that agents send as the API key, null: `NEMO_ALIGNER_TOKEN`, if it is set
    """

    path: Any = key(None, code="class")
    max_turns: int = key(8, at_least=1)
    workers: int = key(2, at_least=1)
    timeout_s: float = key(10.0, above=0)
    fallback: float | None = key(None)
    port: int | None = key(None, at_least=1, at_most=65535)
    host: str = key("127.0.0.1")
    token_file: str | None = key(None)


class Responses(Section):
    """How a policy responds.

    offload_adam_states: keep the optimizer's state in host memory while generating (on GPUs)
    rollout_micro_batch_size: responses generated together (the next one begins as soon as one has
        ended) and sent to be scored together
    """

    offload_adam_states: bool = key(True)
    rollout_micro_batch_size: int = key(8, at_least=1)
    sampling_params: PolicySampling = section()
    length_params: LengthParams = section()
    generation: Generation = section()


class Policy(Responses):
    """The policy of an actor.

    num_rollout_samples: prompts per PPO step; a multiple of the two below x data parallel size
    forward_micro_batch_size: sequences of one log-probability pass
    num_val_samples, val_rollout_micro_batch_size: of a validation
    loss_reduction: **new**: `token` (mean over response tokens), `sequence` (mean of per-sample
        means), `constant` (mean of per-sample sums divided by `max_length`), `microbatch`
        (NeMo-Aligner's mean of micro-batch means)
    """

    num_rollout_samples: int = key(512, at_least=1)
    forward_micro_batch_size: int = key("${.rollout_micro_batch_size}", at_least=1)
    num_val_samples: int = key("${.num_rollout_samples}", at_least=1)
    val_rollout_micro_batch_size: int = key("${.rollout_micro_batch_size}", at_least=1)
    loss_reduction: str = key("token", choices=ROLLOUT_REDUCTIONS)
    environment: Environment = section()


class FunctionWorkers(Section):
    """The processes of a function that gives rewards.

    reward_fn_workers, reward_fn_timeout_s: **new**: processes that call it, on each rank that
        generates, or requests at a time to each address; time limit per sample, or per reply of a
        judge, in seconds
    reward_fn_fallback: **new**: reward of a sample for which there is none; null: the job ends,
        and of a server the request fails, and with it the job that sent it
    """

    reward_fn_workers: int = key(2, at_least=1)
    reward_fn_timeout_s: float = key(10.0, above=0)
    reward_fn_fallback: float | None = key(None)


class RewardFunction(FunctionWorkers):
    """A function that gives rewards, in an actor or a reward server.

    reward_fn: **new**: what gives the rewards in place of servers, or of a served model:
        `path/to/file.py:function` in processes of the job, or of an actor an address `http://...`
        or `https://...` or a list of them ([rewards](rewards.md)). A function takes `(prompts,
        responses, lengths)`, lists of str, str and int (tokens of the response), and returns a
        list of numbers
    rewards_per, step_end: **new**: what a reward is for, the `response`, each `step` or each
        `token` of it; with `step` the text that ends a step
        ([rewards](rewards.md#rewards-of-steps-and-tokens))
    """

    reward_fn: Any = key(None, code="function")
    rewards_per: Literal["response", "step", "token"] = key("response")
    step_end: str | None = key(None)


class Judge(Section):
    """A judge, a language model that gives rewards.

    url, model: **new**: `http://.../v1/chat/completions`, or a list of addresses of the same
        model, and its name there ([rewards](rewards.md#a-judge)); null: there is no judge
    prompt, system: **new**: the user's message and the one before it, each a text or the path of
        its file, with `{prompt}`, `{response}` and columns of the records in braces; `{{` and `}}`
        are braces
    score, least, most: **new**: where a reply has its score: a JSON field, such as
        `verdict.score`, or a regular expression with one group, of which the last one counts; the
        ends of the scale, outside of which a score is none
    tries: **new**: how often it is asked for a score, from the second time on with another seed,
        and with temperature 1 where it is 0
    temperature, max_tokens, seed, request: **new**: of a reply; more fields of a request, such as
        `{top_p: 0.9}`, also in place of those, where null leaves one out
    cache: **new**: folder that keeps the replies, none of which is then asked for again
    budget_requests, budget_tokens: **new**: what the replies in `cache` may cost in all, whichever
        jobs and ranks ask; the job that would spend more ends
    """

    url: Any = key(None)
    model: str | None = key(None)
    prompt: str | None = key(None)
    system: str | None = key(None)
    score: str | None = key(None)
    least: float | None = key(None)
    most: float | None = key(None)
    tries: int = key(3, at_least=1)
    temperature: float = key(0.0, at_least=0)
    max_tokens: int = key(512, at_least=1)
    seed: int = key(0, at_least=0)
    request: dict | None = key(None, free=True)
    cache: str | None = key(None)
    budget_requests: int | None = key(None, at_least=1)
    budget_tokens: int | None = key(None, at_least=1)


class RolloutAlarms(Alarms):
    """Alarms of jobs that roll out."""

    truncated_fraction: float | None = key(0.9, at_least=0, at_most=1)


class RolloutLoop(Loop, RewardFunction):
    """The loop of an actor.

    reward_token_file, reward_tls_ca_file: **new**: of an address: file with the token, null:
        `NEMO_ALIGNER_REWARD_TOKEN`, if it is set; PEM file of certificates, null: those of this
        system
    run_init_validation: **new**: validate before the first step
    rollout_batch_seq_length: pad rollouts to this width; null: to the longest
    model_gbs, model_mbs: set the model's instead
    """

    max_epochs: int = key(1, at_least=1)
    val_check_interval: int = key(10, at_least=0)
    judge: Judge = section()
    reward_token_file: str | None = key(None)
    reward_tls_ca_file: str | None = key(None)
    run_init_validation: bool = key(False)
    rollout_batch_seq_length: int | None = key(None, at_least=2)
    model_gbs: int = key("${model.global_batch_size}")
    model_mbs: int | None = key("${model.micro_batch_size}")
    alarms: RolloutAlarms | None = section()


class BatchIterator(Section):
    """How ranks get prompts.

    use_flask: data-parallel ranks draw prompts from one queue, so that none waits long for
        another; [why it is off](performance.md#why-ranks-do-not-share-a-queue-by-default)
    """

    use_flask: bool = key(False)
    port: Any = inert(5557)


class TrtLlm(Section):
    """NeMo-Aligner's engine.

    enable, reshard: with `enable=True` the built-in engine generates and a warning says so;
        `reshard=True` then acts as `generation.reshard=auto` where that is none
    """

    enable: bool = key(False)
    reshard: bool = key(False)
    model_type: Any = inert("llama")
    unload_engine_train: Any = inert(False)
    seed: Any = inert("${model.seed}")
    max_input_len: Any = inert(
        "${subtract:${model.encoder_seq_length},${model.<algo>.length_params.max_length}}"
    )


class RewardAddress(Section):
    """A reward server.

    name: names of the endpoints
    ip, port: addresses of the servers
    """

    name: str | None = key("reward_model")
    ip: Any = key("localhost")
    port: Any = key(5555)


class Remote(Section):
    """Servers that a job talks to.

    pad_to_length: width of the requests sent to the critic. null: that of the longest sample,
        rounded up to a multiple of 8 or (from 128 tokens on) by an eighth at most, so that there
        are few widths. A number: at least so many columns; a longer sample is sent at its own
        width, and a warning at start says if there can be one. Our servers compute no padding in
        either case. NeMo-Aligner: `encoder_seq_length`
    init_timeout_s, inference_timeout_s: **new**: seconds to wait for the servers to come up; for
        the reply to one request. NeMo-Aligner: 6000, 600000
    reward_models: **new**: an ensemble in place of `reward_model`: a section per name with `ip`,
        `port`, `name` (of the endpoint) and `weight` (1.0). The reward is the weighted sum; each
        part is logged as `rewards_<name>`.
    token_file: **new**: file with the token of all servers of this section; null:
        `NEMO_ALIGNER_TOKEN`, if it is set
    tls_ca_file: **new**: PEM file of certificates. All servers of this section must then encrypt,
        and prove by their certificates that one of these has signed it, or is it; null: plain HTTP
        ([jobs.md](jobs.md#servers-without-triton-and-encrypted-ones))
    """

    pad_to_length: int | None = key(None, at_least=1)
    init_timeout_s: float | None = key(600, above=0)
    inference_timeout_s: float | None = key(3600, above=0)
    reward_model: RewardAddress = section()
    reward_models: Any = key(None, free=True)
    token_file: str | None = key(None)
    tls_ca_file: str | None = key(None)


class PolicyTrtLlm(Section):
    """NeMo-Aligner's engine, as `model.<algo>` names it.

    enable, reshard: as `trainer.<algo>.trt_llm`
    """

    enable: bool = key("${trainer.<algo>.trt_llm.enable}")
    reshard: bool = key("${trainer.<algo>.trt_llm.reshard}")


class RemoteRM(Remote):
    """The servers of rewards.

    host, port: **new**: where the reward model is; they win over `remote_rm.reward_model.ip` and
        `port`
    """

    host: Any = key(None)
    port: Any = key(None)


class RemoteTeacher(Section):
    """The teacher's server.

    host, port, name: **new**: where a teacher is served (of `on_policy`, of a policy); lists of
        hosts or ports are a fleet
    init_timeout_s, inference_timeout_s, token_file, tls_ca_file: **new**: as for `remote_rm`
    """

    host: Any = key("localhost", required=True)
    port: Any = key(5556, required=True)
    name: str = key("teacher_logits")
    init_timeout_s: float = key(600, above=0)
    inference_timeout_s: float = key(3600, above=0)
    token_file: str | None = key(None)
    tls_ca_file: str | None = key(None)
