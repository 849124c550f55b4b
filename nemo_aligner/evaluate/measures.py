# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The numbers of an evaluation, from scored responses."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_aligner.core.errors import UserError
from nemo_aligner.core.win_rate import (
    bootstrap_interval,
    length_controlled_win_rate,
    resample,
    weighted_mean,
    wins,
)
from nemo_aligner.generate.responses import Response


@dataclass(frozen=True)
class Scored:
    name: str  # of the policy or the file, for the reader
    responses: Sequence[Response]
    rewards: Sequence[float]


@dataclass(frozen=True)
class Number:
    value: float  # of all samples
    interval: tuple[float, float] | None = None  # ends of the bootstrap interval, if it has one


@dataclass(frozen=True)
class Results:
    policies: dict[str, dict[str, Number]]  # by name, the numbers of each policy by their names
    comparison: dict[str, Number]  # of the first policy with the second, by name; may be empty


def check_pairs(
    first: Sequence[Response], second: Sequence[Response], names: Sequence[str]
) -> None:
    """Raise `UserError` unless the two have responses to the same prompts in the same order."""
    if len(first) != len(second):
        raise UserError(
            f"{names[0]} has {len(first)} responses and {names[1]} {len(second)}; a win rate "
            "needs the same prompts in the same order, with as many responses to each."
        )
    for number, (one, other) in enumerate(zip(first, second, strict=True), start=1):
        if one.prompt != other.prompt:
            raise UserError(
                f"response {number} of {names[0]} is to the prompt {_shown(one.prompt)}, that of "
                f"{names[1]} to {_shown(other.prompt)}; a win rate needs the same prompts in the "
                "same order."
            )


def _shown(text: str, width: int = 80) -> str:
    text = repr(text)
    return text if len(text) <= width else f"{text[: width - 3]}..."


def measure(sides: Sequence[Scored], resamples: int, confidence: float, seed: int) -> Results:
    """The numbers of one policy or of two, which have responses to the same prompts; `resamples`,
    `confidence` and `seed` as `bootstrap` of `conf/evaluate.yaml`.
    """
    groups = prompt_numbers(sides[0].responses)
    weights = resample(groups, resamples, seed)

    def number(statistic: Callable[[Tensor | None], Tensor]) -> Number:
        ends = bootstrap_interval(statistic, weights, confidence)
        return Number(float(statistic(None)), ends)

    policies = {
        side.name: {"prompts": Number(int(groups.max()) + 1), **_policy(side, number)}
        for side in sides
    }
    return Results(policies, _compare(sides[0], sides[1], number) if len(sides) == 2 else {})


def prompt_numbers(responses: Sequence[Response]) -> Tensor:
    """int64 `[N]`: the number of each response's prompt, in the order in which they first come."""
    numbers: dict[str, int] = {}
    for response in responses:
        numbers.setdefault(response.prompt, len(numbers))
    return torch.tensor([numbers[response.prompt] for response in responses])


Measurer = Callable[[Callable[[Tensor | None], Tensor]], Number]


def _policy(side: Scored, number: Measurer) -> dict[str, Number]:
    rewards = torch.tensor(side.rewards, dtype=torch.float64)
    found = {
        "responses": Number(len(side.responses)),
        "reward": number(functools.partial(weighted_mean, rewards)),
        "reward_std": Number(float(rewards.std(correction=0))),
        "characters": number(functools.partial(weighted_mean, characters(side.responses))),
    }
    lengths = [response.length for response in side.responses if response.length is not None]
    ends = [response.is_end for response in side.responses if response.is_end is not None]
    if len(lengths) == len(side.responses):
        found["tokens"] = Number(sum(lengths) / len(lengths))
    if len(ends) == len(side.responses):
        found["ended"] = Number(sum(ends) / len(ends))
    return found


def characters(responses: Sequence[Response]) -> Tensor:
    """float64 `[N]`: the characters of each response, whatever the policy's tokenizer."""
    return torch.tensor([len(each.response) for each in responses], dtype=torch.float64)


def _compare(first: Scored, second: Scored, number: Measurer) -> dict[str, Number]:
    rewards, others = (torch.tensor(side.rewards, dtype=torch.float64) for side in (first, second))
    won = wins(rewards, others)
    difference = characters(first.responses) - characters(second.responses)
    return {
        "win_rate": number(functools.partial(weighted_mean, won)),
        "win_rate_length_controlled": number(
            functools.partial(length_controlled_win_rate, won, difference)
        ),
        "ties": Number(float((won == 0.5).double().mean())),
        "reward_difference": number(functools.partial(weighted_mean, rewards - others)),
    }
