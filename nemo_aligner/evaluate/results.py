# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The numbers of an evaluation, from scored responses, and its page in the look of the report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
    chart_grid,
    document,
    folded,
    format_number,
    table,
    unfolded,
)

Number = dict[str, Any]  # its "value" and, where there is one, its bootstrap "interval"
Numbers = dict[str, Number]  # by their names


@dataclass(frozen=True)
class Scored:
    name: str  # of the policy or the file, for the reader
    responses: Sequence[Response]
    rewards: Sequence[float]

    @property
    def reward(self) -> Tensor:
        """float64 `[N]`."""
        return torch.tensor(self.rewards, dtype=torch.float64)

    @property
    def characters(self) -> Tensor:
        """float64 `[N]`, of each response, whatever the policy's tokenizer."""
        lengths = [len(each.response) for each in self.responses]
        return torch.tensor(lengths, dtype=torch.float64)


def check_pairs(sides: Sequence[Sequence[Response]], names: Sequence[str]) -> None:
    """Raise `UserError` unless both sides have responses to the same prompts in the same order."""
    first, second = sides
    if len(first) != len(second):
        raise UserError(
            f"{names[0]} has {len(first)} responses and {names[1]} {len(second)}; a win rate "
            "needs the same prompts in the same order, with as many responses to each."
        )
    for number, (one, other) in enumerate(zip(first, second, strict=True), start=1):
        if one.prompt != other.prompt:
            raise UserError(
                f"response {number} of {names[0]} is to the prompt {one.prompt!r:.80}, that of "
                f"{names[1]} to {other.prompt!r:.80}; a win rate needs the same prompts in the "
                "same order."
            )


def measure(
    sides: Sequence[Scored], resamples: int, confidence: float, seed: int
) -> dict[str, Any]:
    """The numbers of one policy or of two, which have responses to the same prompts, as JSON
    values: "policies" has the `Numbers` of each by its name, "comparison" those of the first with
    the second, if any. Other arguments as `bootstrap` of `conf/evaluate.yaml`.
    """
    prompts = [response.prompt for response in sides[0].responses]
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    groups = torch.tensor([numbers[prompt] for prompt in prompts])
    weights = resample(groups, resamples, seed)

    def number(statistic: Any, *values: Tensor) -> Number:
        """A function of `values`, `[N]` each, and of weights of the samples."""
        ends = bootstrap_interval(partial(statistic, *values), weights, confidence)
        return {"value": float(statistic(*values)), "interval": list(ends)}

    policies: dict[str, Numbers] = {}
    for side in sides:
        found = policies[side.name] = {
            "prompts": {"value": len(numbers)},
            "responses": {"value": len(side.responses)},
            "reward": number(weighted_mean, side.reward),
            "reward_std": {"value": float(side.reward.std(correction=0))},
            "characters": number(weighted_mean, side.characters),
        }
        for name, values in (
            ("tokens", [response.length for response in side.responses]),
            ("ended", [response.is_end for response in side.responses]),
        ):
            given = [value for value in values if value is not None]
            if len(given) == len(values):
                found[name] = {"value": sum(given) / len(given)}
    comparison: Numbers = {}
    if len(sides) == 2:
        first, second = sides
        won, difference = wins(first.reward, second.reward), first.characters - second.characters
        comparison = {
            "win_rate": number(weighted_mean, won),
            "win_rate_length_controlled": number(length_controlled_win_rate, won, difference),
            "ties": {"value": float((won == 0.5).double().mean())},
            "reward_difference": number(weighted_mean, first.reward - second.reward),
        }
    return {"policies": policies, "comparison": comparison}


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


def tables(results: Mapping[str, Any]) -> list[list[Row]]:
    """The policies, and their comparison if there is one: a head and one row per number."""
    policies, found = results["policies"], []
    for named in (policies, {" against ".join(policies): results["comparison"]}):
        rows: list[Row] = [("", *named)]
        for key, title in TITLES.items():
            numbers = [each.get(key) for each in named.values()]
            if any(numbers):
                rows.append((title, *(shown(key, each) if each else "" for each in numbers)))
        found += [rows] if len(rows) > 1 else []
    return found


def shown(key: str, number: Number) -> str:
    """A number with its interval: `0.531 [0.402, 0.66]`, shares in percent."""
    value, *ends = (
        f"{100 * each:.1f}%" if key in SHARES else format_number(each)
        for each in (number["value"], *number.get("interval", ()))
    )
    return f"{value} [{', '.join(ends)}]" if ends else value


FIRST_SAMPLES = 6  # shown at once; the others unfold
MAX_SAMPLES = 24


def render(results: Mapping[str, Any], sides: Sequence[Scored], facts: Sequence[Row]) -> str:
    """The HTML page, with the `facts` (name, value) that the numbers were made with."""
    body = "".join(map(table, reversed(tables(results))))
    curves = {
        side.name: {r: n / len(side.rewards) for n, r in enumerate(sorted(side.rewards), start=1)}
        for side in sides
    }
    if all(len(curve) > 1 for curve in curves.values()):
        title = "share of responses with at most this reward"
        body += chart_grid([(title, curves)], axis="reward")
    body += _samples(sides)
    body += folded("How this was made", table([("", ""), *facts]))
    names = " against ".join(side.name for side in sides)
    return document(f"{names}: evaluation", body)


def _samples(sides: Sequence[Scored]) -> str:
    """Some samples, from the best to the worst: by the difference in reward, or the reward."""
    rewards = zip(*(side.rewards for side in sides), strict=True)
    gains = [first - sum(second) for first, *second in rewards]
    order = sorted(range(len(gains)), key=gains.__getitem__, reverse=True)
    cells: list[Row] = []
    for number in spread(order, MAX_SAMPLES):
        texts = (
            f"{side.responses[number].response.strip()}\n"
            f"(reward {format_number(side.rewards[number])})"
            for side in sides
        )
        cells.append((sides[0].responses[number].prompt, *texts))
    names = ("prompt", *(side.name for side in sides))
    first = spread(range(len(cells)), FIRST_SAMPLES)
    rest = [number for number in range(len(cells)) if number not in first]
    sorted_by = "the first one's gain in reward" if len(sides) == 2 else "reward"
    title = f"<h3>Samples, from the highest to the lowest by {sorted_by}</h3>"
    return title + unfolded([cells[number] for number in first + rest], names, len(first))


def spread(items: Sequence[int], count: int) -> list[int]:
    """At most `count` of the items, evenly spread, the first and the last included."""
    if len(items) <= count:
        return [*items]
    return [items[round(n * (len(items) - 1) / (count - 1))] for n in range(count)]
