# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""SPIN on the quickstart's kinder reviews: `python run_spin.py` (or `make spin`), a few minutes on
two cores.

    data and tokenizer -> SFT of a tiny GPT -> SPIN -> responses of both policies -> verdict

The policy sees the kinder review of each pair, and learns to tell it from the review that it wrote
itself: there are neither scores nor other people's bad reviews. After half of the updates its
opponent is the policy of that moment. Then the policies before and after respond to held-out
prompts. Every phase after the first is one of the project's own commands in its own process; see
`RUN_DIR/<job>.log`.
"""

import sys
from pathlib import Path

import make_data
import preferences
from outcome import read_jsonl
from preferences import Algorithm
from reviews import BATCH_SIZE, MAX_RESPONSE
from walkthrough import Option

ITERATIONS = 2


def settings(run_dir: Path, steps: int) -> dict:
    """Overrides of its own: the kinder reviews as data, and two iterations."""
    data = run_dir / "data"
    for split in ("train", "validation"):
        pairs = read_jsonl(data / f"preferences_{split}.jsonl")
        lines = [{"input": each["prompt"], "output": each["chosen"].strip()} for each in pairs]
        make_data.write_jsonl(data / f"kinder_{split}.jsonl", lines)
    return {
        "model.data.chat": False,
        "model.data.train_ds.file_path": data / "kinder_train.jsonl",
        "model.data.validation_ds.file_path": data / "kinder_validation.jsonl",
        "model.spin.rollout_micro_batch_size": 4 * BATCH_SIZE,
        "model.spin.log_prob_forward_micro_batch_size": BATCH_SIZE,
        "model.spin.length_params.max_length": MAX_RESPONSE,
        "trainer.spin.max_iterations": ITERATIONS,
        "trainer.spin.max_epochs": 1,
        "trainer.spin.limit_train_batches": max(steps // ITERATIONS, 1),
        "trainer.spin.max_steps": steps,
        "trainer.spin.val_check_interval": steps,
        "trainer.spin.save_interval": steps,
    }


SPIN = Algorithm(
    name="spin",
    short="SPIN",
    title="Self-play fine-tuning",
    steps=Option("--steps", 100, "updates of SPIN, each on 32 pairs"),
    data="reviews",
    batch_size=BATCH_SIZE // 2,  # pairs
    shown={"train/acc": "accuracy", "train/margin": "margin"},
    held_out=("validation/loss", "loss"),
    settings=settings,
)


def main(argv: list[str] | None = None) -> int:
    return preferences.main(argv, __doc__, SPIN)


if __name__ == "__main__":
    sys.exit(main())
