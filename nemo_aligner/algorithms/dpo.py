# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""DPO, IPO, RPO and KTO: the supervised loop, with the reference's log-probs in each batch."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from nemo_aligner.algorithms.supervised import SupervisedTrainer


class DPOTrainer(SupervisedTrainer):
    """Trains a policy on preference pairs; `cfg` is `trainer.dpo`, the others are those of
    `SupervisedTrainer`. `collate_fn` makes a batch of what the loaders yield; None: they do.
    """

    JOB = ("gpt_dpo", "trainer.dpo")

    def __init__(
        self, *args: Any, collate_fn: Callable[..., Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.collate_fn = collate_fn
        if not getattr(self.model, "starts_as_reference", True):
            self.alarms.thresholds.pop("first_rewards", None)

    def train_single_step(self, batch: Any) -> dict[str, float]:
        with self.timer("ref_policy_logprobs_time"):
            batch = self.with_reference(batch)
        return super().train_single_step(batch)

    def validation_step(self, batch: Any) -> tuple[float, Mapping[str, float | Tensor]]:
        return super().validation_step(self.with_reference(batch))

    def with_reference(self, batch: Any) -> Any:
        """`batch` with the reference's log-probs, computed unless the data have them."""
        samples = batch if self.collate_fn is None else self.collate_fn(batch)
        columns = tuple(self.model.REFERENCE_COLUMNS)
        if all(column in samples for column in columns):
            return samples
        logprobs = self.model.get_ref_policy_logprobs(samples).chunk(len(columns))
        return {**samples, **dict(zip(columns, logprobs, strict=True))}


def dpo_custom_collate(batch: list[dict[str, Tensor]], *_args: Any, **_kwargs: Any) -> Any:
    """A `DirectPairBatch` of items of `DPOModelDataset`, or a `LabelledResponseBatch` of those of
    `KTOModelDataset`; the other arguments, NeMo-Aligner's, are not used.
    """
    return default_collate(batch)


kto_custom_collate = dpo_custom_collate


class KTOTrainer(DPOTrainer):
    """Trains a policy on labelled responses; `cfg` is `trainer.kto`, the rest as `DPOTrainer`."""

    JOB = ("gpt_kto", "trainer.kto")
