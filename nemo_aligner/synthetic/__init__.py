# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What the scripts in examples/nlp/data and examples/nlp/cai share, whose data models write or
label.
"""
