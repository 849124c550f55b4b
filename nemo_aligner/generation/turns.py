# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Samples of several turns: an environment replies to each response with an observation, after
which the policy continues, until one of them ends the conversation.

A sample is then prompt, response, observation, response, ..., response. Shapes: R total length.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Reply:
    """What an environment says to a response."""

    observation: tuple[int, ...]  # ids that the policy reads next; not used if `done`
    reward: float  # of the response
    done: bool  # the conversation is over


class Environment(Protocol):
    """The other side of conversations, as the engine sees it.

    Attributes:
        max_turns: responses of the policy in a conversation, at most.
    """

    max_turns: int

    def submit(
        self,
        number: int,
        seed: int,
        prompt: tuple[int, ...],
        responses: tuple[tuple[int, ...], ...],
    ) -> None:
        """Ask for the reply to the last of `responses`, ids; returns at once.

        Args:
            number: of the conversation, in which one reply is asked for after the other.
            seed: of its random stream.
            prompt: ids.
        """

    def replies(self, wait: bool) -> Mapping[int, Reply]:
        """Replies that have come since the last call, by the number of the conversation.

        Args:
            wait: for one at least.

        Raises:
            UserError: the environment failed; the message has the cause.
        """

    def end(self, number: int) -> None:
        """The conversation is over for the policy, although the last reply said otherwise."""


@dataclass
class Conversation:
    """A sample of several turns while it grows; the same on every rank that decodes it."""

    responses: list[tuple[int, ...]] = field(default_factory=list)  # ids of each response so far
    # (first, beyond the last) positions of each observation
    observed: list[tuple[int, int]] = field(default_factory=list)
    # (position of the last token of a response, its reward)
    rewards: list[tuple[int, float]] = field(default_factory=list)
    is_end: bool = False  # the last response ended by itself

    def observed_tokens(self, length: int) -> Tensor:
        """bool `[R - 1]`: True in column t if token t+1 came from the environment.

        Args:
            length: R.
        """
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
