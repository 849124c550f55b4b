# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Files of a teacher's largest logits: one JSON object per line and example, which
`compute_topk_logits.py` writes and `KnowledgeDistillationDataset` reads.

| field | what |
|---|---|
| `tokens`, `labels`, `loss_mask` | lists of numbers [S]: an example as `SFTDataset` makes it |
| `topk_logits` | float32 [n, K]: in descending order, less the largest |
| `topk_token_ids` | int32 [n, K] |
| `log_sum_exp_logits` | float32 [n]: of all logits, less the largest |
| `top_k` | K |
| `index` | number of the example in its data set |
| `rows` | number of lines of the whole file |
| `tokenizer` | fingerprint of the teacher's tokenizer (`core/tokenizer.py`) |
| `teacher` | checksum of the teacher's weights (`MegatronGPTModel.checksum_of_base`) |
| `checksum` | XXH3 of all of these |

n counts the positions with a `loss_mask` that is not 0. The arrays are the base64 text of their
bytes (little-endian). NeMo-Aligner's own files, with nested lists of numbers for all S positions
and without the last four fields, can be read too.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from nemo_aligner.core.errors import UserError
from nemo_aligner.core.tokenizer import Tokenizer, tokenizer_fingerprint
from nemo_aligner.data.nlp.builders import build_train_valid_test_datasets
from nemo_aligner.data.nlp.fields import Record
from nemo_aligner.data.nlp.file_dataset import (
    FileDataset,
    Part,
    accepts_nemo_aligner_call,
    labelled_part,
)

EXAMPLE = ("tokens", "labels", "loss_mask")
ARRAYS = {"topk_logits": "<f4", "topk_token_ids": "<i4", "log_sum_exp_logits": "<f4"}


class TopKExample(NamedTuple):
    tokens: np.ndarray  # int64 [S], as the next
    labels: np.ndarray
    loss_mask: np.ndarray  # float32 [S]
    topk_logits: np.ndarray  # float32 [n, K]
    topk_token_ids: np.ndarray  # int64 [n, K]
    log_sum_exp_logits: np.ndarray  # float32 [n]


def to_line(
    example: TopKExample, index: int, rows: int, fingerprint: str | None, teacher: str
) -> str:
    """The line of a file for an example; `fingerprint`: of the tokenizer."""
    record = {key: getattr(example, key).tolist() for key in EXAMPLE}
    for key, dtype in ARRAYS.items():
        data = np.ascontiguousarray(getattr(example, key), dtype=dtype)
        record[key] = base64.b64encode(data.tobytes()).decode()
    record |= {"top_k": example.topk_logits.shape[1], "index": index, "rows": rows}
    record |= {"tokenizer": fingerprint, "teacher": teacher}
    return json.dumps(record | {"checksum": _checksum(record)}) + "\n"


def _checksum(record: Mapping[str, Any]) -> str:
    fields = {key: value for key, value in sorted(record.items()) if key != "checksum"}
    return xxhash.xxh3_64(json.dumps(fields).encode()).hexdigest()


def check_record(record: Record, fingerprint: str | None) -> None:
    """Refuse a record that is not whole, or of a tokenizer with another fingerprint."""
    missing = [key for key in (*EXAMPLE, *ARRAYS) if key not in record]
    if missing:
        raise UserError(
            f"the line holds no logits of a teacher: {', '.join(missing)} missing, it has "
            f"{sorted(record)}. Write the file with compute_topk_logits.py."
        )
    if "checksum" in record and record["checksum"] != _checksum(record):
        raise UserError(
            "the line is not what was written (see its checksum): copy or compute the file again."
        )
    theirs = record.get("tokenizer")
    if theirs is not None and fingerprint is not None and theirs != fingerprint:
        raise UserError(
            f"the logits are those of another tokenizer ({theirs}) than the student's "
            f"({fingerprint}); compute them with a teacher that has it."
        )


def from_record(record: Record, top_k: int | None = None) -> TopKExample:
    """From a record that `check_record` has passed; `top_k` largest logits (None: all)."""
    tokens, labels = (np.asarray(record[key], dtype=np.int64) for key in EXAMPLE[:2])
    loss_mask = np.asarray(record["loss_mask"], dtype=np.float32)
    counts = loss_mask != 0
    try:
        logits, ids, log_sum_exp = (_array(record, key, counts) for key in ARRAYS)
    except (ValueError, TypeError) as error:
        raise UserError(
            f"its arrays do not belong together ({error}); compute it again."
        ) from None
    found = int(counts.sum())
    fits = (
        logits.ndim == 2
        and logits.shape == ids.shape
        and len(logits) == len(log_sum_exp) == found
        and tokens.shape == labels.shape == loss_mask.shape
    )
    if not fits:
        raise UserError(
            f"{len(logits)} positions have logits and {found} count in the loss, over "
            f"{len(tokens)} tokens; compute it again."
        )
    if top_k is not None and top_k > logits.shape[1]:
        raise UserError(
            f"it has the {logits.shape[1]} largest logits, fewer than model.data.top_k={top_k}; "
            "set that to less, or compute more."
        )
    logits = np.ascontiguousarray(logits[:, :top_k], dtype=np.float32)
    ids, log_sum_exp = ids[:, :top_k].astype(np.int64), log_sum_exp.astype(np.float32)
    return TopKExample(tokens, labels, loss_mask, logits, ids, log_sum_exp)


def _array(record: Record, key: str, counts: np.ndarray) -> np.ndarray:
    value = record[key]
    if isinstance(value, str):
        array = np.frombuffer(base64.b64decode(value, validate=True), dtype=ARRAYS[key])
        return array if key == "log_sum_exp_logits" else array.reshape(-1, int(record["top_k"]))
    array = np.asarray(value, dtype=np.float64 if ARRAYS[key] == "<f4" else np.int64)
    return array[counts]


@accepts_nemo_aligner_call
class KnowledgeDistillationDataset(FileDataset):
    """Examples with the largest logits of a teacher; `tokenizer`: of the student. Of each position
    `top_k` are used, a key of `data_cfg` (None: all, of all files alike).

    Items: the fields of `TopKExample` as tensors, with the positions that do not count, [S, K] and
    [S], filled with 0. `collate_fn` makes batches of them.
    """

    in_chunks = True

    def __init__(
        self,
        paths: Sequence[Any],
        tokenizer: Tokenizer,
        seq_length: int,
        data_cfg: Mapping[str, Any] | None = None,
        name: str = "train",
    ) -> None:
        self.name, self.tokenizer, self.seq_length = name, tokenizer, seq_length
        self.data_cfg = {**(data_cfg or {}), "data_impl": "jsonl"}
        self.top_k: int | None = self.data_cfg.get("top_k")
        self.fingerprint = tokenizer_fingerprint(tokenizer)
        self.lines = self.checked_records(paths, ["topk", self.top_k, self.fingerprint])
        # No lines are missing, and all have as many logits.
        for path, first, count in zip(
            self.lines.paths, self.lines.first_of_file, self.lines.counts, strict=True
        ):
            rows = self.lines[first].get("rows") or 0
            if count < rows:
                raise UserError(
                    f"{path} holds {count} of {rows} lines: compute_topk_logits.py was stopped, "
                    "or the file was cut; the same command goes on where it ended."
                )
        numbers = np.unique(self.lines.numbers)
        if len(numbers) > 1:
            found = ", ".join(f"{number:g}" for number in numbers)
            raise UserError(
                f"{self.name} data: lines have {found} logits of each position; set "
                f"model.data.top_k={numbers[0]:g}, the fewest."
            )
        self.keep_within("examples")

    def _inspect(self, record: Record) -> tuple[int, float]:
        """Number of tokens, and of logits of a position."""
        check_record(record, self.fingerprint)
        example = from_record(record, self.top_k)
        size = self.tokenizer.vocab_size
        ids = example.topk_token_ids
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < size:
            raise UserError(
                f"token ids from {ids.min()} to {ids.max()}, but the tokenizer has {size}: the "
                "logits are those of another tokenizer."
            )
        return len(example.tokens), ids.shape[1]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        example = from_record(self.lines[self.documents[max(index, 0)]], self.top_k)
        counts = example.loss_mask != 0
        item = {key: torch.from_numpy(getattr(example, key)) for key in EXAMPLE}
        if index < 0:
            item["loss_mask"] = torch.zeros_like(item["loss_mask"])
        for key in ARRAYS:
            values = getattr(example, key)
            spread = np.zeros((len(counts), *values.shape[1:]), dtype=values.dtype)
            spread[counts] = values
            item[key] = torch.from_numpy(spread)
        return item

    def collate_fn(self, items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Collate items to a batch of width S, their longest length rounded up to 16, at most
        `seq_length`; see `core.types.DistillationBatch`.
        """
        longest = max(len(item["tokens"]) for item in items)
        width = min(-(-longest // 16) * 16, self.seq_length)
        ends = {"tokens": self.tokenizer.eos_id, "labels": self.tokenizer.eos_id}
        return {
            key: torch.stack([_padded(item[key], width, ends.get(key, 0)) for item in items])
            for key in items[0]
        }

    def parts(self, item: dict[str, torch.Tensor], padding: int | None) -> tuple[Part, ...]:
        return (labelled_part(*(item[name] for name in EXAMPLE)),)


def _padded(values: torch.Tensor, width: int, value: int) -> torch.Tensor:
    behind = (0, 0) * (values.dim() - 1)
    return torch.nn.functional.pad(values, (*behind, 0, width - len(values)), value=value)


build_train_valid_test_knowledge_distillation_datasets = partial(
    build_train_valid_test_datasets, KnowledgeDistillationDataset
)
