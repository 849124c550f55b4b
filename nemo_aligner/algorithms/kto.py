# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Kahneman-Tversky optimization (KTO): DPO's loop over responses that are desirable or not."""

from torch import Tensor
from torch.utils.data import default_collate

from nemo_aligner.algorithms.dpo import DPOTrainer
from nemo_aligner.core.types import LabelledResponseBatch


class KTOTrainer(DPOTrainer):
    """Trains a policy on labelled responses; `cfg` is `trainer.kto`, the rest as `DPOTrainer`."""

    JOB = ("gpt_kto", "trainer.kto")


def kto_custom_collate(
    batch: list[dict[str, Tensor]],
    eos_id: int = 0,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
) -> LabelledResponseBatch:
    """A batch of items of `KTOModelDataset`; the other arguments, NeMo-Aligner's, are not used."""
    samples: LabelledResponseBatch = default_collate(batch)
    return samples
