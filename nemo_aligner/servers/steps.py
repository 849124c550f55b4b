# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a response get a reward of their own: all, or those that end its steps.

A step ends with the token that completes the text `step_end`, such as a line break or the step
token of a process reward model. N is the number of samples, S their padded token length.
"""

import bisect
from collections.abc import Sequence

import torch
from torch import Tensor

from nemo_aligner.core.tokenizer import Tokenizer, decode_with_special_tokens


def step_ends(tokenizer: Tokenizer, response: Sequence[int], step_end: str) -> list[int]:
    """Places in `response`, token ids, of the tokens that complete a `step_end`, ascending.

    Occurrences do not overlap. A token that completes several of them is one place.
    """
    response = list(response)

    def completed(tokens: int) -> int:
        return decode_with_special_tokens(tokenizer, response[:tokens]).count(step_end)

    ends: list[int] = []
    found, total = 0, completed(len(response))
    while found < total:  # the count grows with the tokens, so each place is found by bisection
        end = bisect.bisect_left(range(len(response)), found + 1, key=lambda t: completed(t + 1))
        ends.append(end)
        found = completed(end + 1)
    return ends


def reward_places(
    tokenizer: Tokenizer, response: Sequence[int], per: str, step_end: str | None
) -> list[int]:
    """Places of the rewards of a function in `response`, token ids.

    With `per` "token" all; with "step" the ends of the steps, and the last token if text follows
    the last `step_end`: a response without one is one step.
    """
    if per == "token":
        return list(range(len(response)))
    assert step_end is not None
    places = step_ends(tokenizer, response, step_end)
    last = len(response) - 1
    left = list(response[places[-1] + 1 :]) if places else list(response)
    if left[-1:] == [tokenizer.eos_id]:
        left.pop()
    if last >= 0 and (not places or decode_with_special_tokens(tokenizer, left).strip()):
        places.append(last)
    return places


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
