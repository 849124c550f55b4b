# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""On-policy distillation (generalized knowledge distillation, arXiv:2306.13649, algorithm 1): the
supervised loop with a served teacher's logits, in a share of the batches on the student's own
responses. Shapes: B samples on this data-parallel rank, S padded length.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.algorithms.supervised import SupervisedTrainer
from nemo_aligner.core.tensors import sample_seeds
from nemo_aligner.core.types import ResponseBatch
from nemo_aligner.generation import GenerationOutput
from nemo_aligner.parallel.collectives import sum_over_dp
from nemo_aligner.parallel.device import get_device
from nemo_aligner.servers.teachers import RemoteTeacherClient


class OnPolicyDistillationTrainer(SupervisedTrainer):
    """Trains a student on what a served `teacher` says of responses; every rank has one.

    Whether an update is on-policy is drawn with probability `fraction` (lambda in the paper) from
    `model.seed` and the step alone, so that a resumed job goes on with the same. The others are
    those of `SupervisedTrainer`, `cfg` is `trainer.knowledge_distillation`.
    """

    JOB = ("gpt_knowledge_distillation", "trainer.knowledge_distillation")

    def __init__(
        self, *args: Any, teacher: RemoteTeacherClient, fraction: float, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.teacher, self.fraction = teacher, fraction
        self.seed = int(self.model.cfg.seed)

    def is_on_policy(self, step: int) -> bool:
        # Samples use streams of index >= 0 of this step.
        number = sample_seeds(self.seed, step, torch.tensor([-2]))[0]
        return float(number) / 2**63 < self.fraction

    def train_single_step(self, batch: ResponseBatch) -> dict[str, float]:
        metrics = {"on_policy": float(self.is_on_policy(self.step))}
        if metrics["on_policy"]:
            with self.timer("generate_time"):
                batch, ended = self.with_own_responses(batch)
            metrics["fraction_of_samples_properly_ended"] = _mean_over_dp(ended.float())
        metrics["response_length"] = _mean_over_dp(batch["loss_mask"].sum(-1))
        with self.timer("teacher_time"):
            with_logits = self.with_logits(batch)
        return self.train_on(with_logits, metrics)

    def validation_step(self, batch: Any) -> tuple[float, Mapping[str, float | Tensor]]:
        return super().validation_step(self.with_logits(batch))

    def with_own_responses(self, batch: ResponseBatch) -> tuple[ResponseBatch, Tensor]:
        """The student's responses to the prompts of `batch`, and whether each ended, bool [B]."""
        lengths = batch["prompt_lengths"]
        generated = self.model.respond(
            batch["tokens"][:, : int(lengths.max())],
            lengths,
            sample_seeds(self.seed, self.step, batch["idx"]),
        )
        return response_batch(batch, generated), generated.is_end

    def with_logits(self, batch: ResponseBatch) -> dict[str, Tensor]:
        longest = int(batch["lengths"].max())
        tokens, labels, mask = (
            batch[key][:, :longest] for key in ("tokens", "labels", "loss_mask")
        )
        logits = self.teacher.logits(tokens, batch["lengths"])
        return {"tokens": tokens, "labels": labels, "loss_mask": mask, **logits._asdict()}


def response_batch(batch: ResponseBatch, generated: GenerationOutput) -> ResponseBatch:
    """`batch` with the generated responses in place of its own; empty slots stay empty."""
    tokens = generated.response_tokens.cpu()
    lengths, prompts = generated.response_lengths.cpu(), batch["prompt_lengths"]
    label = torch.arange(1, tokens.size(1) + 1)  # the position of the label of each column
    counts = (label >= prompts[:, None]) & (label < lengths[:, None])
    counts &= batch["loss_mask"].ne(0).any(-1, keepdim=True)
    return {
        **batch,
        "tokens": tokens,
        "labels": tokens.roll(-1, 1),  # its last column never counts
        "loss_mask": counts.float(),
        "lengths": lengths,
    }


def _mean_over_dp(values: Tensor) -> float:
    """Mean over the samples of all data-parallel ranks; all call it."""
    numbers = torch.tensor([float(values.double().sum()), len(values)], dtype=torch.float64)
    total, count = sum_over_dp(numbers.to(get_device())).tolist()
    return float(total / count)
