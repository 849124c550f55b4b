# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`MegatronGPTRSModel`: the policy of rejection sampling, which learns its own best responses."""

from torch import Tensor

from nemo_aligner.core.losses import loss_weights, sft_loss
from nemo_aligner.core.masks import counted_lengths
from nemo_aligner.core.types import RSTrainBatch
from nemo_aligner.models.nlp.gpt.megatron_gpt_policy import MegatronGPTPolicyModel
from nemo_aligner.parallel.collectives import sum_over_dp
from nemo_aligner.training.megatron_steps import Batch, forward_backward


class MegatronGPTRSModel(MegatronGPTPolicyModel):
    """Policy of rejection sampling on Megatron Core.

    Its log-probs are at temperature 1, whatever the sampling temperature: the loss is the
    likelihood under the model itself.
    """

    CONFIG_NAME = "gpt_rs_actor"
    SECTION = "rs"

    def get_loss_and_metrics(
        self, batch: RSTrainBatch, forward_only: bool = False
    ) -> tuple[float, dict[str, float]]:
        """Negative log-likelihood (`nemo_aligner.core.losses.sft_loss`) of the responses in a
        global batch, and its gradient unless `forward_only`.

        All ranks call it.

        Args:
            batch: this data-parallel rank's share of the global batch.

        Returns:
            The loss and the metric `loss` over the global batch, equal on every rank.
        """
        micro_batch_size = self.cfg.micro_batch_size
        tokens = batch["response_tokens"]
        weights = loss_weights(batch["mask"], self.loss_reduction, micro_batch_size, sum_over_dp)

        def loss_fn(logits: Tensor, micro_batch: Batch) -> tuple[Tensor, Batch]:
            logprobs = self.logprobs(logits, micro_batch["tokens"], inference_only=forward_only)
            return sft_loss(logprobs=logprobs, weights=micro_batch["weights"])

        metrics, _ = forward_backward(
            self.model,
            {"tokens": tokens, "weights": weights},
            micro_batch_size=micro_batch_size,
            loss_fn=loss_fn,
            forward_only=forward_only,
            lengths=counted_lengths(weights, tokens.size(1)),
            micro_batch_tokens=self.micro_batch_tokens,
            keep_order=self.loss_reduction == "microbatch",
        )
        return metrics["loss"], metrics
