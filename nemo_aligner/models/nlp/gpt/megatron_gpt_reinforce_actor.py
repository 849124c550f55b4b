# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`MegatronGPTReinforceActorModel`: the policy of REINFORCE, with its reference policy."""

from lightning.pytorch import Trainer
from omegaconf import DictConfig

from nemo_aligner.core.advantages import spread_over_response
from nemo_aligner.core.losses import reinforce_loss
from nemo_aligner.core.types import ReinforceTrainBatch
from nemo_aligner.models.alignable_interface import PolicyWithReference
from nemo_aligner.models.nlp.gpt.log_probs import ReferencePolicyMixin
from nemo_aligner.models.nlp.gpt.megatron_gpt_policy import MegatronGPTPolicyModel


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
        """REINFORCE loss (`reinforce_loss`) of a global batch, over samples whose response ended
        (`is_end`), and its gradient unless `forward_only`; all ranks call it with their share.
        """
        mask = batch["mask"] * batch["is_end"].unsqueeze(-1)
        columns = {
            "tokens": batch["response_tokens"],
            "advantages": spread_over_response(batch["rewards_with_kl"] - batch["baseline"], mask),
        }
        return self.compute_loss(reinforce_loss, columns, forward_only, mask=mask)
