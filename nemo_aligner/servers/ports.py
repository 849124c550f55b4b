# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""TCP ports for servers and process groups of one machine. Imports nothing heavy."""

import contextlib
import random
import socket
from pathlib import Path

from nemo_aligner.core.errors import UserError

SERVER_PORT = "trainer.ppo.port, or inference.port for a reward server"
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # Linux


def find_free_port(host: str = "127.0.0.1") -> int:
    """A free port; not the system's choice, which an outgoing connection may take meanwhile."""
    first_ephemeral = 32768
    with contextlib.suppress(OSError, ValueError):
        first_ephemeral = int(_EPHEMERAL_RANGE.read_text().split()[0])
    candidates = range(10000, first_ephemeral)
    # A generator of its own: jobs with the same seed must not try the same ports.
    for port in random.SystemRandom().sample(candidates, min(100, len(candidates))):
        with contextlib.suppress(UserError):
            check_port_is_free(host, port)
            return port
    with socket.socket() as probe:  # the range of outgoing connections is all there is
        probe.bind((host, 0))
        return probe.getsockname()[1]


def check_port_is_free(host: str, port: int) -> None:
    """Raise `UserError` unless a server can listen on `host:port`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise port_error(host, port, error) from error


def port_error(host: str, port: int, error: Exception, key: str = SERVER_PORT) -> UserError:
    return UserError(
        f"cannot listen on {host}:{port}: {error}. Set another port ({key}), or stop the server "
        "that uses it."
    )
