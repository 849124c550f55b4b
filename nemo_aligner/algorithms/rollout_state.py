# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of the state that a job with rollouts resumes from."""

from typing import Any

from nemo_aligner.core.errors import UserError
from nemo_aligner.parallel.collectives import gathered


def check_rollout_size(state: dict[str, Any], section: str, num_rollout_samples: int) -> None:
    """Refuse the state of a job with rollouts of another size: its steps count something else.

    Raises:
        UserError: with the remedy.
    """
    before = state.get("num_rollout_samples", num_rollout_samples)
    if before != num_rollout_samples:
        key = f"model.{section}.num_rollout_samples"
        raise UserError(
            f"{key}={num_rollout_samples}, but the checkpoint to resume is of a job with "
            f"{before}: its steps, and with them epochs and max_steps, count rollouts of "
            f"{before} prompts. Set {key}={before}, or start again from the checkpoint's .nemo "
            "file (pretrained_checkpoint.restore_from_path) in another "
            "exp_manager.explicit_log_dir."
        )


def check_all_ranks_agree(state: dict[str, Any]) -> None:
    """Raise `RuntimeError` unless all ranks, which all call it, have read the same state."""
    states = gathered(state)
    for rank, other in enumerate(states):
        if other != states[0]:
            raise RuntimeError(
                f"rank {rank} resumes from {other}, but rank 0 from {states[0]}: give all one "
                "checkpoint."
            )
