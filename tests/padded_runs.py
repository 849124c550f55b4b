# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Passes that compute all padding: as wide as the batch, with the samples in their order."""

import contextlib
import runpy
from pathlib import Path

from nemo_aligner.training import megatron_steps, micro_batches

SCRIPTS = Path(__file__).resolve().parents[1] / "examples" / "nlp" / "gpt"


@contextlib.contextmanager
def as_padded():
    """Inside, this process computes all padding."""

    def plan(model_chunks, tokens, _lengths, micro_batch_size, _tokens, **options):
        options["keep_order"] = options["training"]
        return micro_batches.plan_of_rank(
            model_chunks, tokens, None, micro_batch_size, None, **options
        )

    megatron_steps.plan_of_rank = plan
    try:
        yield
    finally:
        megatron_steps.plan_of_rank = micro_batches.plan_of_rank


def run_padded(path: str) -> None:
    """Run the script of the project that is called as the file `path` is."""
    with as_padded():
        runpy.run_path(str(SCRIPTS / Path(path).name), run_name="__main__")
