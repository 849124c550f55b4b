# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The arrays of scoring and training requests (scoring_clients.py, critic_client.py)."""

import pytest
import torch

from nemo_aligner.servers.critic_client import training_payload
from nemo_aligner.servers.scoring_clients import request_width, scoring_payload

ROLLOUT = {"response_tokens": torch.tensor([[1, 2, 3, 4, 9, 9], [5, 6, 9, 9, 9, 9]])}
ROLLOUT["response_lengths"] = torch.tensor([4, 2])


@pytest.mark.parametrize(
    ("pad_to_length", "columns"), [(None, 4), (3, 4), (4, 4), (5, 5), (6, 6), (8, 8)]
)
def test_a_request_has_the_width_that_is_asked_for_or_that_its_longest_sample_needs(
    pad_to_length, columns
):
    payload = scoring_payload(ROLLOUT, pad_to_length)
    tokens = torch.tensor(payload["tokens"])
    assert tokens.shape == (2, columns) and payload["sequence_lengths"].tolist() == [[4], [2]]
    assert tokens[0, :4].tolist() == [1, 2, 3, 4] and tokens[1, :2].tolist() == [5, 6]
    assert tokens[:, 6:].eq(0).all()


@pytest.mark.parametrize("order", [None, [1, 0]])
def test_a_request_does_not_change_with_the_batch_that_it_was_made_from(order):
    """It is sent while the caller goes on."""
    numbers = torch.full((2, 3), 7.0)
    batch = {"response_tokens": torch.full((2, 4), 7), "mask": torch.ones(2, 3)}
    batch |= {"returns": numbers, "values": numbers.clone()}
    if order:
        batch["sample_order"] = torch.tensor(order)
    rollout = {key: tensor.clone() for key, tensor in ROLLOUT.items()}
    payloads = [training_payload(batch), scoring_payload(rollout, None)]
    before = [{name: array.copy() for name, array in payload.items()} for payload in payloads]
    for tensor in (*batch.values(), *rollout.values()):
        tensor.zero_()
    for payload, expected in zip(payloads, before):
        for name, array in payload.items():
            assert (array == expected[name]).all(), name


def test_widths_of_requests_are_few_and_waste_little():
    limit = 1000  # of the policy, and no multiple of anything
    widths = {longest: request_width(longest, None, limit) for longest in range(1, limit + 1)}
    for longest, width in widths.items():
        assert longest <= width <= min(limit, longest + max(7, longest // 8))
        assert width % 8 == 0 or width == limit
    assert len({width for longest, width in widths.items() if 512 < longest}) == 8
    assert request_width(97, None, 100) == 100 and request_width(97, None, None) == 97
    assert request_width(97, 64, 100) == 97 and request_width(97, 256, 100) == 256
