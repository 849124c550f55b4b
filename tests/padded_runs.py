# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Passes that compute all padding: as wide as the batch, with the samples in their order."""

import contextlib

from nemo_aligner.training import passes


@contextlib.contextmanager
def as_padded():
    """Inside, this process computes all padding."""

    def plan(model_chunks, tokens, _lengths, micro_batch_size, _tokens, **options):
        options["keep_order"] = options["training"]
        sizes = None, micro_batch_size, None
        return plan_of_rank(model_chunks, tokens, *sizes, **options)

    plan_of_rank, passes.plan_of_rank = passes.plan_of_rank, plan
    try:
        yield
    finally:
        passes.plan_of_rank = plan_of_rank
