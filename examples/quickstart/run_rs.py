# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Rejection sampling on the quickstart's data: `python run_rs.py` (or `make rs`), a few minutes on
two cores.

    data and tokenizer -> SFT of a tiny GPT -> reward model -> its server + RS actor -> verdict

The first three phases are those of `run.py`. Then the policy generates several responses to every
prompt, the server's reward model scores them, and the policy is trained on the best one with the
likelihood loss. There is no critic. Every phase after the first is one of the project's own
scripts in its own process, as on a cluster; see `RUN_DIR/<job>.log`.
"""

import sys
from pathlib import Path

import make_data
import reviews
import walkthrough
from commands import (
    data_prefix,
    nemo_file,
    on_cpu,
    optimizer,
    policy_training,
    script_job,
    training,
)
from jobs import Job
from narrator import Phase
from reviews import BATCH_SIZE, MAX_RESPONSE, SEQ_LENGTH
from walkthrough import Ending, Option, Walk

from nemo_aligner.servers.ports import find_free_port

NUM_PROMPTS = 128  # per step: two updates on the best response to each
RESPONSES = 4  # to each prompt
STEPS = Option(
    "--steps", 30, f"RS steps, each {NUM_PROMPTS} prompts with {RESPONSES} responses to each"
)


def main(argv: list[str] | None = None) -> int:
    args = walkthrough.parse_args(argv, __doc__, "rs", (STEPS, *reviews.STEPS))
    headline = {
        "train_rollouts/global_rewards": "reward",
        "train_rollouts/selected_rewards": "of the best",
    }
    phases = reviews.phases(args)
    phases["rs"] = Phase(
        "Rejection sampling", args.steps, 60, "train_rollouts/global_rewards", headline
    )
    return walkthrough.run(
        args, phases, story, lambda: Ending("rs_actor", "rejection sampling", reviews.SCORES)
    )


def story(walk: Walk) -> None:
    """Run all phases; raises `JobFailed` when one of the scripts fails."""
    reviews.up_to_the_reward_model(walk)
    port = find_free_port()
    server = reward_server_job(walk.run_dir, port)
    actor = actor_job(walk.run_dir, walk.args.seed, walk.args.steps, port)
    walk.follow(
        "rs",
        actor,
        servers=(server,),
        detail=f"starting the reward server on port {port} and the actor",
    )


def reward_server_job(run_dir: Path, port: int) -> Job:
    """The server of the reward model."""
    overrides = {
        **on_cpu(),
        "rm_model_file": nemo_file(run_dir, "rm"),
        "inference.host": "127.0.0.1",
        "inference.port": port,
        "inference.strip_sequence_length_to_multiple": 8,
        "model.forward_micro_batch_size": NUM_PROMPTS,
    }
    return script_job(
        "Reward server", "serve_reward_model.py", run_dir / "reward_server", overrides
    )


def actor_job(run_dir: Path, seed: int, steps: int, port: int) -> Job:
    """Rejection sampling from the SFT model, with the served reward model."""
    overrides = {
        **training(run_dir / "rs_actor", seed, SEQ_LENGTH),
        **policy_training("trainer.rs", steps),
        # With a higher rate the responses grow until they are truncated: more kind sentences score
        # higher.
        **optimizer(lr=5e-4),
        "pretrained_checkpoint.restore_from_path": nemo_file(run_dir, "sft"),
        "remote_rm.reward_model.port": port,
        "remote_rm.init_timeout_s": 120,
        "model.global_batch_size": BATCH_SIZE,
        "model.micro_batch_size": BATCH_SIZE,
        "model.rs.num_rollout_samples": NUM_PROMPTS,
        "model.rs.num_rollouts_per_prompt": RESPONSES,
        "model.rs.top_n_rollouts": 1,
        "model.rs.rollout_micro_batch_size": NUM_PROMPTS,
        "model.rs.num_val_samples": make_data.SIZES["prompts"]["validation"],
        "model.rs.length_params.max_length": MAX_RESPONSE,
        "model.data.data_prefix": data_prefix(run_dir / "data", "prompts"),
    }
    return script_job("RS actor", "train_gpt_rs_actor.py", run_dir / "rs_actor", overrides)


if __name__ == "__main__":
    sys.exit(main())
