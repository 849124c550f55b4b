# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""FLOPs of a model are those that PyTorch counts, and the speeds that are made of them."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from nemo_aligner.training import passes
from nemo_aligner.training.passes import attended_pairs, pass_flops, peak_tflops
from tests.distributed import matrix

ROWS, WIDTH = 2, 12


@pytest.mark.parametrize(
    "architecture, role",
    [("gpt2", "actor"), ("llama", "actor"), ("llama", "critic"), ("moe", "actor")],
)
def test_flops_of_a_pass_are_those_of_pytorch(tiny_tokenizer_dir, models, architecture, role):
    model, *_ = matrix.build(tiny_tokenizer_dir, models, architecture, role, {})
    (chunk,) = model.unwrapped()
    tokens = torch.randint(0, 290, (ROWS, WIDTH))
    counts = {}
    with sdpa_kernel(SDPBackend.MATH):  # the products of others are not counted on a CPU
        for training in (False, True):
            with FlopCounterMode(display=False) as counter:
                output = chunk(tokens, torch.arange(WIDTH).expand_as(tokens), None)
                if training:
                    output.float().sum().backward()
            counts[training] = counter.get_total_flops()
    pairs = ROWS * WIDTH**2  # it multiplies what the mask hides, too
    for training, expected in counts.items():
        assert pass_flops(chunk, ROWS * WIDTH, pairs, training) == expected


def test_frozen_layers_have_no_gradient_of_weights(tiny_tokenizer_dir, models):
    flops = {}
    for architecture in ("llama", "lora"):
        model, *_ = matrix.build(tiny_tokenizer_dir, models, architecture, "actor", {})
        (chunk,) = model.unwrapped()
        flops[architecture] = [pass_flops(chunk, *work, True) for work in ((1, 0), (0, 1))]
    assert flops["lora"] == [flops["llama"][0] * 2 / 3, flops["llama"][1]]


def test_each_token_attends_to_itself_and_those_before():
    assert attended_pairs(torch.tensor([1, 3])) == 1 + (1 + 2 + 3)


def test_speeds_are_of_what_is_no_padding(monkeypatch):
    passes.forget_token_counts()
    for _ in range(2):
        passes.count_tokens(passes.TRAIN, 4, 300, 400, 6 * 10**12)
    monkeypatch.setattr(passes, "peak_of_this_card", lambda: 989.4)
    names = {passes.FORWARD: "logprobs", passes.TRAIN: "train"}
    found = passes.token_metrics(names, {"train": 2.0, "logprobs": 0.0})
    tokens = {"tokens/train_computed": 800, "tokens/train_real_fraction": 0.75}
    wanted = {"tokens_per_s": 300, "samples_per_s": 4, "tflops": 6, "mfu": 6 / 989.4}
    speeds = {f"speed/train_{name}": speed for name, speed in wanted.items()}
    assert found == pytest.approx(tokens | speeds)
    assert passes.token_metrics(names, {}) == {}


@pytest.mark.parametrize(
    "card, peak",
    [("NVIDIA H100 PCIe", 756.0), ("NVIDIA A100-SXM4-80GB", 312.0), ("Tesla T4", None)],
)
def test_peaks_of_cards(card, peak):
    assert peak_tflops(card) == peak
