# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes Megatron Core's distributed checkpoints (torch_dist).

Megatron Core's own writer starts a manager process (which imports the user's script again) and
forks workers (unsafe beside the threads of a server). Here Megatron Core says and checks which
rank has which part, and PyTorch's writer writes the same format on each rank by itself (`Save`),
in the background from a copy in host memory; or a part at a time in one process (`write`).
"""

import contextlib
import dataclasses
import io
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StoragePrefix

from nemo_aligner.checkpoint import checksums
from nemo_aligner.checkpoint.forms import COMMON_FILE
from nemo_aligner.core.errors import SaveError, UserError
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import gathered

# More than a checkpoint takes beside its tensors.
_MARGIN_BYTES = 8 << 20


@contextlib.contextmanager
def failing_together(written: Path | None = None) -> Iterator[None]:
    """All ranks enter it. A `UserError` inside, on any of them, is raised on all. An `OSError`
    becomes a `SaveError` about the path `written`, or, if that is None, a `UserError`; so does
    another exception on all ranks but its own.
    """
    failure: UserError | None = None
    own: Exception | None = None
    try:
        yield
    except UserError as error:
        failure = error
    except OSError as error:
        failure = UserError(str(error))
        if written is not None:
            failure = checksums.save_error(written, error)
    except Exception as error:
        own, kind = error, UserError if written is None else SaveError
        failure = kind(f"rank {parallel_state.get_rank()} failed: {error!r}")
    everywhere = gathered(failure)
    if own is not None:
        raise own
    for found in everywhere:
        if found is not None:
            raise found


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor to be written."""

    key: str  # of the tensor
    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]  # where the part lies
    size: tuple[int, ...]  # of the part
    dtype: torch.dtype  # of the tensor

    def item(self) -> dcp.WriteItem:
        """The part as PyTorch's plans have it."""
        offset = torch.Size(self.offset)
        return dcp.WriteItem(
            index=dcp.metadata.MetadataIndex(self.key, offset),
            type=dcp.planner.WriteItemType.SHARD,
            tensor_data=dcp.planner.TensorWriteData(
                chunk=dcp.ChunkStorageMetadata(offset, torch.Size(self.size)),
                properties=dcp.metadata.TensorProperties(dtype=self.dtype),
                size=torch.Size(self.shape),
            ),
        )


def _object_item(name: str) -> dcp.WriteItem:
    return dcp.WriteItem(dcp.metadata.MetadataIndex(name), dcp.planner.WriteItemType.BYTE_IO)


def saved(content: Any) -> io.BytesIO:
    """What `torch.save` writes, which does not say why it cannot write a file."""
    saved = io.BytesIO()
    torch.save(content, saved)
    return saved


class _Writer(dcp.FileSystemWriter):
    """Writes the `items` of this rank, in any thread, with checksums. `resolve_data` gives the
    tensor or the bytes of each, once.
    """

    def __init__(
        self,
        folder: Path,
        items: Sequence[dcp.WriteItem],
        resolve_data: Callable[[dcp.WriteItem], Tensor | io.BytesIO],
    ):
        super().__init__(folder, single_file_per_rank=True)
        self.folder = folder
        self.fs = self.files = checksums.ChecksummedFiles()
        prefix = _StoragePrefix(f"__{parallel_state.get_rank()}_")
        self.plan = dcp.SavePlan(list(items), storage_data=prefix)
        self.resolve_data = resolve_data

    def write(self) -> None:
        try:
            self.results = self.write_data(self.plan, self).value()  # type: ignore[arg-type]
        except Exception as error:
            if self.files.error is None:
                raise
            raise self.files.error from error

    def finish_together(self) -> checksums.Checksums:
        """Write the table of contents; all ranks call it after their `write`. Returns checksums of
        the large files, by name. `SaveError` on all ranks.
        """
        plans, results = zip(*gathered((self.plan, self.results)), strict=True)
        with failing_together(self.folder):
            if parallel_state.get_rank() == 0:
                _plans, metadata = create_default_global_save_plan(list(plans))
                self.finish(metadata, list(results))
                save_config(CheckpointingConfig("torch_dist", 1), str(self.folder))
        parts = gathered(self.files.checksums)
        return {name: found for part in parts for name, found in part.items()}


# --- a sharded state dict, by all ranks ---


def save(sharded_state_dict: dict[str, Any], folder: str | Path) -> checksums.Checksums:
    """Write a sharded state dict into the existing, empty, shared `folder`; all ranks call it.
    Returns checksums of the large files, by name. `SaveError` on all ranks: not written.
    """
    return Save(sharded_state_dict, Path(folder), {}, in_background=False).finish()


class Save:
    """A sharded state dict being written, and `files` of this rank. All ranks make one and call
    `finish`. `in_background`: a thread of each rank writes a copy in host memory. `SaveError`, on
    all ranks: there is no space.
    """

    def __init__(
        self,
        sharded_state_dict: dict[str, Any],
        folder: Path,
        files: Mapping[Path, bytes],
        in_background: bool,
    ):
        self._folder, self._files = folder, files
        sharded, common = save_preprocess(sharded_state_dict)
        parts = [part for part in nested_values(sharded) if is_main_replica(part.replica_id)]
        own = sum(part.data.nbytes for part in parts if isinstance(part, ShardedTensor))
        self._needed = sum(gathered(own)) + _MARGIN_BYTES
        with failing_together(folder):
            if parallel_state.get_rank() == 0:
                checksums.check_space(folder, self._needed)
            items, data = [], {}
            for part in parts:
                if isinstance(part, ShardedTensor):
                    size = (1,) * part.prepend_axis_num + tuple(part.local_shape)
                    value = part.data.detach().contiguous().view(size)
                    place = part.key, part.global_shape, part.global_offset
                    item = Chunk(*place, size, value.dtype).item()
                    if in_background:
                        value = value.to("cpu", copy=True)
                else:
                    item, value = _object_item(part.unique_key), saved([part.data])
                items.append(item)
                data[item.index] = value
        # What is written is let go: an optimizer's state is gathered for the save, and large.
        self._writer = _Writer(folder, items, lambda item: data.pop(item.index))
        if parallel_state.get_rank() == 0:
            self._files = {**files, folder / COMMON_FILE: saved(common).getvalue()}
        self.written: Future[None] = Future()  # this rank's part
        if in_background:
            threading.Thread(target=self._write, daemon=True, name="checkpoint").start()
        else:
            self._write()

    def _write(self) -> None:
        try:
            self._writer.write()
            for path, content in self._files.items():
                checksums.write_durably(path, content)
            self.written.set_result(None)
        except Exception as error:
            self.written.set_exception(error)

    def finish(self) -> checksums.Checksums:
        """Wait for all ranks, and complete it; all ranks call it. Returns and raises as `save`."""
        with failing_together(self._folder):
            if (error := self.written.exception()) is not None:
                if isinstance(error, OSError):
                    raise checksums.save_error(self._folder, error, self._needed) from error
                raise SaveError(f"{self._folder} cannot be written: {error!r}") from error
        return self._writer.finish_together()


# --- a part at a time, in one process, for models that do not fit into memory ---


def write(
    chunks: Sequence[Chunk],
    read: Callable[[Chunk], Tensor],
    folder: Path,
    common: Mapping[str, Any] | None = None,
    states: bool = False,
) -> checksums.Checksums:
    """Write a distributed checkpoint into the existing, empty `folder`. Returns and raises as
    `save`.

    Args:
        read: values of the shape `chunk.size`; called once for each chunk, in order.
        common: what to write beside the tensors.
        states: write the empty extra states that Megatron Core asks for in its own models.
    """
    names = [name for chunk in chunks for name in _extra_states(chunk)] if states else []
    items = [*(chunk.item() for chunk in chunks), *map(_object_item, names)]
    by_place = {(chunk.key, chunk.offset): chunk for chunk in chunks}

    def data(item: dcp.WriteItem) -> Tensor | io.BytesIO:
        offset = item.index.offset
        return saved([None]) if offset is None else read(by_place[item.index.fqn, tuple(offset)])

    writer = _Writer(folder, items, data)
    try:
        writer.write()
    except OSError as error:
        if error is not writer.files.error:
            raise  # of the source
        raise checksums.save_error(folder, error) from error
    with failing_together(folder):
        checksums.write_durably(folder / COMMON_FILE, saved(dict(common or {})).getvalue())
    return writer.finish_together()


def _extra_states(chunk: Chunk) -> list[str]:
    """Names of the extra states of a part of a weight."""
    module = chunk.key.removesuffix(".weight")
    if not module.rpartition(".")[2].startswith("linear_") or module == chunk.key:
        return []
    axes = len(chunk.shape) - 2
    numbers = (chunk.offset[:axes] or (0,), chunk.shape[:axes] or (1,))
    shard = "_".join(".".join(map(str, part)) for part in numbers)
    modules = [module]
    if module.endswith("self_attention.linear_proj"):  # Transformer Engine's has one
        modules.append(module.replace("linear_proj", "core_attention"))
    return [f"{name}._extra_state/shard_{shard}" for name in modules]


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
