# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Which data-parallel rank gets which dataset index, and when: batch samplers and the loader over
one, and how the prompts of a rollout reach the ranks.

`consumed_samples` alone (samples used by all ranks together since step 0) decides where a pass
starts, at any sample, so a resumed job gets exactly the batches that the killed one would have had
next. A pass has whole global batches only: the rest of an epoch is dropped or, in order and on
request, filled up with the index -1 (a slot without data).
"""

import functools
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
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.types import InferenceBatch
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import gathered, on_rank_zero
from nemo_aligner.training.stop_requests import ignore_signals


class BatchSampler:
    """Sizes, checks and counters of the four samplers. `UserError`, `ConfigError`: sizes that do
    not fit each other.

    Args:
        drop_last: leave out the samples that do not fill a global batch.
        global_batch_size: over all ranks; None for one micro-batch per rank.
        pad_samples_to_global_batch_size: with `drop_last=False`, fill up with the index -1.
        seed: of the permutations (random samplers only).
    """

    yields_micro_batches: bool
    is_random: bool

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        drop_last: bool = True,
        global_batch_size: int | None = None,
        pad_samples_to_global_batch_size: bool = False,
        seed: int = 0,
    ) -> None:
        step = micro_batch_size * data_parallel_size
        global_batch_size = step if global_batch_size is None else global_batch_size
        if total_samples <= 0:
            raise UserError(f"the dataset has {total_samples} samples.")
        if micro_batch_size <= 0 or global_batch_size <= 0 or global_batch_size % step:
            raise ConfigError(
                f"the global batch size {global_batch_size} (model.global_batch_size; of rollouts "
                f"num_rollout_samples or num_val_samples) is not a multiple of {step} = micro "
                f"batch size {micro_batch_size} (model.micro_batch_size; of rollouts "
                "rollout_micro_batch_size or val_rollout_micro_batch_size) x "
                f"{data_parallel_size} data-parallel rank(s). Change one of them."
            )
        if consumed_samples < 0:
            raise UserError(f"consumed_samples={consumed_samples}: it counts from 0.")
        if drop_last:
            if total_samples < global_batch_size:
                raise UserError(
                    f"the dataset has {total_samples} samples, fewer than one global batch of "
                    f"{global_batch_size} (model.global_batch_size, num_rollout_samples or "
                    "num_val_samples). Give more data or lower it."
                )
        elif self.is_random:
            raise ConfigError(
                "drop_last=False needs a sampler in order: random ones drop the rest of an epoch."
            )
        elif not pad_samples_to_global_batch_size and total_samples % global_batch_size:
            raise ConfigError(
                f"drop_last=False with {total_samples} samples leaves a global batch of "
                f"{global_batch_size} incomplete: set pad_samples_to_global_batch_size=True."
            )
        self.total_samples, self.consumed_samples = total_samples, consumed_samples
        self.micro_batch_size, self.global_batch_size = micro_batch_size, global_batch_size
        self.data_parallel_rank, self.data_parallel_size = data_parallel_rank, data_parallel_size
        self.drop_last, self.seed = drop_last, seed
        self.samples_per_epoch = self._whole_batches(total_samples)
        share = global_batch_size // data_parallel_size
        self.local_batch_size = micro_batch_size if self.yields_micro_batches else share

    def _whole_batches(self, samples: int) -> int:
        """Samples, with empty slots, of the global batches that `samples` make."""
        size = self.global_batch_size
        return samples // size * size if self.drop_last else -(-samples // size) * size

    def _position(self) -> tuple[int, int, int]:
        """(epoch, samples of it that are used, samples of all ranks that a pass would yield)."""
        epoch, done = divmod(self.consumed_samples, self.samples_per_epoch)
        has_ended = epoch > 0 and not self.is_random  # in order there is one pass in total
        return epoch, done, 0 if has_ended else self._whole_batches(self.total_samples - done)

    def __len__(self) -> int:
        """Batches that a pass started now would yield."""
        return self._position()[2] // (self.local_batch_size * self.data_parallel_size)

    def __iter__(self) -> Iterator[list[int]]:
        """A pass over global batches, of which each rank takes a share: these depend neither on
        the number of ranks nor on the micro-batch size. A random one is a permutation of the
        dataset per epoch, seeded with `seed + epoch`, and ends with the epoch.
        """
        epoch, done, left = self._position()
        order = torch.arange(done + left)
        if self.is_random:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            # Beyond the last global batch are other samples in each epoch.
            order = torch.randperm(self.total_samples, generator=generator)
        order[self.total_samples :] = -1
        for global_batch in order[done : done + left].view(-1, self.global_batch_size):
            for batch in self._share(global_batch).split(self.local_batch_size):
                if self.is_random:
                    self.consumed_samples += len(batch) * self.data_parallel_size
                yield batch.tolist()
        if self.is_random:
            self.consumed_samples = (epoch + 1) * self.samples_per_epoch

    def _share(self, global_batch: torch.Tensor) -> torch.Tensor:
        ranks, rank = self.data_parallel_size, self.data_parallel_rank
        if self.is_random:
            return global_batch.chunk(ranks)[rank]
        if self.yields_micro_batches:
            return global_batch.view(-1, ranks, self.micro_batch_size)[:, rank].flatten()
        return global_batch[rank::ranks]


class MegatronPretrainingRandomSampler(BatchSampler):
    """Micro-batches of this rank in random order."""

    is_random = True
    yields_micro_batches = True


class MegatronPretrainingRandomBatchSampler(BatchSampler):
    """This rank's share of each global batch, in random order."""

    is_random = True
    yields_micro_batches = False


class MegatronPretrainingSampler(BatchSampler):
    """Micro-batches in the dataset's order: of each DP consecutive ones, rank r gets the r-th."""

    is_random = False
    yields_micro_batches = True


class MegatronPretrainingBatchSampler(BatchSampler):
    """This rank's share of each global batch in the dataset's order: every DP-th sample."""

    is_random = False
    yields_micro_batches = False


def build_dataloader(
    cfg: DictConfig,
    dataset: torch.utils.data.Dataset[Any],
    consumed_samples: int,
    mbs: int,
    gbs: int,
    drop_last: bool = True,
    pad_samples_to_global_batch_size: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    load_gbs: bool = True,
    use_random_sampler: bool = True,
) -> torch.utils.data.DataLoader[Any]:
    """Build a data loader for this data-parallel rank that starts after `consumed_samples`.

    Args:
        cfg: complete configuration; `model.seed` and `model.data.num_workers` are read.
        consumed_samples: samples that all ranks together have used.
        load_gbs: yield this rank's share of a global batch; False yields micro-batches.
        use_random_sampler: shuffle, with a new permutation in each epoch.
    """
    sampler_classes: dict[tuple[bool, bool], type[BatchSampler]] = {
        (True, True): MegatronPretrainingRandomBatchSampler,
        (True, False): MegatronPretrainingRandomSampler,
        (False, True): MegatronPretrainingBatchSampler,
        (False, False): MegatronPretrainingSampler,
    }
    batch_sampler = sampler_classes[bool(use_random_sampler), bool(load_gbs)](
        total_samples=len(dataset),  # type: ignore[arg-type]  # torch's class has no __len__
        consumed_samples=consumed_samples,
        micro_batch_size=mbs,
        global_batch_size=gbs,
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        drop_last=drop_last,
        pad_samples_to_global_batch_size=pad_samples_to_global_batch_size,
        seed=cfg.model.seed,
    )
    return torch.utils.data.DataLoader(
        dataset,
        batch_sampler=batch_sampler,
        num_workers=cfg.model.data.num_workers,
        pin_memory=torch.cuda.is_available(),
        collate_fn=collate_fn,
        worker_init_fn=ignore_signals,
        # Not from the global generator: each new iterator draws a seed.
        generator=torch.Generator().manual_seed(cfg.model.seed),
    )


# ---------------------------------------------------------------------------- prompts of a rollout


# By the rank's own sampler (`DefaultBatchIterator`) or from a common queue (`StoreBatchIterator`),
# each micro-batch once.
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
        for indices in self._taken():
            yield self.collate_fn([self.dataset[index] for index in indices])

    def _taken(self) -> Iterable[list[int]]:
        return self.microbatches


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
        # Those of all data-parallel ranks, in turns. Each rank of training's data-parallel group
        # counts: in generation it may be another group.
        shares = gathered((parallel_state.get_data_parallel_rank(), self.microbatches))
        by_rank = [microbatches for _rank, microbatches in sorted(dict(shares).items())]
        turns = itertools.chain(*itertools.zip_longest(*by_rank))
        self.microbatches = [microbatch for microbatch in turns if microbatch is not None]
        self.store = dist.distributed_c10d._get_default_store()
        self.key = f"nemo_aligner/work_queue/{next(self._number)}"
        # All ranks are here, so all are done with the queue before this one.
        if dist.get_rank() == 0 and StoreBatchIterator._last_key is not None:
            self.store.delete_key(StoreBatchIterator._last_key)
        StoreBatchIterator._last_key = self.key

    def _taken(self) -> Iterable[list[int]]:
        """Those whose number this model-parallel group takes, the same on all of its ranks."""
        store = self.store
        if store is None:
            yield from self.microbatches
            return
        take: Callable[[], int] = lambda: store.add(self.key, 1) - 1
        group = parallel_state.get_model_parallel_group()
        if group is not None:  # without one not the ranks of the whole job
            take = functools.partial(on_rank_zero, take, group)
        while (number := take()) < len(self.microbatches):
            yield self.microbatches[number]


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
