# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Distillation: the teacher, its server and its files."""

from dataclasses import dataclass
from typing import Any

from nemo_aligner.config.data_rules import check_chat, plain_columns
from nemo_aligner.config.fields import ABSENT, Job, inert, key
from nemo_aligner.config.jobs.shared import (
    CHAT_TOKENS,
    NO_LAYERS,
    NO_RECOMPUTATION,
    PARALLEL,
    below,
)
from nemo_aligner.config.keys.common import Pretrained, ServerMachines, Trainer
from nemo_aligner.config.keys.data import Chat, ExampleSet
from nemo_aligner.config.keys.model import Model
from nemo_aligner.config.keys.servers import Inference, Server
from nemo_aligner.config.parallel_rules import virtual_pipeline_group
from nemo_aligner.config.server_rules import check_serving
from nemo_aligner.config.values import Values
from nemo_aligner.core.errors import ConfigError


@dataclass
class TeacherInference(Inference):
    """A teacher's server.

    Attributes:
        top_k: logits of each token, at most the size of the vocabulary
    """

    top_k: int = key(100, at_least=1)


@dataclass
class TeacherModel(Model):
    """A teacher."""

    micro_batch_size: int = key(4, at_least=1, fallback=1)
    megatron_amp_O2: bool = key(True)


def _check_server(values: Values, dp: dict[str, int], ranks: int) -> None:
    check_serving(values, "inference")


@dataclass
class TopKChat(Chat):
    """Conversations of which a teacher gives the logits.

    Attributes:
        one_turn_per_sample: conversations: a chat template (**new**), also of SPIN with a sample
            for each turn, or NeMo's chat format ([data](data.md))
        allow_empty_prompt: as for the actors; `{input: question, output: answer}`
    """

    one_turn_per_sample: bool = key(False)
    allow_empty_prompt: bool = key(False)
    sample: Any = inert(False)
    num_workers: Any = inert(0)
    dataloader_type: Any = inert("single")


@dataclass
class TopKSet(ExampleSet):
    """Examples of which a teacher gives the logits, in their order."""

    max_seq_length: int | None = key(  # type: ignore[assignment]
        "${model.encoder_seq_length}", at_least=2
    )
    shuffle: Any = inert(True)
    drop_last: Any = inert(True)


@dataclass
class TopKModel(Model):
    """A model that reads examples.

    Attributes:
        global_batch_size: examples that are computed and written together
    """

    micro_batch_size: int = key(1, at_least=1, fallback=1)
    global_batch_size: int = key(8, at_least=1)
    megatron_amp_O2: bool = key(True)
    mcore_gpt: Any = inert(True)


@dataclass
class TopKCommand:
    """The command that writes the logits of a teacher.

    Attributes:
        top_k: logits of each token, at most the size of the vocabulary
        output_path: the jsonl file to write
        start_from_idx, end_at_idx: first and last example, which counts too; null: all. Several
            jobs can share the data, each with a file of its own
    """

    top_k: int = key(100, at_least=1)
    output_path: str = key(None)
    start_from_idx: int | None = key(None, at_least=0)
    end_at_idx: int | None = key(None, at_least=0)


def _check_logits(v: Values, dp: dict[str, int], ranks: int) -> None:
    times = dp | virtual_pipeline_group(v)
    v.multiple("model.global_batch_size", "model.micro_batch_size", times=times)
    limit, length = v.get("data.data.max_seq_length"), v.get("model.encoder_seq_length")
    if limit and length and limit > length:
        raise ConfigError(
            f"data.data.max_seq_length={limit} is above model.encoder_seq_length={length}; lower "
            "it."
        )
    plain_columns(v.get("data.data.columns"), "data.data.columns")
    check_chat(v.get("data", {}))


TOP_K_LOGITS = Job(
    "compute_topk_logits",
    {
        "": TopKCommand,
        "trainer": Trainer,
        "pretrained_checkpoint": Pretrained,
        "model": TopKModel,
        "data": TopKChat,
        "data.data": TopKSet,
    },
    {
        **PARALLEL,
        **NO_RECOMPUTATION,
        **NO_LAYERS,
        "model.virtual_pipeline_model_parallel_size": None,
        "trainer.max_epochs": 1,
        "trainer.max_steps": ABSENT,
        "model.encoder_seq_length": None,
        **below("data", CHAT_TOKENS),
        "data.data.columns": None,
    },
    check=_check_logits,
    records="example",
)


TEACHER_SERVER = Job(
    "inference_teacher",
    {
        "trainer": ServerMachines,
        "server": Server,
        "inference": TeacherInference,
        "pretrained_checkpoint": Pretrained,
        "model": TeacherModel,
    },
    {
        **PARALLEL,
        **NO_RECOMPUTATION,
        **NO_LAYERS,
        "model.virtual_pipeline_model_parallel_size": None,
        "inference.model_name": "teacher_logits",
        "inference.max_queue_delay_microseconds": 2000,
        "inference.inference_micro_batch_size": "${model.micro_batch_size}",
    },
    check=_check_server,
)
