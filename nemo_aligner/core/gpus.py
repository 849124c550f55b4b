# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Processes that run on the CPU of a machine that has GPUs."""

import os
import sys

_VARIABLE = "CUDA_VISIBLE_DEVICES"
_NEED_A_GPU = ("transformer_engine", "apex")


def hide_gpus() -> None:
    """Let this process and those that it starts run on the CPU, as `trainer.accelerator=cpu` asks.
    It acts only before PyTorch has looked for a GPU and before Megatron Core is imported.
    """
    os.environ[_VARIABLE] = ""
    do_without_hidden_gpus()


def do_without_hidden_gpus() -> None:
    """Where the environment hides all GPUs, do as if packages that need one were not installed:
    Megatron Core takes their optimizers and norms wherever it can import them.
    """
    if os.environ.get(_VARIABLE) in ("", "-1"):
        for name in _NEED_A_GPU:
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # ends in ImportError
