# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""How the prompts of one rollout reach the data-parallel ranks, each micro-batch once: by the
rank's own sampler (`DefaultBatchIterator`) or from a common queue (`StoreBatchIterator`).
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from nemo.utils import logging
from omegaconf import DictConfig

from nemo_aligner.config.defaults import complete
from nemo_aligner.config.rollout_rules import check_shared_queue
from nemo_aligner.core.types import InferenceBatch
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import gathered, on_rank_zero

Item = Mapping[str, torch.Tensor]


class DefaultBatchIterator:
    """The first `num_microbatches` lists of dataset indices of this rank's sampler, collated."""

    def __init__(
        self,
        sampler_iter: Iterator[list[int]],
        num_microbatches: int,
        dataset: Sequence[Item] | torch.utils.data.Dataset[Any],
        collate_fn: Callable[[list[Any]], Any],
    ) -> None:
        self.num_microbatches = num_microbatches
        self.microbatches = list(itertools.islice(sampler_iter, num_microbatches))
        self.dataset = dataset
        self.collate_fn = collate_fn

    def __iter__(self) -> Iterator[InferenceBatch]:
        for indices in self.microbatches:
            yield self._collate(indices)

    def _collate(self, indices: list[int]) -> InferenceBatch:
        batch: InferenceBatch = self.collate_fn([self.dataset[index] for index in indices])
        return batch


class StoreBatchIterator(DefaultBatchIterator):
    """A work queue over an atomic counter in the store of the job's process group.

    All ranks construct one together. Then the first rank of each model-parallel group takes
    tickets from the counter and sends them to the others. Without a process group it is a
    `DefaultBatchIterator`. `ConfigError`: the job has expert parallelism.
    """

    # The same number on all ranks, which construct their iterators in the same order.
    _number = itertools.count()
    _last_key: str | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.store: dist.Store | None = None
        check_shared_queue("", True, parallel_state.get_expert_model_parallel_world_size())
        if not (dist.is_available() and dist.is_initialized()):
            return
        self.microbatches = _gather_microbatches(self.microbatches)
        self.store = dist.distributed_c10d._get_default_store()
        self.key = f"nemo_aligner/work_queue/{next(self._number)}"
        # All ranks are here, so all are done with the queue before this one.
        if dist.get_rank() == 0 and StoreBatchIterator._last_key is not None:
            self.store.delete_key(StoreBatchIterator._last_key)
        StoreBatchIterator._last_key = self.key

    def __iter__(self) -> Iterator[InferenceBatch]:
        if self.store is None:
            yield from super().__iter__()
            return
        while (ticket := self._take_ticket(self.store)) < len(self.microbatches):
            yield self._collate(self.microbatches[ticket])

    def _take_ticket(self, store: dist.Store) -> int:
        """The next number of the queue, the same on all ranks of this model-parallel group."""
        group = parallel_state.get_model_parallel_group()
        if group is None:  # not the ranks of the whole job
            return store.add(self.key, 1) - 1
        return on_rank_zero(lambda: store.add(self.key, 1) - 1, group)


class HTTPBatchIterator(StoreBatchIterator):
    """A `StoreBatchIterator` with the arguments for NeMo-Aligner's Flask server, not used."""

    def __init__(self, shared_set: Any, host: str, port: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class SharedSet:
    """NeMo-Aligner's work queue, which nothing here uses: indices that several threads take."""

    def __init__(self) -> None:
        self.data: set[int] = set()
        self.lock = threading.Lock()

    def clear(self) -> None:
        with self.lock:
            self.data.clear()

    def set_idx(self, ids: Iterable[int]) -> None:
        with self.lock:
            self.data.update(ids)

    def get_idx(self, batch_size: int) -> list[int]:
        with self.lock:
            return [self.data.pop() for _ in range(min(batch_size, len(self.data)))]


def _gather_microbatches(own: list[list[int]]) -> list[list[int]]:
    """The micro-batches of all data-parallel ranks, in turns; every rank of the job calls it."""
    # Each rank of training's data-parallel group counts: in generation it may be another group.
    shares = gathered((parallel_state.get_data_parallel_rank(), own))
    by_rank = [microbatches for _rank, microbatches in sorted(dict(shares).items())]
    turns = itertools.chain(*itertools.zip_longest(*by_rank))
    return [microbatch for microbatch in turns if microbatch is not None]


def get_batch_iterator_cls(
    batch_iterator_cfg: DictConfig | dict[str, Any] | None = None,
) -> type[DefaultBatchIterator]:
    """The iterator that `trainer.ppo.batch_iterator` asks for: `use_flask` is the work queue."""
    if not complete(batch_iterator_cfg, "gpt_ppo_actor", "trainer.ppo.batch_iterator").use_flask:
        return DefaultBatchIterator
    logging.info(
        "batch_iterator.use_flask=True: work queue in the process group's own store, with no "
        "Flask server."
    )
    return StoreBatchIterator
