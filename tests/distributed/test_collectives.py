# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Collectives and global statistics on two real gloo ranks.

Each check runs on every rank and asserts what follows from inputs that both ranks can compute, so
no collective under test is its own oracle. One launch serves all checks, because starting the
interpreters takes most of the time.
"""

import warnings

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.parallel_state import destroy_model_parallel

from nemo_aligner.parallel import collectives, parallel_state
from nemo_aligner.training.schedule import Timer
from tests.distributed.launcher import run_ranks

BIG = 2**53 + 1  # neither float32 nor float64 can hold it


def _collectives():
    rank, world = dist.get_rank(), dist.group.WORLD
    parallel_state.initialize()

    # Ragged, int64 beyond float64, a rank without rows, other dtypes, and a non-contiguous piece.
    local = torch.tensor([[BIG, rank], [2, 3]])[: rank + 1]
    assert collectives.rebalance_nd_tensor(local, world).tolist() == [[BIG, 0], [BIG, 1], [2, 3]]
    empty = torch.full((rank, 2, 2), 0.5, dtype=torch.bfloat16)
    assert collectives.rebalance_nd_tensor(empty, world).equal(
        torch.full((1, 2, 2), 0.5, dtype=torch.bfloat16)
    )
    moved = collectives.rebalance_nd_tensor(torch.tensor([rank == 0]), world)
    assert moved.tolist() == [True, False]
    transposed = (torch.arange(6.0).reshape(3, 2) + 10 * rank).t()
    half = torch.arange(6.0).reshape(3, 2).t()
    expected = torch.cat([half, half + 10])
    assert collectives.rebalance_nd_tensor(transposed, world).equal(expected)
    try:
        collectives.rebalance_nd_tensor(torch.zeros(2, 3 + rank), world)
        raise AssertionError("different widths were accepted")
    except ValueError as error:
        assert "[[2, 3], [2, 4]]" in str(error)

    # Broadcast: shape and dtype need not be known; non-contiguous; bool; conversion on request.
    mine = torch.arange(6).reshape(2, 3).t() + BIG if rank == 1 else None
    sent = torch.arange(6).reshape(2, 3).t() + BIG
    assert collectives.broadcast_tensor(mine, 1, world).equal(sent)
    flags = torch.tensor([True, False]) if rank == 0 else None
    assert collectives.broadcast_tensor(flags, 0, world).tolist() == [True, False]
    half = torch.tensor(1.5, dtype=torch.bfloat16) if rank == 0 else None
    assert collectives.broadcast_tensor(half, 0, world).item() == 1.5
    ints = torch.tensor([[1, 2]]) if rank == 0 else None
    assert collectives.broadcast_2d_tensor(ints, 0, world).dtype == torch.float32

    # Gather to the last rank.
    pieces = collectives.gather_tensor(torch.tensor([[rank], [BIG]]).t(), 1, world)
    found = pieces and [piece.tolist() for piece in pieces]
    assert found == (None if rank == 0 else [[[0, BIG]], [[1, BIG]]])

    # Every rank leads its own model-parallel group here, so each calls.
    assert collectives.run_if_model_parallel_src(lambda x, y: x + y, 1, y=rank) == 1 + rank

    sums = collectives.all_reduce_dict(
        {"b": 1.0, "a": rank} if rank else {"a": rank, "b": 1.0}, group=world
    )
    assert sums == {"a": 1.0, "b": 2.0}
    assert collectives.all_reduce_dict({"t": rank}, op=dist.ReduceOp.MAX) == {"t": 1.0}

    rows = [torch.tensor([7] * (2 + 3 * rank)), torch.tensor([8])]
    padded = collectives.pad_tensors_to_max_global_seq_len(rows, pad_value=-1, group=world)
    assert padded.tolist() == [[7] * (2 + 3 * rank) + [-1] * (3 - 3 * rank), [8, -1, -1, -1, -1]]
    assert collectives.pad_tensors_to_max_global_seq_len(rows, -1, world, 6).shape == (2, 6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert collectives.pad_tensors_to_max_global_seq_len(rows, -1, world, 4).shape == (2, 5)
    assert "a sequence of 5 tokens is longer than the 4" in str(caught[0].message)

    # Rank 0's clock decides: the other's has run out already.
    timer = Timer("00:01:00:00")
    timer.start_time()
    if rank == 1:
        timer._start -= 7200
    assert not timer.is_finished()


def _statistics():
    rank, world = dist.get_rank(), dist.group.WORLD
    torch.manual_seed(0)
    values, mask = 1000 + torch.randn(5, 4), (torch.rand(5, 4) > 0.3).float()
    share = slice(0, 2) if rank == 0 else slice(2, 5)
    planted = torch.where(mask.bool(), values, float("nan"))[share]
    kept = values[mask.bool()].double()
    mean, var = collectives.masked_global_mean_var(planted, mask[share], world)
    torch.testing.assert_close(mean, kept.mean().float())
    torch.testing.assert_close(var, kept.var(unbiased=False).float())
    normalized = collectives.normalize_tensor(planted, mask[share], world)
    expected = ((values.double() - kept.mean()) / (kept.var(unbiased=False) + 1e-8).sqrt()).float()
    found, wanted = normalized[mask[share].bool()], expected[share][mask[share].bool()]
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)


def _data_parallel_inference():
    parallel_state.initialize()
    rank = dist.get_rank()
    tokens = np.arange(12).reshape(4, 3) + BIG
    inputs = {"inputs": tokens, "sequence_length": np.array([[3], [2], [1], [3]])}
    inputs = inputs if rank == 0 else None
    seen = []

    def rewards_and_values(inputs):
        tokens, lengths = inputs
        seen.append(tokens[:, 0].tolist())
        return lengths[:, None].float() * 10, (tokens - BIG).float()

    rewards, values = collectives.run_distributed_inference(inputs, rewards_and_values)
    assert seen == [[[BIG, BIG + 3], [BIG + 6, BIG + 9]][rank]]
    assert rewards.tolist() == [30, 20, 10, 30] and rewards.dtype == np.float32
    assert values.tolist() == np.arange(12).reshape(4, 3).tolist()
    only = collectives.run_distributed_inference(inputs, lambda inputs: inputs[1][:, None].float())
    assert only.tolist() == [[3], [2], [1], [3]]


def _within_model_parallel():
    """The first rank speaks for all; int64 is exact by default."""
    rank = dist.get_rank()
    parallel_state.initialize(tensor_model_parallel_size=2)
    value = torch.tensor([[BIG + rank]])
    assert collectives.broadcast_2d_tensor_within_mp(value).tolist() == [[BIG]]
    assert collectives.broadcast_2d_tensor_within_mp(value, torch.float32).dtype == torch.float32
    found = collectives.run_if_model_parallel_src(lambda: "called")
    assert found == ("called" if rank == 0 else None)
    assert collectives.broadcast_tensor_within_pp(value).equal(value)  # one stage: nothing to do


def _within_pipeline():
    rank = dist.get_rank()
    parallel_state.initialize(pipeline_model_parallel_size=2)
    value = torch.tensor([[BIG + rank]])
    sent = collectives.broadcast_tensor_within_pp(value if rank == 1 else None)
    assert sent.tolist() == [[BIG + 1]]
    assert collectives.broadcast_2d_tensor_within_pp(value, from_last=False).tolist() == [[BIG]]


def _each_with_its_own_groups(*checks):
    for check in checks:
        check()
        destroy_model_parallel()


def test_on_two_ranks():
    checks = [_collectives, _statistics, _data_parallel_inference]
    run_ranks(_each_with_its_own_groups, 2, 110, *checks, _within_model_parallel, _within_pipeline)


def test_everything_is_a_no_op_in_one_plain_process():
    assert not dist.is_initialized()
    x = torch.tensor([[BIG]])
    for result in (
        collectives.rebalance_nd_tensor(x, None),
        collectives.broadcast_tensor(x, 0, None),
        collectives.broadcast_2d_tensor_within_mp(x),
        collectives.broadcast_2d_tensor_within_pp(x),
        collectives.broadcast_tensor_within_pp(x),
        collectives.gather_tensor(x, 0, None)[0],
    ):
        assert result.equal(x)
    assert collectives.all_reduce_dict({"a": 1.5}) == {"a": 1.5}
    assert collectives.run_if_model_parallel_src(lambda: 3) == 3
    assert [
        t.tolist() for t in collectives.pad_list([torch.tensor([1]), torch.tensor([2, 3])], 9)
    ] == [[1, 9], [2, 3]]
    rewards, values = collectives.run_distributed_inference(
        {"inputs": [[1, 2]], "sequence_length": [2]},
        lambda inputs: (inputs[1][:, None].float(), inputs[0].float()),
    )
    assert rewards.tolist() == [2.0] and values.tolist() == [[1.0, 2.0]]
