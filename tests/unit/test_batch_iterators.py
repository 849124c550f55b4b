# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Batch iterators in one process; several ranks are in
tests/distributed/test_batch_iterators.py.
"""

import pytest
import torch
from omegaconf import OmegaConf

from nemo_aligner.data.nlp.samplers import (
    DefaultBatchIterator,
    StoreBatchIterator,
    get_batch_iterator_cls,
)

DATASET = [10 * i for i in range(20)]
SAMPLER = [[3, 1], [0, 2], [5, 4], [7, 6]]


@pytest.fixture(params=[False, True], ids=["plain", "process group"])
def process_group(request):
    """Of one rank, or none."""
    if request.param:
        one = {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
        torch.distributed.init_process_group("gloo", **one)
    yield
    if request.param:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("cls", [DefaultBatchIterator, StoreBatchIterator])
def test_takes_one_rollout_from_the_sampler(process_group, cls):
    for _rollout in range(2):  # each has a counter of its own
        sampler_iter = iter(SAMPLER)
        assert list(cls(sampler_iter, 3, DATASET, tuple)) == [(30, 10), (0, 20), (50, 40)]
        assert next(sampler_iter) == [7, 6]


def test_choice():
    assert get_batch_iterator_cls() is DefaultBatchIterator
    for use_flask, expected in ((False, DefaultBatchIterator), (True, StoreBatchIterator)):
        section = OmegaConf.create({"use_flask": use_flask, "port": 5557})
        assert get_batch_iterator_cls(section) is expected
