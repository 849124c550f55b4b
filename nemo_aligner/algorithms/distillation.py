# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""On-policy distillation (generalized knowledge distillation, arXiv:2306.13649, algorithm 1): the
supervised loop with a served teacher's logits, in a share of the batches on the student's own
responses. And the largest logits that a teacher writes for the examples of a data set, in their
order (`compute_topk_logits.py`); a job that was stopped goes on where it ended.

Shapes: B samples on this data-parallel rank, S padded length.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from nemo.utils import logging
from torch import Tensor

from nemo_aligner.algorithms.supervised import SupervisedTrainer
from nemo_aligner.core.errors import UserError
from nemo_aligner.core.tensors import counted_lengths, sample_seeds
from nemo_aligner.core.tokenizer import tokenizer_fingerprint
from nemo_aligner.core.types import ResponseBatch
from nemo_aligner.data.nlp.index_files import append_lines, complete_lines
from nemo_aligner.data.nlp.topk_logits import EXAMPLE, TopKExample, check_record, to_line
from nemo_aligner.generation import GenerationOutput
from nemo_aligner.models.nlp.gpt.megatron_gpt_knowledge_distillation import TopKTeacherModel
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import gathered, on_rank_zero, sum_over_dp
from nemo_aligner.parallel.device import get_device
from nemo_aligner.servers.teachers import RemoteTeacherClient


class OnPolicyDistillationTrainer(SupervisedTrainer):
    """Trains a student on what a served `teacher` says of responses; every rank has one.

    Whether an update is on-policy is drawn with probability `fraction` (lambda in the paper) from
    `model.seed` and the step alone, so that a resumed job goes on with the same. The others are
    those of `SupervisedTrainer`, `cfg` is `trainer.knowledge_distillation`.
    """

    JOB = ("gpt_knowledge_distillation", "trainer.knowledge_distillation")

    def __init__(
        self, *args: Any, teacher: RemoteTeacherClient, fraction: float, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.teacher, self.fraction = teacher, fraction
        self.seed = int(self.model.cfg.seed)

    def is_on_policy(self, step: int) -> bool:
        # Samples use streams of index >= 0 of this step.
        number = sample_seeds(self.seed, step, torch.tensor([-2]))[0]
        return float(number) / 2**63 < self.fraction

    def train_single_step(self, batch: ResponseBatch) -> dict[str, float]:
        metrics = {"on_policy": float(self.is_on_policy(self.step))}
        if metrics["on_policy"]:
            with self.timer("generate_time"):
                batch, ended = self.with_own_responses(batch)
            metrics["fraction_of_samples_properly_ended"] = _mean_over_dp(ended.float())
        metrics["response_length"] = _mean_over_dp(batch["loss_mask"].sum(-1))
        with self.timer("teacher_time"):
            with_logits = self.with_logits(batch)
        return self.train_on(with_logits, metrics)

    def validation_step(self, batch: Any) -> tuple[float, Mapping[str, float | Tensor]]:
        return super().validation_step(self.with_logits(batch))

    def with_own_responses(self, batch: ResponseBatch) -> tuple[ResponseBatch, Tensor]:
        """The student's responses to the prompts of `batch`, and whether each ended, bool [B]."""
        lengths = batch["prompt_lengths"]
        generated = self.model.respond(
            batch["tokens"][:, : int(lengths.max())],
            lengths,
            sample_seeds(self.seed, self.step, batch["idx"]),
        )
        return response_batch(batch, generated), generated.is_end

    def with_logits(self, batch: ResponseBatch) -> dict[str, Tensor]:
        longest = int(batch["lengths"].max())
        tokens, labels, mask = (
            batch[key][:, :longest] for key in ("tokens", "labels", "loss_mask")
        )
        logits = self.teacher.logits(tokens, batch["lengths"])
        return {"tokens": tokens, "labels": labels, "loss_mask": mask, **logits._asdict()}


def response_batch(batch: ResponseBatch, generated: GenerationOutput) -> ResponseBatch:
    """`batch` with the generated responses in place of its own; empty slots stay empty."""
    tokens = generated.response_tokens.cpu()
    lengths, prompts = generated.response_lengths.cpu(), batch["prompt_lengths"]
    label = torch.arange(1, tokens.size(1) + 1)  # the position of the label of each column
    counts = (label >= prompts[:, None]) & (label < lengths[:, None])
    counts &= batch["loss_mask"].ne(0).any(-1, keepdim=True)
    return {
        **batch,
        "tokens": tokens,
        "labels": tokens.roll(-1, 1),  # its last column never counts
        "loss_mask": counts.float(),
        "lengths": lengths,
    }


def _mean_over_dp(values: Tensor) -> float:
    """Mean over the samples of all data-parallel ranks; all call it."""
    numbers = torch.tensor([float(values.double().sum()), len(values)], dtype=torch.float64)
    total, count = sum_over_dp(numbers.to(get_device())).tolist()
    return float(total / count)


# -------------------------------------------------------------- logits that a teacher has written


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
