# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes and loads Megatron Core's distributed checkpoints.

Megatron Core's own writer starts a manager process (which imports the user's script again and
takes seconds) and forks workers (unsafe beside the threads of an inference server). Here Megatron
Core plans and PyTorch's synchronous writer writes, in the same format (`torch_dist`). Megatron
Core reads it, after a check that no file of it can run code.

Megatron Core's asynchronous saves (`async_sharded_save`) are of the same parts: the ranks plan
together and copy their tensors to host memory, then a thread of each rank writes, without talking
to the others, and at last the ranks write the metadata together (`BackgroundSave`).
"""

import contextlib
import dataclasses
import io
import pickle
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies import common as mcore_common
from megatron.core.dist_checkpointing.strategies import torch as mcore_torch
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from nemo_aligner.checkpoint.checksums import (
    ChecksummedFiles,
    Checksums,
    check_space,
    save_error,
    write_durably,
)
from nemo_aligner.checkpoint.data_only import (
    COMMON_FILE,
    COMMON_OBJECT,
    objects_as_data,
    read_table,
    reason,
)
from nemo_aligner.core.errors import SaveError, UserError
from nemo_aligner.parallel.collectives import gathered


def barrier() -> None:
    """Wait for all ranks of the job; without a process group do nothing."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


# What a checkpoint takes beside its tensors is less than this, and in it is a margin for the rest.
_MARGIN_BYTES = 8 << 20


@contextlib.contextmanager
def failing_together(written: Path | None = None) -> Iterator[None]:
    """All ranks enter it. A `UserError` inside, on any of them, is raised on all.

    Args:
        written: path that is written inside; an `OSError` becomes a `SaveError` about it. None:
            it becomes a `UserError`.
    """
    failure: UserError | None = None
    try:
        yield
    except UserError as error:
        failure = error
    except OSError as error:
        failure = UserError(str(error)) if written is None else save_error(written, error)
    for found in gathered(failure):
        if found is not None:
            raise found


class _CheckedWriter(FileSystemWriter):
    """Keeps the checksums of its files, and raises the error of the system that stopped it."""

    def __init__(self, folder: str | Path):
        super().__init__(folder, single_file_per_rank=True)
        self.fs = self.files = ChecksummedFiles()

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            if self.files.error is None:
                raise
            raise self.files.error from error


class _Copies:
    """Tensors and objects of this rank at the time of the save, in host memory; one after the
    other is given to the writer, and forgotten.

    Stands in the place of the planner, which would give those of the model.
    """

    def __init__(self, plan: Any, planner: Any):
        self._data = {item.index: _copied(planner.resolve_data(item)) for item in plan.items}

    def resolve_data(self, item: Any) -> Any:
        return self._data.pop(item.index)


def _copied(data: Any) -> Any:
    """A copy of a tensor in host memory; objects are bytes of their own already."""
    return data.detach().to("cpu", copy=True) if isinstance(data, torch.Tensor) else data


class _BackgroundWriter(_CheckedWriter):
    """Writes what it has copied, in any thread."""

    def prepare_write_data(self, plan: Any, planner: Any) -> None:
        self._plan, self._copies = plan, _Copies(plan, planner)

    def write(self) -> None:
        self._results = self.write_data(self._plan, self._copies).value()

    def finish_together(self, metadata: Any) -> None:
        """Write the metadata, which rank 0 has; all ranks call it after their `write`."""
        results = gathered(self._results)
        with failing_together(Path(self.path)):
            if torch.distributed.get_rank() == 0:
                self.finish(metadata, results)


class _InProcessSave(mcore_torch.TorchDistSaveShardedStrategy):
    writer: _CheckedWriter  # of the last save

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        state, planner = self._prepare(sharded_state_dict, checkpoint_dir)
        self.writer = _CheckedWriter(checkpoint_dir)
        torch.distributed.checkpoint.save(state, storage_writer=self.writer, planner=planner)
        self._write_format(Path(checkpoint_dir))

    def async_save(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path, *_strategy: str
    ) -> AsyncRequest:
        state, planner = self._prepare(sharded_state_dict, checkpoint_dir)
        writer = self.writer = _BackgroundWriter(checkpoint_dir)
        planned, *_plans = save_state_dict_async_plan(state, writer, planner=planner)

        def finish() -> None:
            writer.finish_together(planned[1])
            self._write_format(Path(checkpoint_dir))

        return AsyncRequest(writer.write, (), [finish])

    def _write_format(self, folder: Path) -> None:
        """Write `metadata.json`, which names the format; all ranks call it.

        Megatron Core writes the same file again, on rank 0 alone. If there were no space for it,
        the other ranks would wait without end; here they learn of it.
        """
        with failing_together(folder):
            if torch.distributed.get_rank() == 0:
                save_config(CheckpointingConfig(self.backend, self.version), str(folder))

    def _prepare(self, sharded_state_dict: dict[str, Any], folder: str | Path) -> tuple[Any, Any]:
        """PyTorch's state dict, and the planner for it; writes what is beside it."""
        common = sharded_state_dict.get(COMMON_OBJECT)
        if common is not None:
            _write_common(common.data, folder)
        by_key, _flat_mapping, _rename_mapping = (
            mcore_torch._replace_state_dict_keys_with_sharded_keys(
                sharded_state_dict, self.keep_only_main_replica
            )
        )
        planner = mcore_torch.MCoreSavePlanner(
            dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
        )
        return mcore_torch.mcore_to_pyt_state_dict(by_key, False), planner


def save(sharded_state_dict: dict[str, Any], folder: str | Path) -> Checksums:
    """Write a sharded state dict into the existing, empty `folder`, which all ranks share; all
    ranks call it. Returns the checksums of its large files, by name, computed while they were
    written.

    Raises:
        SaveError: on all ranks; there is no space, or the system cannot write.
    """
    folder = Path(folder)
    needed = _check_space(sharded_state_dict, folder)
    strategy = _InProcessSave("torch_dist", 1)
    try:
        with _common_written_together():
            dist_checkpointing.save(sharded_state_dict, str(folder), sharded_strategy=strategy)
    except CheckpointException as error:  # not an Exception; says what went wrong on each rank
        failure, _trace = next(iter(error.failures.values()))
        if isinstance(failure, OSError):
            raise save_error(folder, failure, needed) from error
        raise SaveError(f"{folder} cannot be written: {failure!r}") from error
    return _checksums_of_all(strategy.writer)


def _write_common(common: Any, folder: str | Path) -> None:
    """Write what is beside the tensors; all ranks call it. `SaveError` on all if rank 0 cannot."""
    with failing_together(Path(folder)):
        if torch.distributed.get_rank() == 0:
            content = io.BytesIO()  # torch.save does not say why it cannot write a file
            torch.save(common, content)
            (Path(folder) / COMMON_FILE).write_bytes(content.getbuffer())


@contextlib.contextmanager
def _common_written_together() -> Iterator[None]:
    """Inside, Megatron Core 0.16 writes what is beside the tensors by `_write_common`; its rank 0
    would leave the others waiting if it could not. In 0.19 `_InProcessSave` writes it.
    """
    writer = getattr(mcore_common, "TorchCommonSaveStrategy", None)
    if writer is None:
        yield
        return
    own = writer.save_common
    writer.save_common = lambda _self, common, folder: _write_common(common, folder)
    try:
        yield
    finally:
        writer.save_common = own


def _checksums_of_all(writer: _CheckedWriter) -> Checksums:
    """Checksums of the files of all ranks; all ranks call it."""
    parts = gathered(writer.files.checksums)
    return {name: found for part in parts for name, found in part.items()}


class BackgroundSave:
    """`save` by a thread of each rank, of a copy of the state dict in host memory; all ranks make
    one, which begins to write, and call `finish`, when the caller wants to know how it went.

    Args:
        files: small files beside it, which this rank's thread writes durably.

    Raises:
        SaveError: on all ranks; there is no space.
    """

    def __init__(
        self, sharded_state_dict: dict[str, Any], folder: Path, files: Mapping[Path, bytes]
    ):
        self._folder, self._files = folder, files
        self._needed = _check_space(sharded_state_dict, folder)
        strategy = _InProcessSave("torch_dist", 1)
        with _common_written_together():
            self._request: AsyncRequest = dist_checkpointing.save(
                sharded_state_dict, str(folder), sharded_strategy=strategy, async_sharded_save=True
            )
        self._writer = strategy.writer
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, daemon=True, name="checkpoint")
        self._thread.start()

    def _write(self) -> None:
        try:
            self._request.async_fn(*self._request.async_fn_args)
            for path, content in self._files.items():
                write_durably(path, content)
        except BaseException as error:
            self._error = error

    def is_written(self) -> bool:
        """Whether this rank has written its part, or could not."""
        return not self._thread.is_alive()

    def finish(self) -> Checksums:
        """Wait for all ranks, and complete the checkpoint; all ranks call it. Returns as `save`.

        Raises:
            SaveError: on all ranks; one of them could not write.
        """
        self._thread.join()
        with failing_together(self._folder):
            if isinstance(self._error, OSError):
                raise save_error(self._folder, self._error, self._needed) from self._error
            if self._error is not None:
                message = f"{self._folder} cannot be written: {self._error!r}"
                raise SaveError(message) from self._error
        for finish in self._request.finalize_fns:
            finish()
        return _checksums_of_all(self._writer)


def _check_space(sharded_state_dict: dict[str, Any], folder: Path) -> int:
    """Bytes that a checkpoint takes; all ranks call it. `SaveError` on all: there is no space."""
    needed = sum(gathered(_bytes_to_write(sharded_state_dict))) + _MARGIN_BYTES
    with failing_together(folder):
        if torch.distributed.get_rank() == 0:
            check_space(folder, needed)
    return needed


def _bytes_to_write(sharded_state_dict: dict[str, Any]) -> int:
    return sum(
        item.data.nbytes
        for item in nested_values(sharded_state_dict)
        if isinstance(item, (ShardedTensor, ShardedTensorFactory))
        and item.data is not None
        and is_main_replica(item.replica_id)
    )


def load(sharded_state_dict: dict[str, Any], folder: str | Path) -> dict[str, Any]:
    """Load a distributed checkpoint into a sharded state dict; all ranks call it.

    Extra states of Transformer Engine are not read, because it unpickles them: those of
    `sharded_state_dict` stay. They are empty unless it computes in fp8, which is not supported.

    Raises:
        UserError: a file could run code, or is damaged.
    """
    read_table(Path(folder))

    def own_extra_state(item: Any) -> Any:
        is_extra = isinstance(item, ShardedObject) and item.key.endswith("_extra_state")
        return LocalNonpersistentObject(item.data) if is_extra else item

    dict_list_map_inplace(own_extra_state, sharded_state_dict)
    try:
        with objects_as_data(folder):
            return dist_checkpointing.load(sharded_state_dict, str(folder))
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{folder}/{COMMON_FILE} is more than data and may run code ({reason(error)}); do not "
            "use this file."
        ) from error
    except CheckpointException as error:  # what went wrong on each rank
        for failure, _trace in error.failures.values():
            if isinstance(failure, UserError):
                raise failure from error
        failure, _trace = next(iter(error.failures.values()))
        raise UserError(
            f"{folder} is damaged or incomplete ({reason(failure)}); copy it again, or use "
            "another checkpoint."
        ) from error


def tensors_in(folder: str | Path) -> dict[str, ShardedTensor]:
    """The global tensors of a distributed checkpoint, by name.

    Raises:
        UserError: a file could run code, or is damaged.
    """
    read_table(Path(folder))
    return dist_checkpointing.load_tensors_metadata(str(folder))


def make_sharded_tensors_from_reference(
    reference_param: ShardedBase, model_param: Any, prefix: str
) -> ShardedBase:
    """An entry of a sharded state dict for `model_param`, split over the ranks as
    `reference_param` is, under the key `<prefix>.<key of the reference>`.

    Raises:
        UserError: a tensor's shape is not that of the reference.
    """
    renamed = {"key": f"{prefix}.{reference_param.key}", "data": model_param}
    if not isinstance(reference_param, ShardedTensor):
        return dataclasses.replace(reference_param, **renamed)
    if tuple(model_param.shape) != tuple(reference_param.local_shape):
        raise UserError(
            f"{reference_param.key}: the tensor has the shape {tuple(model_param.shape)}, its "
            f"reference {tuple(reference_param.local_shape)}"
        )
    return dataclasses.replace(reference_param, dtype=model_param.dtype, **renamed)
