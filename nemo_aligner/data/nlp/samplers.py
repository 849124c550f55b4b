# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Batch samplers: which data-parallel rank gets which dataset index, and when.

`consumed_samples` alone (samples used by all ranks together since step 0) decides where a pass
starts, at any sample, so a resumed job gets exactly the batches that the killed one would have had
next. A pass has whole global batches only: the rest of an epoch is dropped or, in order and on
request, filled up with the index -1 (a slot without data).
"""

from collections.abc import Iterator

import torch

from nemo_aligner.core.errors import ConfigError, UserError


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
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise ValueError(
                f"data_parallel_rank={data_parallel_rank} of {data_parallel_size} ranks"
            )
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
        return self._at_random() if self.is_random else self._in_order()

    def _at_random(self) -> Iterator[list[int]]:
        """One permutation of the dataset per epoch, seeded with `seed + epoch`, cut into global
        batches, of which each rank takes a share: these depend neither on the number of ranks nor
        on the micro-batch size. A pass ends with the epoch.
        """
        epoch, done, left = self._position()
        order = torch.randperm(
            self.total_samples, generator=torch.Generator().manual_seed(self.seed + epoch)
        )
        # Beyond the last global batch are other samples in each epoch.
        for global_batch in order[done : done + left].split(self.global_batch_size):
            share = global_batch.chunk(self.data_parallel_size)[self.data_parallel_rank]
            for batch in share.split(self.local_batch_size):
                self.consumed_samples += len(batch) * self.data_parallel_size
                yield batch.tolist()
        self.consumed_samples = (epoch + 1) * self.samples_per_epoch

    def _in_order(self) -> Iterator[list[int]]:
        size, ranks, rank = self.local_batch_size, self.data_parallel_size, self.data_parallel_rank
        _epoch, first, left = self._position()
        for start in range(first, first + left, size * ranks):
            batch = [
                index if index < self.total_samples else -1
                for index in range(start, start + size * ranks)
            ]
            mine = slice(rank * size, (rank + 1) * size)
            yield batch[mine if self.yields_micro_batches else slice(rank, None, ranks)]


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
