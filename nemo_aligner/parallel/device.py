# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The device and the communication backend of this process, and operations that are faster on CPUs
than PyTorch's: matrix products by oneDNN, and parts of a transformer layer with a gradient of
their own, for which Transformer Engine has kernels on a GPU.

PyTorch gives float32 products to Intel's MKL, which uses AVX-512 on Intel's CPUs only: on an AMD
EPYC with AVX-512 oneDNN needs half the time. The kind of CPU decides and not a measurement, so
that a resumed job computes the same bits.
"""

import ctypes
import functools
import gc
import os
import platform
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from nemo.utils import logging
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_aligner.core.tensors import apply_func_to_dict, move_to_device_if_tensor


def get_device() -> torch.device:
    """The current CUDA device, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def get_backend() -> str:
    """`torch.distributed` backend for tensors on `get_device()`: "nccl" or "gloo"."""
    return "nccl" if torch.cuda.is_available() else "gloo"


# Settings of `mallopt` (glibc's malloc.h) and the variables by which a user sets them.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_USERS_CHOICE = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
_LARGEST_KEPT = 1 << 30  # bytes


@functools.cache
def keep_freed_memory() -> None:
    """Let this process reuse the memory of freed tensors, up to 1 GiB each; with CUDA do nothing.
    The C library returns it to the system, and zeroed pages cost a quarter of the time of
    log-probs. Other C libraries, and a user's own choice by the environment, are left alone.
    """
    if torch.cuda.is_available() or any(name in os.environ for name in _USERS_CHOICE):
        return
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
        library.mallopt(_M_TRIM_THRESHOLD, _LARGEST_KEPT)


def cuda_dict(dictionary: Mapping[str, Any]) -> dict[str, Any]:
    return apply_func_to_dict(
        lambda item: move_to_device_if_tensor(get_device(), item), dictionary
    )


def clear_memory() -> None:
    """Collect garbage, and give memory of the device that nobody uses back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def log_memory(prefix: str) -> None:
    """Log how much memory of the GPU PyTorch and others use; without CUDA log nothing."""
    if not torch.cuda.is_available():
        return
    free, total = torch.cuda.mem_get_info()
    own, occupied = (value / 2**30 for value in (torch.cuda.memory_allocated(), total - free))
    other = f"all {occupied:.2f} GiB, not PyTorch {occupied - own:.2f} GiB"
    logging.info(f"GPU memory at {prefix}: PyTorch {own:.2f} GiB, {other}")


# Multiplications from which on the way through Python is paid for.
_LEAST_WORK = 1 << 21


def vendor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Vendor of the CPU as Linux names it ("GenuineIntel", "AuthenticAMD"); elsewhere ""."""
    if not cpuinfo.exists():
        return ""
    found = re.search(r"^vendor_id\s*:\s*(\S+)", cpuinfo.read_text(), re.MULTILINE)
    return found[1] if found else ""


def has_avx512() -> bool:
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


@functools.cache
def onednn_packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies by packed weights of `dtype` faster than PyTorch by others:
    float32 on CPUs that are not Intel's, bfloat16 where it has kernels.
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
    """`x` -> `x @ weight.T + bias` with a copy of `weight` `[out, in]` in the order that is read
    fastest (oneDNN's own where `onednn_packs` the dtype, else by columns); without gradients.
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
    return torch.ops.aten.mm.out(a, b, out=a.new_empty(a.size(0), b.size(1)))


@functools.cache
def take_products_from_mkl() -> torch.library.Library | None:
    """Give this process's large float32 products (all of `torch.mm`: linear layers and both
    gradients) to oneDNN, where that is faster. Returns the registration, None without one.
    """
    if not (onednn_packs(torch.float32) and has_avx512()):
        return None
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        library.impl("mm", _mm, "CPU", allow_override=True)
    return library


class SwiGLU(torch.autograd.Function):
    """`silu(gate) * up` for the halves `[..., f]` of `both` `[..., 2f]`; no bit differs."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        activated = F.silu(gate)
        if not ctx.needs_input_grad[0]:
            return activated.mul_(up)
        ctx.save_for_backward(both, activated)
        return activated * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        both, activated = ctx.saved_tensors
        gate, up = both.chunk(2, dim=-1)
        result = torch.empty_like(both)
        of_gate, of_up = result.chunk(2, dim=-1)
        torch.mul(gradient, activated, out=of_up)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=of_gate)
        return result


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        # PyTorch has one kernel for the backward pass of LayerNorm. With a mean of 0 it differs by
        # the gradient that passes through the mean, which is added again.
        of_x, of_weight, _ = torch.ops.aten.native_layer_norm_backward(
            gradient, x, weight.shape, torch.zeros_like(scale), scale, weight, None, _X_AND_WEIGHT
        )
        through_mean = (gradient @ weight).unsqueeze(-1).mul_(scale).div_(weight.numel())
        return of_x.add_(through_mean), of_weight, None


_X_AND_WEIGHT = [True, True, False]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` `[..., h]` over its root mean square, times `weight` `[h]`, both float32."""
    if not torch.is_grad_enabled():
        return F.rms_norm(x, weight.shape, weight, eps)
    return _RMSNorm.apply(x.contiguous(), weight, eps)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, -sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        half = sin.size(-1) // 2
        other = torch.cat((sin[..., half:], sin[..., :half]), dim=-1)  # of the other half
        return _rotated(gradient, cos, -other, other), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, first_sin: Tensor) -> Tensor:
    """`x * cos`, plus in its first half the second half of x times `first_sin`, and in its second
    half the first one times `sin`; columns of x beyond those of `cos` stay.
    """
    width = cos.size(-1)
    half = width // 2
    result = torch.empty_like(x)
    rotated = result[..., :width]
    torch.mul(x[..., :width], cos, out=rotated)
    rotated[..., :half].addcmul_(x[..., half:width], first_sin[..., :half])
    rotated[..., half:].addcmul_(x[..., :half], sin[..., half:])
    result[..., width:] = x[..., width:]
    return result


def apply_rotary(
    original: Callable[..., Tensor],
    t: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    *,
    mscale: float = 1.0,
    **latent: Any,
) -> Tensor:
    """`megatron.core...rope_utils._apply_rotary_pos_emb_bshd` of `t` `[s, ..., d]` and float32
    angles `[s, ..., r]`, r <= d. `original` is that function, which computes other forms
    (`latent`).
    """
    if rotary_interleaved or any(latent.values()):
        return original(t, freqs, rotary_interleaved, mscale=mscale, **latent)
    cos, sin = (freqs.cos() * mscale).to(t.dtype), (freqs.sin() * mscale).to(t.dtype)
    return _Rotation.apply(t, cos, sin)
