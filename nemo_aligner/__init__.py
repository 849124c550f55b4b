# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""RLHF for Megatron models: PPO against a served critic, and what belongs to it.

From Python, `import nemo_aligner as na` gives the jobs, `na.PPO(...).run()`, and `na.Policy`
(`api.py`), and the functions of `na.losses` and `na.advantages`; nothing is imported before it is
asked for.
"""

import importlib
from typing import Any

from nemo_aligner.parallel.environment import do_without_hidden_gpus
from nemo_aligner.utils import open_doors

__version__ = "0.1.0"
_JOBS = "SFT RewardModel DPO KTO SPIN Distillation PPO RS REINFORCE SteerLM2".split()
_SERVERS = ["CriticServer", "RewardServer", "TeacherServer"]
_MODULES = {"losses": "nemo_aligner.losses", "advantages": "nemo_aligner.core.advantages"}
__all__ = ["Policy", *_JOBS, *_SERVERS, *_MODULES]  # noqa: PLE0604  (names of strings)

do_without_hidden_gpus()
open_doors()


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in __all__:
        return getattr(importlib.import_module("nemo_aligner.api"), name)
    raise AttributeError(f"module 'nemo_aligner' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
