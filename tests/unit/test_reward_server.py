# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`RewardModelServer` without a server: what its function gets to see of a request, and what it
may answer.
"""

import numpy as np
import pytest
import torch

from nemo_aligner.algorithms.reward_server import RewardModelServer
from nemo_aligner.core.errors import UserError
from nemo_aligner.servers.server_loop import batcher_options


def make_server(infer_fn, **changes):
    options = {
        "infer_fn": infer_fn,
        "tokenize_func": lambda texts: (
            torch.tensor([[len(t), 7, 7] for t in texts]),
            torch.tensor([1] * len(texts)),
        ),
        "model_name": "reward_model",
        "port": 1,
        "inference_micro_batch_size": 4,
        "model_forward_micro_batch_size": 2,
        **changes,
    }
    return RewardModelServer(**options)


def last_token(inputs):
    """Reward: the row's last token."""
    tokens, lengths = inputs
    return tokens.gather(1, lengths[:, None] - 1).float()


TOKENS = np.array([[1, 2, 3, 0, 0, 0], [4, 5, 0, 0, 0, 0], [6, 7, 8, 9, 0, 0]])
LENGTHS = np.array([[3], [2], [4]])


@pytest.mark.parametrize(
    "rows, strip, seen",
    [
        (3, None, (4, 6)),  # more than one micro-batch of 2: whole micro-batches
        (2, None, (2, 6)),
        (1, None, (1, 6)),
        (3, 2, (4, 4)),
        (2, 2, (2, 4)),
        (2, 1, (2, 3)),
        (3, 64, (4, 6)),  # never wider than what was sent
    ],
)
def test_what_the_function_sees(rows, strip, seen):
    shapes = []

    def infer_fn(inputs):
        shapes.append((tuple(inputs[0].shape), inputs[1].tolist()))
        return last_token(inputs)

    server = make_server(infer_fn, strip_sequence_length_to_multiple=strip)
    rewards = server.infer(tokens=TOKENS[:rows], sequence_lengths=LENGTHS[:rows])["rewards"]
    assert rewards.tolist() == [[3.0], [5.0], [9.0]][:rows] and rewards.dtype == np.float32
    lengths = LENGTHS[:rows, 0].tolist() + [1] * (seen[0] - rows)
    assert shapes == [(seen, lengths)]


def test_prompt_lengths_reach_a_function_that_needs_them_and_no_model():
    def after_prompt(tokens, lengths, prompt_lengths):
        assert prompt_lengths.dtype == torch.int64 and prompt_lengths.shape == lengths.shape
        return (lengths - prompt_lengths).float()

    samples = {"tokens": TOKENS, "sequence_lengths": LENGTHS}
    request = {**samples, "prompt_lengths": np.array([[1], [2], [0]])}
    server = make_server(after_prompt, needs_prompt_lengths=True)
    assert server.infer(**request)["rewards"].tolist() == [[2.0], [0.0], [4.0]]
    assert make_server(last_token).infer(**request)["rewards"].tolist() == [[3.0], [5.0], [9.0]]
    for bad in (samples, {"sentences": np.array([[b"abc"]])}):
        with pytest.raises(UserError, match="'prompt_lengths' is missing"):
            server.infer(**bad)
    with pytest.raises(UserError, match="'prompt_lengths' holds 4 in sample 0"):
        server.infer(**{**request, "prompt_lengths": np.full((3, 1), 4)})


@pytest.mark.parametrize("width", [0, 2])
def test_another_number_of_rewards_than_rows_is_an_error(width):
    server = make_server(lambda inputs: torch.zeros(inputs[0].shape[0], width))
    words = rf"\[2, {width}\] for tokens .*model.regression.merge_attributes"
    with pytest.raises(RuntimeError, match=words):
        server.infer(tokens=TOKENS[:2], sequence_lengths=LENGTHS[:2])


def test_attributes_are_given_apart():
    """[N, A], in the order of the samples, whatever the number of rows that fill up a batch."""

    def infer(inputs):
        return torch.stack([inputs[1].float(), 10.0 * inputs[0][:, 0]], 1)

    found = make_server(infer, attributes=2).infer(tokens=TOKENS, sequence_lengths=LENGTHS)
    expected = np.stack([LENGTHS[:, 0], 10.0 * TOKENS[:, 0]], 1)
    assert found["rewards"].tolist() == expected.tolist()
    with pytest.raises(RuntimeError, match="it must give 2 numbers per row"):
        make_server(last_token, attributes=2).infer(tokens=TOKENS, sequence_lengths=LENGTHS)


def test_batcher_options():
    expected = {"max_queue_delay_microseconds": 2000, "preferred_batch_size": [4]}
    assert batcher_options(2000.0, 4) == expected
    assert batcher_options(0, [2, 8])["preferred_batch_size"] == [2, 8]
