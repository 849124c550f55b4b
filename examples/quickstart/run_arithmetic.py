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

Exit code: 0 if the share of exact responses rose clearly (`outcome.py` says what is clear), 1 if
not, 2 if a job failed or the arguments make no sense, 128 + signal number if it was stopped.
"""

import argparse
import sys
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
from walkthrough import Ending, Steps, Variant, Walk

from nemo_aligner.servers.ports import find_free_port

REWARD_FUNCTION = Path(__file__).resolve().parents[1] / "rewards" / "arithmetic.py"
SEQ_LENGTH = 16
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
    Steps("--steps", 50, f"PPO steps, each a rollout of {ROLLOUT_SIZE} samples"),
    Steps("--sft-steps", 180, "the more, the better the policy that PPO starts from"),
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
OBJECTIVE = Variant(
    "--objective",
    tuple(OBJECTIVES),
    "of the policy (docs/ppo.md); all but clip, the default, compare responses, as grpo does",
)
ESTIMATOR = Variant(
    "--estimator",
    ("gae", "grpo", "rloo"),
    "of the advantages; only gae, the default, has a critic",
)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    phases = {
        "data": Phase("Sums and tokenizer", 1, 1),
        "sft": Phase(
            "Supervised fine-tuning", args.sft_steps, 35, "train/loss", {"train/loss": "loss"}
        ),
        "ppo": Phase(
            "PPO with a code reward",
            args.steps,
            90,
            "train_rollouts/rewards",
            {"train_rollouts/rewards": "exact", "train_rollouts/init_policy_kl": "KL"},
        ),
    }
    return walkthrough.run(
        args,
        phases,
        story,
        lambda: Ending("ppo_actor", "PPO", (exact_responses(args.run_dir / "data"),)),
    )


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    return walkthrough.parse_args(argv, __doc__, "arithmetic", STEPS, (ESTIMATOR, OBJECTIVE))


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
    run_dir, seed, steps = walk.run_dir, walk.args.seed, walk.args.steps

    def write_data() -> str:
        arithmetic_data.make_data(run_dir / "data", seed)
        return f"{arithmetic_data.NUM_VALIDATION} of 8100 sums are held out"

    walk.do("data", write_data)
    walk.follow("sft", sft_job(run_dir, seed, walk.args.sft_steps))
    servers, started = (), "starting"
    objective, estimator = OBJECTIVES[walk.args.objective], walk.args.estimator
    if estimator == "gae" and not objective:
        port = find_free_port()
        servers = (critic_job(run_dir, seed, steps, port),)
        started = f"starting the critic server on port {port}"
        advantages = with_critic(port)
    else:
        advantages = without_critic("grpo" if estimator == "gae" else estimator) | objective
    walk.follow("ppo", actor_job(run_dir, seed, steps, advantages), servers, started)


def sft_job(
    run_dir: Path,
    seed: int,
    steps: int,
    name: str = "sft",
    architecture: dict[str, Any] = ARCHITECTURE,
) -> Job:
    """A tiny GPT learns to add from random weights and is stopped half-way."""
    overrides = {
        **training(run_dir / name, seed, SEQ_LENGTH),
        **from_scratch(run_dir / "data", architecture, SFT_BATCH_SIZE, steps),
        **optimizer(lr=3e-3, warmup=20),
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
        "trainer.ppo.combine_rm_and_critic_server": False,
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
        # Responses have 3 or 4 tokens: the whole reward may count for each of them.
        "trainer.ppo.gae_lambda": 1.0,
        "trainer.ppo.critic_warmup_steps": CRITIC_WARMUP,
        "model.ppo.num_rollout_samples": ROLLOUT_SIZE,
    }


def without_critic(estimator: str) -> dict:
    """The actor's settings for as many responses to fewer sums, compared with each other."""
    return {
        "trainer.ppo.advantage_estimator": estimator,
        "model.ppo.num_rollout_samples": ROLLOUT_SIZE // RESPONSES,
        "model.ppo.num_rollouts_per_prompt": RESPONSES,
    }


def actor_job(run_dir: Path, seed: int, steps: int, advantages: dict) -> Job:
    """PPO from the SFT model.

    Args:
        advantages: settings of what becomes an advantage, and whatever shall be otherwise.
    """
    overrides = {
        **training(run_dir / "ppo_actor", seed, SEQ_LENGTH),
        **policy_training("trainer.ppo", steps),
        **optimizer(lr=1e-3),
        "pretrained_checkpoint.restore_from_path": nemo_file(run_dir, "sft"),
        "trainer.ppo.reward_fn": f"{REWARD_FUNCTION}:exact_answer",
        "trainer.ppo.reward_fn_workers": 1,  # the function takes microseconds
        "trainer.ppo.ppo_epochs": PPO_EPOCHS,
        # Truncated responses are not trained on, so only the distance to the SFT model keeps the
        # end token likely after a wrong number.
        "trainer.ppo.initial_policy_kl_penalty": 0.05,
        "model.global_batch_size": BATCH_SIZE,
        "model.micro_batch_size": BATCH_SIZE,
        "model.ppo.rollout_micro_batch_size": advantages["model.ppo.num_rollout_samples"],
        "model.ppo.num_val_samples": arithmetic_data.NUM_VALIDATION,
        "model.ppo.length_params.max_length": MAX_RESPONSE,
        "model.data.data_prefix": data_prefix(run_dir / "data", "prompts"),
        **advantages,
    }
    return script_job("PPO actor", "train_gpt_ppo_actor.py", run_dir / "ppo_actor", overrides)


if __name__ == "__main__":
    sys.exit(main())
