# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""KTO on single reviews with a thumb up or down: `python run_kto.py` (or `make kto`), a few
minutes on two cores.

    data and tokenizer -> SFT of a tiny GPT -> KTO -> responses of both policies -> verdict

The policy sees one review of each film and whether it was liked: neither pairs nor scores. Then
the policies before and after respond to held-out prompts. Every phase after the first is one of
the project's own commands in its own process; see `RUN_DIR/<job>.log`.

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

KTO = Algorithm(
    name="kto",
    short="KTO",
    title="Kahneman-Tversky optimization",
    steps=Steps("--steps", 100, "updates of KTO, each on 64 reviews"),
    data="thumbs",
    batch_size=BATCH_SIZE,
    shown={"train/rewards_margin": "margin"},
    held_out=("validation/rewards_margin", "margin"),
)


def main(argv: list[str] | None = None) -> int:
    return preferences.main(argv, __doc__, KTO)


def kto_job(run_dir: Path, seed: int, steps: int) -> Job:
    """The SFT model learns from single reviews which ones are liked."""
    return preferences.training_job(KTO, run_dir, seed, steps)


if __name__ == "__main__":
    sys.exit(main())
