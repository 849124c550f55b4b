# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Kahneman-Tversky optimization (KTO): the loop of DPO over single responses, each of them
desirable or not.
"""

from typing import Any

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

    def with_reference(self, batch: Any) -> Any:
        """`batch` with the log-probs of the reference policy."""
        samples = batch if self.collate_fn is None else self.collate_fn(batch)
        own, mismatched = self.model.get_ref_policy_logprobs(samples).chunk(2)
        return {
            **samples,
            "ref_policy_log_probs_samples": own,
            "ref_policy_log_probs_kl_samples": mismatched,
        }


def kto_custom_collate(
    batch: list[dict[str, Tensor]],
    eos_id: int = 0,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
) -> LabelledResponseBatch:
    """A batch of items of `KTOModelDataset`, by NeMo-Aligner's name.

    Args:
        eos_id, reset_position_ids, reset_attention_mask, eod_mask_loss: not used: the items are
            padded and hold their mismatched samples, and attention is causal.
    """
    samples: LabelledResponseBatch = default_collate(batch)
    return samples
