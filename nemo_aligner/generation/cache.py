# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The cache of keys and values of a batch that is decoded, and attention over it.

Shapes: c slots of the cache, M positions of each, np heads, ng query groups and hn channels per
head on this rank, s tokens that a pass feeds to each of its b rows. Keys are stored rotated.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class AttentionSettings:
    layer: int  # number of the layer in the cache
    scale: float | None  # of the scores; None is 1 / sqrt(hn)
    window: int | None  # positions before its own that each position attends to; None: all
    softcap: float | None = None  # c: scores x become c tanh(x / c)


class KeyValueCache:
    """Keys and values `[2, c, ng, M, hn]` of the layers of this pipeline stage: attention reads
    all positions of a group one after the other. The width M grows with `reserve`.
    """

    def __init__(self, slots: int, layers: int) -> None:
        self.slots = slots
        self.width = 0
        self._layers: list[Tensor | None] = [None] * layers

    def reserve(self, width: int) -> None:
        more = width - self.width
        if more <= 0:
            return
        self.width = width
        for number, layer in enumerate(self._layers):
            if layer is not None:
                self._layers[number] = F.pad(layer, (0, 0, 0, more))

    def layer(self, number: int, like: Tensor) -> Tensor:
        """Keys and values of a layer; `like` `[..., ng, 2, hn]` has their sizes, dtype and device.
        They begin as zeros: what lies beyond a row's length is masked, but NaN would not be.
        """
        layer = self._layers[number]
        if layer is None:
            groups, two, channels = like.shape[-3:]
            layer = like.new_zeros((two, self.slots, groups, self.width, channels))
            self._layers[number] = layer
        return layer

    def copy(self, pairs: list[tuple[int, int]], width: int) -> None:
        """Copy the first `width` positions for all pairs (from, to) of slots at once."""
        if not pairs:
            return
        source, target = torch.tensor(pairs).T
        for layer in self._layers:
            if layer is not None:
                layer[:, target, :, :width] = layer[:, source, :, :width]


class DecodingPass:
    """One token for each of the first b slots, at `positions` int64 `[b]`, of `width` places."""

    def __init__(self, cache: KeyValueCache, positions: Tensor, width: int) -> None:
        self.cache = cache
        self.width = width
        self.positions = positions.unsqueeze(1)
        self._places = torch.arange(len(positions), device=positions.device), positions
        self._masks: dict[int | None, Tensor] = {}

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """What is added to the scores, `[b, 1, 1, width]`: 0, or -inf where nothing is seen."""
        if window not in self._masks:
            places = torch.arange(self.width, device=self.positions.device)
            hidden = places > self.positions
            if window is not None:
                hidden |= places < self.positions - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._masks[window] = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        return self._masks[window]

    def attend(self, mixed: Tensor, how: AttentionSettings) -> Tensor:
        new = mixed[0, ..., -2:, :]
        layer = self.cache.layer(how.layer, new)
        rows, places = self._places
        layer[:, rows, :, places] = new.transpose(1, 2)
        samples = mixed.size(1)
        keys, values = layer[:, :samples, :, : self.width]
        # The queries of a group stand where positions would: no key is repeated for them.
        queries, mask = mixed[0, :, :, :-2], self._mask(how.window, mixed.dtype)
        if how.softcap is not None:
            context = _capped_attention(queries, keys, values, mask, how.scale, how.softcap)
        elif queries.device.type == "cpu" and queries.dtype == torch.float32:
            # For one token this is faster than PyTorch's kernel for CPUs; bf16 would round scores.
            scale = queries.size(-1) ** -0.5 if how.scale is None else how.scale
            scores = torch.matmul(queries * scale, keys.transpose(-1, -2)).add_(mask)
            context = torch.matmul(scores.softmax(-1), values)
        else:
            context = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, scale=how.scale
            )
        return context.reshape(1, samples, -1)


def _capped_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float | None,
    softcap: float,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attention whose scores x become c tanh(x / c), c: `softcap` (Gemma 2, arXiv 2408.00118); as
    many heads of `keys` as of `queries`, or one for all; `mask`: True where a position is seen, or
    what is added to the scores. PyTorch's kernels have no such scores.
    """
    scale = queries.size(-1) ** -0.5 if scale is None else scale
    scores = softcap * torch.tanh(torch.matmul(queries, keys.transpose(-1, -2)) * scale / softcap)
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    else:
        scores = scores + mask
    weights = scores.softmax(-1, dtype=torch.float32).to(queries.dtype)
    return torch.matmul(F.dropout(weights, dropout_p), values)


class FeedingPass:
    """s tokens (`width`) for each of `slots` int64 `[b]`, from its place in `starts` on. What is
    stored beyond a row's length is overwritten before it is attended to.
    """

    def __init__(self, cache: KeyValueCache, slots: Tensor, starts: list[int], width: int) -> None:
        self.cache = cache
        self.slots = slots
        # One row for all slots where they start at the same place.
        first = starts if len(set(starts)) > 1 else starts[:1]
        places = torch.tensor(first, device=slots.device).unsqueeze(1)
        places = places + torch.arange(width, device=slots.device)
        self.positions = places.clamp(max=cache.width - 1)
        self.width = min(max(starts) + width, cache.width)
        self._nothing_before = not any(starts)

    def attend(self, mixed: Tensor, how: AttentionSettings) -> Tensor:
        new = mixed[..., -2:, :]  # [s, b, ng, 2, hn]
        layer = self.cache.layer(how.layer, new)
        layer[:, self.slots[:, None], :, self.positions] = new.permute(1, 0, 3, 2, 4)
        mask = None
        if self._nothing_before:
            keys, values = new.permute(3, 1, 2, 0, 4)
        else:
            keys, values = layer[:, self.slots, :, : self.width]
        narrow = how.window is not None and keys.size(2) > how.window + 1
        if narrow or not self._nothing_before:
            mask = visible(self.positions, keys.size(2), how.window).unsqueeze(1)
        queries = mixed[..., :-2, :].flatten(2, 3).permute(1, 2, 0, 3)
        return attention(queries, keys, values, mask, how.scale, how.softcap)


# One pass through the model: it knows its `cache` and the `positions` of its tokens, int64
# `[b, s]` (or `[1, s]`). `attend(mixed, how)` stores keys and values, and attends with the queries
# to all that the cache has of each row up to the token: from `[s, b, ng, np / ng + 2, hn]`, of
# each group its queries, its key, its value, to `[s, b, np * hn]`.
Pass = DecodingPass | FeedingPass


def visible(positions: Tensor, width: int, window: int | None) -> Tensor:
    """bool `[..., width]`: which of `width` positions each of `positions` `[...]` attends to."""
    distance = positions.unsqueeze(-1) - torch.arange(width, device=positions.device)
    seen = distance >= 0
    if window is not None:
        seen &= distance <= window
    return seen


def attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float | None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """`[s, b, np * hn]` of `queries` `[b, np, s, hn]`, `keys` and `values` `[b, ng, W, hn]`;
    `mask` None: causal.
    """
    if softcap is not None:
        if mask is None:
            positions = torch.arange(keys.size(2), device=keys.device)
            mask = visible(positions, keys.size(2), None)
        each = queries.size(1) // keys.size(1)
        keys, values = (x.repeat_interleave(each, dim=1) for x in (keys, values))
        context = _capped_attention(queries, keys, values, mask, scale, softcap, dropout_p)
    else:
        context = F.scaled_dot_product_attention(
            *(queries, keys, values, mask, dropout_p),
            is_causal=mask is None,
            scale=scale,
            enable_gqa=queries.size(1) != keys.size(1),
        )
    return context.permute(2, 0, 1, 3).flatten(2)
