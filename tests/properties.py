# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""How many inputs the tests of properties (`test_properties_*.py`, test_samplers.py) try: few and
the same ones in each run; for a search, PROPERTY_TIMES=50 tries fifty times as many.
"""

import os

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("PROPERTY_TIMES", "1"))


def tried(examples: int) -> settings:
    """Settings of a test that tries `examples` inputs."""
    quiet = {"derandomize": True, "database": None, "deadline": None}
    checks = list(HealthCheck)
    return settings(max_examples=examples * TIMES, suppress_health_check=checks, **quiet)
