# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The former place of these names; what each import statement below names is the present one."""

from nemo_aligner.core.metrics import (
    correlation_moments,
    correlations_from_moments,
    explained_variance_from_moments,
    explained_variance_moments,
)
from nemo_aligner.launch.script_steps import InferenceMetricsHandler
