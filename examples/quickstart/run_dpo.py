# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""DPO on the quickstart's pairs of reviews: `python run_dpo.py` (or `make dpo`), a few minutes on
two cores.

    data and tokenizer -> SFT of a tiny GPT -> DPO -> responses of both policies -> verdict

The policy sees pairs of reviews, the kinder one first, and neither a reward model nor a score.
Then the policies before and after respond to held-out prompts. Every phase after the first is one
of the project's own commands in its own process; see `RUN_DIR/<job>.log`.
"""

import sys

import preferences
from preferences import Algorithm
from reviews import BATCH_SIZE
from walkthrough import Option

DPO = Algorithm(
    name="dpo",
    short="DPO",
    title="Direct preference optimization",
    steps=Option("--steps", 100, "updates of DPO, each on 32 pairs"),
    data="preferences",
    batch_size=BATCH_SIZE // 2,  # pairs
    shown={"train/acc": "accuracy", "train/margin": "margin"},
    held_out=("validation/acc", "accuracy"),
)


def main(argv: list[str] | None = None) -> int:
    return preferences.main(argv, __doc__, DPO)


if __name__ == "__main__":
    sys.exit(main())
