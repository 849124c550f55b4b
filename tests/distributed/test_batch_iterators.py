# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The work queue: each micro-batch once, more of them for the rank that is faster, and the same
ones for the ranks that share a replica's weights or its sequences.
"""

import time

import torch.distributed as dist
from megatron.core.parallel_state import destroy_model_parallel

from nemo_aligner.data.nlp.samplers import MegatronPretrainingRandomSampler, StoreBatchIterator
from nemo_aligner.parallel import parallel_state
from tests.distributed.launcher import run_ranks
from tests.patience import patience


def _rollouts(tensor_parallel_size, slow_rank):
    """The dataset indices that this rank gets in each of two rollouts of 8 micro-batches; one rank
    is slow.
    """
    parallel_state.initialize(tensor_model_parallel_size=tensor_parallel_size)
    sampler = MegatronPretrainingRandomSampler(
        total_samples=32,
        consumed_samples=0,
        micro_batch_size=2,
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        global_batch_size=16,
    )
    sampler_iter, rollouts = iter(sampler), []
    for _rollout in range(2):
        num_microbatches = 8 // parallel_state.get_data_parallel_world_size()
        queue = StoreBatchIterator(sampler_iter, num_microbatches, range(32), list)
        dist.barrier()
        rollouts.append([])
        for batch in queue:
            rollouts[-1].append(batch)
            time.sleep(patience(0.3) if dist.get_rank() == slow_rank else 0.02)
    return rollouts


def test_data_parallel_ranks_share_the_work():
    fast, slow = run_ranks(_rollouts, 2, 100, 1, 1)
    indices = []
    for mine, other in zip(fast, slow, strict=True):
        assert len(mine) + len(other) == 8 and all(len(batch) == 2 for batch in mine + other)
        assert len(mine) > len(other)
        indices.append(sorted(sum(mine + other, [])))
        assert len(set(indices[-1])) == 16
    assert sorted(sum(indices, [])) == list(range(32))


BATCHES = [f"batch of {replica}" for replica in range(4)]


def _replicas(splits):
    """(rank's source, its batches) at each split; each replica begins with a batch of its own."""
    taken = []
    for sizes in splits:
        parallel_state.initialize(**sizes)
        replica = parallel_state.get_data_parallel_rank()
        ranks = dist.get_process_group_ranks(parallel_state.get_model_parallel_group())
        assert parallel_state.get_model_parallel_src_rank() == ranks[0]
        queue = StoreBatchIterator(iter([[replica]]), 1, BATCHES, list)
        taken.append((ranks, [batch for (batch,) in queue]))
        destroy_model_parallel()
    return taken


CP2 = {"context_parallel_size": 2}
REPLICAS = [
    (CP2, [[0, 1], [0, 1], [2, 3], [2, 3]]),
    (CP2 | {"tensor_model_parallel_size": 2}, [[0, 1, 2, 3]] * 4),
    (CP2 | {"pipeline_model_parallel_size": 2}, [[0, 1, 2, 3]] * 4),
    ({"tensor_model_parallel_size": 2}, [[0, 1], [0, 1], [2, 3], [2, 3]]),
    ({"pipeline_model_parallel_size": 2}, [[0, 2], [1, 3], [0, 2], [1, 3]]),
]


def test_ranks_of_a_replica_move_together_at_all_splits():
    by_rank = run_ranks(_replicas, 4, 100, [sizes for sizes, _ in REPLICAS])
    for number, (sizes, groups) in enumerate(REPLICAS):
        taken = [rank[number] for rank in by_rank]
        assert [ranks for ranks, _ in taken] == groups, sizes
        by_replica = {ranks[0]: batches for ranks, batches in taken}
        assert all(batches == by_replica[ranks[0]] for ranks, batches in taken), sizes
        assert sorted(sum(by_replica.values(), [])) == BATCHES[: len(by_replica)], sizes
