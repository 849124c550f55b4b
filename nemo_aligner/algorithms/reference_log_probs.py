# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probs of the reference policy for whole datasets, computed once and kept in files.

A folder has `shards` pairs of files. Shard k has the items k, k + shards, k + 2 shards, ...: in
`k.values` float32 the log-probs of the tokens that count (column t of `[S-1]` predicts token t+1;
S is the width of an item), an item's samples one after the other; in `k.items` int64 `[items of
the shard, 2]` how many these are, and a checksum of the item's tokens and masks. `meta.json` has
the numbers of items and shards, the manifest of `checkpoint/checksums.py` the files' checksums.
"""

import contextlib
import errno
import hashlib
import json
import secrets
import shutil
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nemo.utils import logging
from omegaconf import OmegaConf
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from tqdm import tqdm

from nemo_aligner.checkpoint.checksums import MANIFEST, check_files_together, write_manifest
from nemo_aligner.checkpoint.dist_ckpt import failing_together
from nemo_aligner.config.schema import ARCHITECTURE_KEYS
from nemo_aligner.core import leftovers
from nemo_aligner.core.errors import DamagedFileError, UserError
from nemo_aligner.core.tokenizer import tokenizer_fingerprint
from nemo_aligner.data.nlp.index_files import code_fingerprint, file_fingerprint, key
from nemo_aligner.data.nlp.records import settings_of
from nemo_aligner.models.nlp.gpt.log_probs import ReferencePolicyMixin
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import on_rank_zero

META = "meta.json"
FORM = 1  # of the files, and of what is computed
# Micro-batches that are computed together, then written: samples of similar length share one.
TOGETHER = 16


class ShardWriter:
    """Writes one shard, of this number, to a folder that exists; items come in their order."""

    def __init__(self, folder: Path, shard: int) -> None:
        self._values = (folder / f"{shard}.values").open("wb")
        self._path = folder / f"{shard}.items"
        self._items: list[tuple[int, int]] = []

    def add(
        self, item: Mapping[str, Tensor], columns: Mapping[str, str], rows: Sequence[Tensor]
    ) -> None:
        """Append an item's log-probs, `rows` float32 `[S-1]` each, in the order of `columns`: key
        of the log-probs in an item -> key of the mask `[S]` of the tokens that count.
        """
        values = [
            row[item[mask][1:] != 0].float()
            for mask, row in zip(columns.values(), rows, strict=True)
        ]
        self._values.write(torch.cat(values).cpu().numpy().tobytes())
        self._items.append((sum(map(len, values)), checksum(item)))

    def close(self) -> None:
        self._values.close()
        self._path.write_bytes(np.array(self._items, dtype=np.int64).tobytes())


def checksum(item: Mapping[str, Tensor]) -> int:
    """Of the tokens and masks of an item: of all its whole numbers and masks `[S]`."""
    found = 0
    for name, tensor in sorted(item.items()):
        if tensor.dim() == 1 and (name.endswith("mask") or not tensor.is_floating_point()):
            found = zlib.crc32(tensor.to(torch.int64).numpy().tobytes(), found)
    return found


class WithReferenceLogProbs(Dataset[dict[str, Tensor]]):
    """The items of a dataset, whose index -1 is an empty slot, with a reference's log-probs,
    float32 `[S-1]`, 0 where no token counts; `columns` are those of `ShardWriter.add`.
    `UserError`: the folder is of other items, at once or when an item is read.
    """

    def __init__(self, dataset: Any, folder: Path, columns: Mapping[str, str]) -> None:
        self.dataset, self.folder, self.columns = dataset, folder, dict(columns)
        self.collate_fn = getattr(dataset, "collate_fn", None)
        meta = json.loads((folder / META).read_text())
        if meta["items"] != len(dataset):
            raise self._other_data(f"it has {meta['items']} items, the data {len(dataset)}")
        self._items, self._values, self._starts = [], [], []
        for shard in range(meta["shards"]):
            items = np.fromfile(folder / f"{shard}.items", dtype=np.int64).reshape(-1, 2)
            path, size = folder / f"{shard}.values", int(items[:, 0].sum())
            self._items.append(items)
            self._starts.append(np.concatenate([[0], items[:, 0].cumsum()]))
            empty = np.zeros(0, dtype=np.float32)
            self._values.append(np.memmap(path, np.float32, "r") if size else empty)

    def _other_data(self, why: str) -> UserError:
        return UserError(
            f"the log-probs of the reference policy in {self.folder} are not those of the data: "
            f"{why}. Remove that folder, and they are computed again."
        )

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item: dict[str, Tensor] = self.dataset[index]
        if index < 0:  # an empty slot
            width = max(item[mask].size(0) for mask in self.columns.values()) - 1
            return {**item, **{name: torch.zeros(width) for name in self.columns}}
        place, shard = divmod(index, len(self._items))
        count, expected = self._items[shard][place].tolist()
        if checksum(item) != expected:
            raise self._other_data(f"item {index} is another")
        start = self._starts[shard][place]
        values = torch.from_numpy(np.array(self._values[shard][start : start + count]))
        counts = [item[mask][1:] != 0 for mask in self.columns.values()]
        own = torch.split(values, [int(each.sum()) for each in counts])
        for name, counted, logprobs in zip(self.columns, counts, own, strict=True):
            item[name] = torch.zeros(counted.size(0))
            item[name][counted] = logprobs
        return item


def with_reference_log_probs(
    model: ReferencePolicyMixin, dataset: Any, root: Path, checkpoint: Path, name: str
) -> WithReferenceLogProbs:
    """`dataset` (`name`) with the log-probs of the reference policy, which is `model` with its
    present weights (without adapters), those of `checkpoint`. They are computed unless a job
    before has, each data-parallel rank a share, in files that all ranks must see; all call it. Of
    several jobs that compute the same, the first one that is ready keeps its files.

    Raises:
        SaveError: a file cannot be written; on all ranks.
        UserError: as `WithReferenceLogProbs`.
    """
    folder = root / f"{name}-{_key(model, dataset, checkpoint)}"
    if not _is_whole(folder):
        with model.as_reference_policy():
            _compute(model, dataset, folder, name)
    return WithReferenceLogProbs(dataset, folder, model.REFERENCE_COLUMNS)


def _key(model: ReferencePolicyMixin, dataset: Any, checkpoint: Path) -> str:
    """A hash of all that the log-probs depend on but the split; what rank 0 finds counts."""
    weights, lines, how = model.checksum_of_base(), dataset.lines, dataset.encoder.depends_on()
    # But keys that say nothing about the log-probs (of the tokenizer, its fingerprint does).
    free = ("parallel_size", "_dropout")
    network = [
        name
        for name in ARCHITECTURE_KEYS
        if not name.startswith("tokenizer.") and not name.endswith(free)
    ]
    return on_rank_zero(
        lambda: key(
            [FORM, code_fingerprint()],
            [weights, _fingerprint_of_checkpoint(checkpoint), str(model.cfg.precision)],
            {name: str(OmegaConf.select(model.cfg, name)) for name in network},
            [tokenizer_fingerprint(model.tokenizer), settings_of(model.tokenizer, *how)],
            [type(dataset).__name__, dataset.seq_length, [c.fields for c in lines.columns]],
            [file_fingerprint(file) for source in lines.sources for file in source.files],
            hashlib.sha256(dataset.documents.tobytes()).hexdigest(),
        )
    )


def _fingerprint_of_checkpoint(path: Path) -> str:
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    return key([(str(each.relative_to(path)), file_fingerprint(each)) for each in files])


def _is_whole(folder: Path) -> bool:
    """Whether a folder has the files that were written to it; a damaged one is removed."""
    there, sealed = on_rank_zero(lambda: (folder.is_dir(), (folder / MANIFEST).is_file()))
    if not there:
        return False
    try:
        if not sealed:
            raise DamagedFileError(f"{folder} is damaged or incomplete: it has no {MANIFEST}.")
        check_files_together(folder)
    except DamagedFileError as error:
        what = str(error).split(" (see")[0].rstrip(".")
        logging.warning(f"{what}. The reference policy's log-probs are computed again.")
        # Another job may be removing it too.
        with failing_together(folder), contextlib.suppress(FileNotFoundError):
            if parallel_state.get_rank() == 0:
                shutil.rmtree(folder)
        return False
    # Another job may have found it damaged and removed it just now.
    return on_rank_zero((folder / MANIFEST).is_file)


def _compute(model: ReferencePolicyMixin, dataset: Any, folder: Path, name: str) -> None:
    is_first = parallel_state.get_rank() == 0
    token = on_rank_zero(lambda: secrets.token_hex(8))
    partial = folder.parent.absolute() / f"partial_{token}"
    logging.info(f"the reference policy's log-probs of {name} are computed, for {folder}")
    try:
        with failing_together(folder.parent):
            if is_first:
                folder.parent.mkdir(parents=True, exist_ok=True)
                leftovers.claim(folder.parent, "partial_", token).mkdir()
        _write_shards(model, dataset, partial, folder, name)
        with failing_together(folder):
            if is_first:
                shards = parallel_state.get_data_parallel_world_size()
                meta = {"items": len(dataset), "shards": shards}
                (partial / META).write_text(json.dumps(meta))
                write_manifest(partial, {})
                try:
                    partial.rename(folder)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
                    logging.info(f"another job has written {folder} in the meantime")
    finally:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)


def _write_shards(
    model: ReferencePolicyMixin, dataset: Any, partial: Path, folder: Path, name: str
) -> None:
    """Of each TP x PP x CP group one rank writes a shard to `partial`, which will be `folder`."""
    shard = parallel_state.get_data_parallel_rank()
    shards = parallel_state.get_data_parallel_world_size()
    rank = parallel_state.get_rank()
    writes = rank == parallel_state.get_model_parallel_src_rank()
    columns, samples = model.REFERENCE_COLUMNS, len(model.REFERENCE_COLUMNS)
    size = TOGETHER * max(1, model.forward_micro_batch_size // samples)
    steps = -(-len(dataset) // (shards * size))  # of the rank with the most items
    with failing_together(folder):
        writer = ShardWriter(partial, shard) if writes else None
    for step in tqdm(range(steps), desc=f"Reference: {name}", disable=rank != 0):
        places = range(shard + step * size * shards, len(dataset), shards)[:size]
        items = [dataset[place] for place in places]
        # Ranks that hold each other's experts must make equally many passes.
        logprobs = model.get_ref_policy_logprobs(default_collate(items or [dataset[0]]))
        rows = torch.stack(logprobs.chunk(samples), dim=1).cpu()
        # In each step, because a rank that left alone would have the others wait for it.
        with failing_together(folder):
            if writer is not None:
                for item, row in zip(items, rows, strict=False):
                    writer.add(item, columns, row.unbind())
    with failing_together(folder):
        if writer is not None:
            writer.close()
