# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether a process runs."""

import psutil


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs and is no zombie; one that ends while it is asked does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
