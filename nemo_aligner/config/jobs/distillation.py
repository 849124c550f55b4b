# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Distillation: the student, the teacher's server and its files."""

from typing import Any

from nemo_aligner.config import data_rules
from nemo_aligner.config.fields import ABSENT, Configuration, Section, inert, key, section
from nemo_aligner.config.jobs.servers import Inference, Server
from nemo_aligner.config.keys import common, rollouts
from nemo_aligner.config.keys.data import ExampleChat, ExampleSet, Lines
from nemo_aligner.config.keys.model import Model, PolicyPeft, TrainedModel
from nemo_aligner.config.parallel_rules import virtual_pipeline_group
from nemo_aligner.config.rollout_rules import check_generation, check_remote
from nemo_aligner.config.server_rules import check_serving, read_teacher
from nemo_aligner.config.values import Values
from nemo_aligner.core import estimators
from nemo_aligner.core.errors import ConfigError


class KDAlarms(common.Alarms):
    """Alarms of distillation."""

    teacher_mass: float | None = key(0.5, at_least=0, at_most=1)
    truncated_fraction: float | None = key(0.9, at_least=0, at_most=1)


class OnPolicy(Section):
    """Responses of the student's own.

    fraction: **new**: share of the updates that learn from the student's own responses; a served
        teacher then gives the logits of all updates
        ([distillation](algorithms.md#on-policy-distillation)). null: the data have them
    rollout_micro_batch_size: **new**: responses that a rank generates together, which bounds the
        memory of their cached keys; another takes the place of one that has ended. null: its whole
        share of the global batch
    """

    fraction: float | None = key(None, at_least=0, at_most=1)
    rollout_micro_batch_size: int | None = key(None, at_least=1)
    sampling_params: rollouts.SamplingParams = section()
    length_params: rollouts.LengthParams = section()


class Student(TrainedModel):
    """The student.

    loss_reduction: **new**, as for SFT
    """

    loss_reduction: str = key("token", choices=estimators.LOSS_REDUCTIONS)


class Distillation(Section):
    """Distillation.

    kd_loss: `fwd_kl`, `bwd_kl` or (**new**) `jsd`
    jsd_beta: **new**: of `jsd`: share of the teacher in the mixture, above 0 and below 1
    outside_top_k: **new**: `renormalize`: as if only top-k tokens could come; `bucket`: all others
        are one outcome
    logits_scale, target_logits_scale: factors of the logits of student and teacher
    kd_loss_weight, sft_loss_weight: weights of the divergence and of the negative log-likelihood
        of the responses
    cross_tokenizer: True is refused
    """

    kd_loss: str = key("fwd_kl", choices=estimators.DISTILLATION_LOSSES)
    jsd_beta: float = key(0.5)
    outside_top_k: str = key("renormalize", choices=estimators.OUTSIDE_TOP_K)
    logits_scale: float = key(1.0, above=0)
    target_logits_scale: float = key(1.0, above=0)
    kd_loss_weight: float = key(1.0, at_least=0)
    sft_loss_weight: float = key(0.0, at_least=0)
    cross_tokenizer: bool = key(False)
    on_policy: OnPolicy = section()


class TeacherLines(Lines):
    """Data with a teacher's logits.

    top_k: logits of each token that count; null: all in the files
    n_chunks: files that a name with CHUNK_ID stands for, a number or one for each part; the second
        has no effect
    """

    top_k: int | None = key(None, at_least=1)
    n_chunks: Any = key(None, free=True)
    n_examples_per_chunk: Any = inert(None)


def check_candidates(top_k: int, outside_top_k: str, sft_loss_weight: float) -> None:
    """Raise `ConfigError` if a student could learn nothing from `top_k` logits of each token."""
    if top_k == 1 and outside_top_k == "renormalize" and not sft_loss_weight:
        raise ConfigError(
            "model.knowledge_distillation.outside_top_k=renormalize makes the probability of the "
            "one logit of each token 1: nothing would be learned. Give more, or set bucket."
        )


_STUDENT_RULES = """
OWN.jsd_beta<=0 or OWN.jsd_beta>=1 | must be above 0 and below 1 (kd_loss=fwd_kl, bwd_kl)
OWN.outside_top_k=bucket & OWN.target_logits_scale!=1 | needs OWN.target_logits_scale=1, not {}:
    what the teacher gives other tokens is known at this scale only; set renormalize or 1
model.data.top_k & OWN.on_policy.fraction!=null | is for logits of files; with {} a served teacher
    gives them; set inference.top_k of its server in place of it
OWN.on_policy.fraction>0 & OWN.outside_top_k!=bucket | goes wrong by tokens outside the teacher's
    top k, which {} leaves out of the loss; set it to bucket
OWN.on_policy.fraction>0 & OWN.sft_loss_weight | would make the student's own responses more
    likely, whatever they are, by {}; set it to 0
model.data.data_impl=mmap|packed_jsonl | holds tokens only; give those with logits
"""


def check_student(v: Values, dp: dict[str, int], ranks: int) -> None:
    own = "model.knowledge_distillation."
    check_generation(v, f"{own}on_policy.")
    if v.has(f"{own}on_policy.fraction"):
        check_remote(v, "remote_teacher")
        read_teacher(v.get("remote_teacher"))
    if v.has("model.data.top_k"):
        given = (v.get(own + key) for key in ("outside_top_k", "sft_loss_weight"))
        check_candidates(v.get("model.data.top_k"), *given)


STUDENT_JOB = Configuration(
    "gpt_knowledge_distillation",
    {
        "": common.Named,
        **common.FROM_CHECKPOINT,
        "trainer.knowledge_distillation": common.SupervisedLoop,
        "trainer.knowledge_distillation.alarms": KDAlarms,
        "remote_teacher": rollouts.RemoteTeacher,
        "model": Student,
        "model.knowledge_distillation": Distillation,
        "model.peft": PolicyPeft,
        "model.data": TeacherLines,
    },
    {
        **common.NEW_DATA,
        **common.OF_SFT,
        "name": "megatron_gpt_knowledge_distillation",
        "model.data.data_impl": "chunked_jsonl",
        "model.data.append_eod": False,
        **common.DATALOADER,
        **common.below("model.data", common.CHAT_TOKENS),
    },
    rules=f"{_STUDENT_RULES}OWN.kd_loss_weight=0 & OWN.sft_loss_weight=0 | {common.BOTH_0}",
    check=check_student,
    records="logits",
)


class TeacherInference(Inference):
    """A teacher's server.

    top_k: logits of each token, at most the size of the vocabulary
    """

    top_k: int = key(100, at_least=1)


class TopKChat(ExampleChat):
    """Conversations of which a teacher gives the logits."""

    num_workers: Any = inert(0)


class TopKSet(ExampleSet):
    """Examples of which a teacher gives the logits, in their order."""

    max_seq_length: int | None = key(  # type: ignore[assignment]
        "${model.encoder_seq_length}", at_least=2
    )
    shuffle: Any = inert(True)
    drop_last: Any = inert(True)


class TopKModel(Model):
    """A model that reads examples.

    global_batch_size: examples that are computed and written together
    """

    micro_batch_size: int = key(1, at_least=1, fallback=1)
    global_batch_size: int = key(8, at_least=1)
    megatron_amp_O2: bool = key(True)
    mcore_gpt: Any = inert(True)


class TopKCommand(Section):
    """The command that writes the logits of a teacher.

    top_k: logits of each token, at most the size of the vocabulary
    output_path: the jsonl file to write
    start_from_idx, end_at_idx: first and last example, which counts too; null: all. Several jobs
        can share the data, each with a file of its own
    """

    top_k: int = key(100, at_least=1)
    output_path: str = key(None)
    start_from_idx: int | None = key(None, at_least=0)
    end_at_idx: int | None = key(None, at_least=0)


def _check_logits(v: Values, dp: dict[str, int], ranks: int) -> None:
    times = dp | virtual_pipeline_group(v)
    v.multiple("model.global_batch_size", "model.micro_batch_size", times=times)
    v.at_most("data.data.max_seq_length", "model.encoder_seq_length")
    data_rules.plain_columns(v.get("data.data.columns"), "data.data.columns")
    data_rules.check_chat(v.get("data", {}))


_OF_TEACHER = {
    **common.PARALLEL,
    **common.NO_RECOMPUTATION,
    **common.NO_LAYERS,
    "model.virtual_pipeline_model_parallel_size": None,
}

TOP_K_LOGITS = Configuration(
    "compute_topk_logits",
    {
        "": TopKCommand,
        "trainer": common.Trainer,
        "pretrained_checkpoint": common.Pretrained,
        "model": TopKModel,
        "data": TopKChat,
        "data.data": TopKSet,
    },
    {
        **_OF_TEACHER,
        "trainer.max_epochs": 1,
        "trainer.max_steps": ABSENT,
        "model.encoder_seq_length": None,
        **common.below("data", common.CHAT_TOKENS),
        "data.data.columns": None,
    },
    check=_check_logits,
    records="example",
)


TEACHER_SERVER = Configuration(
    "inference_teacher",
    {
        "trainer": common.ServerMachines,
        "server": Server,
        "inference": TeacherInference,
        "pretrained_checkpoint": common.Pretrained,
        "model": Model,
    },
    {
        **_OF_TEACHER,
        "model.micro_batch_size": 4,
        "model.megatron_amp_O2": True,
        "inference.model_name": "teacher_logits",
        "inference.max_queue_delay_microseconds": 2000,
        "inference.inference_micro_batch_size": "${model.micro_batch_size}",
    },
    required=frozenset(("model.micro_batch_size",)),
    check=lambda v, dp, ranks: check_serving(v, "inference"),
)
