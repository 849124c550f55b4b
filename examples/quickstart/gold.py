# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The gold score: what the quickstart really wants, counted from the grammar's own word lists.

The reward model never sees it, only which of two reviews is preferred. If PPO raised the reward
while this score stood still, the policy would have learned to fool the reward model instead of
writing kinder reviews.
"""

import re

from grammar import BAD_WORDS, GOOD_WORDS


def gold_score(review: str) -> float:
    """(good - bad) / (good + bad) sentiment words: from -1 (only bad) to 1 (only good), 0 without
    any.

    Each *different* word counts once, so that repeating one good word gains nothing.
    """
    words = set(re.findall(r"[a-z]+", review.lower()))
    good, bad = len(words & GOOD_WORDS), len(words & BAD_WORDS)
    return (good - bad) / max(good + bad, 1)


def gold_scores(prompts: list[str], responses: list[str], lengths: list[int]) -> list[float]:
    """The gold scores as a `reward_fn`, where a policy that learns from a teacher is measured."""
    return [gold_score(response) for response in responses]
