# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Kahneman-Tversky optimization (KTO): the loop of DPO over single responses, each of them
desirable or not.
"""

from torch import Tensor
from torch.utils.data import default_collate

from nemo_aligner.algorithms.dpo import DPOTrainer
from nemo_aligner.core.types import LabelledResponseBatch


class KTOTrainer(DPOTrainer):
    """Trains a policy on responses with labels.

    The arguments are those of `DPOTrainer`, `cfg` is `trainer.kto`; missing keys take their values
    from `conf/gpt_kto.yaml`.
    """

    JOB = ("gpt_kto", "trainer.kto")


def kto_custom_collate(
    batch: list[dict[str, Tensor]],
    eos_id: int = 0,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
) -> LabelledResponseBatch:
    """A batch of items of `KTOModelDataset`, by NeMo-Aligner's name and with its arguments, which
    are not used: items are padded, and attention is causal.
    """
    samples: LabelledResponseBatch = default_collate(batch)
    return samples
