# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The interface of a generation engine.

Shapes: b samples, W width of the prompts, P prompt length, R total length (prompt and response).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from nemo_aligner.generation.params import GenerationParams
from nemo_aligner.generation.turns import Environment

# Prompts int64 `[b, W]`, padded on the right, their lengths int64 `[b]`, and the seeds of the
# samples' random streams, int64 `[b]`.
Prompts = tuple[Tensor, Tensor, Tensor]
# Called after each step with the samples that got a token, int64 `[n]` places in the caller's
# batch, and their tokens, int64 `[n]`.
OnTokens = Callable[[Tensor, Tensor], None]


@dataclass
class GenerationOutput:
    """Prompts with their responses."""

    response_tokens: Tensor  # int64 `[b, max R]`, prompt and response, then eos
    response_lengths: Tensor  # int64 `[b]`, R; the token that ended a response counts
    # bool `[b]`, True if the response ended by itself (eos or an end string), False if it was cut
    # off
    is_end: Tensor
    # float32 `[b, max R - 1]` or None. Column t scores token t+1, on `[P-1, R-1)`, 0 elsewhere;
    # over the whole vocabulary at the sampling temperature (1 if greedy), before repetition
    # penalty, top-k and top-p.
    logprobs: Tensor | None = None
    # bool `[b, max R - 1]`, True in the columns that predict tokens of an environment; None
    # without one
    observed: Tensor | None = None
    # float32 `[b, max R - 1]`, the environment's reward of a response in the column that predicts
    # its last token, NaN elsewhere; None without one
    token_rewards: Tensor | None = None

    def at(self, places: Tensor) -> "GenerationOutput":
        """The samples at `places`, int64 `[n]`."""
        places = places.to(self.is_end.device)
        return GenerationOutput(
            self.response_tokens[places],
            self.response_lengths[places],
            self.is_end[places],
            *(
                None if column is None else column[places]
                for column in (self.logprobs, self.observed, self.token_rewards)
            ),
        )


class TextGenerator(ABC):
    """A generation engine, as models see it."""

    @abstractmethod
    def generate(
        self,
        prompts: Tensor,
        prompt_lengths: Tensor,
        sample_seeds: Tensor,
        params: GenerationParams,
        on_tokens: OnTokens | None = None,
        environment: Environment | None = None,
    ) -> GenerationOutput:
        """Generate one response to each prompt, or with an `environment` a conversation.

        A response depends on its prompt, its seed, `params` and the weights: not on other samples,
        their order, the rank or the split (up to rounding: in bf16 two near-equal logits may
        change places with the shape of a batch). An engine may decode the samples in any order
        and number.

        Args:
            prompts: int64 `[b, W]`, padded on the right; only the first P columns of each are
                read.
            prompt_lengths: int64 `[b]`, P.
            sample_seeds: int64 `[b]`, seeds of the samples' random streams.
            params: how to generate.
            on_tokens: called with the tokens as they are generated.
            environment: replies to responses; `params.max_length` is that of each response,
                `min_length` that of all of them together. A conversation ends when the environment
                says so, with a response that was cut off, after `environment.max_turns` responses,
                or where an observation leaves no room for a response.

        Returns:
            The responses, on `get_device()`; the same on all ranks of a model.

        Raises:
            UserError: a prompt is empty, leaves no room for a response, or has ids outside the
                vocabulary; or the environment failed.
            RuntimeError: the model's logits are not finite.
        """

    @abstractmethod
    def stream(
        self,
        batches: Iterable[Prompts],
        params: GenerationParams,
        slots: int,
        environment: Environment | None = None,
    ) -> Iterator[tuple[list[int], GenerationOutput]]:
        """Generate one response to each prompt of all `batches`; responses come as they end.

        Args:
            batches: asked for the next one only once there is room for a sample of it, so that
                several ranks can take from one queue.
            params: how to generate.
            slots: samples that are decoded together at most, and responses that are given out
                together (the last group may be smaller).
            environment: as in `generate`.

        Yields:
            Places of the samples, counted through all batches, and their responses.

        Raises:
            UserError, RuntimeError: as `generate`.
        """
