# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Alarms: at run time they notice failures that training would otherwise hide.

Some end the run, on all ranks together: a policy that is not its reference at step 0, rewards,
losses and gradients that are not finite (`training/megatron_steps.py`), replicas that drift apart
(`parallel/collectives.py`). The others warn, once until it has ended, that a metric is past its
threshold in the section `alarms` (docs/troubleshooting.md).

Shapes: B samples of a rollout on this rank, S padded length, `[B, S-1]` per transition, aligned as
in `nemo_aligner.core.types`. DP: data-parallel.
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from nemo.utils import logging
from torch import Tensor

from nemo_aligner.core import types
from nemo_aligner.core.errors import NonFiniteError, PolicyReferenceError
from nemo_aligner.core.tokenizer import Tokenizer
from nemo_aligner.models.alignable_interface import SupervisedInterface
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import (
    all_reduce_dict,
    check_replicas,
    masked_global_mean_var,
)
from nemo_aligner.training.schedule import ScopedTimer

AFTER_WARMUP = 20  # first step that counts for what begins at chance
PROMPT_CHARACTERS = 80  # of a prompt that an error quotes

Metrics = Mapping[str, Any]


# -------------------------------------------------------------------------------------- warnings


@dataclass(frozen=True)
class Watched:
    key: str  # of the threshold in the section `alarms`; also the quantity's name in messages
    bad_above: bool  # True if the quantity is bad above the threshold, False if below
    meaning: str  # the usual causes, and what to do
    first_step: int = 0  # before this step the quantity is expected to be bad
    last_step: int | None = None  # after this step it may be anything; None: it counts to the end
    # computes the quantity from the metrics of a phase; None: it is one of them
    quantity: Callable[[Metrics], float | None] | None = None

    def value(self, metrics: Metrics) -> float | None:
        """The quantity; None: the phase does not have it."""
        try:
            return self.quantity(metrics) if self.quantity else metrics[self.key]
        except KeyError:
            return None


WARNINGS = (
    Watched(
        "sampling_mismatch",
        True,
        "Sampler and trainer give the tokens other probabilities, so every update is off-policy. "
        "Usual causes: a temperature that one of them does not apply, dropout left on, another "
        "precision or kernel in decoding, or stale weights in the sampler.",
        quantity=itemgetter("sampling_ratio_mean_error"),
    ),
    Watched(
        "first_update_kl",
        True,
        "Before a weight has changed the policy gives other probabilities than the rollout has, "
        "so the ratios are wrong. Usual causes: a dropout "
        "(model.hidden_dropout, attention_dropout, peft.lora_tuning.adapter_dropout), another "
        "precision or kernel in training, or model.ppo.rollout_logprobs=sampler.",
    ),
    Watched(
        "first_rewards",
        True,
        "Before the first update the policy is its reference, so all rewards must be 0, and the "
        "loss log 2. Usual causes: a dropout (model.hidden_dropout, attention_dropout, "
        "peft.lora_tuning.adapter_dropout), or another precision or kernel in training.",
        last_step=0,
        quantity=lambda of: math.hypot(of["rewards_all_mean"], of["rewards_all_std"]),
    ),
    Watched(
        "clip_fraction",
        True,
        "The policy moves too far within one rollout: clipped tokens do not train it. Lower "
        "model.optim.lr or trainer.ppo.ppo_epochs, use larger global batches, or set "
        "trainer.ppo.target_kl.",
        quantity=itemgetter("ppo_clip_fraction"),
    ),
    Watched(
        "explained_variance",
        False,
        "The critic's values predict the returns worse than their mean would, so the advantages "
        "are mostly its noise. Raise trainer.ppo.critic_warmup_steps or the critic's learning "
        "rate, start the critic from the reward model, and look at critic_loss.",
        first_step=10,  # a new critic has to learn
    ),
    Watched(
        "truncated_fraction",
        True,
        "Almost no response ends by itself; what is cut off has the rewards of fragments, or does "
        "not teach the policy to end. Raise length_params.max_length, check that the SFT data end "
        "with the eos token, or set sampling_params.end_strings.",
        quantity=lambda metrics: 1.0 - metrics["fraction_of_samples_properly_ended"],
    ),
    Watched(
        "likelihood_fall",
        True,
        "Chosen and rejected responses alike lose probability, to responses that nobody compared. "
        "Raise model.dpo.ref_policy_kl_penalty or model.dpo.sft_loss_weight (model.kto for KTO; "
        "SPIN has the former in model.spin), or lower model.optim.lr.",
    ),
    Watched(
        "accuracy",
        False,
        "Compared with the reference, the policy prefers most rejected responses to the chosen "
        "ones (in SPIN, the reference's own responses to those of the data). Usual causes: they "
        "are exchanged in the data, or in its rewards (rpo_*), or the learning rate is too high. "
        "Look at the data: nemo-aligner inspect.",
        first_step=AFTER_WARMUP,
        quantity=itemgetter("acc"),
    ),
    Watched(
        "margin",
        False,
        "The rejected responses have gained more probability than the chosen ones, or lost less: "
        "the policy learns the opposite of the data. Lower model.optim.lr; if the accuracy is "
        "good all the same, a few long responses decide: set preference_average_log_probs=True.",
        first_step=AFTER_WARMUP,
        quantity=lambda metrics: metrics.get("margin", metrics.get("rewards_margin")),
    ),
    Watched(
        "identical_fraction",
        True,
        "Most of the policy's own responses are those of the data, word for word. Such pairs "
        "teach nothing, so self-play has come to its end on these data: use others, raise "
        "sampling_params.temperature, or stop.",
    ),
    Watched(
        "teacher_mass",
        False,
        "The teacher's top-k tokens have little of its probability, so the student learns little "
        "of the teacher. Compute logits with a larger top_k, raise model.data.top_k, or set "
        "model.knowledge_distillation.outside_top_k=bucket.",
    ),
    Watched(
        "effective_responses",
        False,
        "The target of SteerLM 2.0 gives nearly all weight to one response of each prompt. Usual "
        "causes: log P(a|x,y) or log P(y|x) of other scales or of another model, or an attribute "
        "model that is too sure of itself.",
    ),
)


class Alarms:
    """The alarms of a trainer; `active` are the keys of the warnings whose state lasts.

    Args:
        section: name of the thresholds' section, for messages: "trainer.ppo.alarms".
        thresholds: number by key; a key that is None or missing is off; None: all are.
        warn: called with the text of a warning, on rank 0 only; None: the log.
    """

    def __init__(
        self,
        section: str,
        thresholds: Mapping[str, Any] | None,
        warn: Callable[[str], None] | None = None,
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
        return "sampling_mismatch" in self.thresholds

    def concern(self, metrics: Metrics) -> bool:
        return any(w.key in self.thresholds and w.value(metrics) is not None for w in WARNINGS)

    def watch(self, metrics: Metrics, step: int, age: int | None = None) -> dict[str, int]:
        """Warn of quantities in `metrics` (equal on all ranks) past their thresholds; one that is
        absent or NaN leaves its warning as it is. Returns `alarms_active`, how many warnings last.

        `age`: steps since the quantities began at chance; None: `step`.
        """
        for watched in WARNINGS:
            value, now = watched.value(metrics), step if age is None else age
            if (
                watched.key not in self.thresholds
                or value is None
                or math.isnan(value)
                or now < watched.first_step
            ):
                continue
            threshold = self.thresholds[watched.key]
            bad = value > threshold if watched.bad_above else value < threshold
            if not bad or watched.last_step is not None and now > watched.last_step:
                self.active.discard(watched.key)
            elif watched.key not in self.active:
                self.active.add(watched.key)
                side = "above" if watched.bad_above else "below"
                if parallel_state.get_rank() == 0:
                    self._warn(
                        f"alarm: {watched.key} is {value:.4g} at step {step}, {side} "
                        f"{self.section}.{watched.key}={threshold:g}. {watched.meaning} (Not "
                        "repeated until this state has ended.)"
                    )
        return {"alarms_active": len(self.active)}

    def check_replicas(
        self, model: SupervisedInterface, step: int, timer: ScopedTimer | None = None
    ) -> None:
        """Check at each `replica_check_interval`; `ReplicaError` on all ranks, which all call."""
        if not self.replica_check_interval or step % self.replica_check_interval:
            return
        with timer("replica_check") if timer else contextlib.nullcontext():
            check_replicas(model.unwrapped())


# ------------------------------------------------------------------------------------ quantities


def sampling_ratio_metrics(
    logprobs: Tensor, sampling_logprobs: Tensor, mask: Tensor
) -> dict[str, float]:
    """The mean of |rho - 1|, and the largest of rho and 1 / rho, over all DP ranks, which all
    call; rho = exp(logprobs - sampling_logprobs). Args `[B, S-1]`, with anything outside the mask.
    """
    mask = mask.bool()
    difference = torch.where(mask, logprobs - sampling_logprobs, 0).nan_to_num(nan=torch.inf)
    mean, _ = masked_global_mean_var(
        (difference.exp() - 1).abs(), mask, parallel_state.get_data_parallel_group()
    )
    largest = math.exp(min(_largest_over_dp(difference.abs()), 700.0))
    return {"sampling_ratio_mean_error": float(mean), "sampling_ratio_max": largest}


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the tokens of all DP ranks, which all call;
    NaN if the returns do not vary. Args are `[B, S-1]`.
    """
    group = parallel_state.get_data_parallel_group()
    error = torch.where(mask.bool(), returns - values, 0)
    unexplained, whole = (
        float(masked_global_mean_var(tensor, mask, group)[1]) for tensor in (error, returns)
    )
    return 1.0 - unexplained / whole if whole > 0 else math.nan


def rollout_health(rollout_batch: types.RolloutBatch, data: Mapping[str, Any]) -> dict[str, float]:
    """The quantities above whose tensors are present, of all DP ranks; all ranks call it."""
    metrics: dict[str, float] = {}
    if "sampling_logprobs" in rollout_batch:
        metrics |= sampling_ratio_metrics(
            rollout_batch["logprobs"], rollout_batch["sampling_logprobs"], data["mask"]
        )
    if "values" in data and "returns" in data:
        metrics["explained_variance"] = explained_variance(
            data["values"], data["returns"], data["mask"]
        )
    return metrics


# ---------------------------------------------------------------------------------------- errors


def check_policy_equals_reference(
    logprobs: Tensor, init_logprobs: Tensor, mask: Tensor
) -> dict[str, float]:
    """Before the first update policy and reference have the same weights, so their log-probs must
    be the same bits; else `PolicyReferenceError`, on all ranks, which all call. Args `[B, S-1]`.
    """
    largest = _largest_over_dp(
        torch.where(mask.bool(), (logprobs - init_logprobs).abs(), 0).nan_to_num(nan=torch.inf)
    )
    if largest > 0:
        raise PolicyReferenceError(
            "before the first update, log-probs of the policy and of the reference differ by up "
            f"to {largest:.3e}; they must be equal. Check that the reference was copied from the "
            "weights that are trained, that dropout is off during inference, and that no kernel "
            "in use is non-deterministic."
        )
    return {"policy_reference_difference": largest}


def check_rewards(rollout: types.Rollout, scores: types.Scores, tokenizer: Tokenizer) -> None:
    """Raise `NonFiniteError`, with dataset index and prompt, for a reward that is NaN or infinite.
    The rollout is that of all ranks, so all raise together.
    """
    parts = {f"rewards_{name}": part for name, part in sorted(scores.parts.items())}
    for name, rewards in ({"rewards": scores.rewards} | parts).items():
        bad = (~rewards.isfinite()).nonzero().flatten().tolist()
        if bad:
            first = bad[0]
            tokens = rollout["response_tokens"][first, : int(rollout["prompt_lengths"][first])]
            prompt = tokenizer.ids_to_text(tokens.tolist())
            if len(prompt) > PROMPT_CHARACTERS:
                prompt = prompt[: PROMPT_CHARACTERS - 3] + "..."
            raise NonFiniteError(
                f"{name} of sample {int(rollout['idx'][first])} (index in the data set; prompt "
                f"{prompt!r}) is {float(rewards[first])}; {len(bad)} of {len(rewards)} are not "
                "finite. Check the reward model or function on this prompt."
            )


def _largest_over_dp(tensor: Tensor) -> float:
    """Largest value over all DP ranks of a tensor without NaN; 0 if it is empty everywhere."""
    largest = tensor.max().item() if tensor.numel() else 0.0
    group = parallel_state.get_data_parallel_group()
    found = all_reduce_dict({"": largest}, group=group, op=torch.distributed.ReduceOp.MAX)
    return found[""]
