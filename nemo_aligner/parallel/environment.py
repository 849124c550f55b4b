# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The rank of this process before process groups exist. Imports nothing heavy."""

import os
import sys


def is_rank_zero() -> bool:
    """True in the process that writes files, also before `torch.distributed` is initialised."""
    dist = sys.modules.get("torch.distributed")  # not imported: not initialised either
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    env = os.environ
    if env.get("RANK") or env.get("SLURM_PROCID"):
        return int(env.get("RANK") or env["SLURM_PROCID"]) == 0
    return int(env.get("LOCAL_RANK") or 0) == 0 and int(env.get("NODE_RANK") or 0) == 0
