# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""How the prompts of one rollout reach the data-parallel ranks.

`DefaultBatchIterator` gives each rank the micro-batches of its own sampler. `StoreBatchIterator`
puts the micro-batches of all ranks in one queue from which each rank takes the next when it is
free, so a rank with short answers generates more of them. Either way all ranks together see each
micro-batch once.
"""

import itertools

import torch
import torch.distributed as dist
from nemo.utils import logging

from nemo_aligner.core.errors import ConfigError
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.device import get_device


class DefaultBatchIterator:
    """The first `num_microbatches` micro-batches of this rank's sampler, collated.

    Args:
        sampler_iter: iterator over lists of dataset indices.
        num_microbatches: micro-batches of one rollout on each data-parallel rank.
        dataset, collate_fn: as in a `DataLoader`.
    """

    def __init__(self, sampler_iter, num_microbatches: int, dataset, collate_fn):
        self.microbatches = list(itertools.islice(sampler_iter, num_microbatches))
        self.dataset = dataset
        self.collate_fn = collate_fn

    def __iter__(self):
        for indices in self.microbatches:
            yield self._collate(indices)

    def _collate(self, indices):
        return self.collate_fn([self.dataset[index] for index in indices])


class StoreBatchIterator(DefaultBatchIterator):
    """A work queue over an atomic counter in the store of the job's process group.

    Making one is collective over all ranks. Afterwards only the ranks of one model-parallel group
    move together: its first rank takes a ticket from the counter and tells the others. With no
    process group it is a `DefaultBatchIterator`.

    Which rank generates what depends on timing; the micro-batches themselves do not.

    Raises:
        ConfigError: the job has expert parallelism, whose ranks must generate equally often.
    """

    _number = (
        itertools.count()
    )  # counts up alike on all ranks, as all make their iterators in the same order
    _last_key = None

    def __init__(self, sampler_iter, num_microbatches: int, dataset, collate_fn):
        super().__init__(sampler_iter, num_microbatches, dataset, collate_fn)
        self.store = None
        experts = parallel_state.get_expert_model_parallel_world_size()
        if experts > 1:
            raise ConfigError(
                "batch_iterator.use_flask=True does not work with "
                f"model.expert_model_parallel_size={experts}: these "
                "ranks hold each other's experts, so none may generate more often than another. "
                "Set it to False."
            )
        if not (dist.is_available() and dist.is_initialized()):
            return
        # Every rank joins, as the data-parallel group may differ between generation and training.
        # Ranks of one model-parallel group hold the same micro-batches: each data-parallel rank
        # counts once.
        shares = [None] * dist.get_world_size()
        dist.all_gather_object(
            shares, (parallel_state.get_data_parallel_rank(), self.microbatches)
        )
        shares = [microbatches for _rank, microbatches in sorted(dict(shares).items())]
        self.microbatches = [
            item for row in itertools.zip_longest(*shares) for item in row if item is not None
        ]
        self.store = dist.distributed_c10d._get_default_store()
        self.key = f"nemo_aligner/work_queue/{next(self._number)}"
        # All ranks are done with the queue before this one, since all have come here.
        if dist.get_rank() == 0 and StoreBatchIterator._last_key is not None:
            self.store.delete_key(StoreBatchIterator._last_key)
        StoreBatchIterator._last_key = self.key

    def __iter__(self):
        if self.store is None:
            yield from super().__iter__()
            return
        while (ticket := self._take_ticket()) < len(self.microbatches):
            yield self._collate(self.microbatches[ticket])

    def _take_ticket(self) -> int:
        """The next number that nobody has, the same on all ranks of this model-parallel group."""
        group, source = (
            parallel_state.get_model_parallel_group(),
            parallel_state.get_model_parallel_src_rank(),
        )
        alone = group is None or dist.get_world_size(group) == 1
        ticket = self.store.add(self.key, 1) - 1 if alone or dist.get_rank() == source else -1
        if alone:
            return ticket
        ticket = torch.tensor([ticket], dtype=torch.int64, device=get_device())
        dist.broadcast(ticket, source, group)
        return int(ticket.item())


def get_batch_iterator_cls(cfg=None):
    """The iterator that `trainer.ppo.batch_iterator` asks for.

    Args:
        cfg: mapping with `use_flask` (the old name of the work queue: there is no Flask, and
            `port` is not used); or None.
    """
    if not (cfg or {}).get("use_flask", False):
        return DefaultBatchIterator
    logging.info(
        "batch_iterator.use_flask=True: work queue in the process group's own store, with no "
        "Flask server."
    )
    return StoreBatchIterator
