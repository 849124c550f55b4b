# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`MegatronGPTRSModel`: the policy of rejection sampling, which learns the likelihood of its own
best answers.
"""

from nemo_aligner.core.losses import loss_weights, sft_loss
from nemo_aligner.models.nlp.gpt.megatron_gpt_policy import MegatronGPTPolicyModel
from nemo_aligner.parallel.collectives import sum_over_dp
from nemo_aligner.training.megatron_steps import forward_backward


class MegatronGPTRSModel(MegatronGPTPolicyModel):
    """Policy of rejection sampling on Megatron Core.

    Its log-probs are those of the model itself, at temperature 1, whatever temperature spreads the
    answers that are
    drawn: what is learned is what the model would then say by itself.

    Args:
        cfg: model configuration with a section `rs` (docs/config.md).
        trainer: Lightning trainer.
    """

    SECTION = "rs"

    def get_loss_and_metrics(
        self, batch: dict, forward_only: bool = False
    ) -> tuple[float, dict[str, float]]:
        """Negative log-likelihood (`nemo_aligner.core.losses.sft_loss`) of the answers in a global
        batch, with its gradient unless `forward_only`. All ranks call it, each with its share of
        the rows.

        Args:
            batch: `response_tokens` int64 `[B, S]`; `mask` `[B, S-1]`, non-zero on the answer's
                transitions.

        Returns:
            The loss and the metric `loss` over the global batch, equal on every rank.
        """
        micro_batch_size = self.cfg.micro_batch_size
        rows = {
            "tokens": batch["response_tokens"],
            "weights": loss_weights(
                batch["mask"], self.loss_reduction, micro_batch_size, sum_over_dp
            ),
        }

        def loss_fn(logits, rows):
            logprobs = self.logprobs(logits, rows["tokens"], inference_only=forward_only)
            return sft_loss(logprobs=logprobs, weights=rows["weights"])

        metrics = forward_backward(
            self.model,
            rows,
            micro_batch_size=micro_batch_size,
            loss_fn=loss_fn,
            forward_only=forward_only,
        )
        return metrics["loss"], metrics
