# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What a generation engine is asked for and gives. In samples of several turns an environment
replies to each response with an observation, until one of both ends the conversation.

Shapes: b samples, W width of the prompts, P prompt length, R total length (prompt and response).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from nemo_aligner.config.fields import Configuration
from nemo_aligner.config.keys.rollouts import LengthParams, SamplingParams
from nemo_aligner.config.values import Values
from nemo_aligner.core.errors import ConfigError


@dataclass(frozen=True)
class GenerationParams:
    """How to generate; `ConfigError`: a value that its key (`config/keys/rollouts.py`) cannot
    have.
    """

    max_length: int  # tokens to generate at most, the end token included
    min_length: int = 0  # tokens to generate before an end may follow
    use_greedy: bool = False  # take the likeliest token; temperature, top_k, top_p have no effect
    temperature: float = 1.0  # divides the logits
    top_k: int = 0  # sample from this many likeliest ids; 0 samples from all
    top_p: float = 1.0  # sample from the likeliest ids that together have this probability
    repetition_penalty: float = 1.0  # above 1, ids that the sample already has are less likely
    end_strings: tuple[str, ...] = ()  # end a response, as eos does; the response keeps them
    return_logprobs: bool = False

    def __post_init__(self) -> None:
        of_lengths = {"max_length": self.max_length, "min_length": self.min_length}
        of_sampling = {
            name: value
            for name, value in vars(self).items()
            if f"sampling_params.{name}" in _KEYS and name != "end_strings"
        }
        values = Values({"length_params": of_lengths, "sampling_params": of_sampling})
        for key in _KEYS.values():
            if values.has(key.name):
                key.check(values)
        values.at_most("length_params.min_length", "length_params.max_length")

    @property
    def changes_distribution(self) -> bool:
        """False if tokens are simply drawn from softmax(logits / temperature)."""
        cut = not self.use_greedy and (self.top_k > 0 or self.top_p < 1.0)
        return cut or self.repetition_penalty != 1.0 or self.min_length > 1

    def with_end_strings(self, more: Sequence[str]) -> "GenerationParams":
        added = [string for string in more if string not in self.end_strings]
        return replace(self, end_strings=(*self.end_strings, *added))

    @classmethod
    def from_config(
        cls, length_params: Mapping[str, Any], sampling_params: Mapping[str, Any]
    ) -> "GenerationParams":
        """Read the sections `length_params` and `sampling_params`; null and missing keys have
        their defaults, `add_BOS`, `all_probs` and `compute_logprob` no effect. `ConfigError`: a
        missing or unusable value.
        """
        sections = {"length_params": length_params, "sampling_params": sampling_params}
        tree = {
            name: {key: value for key, value in section.items() if value is not None}
            for name, section in sections.items()
        }
        lengths, sampling = tree.values()
        if "max_length" not in lengths:
            raise ConfigError(
                "length_params.max_length is missing: the tokens to generate at most."
            )
        strings = sampling.get("end_strings", ())
        if isinstance(strings, str) or not all(isinstance(s, str) and s for s in strings):
            shown = strings if isinstance(strings, str) else list(strings)
            raise ConfigError(
                f"sampling_params.end_strings={shown!r} must be a list of non-empty texts."
            )
        known = {field.name for field in fields(cls)}
        given = {key: value for key, value in (lengths | sampling).items() if key in known}
        return cls(**given | {"end_strings": tuple(strings)})


_KEYS = Configuration(
    "generation", {"length_params": LengthParams, "sampling_params": SamplingParams}
).keys


@dataclass(frozen=True)
class Reply:
    observation: tuple[int, ...]  # ids that the policy reads next; not used if `done`
    reward: float  # of the response
    done: bool  # the conversation is over


@dataclass(frozen=True)
class Details:
    is_end: bool  # it ended by itself
    record: int | None = None  # number of its prompt's record, where the prompts have numbers
    logprobs: tuple[float, ...] | None = None  # of its tokens, where they are computed


class Environment(Protocol):
    """The other side of conversations; `max_turns` responses of the policy at most in each."""

    max_turns: int

    def submit(
        self,
        number: int,
        seed: int,
        prompt: tuple[int, ...],
        responses: tuple[tuple[int, ...], ...],
        details: Details,
    ) -> None:
        """Ask for the reply to the last of `responses`; returns at once. A conversation `number`
        has one open request at a time; `seed` is that of its random stream.
        """

    def replies(self, wait: bool) -> Mapping[int, Reply]:
        """Replies since the last call, by number of the conversation; `wait` for one at least.
        `UserError`: the environment failed; the message has the cause.
        """

    def end(self, number: int) -> None:
        """The conversation is over for the policy, although the last reply said otherwise."""


@dataclass
class Conversation:
    """A sample of several turns while it grows; the same on every rank that decodes it."""

    responses: list[tuple[int, ...]] = field(default_factory=list)  # ids of each response so far
    observed: list[tuple[int, int]] = field(default_factory=list)  # (first, beyond the last)
    rewards: list[tuple[int, float]] = field(default_factory=list)  # (last token's place, value)
    is_end: bool = False  # the last response ended by itself

    def observed_tokens(self, length: int) -> Tensor:
        """bool `[length - 1]`: True in column t if token t+1 came from the environment."""
        observed = torch.zeros(length - 1, dtype=torch.bool)
        for first, beyond in self.observed:
            observed[first - 1 : beyond - 1] = True
        return observed

    def token_rewards(self, length: int) -> Tensor:
        """float32 `[R - 1]`: the reward of token t+1 in column t, NaN where a token has none."""
        rewards = torch.full((length - 1,), float("nan"))
        for position, reward in self.rewards:
            rewards[position - 1] = reward
        return rewards


# int64: prompts `[b, W]`, padded on the right, their lengths `[b]`, seeds of the samples' random
# streams `[b]`; where an environment asks for them also numbers of the prompts' records `[b]`.
Prompts = tuple[Tensor, ...]
# Called after each step with int64 `[n]` places in the caller's batch and their new tokens.
OnTokens = Callable[[Tensor, Tensor], None]


@dataclass
class GenerationOutput:
    """Prompts with their responses."""

    response_tokens: Tensor  # int64 `[b, max R]`, prompt and response, then eos
    response_lengths: Tensor  # int64 `[b]`, R; the token that ended a response counts
    is_end: Tensor  # bool `[b]`, True if it ended by itself (eos or an end string), not cut off
    # float32 `[b, max R - 1]`. Column t scores token t+1, on `[P-1, R-1)`, 0 elsewhere; at the
    # sampling temperature (1 if greedy), before repetition penalty, top-k and top-p.
    logprobs: Tensor | None = None
    # bool `[b, max R - 1]`, True in the columns that predict tokens of an environment
    observed: Tensor | None = None
    # float32 `[b, max R - 1]`, a response's reward in the column that predicts its last token,
    # NaN elsewhere
    token_rewards: Tensor | None = None

    def each(self, change: Callable[[str, Tensor], Tensor]) -> "GenerationOutput":
        """`change` applied to the name and the values of each column that is there."""
        columns = {name: value for name, value in vars(self).items() if value is not None}
        return replace(self, **{name: change(name, value) for name, value in columns.items()})

    def at(self, places: Tensor) -> "GenerationOutput":
        places = places.to(self.is_end.device)
        return self.each(lambda _, column: column[places])
