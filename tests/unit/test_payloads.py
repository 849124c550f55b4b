# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The arrays of a scoring request (servers/payloads.py)."""

import pytest
import torch

from nemo_aligner.servers.payloads import scoring_payload

ROLLOUT = {
    "response_tokens": torch.tensor([[1, 2, 3, 4, 9, 9], [5, 6, 9, 9, 9, 9]]),
    "response_lengths": torch.tensor([4, 2]),
}


@pytest.mark.parametrize(
    ("pad_to_length", "columns"),
    [(None, 4), (3, 4), (4, 4), (5, 5), (6, 6), (8, 8)],
)
def test_a_request_has_the_width_that_is_asked_for_or_that_its_longest_sample_needs(
    pad_to_length, columns
):
    payload = scoring_payload(ROLLOUT, pad_to_length)
    tokens = torch.tensor(payload["tokens"])
    assert tokens.shape == (2, columns) and payload["sequence_lengths"].tolist() == [[4], [2]]
    assert tokens[0, :4].tolist() == [1, 2, 3, 4] and tokens[1, :2].tolist() == [5, 6]
    assert tokens[:, 6:].eq(0).all()
