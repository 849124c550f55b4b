# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Matrix products on CPUs by oneDNN, where PyTorch would take a slower library or an operand in an
order that costs more.

PyTorch gives float32 products to Intel's MKL, which keeps its AVX-512 kernels for Intel's CPUs: on
an AMD EPYC with AVX-512 oneDNN, which every PyTorch for x86 contains too, needs half the time. On
one without it MKL's kernels are the faster ones, and only packed weights are read faster by
oneDNN. PyTorch has no setting for it. The kind of CPU decides and not a measurement, so that a
resumed job computes the same bits.
"""

import functools
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

# Multiplications from which on the way through Python is paid for.
_LEAST_WORK = 1 << 21


def vendor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Vendor of the CPU as Linux names it ("GenuineIntel", "AuthenticAMD"); elsewhere ""."""
    if not cpuinfo.exists():
        return ""
    found = re.search(r"^vendor_id\s*:\s*(\S+)", cpuinfo.read_text(), re.MULTILINE)
    return found[1] if found else ""


def has_avx512() -> bool:
    """Whether PyTorch may use AVX-512 on this machine's CPU."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


@functools.cache
def onednn_packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies by packed weights of `dtype` faster than PyTorch by others:
    float32 beside MKL on CPUs that are not Intel's, bfloat16 where it has kernels.
    """
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, _PRODUCT):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    foreign = torch.backends.mkl.is_available() and vendor() not in ("", "GenuineIntel")
    return foreign and dtype == torch.float32


_PRODUCT = "_linear_pointwise"
_NO_ACTIVATION: tuple = ("none", [], "")


def packed_linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """`x` -> `x @ weight.T + bias` with a copy of `weight` in the order that is read fastest.

    That is oneDNN's own where `onednn_packs` the dtype. MKL is given a float32 weight by its
    columns, which costs less while x has few rows, and no more when it has hundreds.

    Without gradients; later changes of `weight` are not seen.

    Args:
        weight: `[out, in]` on a CPU.
        bias: `[out]` or None.
    """
    weight = weight.detach()
    if onednn_packs(weight.dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        product = torch.ops.mkldnn._linear_pointwise.default
        return lambda x: product(x, packed, bias, *_NO_ACTIVATION)
    if weight.dtype == torch.float32 and torch.backends.mkl.is_available():
        weight = weight.t().contiguous().t()
    return lambda x: F.linear(x, weight, bias)


def _in_rows_or_columns(x: Tensor) -> bool:
    (rows, columns), (down, right) = x.shape, x.stride()
    return (right == 1 and down >= columns) or (down == 1 and right >= rows)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    if (
        a.dtype == b.dtype == torch.float32
        and a.size(1) == b.size(0)
        and a.numel() * b.size(1) >= _LEAST_WORK
        and _in_rows_or_columns(a)
        and _in_rows_or_columns(b)
    ):
        return torch.ops.mkldnn._linear_pointwise.default(a, b.t(), None, *_NO_ACTIVATION)
    # The same product, by the kernel that writes into a given tensor.
    return torch.ops.aten.mm.out(a, b, out=a.new_empty(a.size(0), b.size(1)))


@functools.cache
def take_products_from_mkl() -> torch.library.Library | None:
    """Give this process's large float32 matrix products to oneDNN, where that is faster: all that
    PyTorch makes of `torch.mm`, thus linear layers and both gradients. Returns the registration,
    None without one.
    """
    if not (onednn_packs(torch.float32) and has_avx512()):
        return None
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        library.impl("mm", _mm, "CPU", allow_override=True)
    return library
