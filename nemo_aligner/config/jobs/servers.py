# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Servers: that of PPO's critic, and that of rewards."""

from typing import Any

from nemo_aligner.config import server_rules
from nemo_aligner.config.fields import ABSENT, Configuration, Section, inert, key, section
from nemo_aligner.config.keys import common, model
from nemo_aligner.config.keys.rollouts import RewardFunction
from nemo_aligner.config.values import Values
from nemo_aligner.core.estimators import LOSS_REDUCTIONS


class Server(Section):
    """What takes requests.

    frontend: **new**: what takes the requests. `triton`: Triton, behind a front of this package.
        `asgi`: without PyTriton
        ([jobs.md](jobs.md#servers-without-triton-and-encrypted-ones))
    tls_certificate, tls_key: **new**: PEM files of the certificate and the key with
        which the server encrypts; the key may be readable by you alone, and has no password. null:
        plain HTTP
    """

    frontend: str | None = key("triton")
    tls_certificate: str | None = key(None)
    tls_key: str | None = key(None)


class Listening(Section):
    """Where a server listens, and for whom.

    host: **new**: address to listen on. `127.0.0.1` serves this machine alone; any other address
        needs a token. NeMo-Aligner: all addresses
    port: port to listen on
    token_file: **new**: file with the token that every request must bring, readable by you alone;
        null: the environment variable `NEMO_ALIGNER_TOKEN`, and without it no token
        ([jobs.md](jobs.md))
    max_request_mb: **new**: largest body of a request, in MiB, 64 to 2047. Our clients send larger
        batches in several requests; NeMo-Aligner's do not
    max_queue_delay_microseconds: how long Triton holds a request back for others that it hands
        over with it; each is scored by itself, so waiting brings nothing (NeMo-Aligner: 2000)
    inference_micro_batch_size: samples per data-parallel rank that end the wait, an int or a list
    strip_sequence_length_to_multiple: cut padding that no sample uses, down to a multiple of this
    """

    host: str = key("127.0.0.1")
    port: int = key(5556, at_least=1, at_most=65535)
    token_file: str | None = key(None)
    max_request_mb: float | None = key(64, at_least=64, at_most=2047)
    max_queue_delay_microseconds: float = key(0, at_least=0)
    inference_micro_batch_size: Any = key("${model.forward_micro_batch_size}", required=True)
    strip_sequence_length_to_multiple: int | None = key(None, at_least=1)


class Inference(Listening):
    """A server of one endpoint.

    model_name: name of the endpoint
    """

    model_name: str = key("reward_model")


class CriticModel(model.RewardHead, model.TrainedModel):
    """The critic.

    loss_clip_val: clip range of the values; 0: no clipping
    loss_reduction: **new**, as for the actor
    offload_adam_states: as for the actor
    """

    loss_clip_val: float | None = key(0.2, at_least=0)
    loss_reduction: str | None = key("token", choices=LOSS_REDUCTIONS)
    offload_adam_states: bool = key(False)


class CriticServer(Listening):
    """The critic's loop.

    require_lease: **new**: only the actor that holds the lease may train and save. False: so may a
        client that knows no lease, such as NeMo-Aligner's, while no actor holds it
    combine_rm_and_critic_server: score rewards too, by swapping weights
    max_steps: horizon of its learning rate, in updates; -1: no limit
    gradient_clip_val: largest norm of the whole gradient; 0: no clipping
    """

    require_lease: bool = key(True)
    combine_rm_and_critic_server: bool = key(True)
    max_steps: int = key(10000, at_least=-1)
    gradient_clip_val: float | None = key(1.0, at_least=0)
    alarms: common.Alarms | None = section()


class CriticCheckpoints(common.CheckpointParams):
    """Which checkpoints are kept, and in what form."""

    save_nemo_on_train_end: Any = inert(False)


def check_critic(values: Values, dp: dict[str, int], ranks: int) -> None:
    server_rules.check_serving(values, "trainer.ppo")
    server_rules.check_reward_standardization(values.get("model"))


CRITIC_JOB = Configuration(
    "gpt_ppo_critic",
    {
        **common.FROM_CHECKPOINT,
        common.PARAMS: CriticCheckpoints,
        "trainer.ppo": CriticServer,
        "server": Server,
        "model": CriticModel,
        "model.peft": model.Peft,
    },
    {
        "trainer.max_epochs": None,
        "exp_manager.name": "megatron_gpt_critic",
        f"{common.PARAMS}.monitor": "step",
        f"{common.PARAMS}.mode": "max",
        f"{common.PARAMS}.save_top_k": 0,
        f"{common.PARAMS}.filename": "megatron_gpt-{step}",
        "model.regression.merge_attributes": True,
    },
    # A critic serves until it is stopped: it has neither a time limit nor an end of training.
    without=frozenset(("trainer.max_time", "exp_manager.max_time_per_run")),
    rules="model.save_hf=true | writes at the end, which a server has not; use every_checkpoint",
    check=check_critic,
)


class RewardModelFile(Section):
    """The model that a reward server serves.

    rm_model_file: the reward model's `.nemo`; with `reward_fn` the `.nemo` whose tokenizer decodes
        (the policy's)
    """

    rm_model_file: str | None = key(None)


class RewardServerModel(model.RewardHead, model.Model):
    """A model that a reward server serves."""

    global_batch_size: Any = inert(0)


class RewardInference(Inference, RewardFunction):
    """A server of rewards.

    micro_batch_size: as for the critic; `inference.micro_batch_size` is the former name of the
        second
    """

    micro_batch_size: Any = key("${model.forward_micro_batch_size}")


def check_reward_server(v: Values, dp: dict[str, int], ranks: int) -> None:
    server_rules.check_serving(v, "inference")
    server_rules.check_reward_standardization(v.get("model"))
    server_rules.check_kind_of_rewards(v, "inference")
    if ranks > 1:
        v.refuse(
            f"""inference.reward_fn!=null | is served by one process, but the job has {ranks}
            ranks; set trainer.devices=1, and more inference.reward_fn_workers if needed"""
        )


REWARD_SERVER_JOB = Configuration(
    "inference_rm",
    {
        "": RewardModelFile,
        "trainer": common.ServerMachines,
        "server": Server,
        "inference": RewardInference,
        "model": RewardServerModel,
    },
    {
        "inference.port": 5555,
        "inference.inference_micro_batch_size": "${.micro_batch_size}",
        "model.forward_micro_batch_size": 4,
        **common.below(
            "model", dict.fromkeys(("output_sequence", "use_avg_pool", "seed"), ABSENT)
        ),
        "model.force_head_dtype": ABSENT,
        **common.TOKENIZER,
        **common.NO_RECOMPUTATION,
    },
    rules="""inference.reward_fn!=null & rm_model_file=null & model.tokenizer.library=null | reads
        text, so it needs the tokenizer of the policy that it judges: set rm_model_file to the
        policy's .nemo, or model.tokenizer""",
    check=check_reward_server,
    restore_key="rm_model_file",
)
