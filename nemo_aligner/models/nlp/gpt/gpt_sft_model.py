# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`GPTSFTModel`: supervised fine-tuning, the language-model loss on the responses."""

import torch
from lightning.pytorch import Trainer
from omegaconf import DictConfig
from torch import Tensor

from nemo_aligner.core.losses import loss_count, loss_weights, sft_loss
from nemo_aligner.core.types import SFTBatch
from nemo_aligner.models.alignable_interface import SupervisedInterface
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.parallel.collectives import sum_over_dp
from nemo_aligner.parallel.device import get_device
from nemo_aligner.parallel.vocab_parallel import from_parallel_logits_to_logprobs
from nemo_aligner.training.megatron_steps import Batch, forward_backward


class GPTSFTModel(MegatronGPTModel, SupervisedInterface):
    """Language model that learns the responses of a data set.

    The loss is the mean over the response tokens of the global batch, or over what
    `model.loss_reduction` names (`nemo_aligner.core.losses.loss_weights`).

    Args:
        cfg: section `model` of `gpt_sft.yaml` (docs/config.md).
        trainer: Lightning trainer.
    """

    CONFIG_NAME = "gpt_sft"

    def __init__(self, cfg: DictConfig, trainer: Trainer | None = None):
        super().__init__(cfg, trainer=trainer)
        self.loss_reduction: str = self.cfg.loss_reduction

    def get_loss_and_metrics(
        self, batch: SFTBatch, forward_only: bool = False
    ) -> tuple[float, dict[str, float]]:
        """Negative log-likelihood of a global batch, and its gradient unless `forward_only`.

        All ranks call it.

        Args:
            batch: this data-parallel rank's share of the global batch.
            forward_only: compute no gradient.

        Returns:
            The loss and, over the global batch, `loss` and `weights`: how many tokens count, or
            how many of what `loss_reduction` averages over.
        """
        mask = batch["loss_mask"].to(get_device())
        micro_batch_size = self.cfg.micro_batch_size
        inputs = {
            "tokens": batch["tokens"],
            "labels": batch["labels"],
            "weights": loss_weights(mask, self.loss_reduction, micro_batch_size, sum_over_dp),
        }

        def loss_fn(logits: Tensor, micro_batch: Batch) -> tuple[Tensor, Batch]:
            logprobs = from_parallel_logits_to_logprobs(
                logits,
                micro_batch["labels"],
                inference_only=forward_only,
                ignore_last=False,
                # As in sampling: ids in the padding of the vocabulary are not tokens.
                vocab_size=self.tokenizer.vocab_size,
                overwrite_logits=True,  # nothing else needs them
            )
            return sft_loss(logprobs=logprobs, weights=micro_batch["weights"])

        metrics, _ = forward_backward(
            self.model,
            inputs,
            micro_batch_size=micro_batch_size,
            loss_fn=loss_fn,
            forward_only=forward_only,
        )
        count = torch.tensor(
            loss_count(mask, self.loss_reduction, micro_batch_size), dtype=torch.float64
        )
        metrics["weights"] = float(sum_over_dp(count.to(get_device())))
        return metrics["loss"], metrics
