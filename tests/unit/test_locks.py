# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Methods that one thread at a time may run."""

import threading
import time

from nemo_aligner.servers import triton_host


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
