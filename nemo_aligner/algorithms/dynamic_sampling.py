# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling (Yu et al. 2025, DAPO, arXiv:2503.14476, section 3.2): in place of prompts
whose responses all have the same reward, which teach nothing, others are drawn.

Shapes: N samples of the rounds over all data-parallel ranks, whole prompts of n responses each.
"""

import numpy as np
import torch
from torch import Tensor

from nemo_aligner.algorithms.rollouts import (
    PPORolloutBatch,
    part_columns,
    response_mask,
    score_columns,
)
from nemo_aligner.core.tensors import sample_seeds
from nemo_aligner.core.types import Scores


class DrawnPrompts:
    """The rounds of one step, of all data-parallel ranks on every rank: `wanted` prompts of a
    rollout, with `responses` to each; `seed` is of the step's choice among equals.
    """

    def __init__(self, wanted: int, responses: int, seed: tuple[int, int], eos_id: int):
        self.wanted, self.responses, self.seed, self.eos_id = wanted, responses, seed, eos_id
        self.rounds: list[dict[str, Tensor]] = []
        self.parts: list[str] = []  # names of an ensemble's reward models
        self.number: list[int] = []  # of each prompt's round
        self.idx: list[int] = []
        self.differ: list[bool] = []  # the rewards of its responses

    def add(self, rollout: PPORolloutBatch, scores: Scores) -> None:
        """Add a round, in the order of `sample_key`."""
        self.rounds.append({**rollout.data, **score_columns(scores), **part_columns(scores)})
        self.parts = sorted(scores.parts)
        counts = response_mask(rollout.columns).any(1)
        self.differ += rewards_differ(scores.rewards, counts, self.responses).tolist()
        self.idx += rollout["idx"][:: self.responses].tolist()
        self.number += [len(self.rounds)] * (len(self.idx) - len(self.number))

    @property
    def places(self) -> list[int]:
        """Places among the drawn of the prompts to train on, in the order of the data set: those
        with a signal first, of them those of earlier rounds, of one round any. A prompt that
        comes back in a later round does not count again: it would get the same responses.
        """
        idx = np.array(self.idx)
        chance = sample_seeds(*self.seed, torch.tensor(self.idx)).numpy()
        _, fresh = np.unique(idx, return_index=True)
        order = np.lexsort((chance, np.array(self.number), ~np.array(self.differ)))
        chosen = order[np.isin(order, fresh)][: self.wanted]
        return [int(place) for place in chosen[idx[chosen].argsort()]]

    @property
    def is_full(self) -> bool:
        """Every prompt to train on has a signal."""
        return all(self.differ[place] for place in self.places)

    def chosen(self) -> tuple[PPORolloutBatch, Scores, PPORolloutBatch]:
        """`(rollout, scores, drawn)`: the prompts to train on, all rounds; all ranks call it."""
        drawn = PPORolloutBatch.from_rollout_batches(self.rounds, self.eos_id, None)
        first = torch.tensor(self.places)[:, None] * self.responses
        kept = drawn.select((first + torch.arange(self.responses)).flatten())
        parts = kept.pop("reward_parts").unbind(1) if self.parts else ()
        scores = Scores(
            kept.pop("rewards"),
            parts=dict(zip(self.parts, parts, strict=True)),
            token_rewards=kept.pop("token_rewards", None),
        )
        return kept, scores, drawn

    def metrics(self, drawn: PPORolloutBatch) -> dict[str, float]:
        counts = response_mask(drawn.columns).any(1)
        return {
            "prompts_drawn": len(self.idx),
            "fraction_of_drawn_prompts_without_signal": 1 - float(np.mean(self.differ)),
            "drawn_rewards": float(drawn["rewards"].double()[counts].mean()),
        }


def rewards_differ(rewards: Tensor, counts: Tensor, responses: int) -> Tensor:
    """bool `[N / responses]`: the responses of each prompt that count have different rewards.

    Args:
        rewards: f32 `[N]`, the responses to a prompt in a row.
        counts: bool `[N]`, False for stand-ins for prompts that could not be used.
    """
    rewards, counts = rewards.view(-1, responses), counts.view(-1, responses)
    largest = rewards.masked_fill(~counts, -torch.inf).amax(1)
    return largest > rewards.masked_fill(~counts, torch.inf).amin(1)
