# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The numbers of an evaluation, from scored responses, and its page in the look of the report."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
from nemo_aligner.report.elements import (
    chart_svg,
    document,
    folded,
    format_number,
    table,
    unfolded,
)
from nemo_aligner.report.reading import Curve


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


# --- the page ------------------------------------------------------------------------------------

TITLES = {
    "prompts": "prompts",
    "responses": "responses",
    "reward": "reward, mean",
    "reward_std": "reward, standard deviation",
    "characters": "length in characters, mean",
    "tokens": "length in tokens, mean",
    "ended": "responses that end by themselves",
    "win_rate": "win rate",
    "win_rate_length_controlled": "win rate, length-controlled",
    "ties": "ties, counted as half a win",
    "reward_difference": "reward, mean difference",
}
SHARES = {"ended", "win_rate", "win_rate_length_controlled", "ties"}

Row = tuple[str, ...]


def policy_rows(results: Results) -> list[Row]:
    """A head and one row per number, with a column for each policy."""
    rows: list[Row] = [("", *results.policies)]
    for key, title in TITLES.items():
        numbers = [policy.get(key) for policy in results.policies.values()]
        if any(number is not None for number in numbers):
            rows.append((title, *("" if n is None else shown(key, n) for n in numbers)))
    return rows


def comparison_rows(results: Results) -> list[Row]:
    """A head and one row per number of the comparison; nothing with one policy."""
    if not results.comparison:
        return []
    first, second = results.policies
    rows: list[Row] = [("", f"{first} against {second}")]
    return rows + [(TITLES[key], shown(key, n)) for key, n in results.comparison.items()]


def shown(key: str, number: Number) -> str:
    """A number with its interval: `0.531 [0.402, 0.66]`, shares in percent."""

    def text(value: float) -> str:
        return f"{100 * value:.1f}%" if key in SHARES else f"{value:.4g}"

    if number.interval is None:
        return text(number.value)
    low, high = number.interval
    return f"{text(number.value)} [{text(low)}, {text(high)}]"


def as_metrics(results: Results) -> dict[str, Any]:
    """The results as JSON values: every number has its value, and its interval if there is one."""

    def plain(numbers: dict[str, Number]) -> dict[str, Any]:
        return {
            key: {"value": number.value}
            | ({} if number.interval is None else {"interval": list(number.interval)})
            for key, number in numbers.items()
        }

    policies = {name: plain(numbers) for name, numbers in results.policies.items()}
    return {"policies": policies, "comparison": plain(results.comparison)}


FIRST_SAMPLES = 6  # shown at once; the others unfold
MAX_SAMPLES = 24


def render(results: Results, sides: Sequence[Scored], facts: Sequence[Row]) -> str:
    """The HTML page, with the `facts` (name, value) that the numbers were made with."""
    title = " against ".join(side.name for side in sides)
    curves = {side.name: share_below(side.rewards) for side in sides}
    body = table(comparison_rows(results)) + table(policy_rows(results))
    if all(len(curve) > 1 for curve in curves.values()):
        chart = chart_svg("share of responses with at most this reward", curves, axis="reward")
        body += f'<div class="charts">{chart}</div>'
    body += _samples(sides)
    body += folded("How this was made", table([("", ""), *facts]))
    return document(f"{title}: evaluation", body)


def share_below(rewards: Sequence[float]) -> Curve:
    """The share of responses with at most each reward."""
    ordered = sorted(rewards)
    return {reward: (number + 1) / len(ordered) for number, reward in enumerate(ordered)}


def _samples(sides: Sequence[Scored]) -> str:
    """Some samples, from the best to the worst: by the difference in reward, or the reward."""
    gains = [
        rewards[0] - (rewards[1] if len(rewards) > 1 else 0.0)
        for rewards in zip(*(side.rewards for side in sides), strict=True)
    ]
    order = sorted(range(len(gains)), key=lambda number: -gains[number])
    chosen = spread(order, MAX_SAMPLES)
    names = ("prompt", *(side.name for side in sides))
    cells: list[Row] = [
        (
            sides[0].responses[number].prompt,
            *(
                f"{side.responses[number].response.strip()}\n"
                f"(reward {format_number(side.rewards[number])})"
                for side in sides
            ),
        )
        for number in chosen
    ]
    first = spread(list(range(len(cells))), FIRST_SAMPLES)
    rest = [number for number in range(len(cells)) if number not in first]
    sorted_by = "the first one's gain in reward" if len(sides) == 2 else "reward"
    title = f"<h3>Samples, from the highest to the lowest by {sorted_by}</h3>"
    return title + unfolded([cells[number] for number in first + rest], names, len(first))


def spread(items: list[int], count: int) -> list[int]:
    """At most `count` of the items, evenly spread, the first and the last included."""
    if len(items) <= count:
        return items
    return [items[round(n * (len(items) - 1) / (count - 1))] for n in range(count)]
