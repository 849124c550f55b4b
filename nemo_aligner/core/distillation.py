# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The loss of a student that learns the distributions of a teacher, in partial sums as in
`core/losses.py`. Shapes: B samples, S positions, K candidates, the tokens with the largest logits
of the teacher. Slots of weight 0 may hold NaN.
"""

import math

import torch
from torch import Tensor

from nemo_aligner.core.estimators import DISTILLATION_LOSSES
from nemo_aligner.core.losses import kept

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
        raise ValueError(
            f"kd_loss={kd_loss!r} is unknown; choose one of {', '.join(DISTILLATION_LOSSES)}"
        )
    mixture = torch.logaddexp(teacher + math.log(jsd_beta), student + math.log1p(-jsd_beta))
    return jsd_beta * _kl(teacher, mixture) + (1 - jsd_beta) * _kl(student, mixture)


def _kl(a: Tensor, b: Tensor) -> Tensor:
    return (a.exp() * (a - b)).sum(-1)
