# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What the comparisons with other libraries share: random ragged batches, and a table of quantity
by library.
"""

from collections import defaultdict

import pytest
import torch
from torch import Tensor

GROUPS, GROUP_SIZE = 3, 4


class Comparisons(dict):
    """{(quantity, library): function}; a function takes a `Case` and yields pairs (ours, theirs)
    that must agree.

    Where a convention of theirs differs from ours, the function converts it, and says so. Ours
    always get NaN in the slots outside the mask (`Case.planted`), theirs 0: they multiply by the
    mask, and could not stand it.
    """

    def of(self, quantity: str, *libraries: str):
        """Register a function; with several libraries it is called with the name of each as
        well.
        """

        def register(function):
            for library in libraries:
                one = len(libraries) == 1
                self[quantity, library] = (
                    function if one else lambda case, name=library: function(case, name)
                )
            return function

        return register

    def params(self) -> list:
        return [pytest.param(*key, id="-".join(key)) for key in self]

    def check(self, quantity: str, library: str) -> None:
        for seed in range(3):
            pairs = list(self[quantity, library](Case(seed)))
            assert pairs
            for ours, theirs in pairs:
                assert ours.isfinite().all()
                torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)

    def with_one_library(self) -> set[str]:
        libraries = defaultdict(set)
        for quantity, library in self:
            libraries[quantity].add(library)
        return {quantity for quantity, names in libraries.items() if len(names) < 2}


class Case:
    """A random rollout of GROUPS prompts with GROUP_SIZE responses of any
    length each, samples in random order.
    """

    def __init__(self, seed: int):
        random = torch.Generator().manual_seed(seed)
        rows, width = GROUPS * GROUP_SIZE, 11
        self.prompt_lengths = torch.randint(1, 5, (rows,), generator=random)
        self.lengths = self.prompt_lengths + torch.randint(1, 8, (rows,), generator=random)
        columns = torch.arange(width)
        # By hand, not by create_mask: transitions of the response, [P-1, R-1).
        start, end = self.prompt_lengths[:, None] - 1, self.lengths[:, None] - 1
        self.keep = (columns >= start) & (columns < end)
        self.mask = self.keep.float()
        self.values, self.rewards, self.logprobs = (
            torch.randn(3, rows, width, generator=random) * self.mask
        )
        moved = self.logprobs + 0.5 * torch.randn(rows, width, generator=random)
        self.ref_logprobs = moved * self.mask
        self.scores = torch.randn(rows, generator=random)
        order = torch.randperm(rows, generator=random)
        self.prompts = torch.arange(GROUPS).repeat(GROUP_SIZE)[order]

    def planted(self, x: Tensor) -> Tensor:
        return torch.where(self.keep, x, torch.nan)

    def bessel(self) -> Tensor:
        """Factor from our whitening, with the variance of the sample, to that with Bessel's
        correction.
        """
        n = self.keep.sum()
        return ((n - 1) / n).sqrt()

    def token_scores(self) -> Tensor:
        """Token rewards whose sum over each sample is `scores`: what the critic-free estimators of
        verl read.
        """
        drawn = torch.rand(self.mask.shape, generator=torch.Generator().manual_seed(0))
        shares = drawn * self.mask
        return shares / shares.sum(1, keepdim=True) * self.scores[:, None]
