# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What becomes of advantages before the updates: weights against a sampler that is not the
trainer, and the tokens that Clip-Cov and KL-Cov treat apart. All data-parallel ranks call these
functions. Shapes: B samples on this rank, S padded length, `[B, S-1]` per transition.
"""

import torch
from torch import Tensor

from nemo_aligner.algorithms.rollouts import PPORolloutBatch
from nemo_aligner.core.surrogates import (
    CovarianceSettings,
    SamplerCorrection,
    chosen_tokens,
    correction_factors,
    importance_ratios,
)
from nemo_aligner.core.types import RolloutBatch
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import all_reduce_dict, masked_global_mean_var


def correct_for_sampler(
    advantages: Tensor, rollout_batch: RolloutBatch, mask: Tensor, settings: SamplerCorrection
) -> tuple[Tensor, dict[str, float]]:
    """Advantages times their importance weights, and metrics of all ranks (docs/metrics.md).
    `rollout_batch` has `logprobs` and `sampling_logprobs`, anything outside the mask.
    """
    difference = rollout_batch["logprobs"] - rollout_batch["sampling_logprobs"]
    log_ratio = torch.where(mask.bool(), difference, 0)
    factors, where = correction_factors(log_ratio, mask, settings)
    level = settings.weights or settings.reject or "token"
    ratios = importance_ratios(log_ratio, mask, level).double()  # a square must not overflow
    exact = log_ratio.double()  # the KLs of the built-in engine are those of its rounding
    means = {
        "sampler_weight_mean": ratios,
        "sampler_weight_squares": ratios.square(),
        "sampler_kl": exact.expm1() - exact,
        "sampler_kl_reverse": exact.exp() * (exact - 1) + 1,
        **{f"sampler_{name}": found.float() for name, found in where.items()},
    }
    metrics = {name: mean_over_dp(values, mask) for name, values in means.items()}
    squares = metrics.pop("sampler_weight_squares")
    mean = metrics["sampler_weight_mean"]
    metrics["sampler_effective_samples"] = mean**2 / squares if squares else 0.0
    largest = {"sampler_weight_max": torch.where(mask.bool(), ratios, 0).max()}
    metrics |= all_reduce_dict(largest, op=torch.distributed.ReduceOp.MAX)
    return advantages * factors, metrics


def treat_covariant_tokens(
    advantages: Tensor,
    logprobs: Tensor,
    rollout_batch: RolloutBatch,
    mask: Tensor,
    settings: CovarianceSettings,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """`advantages`, 0 for the tokens that Clip-Cov chooses; with KL-Cov also `old_kl_coefs` f32
    `[B, S-1]`, each token's weight of the KL to the policy that generated; and metrics of all
    ranks. `rollout_batch` has `sample_order`, `response_tokens` and `is_end`; tokens of responses
    that were cut off are no candidates.
    """
    mask = mask * rollout_batch["is_end"][:, None]  # by default the loss has no others
    columns = {"logprobs": logprobs, "advantages": advantages, "mask": mask}
    columns |= {key: rollout_batch[key] for key in ("sample_order", "response_tokens")}
    gathered = PPORolloutBatch(**columns).gather_and_balance_globally()
    gathered = gathered.select(gathered.pop("sample_order").argsort())  # at any split the same
    chosen = chosen_tokens(**gathered, settings=settings)[rollout_batch["sample_order"]]
    metrics = {"fraction_of_covariant_tokens": mean_over_dp(chosen.float(), mask)}
    if settings.rule == "clip":
        return {"advantages": torch.where(chosen, 0, advantages)}, metrics
    coefs = settings.kl_coef * chosen.to(advantages)
    return {"advantages": advantages, "old_kl_coefs": coefs}, metrics


def mean_over_dp(values: Tensor, mask: Tensor) -> float:
    return float(masked_global_mean_var(values, mask, parallel_state.get_data_parallel_group())[0])
