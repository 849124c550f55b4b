# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Small operations of a transformer layer with a gradient of their own, for CPUs: PyTorch composes
them there of several passes over memory, each way.

Transformer Engine has kernels for them on a GPU.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from torch import Tensor
from torch.autograd.function import once_differentiable


class _SwiGLU(torch.autograd.Function):
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


def swiglu(both: Tensor) -> Tensor:
    """`silu(gate) * up` for the halves gate and up `[..., f]` of `both` `[..., 2f]`.

    The numbers are those of separate operations; the gradients of both halves are written where
    they lie, not joined afterwards.
    """
    result: Tensor = _SwiGLU.apply(both)
    return result


class SwiGLUMLP(MLP):
    """Megatron Core's feed-forward layer with the activation SwiGLU, without a fused kernel."""

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **more: Any
    ) -> tuple[Tensor, Tensor | None]:
        """`[s, b, h]`, and the bias that is still to be added or None."""
        output: tuple[Tensor, Tensor | None]
        if per_token_scale is not None:  # of an expert
            output = super().forward(hidden_states, per_token_scale, **more)
            return output
        both, bias = self.linear_fc1(hidden_states)
        output = self.linear_fc2(swiglu(both if bias is None else both + bias))
        return output


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
    result: Tensor = _RMSNorm.apply(x.contiguous(), weight, eps)
    return result


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
    """`x * cos`, to whose first half the second half of x times `first_sin` is added, and to whose
    second half the first one times `sin`; columns of x beyond those of `cos` stay.
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
    """`megatron.core...rope_utils._apply_rotary_pos_emb_bshd`.

    Args:
        original: that function, which computes the forms that have no place here.
        t: `[s, ..., d]`.
        freqs: float32 angles `[s, ..., r]`, r <= d: columns beyond stay as they are.
        latent: of multi-latent attention; each release of Megatron Core has other names.
    """
    if rotary_interleaved or any(latent.values()):
        return original(t, freqs, rotary_interleaved, mscale=mscale, **latent)
    cos, sin = (freqs.cos() * mscale).to(t.dtype), (freqs.sin() * mscale).to(t.dtype)
    result: Tensor = _Rotation.apply(t, cos, sin)
    return result
