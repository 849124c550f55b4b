# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's norms in the form that Megatron Core's layers take."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_aligner.parallel.cpu_operations import rms_norm


class _ZeroCentered:
    """A norm whose weight is stored as its distance from 1 (`layernorm_zero_centered_gamma`). It
    computes in float32 like Transformer Engine: in bf16, 1 + weight would lose the last bits.
    """

    weight: torch.nn.Parameter

    def reset_parameters(self) -> None:
        super().reset_parameters()  # type: ignore[misc]  # of the norm beside this class
        torch.nn.init.zeros_(self.weight)


class ZeroCenteredLayerNorm(_ZeroCentered, torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` with a scale of 1 + weight (NeMo's `layernorm1p`)."""

    def forward(self, input: Tensor) -> Tensor:
        scale, bias = 1 + self.weight.float(), None if self.bias is None else self.bias.float()
        output = F.layer_norm(input.float(), self.normalized_shape, scale, bias, self.eps)
        return output.to(input.dtype)


class ZeroCenteredRMSNorm(_ZeroCentered, torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` with a scale of 1 + weight."""

    def forward(self, x: Tensor) -> Tensor:
        scale = 1 + self.weight.float()
        output = F.rms_norm(x.float(), self.normalized_shape, scale, self.eps)
        return output.to(x.dtype)


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm`, with a faster gradient in float32 on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is torch.float32 is self.weight.dtype and x.device.type == "cpu":
            assert self.eps is not None
            return rms_norm(x, self.weight, self.eps)
        return super().forward(x)


class LocalNorm:
    """`torch.nn.LayerNorm` or `RMSNorm`, or their zero-centered forms, whose parameters have the
    attribute `sequence_parallel` (Megatron Core's wrapper does not set it). A class: Megatron's
    specifications treat a function as something already built.
    """

    def __new__(  # type: ignore[misc]  # gives PyTorch's own class
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_kwargs: Any
    ) -> torch.nn.Module:
        norm_class: type[torch.nn.Module]
        if config.layernorm_zero_centered_gamma:
            kinds = {"LayerNorm": ZeroCenteredLayerNorm, "RMSNorm": ZeroCenteredRMSNorm}
        else:
            kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": RMSNorm}
        norm_class = kinds[config.normalization]
        has_bias = getattr(config, "layernorm_bias", True)  # of `GPTConfig`
        without_bias = config.normalization == "LayerNorm" and not has_bias
        norm = norm_class(hidden_size, eps=eps, **({"bias": False} if without_bias else {}))
        for parameter in norm.parameters():
            setattr(parameter, "sequence_parallel", config.sequence_parallel)  # noqa: B010
        return norm
