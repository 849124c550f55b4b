# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What Triton's Python backend needs of this process before it starts. Imports no PyTriton."""

import os
import sys
import sysconfig
import tempfile

from nemo_aligner.core.errors import UserError


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
