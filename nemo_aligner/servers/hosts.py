# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What hosts the endpoints of a server job on rank 0: Triton (triton_host.py) or uvicorn
(asgi_host.py). The first needs PyTriton and the second uvicorn; each is imported where it runs.
"""

import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nemo_aligner.config.server_rules import read_frontend
from nemo_aligner.servers.admission import Access
from nemo_aligner.servers.schema import Endpoint, Handler


class Host(Protocol):
    """Hosts endpoints at `host:port`; see `TritonHost`."""

    name: str
    host: str
    port: int

    def start(
        self,
        endpoints: Sequence[tuple[Endpoint, Handler]],
        batcher: Mapping[str, Any],
        should_stop: Callable[[], bool],
    ) -> None:
        """Serve `endpoints`; returns once all are ready."""

    def failure(self) -> str | None:
        """Why it can serve no more; None while it can. To be called every few seconds."""

    def stop(self) -> None:
        """End it, after the last replies."""

    def kill(self) -> None:
        """End what it runs outside this process, at once."""


@dataclass(frozen=True)
class Frontend:
    """How a server job hosts its endpoints: the section `server` of its configuration."""

    kind: str = "triton"  # "triton" or "asgi"
    tls: ssl.SSLContext | None = None  # of a server that encrypts; None: it does not

    @classmethod
    def read(cls, kind: str, certificate: str | None, key: str | None) -> "Frontend":
        """Return it for these values of the configuration; `ConfigError` if they cannot work."""
        return cls(kind, read_frontend(kind, certificate, key))

    def make_host(self, host: str, port: int, access: Access) -> Host:
        if self.kind == "asgi":
            from nemo_aligner.servers.asgi_host import AsgiHost

            return AsgiHost(host, port, access, self.tls)
        from nemo_aligner.servers.triton_host import TritonHost

        return TritonHost(host, port, access)
