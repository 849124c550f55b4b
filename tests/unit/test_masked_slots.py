# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Slots that do not count may hold anything: NaN or infinity there changes no bit of any result or
gradient.
"""

from functools import partial

import pytest
import torch

from nemo_aligner.algorithms.ppo_data import mean_of_sample_means, mean_of_sample_sums
from nemo_aligner.core import advantages, kl, losses, metrics, tensors
from nemo_aligner.core.estimators import ROLLOUT_REDUCTIONS
from nemo_aligner.parallel import collectives as distributed
from nemo_aligner.parallel import vocab_parallel

ROWS, WIDTH, VOCABULARY = 5, 8, 7
PROMPT_LENGTHS = torch.tensor([2, 1, 4, 3, 2])
LENGTHS = torch.tensor([9, 5, 4, 7, 3])  # sample 2 has no response
COLUMNS = torch.arange(WIDTH)
SLOTS = (COLUMNS >= PROMPT_LENGTHS[:, None] - 1) & (COLUMNS < LENGTHS[:, None] - 1)
VALID = SLOTS.any(1)
MASK = SLOTS.float()
LABELLED = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0], [1, 1, 0]]).bool()
PROMPTS = torch.tensor([3, 3, 3, 8, 8])
TOKENS = torch.arange(ROWS * WIDTH).reshape(ROWS, WIDTH) % VOCABULARY
LOGITS_USED = SLOTS & (COLUMNS < WIDTH - 1)  # the last column predicts nothing


def weights(keep=SLOTS, reduction="token"):
    return losses.loss_weights(keep.float(), reduction, 1)


def slot_by_slot(function, keep=SLOTS):
    """For functions that keep what is in a slot to itself: what counts of their result."""
    return lambda **inputs: torch.where(keep, function(**inputs), 0.0)


POLICY = "logprobs prev_logprobs advantages ref_logprobs entropy"
PPO = {"ratio_eps": 0.2, "dual_clip": 1.5, "kl_loss_coef": 0.1, "entropy_bonus": 0.1}
GAE = {"discount_factor": 0.97, "gae_lambda": 0.9, "mask": MASK, "critic_gae_lambda": 1.0}
REDUCTIONS = ("token", "sequence", "microbatch", "token")


def case(function, inputs, keep=SLOTS, **options):
    """(function, names of its inputs, which of their slots count)."""
    return partial(function, **options) if options else function, inputs, keep


def by_mask(function, keep=SLOTS, **options):
    return case(lambda x: function(x, MASK, **options), "x", keep)


def in_groups(function):
    return case(lambda scores: function(scores, PROMPTS, VALID), "scores", VALID)


CASES = {
    f"policy loss, {reduction}, KL {estimator}": case(
        losses.ppo_actor_loss,
        POLICY,
        weights=weights(SLOTS, reduction),
        kl_loss_estimator=estimator,
        **PPO,
    )
    for reduction, estimator in zip(REDUCTIONS, kl.KL_ESTIMATORS)
}
for clip in (0.2, None):
    own = {"weights": weights(), "loss_clip_val": clip}
    CASES[f"value loss, clip {clip}"] = case(
        losses.ppo_critic_loss, "values prev_values returns", **own
    )
for name in kl.KL_ESTIMATORS:
    function = slot_by_slot(partial(kl.calculate_kl_penalty, estimator=name))
    CASES[f"KL {name}"] = case(function, "log_probs_a log_probs_b")
for function in (tensors.masked_sum, tensors.masked_mean, tensors.masked_std):
    for dim in (None, 0, 1):
        CASES[f"{function.__name__}, {dim}"] = by_mask(function, dim=dim)
for function in (mean_of_sample_means, mean_of_sample_sums):
    CASES[function.__name__] = by_mask(lambda *given, own=function: torch.tensor(own(*given)))
PAIR, SCALARS = "rewards_chosen rewards_rejected", "predictions labels"
OF_LABELS = {"inputs": SCALARS, "keep": LABELLED, "weights": weights(LABELLED)}
CASES |= {
    "sft loss": case(losses.sft_loss, "logprobs", weights=weights()),
    "preference loss": case(losses.preference_loss, PAIR, VALID, weights=weights(VALID)),
    "regression loss": case(losses.regression_loss, **OF_LABELS),
    "moments of correlation": case(metrics.correlation_moments, **OF_LABELS),
    "moments of explained variance": case(
        metrics.explained_variance_moments, "values returns", weights=weights()
    ),
    "GAE": case(advantages.calculate_advantages_and_returns, "values rewards", **GAE),
    "REINFORCE": case(
        lambda rewards: advantages.calculate_reinforce_returns(rewards, 0.9, MASK), "rewards"
    ),
    "RLOO": in_groups(advantages.calculate_rloo_advantages),
    "GRPO": in_groups(advantages.calculate_grpo_advantages),
    "scores over responses": by_mask(advantages.spread_over_response, VALID),
    "token rewards": case(
        slot_by_slot(
            lambda kl: advantages.calculate_ppo_rewards(kl, torch.ones(ROWS), LENGTHS, kl, 0.1)
        ),
        "kl",
    ),
    "mean and variance of all ranks": by_mask(distributed.masked_global_mean_var),
    "whitening": by_mask(distributed.normalize_tensor),
    "whitening, mean kept": by_mask(distributed.normalize_tensor, shift_mean=False),
    "entropy of log-probs": case(
        lambda log_probs: losses.calculate_entropy(log_probs, MASK), "log_probs"
    ),
    "log-probs": case(
        slot_by_slot(
            lambda logits: vocab_parallel.from_parallel_logits_to_logprobs(logits, TOKENS),
            LOGITS_USED[:, :-1],
        ),
        "logits",
        LOGITS_USED,
    ),
    "entropy": case(
        lambda logits: vocab_parallel.calculate_distributed_entropy(logits, LOGITS_USED[:, :-1]),
        "logits",
        LOGITS_USED,
    ),
}
# Nothing trains through these by themselves, and their gradients are not free of NaN.
WITHOUT_GRADIENT = {
    "entropy of log-probs": "NaN in a slot that holds NaN; training uses that of `vocab_parallel`",
    "KL k2": "stays in the slot that holds NaN; `ppo_actor_loss` selects the slots before",
    "KL k3": "likewise",
    "masked_std, 0": "the square root has none at 0, where one value or none counts",
    "masked_std, 1": "likewise",
}


def clean_inputs(names, keep) -> dict[str, torch.Tensor]:
    """Random where a slot counts, 0 elsewhere."""
    random = torch.Generator().manual_seed(1)
    inputs = {}
    for name in names:
        shape = (*keep.shape, VOCABULARY) if name in ("logits", "log_probs") else keep.shape
        values = torch.randn(shape, generator=random)
        values = values.log_softmax(-1) if name == "log_probs" else values
        inputs[name] = torch.where(expanded(keep, shape), values, 0.0)
    return inputs


def expanded(keep, shape):
    return keep.reshape(*keep.shape, *[1] * (len(shape) - keep.dim())).expand(shape)


def results(case, inputs) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """All numbers that a function returns, and their gradients with respect to all inputs."""
    leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}
    outputs = flat(CASES[case][0](**leaves))
    differentiable = [output for output in outputs if output.requires_grad]
    gradients = []
    if differentiable and case not in WITHOUT_GRADIENT:
        total = sum((output.double() * (1 + i)).sum() for i, output in enumerate(differentiable))
        gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return [output.detach() for output in outputs], [
        gradient for gradient in gradients if gradient is not None
    ]


def flat(output) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    values = output.values() if isinstance(output, dict) else output
    return [tensor for value in values for tensor in flat(value)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf])
def test_garbage_where_nothing_counts_changes_nothing(case, garbage):
    _, names, keep = CASES[case]
    names = names.split()
    inputs = clean_inputs(names, keep)
    expected, expected_gradients = results(case, inputs)
    assert all(tensor.isfinite().all() for tensor in [*expected, *expected_gradients])
    for planted in [[name] for name in names] + [list(names)]:
        spoiled = lambda value: torch.where(expanded(keep, value.shape), value, garbage)
        dirty = {n: spoiled(value) if n in planted else value for n, value in inputs.items()}
        outputs, gradients = results(case, dirty)
        assert len(outputs) == len(expected)
        assert all(map(torch.equal, outputs, expected)), planted
        assert len(gradients) == len(expected_gradients)
        assert all(map(torch.equal, gradients, expected_gradients)), planted


def test_nothing_counts():
    """Losses of an empty batch are 0, with a gradient of 0, whatever is in it."""
    nothing = torch.zeros_like(MASK)
    for reduction in ROLLOUT_REDUCTIONS:
        empty = losses.loss_weights(nothing, reduction, 1, longest=9)
        leaf = torch.full_like(MASK, torch.nan, requires_grad=True)
        others = {name: torch.full_like(MASK, torch.inf) for name in POLICY.split()[1:]}
        options = {"ratio_eps": 0.2, "dual_clip": 2.0, "kl_loss_coef": 1.0, "entropy_bonus": 0.1}
        loss = losses.ppo_actor_loss(logprobs=leaf, **others, weights=empty, **options)[0]
        rest = {"prev_values": leaf.detach(), "returns": leaf.detach(), "loss_clip_val": 0.2}
        loss = loss + losses.ppo_critic_loss(values=leaf, weights=empty, **rest)[0]
        loss = loss + losses.sft_loss(logprobs=leaf, weights=empty)[0]
        loss.backward()
        assert loss.item() == 0 and not leaf.grad.any()
