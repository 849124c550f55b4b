# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`MegatronGPTRegressionRewardModel`: learns from numbers that people gave to texts, one per
attribute.

Notation: B texts on this data-parallel rank, S padded length, A attributes.
"""

from omegaconf import DictConfig

from nemo_aligner.core.errors import ConfigError
from nemo_aligner.core.losses import loss_weights, regression_loss
from nemo_aligner.core.metrics import correlation_moments, correlations_from_moments
from nemo_aligner.data.nlp.datasets import DEFAULT_MASK_VALUE
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
from nemo_aligner.parallel.collectives import sum_over_dp
from nemo_aligner.parallel.device import get_device
from nemo_aligner.training.megatron_steps import forward_backward


class MegatronGPTRegressionRewardModel(MegatronGPTRewardModel):
    """Reward model for labels: A numbers for each text.

    `infer` gives [N, A], or with `regression.merge_attributes` their weighted sum [N, 1], which is
    what PPO and RS use.

    Args:
        cfg: as `MegatronGPTRewardModel`'s, and `regression.{loss_mask_val, loss_func}`.
            `reward_standardization` is
            refused: the scale of the rewards is that of the labels.
        trainer: Lightning trainer.
    """

    def __init__(self, cfg: DictConfig, trainer=None):
        loss_func = (cfg.get("regression") or {}).get("loss_func", None)
        if loss_func not in (None, "regression"):
            raise ConfigError(
                f"model.regression.loss_func={loss_func!r} is not supported; use regression (mean "
                "squared error)."
            )
        if (cfg.get("reward_standardization") or {}).get("enable", False):
            raise ConfigError(
                "model.reward_standardization.enable=True does not go with a regression reward "
                "model, whose rewards "
                "have the scale of its labels; set it to False "
                "(model.regression.attribute_weights scale them)."
            )
        super().__init__(cfg, trainer=trainer)
        mask_value = (self.cfg.get("regression") or {}).get("loss_mask_val", None)
        self.loss_mask_val = DEFAULT_MASK_VALUE if mask_value is None else mask_value

    @classmethod
    def _check_attributes(cls, cfg: DictConfig) -> None:
        if (cfg.get("regression") or {}).get("merge_attributes", False):
            raise ConfigError(
                "model.regression.merge_attributes=True merges the attributes before they can be "
                "compared with their "
                "labels; set it to False for training, and to True where the rewards are served."
            )

    def get_loss_and_metrics(
        self, batch: dict, forward_only: bool = False
    ) -> tuple[float, dict[str, float]]:
        """Squared error of a global batch, and its gradient unless `forward_only`; all ranks call
        it.

        Args:
            batch: a `RegressionBatch`: `inputs` int64 [B, S], `lengths` int64 [B], `labels` f32
                [B, A], `loss_mask` [B, S], all zero where a text must not count. A label equal to
                `loss_mask_val` does not count.

        Returns:
            The loss and, over the labels that count: `loss`, `weights` (how many) and the moments
            that `summarize_metrics` makes the correlation of.
        """
        labels = batch["labels"]
        valid = labels.ne(self.loss_mask_val) & batch["loss_mask"].ne(0).any(dim=-1, keepdim=True)
        rows = {
            "tokens": batch["inputs"][:, : int(batch["lengths"].max())],  # the rest is padding
            "lengths": batch["lengths"],
            "labels": labels,
            "weights": loss_weights(valid.to(get_device()), sum_over_dp=sum_over_dp),
        }

        def loss_fn(rewards, rows):
            values = {"predictions": rewards, "labels": rows["labels"], "weights": rows["weights"]}
            loss, metrics = regression_loss(**values)
            return loss, metrics | correlation_moments(**values)

        metrics = forward_backward(
            self.model,
            rows,
            micro_batch_size=self.cfg.micro_batch_size,
            loss_fn=loss_fn,
            forward_only=forward_only,
            model_inputs=("lengths",),
        )
        metrics["weights"] = float(sum_over_dp(valid.sum().to(get_device())))
        return metrics["loss"], metrics

    def summarize_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Moments become `correlation` (see `metrics.correlations_from_moments`)."""
        return correlations_from_moments(metrics)
