# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Layers of Transformer Engine as functions for decoding. Its modules need a GPU, where
`tests/gpu` compares whole models; here objects with their attributes stand for them.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from nemo_aligner.generation import decoding_model
from nemo_aligner.parallel import parallel_state


class Layer:
    """A linear layer of Megatron Core's `extensions.transformer_engine`."""

    def __init__(self, **attributes):
        vars(self).update(weight=torch.randn(6, 4), bias=torch.randn(6), use_bias=True, eps=1e-5)
        self.parallel_mode, self.normalization = "column", "RMSNorm"
        self.layer_norm_bias, self.zero_centered_gamma = None, False
        vars(self).update(attributes)

    def __call__(self, x):
        return "the module itself", None


Layer.__module__ = decoding_model._ENGINE_LAYERS
X = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def group():
    parallel_state.initialize()
    return torch.distributed.group.WORLD


def test_a_layer_without_a_norm(group):
    for mode in ("column", "row"):
        layer = Layer(parallel_mode=mode)
        expected = F.linear(X, layer.weight, layer.bias)
        torch.testing.assert_close(decoding_model._linear(layer, group)(X), expected)
    layer = Layer(use_bias=False, bias=torch.empty(0))
    expected = F.linear(X, layer.weight)
    torch.testing.assert_close(decoding_model._linear(layer, group)(X), expected)


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("one_added", [False, True])
def test_a_layer_with_a_norm(group, kind, one_added):
    weight, bias = torch.randn(4), torch.randn(4) if kind == "LayerNorm" else None
    own = {"layer_norm_weight": weight, "layer_norm_bias": bias, "zero_centered_gamma": one_added}
    layer = Layer(normalization=kind, eps=0.1, **own)
    centered = X - X.mean(-1, keepdim=True) if kind == "LayerNorm" else X
    scaled = centered / (centered.square().mean(-1, keepdim=True) + 0.1).sqrt()
    normed = scaled * (weight + one_added) + (0 if bias is None else bias)
    expected = F.linear(normed, layer.weight, layer.bias)
    torch.testing.assert_close(decoding_model._linear(layer, group)(X), expected)


def test_the_module_is_called_where_it_does_more(group):
    adapter = SimpleNamespace(merged=False)
    assert decoding_model._linear(Layer(lora=adapter), group)(X) == "the module itself"
    adapter.merged = True
    assert torch.is_tensor(decoding_model._linear(Layer(lora=adapter), group)(X))


def test_a_norm_of_its_own():
    norm = type("RMSNorm", (), {"__module__": "transformer_engine.pytorch.module.rmsnorm"})()
    vars(norm).update(weight=torch.randn(4), eps=0.1, zero_centered_gamma=False)
    expected = X / (X.square().mean(-1, keepdim=True) + 0.1).sqrt() * norm.weight
    torch.testing.assert_close(decoding_model._norm(norm)(X), expected)
    other = torch.nn.LayerNorm(4)
    assert decoding_model._norm(other) is other
