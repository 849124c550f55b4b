# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`MegatronGPTReinforceActorModel`: the policy of REINFORCE, with the weights of the reference
policy in host memory.
"""

from lightning.pytorch import Trainer
from omegaconf import DictConfig
from torch import Tensor

from nemo_aligner.core.advantages import spread_over_response
from nemo_aligner.core.losses import loss_weights, reinforce_loss
from nemo_aligner.core.masks import counted_lengths
from nemo_aligner.core.types import ReinforceTrainBatch
from nemo_aligner.models.alignable_interface import PolicyWithReference
from nemo_aligner.models.nlp.gpt.megatron_gpt_policy import MegatronGPTPolicyModel
from nemo_aligner.models.nlp.gpt.reference_policy import ReferencePolicyMixin
from nemo_aligner.parallel.collectives import sum_over_dp
from nemo_aligner.training.megatron_steps import Batch, forward_backward


class MegatronGPTReinforceActorModel(
    ReferencePolicyMixin, MegatronGPTPolicyModel, PolicyWithReference
):
    """Policy of REINFORCE on Megatron Core; section `model` of `gpt_reinforce_actor.yaml`."""

    CONFIG_NAME = "gpt_reinforce_actor"
    SECTION = "reinforce"
    without_reference = ", or set trainer.reinforce.initial_policy_kl_penalty=0"

    def __init__(self, cfg: DictConfig, trainer: Trainer | None = None):
        super().__init__(cfg, trainer=trainer)
        self.take_logprobs_as_sampled()

    def get_loss_and_metrics(
        self, batch: ReinforceTrainBatch, forward_only: bool = False
    ) -> tuple[float, dict[str, float]]:
        """REINFORCE loss (`nemo_aligner.core.losses.reinforce_loss`) of a global batch, and its
        gradient unless `forward_only`.

        Only samples whose response ended (`is_end`) count. All ranks call it.

        Returns:
            The loss and the metric `loss` over the global batch, equal on every rank.
        """
        micro_batch_size = self.cfg.micro_batch_size
        tokens = batch["response_tokens"]
        mask = batch["mask"] * batch["is_end"].unsqueeze(-1)
        weights = loss_weights(mask, self.loss_reduction, micro_batch_size, sum_over_dp)
        advantages = spread_over_response(batch["rewards_with_kl"] - batch["baseline"], mask)

        def loss_fn(logits: Tensor, micro_batch: Batch) -> tuple[Tensor, Batch]:
            return reinforce_loss(
                logprobs=self.logprobs(logits, micro_batch["tokens"], inference_only=forward_only),
                advantages=micro_batch["advantages"],
                weights=micro_batch["weights"],
            )

        metrics, _ = forward_backward(
            self.model,
            {"tokens": tokens, "advantages": advantages, "weights": weights},
            micro_batch_size=micro_batch_size,
            loss_fn=loss_fn,
            forward_only=forward_only,
            lengths=counted_lengths(weights, tokens.size(1)),
            micro_batch_tokens=self.micro_batch_tokens,
            keep_order=self.loss_reduction == "microbatch",
        )
        return metrics["loss"], metrics
