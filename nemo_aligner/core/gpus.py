# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Processes that run on the CPU of a machine that has GPUs."""

import os
import sys

_VARIABLE = "CUDA_VISIBLE_DEVICES"
_NO_GPU = ("", "-1", "NoDevFiles")  # first entries that hide all; the last one is SLURM's
_NEED_A_GPU = ("transformer_engine", "apex")
_before: dict[str, str | None] = {}  # the variable as the user set it, once it was changed


def hide_gpus() -> None:
    """Let this process and its children run on the CPU, as `trainer.accelerator=cpu` asks. It acts
    only before PyTorch has looked for a GPU and before Megatron Core is imported.
    """
    _before.setdefault(_VARIABLE, os.environ.get(_VARIABLE))
    os.environ[_VARIABLE] = ""
    do_without_hidden_gpus()


def do_without_hidden_gpus() -> None:
    """Where the environment hides all GPUs, do as if packages that need one were not installed:
    Megatron Core uses their optimizers and norms if it can. What is imported already stays.
    """
    first = os.environ.get(_VARIABLE, "0").split(",")[0].strip()
    if first in _NO_GPU:
        for name in _NEED_A_GPU:
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # ends in ImportError


def packages_in_use() -> list[str]:
    """Packages that need a GPU and that this process has imported."""
    return [name for name in _NEED_A_GPU if sys.modules.get(name) is not None]


def users_environment() -> dict[str, str]:
    """The environment with the GPUs that the user gave to this process, for code of the user."""
    environment = dict(os.environ)
    for name, value in _before.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    return environment
