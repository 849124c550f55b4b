# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Alarms: what goes wrong in silence in this field, seen at run time.

Every alarm watches a metric. Some end the run, on all ranks together, because no number after them
can be trusted: a policy that is not the reference at step 0, rewards, losses and gradients that
are not finite (`training/finite.py`), replicas that drift apart (`parallel/replicas.py`). The
others are warnings past a threshold of the section `alarms` (null: off), said when a state begins
and not again until it has ended. docs/metrics.md has the table of all.

Shapes: B samples of a rollout on this rank, N over all data-parallel (DP) ranks, S padded length.
Tensors per transition are `[B, S-1]`; `nemo_aligner.core.types` has their alignment.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from nemo.utils import logging
from torch import Tensor

from nemo_aligner.core.errors import NonFiniteError, PolicyReferenceError
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import all_reduce_dict, masked_global_mean_var
from nemo_aligner.parallel.replicas import check_replicas
from nemo_aligner.training.timers import ScopedTimer

PROMPT_CHARACTERS = 80  # of a prompt that an error quotes


# ---------------------------------------------------------------------------------------- warnings


@dataclass(frozen=True)
class Watched:
    """A quantity that a warning is about, and what it means when it is past its threshold.

    Attributes:
        key: of the threshold in the section `alarms`; also the quantity's name in messages.
        quantity: metrics of a phase -> the quantity, or None if they do not hold it.
        bad_above: True if the quantity is bad above the threshold, False if below.
        meaning: what it usually means, and what to do.
        first_step: earlier the quantity is expected to be bad.
    """

    key: str
    quantity: Callable[[Mapping], float | None]
    bad_above: bool
    meaning: str
    first_step: int = 0


WARNINGS = (
    Watched(
        "sampling_mismatch",
        lambda metrics: metrics.get("sampling_ratio_mean_error"),
        True,
        "The sampler gave the tokens other probabilities than the trainer computes for them, so "
        "every update is "
        "off-policy from its start. Usual causes: a temperature that one of them does not apply, "
        "dropout left on, "
        "another precision or kernel in decoding, or stale weights in the sampler. See "
        "sampling_ratio_max for the "
        "worst token.",
    ),
    Watched(
        "clip_fraction",
        lambda metrics: metrics.get("ppo_clip_fraction"),
        True,
        "The ratios of so many tokens are outside the clip range that they no longer train the "
        "policy: it moves too "
        "far within one rollout. Lower model.optim.lr or trainer.ppo.ppo_epochs, use larger "
        "global batches, or set "
        "trainer.ppo.target_kl.",
    ),
    Watched(
        "explained_variance",
        lambda metrics: metrics.get("explained_variance"),
        False,
        "The critic's values predict the returns worse than their mean would: the advantages are "
        "mostly its noise. "
        "Raise trainer.ppo.critic_warmup_steps or the critic's learning rate, start the critic "
        "from the reward model, "
        "and look at critic_loss.",
        first_step=10,  # a new critic has to learn
    ),
    Watched(
        "truncated_fraction",
        lambda metrics: (
            1.0 - metrics["fraction_of_samples_properly_ended"]
            if "fraction_of_samples_properly_ended" in metrics
            else None
        ),
        True,
        "Almost no answer ends by itself; answers that are cut off do not train the policy "
        "(unless "
        "model.ppo.train_on_truncated), and their rewards are of halves. Raise "
        "length_params.max_length, check that "
        "the SFT data end with the eos token, or set sampling_params.end_strings.",
    ),
)


class Alarms:
    """The alarms of a trainer.

    Args:
        section: name of the thresholds' section, for messages: "trainer.ppo.alarms".
        thresholds: key -> number, or None: off; a missing key is off too.
        warn: called with the text of a warning, on rank 0 only.

    Attributes:
        active: keys of the warnings whose state lasts.
    """

    def __init__(
        self, section: str, thresholds: Mapping | None, warn: Callable[[str], None] | None = None
    ):
        self.section = section
        thresholds = thresholds or {}
        self.thresholds = {
            w.key: float(thresholds[w.key]) for w in WARNINGS if thresholds.get(w.key) is not None
        }
        self.replica_check_interval = int(thresholds.get("replica_check_interval") or 0)
        self.active: set[str] = set()
        self._warn = warn or logging.warning

    @property
    def needs_sampling_logprobs(self) -> bool:
        """Whether the sampler must tell the log-probs of the tokens that it chose."""
        return "sampling_mismatch" in self.thresholds

    def watch(self, metrics: Mapping, step: int) -> dict[str, int]:
        """Warn of the quantities in `metrics` that have gone past their thresholds; equal metrics
        on all ranks.

        A quantity that is absent leaves its warning as it is; one that is NaN is not defined, and
        no reason to warn.

        Returns:
            `alarms_active`, the number of warnings whose state lasts, to be logged with the
            metrics.
        """
        for watched in WARNINGS:
            value = watched.quantity(metrics)
            if (
                watched.key not in self.thresholds
                or value is None
                or math.isnan(value)
                or step < watched.first_step
            ):
                continue
            threshold = self.thresholds[watched.key]
            bad = value > threshold if watched.bad_above else value < threshold
            if not bad:
                self.active.discard(watched.key)
            elif watched.key not in self.active:
                self.active.add(watched.key)
                self._say(watched, value, threshold, step)
        return {"alarms_active": len(self.active)}

    def _say(self, watched: Watched, value: float, threshold: float, step: int) -> None:
        if parallel_state.get_rank() == 0:
            side = "above" if watched.bad_above else "below"
            self._warn(
                f"alarm: {watched.key} is {value:.4g} at step {step}, {side} "
                f"{self.section}.{watched.key}="
                f"{threshold:g}. {watched.meaning} (Said once until it has ended.)"
            )

    def check_replicas(self, model, step: int, timer: ScopedTimer | None = None) -> None:
        """Every `replica_check_interval` steps, compare the weights of the replicas; all ranks
        call it.

        Args:
            model: has `unwrapped()`, its bare model chunks.
            timer: gets the time as `replica_check`.

        Raises:
            ReplicaError: on every rank.
        """
        if not self.replica_check_interval or step % self.replica_check_interval:
            return
        if timer is None:
            return check_replicas(model.unwrapped())
        with timer("replica_check"):
            check_replicas(model.unwrapped())


# -------------------------------------------------------------------------------------- quantities


def sampling_ratio_metrics(
    logprobs: Tensor, sampling_logprobs: Tensor, mask: Tensor
) -> dict[str, float]:
    """How far the sampler's probabilities of the tokens are from the trainer's, over all DP ranks,
    which all call.

    Args:
        logprobs: f32 `[B, S-1]`, the trainer's; slots outside the mask may hold anything.
        sampling_logprobs: f32 `[B, S-1]`, the sampler's, in the same convention
            (`GenerationOutput.logprobs`).
        mask: `[B, S-1]`, non-zero on the tokens that count.

    Returns:
        `sampling_ratio_mean_error`, the mean of |rho - 1| with rho = exp(logprobs -
        sampling_logprobs), and `sampling_ratio_max`, the largest of rho and 1 / rho.
    """
    mask = mask.bool()
    difference = torch.where(mask, logprobs - sampling_logprobs, 0).nan_to_num(nan=torch.inf)
    mean, _ = masked_global_mean_var(
        (difference.exp() - 1).abs(), mask, parallel_state.get_data_parallel_group()
    )
    largest = math.exp(min(_largest_over_dp(difference.abs()), 700.0))
    return {"sampling_ratio_mean_error": float(mean), "sampling_ratio_max": largest}


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the tokens of all DP ranks, which all call.

    1 is a perfect critic, 0 one that knows the mean at best. NaN if the returns do not vary. Args
    are `[B, S-1]`.
    """
    group = parallel_state.get_data_parallel_group()
    error = torch.where(mask.bool(), returns - values, 0)
    variances = [
        float(masked_global_mean_var(tensor, mask, group)[1]) for tensor in (error, returns)
    ]
    return 1.0 - variances[0] / variances[1] if variances[1] > 0 else math.nan


def rollout_health(rollout_batch: Mapping, data: Mapping) -> dict[str, float]:
    """The quantities above of this rank's rows, as far as these tensors are there; all DP ranks
    call it.

    Args:
        rollout_batch: may hold `sampling_logprobs`, then also `logprobs`.
        data: of the updates: `mask`, and with a critic `values` and `returns`.
    """
    metrics = {}
    if "sampling_logprobs" in rollout_batch:
        metrics |= sampling_ratio_metrics(
            rollout_batch["logprobs"], rollout_batch["sampling_logprobs"], data["mask"]
        )
    if "values" in data and "returns" in data:
        metrics["explained_variance"] = explained_variance(
            data["values"], data["returns"], data["mask"]
        )
    return metrics


# ------------------------------------------------------------------------------------------ errors


def check_policy_equals_reference(
    logprobs: Tensor, init_logprobs: Tensor, mask: Tensor
) -> dict[str, float]:
    """Before the first update policy and reference are the same weights, so their log-probs must
    be the same bits.

    A difference is a defect that training would hide: the KL penalty would be off by it for the
    whole run. Args are `[B, S-1]`. All ranks call it, and all raise together.

    Returns:
        `policy_reference_difference`: 0.

    Raises:
        PolicyReferenceError: with the largest difference over the response tokens of all ranks.
    """
    largest = _largest_over_dp(
        torch.where(mask.bool(), (logprobs - init_logprobs).abs(), 0).nan_to_num(nan=torch.inf)
    )
    if largest > 0:
        raise PolicyReferenceError(
            "before the first update, log-probs of the policy and of the reference differ by up "
            f"to {largest:.3e}; "
            "they must be equal. Check that the reference was copied from the weights that are "
            "trained, that dropout "
            "is off during inference, and that no kernel in use is non-deterministic."
        )
    return {"policy_reference_difference": largest}


def check_rewards(rollout: Mapping, tokenizer) -> None:
    """Refuse rewards that are NaN or infinite. The rollout is that of all ranks, so all raise
    together.

    Args:
        rollout: `rewards` (and `rewards_<name>` of an ensemble) f32 `[N]`; `idx`, `prompt_lengths`
            int64 `[N]`; `response_tokens` int64 `[N, S]`.

    Raises:
        NonFiniteError: names the first such sample by its dataset index and prompt.
    """
    for name in sorted(key for key in rollout if key == "rewards" or key.startswith("rewards_")):
        bad = (~rollout[name].isfinite()).nonzero().flatten().tolist()
        if bad:
            row = bad[0]
            tokens = rollout["response_tokens"][row, : int(rollout["prompt_lengths"][row])]
            prompt = tokenizer.ids_to_text(tokens.tolist())
            prompt = (
                prompt
                if len(prompt) <= PROMPT_CHARACTERS
                else prompt[: PROMPT_CHARACTERS - 3] + "..."
            )
            raise NonFiniteError(
                f"{name} of sample {int(rollout['idx'][row])} (index in the data set; prompt "
                f"{prompt!r}) is "
                f"{float(rollout[name][row])}; {len(bad)} of {len(rollout[name])} are not finite. "
                "Nothing was trained "
                "on them. Check the reward model's weights or the reward function on this prompt, "
                "and the weights of "
                "an ensemble."
            )


def _largest_over_dp(tensor: Tensor) -> float:
    """Largest value over all DP ranks of a tensor without NaN; 0 if it is empty everywhere."""
    largest = tensor.max().item() if tensor.numel() else 0.0
    group = parallel_state.get_data_parallel_group()
    return all_reduce_dict(
        {"largest": largest}, torch.float64, group, torch.distributed.ReduceOp.MAX
    )["largest"]
