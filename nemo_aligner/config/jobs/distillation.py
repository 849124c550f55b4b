# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Distillation: the student."""

from dataclasses import dataclass
from typing import Any

from nemo_aligner.config.data_rules import holds_tokens
from nemo_aligner.config.fields import Job, inert, key, section
from nemo_aligner.config.jobs.shared import CHAT_TOKENS, DATALOADER, NEW_DATA, OF_SFT, below
from nemo_aligner.config.keys.common import (
    Alarms,
    ExpManager,
    Named,
    Pretrained,
    SupervisedLoop,
    Trainer,
)
from nemo_aligner.config.keys.data import Lines
from nemo_aligner.config.keys.model import PolicyPeft, TrainedModel
from nemo_aligner.config.keys.preferences import check_not_both_0
from nemo_aligner.config.keys.rollouts import LengthParams, SamplingParams
from nemo_aligner.config.reward_models import read_teacher
from nemo_aligner.config.rollout_rules import check_generation, check_remote
from nemo_aligner.config.values import Values
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.core.estimators import DISTILLATION_LOSSES, LOSS_REDUCTIONS, OUTSIDE_TOP_K


@dataclass
class KDAlarms(Alarms):
    """Alarms of distillation.

    Attributes:
        teacher_mass, truncated_fraction: **new**: thresholds of alarms, see
            [metrics.md](metrics.md); null switches one off
    """

    teacher_mass: float | None = key(0.5, at_least=0, at_most=1)
    truncated_fraction: float | None = key(0.9, at_least=0, at_most=1)


@dataclass
class OnPolicy:
    """Responses of the student's own.

    Attributes:
        fraction: **new**: share of the updates that learn from the student's own responses; a
            served teacher then gives the logits of all updates
            ([distillation.md](distillation.md#on-policy)). null: the data have them
        rollout_micro_batch_size: **new**: responses that a rank generates together, which bounds
            the memory of their cached keys; another takes the place of one that has ended. null:
            its whole share of the global batch
    """

    fraction: float | None = key(None, at_least=0, at_most=1)
    rollout_micro_batch_size: int | None = key(None, at_least=1)
    sampling_params: SamplingParams = section()
    length_params: LengthParams = section()


@dataclass
class Student:
    """The student.

    Attributes:
        loss_reduction: **new**, as for SFT
    """

    loss_reduction: str = key("token", choices=LOSS_REDUCTIONS)


@dataclass
class Distillation:
    """Distillation.

    Attributes:
        kd_loss: `fwd_kl`, `bwd_kl` or (**new**) `jsd`
        jsd_beta: **new**: of `jsd`: share of the teacher in the mixture, above 0 and below 1
        outside_top_k: **new**: `renormalize`: as if only top-k tokens could come; `bucket`: all
            others are one outcome
        logits_scale, target_logits_scale: factors of the logits of student and teacher
        kd_loss_weight, sft_loss_weight: weights of the divergence and of the negative
            log-likelihood of the responses
        cross_tokenizer: True is refused
    """

    kd_loss: str = key("fwd_kl", choices=DISTILLATION_LOSSES)
    jsd_beta: float = key(0.5)
    outside_top_k: str = key("renormalize", choices=OUTSIDE_TOP_K)
    logits_scale: float = key(1.0, above=0)
    target_logits_scale: float = key(1.0, above=0)
    kd_loss_weight: float = key(1.0, at_least=0)
    sft_loss_weight: float = key(0.0, at_least=0)
    cross_tokenizer: bool = key(False)
    on_policy: OnPolicy = section()


@dataclass
class RemoteTeacher:
    """The teacher's server.

    Attributes:
        host, port, name: **new**: of `on_policy`: where the teacher is served; lists of hosts or
            ports are a fleet
        init_timeout_s, inference_timeout_s, token_file, tls_ca_file: **new**: as for `remote_rm`
    """

    host: Any = key("localhost", required=True)
    port: Any = key(5556, required=True)
    name: str = key("teacher_logits")
    init_timeout_s: float = key(600, above=0)
    inference_timeout_s: float = key(3600, above=0)
    token_file: str | None = key(None)
    tls_ca_file: str | None = key(None)


@dataclass
class TeacherLines(Lines):
    """Data with a teacher's logits.

    Attributes:
        top_k: logits of each token that count; null: all in the files
        n_chunks: files that a name with CHUNK_ID stands for, a number or one for each part; the
            second has no effect
    """

    top_k: int | None = key(None, at_least=1)
    n_chunks: Any = key(None, free=True)
    n_examples_per_chunk: Any = inert(None)


def check_candidates(top_k: int, outside_top_k: str, sft_loss_weight: float) -> None:
    """Raise `ConfigError` if a student could learn nothing from `top_k` logits of each token."""
    if top_k == 1 and outside_top_k == "renormalize" and not sft_loss_weight:
        raise ConfigError(
            "the teacher gives one logit of each token, and "
            "model.knowledge_distillation.outside_top_k=renormalize makes its probability 1 for "
            "teacher and student: nothing would be learned. Give more logits, or set "
            "outside_top_k=bucket."
        )


def check(values: Values, dp: dict[str, int], ranks: int) -> None:
    own = "model.knowledge_distillation."
    check_not_both_0(values, [f"{own}kd_loss_weight", f"{own}sft_loss_weight"])
    beta = values.get(f"{own}jsd_beta")
    if not 0 < beta < 1:
        raise ConfigError(
            f"{own}jsd_beta={beta} must be above 0 and below 1; its limits are kd_loss=fwd_kl and "
            "bwd_kl."
        )
    scale = values.get(f"{own}target_logits_scale")
    if values.get(f"{own}outside_top_k") == "bucket" and scale != 1:
        raise ConfigError(
            f"{own}outside_top_k=bucket needs {own}target_logits_scale=1, not {scale}: what the "
            "teacher gives other tokens is known at this scale only; set renormalize or 1."
        )
    _check_on_policy(values)
    top_k = values.get("model.data.top_k")
    if top_k is not None:
        check_candidates(
            top_k, values.get(f"{own}outside_top_k"), values.get(f"{own}sft_loss_weight")
        )
    data_impl = str(values.get("model.data.data_impl"))
    if holds_tokens(data_impl):
        raise ConfigError(
            f"model.data.data_impl={data_impl} holds tokens only; give the jsonl files that "
            "compute_topk_logits.py wrote."
        )


def _check_on_policy(v: Values) -> None:
    """Check how a student responds itself (`model.knowledge_distillation.on_policy`), if it does,
    and its served teacher.
    """
    section, remote = "model.knowledge_distillation.on_policy.", "remote_teacher"
    check_generation(v, section)
    if v.get(section + "fraction") is None:
        return
    check_remote(v, remote)
    read_teacher(v.get(remote), remote)
    if v.get("model.data.top_k") is not None:
        raise ConfigError(
            f"model.data.top_k={v.get('model.data.top_k')} chooses among the logits of data "
            f"files, but with {section}fraction={v.get(section + 'fraction')} a served teacher "
            "gives them; set inference.top_k of its server, and leave it null."
        )
    if v.get(section + "fraction") > 0:
        _check_loss_of_own_responses(v, "model.knowledge_distillation.", section)


def _check_loss_of_own_responses(v: Values, loss: str, section: str) -> None:
    """Check that a student can unlearn what it does by itself."""
    own = f"with {section}fraction={v.get(section + 'fraction')} a student"
    outside, weight = v.get(loss + "outside_top_k"), v.get(loss + "sft_loss_weight")
    if outside != "bucket":
        raise ConfigError(
            f"{own} goes wrong by tokens outside the teacher's top k, and "
            f"{loss}outside_top_k={outside} leaves them out of the loss; set it to bucket."
        )
    if weight:
        raise ConfigError(
            f"{own} would make its own responses more likely, whatever they are, by "
            f"{loss}sft_loss_weight={weight}; set it to 0."
        )


JOB = Job(
    "gpt_knowledge_distillation",
    {
        "": Named,
        "trainer": Trainer,
        "trainer.knowledge_distillation": SupervisedLoop,
        "trainer.knowledge_distillation.alarms": KDAlarms,
        "remote_teacher": RemoteTeacher,
        "exp_manager": ExpManager,
        "pretrained_checkpoint": Pretrained,
        "model": (TrainedModel, Student),
        "model.knowledge_distillation": Distillation,
        "model.peft": PolicyPeft,
        "model.data": TeacherLines,
    },
    {
        **NEW_DATA,
        **OF_SFT,
        "name": "megatron_gpt_knowledge_distillation",
        "model.data.data_impl": "chunked_jsonl",
        "model.data.append_eod": False,
        **DATALOADER,
        **below("model.data", CHAT_TOKENS),
    },
    check=check,
    records="logits",
)
