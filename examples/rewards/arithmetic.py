# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Reward for arithmetic: is the response the right number?

    python examples/nlp/gpt/train_gpt_ppo_actor.py ... \\
        trainer.ppo.reward_fn=examples/rewards/arithmetic.py:exact_answer

Prompts end with a task such as `12+34=`; text before it (an instruction, examples) is ignored.
"""

import re

TASK = re.compile(r"(\d+) *([-+*]) *(\d+) *= *$")
OPERATORS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def exact_answer(prompts: list[str], responses: list[str], lengths: list[int]) -> list[float]:
    """1.0 for a response that is exactly the result, without a space; else 0.0.

    Raises:
        ValueError: a prompt does not end with a task.
    """
    return [
        float(response == right_answer(prompt)) for prompt, response in zip(prompts, responses)
    ]


def right_answer(prompt: str) -> str:
    """`12+34=` -> `46`"""
    task = TASK.search(prompt)
    if task is None:
        raise ValueError(f"the prompt {prompt!r} does not end with a task such as 12+34=")
    left, operator, right = task.groups()
    return str(OPERATORS[operator](int(left), int(right)))
