# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Where NeMo-Aligner's scripts import this name from."""

from nemo_aligner.launch.script_steps import InferenceMetricsHandler
