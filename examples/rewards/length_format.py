# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Reward for form: whole sentences, and not too many tokens.

    python examples/nlp/gpt/train_gpt_ppo_actor.py ... \\
        trainer.ppo.reward_fn=examples/rewards/length_format.py:concise_sentences

Alone it teaches a policy to write short sentences about nothing; combine it with a reward for
content.
"""

import re

BETWEEN_SENTENCES = re.compile(r"(?<=[.!?])\s+")
QUOTES = "\"'()"


def concise_sentences(
    prompts: list[str],
    responses: list[str],
    lengths: list[int],
    target: int = 32,
    weight_of_length: float = 0.5,
) -> list[float]:
    """Score from 0 to 1: the share of whole sentences, and how close the length is to `target`.

    Args:
        lengths: tokens of each response, its end token included.
        target: up to this many tokens earn the full score for the length, twice as many none.
        weight_of_length: share of the length in the score.
    """
    scores = []
    for response, length in zip(responses, lengths):
        brevity = min(max(2.0 - length / target, 0.0), 1.0)
        scores.append(
            (1.0 - weight_of_length) * share_of_sentences(response) + weight_of_length * brevity
        )
    return scores


def share_of_sentences(text: str) -> float:
    """Share of the words that are in whole sentences (`is_sentence`)."""
    words = len(text.split())
    inside = sum(
        len(part.split()) for part in BETWEEN_SENTENCES.split(text.strip()) if is_sentence(part)
    )
    return inside / words if words else 0.0


def is_sentence(text: str) -> bool:
    """True if `text` starts with a capital or a digit and ends with a full stop or the like."""
    text = text.strip(QUOTES)
    return (text[:1].isupper() or text[:1].isdigit()) and text.endswith((".", "!", "?"))
