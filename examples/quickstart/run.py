# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""PPO from nothing on a laptop: `python run.py` (or `make quickstart`), a few minutes on two
cores, without a download.

    data and tokenizer -> SFT of a tiny GPT -> reward model -> critic server + PPO actor -> verdict

Every phase after the first is one of the project's own scripts in its own process, as on a
cluster. Each job writes to `RUN_DIR/<job>.log` and `RUN_DIR/<job>/`. This file only chooses sizes
and starts the jobs.
"""

import sys
from pathlib import Path

import make_data
import reviews
import walkthrough
from commands import (
    data_prefix,
    nemo_file,
    optimizer,
    policy_training,
    script_job,
    training,
    with_lora,
)
from jobs import Job
from narrator import Phase
from reviews import BATCH_SIZE, MAX_RESPONSE, SEQ_LENGTH
from walkthrough import Ending, Option, Walk

from nemo_aligner.servers.ports import find_free_port

ROLLOUT_SIZE = 128  # a rollout makes two updates
LORA = Option(
    "--lora", False, "train adapters (LoRA) instead of all weights, in all jobs after SFT"
)
STEPS = Option("--steps", 50, f"PPO steps, each a rollout of {ROLLOUT_SIZE} samples")


def main(argv: list[str] | None = None) -> int:
    args = walkthrough.parse_args(argv, __doc__, "quickstart", (STEPS, *reviews.STEPS, LORA))
    headline = {"train_rollouts/rewards": "reward", "train_rollouts/init_policy_kl": "KL"}
    phases = reviews.phases(args)
    phases["ppo"] = Phase(
        "PPO with a served critic", args.steps, 50, "train_rollouts/rewards", headline
    )
    return walkthrough.run(args, phases, story, lambda: Ending("ppo_actor", "PPO", reviews.SCORES))


def story(walk: Walk) -> None:
    """Run all phases; raises `JobFailed` when one of the scripts fails."""
    lora = walk.args.lora
    reviews.up_to_the_reward_model(walk, lora)
    port = find_free_port()
    critic = critic_job(walk.run_dir, walk.args.seed, walk.args.steps, port, lora)
    actor = actor_job(walk.run_dir, walk.args.seed, walk.args.steps, port, lora)
    walk.follow(
        "ppo",
        actor,
        servers=(critic,),
        detail=f"starting the critic server on port {port} and the actor",
    )


def critic_job(run_dir: Path, seed: int, steps: int, port: int, lora: bool = False) -> Job:
    """The server of rewards and values; it trains the critic and starts from the reward model."""
    overrides = {
        **training(run_dir / "critic", seed, SEQ_LENGTH),
        **optimizer(lr=1e-3),
        "pretrained_checkpoint.restore_from_path": nemo_file(run_dir, "rm"),
        "trainer.ppo.host": "127.0.0.1",
        "trainer.ppo.port": port,
        "trainer.ppo.combine_rm_and_critic_server": True,
        "trainer.ppo.max_steps": steps * (ROLLOUT_SIZE // BATCH_SIZE),
        "trainer.ppo.strip_sequence_length_to_multiple": 8,
        "model.global_batch_size": BATCH_SIZE,
        "model.micro_batch_size": BATCH_SIZE,
        "model.loss_clip_val": 1.0,  # rewards of this reward model range from about -3 to 3
    }
    if lora:
        overrides = with_lora(overrides)
    return script_job("Critic server", "serve_ppo_critic.py", run_dir / "critic", overrides)


def actor_job(run_dir: Path, seed: int, steps: int, port: int, lora: bool = False) -> Job:
    """PPO from the SFT model, with the served critic."""
    overrides = {
        **training(run_dir / "ppo_actor", seed, SEQ_LENGTH),
        **policy_training("trainer.ppo", steps),
        **optimizer(lr=5e-4),
        "pretrained_checkpoint.restore_from_path": nemo_file(run_dir, "sft"),
        "remote_critic_rm.reward_model.port": port,
        "remote_critic_rm.critic.port": port,
        "remote_critic_rm.init_timeout_s": 120,
        # Strong, because the reward model is easy to fool: without it the responses lose their
        # grammar.
        "trainer.ppo.initial_policy_kl_penalty": 0.15,
        "model.global_batch_size": BATCH_SIZE,
        "model.micro_batch_size": BATCH_SIZE,
        "model.ppo.num_rollout_samples": ROLLOUT_SIZE,
        "model.ppo.rollout_micro_batch_size": ROLLOUT_SIZE,
        "model.ppo.num_val_samples": make_data.SIZES["prompts"]["validation"],
        "model.ppo.length_params.max_length": MAX_RESPONSE,
        "model.data.data_prefix": data_prefix(run_dir / "data", "prompts"),
    }
    if lora:
        overrides = with_lora(overrides)
    return script_job("PPO actor", "train_gpt_ppo_actor.py", run_dir / "ppo_actor", overrides)


if __name__ == "__main__":
    sys.exit(main())
