# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The logger in front of many: what reaches the loggers, and what the JSON lines hold."""

import errno
import json
import logging
import os
from contextlib import nullcontext

import numpy as np
import pandas as pd
import pytest
import torch

from nemo_aligner.algorithms import training_loop
from nemo_aligner.core.errors import UserError
from nemo_aligner.parallel.environment import is_rank_zero
from nemo_aligner.training import loggers
from nemo_aligner.training.loggers import CustomLoggerWrapper
from nemo_aligner.training.passes import forget_token_counts
from tests.ppo_fakes import FakeLogger, make_trainer


class Recorder:
    """A logger with some of the methods only."""

    def __init__(self):
        self.calls = []

    def log_metrics(self, metrics, step=None):
        self.calls.append(("metrics", metrics, step))

    def log_hyperparams(self, params):
        self.calls.append(("hyperparams", params))


class TableRecorder(Recorder):
    def log_table(self, key, dataframe, step):
        self.calls.append(("table", key, len(dataframe), step))

    def finalize(self, status):
        self.calls.append(("finalize", status))


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_logger_without_the_method_is_skipped():
    plain, rich = Recorder(), TableRecorder()
    logger = CustomLoggerWrapper([plain, rich])
    logger.log_table("table/train", pd.DataFrame({"a": [1]}), step=1)
    logger.log_image("image", [], step=1)
    logger.log_hyperparams({"lr": 1})
    logger.finalize()
    assert plain.calls == [("hyperparams", {"lr": 1})]
    calls = [("table", "table/train", 1, 1), ("hyperparams", {"lr": 1})]
    assert rich.calls == [*calls, ("finalize", "success")]


def test_metrics_file(tmp_path):
    logger = CustomLoggerWrapper(None, tmp_path / "new" / "metrics.jsonl")
    values = {"a": 1, "b": torch.tensor([2.5]), "c": np.float32(0.5)}
    values |= {"d": float("nan"), "e": -float("inf"), "f": None}
    logger.log_metrics(values, step=7, prefix="x/")
    (line,) = read(tmp_path / "new" / "metrics.jsonl")
    assert line.pop("time") > 0
    assert line == {"step": 7, "x/a": 1, "x/b": 2.5, "x/c": 0.5, "x/d": None, "x/e": None}


@pytest.mark.parametrize("failed", [False, True])
def test_a_step_calls_a_logger_once_for_each_number(tmp_path, failed):
    """Its updates are 1 and 2, and it is 0; an error loses nothing that was measured before."""
    shown, trainer = Recorder(), make_trainer(fail_at_train=0 if failed else None)
    trainer.logger = CustomLoggerWrapper([shown], tmp_path / "metrics.jsonl")
    forget_token_counts()  # of other tests in this process
    with pytest.raises(RuntimeError, match="critic lost") if failed else nullcontext():
        trainer.run_step()
    assert [step for _, _, step in shown.calls] == [1, 2, 0]
    families = [
        (line["step"], {key.partition("/")[0] for key in [*line][2:]})
        for line in read(tmp_path / "metrics.jsonl")
    ]
    of_the_step = ["train_rollouts"] if failed else ["train_rollouts", "timers", "speed"]
    assert families == [(n, {"train_optim"}) for n in (1, 2)] + [(0, {x}) for x in of_the_step]
    assert len(read(tmp_path / "timeline.jsonl")) > 5


@pytest.mark.parametrize("value", ["text", torch.zeros(2), np.zeros(2), {"a": 1}])
def test_only_numbers_are_metrics(value):
    with pytest.raises(TypeError, match="metric train/loss"):
        CustomLoggerWrapper([]).log_metrics({"loss": value}, prefix="train/")


@pytest.mark.parametrize("freed", [True, False])
def test_lines_wait_while_there_is_no_space(tmp_path, monkeypatch, caplog, freed):
    """The system takes a line and a half, then nothing."""
    path, real, room = tmp_path / "metrics.jsonl", os.write, [70]

    def write(number, data):
        taken = min(room[0], len(data))
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        room[0] -= taken
        return real(number, data[:taken])

    monkeypatch.setattr(loggers.os, "write", write)
    logger = CustomLoggerWrapper(None, path)
    with caplog.at_level(logging.WARNING, logger="nemo_logger"):
        for step in range(5):
            logger.log_metrics({"a": step}, step=step)
    assert path.stat().st_size == 70
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"{path}: No space left on device" in said
    if freed:
        room[0] = 10**6
        logger.finalize()
        assert [line["a"] for line in read(path)] == list(range(5))
    else:
        logger.log_samples("val_samples", [{"prompt": "a"}])
        with pytest.raises(UserError, match="metrics.jsonl: No space left.* bytes are lost") as e:
            logger.finalize()
        assert "val_samples.jsonl: No space left" in str(e.value)
        room[0] = 10**6
        logger.log_metrics({"a": 5}, step=5)  # the torn line goes
        assert [line["a"] for line in read(path)] == [0, 5]


def test_tables_stay_small_and_the_file_holds_each_row_once(tmp_path, monkeypatch):
    monkeypatch.setattr(training_loop, "KEPT_ROWS", 3)
    shown = FakeLogger()
    logger = CustomLoggerWrapper([shown], tmp_path / "metrics.jsonl")
    table = training_loop.empty_table()
    for step, count in enumerate([1, 1, 0, 3, 2]):
        rows = [{"prompt": "p", "response": "r", "reward": 0.5}] * count
        table = training_loop.log_table(logger, "table/train_rollouts", table, rows, step)
    sent = [[row["step"] for row in rows] for _, _, rows in shown.tables]
    assert sent == [[0], [0, 1], [0, 1], [3, 3, 3], [3, 4, 4]]
    assert list(table.columns) == ["step", "prompt", "response", "reward"]
    written = [line["rows"] for line in read(tmp_path / "tables.jsonl")]
    assert [[row["step"] for row in rows] for rows in written] == [[0], [1], [3] * 3, [4] * 2]


@pytest.mark.parametrize(
    ("env", "answer"),
    [
        ({}, True),
        ({"RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"RANK": "8", "LOCAL_RANK": "0"}, False),
        ({"SLURM_PROCID": "1"}, False),
        ({"LOCAL_RANK": "1"}, False),
        ({"LOCAL_RANK": "0", "NODE_RANK": "1"}, False),
    ],
)
def test_only_rank_zero_writes(env, answer, monkeypatch, tmp_path):
    for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert is_rank_zero() is answer
    CustomLoggerWrapper([], tmp_path / "metrics.jsonl").log_metrics({"a": 1})
    assert (tmp_path / "metrics.jsonl").exists() is answer
