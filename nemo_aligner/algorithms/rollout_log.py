# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""How trainers with rollouts log: timings of the slowest rank, tables of samples, progress."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from nemo_aligner.core.interfaces import Logger
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import all_reduce_dict
from nemo_aligner.training.timers import ScopedTimer

if TYPE_CHECKING:
    import pandas as pd

TABLE_COLUMNS = ["step", "prompt", "response", "reward"]
TRAIN_TABLE_ROWS, VAL_TABLE_ROWS = 1, 5
# Loggers such as W&B upload the whole table each time: in a long run a table of all rows would
# cost more with every step. tables.jsonl has all of them.
KEPT_ROWS = 200
QUIET_S = 60.0  # between two states of the bar in a file
SHOWN = (  # metrics beside the bar, those of them that a job has
    "train_rewards",
    "train_global_rewards",
    "train_selected_rewards",
    "train_init_policy_kl",
    "train_generation_length",
    "train_global_response_lengths_mean",
    "train_generated_tokens_per_s",
    "train_loss",
    "train_critic_loss",
    "val_rewards",
    "val_global_rewards",
    "val_loss",
    "train_tokens_per_s",
    "train_mfu",
)


def consume_timings(*timers: ScopedTimer) -> dict[str, float]:
    """Seconds by name since the last call, of the slowest rank; all ranks call it."""
    durations: dict[str, float | Tensor] = {
        name: seconds for timer in timers for name, seconds in timer.consume_durations().items()
    }
    return all_reduce_dict(
        durations, dtype=torch.float64, group=None, op=torch.distributed.ReduceOp.MAX
    )


def log_rollouts(
    logger: Logger, table: pd.DataFrame, metrics: dict[str, Any], step: int, epoch: int
) -> pd.DataFrame:
    """Log what `generate_rollouts` measured; its samples leave `metrics` for `table`, which has
    the newest ones and is returned.
    """
    table = _append_rows(table, step, metrics.pop("table"))
    logger.log_metrics(metrics | {"epoch": epoch}, step=step, prefix="train_rollouts/")
    logger.log_table(key="table/train_rollouts", dataframe=table, step=step)
    return table


def log_validation(
    logger: Logger,
    table: pd.DataFrame,
    metrics: dict[str, Any],
    timings: dict[str, float],
    step: int,
) -> pd.DataFrame:
    """Log what `run_validation` measured, and `timings`; its samples leave `metrics` for `table`,
    which has the newest ones and is returned.
    """
    samples = metrics.pop("table")
    logger.log_samples("val_samples", samples, step=step)
    table = _append_rows(table, step, samples[:VAL_TABLE_ROWS])
    logger.log_metrics(metrics, step=step, prefix="val_rollouts/")
    logger.log_table(key="table/val_rollouts", dataframe=table, step=step)
    total = timings.pop("validation_time")
    inner = {f"validation_{name}": seconds for name, seconds in timings.items()}
    logger.log_metrics({"validation_time": total} | inner, step=step, prefix="timers/")
    return table


def empty_table() -> pd.DataFrame:
    """The table of samples before the first one."""
    import pandas as pd  # takes a second to import

    return pd.DataFrame(columns=TABLE_COLUMNS, index=pd.RangeIndex(0))


def _append_rows(table: pd.DataFrame, step: int, rows: list[dict[str, Any]]) -> pd.DataFrame:
    """The newest `KEPT_ROWS` rows, with the numbers that they have in the table of all rows."""
    import pandas as pd

    new = pd.DataFrame([{"step": step} | row for row in rows], columns=TABLE_COLUMNS)
    new.index = pd.RangeIndex(table.index.stop, table.index.stop + len(new))
    # An empty table has columns of no type, which must not decide those of the result.
    return pd.concat([table, new]).tail(KEPT_ROWS) if len(table) else new.tail(KEPT_ROWS)


def progress_bar(name: str, step: int, max_steps: int) -> tqdm:
    """A bar over the steps of a run, on rank 0; in a file, a line for every `QUIET_S` seconds."""
    watched = sys.stderr.isatty()
    return tqdm(
        total=max_steps,
        initial=step,
        desc=name,
        disable=parallel_state.get_rank() != 0,
        dynamic_ncols=watched,
        file=sys.stderr if watched else _Lines(),
        mininterval=0.1 if watched else QUIET_S,
        maxinterval=10.0 if watched else QUIET_S,
        miniters=1,
    )


class _Lines:
    """A file for a bar whose states become lines of stderr."""

    def write(self, text: str) -> None:
        text = text.strip("\r\n ")
        if text:
            sys.stderr.write(f"{text}\n")

    def flush(self) -> None:
        sys.stderr.flush()


def show_progress(
    progress: tqdm, train_metrics: Mapping[str, Any], val_metrics: Mapping[str, Any]
) -> dict[str, float]:
    """Advance the bar; returns all metrics as `train_*` and `val_*`, to rank checkpoints by."""
    metrics = {f"train_{key}": float(value) for key, value in train_metrics.items()}
    metrics |= {f"val_{key}": float(value) for key, value in val_metrics.items()}
    shown = {key.removeprefix("train_"): key for key in SHOWN if key in metrics}
    values = {name: f"{metrics[key]:.4g}" for name, key in shown.items()}
    progress.set_postfix(values, refresh=False)
    progress.update(1)
    return metrics
