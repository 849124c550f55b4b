# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The jobs, one module each: what it does and takes, and `main(cfg)`, which wires its parts.

The scripts of `examples/nlp/gpt/` call them with their configuration. One process per device: with
`trainer.devices=N` a job starts them itself; torchrun and srun work as well. The same command
resumes a training from the last checkpoint in `exp_manager.explicit_log_dir`. Importing a job
imports nothing heavy.
"""
