# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The adaptation of Megatron Core to machines without CUDA: complete, and with a clear error when
a release moves a name.
"""

import pytest
import torch

from nemo_aligner.parallel import megatron_adaptation


@pytest.mark.parametrize(
    "module, name, reason", megatron_adaptation.TOUCHED, ids=lambda value: str(value)[-40:]
)
def test_every_touched_name_exists_and_has_a_reason(module, name, reason):
    megatron_adaptation._resolve(module, name)
    assert reason


def test_missing_name_is_reported():
    with pytest.raises(
        ImportError, match="megatron.core.optimizer.clip_grads.get_grad_norm_fp64.*setup.py"
    ):
        megatron_adaptation._resolve("megatron.core.optimizer.clip_grads", "get_grad_norm_fp64")


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="looks at the adaptation of a machine without CUDA"
)
def test_remapped_functions_name_no_cuda_device():
    megatron_adaptation.adapt_megatron_core()
    for module, name, _reason in megatron_adaptation.REMAPPED_CONSTANTS:
        function = megatron_adaptation.inspect.unwrap(
            megatron_adaptation._resolve(module, name)[2]
        )
        function = getattr(function, "__func__", function)
        constants = list(function.__code__.co_consts)
        constants += [
            inner for constant in constants if isinstance(constant, tuple) for inner in constant
        ]
        assert not {"cuda", "torch.cuda.FloatTensor", "torch.cuda.HalfTensor"} & {
            c for c in constants if isinstance(c, str)
        }, name


def test_constants_are_rewritten_and_nothing_else():
    def allocate():
        return ["cuda", "torch.cuda.FloatTensor,  ", "torch.cuda.is_available", ("cuda", 3)]

    constants = megatron_adaptation._cpu_constant(allocate.__code__).co_consts
    flat = [
        c
        for constant in constants
        for c in (constant if isinstance(constant, tuple) else (constant,))
    ]
    assert "cuda" not in flat and "cpu" in flat
    assert "torch.FloatTensor,  " in flat and "torch.cuda.is_available" in flat
