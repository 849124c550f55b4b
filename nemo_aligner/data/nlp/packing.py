# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Several SFT examples in one sequence (`packed_sequence: True`), which saves the padding.
Positions restart at each and none attends to another: loss and gradient are those of the single
examples.
"""

import bisect
import collections
import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from nemo.utils import logging

from nemo_aligner.core.tensors import batch_pad_to_fixed_len
from nemo_aligner.data.nlp.sft import Examples

Batch = dict[str, torch.Tensor]


def pack(slots: Sequence[int], size: int) -> list[list[int]]:
    """Divide items of 1 to `size` slots, in order, into packs of at most `size` slots, each into
    the (first) one that it fills best. Returns the numbers of the items of each pack.
    """
    packs: list[list[int]] = []
    rooms: list[int] = []  # the sizes of the room that open packs have, sorted
    open_packs = collections.defaultdict[int, list[int]](list)  # by room, a heap of packs
    for number, needed in enumerate(slots):
        place = bisect.bisect_left(rooms, needed)
        if place == len(rooms):
            chosen, room = len(packs), size
            packs.append([])
        else:
            room = rooms[place]
            chosen = heapq.heappop(open_packs[room])
            if not open_packs[room]:
                del rooms[place]
        packs[chosen].append(number)
        left = room - needed
        if left:
            if not open_packs[left]:
                bisect.insort(rooms, left)
            heapq.heappush(open_packs[left], chosen)
    return packs


class PackedDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Packs of the items of `dataset`, examples with known lengths. One of n tokens takes n - 1
    slots, because its last token is only ever a label.

    Items: `examples` (items of `dataset`) and `is_empty`, True for index -1, an empty slot: the
    first pack without weight in the loss. `collate_fn` makes batches.
    """

    def __init__(self, dataset: Examples) -> None:
        self.dataset = dataset
        self.size = dataset.max_seq_length
        slots = np.maximum(dataset.lengths - 1, 1)
        self.packs = pack(slots.tolist(), self.size)
        logging.info(
            f"{dataset.name} data: {len(slots)} examples in {len(self.packs)} packed sequences, "
            f"{100 * slots.sum() / (len(self.packs) * self.size):.1f} % full."
        )

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        examples = [self.dataset[number] for number in self.packs[max(index, 0)]]
        return {"examples": examples, "is_empty": index < 0}

    def collate_fn(self, items: list[dict[str, Any]]) -> Batch:
        """Collate packs as `Examples` does examples, with `packed_position_ids` int64
        [B, S] in place of `position_ids`: 0 where an example begins, and where the padding does.
        """
        rows = [self._row(item) for item in items]
        longest = max(len(row["tokens"]) for row in rows)
        is_padded = self.dataset.pad_to_max_length
        width = self.size if is_padded else min(-(-longest // 16) * 16, self.size)
        batch = {
            key: batch_pad_to_fixed_len([row[key] for row in rows], width, 0) for key in rows[0]
        }
        for row, positions in zip(rows, batch["packed_position_ids"], strict=True):
            used = len(row["tokens"])
            positions[used:] = torch.arange(width - used)
        return batch

    def _row(self, item: dict[str, Any]) -> Batch:
        """The examples of a pack one behind the other, each without its padding."""
        parts: list[Batch] = []
        for example in item["examples"]:
            used = max(len(example["tokens"]) - 1, 1)
            alone = self.dataset.collate_fn([example])
            part = {key: alone[key][0, :used] for key in ("tokens", "labels", "loss_mask")}
            parts.append({**part, "packed_position_ids": torch.arange(used)})
        row = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        if item["is_empty"]:
            row["loss_mask"] = torch.zeros_like(row["loss_mask"])
        return row
