# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes and loads Megatron Core's distributed checkpoints.

Megatron Core's own writer starts a manager process (which imports the user's script again) and
forks workers (unsafe beside the threads of a server). Here (`Save`) Megatron Core plans, on all
ranks together, and PyTorch's writer writes the same format on each rank by itself, in the
background from a copy in host memory; the metadata is again written together.
"""

import contextlib
import dataclasses
import io
import pickle
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
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

from nemo_aligner.checkpoint import checksums, data_only
from nemo_aligner.core.errors import SaveError, UserError
from nemo_aligner.parallel.collectives import gathered


def barrier() -> None:
    """Wait for all ranks; nothing without a process group."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


# More than a checkpoint takes beside its tensors.
_MARGIN_BYTES = 8 << 20


@contextlib.contextmanager
def failing_together(written: Path | None = None) -> Iterator[None]:
    """All ranks enter it. A `UserError` inside, on any of them, is raised on all. An `OSError`
    becomes a `SaveError` about the path `written`, or, if that is None, a `UserError`.
    """
    failure: UserError | None = None
    try:
        yield
    except UserError as error:
        failure = error
    except OSError as error:
        failure = UserError(str(error))
        if written is not None:
            failure = checksums.save_error(written, error)
    for found in gathered(failure):
        if found is not None:
            raise found


class _Copies:
    """This rank's tensors and objects as saved, in host memory, in place of the planner."""

    def __init__(self, plan: Any, planner: Any):
        self._data = {}
        for item in plan.items:
            data = planner.resolve_data(item)
            if isinstance(data, torch.Tensor):  # objects are bytes of their own already
                data = data.detach().to("cpu", copy=True)
            self._data[item.index] = data

    def resolve_data(self, item: Any) -> Any:
        return self._data.pop(item.index)


class _Writer(FileSystemWriter):
    """Writes, in any thread, with checksums."""

    def __init__(self, folder: str | Path, from_copies: bool):
        super().__init__(folder, single_file_per_rank=True)
        self.fs = self.files = checksums.ChecksummedFiles()
        self.from_copies = from_copies

    def prepare_write_data(self, plan: Any, planner: Any) -> None:
        self._plan = plan
        self._data: Any = _Copies(plan, planner) if self.from_copies else planner

    def write(self) -> None:
        try:
            self._results = self.write_data(self._plan, self._data).value()
        except Exception as error:
            if self.files.error is None:
                raise
            raise self.files.error from error
        self._data = None  # an optimizer's is gathered for the save, and large

    def finish_together(self, metadata: Any) -> None:
        """Write the metadata, which rank 0 has; all ranks call it after their `write`.

        Megatron Core writes `metadata.json` again on rank 0; here the others learn if it cannot.
        """
        results = gathered(self._results)
        with failing_together(Path(self.path)):
            if torch.distributed.get_rank() == 0:
                self.finish(metadata, results)
                save_config(CheckpointingConfig("torch_dist", 1), str(self.path))


class _InProcessSave(mcore_torch.TorchDistSaveShardedStrategy):
    writer: _Writer

    def __init__(self, from_copies: bool):
        super().__init__("torch_dist", 1)
        self.from_copies = from_copies

    def async_save(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path, *_strategy: str
    ) -> AsyncRequest:
        """Plan, and write what is beside the tensors; all ranks call it."""
        common = sharded_state_dict.get(data_only.COMMON_OBJECT)
        if common is not None:
            _write_common(common.data, checkpoint_dir)
        by_key, _flat_mapping, _rename_mapping = (
            mcore_torch._replace_state_dict_keys_with_sharded_keys(
                sharded_state_dict, self.keep_only_main_replica
            )
        )
        planner = mcore_torch.MCoreSavePlanner(
            dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
        )
        state = mcore_torch.mcore_to_pyt_state_dict(by_key, False)
        writer = self.writer = _Writer(checkpoint_dir, self.from_copies)
        planned, *_plans = save_state_dict_async_plan(state, writer, planner=planner)
        return AsyncRequest(writer.write, (), [lambda: writer.finish_together(planned[1])])


def save(sharded_state_dict: dict[str, Any], folder: str | Path) -> checksums.Checksums:
    """Write a sharded state dict into the existing, empty, shared `folder`; all ranks call it.
    Returns checksums of the large files, by name. `SaveError` on all ranks: not written.
    """
    return Save(sharded_state_dict, Path(folder), {}, in_background=False).finish()


def _write_common(common: Any, folder: str | Path) -> None:
    """Write what is beside the tensors; all ranks call it. `SaveError` on all if rank 0 cannot."""
    with failing_together(Path(folder)):
        if torch.distributed.get_rank() == 0:
            content = io.BytesIO()  # torch.save does not say why it cannot write a file
            torch.save(common, content)
            (Path(folder) / data_only.COMMON_FILE).write_bytes(content.getbuffer())


@contextlib.contextmanager
def _common_written_together() -> Iterator[None]:
    """Inside, Megatron Core 0.16 writes by `_write_common`: its own rank 0, failing, would leave
    the others waiting. In 0.19 `_InProcessSave` writes it.
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


class Save:
    """A sharded state dict being written, and `files` of this rank. All ranks make one and call
    `finish`. `in_background`: a thread of each rank writes a copy in host memory. `SaveError`, on
    all ranks: there is no space, or one of them cannot begin.
    """

    def __init__(
        self,
        sharded_state_dict: dict[str, Any],
        folder: Path,
        files: Mapping[Path, bytes],
        in_background: bool,
    ):
        self._folder, self._files = folder, files
        self._needed = _check_space(sharded_state_dict, folder)
        strategy = _InProcessSave(from_copies=in_background)
        try:
            with _common_written_together():
                self._request: AsyncRequest = dist_checkpointing.save(
                    sharded_state_dict,
                    str(folder),
                    sharded_strategy=strategy,
                    async_sharded_save=True,
                )
        except CheckpointException as error:  # not an Exception; says what went wrong on each rank
            failure, _trace = next(iter(error.failures.values()))
            raise self._failure(failure) from error
        self._writer = strategy.writer
        self._written: Future[None] = Future()  # this rank's part
        if in_background:
            threading.Thread(target=self._write, daemon=True, name="checkpoint").start()
        else:
            self._write()

    def _write(self) -> None:
        try:
            self._request.async_fn(*self._request.async_fn_args)
            for path, content in self._files.items():
                checksums.write_durably(path, content)
            self._written.set_result(None)
        except Exception as error:
            self._written.set_exception(error)

    def is_written(self) -> bool:
        """Whether this rank has written its part, or failed."""
        return self._written.done()

    def finish(self) -> checksums.Checksums:
        """Wait for all ranks, and complete it; all ranks call it. Returns and raises as `save`."""
        with failing_together(self._folder):
            if (error := self._written.exception()) is not None:
                raise self._failure(error) from error
        for finish in self._request.finalize_fns:
            finish()
        parts = gathered(self._writer.files.checksums)
        return {name: found for part in parts for name, found in part.items()}

    def _failure(self, error: BaseException) -> SaveError:
        if isinstance(error, OSError):
            return checksums.save_error(self._folder, error, self._needed)
        return SaveError(f"{self._folder} cannot be written: {error!r}")


def _check_space(sharded_state_dict: dict[str, Any], folder: Path) -> int:
    """Bytes that a checkpoint takes; all ranks call it. `SaveError` on all: there is no space."""
    own = sum(
        item.data.nbytes
        for item in nested_values(sharded_state_dict)
        if isinstance(item, (ShardedTensor, ShardedTensorFactory))
        and item.data is not None
        and is_main_replica(item.replica_id)
    )
    needed = sum(gathered(own)) + _MARGIN_BYTES
    with failing_together(folder):
        if torch.distributed.get_rank() == 0:
            checksums.check_space(folder, needed)
    return needed


def load(sharded_state_dict: dict[str, Any], folder: str | Path) -> dict[str, Any]:
    """Load a distributed checkpoint into a sharded state dict; all ranks call it. `UserError`: a
    file could run code, or is damaged.

    Extra states of Transformer Engine, which it unpickles, are not read: those of
    `sharded_state_dict` stay. They are empty unless it computes in fp8, which is not supported.
    """
    data_only.read_table(Path(folder))

    def own_extra_state(item: Any) -> Any:
        is_extra = isinstance(item, ShardedObject) and item.key.endswith("_extra_state")
        return LocalNonpersistentObject(item.data) if is_extra else item

    dict_list_map_inplace(own_extra_state, sharded_state_dict)
    try:
        with data_only.objects_as_data(folder):
            return dist_checkpointing.load(sharded_state_dict, str(folder))
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{folder}/{data_only.COMMON_FILE} is more than data and may run code "
            f"({data_only.reason(error)}); do not use this file."
        ) from error
    except CheckpointException as error:  # what went wrong on each rank
        for failure, _trace in error.failures.values():
            if isinstance(failure, UserError):
                raise failure from error
        failure, _trace = next(iter(error.failures.values()))
        raise UserError(
            f"{folder} is damaged or incomplete ({data_only.reason(failure)}); copy it again, or "
            "use another checkpoint."
        ) from error


def tensors_in(folder: str | Path) -> dict[str, ShardedTensor]:
    """The global tensors of a distributed checkpoint, by name; errors as of `load`."""
    data_only.read_table(Path(folder))
    return dist_checkpointing.load_tensors_metadata(str(folder))


def make_sharded_tensors_from_reference(
    reference_param: ShardedBase, model_param: Any, prefix: str
) -> ShardedBase:
    """An entry for `model_param`, split over the ranks as `reference_param` is, under the key
    `<prefix>.<key of the reference>`; `UserError`: it has another shape.
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
