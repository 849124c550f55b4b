# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What servers and process groups need of one machine: TCP ports, and for Triton's Python backend
libpython and a short path. Imports nothing heavy.
"""

import contextlib
import os
import random
import socket
import sys
import sysconfig
import tempfile
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


# ---- Triton ----


def find_libpython() -> str | None:
    """The directory of this interpreter's shared libpython, or None."""
    name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    libdir, multiarch = (sysconfig.get_config_var(key) or "" for key in ("LIBDIR", "MULTIARCH"))
    folders = libdir, os.path.join(libdir, multiarch), os.path.join(sys.base_prefix, "lib")
    found = (each for each in folders if each and os.path.exists(os.path.join(each, name)))
    return next(found, None)


def prepare_triton_environment() -> None:
    """Have Triton's stub for Python models find libpython. `UserError`: there is no shared one."""
    directory = check_libpython()
    paths = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path]
    if directory not in paths:
        os.environ["LD_LIBRARY_PATH"] = ":".join([directory] + paths)


def check_libpython() -> str:
    """The directory of the shared libpython; `UserError` if there is none."""
    directory = find_libpython()
    if directory is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise UserError(
            f"Triton needs the shared library libpython{version}.so.1.0, but {sys.executable} has "
            f"none under {sys.base_prefix}. Use a Python built with --enable-shared (pyenv: "
            f"PYTHON_CONFIGURE_OPTS=--enable-shared; Debian: apt install libpython{version}; "
            "Docker's python images, uv and conda have it)."
        )
    return directory


def folder_of_workspaces() -> str:
    """The folder of Triton's programs and socket, whose path must stay under 108 characters."""
    return tempfile.gettempdir() if len(tempfile.gettempdir()) <= 30 else "/tmp"
