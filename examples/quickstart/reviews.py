# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Kinder film reviews: what `run.py` (PPO) and `run_rs.py` (rejection sampling) share, up to the
reward model.
"""

from pathlib import Path

import make_data
from commands import (
    data_prefix,
    from_scratch,
    nemo_file,
    optimizer,
    schedule,
    script_job,
    training,
    with_lora,
)
from gold import gold_score
from jobs import Job
from narrator import Phase
from outcome import REWARD, Score, first_and_last
from walkthrough import Option, Walk

SEQ_LENGTH = 56  # the longest prompt has about 20 tokens
MAX_RESPONSE = 32  # reviews of the grammar have at most 30 tokens with the end
BATCH_SIZE = 64  # samples of every update

ARCHITECTURE = {  # Llama-like, 0.2 million parameters
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 256,
    "num_attention_heads": 4,
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "position_embedding_type": "rope",
    "bias": False,
    "share_embeddings_and_output_weights": False,
}

# For LoRA, which leaves embeddings and output layer as they are: at a width of 64 these alone keep
# the policy from learning (training all other weights stops at the same reward).
WIDER = {"hidden_size": 128, "ffn_hidden_size": 512}

# A rise of 0.3: of 100 sentiment words, 15 more are good instead of bad.
GOLD = Score(
    "gold", "gold score", lambda sample: gold_score(sample["response"]), 0.3, scale="(-1 to 1)"
)
SCORES = (REWARD, GOLD)
STEPS = (Option("--sft-steps", 300), Option("--rm-steps", 100))


def phases(args) -> dict[str, Phase]:
    """The phases of `up_to_the_reward_model`."""
    return {
        "data": Phase("Data and tokenizer", 1, 2),
        "sft": Phase(
            "Supervised fine-tuning", args.sft_steps, 40, "train/loss", {"train/loss": "loss"}
        ),
        "rm": Phase(
            "Reward model",
            args.rm_steps,
            20,
            "train/loss",
            {"train/loss": "loss", "train/acc": "accuracy"},
        ),
    }


def up_to_the_policy(walk: Walk, lora: bool = False) -> None:
    """Data and SFT model; `lora`: a wider one."""
    seed = walk.args.seed

    def write_data() -> str:
        make_data.make_data(walk.run_dir / "data", seed)
        return (
            f"{make_data.SIZES['sft']['train']} reviews, {make_data.SIZES['pairs']['train']} pairs"
        )

    walk.do("data", write_data)
    walk.follow("sft", sft_job(walk.run_dir, seed, walk.args.sft_steps, lora))


def up_to_the_reward_model(walk: Walk, lora: bool = False) -> None:
    """Data, SFT model and reward model, one after another; `lora`: of a wider model, and the
    reward model trains adapters beside its weights.
    """
    up_to_the_policy(walk, lora)

    def held_out_accuracy() -> str:
        accuracy = first_and_last(walk.run_dir / "rm", "validation/acc")[1]
        if accuracy is None:
            return ""
        what = f"Reward model: accuracy on {make_data.SIZES['pairs']['validation']} held-out pairs"
        walk.findings["reward_model_accuracy"] = (what, accuracy)
        return f"held-out accuracy {accuracy:.3f}"

    reward_model = reward_model_job(walk.run_dir, walk.args.seed, walk.args.rm_steps, lora)
    walk.follow("rm", reward_model, result=held_out_accuracy)


def sft_job(run_dir: Path, seed: int, steps: int, wider: bool = False) -> Job:
    """A tiny GPT learns the language, kind and unkind reviews alike, from random weights."""
    architecture = {**ARCHITECTURE, **WIDER} if wider else ARCHITECTURE
    overrides = {
        **training(run_dir / "sft", seed, SEQ_LENGTH),
        **from_scratch(run_dir / "data", architecture, BATCH_SIZE, steps),
        **optimizer(lr=3e-3, warmup=20),
    }
    return script_job("SFT", "train_gpt_sft.py", run_dir / "sft", overrides, threads=2)


def reward_model_job(run_dir: Path, seed: int, steps: int, lora: bool = False) -> Job:
    """The SFT model with a new head learns from pairs which review is kinder; it never sees the
    gold score.
    """
    overrides = {
        **training(run_dir / "rm", seed, SEQ_LENGTH),
        **optimizer(lr=1e-3),
        "pretrained_checkpoint.restore_from_path": nemo_file(run_dir, "sft"),
        "model.global_batch_size": BATCH_SIZE // 2,  # pairs
        "model.micro_batch_size": BATCH_SIZE // 2,
        "model.force_head_dtype": "float32",
        "model.data.data_prefix": data_prefix(run_dir / "data", "pairs"),
        # The policy's responses are rewarded at their end token, so the reward model is trained
        # there too.
        "model.data.append_eod": True,
        **schedule("trainer.rm", steps, steps),
    }
    if lora:
        overrides = with_lora(overrides)
    return script_job(
        "Reward model", "train_reward_model.py", run_dir / "rm", overrides, threads=2
    )
