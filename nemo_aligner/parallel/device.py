# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The device and the communication backend of this process."""

import ctypes
import functools
import gc
import os
import platform
from collections.abc import Mapping
from typing import Any

import torch
from nemo.utils import logging

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
