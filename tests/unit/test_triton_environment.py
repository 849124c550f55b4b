# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What Triton's Python backend needs of a process, and its methods for one thread at a time."""

import os
import sysconfig
import threading
import time

import pytest

from nemo_aligner.core.errors import UserError
from nemo_aligner.servers import triton_environment, triton_host


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


def test_lock_method_serialises_callers():
    class Counter:
        def __init__(self):
            self.lock = threading.Lock()
            self.inside = self.most = 0

        @triton_host.lock_method("self.lock")
        def enter(self):
            self.inside += 1
            self.most = max(self.most, self.inside)
            time.sleep(0.01)
            self.inside -= 1

    counter = Counter()
    threads = [threading.Thread(target=counter.enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.most == 1
