# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""PPO with a Python function as reward: `python run_arithmetic.py` (or `make arithmetic`), a few
minutes on two cores.

    two-digit sums -> short SFT of a tiny GPT -> critic server + PPO actor -> verdict

SFT ends early, when the policy gets some of the sums right. From then on it sees no result: the
reward, computed by `examples/rewards/arithmetic.py` in a process of the actor's job, only says
right (1) or wrong (0). The measure is the share of exact responses to 512 sums that no training
file holds, sampled at temperature 1 as in training. Every phase after the first is one of the
project's own scripts in its own process, as on a cluster; see `RUN_DIR/<job>.log`.

With `--estimator grpo` (or rloo) there is no critic: the policy generates several responses to
each sum, and the advantage of a response is its reward compared with those of the others. With
`--objective NAME` it learns from these by another objective of docs/ppo.md.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import arithmetic_data
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
from outcome import Score, read_jsonl
from walkthrough import Ending, Option, Walk

from nemo_aligner.servers.ports import find_free_port

REWARD_FUNCTION = Path(__file__).resolve().parents[1] / "rewards" / "arithmetic.py"
SEQ_LENGTH = 16  # also of a game: a prompt, four guesses of two tokens, three hints
MAX_RESPONSE = 5  # the longest result has 3 digits, and the end token follows
SFT_BATCH_SIZE = 128
# A reward of 0 or 1 says little, so an update that is more than noise needs many samples.
ROLLOUT_SIZE = 512
BATCH_SIZE = 256
PPO_EPOCHS = 2
CRITIC_WARMUP = 4  # rollouts that train only the critic, whose head is fresh
RESPONSES = 8  # to each sum, for estimators that compare them

# 0.3 million parameters; every digit has its fixed place, so absolute positions suit best
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
# Of 100 held-out sums, 20 more are right.
MIN_RISE = 0.2
STEPS = (
    Option("--steps", 50, f"PPO steps, each a rollout of {ROLLOUT_SIZE} samples"),
    Option("--sft-steps", 180, "the more, the better the policy that PPO starts from"),
)
SEQUENCE = {"model.ppo.loss_reduction": "sequence"}
# Without a hard range a few large updates on a rollout take the policy too far.
SMALL_UPDATES = {
    "model.optim.lr": 2e-4,
    "model.optim.sched.min_lr": 2e-5,
    "trainer.ppo.ppo_epochs": 8,
}
OBJECTIVES = {
    "clip": {},
    "dapo": {"model.ppo.ratio_eps_high": 0.28, "trainer.ppo.dynamic_sampling_rounds": 3},
    "dr_grpo": {
        "trainer.ppo.advantage_estimator": "dr_grpo",
        "model.ppo.loss_reduction": "constant",
        "model.ppo.train_on_truncated": True,
    },
    # a wider range than the paper's, as responses have four tokens and not thousands
    "gspo": {"model.ppo.policy_loss": "gspo", "model.ppo.ratio_eps": 0.1, **SEQUENCE},
    "cispo": {
        "model.ppo.policy_loss": "cispo",
        "model.ppo.ratio_eps": 1.0,
        "model.ppo.ratio_eps_high": 0.28,
        **SMALL_UPDATES,
    },
    "sapo": {"model.ppo.policy_loss": "sapo", **SEQUENCE, **SMALL_UPDATES},
    "gmpo": {"model.ppo.policy_loss": "gmpo", "model.ppo.ratio_eps": 0.4, **SEQUENCE},
    "clip_cov": {"trainer.ppo.covariance.rule": "clip", "trainer.ppo.covariance.fraction": 0.002},
    "kl_cov": {
        "trainer.ppo.covariance.rule": "kl",
        "trainer.ppo.covariance.fraction": 0.002,
        "model.ppo.ratio_eps": 1.0,
        **SMALL_UPDATES,
    },
}
OBJECTIVE = Option(
    "--objective",
    tuple(OBJECTIVES),
    "of the policy (docs/ppo.md); all but clip, the default, compare responses, as grpo does",
)
ESTIMATOR = Option(
    "--estimator",
    ("gae", "grpo", "rloo"),
    "of the advantages; only gae, the default, has a critic",
)


def main(argv: list[str] | None = None) -> int:
    args = walkthrough.parse_args(argv, __doc__, "arithmetic", (*STEPS, ESTIMATOR, OBJECTIVE))
    shown = {"train_rollouts/rewards": "exact", "train_rollouts/init_policy_kl": "KL"}
    phases = phases_of(args, "Sums and tokenizer", 35, "PPO with a code reward", 90, shown)
    return walkthrough.run(
        args,
        phases,
        story,
        lambda: Ending("ppo_actor", "PPO", (exact_responses(args.run_dir / "data"),)),
    )


def phases_of(
    args: argparse.Namespace, data: str, sft_s: int, ppo: str, ppo_s: int, shown: dict[str, str]
) -> dict[str, Phase]:
    """The phases of `ppo_story`: two titles, planned seconds, and the metrics beside PPO."""
    loss = {"train/loss": "loss"}
    return {
        "data": Phase(data, 1, 1),
        "sft": Phase("Supervised fine-tuning", args.sft_steps, sft_s, "train/loss", loss),
        "ppo": Phase(ppo, args.steps, ppo_s, "train_rollouts/rewards", shown),
    }


def exact_responses(data: Path) -> Score:
    """1 for the result that the data set has, digit by digit, else 0; independent of the reward
    function.
    """
    right = {line["input"]: line["output"] for line in read_jsonl(data / "sft_validation.jsonl")}

    def is_exact(sample: dict) -> float:
        return float(sample["response"] == right[sample["prompt"]])

    return Score(
        "exact", "share of exact responses", is_exact, MIN_RISE, scale="(0 to 1)", form=".0f"
    )


def story(walk: Walk) -> None:
    """Run all phases; raises `JobFailed` when one of the scripts fails."""

    def write_data() -> str:
        arithmetic_data.make_data(walk.run_dir / "data", walk.args.seed)
        return f"{arithmetic_data.NUM_VALIDATION} of 8100 sums are held out"

    sft = sft_job(walk.run_dir, walk.args.seed, walk.args.sft_steps)
    ppo_story(walk, write_data, sft, actor_job, RESPONSES, OBJECTIVES[walk.args.objective])


def ppo_story(
    walk: Walk,
    write_data: Callable[[], str],
    sft: Job,
    actor: Callable[[Path, int, int, dict], Job],
    responses: int,
    objective: dict[str, Any],
) -> None:
    """Data, SFT, and PPO by the job that `actor` makes: with a critic server, or with `responses`
    to each prompt that are compared, which each `objective` but the default one needs.
    """
    run_dir, seed, steps = walk.run_dir, walk.args.seed, walk.args.steps
    walk.do("data", write_data)
    walk.follow("sft", sft)
    estimator, servers, started = walk.args.estimator, (), "starting"
    if estimator == "gae" and not objective:
        port = find_free_port()
        servers = (critic_job(run_dir, seed, steps, port),)
        started, advantages = f"starting the critic server on port {port}", with_critic(port)
    else:
        compared = "grpo" if estimator == "gae" else estimator
        advantages = without_critic(compared, responses) | objective
    walk.follow("ppo", actor(run_dir, seed, steps, advantages), servers, started)


def sft_job(
    run_dir: Path,
    seed: int,
    steps: int,
    name: str = "sft",
    architecture: dict[str, Any] = ARCHITECTURE,
    warmup: int = 20,
) -> Job:
    """A tiny GPT learns from random weights, and is stopped half-way."""
    overrides = {
        **training(run_dir / name, seed, SEQ_LENGTH),
        **from_scratch(run_dir / "data", architecture, SFT_BATCH_SIZE, steps),
        **optimizer(lr=3e-3, warmup=warmup),
        "model.data.train_ds.prompt_template": "{input}{output}",
    }
    return script_job("SFT", "train_gpt_sft.py", run_dir / name, overrides, threads=2)


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
        "trainer.ppo.combine_rm_and_critic_server": False,  # rewards come from elsewhere
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
        "remote_critic_rm.init_timeout_s": 120,
        # Responses have few tokens: the whole reward may count for each of them.
        "trainer.ppo.gae_lambda": 1.0,
        "trainer.ppo.critic_warmup_steps": CRITIC_WARMUP,
        "model.ppo.num_rollout_samples": ROLLOUT_SIZE,
    }


def without_critic(estimator: str, responses: int = RESPONSES) -> dict:
    """The actor's settings for as many responses to fewer prompts, compared with each other."""
    return {
        "trainer.ppo.advantage_estimator": estimator,
        "model.ppo.num_rollout_samples": ROLLOUT_SIZE // responses,
        "model.ppo.num_rollouts_per_prompt": responses,
    }


def actor_job(run_dir: Path, seed: int, steps: int, advantages: dict) -> Job:
    """PPO with a code reward.

    Args:
        advantages: settings of what becomes an advantage, and whatever shall be otherwise.
    """
    overrides = {
        "trainer.ppo.reward_fn": f"{REWARD_FUNCTION}:exact_answer",
        "trainer.ppo.reward_fn_workers": 1,  # the function takes microseconds
        # Truncated responses are not trained on, so only the distance to the SFT model keeps the
        # end token likely after a wrong number.
        "trainer.ppo.initial_policy_kl_penalty": 0.05,
        "model.ppo.length_params.max_length": MAX_RESPONSE,
        **advantages,
    }
    return policy_job(run_dir, seed, steps, overrides)


def policy_job(run_dir: Path, seed: int, steps: int, settings: dict) -> Job:
    """PPO from the SFT model, with `settings` of the task and of its advantages."""
    overrides = {
        **training(run_dir / "ppo_actor", seed, SEQ_LENGTH),
        **policy_training("trainer.ppo", steps),
        **optimizer(lr=1e-3),
        "pretrained_checkpoint.restore_from_path": nemo_file(run_dir, "sft"),
        "trainer.ppo.ppo_epochs": PPO_EPOCHS,
        "model.global_batch_size": BATCH_SIZE,
        "model.micro_batch_size": BATCH_SIZE,
        "model.ppo.rollout_micro_batch_size": settings["model.ppo.num_rollout_samples"],
        "model.ppo.num_val_samples": arithmetic_data.NUM_VALIDATION,
        "model.data.data_prefix": data_prefix(run_dir / "data", "prompts"),
        **settings,
    }
    return script_job("PPO actor", "train_gpt_ppo_actor.py", run_dir / "ppo_actor", overrides)


if __name__ == "__main__":
    sys.exit(main())
