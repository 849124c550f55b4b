# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules for policies that generate."""

from collections.abc import Mapping
from typing import Any

from nemo_aligner.config import access, server_rules
from nemo_aligner.config.fields import Configuration
from nemo_aligner.config.keys.common import PARALLEL
from nemo_aligner.config.keys.rollouts import Environment
from nemo_aligner.config.parallel_rules import EP_REMEDY
from nemo_aligner.config.values import Values, require_multiple
from nemo_aligner.core.errors import ConfigError

_ENVIRONMENT = Configuration("", {"": Environment}).tree


_POLICY_RULES = """
JOB.model_gbs>model.global_batch_size or JOB.model_gbs<model.global_batch_size | and
    {model.global_batch_size} must be the same value; set only model.global_batch_size
JOB.model_mbs>model.micro_batch_size or JOB.model_mbs<model.micro_batch_size | and
    {model.micro_batch_size} must be the same value; set only model.micro_batch_size
"""


def check_policy(v: Values, kind: str, remote: str, dp: dict[str, int], per_prompt: str) -> None:
    """What the actors, of the `kind` "ppo", "rs" or "reinforce", have in common; `remote`: section
    of the servers that the job talks to, `per_prompt`: key of the number of responses to a prompt.
    """
    section, model = f"trainer.{kind}.", f"model.{kind}."
    v.refuse(_POLICY_RULES, JOB=f"trainer.{kind}")
    v.multiple(model + "num_rollout_samples", model + "rollout_micro_batch_size", times=dp)
    v.multiple(model + "num_val_samples", model + "val_rollout_micro_batch_size", times=dp)
    check_generation(v, model)
    check_reshard(v, section, model + "generation.reshard", dp)
    _check_own_rewards(v, kind, remote)
    queue, experts = f"{section}batch_iterator.use_flask", "model.expert_model_parallel_size"
    check_shared_queue(section, v.get(queue), v.get(experts, 1))
    check_remote(v, remote)
    server_rules.read_reward_models(v.get(remote), remote)
    name, kept = model + "num_rollout_samples", v.size(per_prompt)
    samples, batch = v.size(name) * kept, v.size("model.global_batch_size")
    name += f" x {per_prompt}={kept}" if kept > 1 else ""
    require_multiple(name, samples, {"model.global_batch_size": batch})


def check_remote(v: Values, remote: str) -> None:
    access.read_token(v.get(f"{remote}.token_file"), remote)
    access.client_tls(v.get(f"{remote}.tls_ca_file"), remote)


_REWARD_RULES = """
ENV.host!=DEFAULT or ENV.token_file & !ENV.port | has no effect: nothing listens for agents; set
    ENV.port, or ENV.host=DEFAULT and ENV.token_file=null
JOB.overlong_buffer_len & ENV.path or ENV.port | is for single responses, but {} makes samples of
    several; set it to 0
JOB.reward_fn & JOB.judge.url or ENV.path or ENV.port | gives the rewards, and so does {}; set one
    to null
JOB.judge.url & ENV.path or ENV.port | gives the rewards, and so does {}; set one to null
ENV.path & ENV.port | gives the rewards, and so does {}; set one to null
SOURCE & REMOTE.combine_rm_and_critic_server | gives the rewards, but {}; set that to False, in
    both jobs
SOURCE & REMOTE.reward_models | gives the rewards, so REMOTE.reward_models would not be asked;
    leave it null
"""


def _check_own_rewards(v: Values, kind: str, remote: str) -> None:
    """Check what gives the rewards in the job, and that nothing beside it does."""
    section, environment = f"trainer.{kind}", f"model.{kind}.environment"
    server_rules.check_kind_of_rewards(v, section)
    server_rules.read_web_rewards(v.get(section), section)
    v.refuse(
        _REWARD_RULES,
        SOURCE="JOB.reward_fn or JOB.judge.url or ENV.path or ENV.port",
        JOB=section,
        ENV=environment,
        REMOTE=remote,
        DEFAULT=_ENVIRONMENT["host"],
    )
    if v.has(f"{environment}.port"):
        host, token_file = (v.get(f"{environment}.{key}") for key in ("host", "token_file"))
        access.server_token(host, token_file, environment)


def asked_reshard(settings: Any) -> Any:
    """`generation.reshard` of `settings`, the section `model.<algorithm>`. Where it is none,
    NeMo-Aligner's `trt_llm.reshard`, with `trt_llm.enable`, reads as "auto".
    """
    reshard, trt_llm = settings["generation"]["reshard"], settings.get("trt_llm") or {}
    if reshard == "none" and trt_llm.get("enable") and trt_llm.get("reshard"):
        return "auto"
    return reshard


def generation_sizes(reshard: str | Mapping[str, int] | None, tp: int, pp: int) -> tuple[int, int]:
    """TP and PP of generation, by `asked_reshard` and training; "auto" ends the pipeline."""
    if isinstance(reshard, Mapping):
        return reshard["tp"], reshard["pp"]
    return (tp, 1) if reshard == "auto" else (tp, pp)


def check_reshard(v: Values, section: str, key: str, dp: dict[str, int]) -> None:
    if isinstance(v.get(key), Mapping):
        _check_sizes(v, section, key, dp)
    else:
        v.choice(key, ("none", "auto"))
    value = asked_reshard(v.get(key.removesuffix(".generation.reshard")))
    if value not in (None, "none"):
        shown = str(value).replace("'", "")  # as a command writes it
        v.refuse(
            f"""model.peft.merge_for_generation=false & model.peft.peft_scheme!=none | keeps
            adapters apart, but {key}={shown} moves weights that contain them; set
            model.peft.merge_for_generation=True, or {key}=none"""
        )


def _check_sizes(v: Values, section: str, key: str, dp: dict[str, int]) -> None:
    """Check `generation.reshard={tp: ..., pp: ...}` against the model and its ranks."""
    remedy = f"or set {key}=auto."
    if set(v.get(key)) != {"tp", "pp"}:
        raise v.error(key, "needs both sizes, such as {tp: 1, pp: 1}.")
    tp, pp = v.size(f"{key}.tp"), v.size(f"{key}.pp")
    trained_tp, trained_pp, cp, ep = (v.get(name, 1) for name in PARALLEL)
    trained, together = trained_tp * trained_pp, tp * pp // (trained_tp * trained_pp)
    if (tp, pp) == (trained_tp, trained_pp):
        return
    if trained % (tp * pp) and (tp * pp) % trained:
        raise v.error(
            key,
            f"and the {trained} ranks of TP x PP in training do not divide each other; choose "
            f"sizes whose product divides {trained} or is a multiple of it, {remedy}",
        )
    if together > 1:
        takes = f"takes the ranks of {together} data-parallel ranks"
        smaller = f"choose smaller sizes, {remedy}"
        for ranks in dp.values():
            if ranks % together:
                raise v.error(key, f"{takes}, of which there are {ranks}; {smaller}")
        if cp > 1:
            works = f"which does not work with model.context_parallel_size={cp}"
            raise v.error(key, f"{takes}, {works}; {smaller}")
        v.refuse(
            f"""{section}batch_iterator.use_flask | does not work with {{{key}}}: data-parallel
            ranks generate together, so none may draw more prompts than another; set it to False"""
        )
    experts = v.get("model.num_moe_experts")
    if (ep > 1 or experts) and (tp, pp) != (trained_tp, 1):
        raise v.error(
            key,
            f"would divide experts anew; with model.num_moe_experts={experts} only the pipeline "
            f"can end: set {key}={{tp: {trained_tp}, pp: 1}}, {remedy}",
        )
    heads = v.get("model.num_query_groups") or v.get("model.num_attention_heads")
    ffn, layers = v.get("model.ffn_hidden_size"), v.get("model.num_layers")
    divided = {"num_query_groups": (heads, tp), "ffn_hidden_size": (ffn, tp)}
    for name, (whole, size) in (divided | {"num_layers": (layers, pp)}).items():
        if isinstance(whole, int) and whole % size:
            says = f"does not divide model.{name}={whole}; choose a size that does"
            raise v.error(key, f"{says}, {remedy}")


def check_shared_queue(section: str, use_flask: bool | None, expert_parallel: int) -> None:
    """Refuse one queue for ranks that hold each other's experts; `section`: for the message."""
    if use_flask and expert_parallel > 1:
        raise ConfigError(
            f"{section}batch_iterator.use_flask=True does not work with "
            f"model.expert_model_parallel_size={expert_parallel}: no rank may generate more "
            f"often than another. Set it to False ({EP_REMEDY})."
        )


def check_generation(v: Values, model: str = "") -> None:
    """Check `length_params` in the section `model`: "model.ppo.", "model.rs." or ""."""
    longest, context = model + "length_params.max_length", "model.encoder_seq_length"
    v.refuse(f"{longest}>={context} | leaves no room for a prompt in {{{context}}}; lower it")
    v.at_most(model + "length_params.min_length", longest)


def check_responses_differ(v: Values, model: str, key: str | None = None) -> None:
    """Refuse several responses to a prompt, for which `key` asks, that would all be the same by
    the sampling parameters in the section `model`, with a dot at its end, or "".
    """
    v.refuse(
        """KEY>1 & SAMPLING.use_greedy or SAMPLING.top_k=1 | responses to a prompt would be the
        same with {}; sample, or draw one response""",
        **{"KEY": key or f"{model}num_rollouts_per_prompt", "SAMPLING": f"{model}sampling_params"},
    )
