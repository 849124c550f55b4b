# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""DPO on the quickstart's pairs of reviews: `python run_dpo.py` (or `make dpo`), a few minutes on
two cores.

    data and tokenizer -> SFT of a tiny GPT -> DPO -> responses of both policies -> verdict

The policy sees pairs of reviews, the kinder one first, and neither a reward model nor a score.
Then the policies before and after respond to held-out prompts. Every phase after the first is one
of the project's own commands in its own process; see `RUN_DIR/<job>.log`.

Exit code: 0 if the gold score rose clearly (`outcome.py` says what is clear), 1 if not, 2 if a job
failed or the arguments make no sense, 128 + signal number if it was stopped.
"""

import sys
from pathlib import Path

import preferences
from jobs import Job
from preferences import Algorithm
from reviews import BATCH_SIZE
from walkthrough import Steps

DPO = Algorithm(
    name="dpo",
    short="DPO",
    title="Direct preference optimization",
    steps=Steps("--steps", 100, "updates of DPO, each on 32 pairs"),
    data="preferences",
    batch_size=BATCH_SIZE // 2,  # pairs
    shown={"train/acc": "accuracy", "train/margin": "margin"},
    held_out=("validation/acc", "accuracy"),
)


def main(argv: list[str] | None = None) -> int:
    return preferences.main(argv, __doc__, DPO)


def dpo_job(run_dir: Path, seed: int, steps: int) -> Job:
    """The SFT model learns from pairs which review is kinder."""
    return preferences.training_job(DPO, run_dir, seed, steps)


if __name__ == "__main__":
    sys.exit(main())
