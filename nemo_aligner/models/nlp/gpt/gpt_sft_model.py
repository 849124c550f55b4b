# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`GPTSFTModel`: supervised fine-tuning, the language-model loss on the answers."""

import torch
from omegaconf import DictConfig

from nemo_aligner.core.losses import loss_count, loss_weights, sft_loss
from nemo_aligner.models.alignable_interface import SupervisedInterface
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.parallel.collectives import sum_over_dp
from nemo_aligner.parallel.device import get_device
from nemo_aligner.parallel.vocab_parallel import from_parallel_logits_to_logprobs
from nemo_aligner.training.megatron_steps import forward_backward


class GPTSFTModel(MegatronGPTModel, SupervisedInterface):
    """Learns to give the answers of a data set.

    Its loss is the mean over all answer tokens of the global batch, or what else `loss_reduction`
    of the configuration names (`nemo_aligner.core.losses.loss_weights`).
    """

    def __init__(self, cfg: DictConfig, trainer=None):
        super().__init__(cfg, trainer=trainer)
        self.loss_reduction = self.cfg.get("loss_reduction", None) or "token"

    def get_loss_and_metrics(
        self, batch: dict, forward_only: bool = False
    ) -> tuple[float, dict[str, float]]:
        """Negative log-likelihood of a global batch, and its gradient unless `forward_only`; all
        ranks call it.

        Args:
            batch: `tokens`, `labels` int64 [B, S] (the token that follows), `loss_mask` [B, S],
                non-zero where the label counts.

        Returns:
            The loss, and `loss` and `weights` (number of tokens that count, or of what
            `loss_reduction` takes the mean of) over the global batch.
        """
        mask = batch["loss_mask"].to(get_device())
        micro_batch_size = self.cfg.micro_batch_size
        rows = {
            "tokens": batch["tokens"],
            "labels": batch["labels"],
            "weights": loss_weights(mask, self.loss_reduction, micro_batch_size, sum_over_dp),
        }

        def loss_fn(logits, rows):
            logprobs = from_parallel_logits_to_logprobs(
                logits,
                rows["labels"],
                inference_only=forward_only,
                ignore_last=False,
                # As in sampling: the padding of the vocabulary is no token.
                vocab_size=self.tokenizer.vocab_size,
                overwrite_logits=True,  # nothing else needs them
            )
            return sft_loss(logprobs=logprobs, weights=rows["weights"])

        metrics = forward_backward(
            self.model,
            rows,
            micro_batch_size=micro_batch_size,
            loss_fn=loss_fn,
            forward_only=forward_only,
        )
        count = torch.tensor(
            loss_count(mask, self.loss_reduction, micro_batch_size), dtype=torch.float64
        )
        metrics["weights"] = float(sum_over_dp(count.to(get_device())))
        return metrics["loss"], metrics
