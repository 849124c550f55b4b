# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What a user asks of text generation (`GenerationParams`), when a text has ended
(`EndConditions`), batches of texts.

The decoding itself is in `nemo_aligner.generation`.
"""

import inspect
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_aligner.core.errors import ConfigError, UserError


@dataclass(frozen=True)
class GenerationParams:
    """How to generate.

    Attributes:
        max_length: tokens to generate at most, the end token included.
        min_length: tokens to generate before an end may follow.
        use_greedy: always take the likeliest token; temperature, top_k and top_p are then without
            effect.
        temperature: logits are divided by it.
        top_k: sample from so many likeliest ids; 0 from all.
        top_p: sample from the likeliest ids that together have this probability; 1 from all.
        repetition_penalty: above 1, ids of the prompt and of the response so far are less likely;
        1 is without effect.
        end_strings: texts that end a response, beside the eos token; the response keeps them.
        return_logprobs: also return the log-probs of the generated tokens.

    Raises:
        ConfigError: a value that cannot work.
    """

    max_length: int
    min_length: int = 0
    use_greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    end_strings: tuple[str, ...] = ()
    return_logprobs: bool = False

    def __post_init__(self):
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
        if not all(isinstance(text, str) and text for text in self.end_strings):
            raise ConfigError(
                f"sampling_params.end_strings={list(self.end_strings)} must hold non-empty texts."
            )

    @property
    def changes_distribution(self) -> bool:
        """True if tokens are not simply drawn from softmax(logits / temperature)."""
        cut = not self.use_greedy and (self.top_k > 0 or self.top_p < 1.0)
        return cut or self.repetition_penalty != 1.0 or self.min_length > 1

    @classmethod
    def from_config(cls, length_params, sampling_params) -> "GenerationParams":
        """Read the configuration sections `length_params` and `sampling_params` (mappings).

        `add_BOS` has no effect here, because prompts come as tokens; neither have `all_probs` and
        `compute_logprob`.

        Raises:
            ConfigError: a missing or unusable value.
        """
        if length_params.get("max_length") is None:
            raise ConfigError(
                "length_params.max_length is missing; set the number of tokens to generate at "
                "most."
            )
        end_strings = sampling_params.get("end_strings") or ()
        if isinstance(end_strings, str):
            raise ConfigError(
                f"sampling_params.end_strings={end_strings!r} must be a list: [{end_strings!r}]."
            )

        def number(section, key, kind, default):
            value = section.get(key)
            if value is None:
                return default
            try:
                if kind is int and float(value) != int(value):
                    raise ValueError
                return kind(value)
            except (TypeError, ValueError):
                name = "length_params" if section is length_params else "sampling_params"
                wanted = "an integer" if kind is int else "a number"
                raise ConfigError(f"{name}.{key}={value!r} must be {wanted}.") from None

        return cls(
            max_length=number(length_params, "max_length", int, None),
            min_length=number(length_params, "min_length", int, 0),
            use_greedy=bool(sampling_params.get("use_greedy") or False),
            temperature=number(sampling_params, "temperature", float, 1.0),
            top_k=number(sampling_params, "top_k", int, 0),
            top_p=number(sampling_params, "top_p", float, 1.0),
            repetition_penalty=number(sampling_params, "repetition_penalty", float, 1.0),
            end_strings=tuple(end_strings),
        )


class EndConditions:
    """When a generated text has ended: at the eos token, or where it ends with one of the end
    strings.

    An end string that is one token for the tokenizer (a special token, mostly) ends a text as that
    token, not as the same characters spelled by others. Any other is looked for in the decoded
    last tokens.

    Args:
        tokenizer: NeMo tokenizer.
        end_strings: texts.

    Attributes:
        token_ids: list of ids that end a text by themselves, eos first.
        strings: end strings that are looked for in the text.
    """

    def __init__(self, tokenizer, end_strings=()):
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        # Hugging Face tokenizers would leave special tokens out of the text; SentencePiece ones
        # have no such option.
        options = inspect.signature(tokenizer.ids_to_text).parameters
        self._decode_options = (
            {"remove_special_tokens": False} if "remove_special_tokens" in options else {}
        )
        self.token_ids = [tokenizer.eos_id]
        strings = []
        for text in end_strings:
            ids = self._single_token_ids(text)
            self.token_ids += [token for token in ids if token not in self.token_ids]
            if not ids:
                strings.append(text)
        self.strings = tuple(strings)
        # A token covers a byte at least; one more, because some tokenizers drop the space before
        # the first one.
        self._tail = 1 + max((len(text.encode()) for text in self.strings), default=0)
        # By id: 1 if a text that ends with this token may end with an end string, 0 if not, -1 if
        # not looked at yet.
        self._may_end = torch.full((self.vocab_size,), -1, dtype=torch.int8)

    def _single_token_ids(self, text: str) -> list[int]:
        """Ids of `text` if it is one token where it follows other text (and where it stands
        alone), else nothing.
        """
        for prefix in "a1>":  # one of them will not merge with the text into other tokens
            before, both = (
                self.tokenizer.text_to_ids(prefix),
                self.tokenizer.text_to_ids(prefix + text),
            )
            if both[:-1] == before:
                alone = self.tokenizer.text_to_ids(text)
                ids = [both[-1]] + (alone if len(alone) == 1 else [])
                # Text unknown to the tokenizer becomes its unknown token, which stands for any
                # other such text, too.
                return [token for token in ids if self._decode([token]).strip() == text.strip()]
        return []

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.ids_to_text(ids, **self._decode_options)

    def _candidates(self, ids: Tensor) -> Tensor:
        """bool `[n]`: whether a text whose last token is `ids` (CPU int64 `[n]`) may end with one
        of `strings`.
        """
        known = self._may_end[ids]
        for token in ids[known < 0].unique().tolist():
            text = self._decode([token]).rstrip()
            # Alone, a part of a character decodes to U+FFFD and some tokens to nothing: they need
            # the whole tail.
            last = text[-1:]
            may_end = last in ("", "\ufffd") or any(
                s.rstrip()[-1:] in ("", last) for s in self.strings
            )
            self._may_end[token] = int(may_end)
        return self._may_end[ids] == 1

    def ended(
        self, tokens: Tensor, last: Tensor, rows: Tensor | None = None, first: Tensor | None = None
    ) -> Tensor:
        """Whether the text of each row has ended at one position.

        Args:
            tokens: int64 `[b, S]`.
            last: int64 `[b]`, the position of the row's last token.
            rows: bool `[b]`, True for the rows to look at (all if None).
            first: int64 `[b]`, where the response begins (0 if None): the end of a prompt is no
                part of an end string.

        Returns:
            bool `[b]`; False for the rows that were not looked at.
        """
        last_ids = tokens.gather(1, last.unsqueeze(1)).squeeze(1)
        hit = torch.isin(last_ids, torch.tensor(self.token_ids, device=tokens.device))
        if rows is not None:
            hit &= rows
        if self.strings:
            ids = last_ids.cpu()
            look = ~hit.cpu() & (ids >= 0) & (ids < self.vocab_size)
            if rows is not None:
                look &= rows.cpu()
            indices = look.nonzero().squeeze(1)
            indices = indices[self._candidates(ids[indices])].tolist()
            for row in indices:
                stop = int(last[row]) + 1
                start = max(0 if first is None else int(first[row]), stop - self._tail)
                text = self._decode(tokens[row, start:stop].tolist())
                hit[row] = text.endswith(self.strings)
        return hit


def verify_is_valid_and_clamp_range_(
    response_tokens: Tensor, response_lengths: Tensor, strategy, tokenizer, end_strings=None
) -> Tensor:
    """Which responses are fit for training, for engines that return raw ids; clamps ids to the
    vocabulary in place.

    Args:
        response_tokens: int64 `[b, S]`, prompt and response.
        response_lengths: int64 `[b]`, R.
        strategy: without effect (NeMo-Aligner's signature).
        tokenizer: NeMo tokenizer.
        end_strings: texts that end a response, beside eos.

    Returns:
        bool `[b]`: the text ends properly at R-1 and no id of the row is outside the vocabulary.
    """
    inside = ((response_tokens >= 0) & (response_tokens < tokenizer.vocab_size)).all(dim=1)
    response_tokens.clamp_(0, tokenizer.vocab_size - 1)
    return inside & EndConditions(tokenizer, end_strings or ()).ended(
        response_tokens, response_lengths - 1
    )


def tokenize_batch(
    sentences: list[str], tokenizer, max_len: int, add_BOS: bool = False, add_EOS: bool = False
) -> tuple[Tensor, Tensor]:
    """Tokenize texts, cut each to `max_len` tokens and pad with eos to exactly `max_len`.

    Returns:
        tokens int64 `[b, max_len]` and lengths int64 `[b]`, on the CPU.

    Raises:
        UserError: `add_BOS` with a tokenizer that has no bos token.
    """
    if add_BOS and tokenizer.bos_id is None:
        raise UserError("add_BOS=True, but the tokenizer has no bos token; set it to False.")
    tokens = torch.full((len(sentences), max_len), tokenizer.eos_id, dtype=torch.int64)
    lengths = torch.empty(len(sentences), dtype=torch.int64)
    for row, sentence in enumerate(sentences):
        ids = (
            [tokenizer.bos_id] * add_BOS
            + tokenizer.text_to_ids(sentence)
            + [tokenizer.eos_id] * add_EOS
        )
        ids = ids[:max_len]
        tokens[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        lengths[row] = len(ids)
    return tokens, lengths
