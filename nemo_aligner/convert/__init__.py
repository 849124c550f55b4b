# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`nemo-aligner convert`: checkpoints between Hugging Face's form, NeMo's and Megatron-LM's, in
one process without a GPU, with one tensor in memory at a time.
"""
