# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Operations with a gradient of their own against PyTorch's separate ones, and what they are for:
the layers use them, and the optimizer is the fused one.
"""

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.mlp import MLP

from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.models.nlp.gpt.megatron_layers import RMSNorm, SwiGLUMLP
from nemo_aligner.parallel.device import SwiGLU, apply_rotary, rms_norm
from tests.tiny_models import tiny_config

DTYPES = [torch.float32, torch.bfloat16]


def outputs_and_gradients(function, *inputs):
    """Of a function, with a gradient that differs from element to element."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = function(*leaves)
    weights = torch.linspace(-1, 1, output.numel()).reshape(output.shape).to(output.dtype)
    output.backward(weights)
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_gives_the_bits_of_separate_operations(dtype):
    def separate(both):
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up

    x = random(5, 3, 14, dtype=dtype)
    expected = outputs_and_gradients(separate, x)
    found = outputs_and_gradients(SwiGLU.apply, x)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    with torch.no_grad():
        kept = x.clone()
        assert torch.equal(SwiGLU.apply(x), expected[0]) and torch.equal(x, kept)


def test_rms_norm_is_that_of_pytorch():
    x, weight = random(6, 5, 24) * 3, random(24) + 1
    found = outputs_and_gradients(lambda x, w: rms_norm(x, w, 1e-5), x, weight)
    pytorchs = lambda x, w: F.rms_norm(x, (24,), w, 1e-5)
    expected = outputs_and_gradients(pytorchs, x.double(), weight.double())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [16, 10])  # all columns, or some of them
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_is_that_of_megatron(dtype, width):
    angles = random(7, 1, 1, width // 2)
    freqs = torch.cat((angles, angles), dim=-1)
    original = rope_utils._apply_rotary_pos_emb_bshd
    original = getattr(original, "args", [original])[0]  # it may have been replaced already
    heads = random(7, 2, 3, 20, dtype=dtype)[..., :16]  # a view, as from the joint product

    ours = outputs_and_gradients(lambda t: apply_rotary(original, t, freqs, mscale=1.5), heads)
    megatrons = outputs_and_gradients(lambda t: original(t, freqs, mscale=1.5), heads)
    tolerance = {} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 3e-2}
    for found, expected in zip(ours, megatrons, strict=True):
        torch.testing.assert_close(found, expected, **tolerance)


def test_other_rotations_stay_those_of_megatron():
    def original(*arguments, **more):
        return arguments[2:], more

    usual = {"mscale": 1.0}
    assert apply_rotary(original, 0, 0, rotary_interleaved=True) == ((True,), usual)
    assert apply_rotary(original, 0, 0, inverse=True)[1] == usual | {"inverse": True}
    t, angles = torch.ones(2, 1, 1, 4), torch.ones(2, 1, 1, 4)
    for name in ("multi_latent_attention", "mla_rotary_interleaved"):  # of 0.16, of 0.19
        assert apply_rotary(original, t, angles, False, **{name: False}).shape == t.shape


@pytest.mark.slow
def test_a_llama_is_built_with_them(tiny_tokenizer_dir):
    model = MegatronGPTModel(tiny_config(tiny_tokenizer_dir, "llama"))
    modules = list(model.unwrapped()[0].modules())
    assert {type(m) for m in modules if isinstance(m, MLP)} == {SwiGLUMLP}
    assert {type(m) for m in modules if isinstance(m, torch.nn.RMSNorm)} == {RMSNorm}
    optimizer, _ = model.setup_megatron_optimization(max_steps=2)
    inner = optimizer.chained_optimizers[0].optimizer
    assert [group["fused"] for group in inner.param_groups] == [True] * len(inner.param_groups)
    state = inner.state_dict()
    for group in state["param_groups"]:  # from a checkpoint of another machine
        group["fused"] = None
    inner.load_state_dict(state)
    assert all(group["fused"] for group in inner.param_groups)
