# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`MegatronGPTRewardModel`: learns from pairs which sample is better; then gives samples rewards.
`MegatronGPTRegressionRewardModel`: learns people's labels of samples, one number per attribute, or
which of two samples they preferred and how much.

Notation: B pairs (or N samples) on this data-parallel rank, S padded length, A attributes.
"""

from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from lightning.pytorch import Trainer
from nemo.utils import logging
from omegaconf import DictConfig
from torch import Tensor

from nemo_aligner.checkpoint.sources import open_source
from nemo_aligner.config.defaults import complete_model
from nemo_aligner.config.jobs.supervised import RewardModelType, reward_model_type, training_loss
from nemo_aligner.config.server_rules import check_reward_standardization
from nemo_aligner.config.values import Values, plain_dict
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.estimators import PREFERENCE_LOSSES
from nemo_aligner.core.losses import loss_weights, preference_loss, regression_loss
from nemo_aligner.core.metrics import correlation_moments, correlations_from_moments
from nemo_aligner.core.preference import interleave, reward_statistics, reward_sums
from nemo_aligner.core.tensors import lengths_before
from nemo_aligner.core.types import LabelledPairBatch, PairBatch, RegressionBatch
from nemo_aligner.generation.interface import tokenize_batch
from nemo_aligner.models.alignable_interface import Inferrable, SupervisedInterface
from nemo_aligner.models.nlp.gpt.adapter_mixin import NLPAdapterModelMixin
from nemo_aligner.models.nlp.gpt.gpt_reward_model import GPTRewardModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import weights_of_samples
from nemo_aligner.parallel.collectives import sum_over_dp
from nemo_aligner.parallel.device import get_device
from nemo_aligner.training.megatron_steps import (
    Batch,
    broadcast_from_last_stage,
    forward_collect,
    gives_values,
)

HEAD_DTYPES = {
    **dict.fromkeys(("float32", "fp32", "32"), torch.float32),
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
}


class MegatronGPTRewardModel(NLPAdapterModelMixin, SupervisedInterface, Inferrable):
    """Reward model for binary preferences.

    Args:
        cfg: section `model` of `training_rm.yaml` or `inference_rm.yaml` (docs/config.md). The
            head is never narrower than the model, whatever `force_head_dtype` says.

    Attributes:
        has_trained_head: the weights were loaded with a head trained to give rewards. A language
            model has no head, and a critic's gives values.
        pair_loss: the loss of pairs, one of `estimators.PREFERENCE_LOSSES`.
        reward_mean_std: mean and standard deviation that rewards are standardized with, or None.

    `ConfigError`: attribute weights or standardization that cannot work.
    """

    module_class = GPTRewardModel

    def __init__(self, cfg: DictConfig, trainer: Trainer | None = None):
        super().__init__(cfg, trainer=trainer)
        self.has_trained_head = False
        self.pair_loss = "regular_bt"
        self.pairs_per_micro_batch: int = self.cfg.micro_batch_size
        self.forward_micro_batch_size: int = self.cfg.forward_micro_batch_size
        standard = self.cfg.reward_standardization
        self.reward_mean_std: tuple[float, float] | None = (
            (standard.mean, standard.std) if standard.enable else None
        )

    @classmethod
    def check_config(cls, cfg: DictConfig) -> None:
        """Check the head's dtype, the attribute weights and the standardization."""
        if str(cfg.force_head_dtype) not in HEAD_DTYPES:
            key = f"model.force_head_dtype={str(cfg.force_head_dtype)!r}"
            raise ConfigError(f"{key} is not supported; use float32 or bfloat16.")
        weights = cfg.regression.attribute_weights
        if weights is not None and len(weights) != cfg.regression.num_attributes:
            raise ConfigError(
                f"model.regression.attribute_weights={list(weights)} has {len(weights)} numbers "
                f"for model.regression.num_attributes={cfg.regression.num_attributes}."
            )
        check_reward_standardization(cfg)

    # What the head gives is not what the loss compares; `Values.refuse` says how they read.
    REFUSED_IN_TRAINING = """
    model.output_sequence | makes a critic; set it to False to train a reward model
    model.regression.num_attributes>1 & !model.regression.merge_attributes | : set it to 1, or
        regression.merge_attributes=True, or model.reward_model_type=regression
    NAME!=regression|regular_bt | needs the preference of each pair, which binary_ranking does not
        read; set model.reward_model_type=regression, with lines {"text": ..., "label": [number,
        ...]}
    """

    @classmethod
    def check_training_config(cls, cfg: DictConfig) -> None:
        """Raise `ConfigError` unless what the head gives is what the loss of `cfg` compares."""
        values = Values({"model": plain_dict(complete_model(cfg, cls.CONFIG_NAME))})
        for name in ("model.loss_func", "model.regression.loss_func"):
            values.refuse(cls.REFUSED_IN_TRAINING, NAME=name)

    @classmethod
    def fresh_weights(cls) -> tuple[str, ...]:
        """The head: a language model's checkpoint has none."""
        return ("rm_head.",)

    def load_nemo_weights(
        self,
        restore_path: str | PathLike[str],
        strict: bool = True,
        missing_ok: tuple[str, ...] = (),
        skip: tuple[str, ...] = (),
    ) -> None:
        source = open_source(restore_path)
        super().load_nemo_weights(source, strict, missing_ok, skip)
        has_head = broadcast_from_last_stage(self.has_trained_head)
        if not has_head:
            logging.info(f"the head is new, from model.seed={self.cfg.seed}")
        gives_values = complete_model(source.config()).output_sequence
        self.has_trained_head = has_head and not gives_values

    def load_sharded_weights(self, loaded: dict, strict: bool = True) -> None:
        super().load_sharded_weights(loaded, strict=strict)
        has_head = any(
            name.startswith("model.rm_head.") for chunk in loaded.values() for name in chunk
        )
        # Adapters without a head leave that of their base.
        self.has_trained_head = has_head or (self.use_peft and self.has_trained_head)

    def load_adapters(self, path: str | PathLike[str]) -> None:
        source = open_source(path, "adapters")
        super().load_adapters(source)
        self.has_trained_head = broadcast_from_last_stage(self.has_trained_head)
        self.has_trained_head &= not complete_model(source.stored_config(self.cfg)).output_sequence

    def module_args(self) -> dict[str, Any]:
        cfg = self.cfg
        weights = cfg.regression.attribute_weights
        return super().module_args() | dict(
            output_sequence=cfg.output_sequence,
            use_avg_pool=cfg.use_avg_pool,
            head_dtype=torch.promote_types(
                HEAD_DTYPES[str(cfg.force_head_dtype)], self.transformer_config.params_dtype
            ),
            head_seed=cfg.seed,
            num_attributes=cfg.regression.num_attributes,
            merge_attributes=cfg.regression.merge_attributes,
            attributes_weights=None if weights is None else list(weights),
        )

    def compared_rewards(self, output: Tensor) -> Tensor:
        """[N]: the numbers that pairs are compared by, of the output of N samples."""
        return output

    def get_loss_and_metrics(
        self, batch: PairBatch | LabelledPairBatch, forward_only: bool = False
    ) -> tuple[float, Mapping[str, float | Tensor]]:
        """Bradley-Terry loss of a global batch of pairs, with margins where `pair_loss` needs
        them, and its gradient unless `forward_only`; all ranks call it with their share. Metrics,
        over the pairs that count: `loss`, `acc` (share in the right order), `weights` (number of
        pairs), `rewards_{chosen,rejected,all}_mean` and `rewards_all_std`.
        """
        weights, count = weights_of_samples(batch["loss_mask"])
        lengths = interleave(batch["chosen_length"], batch["rejected_length"])
        inputs = {
            "tokens": interleave(batch["chosen"], batch["rejected"]),
            "weights": weights.repeat_interleave(2),  # the same for both samples of a pair
        }
        inputs["lengths"] = lengths_before(self.cfg.pad_token_id, inputs["tokens"], lengths)
        margins: Tensor | None = dict(batch).get("margin")  # type: ignore[assignment]
        if margins is not None:
            inputs["margins"] = margins.repeat_interleave(2)

        def loss_fn(output: Tensor, micro_batch: Batch) -> tuple[Tensor, Batch]:
            chosen, rejected = self.compared_rewards(output).reshape(-1, 2).unbind(-1)
            weights = micro_batch["weights"][0::2]
            loss, metrics = preference_loss(
                rewards_chosen=chosen,
                rewards_rejected=rejected,
                weights=weights,
                loss_func=self.pair_loss,
                margins=micro_batch["margins"][0::2] if "margins" in micro_batch else None,
            )
            return loss, metrics | reward_sums(chosen, rejected, weights)

        metrics, _ = self.run_loss(
            loss_fn,
            inputs,
            forward_only,
            micro_batch_size=2 * self.pairs_per_micro_batch,
            model_inputs=("lengths",),
            lengths=lengths,
            together=2,
        )
        reward_statistics(metrics)
        metrics["weights"] = count
        return metrics["loss"], metrics

    def infer(
        self,
        inputs: list[str] | tuple[Tensor, Tensor],
        add_BOS: bool | None = None,
        add_EOS: bool = False,
    ) -> Tensor:
        """Rewards, or with `output_sequence` values of all positions; every rank of a TP x PP x CP
        group calls it with the same samples.

        Args:
            inputs: N strings, or (tokens int64 [N, S], lengths int64 [N] or [N, 1], 1 to S).
            add_BOS, add_EOS: put these tokens around each string; None: bos as the tokenizer.

        Returns float32 on `get_device()`: [N, 1], [N, A] with several attributes, or [N, S], 0
        beyond the length of a sample. `UserError`: a string without tokens or longer than
        `encoder_seq_length`, or a length out of range.
        """
        tokens, lengths = (
            inputs if isinstance(inputs, tuple) else self.tokenize(inputs, add_BOS, add_EOS)
        )
        tokens, lengths = tokens.to(get_device()), lengths.to(get_device()).reshape(-1)
        shortest, longest = int(lengths.min()), int(lengths.max())
        if shortest < 1 or longest > tokens.size(1):
            raise UserError(
                f"sequence lengths from {shortest} to {longest} for {tokens.size(1)} token "
                "columns; a length counts a sample's tokens without padding, at least 1."
            )
        return forward_collect(
            self.model,
            {"tokens": tokens, "lengths": lengths_before(self.cfg.pad_token_id, tokens, lengths)},
            micro_batch_size=self.forward_micro_batch_size,
            output_fn=lambda output, _: self._standardize(output.float()),
            model_inputs=("lengths",),
            lengths=lengths,
            micro_batch_tokens=self.micro_batch_tokens,
            by_position=gives_values(self.model[-1]),
        )

    def _standardize(self, rewards: Tensor) -> Tensor:
        if self.reward_mean_std is None:
            return rewards
        mean, std = self.reward_mean_std
        return (rewards - mean) / std

    def tokenize(
        self, sentences: list[str], add_BOS: bool | None = None, add_EOS: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Tokens int64 [N, longest], padded with eos, and lengths int64 [N] of N strings.
        `UserError`: a string has no tokens, or more than `encoder_seq_length`.
        """
        limit = self.cfg.encoder_seq_length
        tokens, lengths = tokenize_batch(sentences, self.tokenizer, limit + 1, add_BOS, add_EOS)
        for number, length in enumerate(lengths.tolist()):
            if not 1 <= length <= limit:
                raise UserError(
                    f"sentence {number} has {f'more than {limit}' if length else 0} tokens; a "
                    f"reward model reads 1 to model.encoder_seq_length={limit}."
                )
        return tokens[:, : int(lengths.max())], lengths


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

    REFUSED_IN_TRAINING = """
    model.output_sequence | makes a critic; set it to False to train a reward model
    model.regression.merge_attributes | : merged attributes cannot be compared with labels; set it
        to False for training, and to True for serving rewards
    """

    @classmethod
    def check_training_config(cls, cfg: DictConfig) -> None:
        super().check_training_config(cfg)
        cfg = complete_model(cfg, cls.CONFIG_NAME)
        loss_func, attributes = training_loss(cfg), cfg.regression.num_attributes
        if loss_func not in PREFERENCE_LOSSES:
            return
        for key in ("micro_batch_size", "global_batch_size"):
            if cfg[key] % 2:
                raise ConfigError(
                    f"model.{key}={cfg[key]} is odd, but counts samples, of which {loss_func} "
                    f"compares two; use {cfg[key] + 1}."
                )
        if 1 < attributes <= COMPARED_ATTRIBUTE:
            raise ConfigError(
                f"model.regression.num_attributes={attributes}: {loss_func} compares by attribute "
                f"{COMPARED_ATTRIBUTE} (the first is 0); use 1, or more than {COMPARED_ATTRIBUTE}."
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
