# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The results as rows of text, which the terminal and the page show, and as metrics."""

from typing import Any

from nemo_aligner.evaluate.measures import Number, Results

# Names of the numbers for the reader, in the order of the table.
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
