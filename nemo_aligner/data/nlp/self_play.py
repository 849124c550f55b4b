# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts with their responses, from the examples of supervised fine-tuning.

The response is what the last trained part of an example holds: the output of a line, or the last
of the assistant's turns in a conversation. What is before it is the prompt, with earlier turns.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nemo_aligner.core.errors import UserError
from nemo_aligner.core.types import SelfPlayPrompts
from nemo_aligner.data.nlp.file_dataset import pad


def response_span(item: Mapping[str, Any]) -> tuple[int, int]:
    """Where the response of an item of `SFTDataset` or `SFTChatDataset` begins and ends; both are
    the number of its tokens if it has none.
    """
    end = len(item["tokens"])
    if "answer_start" in item:
        return min(item["answer_start"], end), end
    trained = item["trained"]
    while end and not trained[end - 1]:
        end -= 1  # the beginning of a turn whose end was cut off
    start = end
    while start and trained[start - 1]:
        start -= 1
    return (start, end) if end else (len(trained), len(trained))


def collate_prompts(items: Sequence[Mapping[str, Any]], eos_id: int) -> SelfPlayPrompts:
    """A batch of items of `SFTDataset` or `SFTChatDataset`.

    Raises:
        UserError: an example has no prompt that the policy could respond to.
    """
    spans = [response_span(item) for item in items]
    for item, (start, _end) in zip(items, spans, strict=True):
        if not start:
            raise UserError(
                f"example {item['idx']} (index in the data set) has no prompt, so the policy "
                "cannot give a response of its own to it; remove it, or begin each example with a "
                "token (add_bos=True in the data section)."
            )
    width = max(end for _start, end in spans)
    tokens = [
        pad(list(item["tokens"][:end]), width, eos_id)
        for item, (_start, end) in zip(items, spans, strict=True)
    ]
    return {
        "prompts_and_answers": torch.stack(tokens),
        "prompt_lengths": torch.tensor([start for start, _end in spans]),
        "combined_lengths": torch.tensor([end for _start, end in spans]),
        "idx": torch.tensor([item["idx"] for item in items]),
    }
