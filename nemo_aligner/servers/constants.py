# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Signals by which rank 0 of a server job tells the other ranks what to do next."""

from enum import IntEnum

import torch


class ServerSignal(IntEnum):
    """What every rank of a server job does next. 0 is never used: it stands for no signal."""

    FORWARD = 1
    TRAIN = 2
    INVALID = 3
    SAVE = 4
    # Nothing to do: keeps idle ranks out of collective time-outs, and shows that all are alive.
    HEARTBEAT = 5
    RESUME = 6  # go back to the checkpoint of an actor step
    STOP = 7  # leave the loop; the job ends

    def cuda(self) -> torch.Tensor:
        """Return this signal as a one-element int64 tensor on the current CUDA device."""
        return torch.tensor([self], dtype=torch.int64, device=torch.cuda.current_device())
