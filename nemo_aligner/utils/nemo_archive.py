# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The former place of these names; what each import statement below names is the present one."""

from nemo_aligner.checkpoint.nemo_archive import (
    ARTIFACT_KEYS,
    ARTIFACT_PREFIX,
    CONFIG_FILE,
    WEIGHTS_FOLDER,
    check_restore_path,
    read_config,
    weights_folder,
)
from nemo_aligner.checkpoint.nemo_writing import write_nemo
