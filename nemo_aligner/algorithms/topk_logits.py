# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A teacher writes its largest logits for the examples of a data set (`compute_topk_logits.py`),
in whole lines in the order of the examples; a job that was stopped goes on where it ended.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from nemo.utils import logging

from nemo_aligner.core.errors import UserError
from nemo_aligner.core.masks import counted_lengths
from nemo_aligner.core.tokenizer import tokenizer_fingerprint
from nemo_aligner.data.nlp.growing_files import append_lines, complete_lines
from nemo_aligner.data.nlp.topk_logits import EXAMPLE, TopKExample, check_record, to_line
from nemo_aligner.models.nlp.gpt.megatron_gpt_knowledge_distillation import TopKTeacherModel
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import gathered, on_rank_zero


class _Source(NamedTuple):
    tokenizer: str | None  # its fingerprint
    teacher: str  # checksum of the weights


def write_topk_logits(
    model: TopKTeacherModel,
    dataset: Any,
    path: Path,
    top_k: int,
    first: int = 0,
    last: int | None = None,
) -> None:
    """Write the `top_k` largest logits of the examples `first` to `last` (None: to the end) to
    `path`, where lines of the same examples stay; all ranks call it, rank 0 writes.

    Raises:
        UserError: on all ranks: too many logits or examples, or a file with other lines.
        SaveError: the file cannot be written; on all ranks.
    """
    size = model.tokenizer.vocab_size
    if top_k > size:
        raise UserError(f"top_k={top_k} is above the {size} tokens of the vocabulary; lower it.")
    last = len(dataset) - 1 if last is None else last
    if not 0 <= first <= last < len(dataset):
        raise UserError(
            f"start_from_idx={first} to end_at_idx={last} (inclusive) are not examples of the "
            f"data set; choose from 0 to {len(dataset) - 1}."
        )
    model.set_eval()
    rows = last - first + 1
    source = _Source(tokenizer_fingerprint(model.tokenizer), model.checksum_of_base())

    def check(number: int, line: bytes) -> None:
        _check_line(line, path, dataset, top_k, first + number, rows, source)

    done = on_rank_zero(lambda: complete_lines(path, check))
    if done:
        logging.info(f"{path} holds {done} of {rows} lines already")
    for start in range(first + done, last + 1, model.cfg.global_batch_size):
        stop = min(start + model.cfg.global_batch_size, last + 1)
        lines = _lines(model, dataset, range(start, stop), top_k, rows, source)
        on_rank_zero(partial(append_lines, path, lines))
        logging.info(f"{stop - first} of {rows} examples are in {path}")


def _lines(
    model: TopKTeacherModel, dataset: Any, numbers: range, top_k: int, rows: int, source: _Source
) -> list[str]:
    size = parallel_state.get_data_parallel_world_size()
    mine = numbers[parallel_state.get_data_parallel_rank() :: size]
    chosen = mine or numbers[:1]  # one with nothing to do takes part in the exchange of experts
    batch = dataset.collate_fn([dataset[number] for number in chosen])
    mask = batch["loss_mask"]
    lengths = counted_lengths(mask, mask.size(1))
    top = model.top_logits(batch["tokens"], lengths, top_k)
    logits, ids, log_sum_exp = (part.cpu().numpy() for part in top[:3])
    found = {}
    for row, number in enumerate(mine):
        length = int(lengths[row])
        counts = np.flatnonzero(mask[row].numpy())
        example = TopKExample(
            tokens=batch["tokens"][row, :length].numpy(),
            labels=batch["labels"][row, :length].numpy(),
            loss_mask=mask[row, :length].numpy(),
            topk_logits=logits[row, counts],
            topk_token_ids=ids[row, counts],
            log_sum_exp_logits=log_sum_exp[row, counts],
        )
        found[number] = to_line(example, number, rows, *source)
    parts = gathered(found, parallel_state.get_data_parallel_group())
    lines = {number: line for part in parts for number, line in part.items()}
    return [lines[number] for number in numbers]


def _check_line(
    line: bytes, path: Path, dataset: Any, top_k: int, number: int, rows: int, source: _Source
) -> None:
    where = f"output_path={path}, line of example {number}"
    try:
        record = json.loads(line)
        check_record(record, source.tokenizer)
    except (ValueError, UserError) as error:
        raise UserError(f"{where}: {error} To start afresh, remove the file.") from None
    expected = {"index": number, "rows": rows, "top_k": top_k, "teacher": source.teacher}
    differs = [f"{key}={record.get(key)}" for key, v in expected.items() if record.get(key) != v]
    if not differs:
        batch = dataset.collate_fn([dataset[number]])
        length = int(counted_lengths(batch["loss_mask"], batch["loss_mask"].size(1)))
        same = {key: record[key] == batch[key][0, :length].tolist() for key in EXAMPLE}
        differs = [f"other {key}" for key in EXAMPLE if not same[key]]
    if differs:
        raise UserError(
            f"{where}: it holds the logits of another teacher, data set or command "
            f"({', '.join(differs)}); give another output_path, or remove the file."
        )
