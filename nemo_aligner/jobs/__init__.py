# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The jobs, one function each, which says what the job does and takes, and wires its parts.

The command `nemo-aligner` and the scripts of `examples/nlp/gpt/` call them with their
configuration. One process per device: with `trainer.devices=N` a job starts them itself; torchrun
and srun work as well. The same command resumes a training from the last checkpoint in
`exp_manager.explicit_log_dir`. Importing a job imports nothing heavy.
"""
