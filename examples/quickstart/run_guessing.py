# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""PPO on a game of several turns: `python run_guessing.py` (or `make guessing`), a few minutes on
two cores.

    games without a plan -> SFT of a tiny GPT -> critic server + PPO actor -> verdict

The policy is to find a secret digit within four guesses. After each one the game
(`examples/environments/guessing.py`), an environment in processes of the actor's job, says `more`
or `less`; the only reward is 1 for the right digit. SFT sees games with guesses at random, so at
first the policy does not use the hints. The measure is the share of games won, of 512 that are
sampled at temperature 1 as in training. Every phase after the first is one of the project's own
scripts in its own process, as on a cluster; see `RUN_DIR/<job>.log`.

With `--estimator grpo` (or rloo) there is no critic and no server at all: the policy plays several
games at a time, and the advantage of a game is its reward compared with those of the others.

Exit code: 0 if the share of games won rose clearly (`outcome.py` says what is clear), 1 if not, 2
if a job failed or the arguments make no sense, 128 + signal number if it was stopped.
"""

import argparse
import sys
from pathlib import Path

import guessing_data
import walkthrough
from commands import (
    data_prefix,
    from_scratch,
    nemo_file,
    optimizer,
    policy_training,
    script_job,
    training,
)
from jobs import Job
from narrator import Phase
from outcome import Score
from walkthrough import Ending, Steps, Variant, Walk

from nemo_aligner.servers.ports import find_free_port

GAME = Path(__file__).resolve().parents[1] / "environments" / "guessing.py"
SEQ_LENGTH = 16  # a prompt, four guesses of two tokens, three hints
MAX_RESPONSE = 3  # a digit and its mark
SFT_BATCH_SIZE = 128
ROLLOUT_SIZE, BATCH_SIZE = 512, 256
PPO_EPOCHS = 2
CRITIC_WARMUP = 4  # rollouts that train only the critic, whose head is fresh
RESPONSES = 16  # to each prompt, for estimators that compare them

# 0.3 million parameters
ARCHITECTURE = {
    "num_layers": 2,
    "hidden_size": 96,
    "ffn_hidden_size": 384,
    "num_attention_heads": 4,
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "position_embedding_type": "learned_absolute",
    "bias": False,
    "share_embeddings_and_output_weights": False,
    "make_vocab_size_divisible_by": 16,
}
# Of 100 games, 30 more are won.
MIN_RISE = 0.3
STEPS = (
    Steps("--steps", 80, f"PPO steps, each a rollout of {ROLLOUT_SIZE} games"),
    Steps("--sft-steps", 60, "enough to guess in the right form"),
)
ESTIMATOR = Variant(
    "--estimator",
    ("gae", "grpo", "rloo"),
    "of the advantages; only gae, the default, has a critic",
)
WON = Score(
    "won", "share of games won", lambda sample: float(sample["reward"]), MIN_RISE, form=".0f"
)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    phases = {
        "data": Phase("Games and tokenizer", 1, 1),
        "sft": Phase(
            "Supervised fine-tuning", args.sft_steps, 15, "train/loss", {"train/loss": "loss"}
        ),
        "ppo": Phase(
            "PPO with an environment",
            args.steps,
            120,
            "train_rollouts/rewards",
            {
                "train_rollouts/rewards": "won",
                "train_rollouts/turns": "guesses",
                "train_rollouts/init_policy_kl": "KL",
            },
        ),
    }
    return walkthrough.run(args, phases, story, lambda: Ending("ppo_actor", "PPO", (WON,)))


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    return walkthrough.parse_args(argv, __doc__, "guessing", STEPS, (ESTIMATOR,))


def story(walk: Walk) -> None:
    """Run all phases; raises `JobFailed` when one of the scripts fails."""
    run_dir, seed, steps = walk.run_dir, walk.args.seed, walk.args.steps

    def write_data() -> str:
        guessing_data.make_data(run_dir / "data", seed)
        return f"{guessing_data.NUM_GAMES} games without a plan"

    walk.do("data", write_data)
    walk.follow("sft", sft_job(run_dir, seed, walk.args.sft_steps))
    servers: tuple[Job, ...] = ()
    started, advantages = "starting", without_critic(walk.args.estimator)
    if walk.args.estimator == "gae":
        port = find_free_port()
        servers = (critic_job(run_dir, seed, steps, port),)
        started, advantages = f"starting the critic on port {port}", with_critic(port)
    walk.follow("ppo", actor_job(run_dir, seed, steps, advantages), servers, started)


def sft_job(run_dir: Path, seed: int, steps: int) -> Job:
    """A tiny GPT learns the form of the game from random weights."""
    overrides = {
        **training(run_dir / "sft", seed, SEQ_LENGTH),
        **from_scratch(run_dir / "data", ARCHITECTURE, SFT_BATCH_SIZE, steps),
        **optimizer(lr=3e-3, warmup=10),
        "model.data.train_ds.prompt_template": "{input}{output}",
    }
    return script_job("SFT", "train_gpt_sft.py", run_dir / "sft", overrides, threads=2)


def critic_job(run_dir: Path, seed: int, steps: int, port: int) -> Job:
    """The server of values, which trains the critic; it starts from the SFT model with a fresh
    head.
    """
    overrides = {
        **training(run_dir / "critic", seed, SEQ_LENGTH),
        **optimizer(lr=1e-3),
        "pretrained_checkpoint.restore_from_path": nemo_file(run_dir, "sft"),
        "trainer.ppo.host": "127.0.0.1",
        "trainer.ppo.port": port,
        "trainer.ppo.combine_rm_and_critic_server": False,  # the rewards are the game's
        "trainer.ppo.max_steps": (CRITIC_WARMUP + steps) * (ROLLOUT_SIZE // BATCH_SIZE),
        "model.global_batch_size": BATCH_SIZE,
        "model.micro_batch_size": BATCH_SIZE,
        "model.loss_clip_val": 0.5,  # the values lie between 0 and 1
    }
    return script_job("Critic server", "serve_ppo_critic.py", run_dir / "critic", overrides)


def with_critic(port: int) -> dict:
    """The actor's settings for PPO with a critic server at `port`."""
    return {
        "remote_critic_rm.critic.port": port,
        "trainer.ppo.gae_lambda": 1.0,
        "trainer.ppo.critic_warmup_steps": CRITIC_WARMUP,
        "model.ppo.num_rollout_samples": ROLLOUT_SIZE,
    }


def without_critic(estimator: str) -> dict:
    """The actor's settings for games that are compared with each other."""
    return {
        "trainer.ppo.advantage_estimator": estimator,
        "model.ppo.num_rollout_samples": ROLLOUT_SIZE // RESPONSES,
        "model.ppo.num_rollouts_per_prompt": RESPONSES,
    }


def actor_job(run_dir: Path, seed: int, steps: int, advantages: dict) -> Job:
    """PPO from the SFT model, with the game as its environment.

    Args:
        advantages: settings of how rewards become advantages.
    """
    overrides = {
        **training(run_dir / "ppo_actor", seed, SEQ_LENGTH),
        **policy_training("trainer.ppo", steps),
        **optimizer(lr=1e-3),
        **advantages,
        "pretrained_checkpoint.restore_from_path": nemo_file(run_dir, "sft"),
        "remote_critic_rm.combine_rm_and_critic_server": False,
        "remote_critic_rm.init_timeout_s": 120,
        "trainer.ppo.ppo_epochs": PPO_EPOCHS,
        "trainer.ppo.initial_policy_kl_penalty": 0.01,
        "model.global_batch_size": BATCH_SIZE,
        "model.micro_batch_size": BATCH_SIZE,
        "model.ppo.rollout_micro_batch_size": advantages["model.ppo.num_rollout_samples"],
        "model.ppo.num_val_samples": guessing_data.NUM_VALIDATION,
        "model.ppo.length_params.max_length": MAX_RESPONSE,
        "model.ppo.sampling_params.end_strings": ["!"],
        # A guess without its mark is no accident of the length: it is to become unlikely.
        "model.ppo.train_on_truncated": True,
        "model.ppo.environment.path": f"{GAME}:GuessingGame",
        "model.ppo.environment.workers": 1,  # a reply takes microseconds
        "model.data.data_prefix": data_prefix(run_dir / "data", "prompts"),
    }
    return script_job("PPO actor", "train_gpt_ppo_actor.py", run_dir / "ppo_actor", overrides)


if __name__ == "__main__":
    sys.exit(main())
