# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`MegatronGPTRSModel`: the policy of rejection sampling, which learns its own best responses."""

from nemo_aligner.core.losses import sft_loss
from nemo_aligner.core.types import RSTrainBatch
from nemo_aligner.models.nlp.gpt.megatron_gpt_policy import MegatronGPTPolicyModel


class MegatronGPTRSModel(MegatronGPTPolicyModel):
    """Its log-probs are at temperature 1: the loss is the likelihood under the model."""

    CONFIG_NAME = "gpt_rs_actor"
    SECTION = "rs"

    def get_loss_and_metrics(
        self, batch: RSTrainBatch, forward_only: bool = False
    ) -> tuple[float, dict[str, float]]:
        """Negative log-likelihood (`core.losses.sft_loss`) of the responses in a global batch, and
        its gradient unless `forward_only`; all ranks call it with their share.
        """
        columns = {"tokens": batch["response_tokens"]}
        return self.compute_loss(sft_loss, columns, forward_only, mask=batch["mask"])
