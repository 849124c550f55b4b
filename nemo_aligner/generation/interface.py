# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What a generation engine is asked for and gives, how texts become tokens, and where responses
end. In samples of several turns an environment replies to each response with an observation, until
one of both ends the conversation.

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
from nemo_aligner.core.tokenizer import (
    Tokenizer,
    begins_with_bos,
    end_ids,
    keep_special_tokens,
    text_tokens,
)


@dataclass(frozen=True)
class GenerationParams:
    """How to generate; `ConfigError`: a value that `config/keys/rollouts.py` does not allow."""

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
        both = [*length_params.items(), *sampling_params.items()]
        given = {key: value for key, value in both if value is not None}
        if "max_length" not in given:
            raise ConfigError(
                "length_params.max_length is missing: the tokens to generate at most."
            )
        strings = given.get("end_strings", ())
        if isinstance(strings, str) or not all(isinstance(s, str) and s for s in strings):
            shown = strings if isinstance(strings, str) else list(strings)
            raise ConfigError(
                f"sampling_params.end_strings={shown!r} must be a list of non-empty texts."
            )
        known = {field.name: given[field.name] for field in fields(cls) if field.name in given}
        return cls(**known | {"end_strings": tuple(strings)})


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


# ------------------------------------------------------------------------------------------- texts


def tokenize_batch(
    sentences: Sequence[str],
    tokenizer: Tokenizer,
    max_len: int,
    add_BOS: bool | None = None,
    add_EOS: bool = False,
) -> tuple[Tensor, Tensor]:
    """int64 tokens `[b, max_len]`, cut and padded with eos, and lengths `[b]`, on the CPU.
    `add_BOS` None: as the tokenizer does. `UserError`: it is True and the tokenizer has no bos
    token.
    """
    with_bos = begins_with_bos(tokenizer, add_BOS, "add_BOS")
    end = [tokenizer.eos_id] if add_EOS else []
    rows = [[*text_tokens(tokenizer, text, with_bos), *end][:max_len] for text in sentences]
    tokens = torch.full((len(rows), max_len), tokenizer.eos_id, dtype=torch.int64)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = torch.tensor(ids, dtype=torch.int64)
    return tokens, torch.tensor([len(ids) for ids in rows], dtype=torch.int64)


class EndConditions:
    """Decides when a response has ended: at one of `token_ids` (eos first), or with an end string.
    One that is a token for the tokenizer ends a response as that token only; the other `strings`
    are searched for in the decoded last tokens.
    """

    def __init__(self, tokenizer: Tokenizer, end_strings: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self._decode_options = keep_special_tokens(tokenizer)
        self.token_ids = end_ids(tokenizer)
        strings = []
        for string in end_strings:
            ids = self._single_token_ids(string)
            self.token_ids += [token for token in ids if token not in self.token_ids]
            if not ids:
                strings.append(string)
        self.strings = tuple(strings)
        self._ends = frozenset(self.token_ids)
        # Number of last tokens to decode. A token covers at least one byte; one more, because some
        # tokenizers drop the space before the first one.
        self._tail = 1 + max((len(string.encode()) for string in self.strings), default=0)
        # By id: whether a response whose last token it is may end with an end string.
        self._may_end: dict[int, bool] = {}

    def _single_token_ids(self, string: str) -> list[int]:
        """The ids of `string` where it follows other text (if not one token: empty) and alone."""
        for prefix in "a1>":  # one of them does not merge with the string into other tokens
            before = self.tokenizer.text_to_ids(prefix)
            both = self.tokenizer.text_to_ids(prefix + string)
            if both[:-1] == before:
                alone = self.tokenizer.text_to_ids(string)
                ids = [both[-1]] + (alone if len(alone) == 1 else [])
                # The unknown token stands for any other unknown string too.
                return [token for token in ids if self._decode([token]).strip() == string.strip()]
        return []

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.ids_to_text(ids, **self._decode_options)

    def at_end(self, ids: Sequence[int], first: int = 0) -> bool:
        """Whether the response from `first` on in the sample `ids` ends with its last token."""
        token = ids[-1]
        if token in self._ends:
            return True
        if not (self.strings and 0 <= token < self.vocab_size):
            return False
        if token not in self._may_end:
            # Alone, half a character decodes to U+FFFD and some tokens to nothing.
            last = self._decode([token]).rstrip()[-1:]
            self._may_end[token] = last in ("", "\ufffd") or any(
                s.rstrip()[-1:] in ("", last) for s in self.strings
            )
        if not self._may_end[token]:
            return False
        return self._decode(list(ids[max(first, len(ids) - self._tail) :])).endswith(self.strings)


def verify_is_valid_and_clamp_range_(
    response_tokens: Tensor,
    response_lengths: Tensor,
    strategy: object,
    tokenizer: Tokenizer,
    end_strings: Sequence[str] | None = None,
) -> Tensor:
    """bool `[b]`: the response of another engine ends at R-1 and no id of `response_tokens`, int64
    `[b, S]`, is outside the vocabulary; clamps the ids in place. `response_lengths` int64 `[b]`:
    R; `strategy`: not used (NeMo-Aligner's signature).
    """
    inside = ((response_tokens >= 0) & (response_tokens < tokenizer.vocab_size)).all(dim=1)
    response_tokens.clamp_(0, tokenizer.vocab_size - 1)
    end = EndConditions(tokenizer, end_strings or ())
    rows = zip(response_tokens.tolist(), response_lengths.tolist(), strict=True)
    ended = [end.at_end(row[:length]) for row, length in rows]
    return inside & torch.tensor(ended, device=inside.device)
