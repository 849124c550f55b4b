# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The page of an evaluation, in the look of the training report."""

from collections.abc import Sequence
from typing import Any

from nemo_aligner.evaluate.measures import Number, Results, Scored
from nemo_aligner.report.charts import chart_svg, format_number
from nemo_aligner.report.elements import document, folded, table
from nemo_aligner.report.reading import Curve

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


def as_text(rows: list[Row]) -> str:
    """Rows as aligned columns, the first one on the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if number == 0 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


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
    shown = [cells[number] for number in first]
    more = [cell for number, cell in enumerate(cells) if number not in first]
    sorted_by = "the first one's gain in reward" if len(sides) == 2 else "reward"
    return (
        f"<h3>Samples, from the highest to the lowest by {sorted_by}</h3>"
        f"{table([names, *shown], 'samples')}"
        + folded(f"{len(more)} more", table([names, *more], "samples"))
    )


def spread(items: list[int], count: int) -> list[int]:
    """At most `count` of the items, evenly spread, the first and the last included."""
    if len(items) <= count:
        return items
    return [items[round(n * (len(items) - 1) / (count - 1))] for n in range(count)]
