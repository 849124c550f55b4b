# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Files with the log-probs of a reference policy for the items of a dataset, so that they are
computed once and not in every epoch and every job.

A folder has `shards` pairs of files. Shard k has the items k, k + shards, k + 2 shards, ...: in
`k.values` float32 the log-probs of the tokens that count (column t of `[S-1]` predicts token t+1),
all samples of an item one after the other; in `k.items` int64 `[items of the shard, 2]` how many
these are, and a checksum of the item's tokens and masks. S is the width of an item. `meta.json`
says how many items and shards there are, the manifest of `checkpoint/checksums.py` that all files
are what was written.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_aligner.core.errors import UserError

META = "meta.json"


class ShardWriter:
    """Writes one shard, of this number, to a folder that exists; items come in their order. An
    `OSError` says what cannot be written.
    """

    def __init__(self, folder: Path, shard: int) -> None:
        self._values = (folder / f"{shard}.values").open("wb")
        self._path = folder / f"{shard}.items"
        self._items: list[tuple[int, int]] = []

    def add(
        self, item: Mapping[str, Tensor], columns: Mapping[str, str], rows: Sequence[Tensor]
    ) -> None:
        """Append the log-probs of an item.

        Args:
            columns: key of the log-probs in an item -> key of the mask `[S]` of the tokens that
                count.
            rows: float32 `[S-1]` each, in the order of `columns`.
        """
        values = [
            row[item[mask][1:] != 0].float()
            for mask, row in zip(columns.values(), rows, strict=True)
        ]
        self._values.write(torch.cat(values).cpu().numpy().tobytes())
        self._items.append((sum(map(len, values)), checksum(item)))

    def close(self) -> None:
        """Write what is still in memory."""
        self._values.close()
        self._path.write_bytes(np.array(self._items, dtype=np.int64).tobytes())


def checksum(item: Mapping[str, Tensor]) -> int:
    """Of the tokens and masks of an item: of all its whole numbers and masks `[S]`."""
    found = 0
    for key in sorted(item):
        tensor = item[key]
        if tensor.dim() == 1 and (key.endswith("mask") or not tensor.is_floating_point()):
            found = zlib.crc32(tensor.to(torch.int64).numpy().tobytes(), found)
    return found


class WithReferenceLogProbs(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The items of a dataset with the log-probs of a reference policy, float32 `[S-1]`, 0 where no
    token counts.

    Args:
        dataset: whose index -1 is an empty slot.
        folder: with the files, whole.
        columns: see `ShardWriter.add`.

    Raises:
        UserError: the folder is of other items; also when an item is read that it was not made of.
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
        own = values.split([int(each.sum()) for each in counts])
        for name, counted, logprobs in zip(self.columns, counts, own, strict=True):
            item[name] = torch.zeros(counted.size(0))
            item[name][counted] = logprobs
        return item
