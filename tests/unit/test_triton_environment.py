# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What Triton's Python backend needs of a process."""

import os
import sysconfig

import pytest

from nemo_aligner.core.errors import UserError
from nemo_aligner.servers import triton_environment


def test_triton_environment_gets_the_library_path_once(monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere")
    triton_environment.prepare_triton_environment()
    triton_environment.prepare_triton_environment()
    paths = os.environ["LD_LIBRARY_PATH"].split(":")
    assert paths == [triton_environment.find_libpython(), "/somewhere"]
    assert os.path.exists(os.path.join(paths[0], sysconfig.get_config_var("INSTSONAME")))


def test_triton_environment_refuses_a_python_without_shared_library(monkeypatch):
    monkeypatch.setattr(triton_environment, "find_libpython", lambda: None)
    with pytest.raises(UserError, match="libpython.*--enable-shared"):
        triton_environment.prepare_triton_environment()
