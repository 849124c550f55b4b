# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What to do when an actor and its critic are at different steps.

One of them was killed between the two saves, or was started with another folder. Both keep their
last two checkpoints, and the critic its first weights as those of step 0 until then: after a death
they have one of the same step, to which both go back (`launch/rollout_job.py`).
"""

import shlex
from collections.abc import Collection

from hydra.core.override_parser.types import Quote, QuotedString


def step_to_resume(actor_steps: Collection[int], critic_steps: Collection[int]) -> int | None:
    """The newest step that actor and critic can both resume from, None if there is none.

    Args:
        actor_steps: of the actor's checkpoints; it can start at step 0 too.
        critic_steps: actor steps of the critic's checkpoints, with 0 for its first weights.

    Step 0 gives up all that was learned, which death in a first save explains only if that is one
    checkpoint at most. If it is more, a job was started with another folder.
    """
    step = max({0, *actor_steps} & set(critic_steps), default=None)
    if step == 0 and max(sum(s > 0 for s in steps) for steps in (actor_steps, critic_steps)) > 1:
        return None
    return step


def resume_argument(folder: str) -> str:
    """The argument that resumes a job from the checkpoint `folder`, quoted for a shell.

    The folder's name contains `=`, which Hydra accepts only in a quoted value, and a shell removes
    Hydra's quotes unless they are quoted in turn.
    """
    value = QuotedString(str(folder), Quote.double).with_quotes()
    return shlex.quote(f"exp_manager.resume_from_checkpoint={value}")


def mismatch_remedy(
    actor_step: int,
    critic_step: int,
    critic_moved: bool,
    actor_checkpoints: dict[int, str],
    critic_checkpoints: dict[int, str],
) -> str:
    """How to bring an actor and a critic together again, in terms of checkpoints that exist.

    Args:
        critic_step: actor step of the critic's last checkpoint, written or loaded.
        critic_moved: the critic was trained after that checkpoint.
        actor_checkpoints, critic_checkpoints: folder of each complete checkpoint, by actor step.
    """
    if critic_step == actor_step and (critic_step in critic_checkpoints or critic_step == 0):
        return "Restart the critic server with the same command: the pair then matches."
    common = sorted(actor_checkpoints.keys() & critic_checkpoints.keys())
    if not common:
        return (
            f"No step has checkpoints of both (actor: {_steps(actor_checkpoints)}; critic: "
            f"{_steps(critic_checkpoints)}). If one of them was started with another folder than "
            "before, give it the old one (exp_manager.explicit_log_dir); else start both anew in "
            "empty folders."
        )
    step = common[-1]
    critic = f"restart the critic server with {resume_argument(critic_checkpoints[step])}"
    if critic_step == step:
        critic = (
            "restart the critic server with the same command"
            if critic_moved
            else "leave the critic server alone"
        )
    actor = "start the actor again with the same command"
    if actor_step != step:
        actor = f"start the actor again with {resume_argument(actor_checkpoints[step])}"
    return (
        f"Both have a checkpoint of actor step {step}: {critic}, and {actor}. An argument "
        "exp_manager.resume_from_checkpoint is for this start only: leave it out once a newer "
        "checkpoint is saved."
    )


def _steps(checkpoints: dict[int, str]) -> str:
    return ", ".join(map(str, sorted(checkpoints))) or "none"
