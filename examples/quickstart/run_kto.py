# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""KTO on single reviews with a thumb up or down: `python run_kto.py` (or `make kto`), a few
minutes on two cores.

    data and tokenizer -> SFT of a tiny GPT -> KTO -> responses of both policies -> verdict

The policy sees one review of each film and whether it was liked: neither pairs nor scores. Then
the policies before and after respond to held-out prompts. Every phase after the first is one of
the project's own commands in its own process; see `RUN_DIR/<job>.log`.
"""

import sys

import preferences
from preferences import Algorithm
from reviews import BATCH_SIZE
from walkthrough import Option

KTO = Algorithm(
    name="kto",
    short="KTO",
    title="Kahneman-Tversky optimization",
    steps=Option("--steps", 100, "updates of KTO, each on 64 reviews"),
    data="thumbs",
    batch_size=BATCH_SIZE,
    shown={"train/rewards_margin": "margin"},
    held_out=("validation/rewards_margin", "margin"),
)


def main(argv: list[str] | None = None) -> int:
    return preferences.main(argv, __doc__, KTO)


if __name__ == "__main__":
    sys.exit(main())
