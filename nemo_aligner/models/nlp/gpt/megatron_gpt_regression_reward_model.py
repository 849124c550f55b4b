# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`MegatronGPTRegressionRewardModel`: learns people's labels of samples, one number per attribute,
or which of two samples they preferred and how much; and which class is for which kind of reward
model (`model.reward_model_type`).

Notation: B samples (or pairs) on this data-parallel rank, S padded length, A attributes.
"""

from collections.abc import Mapping

from lightning.pytorch import Trainer
from omegaconf import DictConfig
from torch import Tensor

from nemo_aligner.config.jobs.reward_model import RewardModelType, reward_model_type, training_loss
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.core.estimators import PREFERENCE_LOSSES
from nemo_aligner.core.losses import loss_weights, regression_loss
from nemo_aligner.core.masks import lengths_before
from nemo_aligner.core.metrics import correlation_moments, correlations_from_moments
from nemo_aligner.core.types import LabelledPairBatch, RegressionBatch
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
from nemo_aligner.parallel.collectives import sum_over_dp
from nemo_aligner.parallel.device import get_device
from nemo_aligner.training.megatron_steps import Batch

# The metric that holds the moments of the correlation, float64 [6, A], until `summarize_metrics`.
MOMENTS = "moments"

# The attribute that pairs are compared by, if there are several: NeMo-Aligner's (helpfulness).
COMPARED_ATTRIBUTE = 4


class MegatronGPTRegressionRewardModel(MegatronGPTRewardModel):
    """Reward model with A attributes, trained on labels; with one of
    `estimators.PREFERENCE_LOSSES` as `regression.loss_func` on pairs with a preference. `infer`
    returns [N, A]; with `regression.merge_attributes` their weighted sum [N, 1]. `cfg`: as for
    `MegatronGPTRewardModel`, without `reward_standardization`.
    """

    def __init__(self, cfg: DictConfig, trainer: Trainer | None = None):
        super().__init__(cfg, trainer=trainer)
        self.loss_mask_val: float = self.cfg.regression.loss_mask_val
        if training_loss(self.cfg) in PREFERENCE_LOSSES:
            self.pair_loss = training_loss(self.cfg)
            # Sizes of batches count samples, as in NeMo-Aligner; a pair is two.
            self.pairs_per_micro_batch = self.cfg.micro_batch_size // 2

    @classmethod
    def check_config(cls, cfg: DictConfig) -> None:
        super().check_config(cfg)
        training_loss(cfg)
        if cfg.reward_standardization.enable:
            raise ConfigError(
                "model.reward_standardization.enable=True: labels define the scale of a "
                "regression reward model. Set it to False; see model.regression.attribute_weights."
            )

    @classmethod
    def _check_loss(cls, cfg: DictConfig) -> None:
        loss_func = training_loss(cfg)
        if loss_func not in PREFERENCE_LOSSES:
            return
        for key in ("micro_batch_size", "global_batch_size"):
            if cfg[key] % 2:
                raise ConfigError(
                    f"model.{key}={cfg[key]} is odd, but counts samples, of which {loss_func} "
                    f"compares two; use {cfg[key] + 1}."
                )
        attributes = cfg.regression.num_attributes
        if 1 < attributes <= COMPARED_ATTRIBUTE:
            raise ConfigError(
                f"model.regression.num_attributes={attributes}: {loss_func} compares by attribute "
                f"{COMPARED_ATTRIBUTE} (the first is 0); use 1, or more than {COMPARED_ATTRIBUTE}."
            )

    @classmethod
    def _check_attributes(cls, cfg: DictConfig) -> None:
        if cfg.regression.merge_attributes:
            raise ConfigError(
                "model.regression.merge_attributes=True: merged attributes cannot be compared "
                "with labels; set it to False for training, and to True for serving rewards."
            )

    def get_loss_and_metrics(  # type: ignore[override]  # it learns from other batches
        self, batch: RegressionBatch | LabelledPairBatch, forward_only: bool = False
    ) -> tuple[float, Mapping[str, float | Tensor]]:
        """Mean squared error of a global batch, and its gradient unless `forward_only`; with a
        loss of pairs what the base class computes. All ranks call it. Metrics, over the labels
        that are not `loss_mask_val`: `loss`, `weights` (their number) and `moments`.
        """
        if "chosen" in batch:
            return super().get_loss_and_metrics(batch, forward_only)  # type: ignore[arg-type]
        labels = batch["labels"]
        valid = labels.ne(self.loss_mask_val) & batch["loss_mask"].ne(0).any(dim=-1, keepdim=True)
        weights = loss_weights(valid.to(get_device()), sum_over_dp=sum_over_dp)
        inputs = {
            "tokens": batch["inputs"],
            "lengths": lengths_before(self.cfg.pad_token_id, batch["inputs"], batch["lengths"]),
            # Of the whole sample: with two dimensions, A columns could be taken for positions.
            "labels": labels.unsqueeze(1),
            "weights": weights.unsqueeze(1),
        }

        def loss_fn(predictions: Tensor, micro_batch: Batch) -> tuple[Tensor, Batch]:
            labels, weights = micro_batch["labels"].squeeze(1), micro_batch["weights"].squeeze(1)
            loss, metrics = regression_loss(
                predictions=predictions, labels=labels, weights=weights
            )
            moments = correlation_moments(predictions=predictions, labels=labels, weights=weights)
            return loss, {**metrics, MOMENTS: moments}

        metrics, moments = self.run_loss(
            loss_fn, inputs, forward_only, model_inputs=("lengths",), lengths=batch["lengths"]
        )
        metrics["weights"] = float(sum_over_dp(valid.sum().to(get_device())))
        return metrics["loss"], {**metrics, **moments}

    def compared_rewards(self, output: Tensor) -> Tensor:
        """[N]: the attribute of each sample that pairs are compared by, of output [N, A]."""
        return output[:, COMPARED_ATTRIBUTE if output.size(1) > 1 else 0]

    def summarize_metrics(self, metrics: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Replace the moments by `correlation` (`metrics.correlations_from_moments`)."""
        rest = {key: float(value) for key, value in metrics.items() if key != MOMENTS}
        moments = metrics.get(MOMENTS)
        # None: no batch had a label.
        return rest | (correlations_from_moments(moments) if isinstance(moments, Tensor) else {})


REWARD_MODEL_CLASS_DICT = {
    RewardModelType.BINARY_RANKING: MegatronGPTRewardModel,
    RewardModelType.REGRESSION: MegatronGPTRegressionRewardModel,
}


def reward_model_class(name: str | None) -> type[MegatronGPTRewardModel]:
    """The class for `model.reward_model_type`; None and errors as in `reward_model_type`."""
    return REWARD_MODEL_CLASS_DICT[reward_model_type(name)]


def held_out_text(
    kind: RewardModelType, metrics: dict[str, float], samples: float, num_attributes: int = 1
) -> str:
    """The result of a validation in words: "held-out accuracy 0.980 on 256 pairs". `metrics`,
    `samples`: an entry of `SupervisedTrainer.held_out`; each attribute has a correlation.
    """
    key, name, unit = "correlation", "correlation", "labels"
    if "acc" in metrics or kind is RewardModelType.BINARY_RANKING:
        key, name, unit = "acc", "accuracy", "pairs"
    value = f"{metrics[key]:.3f}" if key in metrics else "undefined"
    by_attribute = [
        f"{attribute}: {metrics[f'correlation_{attribute}']:.3f}"
        for attribute in range(num_attributes)
        if f"correlation_{attribute}" in metrics
    ]
    details = f" (by attribute {', '.join(by_attribute)})" if by_attribute else ""
    return f"held-out {name} {value} on {samples:.0f} {unit}{details}"
