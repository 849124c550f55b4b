# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a response get a reward of their own: all, or those that end its steps.

A step ends with the token that completes the text `step_end`, such as a line break or the step
token of a process reward model. N is the number of samples, S their padded token length.
"""

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_aligner.core.tokenizer import Tokenizer, decode_with_special_tokens, special_ids


class Steps(NamedTuple):
    """The steps of a response."""

    # of the response, with special tokens, one of which may end a step, but without those that
    # stand behind the last step, such as the end token
    text: str
    # in the token ids of the response, of the tokens that end the steps, ascending; a token that
    # ends several steps stands there as often
    places: list[int]


def step_ends(tokenizer: Tokenizer, response: Sequence[int], step_end: str) -> list[int]:
    """Places in `response`, token ids, of the tokens that complete a `step_end`, ascending."""
    response = list(response)

    def completed(tokens: int) -> int:
        return decode_with_special_tokens(tokenizer, response[:tokens]).count(step_end)

    # The count grows with the tokens, so each place is found by bisection.
    return [
        bisect.bisect_left(range(len(response)), number, key=lambda place: completed(place + 1))
        for number in range(1, completed(len(response)) + 1)
    ]


def steps_of(tokenizer: Tokenizer, response: Sequence[int], step_end: str) -> Steps:
    """The steps of `response`, token ids: as many as `step_end` occurs in the text, and one more
    if text follows the last of them, which is not blank, or if it does not occur at all.
    """
    places = step_ends(tokenizer, response, step_end)
    kept, special = list(response), special_ids(tokenizer)
    while len(kept) > (places[-1] + 1 if places else 0) and kept[-1] in special:
        kept.pop()
    text = decode_with_special_tokens(tokenizer, kept)
    if response and (not places or text.split(step_end)[-1].strip()):
        places.append(len(response) - 1)
    return Steps(text, places)


def scores_of_places(
    scores: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    prompt_lengths: Tensor,
    tokenizer: Tokenizer,
    per: str,
    step_end: str | None,
) -> Tensor:
    """The scores of a reward model at the response tokens that `per` says: all ("token"), or those
    that complete a `step_end` ("step").

    Args:
        scores: float32 [N, S], at every position.
        tokens: int64 [N, S].
        lengths, prompt_lengths: int64 [N]; a row that fills up a batch has prompt length 0.

    Returns:
        float32 [N, S], NaN elsewhere.

    Raises:
        RuntimeError: a score at such a token is not finite.
    """
    has_reward = torch.zeros(scores.shape, dtype=torch.bool)
    bounds = zip(prompt_lengths.tolist(), lengths.tolist(), strict=True)
    rows = tokens.tolist()
    for row, (start, end) in enumerate(bounds):
        response = rows[row][start:end]
        if per == "token":
            places = list(range(len(response)))
        else:
            assert step_end is not None
            places = step_ends(tokenizer, response, step_end)
        columns = [start + place for place in places]
        has_reward[row, columns] = True
    has_reward = has_reward.to(scores.device)
    bad = (has_reward & ~scores.isfinite()).any(1).nonzero().flatten().tolist()
    if bad:
        raise RuntimeError(
            f"the reward model's scores of the tokens of row {bad[0]} are not finite: look for "
            "NaN in its weights (a diverged training, a damaged checkpoint)."
        )
    return scores.masked_fill(~has_reward, float("nan"))
