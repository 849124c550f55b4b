# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""SteerLM 2.0: the loss of a policy that learns to respond as an attribute model would have it.
Pure functions of plain tensors.

Wang et al. 2024, arXiv:2406.08673, section 5. To each prompt x with attributes a there are n
responses y, sampled from an earlier policy Q'. The target is P(y|a,x), proportional to
P(a|x,y) P(y|x), and the loss the divergence KL(P || Q) of the policy Q from it. Both
distributions are estimated on the samples by self-normalized importance weights:

    w_i = softmax_i(log P(a|x,y_i) + log P(y_i|x) - log Q'(y_i|a,x))
    b_i = softmax_i(log Q(y_i|a,x) - log Q'(y_i|a,x))

The divergence of a prompt is sum_i w_i log(w_i / b_i), and its gradient
-sum_i (w_i - b_i) grad log Q(y_i|a,x): a weighted likelihood whose weights sum to 0.

Shapes: B prompts, n responses to each. Responses that do not count may hold NaN.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class PromptWeights(NamedTuple):
    """What a batch of prompts gives."""

    # float64 `[B]`, the divergence of each prompt divided by the mean number of tokens of its
    # responses; 0 if none counts
    losses: Tensor
    divergences: Tensor  # float64 `[B]`, without that division
    # float32 `[B, n]`, c_i such that sum_i c_i * log Q(y_i|a,x) has the gradient of `losses`; 0
    # for a response that does not count
    factors: Tensor


def target_weights(log_p_attributes: Tensor, log_p_response: Tensor, log_q: Tensor) -> Tensor:
    """w of the module docstring, float64, the shape of the arguments.

    Args:
        log_p_attributes: `[..., n]`, log P(a|x,y).
        log_p_response: `[..., n]`, log P(y|x).
        log_q: `[..., n]`, log Q'(y|a,x).
    """
    return torch.softmax((log_p_attributes.double() + log_p_response - log_q), -1)


def prompt_weights(
    log_policy: Tensor, log_q: Tensor, targets: Tensor, tokens: Tensor
) -> PromptWeights:
    """Losses of prompts and the factors of their gradient.

    Args:
        log_policy: `[B, n]`, log Q(y|a,x) of the policy in training; no gradient is needed.
        log_q: `[B, n]`, log Q'(y|a,x).
        targets: `[B, n]`, from `target_weights`.
        tokens: `[B, n]`, how many tokens log_policy is the sum over; 0: the response does not
            count.
    """
    counts = tokens > 0
    some = counts.any(1, keepdim=True)
    ratios = torch.where(counts, log_policy.double() - log_q.double(), -torch.inf)
    # A row of -inf has no softmax.
    log_weights = torch.log_softmax(torch.where(some, ratios, 0.0), 1)
    wanted = torch.where(counts, targets.double(), 0.0)
    terms = torch.xlogy(wanted, wanted) - torch.where(counts, wanted * log_weights, 0.0)
    divergences = terms.sum(1)
    mean_tokens = (tokens.double().sum(1) / counts.sum(1).clamp(min=1)).clamp(min=1)
    factors = torch.where(counts, log_weights.exp() - wanted, 0.0)
    return PromptWeights(
        losses=divergences / mean_tokens,
        divergences=divergences,
        factors=(factors / mean_tokens.unsqueeze(1)).float(),
    )
