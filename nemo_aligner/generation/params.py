# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What a user asks of text generation: lengths, sampling, ends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nemo_aligner.core.errors import ConfigError


@dataclass(frozen=True)
class GenerationParams:
    """How to generate.

    Raises:
        ConfigError: a value is out of range.
    """

    max_length: int  # tokens to generate at most, the end token included
    min_length: int = 0  # tokens to generate before an end may follow
    # always take the likeliest token; temperature, top_k and top_p then have no effect
    use_greedy: bool = False
    temperature: float = 1.0  # divides the logits
    top_k: int = 0  # sample from this many likeliest ids; 0 samples from all
    # sample from the likeliest ids that together have this probability; 1 samples from all
    top_p: float = 1.0
    # above 1, ids of the prompt and of the response so far are less likely; 1 has no effect
    repetition_penalty: float = 1.0
    # strings that end a response, besides the eos token; the response keeps them
    end_strings: tuple[str, ...] = ()
    return_logprobs: bool = False  # also return the log-probs of the generated tokens

    def __post_init__(self) -> None:
        rules = {
            "length_params.max_length": (self.max_length, self.max_length >= 1, "at least 1"),
            "length_params.min_length": (
                self.min_length,
                0 <= self.min_length <= self.max_length,
                f"between 0 and max_length={self.max_length}",
            ),
            "sampling_params.temperature": (
                self.temperature,
                0 < self.temperature < float("inf"),
                "above 0 (for the likeliest token set sampling_params.use_greedy=True)",
            ),
            "sampling_params.top_k": (
                self.top_k,
                self.top_k >= 0,
                "at least 0 (0 samples from all ids)",
            ),
            "sampling_params.top_p": (self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            "sampling_params.repetition_penalty": (
                self.repetition_penalty,
                0 < self.repetition_penalty < float("inf"),
                "above 0 (1 is without effect)",
            ),
        }
        for key, (value, valid, wanted) in rules.items():
            if not valid:
                raise ConfigError(f"{key}={value} must be {wanted}.")
        if not all(isinstance(string, str) and string for string in self.end_strings):
            raise ConfigError(
                f"sampling_params.end_strings={list(self.end_strings)} must hold non-empty texts."
            )

    @property
    def changes_distribution(self) -> bool:
        """False if tokens are simply drawn from softmax(logits / temperature)."""
        cut = not self.use_greedy and (self.top_k > 0 or self.top_p < 1.0)
        return cut or self.repetition_penalty != 1.0 or self.min_length > 1

    def with_end_strings(self, more: Sequence[str]) -> "GenerationParams":
        """These parameters with `more` strings that end a response."""
        added = [string for string in more if string not in self.end_strings]
        return replace(self, end_strings=(*self.end_strings, *added))

    @classmethod
    def from_config(
        cls, length_params: Mapping[str, Any], sampling_params: Mapping[str, Any]
    ) -> "GenerationParams":
        """Read the configuration sections `length_params` and `sampling_params`.

        A key that is null or missing has the default of this class. `add_BOS` has no effect,
        because prompts come as tokens; neither have `all_probs` and `compute_logprob`.

        Raises:
            ConfigError: a missing or unusable value.
        """
        lengths, sampling = _given(length_params), _given(sampling_params)
        if "max_length" not in lengths:
            raise ConfigError(
                "length_params.max_length is missing; set the number of tokens to generate at "
                "most."
            )
        values: dict[str, Any] = {}
        for key in ("max_length", "min_length"):
            if key in lengths:
                values[key] = _number(f"length_params.{key}", lengths[key], int)
        for key, kind in _SAMPLING_NUMBERS.items():
            if key in sampling:
                values[key] = _number(f"sampling_params.{key}", sampling[key], kind)
        if "use_greedy" in sampling:
            values["use_greedy"] = bool(sampling["use_greedy"])
        if "end_strings" in sampling:
            strings = sampling["end_strings"]
            if isinstance(strings, str):
                raise ConfigError(
                    f"sampling_params.end_strings={strings!r} must be a list: [{strings!r}]."
                )
            values["end_strings"] = tuple(strings)
        return cls(**values)


_SAMPLING_NUMBERS = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "repetition_penalty": float,
}


def _given(section: Mapping[str, Any]) -> dict[str, Any]:
    return {key: section[key] for key in section if section[key] is not None}


def _number(key: str, value: Any, kind: type[int] | type[float]) -> int | float:
    """`value` as an int or a float; `key` opens the error message."""
    try:
        if kind is int and float(value) != int(value):
            raise ValueError
        return kind(value)
    except (TypeError, ValueError):
        wanted = "an integer" if kind is int else "a number"
        raise ConfigError(f"{key}={value!r} must be {wanted}.") from None
