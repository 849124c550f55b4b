# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The former place of these names; what each import statement below names is the present one."""

from nemo_aligner.core.tokenizer import tokenizer_fingerprint
from nemo_aligner.servers.futures import FutureResult
from nemo_aligner.servers.requests import (
    calculate_inference_batch_padding_multiple,
    decode_bytes_ndarray,
    pad_batch_and_strip_sequence,
    pad_input,
    pad_rows,
    process_inputs,
)
from nemo_aligner.servers.triton_environment import find_libpython, prepare_triton_environment
from nemo_aligner.servers.triton_host import lock_method
