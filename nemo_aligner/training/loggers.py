# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Log a job's metrics with Lightning's loggers (TensorBoard, Weights & Biases, ...), in files
and for Prometheus.

`metrics.jsonl` has one line per step and family of names: `{"step": 3, "time": 1700000000.0,
"train/loss": 0.5, ...}`. `tables.jsonl` has one per table update, `{"key": ..., "step": ...,
"time": ..., "rows": [{...}]}`, with the new rows. A resumed job appends to both; where it repeats
a step, the later line counts. NaN and infinities are written as null.
"""

import errno
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo.utils import logging
from prometheus_client import CollectorRegistry, Gauge, start_http_server

from nemo_aligner.core.errors import UserError
from nemo_aligner.parallel.environment import is_rank_zero

if TYPE_CHECKING:
    import pandas


def named(family: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """`metrics` with the `family`, such as "train/", before each name."""
    return {f"{family}{key}": value for key, value in metrics.items()}


class CustomLoggerWrapper:
    """Calls many loggers and writes the files; a logger that lacks a method is skipped for it.
    `loggers` are Lightning's, or anything with some of their methods; `metrics_file` is the path
    of `metrics.jsonl`, which rank 0 writes, or None; `report` is told of new metrics, and of the
    end.
    """

    def __init__(
        self,
        loggers: Iterable[Any] | None = None,
        metrics_file: str | os.PathLike[str] | None = None,
        report: Callable[[bool], None] = lambda _is_end: None,
    ) -> None:
        self._report = report
        self.loggers = list(loggers or [])
        self._files: dict[str, _JsonLines] = {}
        self._rows_written: dict[str, int] = {}
        if metrics_file is not None and is_rank_zero():
            path = Path(metrics_file)
            tables = path.with_name("tables.jsonl")
            self._files = {"metrics": _JsonLines(path), "tables": _JsonLines(tables)}
            self._folder = path.parent

    def log_hyperparams(self, params: Any) -> None:
        self.apply_fn("log_hyperparams", params)

    def log_metrics(
        self, metrics: Mapping[str, Any], step: int | None = None, prefix: str = ""
    ) -> None:
        """Log numbers (also one-element tensors; else `TypeError`) under `prefix` + key."""
        given = named(prefix, metrics)
        numbers = {key: _number(key, value) for key, value in given.items() if value is not None}
        self.apply_fn("log_metrics", numbers, step=step)
        about = {"step": step, "time": time.time()}
        families: dict[str, dict[str, float]] = {}
        for key, number in numbers.items():
            families.setdefault(key[: key.find("/") + 1], {})[key] = number
        for family in families.values():
            self._write("metrics", about | family)
        self._report(False)

    def log_table(self, key: str, dataframe: "pandas.DataFrame", step: int | None = None) -> None:
        """Log a table that grows from call to call; the file gets the new rows. The frame has all
        rows, or the newest with `index=pandas.RangeIndex(number of the first, ...)`.
        """
        self.apply_fn("log_table", key=key, dataframe=dataframe, step=step)
        if "tables" not in self._files:
            return
        dropped = getattr(dataframe.index, "start", 0)  # only a RangeIndex has one
        seen = self._rows_written.get(key, 0) - dropped
        new = dataframe.iloc[max(seen, 0) if seen <= len(dataframe) else 0 :]
        self._rows_written[key] = dropped + len(dataframe)
        if len(new):
            rows = new.to_dict("records")
            self._write("tables", {"key": key, "step": step, "time": time.time(), "rows": rows})

    def log_samples(self, name: str, rows: list[dict[str, Any]], step: int | None = None) -> None:
        """Append all `rows` to `<name>.jsonl` beside the metrics: more than a table can show."""
        if not self._files:
            return
        file = self._files.setdefault(name, _JsonLines(self._folder / f"{name}.jsonl"))
        for row in rows:
            file.write({"step": step, **row})

    def log_image(
        self, key: str, images: list[Any], step: int | None = None, **options: Any
    ) -> None:
        """Log images with the loggers that can; `options` (such as `caption`) are theirs."""
        self.apply_fn("log_image", key=key, images=images, step=step, **options)

    def apply_fn(self, name_of_fn: str, *args: Any, **kwargs: Any) -> None:
        """Call the method `name_of_fn` of every logger that has it; writes no file."""
        for logger in self.loggers:
            function = getattr(logger, name_of_fn, None)
            if function is not None:
                function(*args, **kwargs)

    def finalize(self, status: str = "success") -> None:
        """Flush and close, until the next call. `UserError`: lines that cannot be written."""
        self.apply_fn("finalize", status)
        problems = []
        for file in self._files.values():
            try:
                file.close()
            except UserError as error:
                problems.append(str(error))
            except OSError as error:
                problems.append(f"{file.path}: {error.strerror}.")
        self._report(True)
        if problems:
            raise UserError(" ".join(problems))

    def _write(self, name: str, record: dict[str, Any]) -> None:
        if name in self._files:
            self._files[name].write(record)


class _JsonLines:
    """A file of JSON lines, opened at the first write; lines wait in memory for space."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._number: int | None = None  # of the open file
        self._waiting = b""
        self._warned = False

    def write(self, record: dict[str, Any]) -> None:
        if self._number is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists() and self.path.stat().st_size:
                with open(self.path, "rb+") as file:
                    content = file.read()
                    if not content.endswith(b"\n"):  # a killed job left a part of a line
                        file.truncate(content.rfind(b"\n") + 1)
            self._number = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            line = json.dumps(record, allow_nan=False, ensure_ascii=False)
        except (TypeError, ValueError):  # it holds what JSON has no form for
            line = json.dumps(_plain(record), allow_nan=False, ensure_ascii=False)
        self._waiting += line.encode() + b"\n"
        error = self._write_waiting(self._number)
        if error is not None and not self._warned:
            self._warned = True
            remedy = "its lines wait in memory. Free some space before the job ends."
            logging.warning(f"{self.path}: {error.strerror}; {remedy}")

    def _write_waiting(self, number: int) -> OSError | None:
        """Write what waits; returns the error if there is no space for all of it."""
        try:
            while self._waiting:
                self._waiting = self._waiting[os.write(number, self._waiting) :]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return error
        return None

    def close(self) -> None:
        """Close the file; the next write opens it again. `UserError`: still no space for lines."""
        if self._number is None:
            return
        number, self._number = self._number, None
        try:
            error = self._write_waiting(number)
        finally:
            os.close(number)
        lost, self._waiting = len(self._waiting), b""
        if error is not None:
            raise UserError(
                f"{self.path}: {error.strerror}; its last {lost} bytes are lost. Free some space."
            )


def _number(key: str, value: Any) -> float:
    if hasattr(value, "item"):
        try:
            value = value.item()
        except (RuntimeError, ValueError):
            shape = tuple(value.shape)
            raise TypeError(f"metric {key} has shape {shape}; log one number per key.") from None
    if not isinstance(value, (bool, int, float)):
        kind = type(value).__name__
        raise TypeError(f"metric {key}={value!r} is a {kind}; log numbers, tables with log_table.")
    return value


def _plain(value: Any) -> Any:
    """`value` in types of JSON: NaN and infinities as None, tensors as lists, the rest as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # NumPy and torch
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)


# -------------------------------------------------------------------------------------- Prometheus

PROMETHEUS_KEY = "prometheus_address"


class PrometheusLogger:
    """Serves `http://HOST:PORT/metrics` from a thread until `finalize`: `train/loss` is the gauge
    `nemo_aligner_train_loss`, the step `nemo_aligner_step`.

    Args:
        address: `HOST:PORT`, the value of `exp_manager.prometheus_address`; port 0: a free one.

    `UserError`: it is no address, or is taken.
    """

    def __init__(self, address: str) -> None:
        key = f"exp_manager.{PROMETHEUS_KEY}={address}"
        host, _, port = str(address).rpartition(":")
        if not host or not port.isdigit():
            raise UserError(f"{key} is not HOST:PORT, such as 0.0.0.0:9400.")
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        try:
            self._server, self._thread = start_http_server(int(port), host, self._registry)
        except (OSError, OverflowError) as error:
            raise UserError(f"{key} cannot be served: {error}.") from error
        self.port = self._server.server_port
        logging.info(f"metrics for Prometheus: http://{host}:{self.port}/metrics")

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        for key, value in {**metrics, **({} if step is None else {"step": step})}.items():
            name = "nemo_aligner_" + re.sub(r"[^a-zA-Z0-9_]", "_", key)
            if name not in self._gauges:
                self._gauges[name] = Gauge(name, key, registry=self._registry)
            self._gauges[name].set(value)

    def finalize(self, status: str) -> None:
        """Free the port; what is logged afterwards nobody sees."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
