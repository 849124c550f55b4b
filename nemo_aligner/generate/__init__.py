# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Text from a trained policy, in the terminal or to a file: `nemo-aligner generate`."""
