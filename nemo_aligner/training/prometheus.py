# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The newest metrics of a job over HTTP, for Prometheus."""

import re
from collections.abc import Mapping

from nemo.utils import logging
from prometheus_client import CollectorRegistry, Gauge, start_http_server

from nemo_aligner.core.errors import UserError

KEY = "prometheus_address"
PREFIX = "nemo_aligner_"


class PrometheusLogger:
    """Serves `http://HOST:PORT/metrics` from a thread until `finalize`: `train/loss` is the gauge
    `nemo_aligner_train_loss`, the step `nemo_aligner_step`.

    Args:
        address: `HOST:PORT`, the value of `exp_manager.prometheus_address`; port 0: a free one.

    `UserError`: it is no address, or is taken.
    """

    def __init__(self, address: str) -> None:
        host, _, port = str(address).rpartition(":")
        if not host or not port.isdigit():
            raise UserError(f"exp_manager.{KEY}={address} is not HOST:PORT, such as 0.0.0.0:9400.")
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        try:
            self._server, self._thread = start_http_server(int(port), host, self._registry)
        except (OSError, OverflowError) as error:
            raise UserError(f"exp_manager.{KEY}={address} cannot be served: {error}.") from error
        self.port = self._server.server_port
        logging.info(f"metrics for Prometheus: http://{host}:{self.port}/metrics")

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        for key, value in {**metrics, **({} if step is None else {"step": step})}.items():
            name = PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", key)
            if name not in self._gauges:
                self._gauges[name] = Gauge(name, key, registry=self._registry)
            self._gauges[name].set(value)

    def finalize(self, status: str) -> None:
        """Free the port; what is logged afterwards nobody sees."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
