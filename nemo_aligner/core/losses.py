# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The losses, as pure functions of plain tensors: no ranks, no model, no config.

**One convention.** The loss of an optimizer step over the global batch is

    loss = sum over all samples and slots of  weights * per_slot_loss

`loss_weights` computes `weights` once per global batch, before anything is split. A loss function
gets a micro-batch with its part of `weights` and returns a *partial sum*, and so are its metrics.
Summed over micro-batches and data-parallel ranks they give the value, and the gradient, of the
global batch, whatever the split.

Shapes: [B, S-1] per transition (see `nemo_aligner.core.types`), [B] pairs, [B, A] attributes of a
regression reward model. A slot of weight 0 may hold NaN: it changes neither values nor gradients.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from nemo_aligner.core import estimators
from nemo_aligner.core.errors import unknown
from nemo_aligner.core.kl import SURROGATES, Tokens, calculate_kl_penalty
from nemo_aligner.core.tensors import masked_mean


def loss_weights(
    mask: Tensor,
    reduction: str = "token",
    micro_batch_size: int | None = None,
    sum_over_dp: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    longest: int | None = None,
) -> Tensor:
    """Weights float32, shape of `mask`, that turn a sum over slots into the named mean over the
    global batch; all zero if no slot counts on any rank.

    Args:
        mask: [B, S-1], [B, A] or [B], non-zero where a slot counts; this data-parallel rank's
            whole share of the global batch.
        reduction: "token": mean over all counting slots of the global batch. "sequence": mean over
            samples of their own means; samples without a counting slot are left out. "constant":
            mean over all samples of their sums, divided by `longest`, the tokens that a response
            can have (Liu et al. 2025, arXiv:2503.20783, Dr. GRPO). "microbatch", to compare with
            NeMo-Aligner: mean over micro-batches, of `micro_batch_size` samples, of their means (0
            for an empty one), which depends on the split.
        sum_over_dp: sums a tensor over the data-parallel ranks, all of which call this function.
    """
    keep = mask != 0
    rows = keep.reshape(keep.shape[0], -1)
    # float64 counts: a global batch can hold more tokens than float32 counts exactly (2**24).
    if reduction == "token":
        denominator = sum_over_dp(rows.sum(dtype=torch.float64))
    elif reduction == "sequence":
        samples = sum_over_dp(rows.any(1).sum(dtype=torch.float64)).clamp(min=1)
        denominator = samples * _count(rows, 1)
    elif reduction == "constant":
        if not longest:
            raise ValueError(f"longest={longest}: {reduction!r} needs one")
        samples = torch.full((), rows.shape[0], dtype=torch.float64, device=mask.device)
        denominator = sum_over_dp(samples) * longest
    elif reduction == "microbatch":
        if not micro_batch_size or rows.shape[0] % micro_batch_size:
            raise ValueError(
                f"micro_batch_size={micro_batch_size} does not divide the {rows.shape[0]} samples "
                "of the batch"
            )
        splits = rows.reshape(rows.shape[0] // micro_batch_size, -1)
        dp_size = sum_over_dp(torch.ones((), dtype=torch.float64, device=mask.device))
        per_split = _count(splits, 1) * splits.shape[0] * dp_size
        denominator = per_split.repeat_interleave(micro_batch_size, dim=0)
    else:
        raise unknown("loss_reduction", reduction, estimators.ROLLOUT_REDUCTIONS)
    weights = rows / denominator.clamp(min=1)
    return weights.float().reshape(mask.shape)


def loss_count(
    mask: Tensor, reduction: str = "token", micro_batch_size: int | None = None
) -> float:
    """How many slots, samples or micro-batches of this rank `loss_weights` averages over."""
    keep = mask != 0
    if reduction == "token":
        return float(keep.sum())
    if reduction == "constant":
        return float(keep.shape[0])
    if reduction == "sequence":
        return float(keep.reshape(keep.shape[0], -1).any(1).sum())
    if not micro_batch_size:
        raise ValueError(f"micro_batch_size={micro_batch_size}: {reduction!r} needs one")
    return keep.shape[0] / micro_batch_size


def kept(values: Tensor, weights: Tensor) -> Tensor:
    """float32 `values` where the weight is not 0, else 0 (0 * NaN is NaN, backward too)."""
    return torch.where(weights != 0, values.float(), 0.0)


def ppo_actor_loss(
    *,
    logprobs: Tensor,
    prev_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    ratio_eps: float,
    ratio_eps_high: float | None = None,
    policy_loss: str = "clip",
    dual_clip: float | None = None,
    ref_logprobs: Tensor | None = None,
    kl_loss_coef: float = 0.0,
    kl_loss_estimator: str = "k3",
    entropy: Tensor | None = None,
    entropy_bonus: float = 0.0,
    surrogate_of: Callable[..., Tensor] | None = None,
    old_kl_coefs: Tensor | None = None,
    metric_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate of PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7), minus an entropy
    bonus (eq. 9). With rho = exp(logprobs - prev_logprobs), per slot:

        surrogate = max(-A rho, -A clamp(rho, 1-eps, 1+eps))     with policy_loss "clip"
        surrogate = min(surrogate, -A c)                         with dual_clip c, where A < 0
        loss = surrogate + kl_loss_coef * KL(logprobs, ref_logprobs) - entropy_bonus * H

    The dual clip (Ye et al. 2020, arXiv:1912.09729, eq. 5) bounds the loss of a token with a
    negative advantage and a large ratio, which the first clip leaves unbounded. The KL in the loss
    (Shao et al. 2024, arXiv:2402.03300, eq. 3 and 4) is differentiated through its estimator;
    `kl.calculate_kl_penalty` describes the resulting gradient.

    Args (tensors are [B, S-1], `weights` from `loss_weights`):
        logprobs: of the policy in training; carries the gradient, as `entropy` does.
        prev_logprobs: of the policy that generated.
        ref_logprobs: of the reference; needed when `kl_loss_coef` is not 0.
        ratio_eps, ratio_eps_high: clip range; None: its upper side is `ratio_eps` too.
        policy_loss, kl_loss_estimator: one of `kl.SURROGATES`, of `kl.KL_ESTIMATORS`.
        dual_clip: c > 1, or None: off.
        entropy: per slot; needed when `entropy_bonus` is not 0, otherwise only reported.
        surrogate_of: `(logprobs, prev_logprobs, advantages, mask) -> [B, S-1]`, in place of the
            surrogate; `mask` is 1 where a slot counts.
        old_kl_coefs: adds coef * |log rho| to the loss of a token (KL-Cov, Cui et al. 2025,
            arXiv:2505.22617).
        metric_weights: of the means among the metrics, where `weights` do not add up to 1.

    Returns:
        Partial sums: the loss, and the metrics, which are weighted means. `loss`; `ppo_ratio` and,
        if the range is one of rho, `ppo_ratio_clamped`; `ppo_clip_fraction` (share of slots whose
        gradient the clip removes: the ratio is outside the range on the side that the advantage
        pushes to); `approx_kl` (KL of the policy that generated to the one in training, estimator
        k3); `scaled_entropy` (bonus times mean entropy); with `dual_clip`, `dual_clip_fraction`
        (share of slots whose gradient it removes); with `kl_loss_coef`, `kl_loss` (the mean
        estimate, without the coefficient); with `entropy`, `entropy`.

    Raises:
        ValueError: a tensor that a coefficient needs is missing, `dual_clip` is not above 1 or
            belongs to another loss, or the estimator or the policy loss is unknown.
    """
    logprobs, prev_logprobs, advantages = (
        kept(x, weights) for x in (logprobs, prev_logprobs, advantages)
    )
    if policy_loss not in SURROGATES:
        raise unknown("policy_loss", policy_loss, SURROGATES)
    mask = (weights != 0).to(logprobs)
    high = ratio_eps if ratio_eps_high is None else ratio_eps_high
    tokens = Tokens(logprobs, prev_logprobs, advantages, mask, ratio_eps, high)
    surrogate, cut = SURROGATES[policy_loss](tokens)
    rho = tokens.rho
    metrics = {
        "ppo_ratio": rho,
        "ppo_clip_fraction": cut,
        "approx_kl": calculate_kl_penalty(prev_logprobs, logprobs.detach(), estimator="k3"),
    }
    if policy_loss in estimators.LOSSES_OF_TOKENS:
        metrics["ppo_ratio_clamped"] = rho.clamp(1.0 - ratio_eps, 1.0 + high)
    if dual_clip is not None:
        if policy_loss not in estimators.DUAL_CLIPPED:
            bounded = ", ".join(estimators.DUAL_CLIPPED)
            raise ValueError(f"dual_clip={dual_clip} is a bound for {bounded}")
        if not dual_clip > 1:
            raise ValueError(f"dual_clip={dual_clip} must be above 1 (or None: off)")
        bound = -advantages * dual_clip
        metrics["dual_clip_fraction"] = (advantages < 0) & (surrogate > bound)
        surrogate = torch.where(metrics["dual_clip_fraction"], bound, surrogate)
    if surrogate_of is not None:
        inputs = {"logprobs": logprobs, "prev_logprobs": prev_logprobs}
        surrogate = surrogate_of(**inputs, advantages=advantages, mask=mask)
        if surrogate.shape != logprobs.shape:
            raise ValueError(
                f"the loss of tokens has the shape {list(surrogate.shape)}, not that of their "
                f"log-probs, {list(logprobs.shape)}"
            )
        surrogate = kept(surrogate, weights)
    if old_kl_coefs is not None:
        surrogate = surrogate + kept(old_kl_coefs, weights) * tokens.log_ratio.abs()
    loss = (weights * surrogate).sum()
    if kl_loss_coef:
        if ref_logprobs is None:
            needed = "the log-probs of the reference policy"
            raise ValueError(f"kl_loss_coef={kl_loss_coef} needs {needed}")
        reference = kept(ref_logprobs, weights)
        kl = calculate_kl_penalty(logprobs, reference, estimator=kl_loss_estimator)
        loss = loss + kl_loss_coef * (weights * kl).sum()
        metrics["kl_loss"] = kl
    scaled_entropy = torch.zeros_like(loss)
    if entropy is not None:
        metrics["entropy"] = kept(entropy, weights)
    if entropy_bonus:  # without it the entropy needs no backward pass
        if entropy is None:
            raise ValueError(f"entropy_bonus={entropy_bonus} needs the entropy of each slot")
        scaled_entropy = entropy_bonus * (weights * metrics["entropy"]).sum()
        loss = loss - scaled_entropy
    shares = weights if metric_weights is None else metric_weights
    means = {name: (shares * value.detach()).sum() for name, value in metrics.items()}
    return loss, {"loss": loss.detach(), "scaled_entropy": scaled_entropy.detach(), **means}


def reinforce_loss(
    *, logprobs: Tensor, advantages: Tensor, weights: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE (Williams 1992, https://doi.org/10.1007/BF00992696, eq. 11; for language models
    Ahmadian et al. 2024, arXiv:2402.14740, eq. 6): -advantage * log pi(token), all [B, S-1]. There
    is no importance ratio: the gradient is the expected reward's only for the policy that wrote
    the responses. Returns partial sums: the loss and the metric `loss`.
    """
    loss = -(weights * kept(advantages, weights) * kept(logprobs, weights)).sum()
    return loss, {"loss": loss.detach()}


def ppo_critic_loss(
    *,
    values: Tensor,
    prev_values: Tensor,
    returns: Tensor,
    weights: Tensor,
    loss_clip_val: float | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error to the returns, with values clipped to within `loss_clip_val` (None
    or <= 0: not) of those at rollout time. Per slot of [B, S-1]:

        v_clipped = prev + clamp(v - prev, -clip, clip)
        loss = 0.5 * max((v_clipped - ret)^2, (v - ret)^2)

    Returns partial sums: the loss, and metrics `loss` and `value_clip_fraction` (share of slots
    whose gradient the clip removes, because the clipped value is the worse one).
    """
    values, prev_values, returns = (kept(x, weights) for x in (values, prev_values, returns))
    error = (values - returns).square()
    cut = torch.zeros_like(error, dtype=torch.bool)
    if loss_clip_val is not None and loss_clip_val > 0:
        clipped = prev_values + (values - prev_values).clamp(-loss_clip_val, loss_clip_val)
        clipped_error = (clipped - returns).square()
        # Where nothing is clipped, prev + (v - prev) may differ from v by rounding.
        cut = (clipped_error > error) & ((values - prev_values).abs() > loss_clip_val)
        error = torch.maximum(clipped_error, error)
    loss = 0.5 * (weights * error).sum()
    return loss, {"loss": loss.detach(), "value_clip_fraction": (weights * cut).sum()}


def sft_loss(*, logprobs: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of tokens [B, S-1]. Returns partial sums: loss, metric `loss`."""
    loss = -(weights * kept(logprobs, weights)).sum()
    return loss, {"loss": loss.detach()}


def preference_loss(
    *,
    rewards_chosen: Tensor,
    rewards_rejected: Tensor,
    weights: Tensor,
    loss_func: str = "regular_bt",
    margins: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Bradley-Terry loss of pairs. With d = chosen - rejected and the margin m of a pair:

        regular_bt    -log sigmoid(d)         Ouyang et al. 2022, arXiv:2203.02155, eq. 1
        margin_bt     -log sigmoid(d - m)     Touvron et al. 2023, arXiv:2307.09288, eq. 2
        scaled_bt     -m log sigmoid(d)       Wang et al. 2024, arXiv:2410.01257

    Args:
        rewards_chosen, rewards_rejected: [B] or [B, 1], carry the gradient.
        weights: [B], from `loss_weights`. A pair of margin 0 counts in their mean.
        margins: [B], at least 0: how much better the chosen sample is.

    Returns partial sums: the loss, and metrics `loss` and `acc` (share of pairs in the right
    order, whatever the margin; a tie is not). `ValueError`: an unknown loss, or no margins.
    """
    if loss_func not in estimators.PREFERENCE_LOSSES:
        raise unknown("loss_func", loss_func, estimators.PREFERENCE_LOSSES)
    chosen, rejected = (kept(x.reshape(-1), weights) for x in (rewards_chosen, rewards_rejected))
    difference = chosen - rejected
    if loss_func == "regular_bt":
        losses = -logsigmoid(difference)
    elif margins is None:
        raise ValueError(f"loss_func={loss_func!r} needs the margin of each pair")
    elif loss_func == "margin_bt":
        losses = -logsigmoid(difference - kept(margins, weights))
    else:
        losses = -kept(margins, weights) * logsigmoid(difference)
    loss = (weights * losses).sum()
    return loss, {"loss": loss.detach(), "acc": (weights * (difference.detach() > 0)).sum()}


def regression_loss(
    *, predictions: Tensor, labels: Tensor, weights: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean squared error of the attributes (Wang et al. 2024, arXiv:2406.08673), all [B, A];
    `weights` are 0 where there is no label. Returns partial sums: the loss and the metric `loss`.
    `ValueError`: the shapes differ; broadcasting would compare one attribute with another.
    """
    if not predictions.shape == labels.shape == weights.shape:
        raise ValueError(
            f"predictions, labels and weights of shapes {tuple(predictions.shape)}, "
            f"{tuple(labels.shape)} and {tuple(weights.shape)}: they must be equal"
        )
    loss = (weights * (kept(predictions, weights) - kept(labels, weights)).square()).sum()
    return loss, {"loss": loss.detach()}


def _count(keep: Tensor, dim: int) -> Tensor:
    """Number of True along `dim`, kept as a dimension; at least 1, so that it can divide."""
    return keep.sum(dim, keepdim=True, dtype=torch.float64).clamp(min=1)


def calculate_entropy(log_probs: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean entropy over all slots or those of `mask` [B, S]; normalised `log_probs` [B, S, V]."""
    finite = torch.where(log_probs == -torch.inf, 0.0, log_probs)
    entropy = -(log_probs.exp() * finite).sum(-1)
    return entropy.mean() if mask is None else masked_mean(entropy, mask)


# ----------------------------------------------------------------------- a student and its teacher

# Shapes: B samples, S positions, K candidates, the tokens with the largest logits of the teacher.

# A rest of the teacher that float32 cannot tell from none counts as so much.
SMALLEST_REST = 1e-7
# The least log-prob of the student's rest: of a rest of 0 the loss would be infinite or NaN.
SMALLEST_LOG = math.log(torch.finfo(torch.float32).tiny)


def distillation_loss(
    *,
    logprobs: Tensor,
    teacher_logits: Tensor,
    teacher_log_sum_exp: Tensor,
    label_logprobs: Tensor,
    weights: Tensor,
    rest_logprobs: Tensor | None = None,
    kd_loss: str = "fwd_kl",
    jsd_beta: float = 0.5,
    target_logits_scale: float = 1.0,
    kd_loss_weight: float = 1.0,
    sft_loss_weight: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Divergence between the student's distributions and the teacher's, plus the negative
    log-likelihood of the labels.

        loss = kd_loss_weight * divergence - sft_loss_weight * log p(label)

    Without `rest_logprobs` both distributions are those over the K candidates, given that one of
    them comes. With them, both have K + 1 outcomes: the last is any other token.

    Args:
        logprobs: [B, S, K], of the candidates under the student's softmax over the vocabulary;
            carries the gradient, as those of the labels and of the rest do.
        teacher_logits: [B, S, K], up to a constant per position.
        teacher_log_sum_exp: [B, S], of all the teacher's logits, with the same constant.
        label_logprobs, rest_logprobs: [B, S], the student's of the label, and of all tokens
            together that are no candidates.
        weights: [B, S], from `losses.loss_weights`.
        kd_loss, jsd_beta: see `divergence`.
        target_logits_scale: factor of the teacher's logits; 1 with `rest_logprobs`.

    Returns partial sums: the loss, and metrics, which are weighted means: `loss`, `kd_loss`,
    `sft_loss` (both without their weights) and `teacher_mass` (the teacher's probability of the K
    candidates). `ValueError`: an unknown loss, or a scale that the rest cannot have.
    """
    slots = weights.unsqueeze(-1)
    student, teacher = kept(logprobs, slots), kept(teacher_logits, slots)
    log_mass = teacher.logsumexp(-1) - kept(teacher_log_sum_exp, weights)
    if rest_logprobs is None:
        student = student.log_softmax(-1)
        teacher = (target_logits_scale * teacher).log_softmax(-1)
    else:
        if target_logits_scale != 1:
            raise ValueError(
                f"target_logits_scale={target_logits_scale}: the teacher's probability of other "
                "tokens is known at 1 only"
            )
        rest = torch.log(-torch.expm1(log_mass.clamp(max=-SMALLEST_REST)))
        teacher = teacher - kept(teacher_log_sum_exp, weights).unsqueeze(-1)
        teacher = torch.cat([teacher, rest.unsqueeze(-1)], -1).log_softmax(-1)
        own = kept(rest_logprobs, weights).clamp(min=SMALLEST_LOG)
        student = torch.cat([student, own.unsqueeze(-1)], -1)
    kd = (weights * divergence(student, teacher, kd_loss, jsd_beta)).sum()
    sft = -(weights * kept(label_logprobs, weights)).sum()
    loss = kd_loss_weight * kd + sft_loss_weight * sft
    return loss, {
        "loss": loss.detach(),
        "kd_loss": kd.detach(),
        "sft_loss": sft.detach(),
        "teacher_mass": (weights * log_mass.exp().clamp(max=1.0)).sum(),
    }


def divergence(
    student: Tensor, teacher: Tensor, kd_loss: str = "fwd_kl", jsd_beta: float = 0.5
) -> Tensor:
    """Divergence [..] of distributions, log-probs [.., C]: P the teacher, Q the student (which
    carries the gradient), b = `jsd_beta` in (0, 1), M = b P + (1 - b) Q.

        fwd_kl   KL(P || Q)                          Hinton et al. 2015, arXiv:1503.02531
        bwd_kl   KL(Q || P)                          Gu et al. 2023, arXiv:2306.08543
        jsd      b KL(P || M) + (1 - b) KL(Q || M)   Agarwal et al. 2023, arXiv:2306.13649, sec. 2

    `ValueError`: another `kd_loss`.
    """
    if kd_loss == "fwd_kl":
        return _kl(teacher, student)
    if kd_loss == "bwd_kl":
        return _kl(student, teacher)
    if kd_loss != "jsd":
        raise unknown("kd_loss", kd_loss, estimators.DISTILLATION_LOSSES)
    mixture = torch.logaddexp(teacher + math.log(jsd_beta), student + math.log1p(-jsd_beta))
    return jsd_beta * _kl(teacher, mixture) + (1 - jsd_beta) * _kl(student, mixture)


def _kl(a: Tensor, b: Tensor) -> Tensor:
    return (a.exp() * (a - b)).sum(-1)
