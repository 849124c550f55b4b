# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether jobs can run on this machine, and what to do where not: `nemo-aligner doctor`.

`packages.py` looks at Python and its packages, `machine.py` at everything else. It must run where
packages are missing: nothing beyond Python's own library is imported without a safeguard.
"""
