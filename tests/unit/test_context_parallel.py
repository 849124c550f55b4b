# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Which positions a context-parallel rank holds. (Several real ranks:
tests/distributed/test_context_parallel.py.)
"""

import pytest
import torch

from nemo_aligner.parallel import collectives, parallel_state


@pytest.mark.parametrize(
    "size, shares",
    [
        (2, [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]),
        (4, [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]),
    ],
)
def test_share_of_each_rank(size, shares, monkeypatch):
    """16 positions in 2*CP chunks: an early and a late one for everybody."""
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: size)
    for rank, expected in enumerate(shares):
        monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda rank=rank: rank)
        assert collectives.share_positions(16).tolist() == expected
        x = torch.arange(2 * 16).view(2, 16)
        assert collectives.take_share(x, 1).tolist() == [expected, [16 + i for i in expected]]
    assert collectives.width_multiple() == 2 * size


def test_a_width_that_does_not_divide_is_refused(monkeypatch):
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 2)
    with pytest.raises(ValueError, match="a width of 6 is no multiple of 4"):
        collectives.take_share(torch.zeros(3, 6), 1)
