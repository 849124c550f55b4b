# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: the shares of the ranks, and that two ranks which share each sequence compute what one does."""

import pytest
import torch
from megatron.core.parallel_state import destroy_model_parallel, get_context_parallel_group
from megatron.core.utils import get_batch_on_this_cp_rank

from nemo_aligner.utils import parallel_state
from nemo_aligner.utils.context_parallel import gather_shares, share_positions, take_share
from tests.distributed.launcher import run_ranks

pytestmark = pytest.mark.timeout(300)


def check_shares():
    """Shares of two ranks against Megatron Core's own split, and the gradients of both ways to gather."""
    parallel_state.initialize(context_parallel_size=2)
    rank = torch.distributed.get_rank()
    x = torch.randn(3, 8, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = get_batch_on_this_cp_rank({"x": x}, cp_group=get_context_parallel_group())["x"]
    mine = take_share(x, 1).requires_grad_()
    assert torch.equal(mine, expected)
    assert torch.equal(share_positions(8), torch.tensor([[0, 1, 6, 7], [2, 3, 4, 5]][rank]))
    for dim in (0, 1, 2):
        y = x.movedim(1, dim)
        assert torch.equal(gather_shares(take_share(y, dim), dim), y)
    assert gather_shares(torch.arange(4) + rank, 0).tolist() == [0, 1, 1, 2, 3, 4, 2, 3]

    weights = torch.randn(3, 8, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (gradient,) = torch.autograd.grad((gather_shares(mine, 1) * weights).sum(), mine)
    assert torch.equal(gradient, take_share(weights, 1)), "the same loss on all ranks: nothing to sum"
    (gradient,) = torch.autograd.grad((gather_shares(mine, 1, sum_gradients=True) * weights * (rank + 1)).sum(), mine)
    torch.testing.assert_close(gradient, take_share(weights, 1) * 3)
    destroy_model_parallel()


def test_shares():
    run_ranks(check_shares, 2, 100)
