# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The device and the communication backend of this process."""

import torch


def get_device() -> torch.device:
    """The device of this process: the current CUDA device, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def get_backend() -> str:
    """`torch.distributed` backend for tensors on `get_device()`: "nccl" or "gloo"."""
    return "nccl" if torch.cuda.is_available() else "gloo"
