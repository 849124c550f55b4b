# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`nemo-aligner convert`: checkpoints between Hugging Face's form and NeMo's.

hf-to-nemo FOLDER out.nemo     one process, no GPU, one tensor in memory at a time
nemo-to-hf in.nemo FOLDER
merge-lora ADAPTERS out.nemo   adapters with their base
nemo-info PATH                 what a checkpoint of any form holds
"""
