# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Matrix products by oneDNN."""

import subprocess
import sys

import pytest
import torch

from nemo_aligner.parallel import device

ONEDNN = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
pytestmark = pytest.mark.skipif(not ONEDNN, reason="this PyTorch has not both libraries")

# In a process of its own, which takes its CPU for one with AVX-512 by another maker than Intel.
REGISTERED = """
import sys, warnings
import torch
warnings.simplefilter("error")
from nemo_aligner.parallel import device
device.vendor = lambda: "AuthenticAMD"
device.has_avx512 = lambda: False
assert device.take_products_from_mkl() is None
device.take_products_from_mkl.cache_clear()
device.has_avx512 = lambda: True
assert device.take_products_from_mkl() is not None

def names(function):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return {event.key for event in profile.key_averages()}

torch.manual_seed(0)
large, wide = torch.randn(200, 300), torch.randn(300, 400)
assert "mkldnn::_linear_pointwise" in names(lambda: large @ wide)
assert "mkldnn::_linear_pointwise" not in names(lambda: large[:2] @ wide)

def check(a, b):
    expected = a.double() @ b.double()
    apart = (a @ b - expected).abs().max() / expected.abs().max()
    assert apart < 1e-5, (a.stride(), b.stride(), apart)

lefts = [large, large.t().contiguous().t(), large[:1], torch.randn(200, 600)[:, ::2]]
lefts += [torch.randn(200, 400)[:, 50:350], torch.randn(1, 300).expand(200, 300)]
lefts += [torch.randn(200, 1).expand(200, 300)]
rights = [wide, wide.t().contiguous().t(), torch.randn(900, 400)[::3]]
rights += [torch.randn(1, 400).expand(300, 400)]
for a in lefts:
    for b in rights:
        check(a, b)
check(torch.randn(70, 1), torch.randn(1, 90000))
assert (large[:, :0] @ wide[:0]).eq(0).all()
assert (large.long() @ wide.long()).dtype == torch.int64
for a, b in ((large, wide[:299]), (large, wide.double())):
    try:
        a @ b
        raise AssertionError("accepted")
    except RuntimeError as error:
        assert "shapes cannot be multiplied" in str(error) or "same dtype" in str(error), error

x = torch.randn(4, 50, 300, requires_grad=True)
weight = torch.randn(400, 300, requires_grad=True)
found = torch.autograd.grad(torch.nn.functional.linear(x, weight).square().sum(), (x, weight))
exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
expected = torch.autograd.grad(torch.nn.functional.linear(*exact).square().sum(), exact)
for mine, other in zip(found, expected):
    assert (mine - other).abs().max() / other.abs().max() < 1e-5
print("checked")
"""


@pytest.mark.full
def test_products_and_their_gradients_are_those_of_pytorch():
    own = {"capture_output": True, "text": True, "timeout": 100}
    done = subprocess.run([sys.executable, "-c", REGISTERED], **own)
    assert done.stdout == "checked\n", done.stderr


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_packed_weight_multiplies_as_the_weight(dtype, bound, with_bias):
    if dtype == torch.bfloat16 and not device.onednn_packs(dtype):
        pytest.skip("this CPU has no instructions for bfloat16")
    weight, bias = torch.randn(96, 64, dtype=dtype), torch.randn(96, dtype=dtype)
    product = device.packed_linear(weight, bias if with_bias else None)
    for rows in (1, 7, 300):
        x = torch.randn(2, rows, 64, dtype=dtype)
        expected = x.double() @ weight.double().t() + (bias.double() if with_bias else 0)
        apart = (product(x) - expected).abs().max() / expected.abs().max()
        assert apart < bound


@pytest.mark.parametrize(
    "text, vendor",
    [
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel\t: 1\n", "AuthenticAMD"),
        ("processor : 0\nBogoMIPS : 100\n", ""),  # of Arm
    ],
)
def test_vendor(tmp_path, text, vendor):
    (tmp_path / "cpuinfo").write_text(text)
    assert device.vendor(tmp_path / "cpuinfo") == vendor
    assert device.vendor(tmp_path / "none") == ""


def test_intel_keeps_mkl(monkeypatch):
    packs = device.onednn_packs.__wrapped__  # without its cache
    for maker, expected in (("GenuineIntel", False), ("", False), ("AuthenticAMD", True)):
        monkeypatch.setattr(device, "vendor", lambda maker=maker: maker)
        assert packs(torch.float32) == expected, maker
    assert not packs(torch.float64)
