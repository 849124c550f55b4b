# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Process reward for derivations: is each line a correct equation?

    python examples/nlp/gpt/train_gpt_ppo_actor.py ... \\
        trainer.ppo.reward_fn=examples/rewards/derivation.py:correct_lines \\
        trainer.ppo.rewards_per=step trainer.ppo.step_end=$'"\\n"'

A line is correct if both sides of its equals sign are sums of whole numbers with the same value,
such as `12+34=46`.
"""

import re

SUM = re.compile(r" *\d+( *\+ *\d+)* *")


def correct_lines(
    prompts: list[str], responses: list[str], lengths: list[int]
) -> list[list[float]]:
    """1.0 for each correct line of a response, 0.0 for each other."""
    return [[float(is_correct(line)) for line in lines(response)] for response in responses]


def lines(response: str) -> list[str]:
    """The steps of a response, as the job counts them: what follows the last line break is one
    unless it is blank, and there is at least one.
    """
    *ended, rest = response.split("\n")
    return [*ended, rest] if rest.strip() or not ended else ended


def is_correct(line: str) -> bool:
    """`12+34=46` -> True"""
    sides = line.split("=")
    if len(sides) != 2 or not all(SUM.fullmatch(side) for side in sides):
        return False
    left, right = (sum(int(number) for number in re.findall(r"\d+", side)) for side in sides)
    return left == right
