# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Reward for GSM8K: is the number after `####` the right one?"""

import re

INSTRUCTION = "\n\nThink step by step, and end with a line that says #### and the number alone."
NUMBER = re.compile(r"####\s*\$?(-?[\d,]*\.?\d+)")


def right_number(
    prompts: list[str], responses: list[str], lengths: list[int], answer: list[str]
) -> list[float]:
    """1.0 for a response whose last `#### number` is the `answer` of its record, 0.1 for one with
    another number, else 0.0.
    """
    return [score(*pair) for pair in zip(answer, responses, strict=True)]


def score(right: str, response: str) -> float:
    """The reward of one response."""
    numbers = NUMBER.findall(response)
    if not numbers:
        return 0.0
    return 1.0 if _value(numbers[-1]) == _value(right) else 0.1


def _value(number: str) -> float:
    return float(number.replace(",", ""))
