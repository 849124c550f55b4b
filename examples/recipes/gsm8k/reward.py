# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Reward for GSM8K: is the number after `####` the right one?

The environment variable GSM8K_SOLUTIONS names the `solutions.json` that `prepare.py` wrote.
"""

import functools
import json
import os
import re

INSTRUCTION = "\n\nThink step by step, and end with a line that says #### and the number alone."
NUMBER = re.compile(r"####\s*\$?(-?[\d,]*\.?\d+)")


def right_number(prompts: list[str], responses: list[str], lengths: list[int]) -> list[float]:
    """1.0 for a response whose last `#### number` is the solution, 0.1 for one with another
    number, else 0.0.

    Raises:
        KeyError: a prompt holds no question of the file.
    """
    return [
        score(solution(prompt), response)
        for prompt, response in zip(prompts, responses, strict=True)
    ]


def score(right: str, response: str) -> float:
    """The reward of one response."""
    numbers = NUMBER.findall(response)
    if not numbers:
        return 0.0
    return 1.0 if _value(numbers[-1]) == _value(right) else 0.1


def solution(prompt: str) -> str:
    """The solution of the question in a prompt."""
    before = prompt[: prompt.rindex(INSTRUCTION)]
    # A chat template, or the name of the role, stands before the question.
    for start in range(len(before)):
        if before[start:] in _solutions():
            return _solutions()[before[start:]]
    raise KeyError(f"no question of {os.environ['GSM8K_SOLUTIONS']} ends {before[-200:]!r}")


def _value(number: str) -> float:
    return float(number.replace(",", ""))


@functools.cache
def _solutions() -> dict[str, str]:
    with open(os.environ["GSM8K_SOLUTIONS"], encoding="utf-8") as file:
        return json.load(file)
