# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""How the ranks share the weights and the samples while they generate.

Below, tp and pp are the tensor- and pipeline-parallel sizes of generation, TP and PP those of
training. A *copy* is the ranks that hold the weights once between them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup

from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import gathered


@dataclass(frozen=True)
class Split:
    """Groups of this rank while it generates."""

    tensor: ProcessGroup  # ranks that divide each weight
    pipeline: ProcessGroup  # ranks that divide the layers, first stage first
    copy: ProcessGroup  # both, by global rank; its last tp ranks are the last stage
    embedding: ProcessGroup | None  # first and last stage of `pipeline`; None outside of both
    # groups whose ranks have the same samples and divide them among each other
    dividing: tuple[ProcessGroup, ...]
    # ranks that have different samples and generate all of them together, in the order of the
    # ranks; None: this rank's copy has one policy's samples
    joined: ProcessGroup | None
    # gives the chunks to decode with, from those of training; all ranks of the copy call it
    weights: Callable[[Sequence[Any]], Sequence[Any]]

    @property
    def tensor_ranks(self) -> int:
        return torch.distributed.get_world_size(self.tensor)

    @property
    def pipeline_ranks(self) -> int:
        return torch.distributed.get_world_size(self.pipeline)


def training_split() -> Split:
    """Generation with the weights as they are trained."""
    tensor = parallel_state.get_tensor_model_parallel_group()
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    copy = parallel_state.get_tensor_and_pipeline_parallel_group()
    assert tensor is not None and pipeline is not None and copy is not None
    return Split(tensor, pipeline, copy, None, _dividing_context(), None, lambda chunks: chunks)


def regrouped(tp: int, pp: int, weights: Callable[[Split, Sequence[Any]], Sequence[Any]]) -> Split:
    """Generation with tp x pp ranks to a copy; every rank of the job calls it.

    Where tp x pp < TP x PP, the ranks of a policy's copy hold several copies and divide its
    samples. Where it is more, data-parallel ranks hold one copy together and generate the samples
    of all of them. One of both numbers divides the other (`config.rollout_rules`).

    Args:
        weights: `Split.weights`, given the split too.
    """
    own = torch.distributed.get_process_group_ranks(
        parallel_state.get_tensor_and_pipeline_parallel_group()
    )
    place = parallel_state.get_context_parallel_rank(), parallel_state.get_data_parallel_rank()
    policies = [ranks for _, ranks in sorted(set(gathered((place, tuple(own)))))]
    together = max(tp * pp // len(own), 1)  # policies whose samples are joined
    groups: dict[str, ProcessGroup | None] = {}
    for first in range(0, len(policies), together):
        members = policies[first : first + together]
        for kind, lists in _rank_lists(members, tp, pp).items():
            for ranks in lists:
                group = torch.distributed.new_group(ranks)  # a collective of all ranks
                if torch.distributed.get_rank() in ranks:
                    groups[kind] = group
    tensor, pipeline, copy = groups["tensor"], groups["pipeline"], groups["copy"]
    assert tensor is not None and pipeline is not None and copy is not None
    dividing = groups["dividing"]
    assert dividing is not None
    split = Split(
        tensor,
        pipeline,
        copy,
        groups.get("embedding"),
        ((dividing,) if torch.distributed.get_world_size(dividing) > 1 else ())
        + _dividing_context(),
        groups["joined"] if together > 1 else None,
        lambda chunks: weights(split, chunks),
    )
    return split


def _rank_lists(policies: Sequence[Sequence[int]], tp: int, pp: int) -> dict[str, list[list[int]]]:
    """The ranks of each group of each kind within `policies`, which generate together.

    Each copy has its stages in the order of the ranks. With tp = TP and pp = PP the groups are
    those of training.
    """
    ranks = sorted(rank for policy in policies for rank in policy)
    copies = len(ranks) // (tp * pp)
    # By stage, copy and tensor-parallel rank.
    table = torch.tensor(ranks).view(pp, copies, tp)
    pipelines = table.permute(1, 2, 0).reshape(-1, pp).tolist()
    return {
        "tensor": table.view(-1, tp).tolist(),
        "pipeline": pipelines,
        "copy": table.transpose(0, 1).reshape(copies, -1).tolist(),
        "embedding": [sorted({stages[0], stages[-1]}) for stages in pipelines],
        "dividing": table.transpose(1, 2).reshape(-1, copies).tolist(),
        "joined": [list(same) for same in zip(*policies, strict=True)],
    }


def _dividing_context() -> tuple[ProcessGroup, ...]:
    group = parallel_state.get_context_parallel_group()
    if group is None or parallel_state.get_context_parallel_world_size() == 1:
        return ()
    return (group,)
