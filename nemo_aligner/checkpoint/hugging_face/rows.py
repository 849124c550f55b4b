# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Which rows of which tensors of Hugging Face make one tensor of Megatron Core.

A tensor of Megatron Core is a sequence of *runs*, each of them consecutive rows (entries along the
first dimension) of one tensor of Hugging Face. The same runs serve reading, in parts for the ranks
of a split, and writing.

Names are templates with `{layer}` and, for the weights of an expert, `{expert}`; they end in a dot
or in the name's last word, to which `weight` or `bias` is added.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Heads:
    """Sizes of the attention."""

    groups: int  # query groups; each has one key and one value head
    queries: int  # query heads of a group
    size: int  # of a head


@dataclass(frozen=True)
class Run:
    """`count` rows of the tensor `name` from row `start` on."""

    name: str
    start: int
    count: int


@dataclass(frozen=True)
class Rule:
    """How tensors of Hugging Face make one of Megatron Core; the base class takes one as it is."""

    names: Sequence[str]  # of the tensors of Hugging Face
    transposed: bool = False  # whether Hugging Face stores the matrices transposed (GPT-2 does)
    # a tensor of Hugging Face, with its kind, that a layer must have for the rule to apply to it;
    # None: it applies to all
    beside: str | None = None

    def runs(self, rows: int, heads: Heads) -> list[Run]:
        """The runs of a tensor of Megatron Core with `rows` rows, in its order."""
        (name,) = self.names
        return [Run(name, 0, rows)]


class _Joined(Rule):
    """Tensors of equal size, one after the other."""

    def runs(self, rows: int, heads: Heads) -> list[Run]:
        share = rows // len(self.names)
        return [Run(name, 0, share) for name in self.names]


class _Attention(Rule):
    """Queries, keys and values, which Megatron Core stores by query group: the queries of a group,
    then its key head, then its value head. Hugging Face has three tensors, or one with all
    queries, all keys and all values.
    """

    def runs(self, rows: int, heads: Heads) -> list[Run]:
        query, key = heads.queries * heads.size, heads.size
        widths = (query, key, key)
        if len(self.names) == 1:
            names = [self.names[0]] * 3
            starts = [0, heads.groups * query, heads.groups * (query + key)]
        else:
            names, starts = list(self.names), [0, 0, 0]
        return [
            Run(name, start + group * width, width)
            for group in range(heads.groups)
            for name, start, width in zip(names, starts, widths, strict=True)
        ]


def whole(name: str, transposed: bool = False, beside: str | None = None) -> Rule:
    return Rule((name,), transposed, beside)


def joined(*names: str) -> Rule:
    """The tensors `names`, of equal size, one after the other: an MLP's gate and its partner."""
    return _Joined(names)


def attention(*names: str, transposed: bool = False) -> Rule:
    """Queries, keys and values: three names, or the name of one tensor that holds all."""
    return _Attention(names, transposed)
