# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Padding that is not computed changes no number: loss, metrics, gradient, log-probs, values and
rewards are those of the run that computes it, for every role.
"""

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import save_to_aux_losses_tracker

from nemo_aligner.training import passes
from tests.cases import some_of
from tests.distributed import matrix
from tests.padded_runs import as_padded

pytestmark = pytest.mark.slow

BOUND = 1e-5  # fp32: products of other widths use other kernels, which differ from CPU to CPU
ROLES = [("llama", role) for role in matrix.ROLES] + [("gpt2", "actor"), ("gpt2", "critic")]
SIZES = (2, matrix.DYNAMIC)
# Each role with one size, in turns, then with the other.
CASES = [(*role, SIZES[(n + k) % 2]) for k in range(2) for n, role in enumerate(ROLES)]


def counted(phase):
    """Metrics of the tokens that were computed since the last call."""
    found = passes.token_metrics({phase: phase}, {})
    return {name.removeprefix("tokens/"): number for name, number in found.items()}


def numbers_of(model, role, reduction, masked_value, size=2):
    counted(passes.TRAIN)
    batch = matrix.global_batch(role, masked_value)
    loss = matrix.loss_and_gradient(model, batch, reduction, size)
    computed = counted(passes.TRAIN)
    return {"loss": loss, "gradient": matrix.gradient(model)}, computed


@some_of("architecture, role, size", CASES, keep=len(ROLES))
def test_padding_that_is_not_computed_changes_nothing(
    tiny_tokenizer_dir, models, architecture, role, size
):
    model, *_ = matrix.build(tiny_tokenizer_dir, models, architecture, role, {})
    for reduction in matrix.ROLES[role].reductions:
        if (reduction, size) == ("microbatch", matrix.DYNAMIC):
            continue  # refused: it depends on which samples share a micro-batch
        with as_padded():
            expected, padded = numbers_of(model, role, reduction, 0.0)
        found, cut = numbers_of(model, role, reduction, torch.nan, size)
        assert cut["train_computed"] < 0.9 * padded["train_computed"]
        assert cut["train_real_fraction"] > padded["train_real_fraction"]
        for name in expected:
            apart = matrix.apart(found[name], expected[name], is_gradient=name == "gradient")
            assert apart < BOUND, (reduction, name, apart)
    with as_padded():
        expected = matrix.inferred(model, role)
    padded = counted(passes.FORWARD)
    model.micro_batch_tokens = matrix.DYNAMIC_TOKENS if size == matrix.DYNAMIC else None
    found = matrix.inferred(model, role)
    if expected:
        computed = counted(passes.FORWARD)["forward_computed"]
        assert computed < 0.9 * padded["forward_computed"]
    for name in expected:
        assert matrix.apart(found[name], expected[name]) < BOUND, name


def test_counts_of_tokens(tiny_tokenizer_dir, models):
    """8 samples of 66 tokens in all; sorted into threes 13, 12 | 10, 9, 7 | 6, 5, 4."""
    model, *_ = matrix.build(tiny_tokenizer_dir, models, "llama", "critic", {})
    counted(passes.FORWARD)
    model.infer((matrix.global_batch("critic", 0.0)["tokens"], matrix.LENGTHS))
    computed = {"forward_computed": 2 * 13 + 3 * 10 + 3 * 6, "forward_real_fraction": 66 / 74}
    assert counted(passes.FORWARD) == computed
    assert counted(passes.FORWARD) == {}


def test_losses_that_balance_experts_see_all_padding(tiny_tokenizer_dir, models):
    """They are statistics of the tokens of a micro-batch: nothing is cut, no sample moves."""
    balanced = {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.1}
    model, *_ = matrix.build(tiny_tokenizer_dir, models, "moe", "sft", balanced)
    # A pass of a model with one layer that ended early left its values behind.
    save_to_aux_losses_tracker("z_loss", torch.ones(()), layer_number=1, num_layers=1)
    with as_padded():
        expected, padded = numbers_of(model, "sft", "token", 0.0)
    found, cut = numbers_of(model, "sft", "token", 0.0)
    assert cut["train_computed"] == padded["train_computed"]
    assert found["loss"] == expected["loss"] and "moe_load_balancing_loss" in found["loss"]
    ours, wanted = found["gradient"], expected["gradient"]
    assert all(torch.equal(ours[key], wanted[key]) for key in wanted)
