# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The content of files, as far as they are known by it."""

from pathlib import Path

import numpy as np

# Data files above this size (bytes) are known by their size and these samples of their content.
SMALL = 4 << 20
SAMPLES, SAMPLE_BYTES = 64, 4096


def content_samples(path: Path) -> bytes:
    """The content of a file; of one above `SMALL`, samples of it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= SMALL:
            return file.read()
        starts = np.linspace(0, size - SAMPLE_BYTES, SAMPLES).astype(np.int64).tolist()
        return b"".join((file.seek(start), file.read(SAMPLE_BYTES))[1] for start in starts)
