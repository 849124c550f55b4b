# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The arrays of the clients' requests, made from batches of the actor.

b is the number of samples of one rank, S their padded number of tokens (see core/types.py).
"""

import numpy as np
import torch

from nemo_aligner.core.types import PPOTrainBatch, Rollout
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import gathered, rebalance_nd_tensor
from nemo_aligner.servers.schema import Arrays, RequestError


def request_width(longest: int, pad_to_length: int | None, max_length: int | None) -> int:
    """Columns for `longest` tokens: `pad_to_length` or more, or rounded up to a limit."""
    if pad_to_length is not None:
        return max(longest, pad_to_length)
    if max_length is None:
        return longest
    # Triton hands over requests of equal width together, and shapes that come again are faster, so
    # widths should be few: eight per power of two (1/8 wider at most), multiples of 8 below 128.
    step = max(8, 1 << (longest.bit_length() - 4)) if longest >= 8 else 8
    return max(longest, min(-(-longest // step) * step, max_length))


def scoring_payload(
    rollout_batch: Rollout,
    pad_to_length: int | None,
    fingerprint: str | None = None,
    max_length: int | None = None,
) -> Arrays:
    """The arrays of an infer request, of `request_width`, padded with 0. They share no memory with
    the batch: `response_tokens` int64 [b, S], `response_lengths` [b] (prompt + response).
    `fingerprint`: of the policy's tokenizer. `RequestError`: no sample, or none has a token.
    """
    tokens = rollout_batch["response_tokens"].cpu()
    lengths = rollout_batch["response_lengths"].cpu().long()
    if not tokens.numel():
        raise RequestError(f"there is nothing to score in samples of shape {list(tokens.shape)}.")
    columns = request_width(int(lengths.max()), pad_to_length, max_length)
    # Cuts off columns where it is negative.
    tokens = torch.nn.functional.pad(tokens, (0, columns - tokens.shape[1]))
    sizes = lengths[:, None].clone().numpy()
    payload = {"tokens": tokens.long().numpy(), "sequence_lengths": sizes}
    if fingerprint is not None:
        payload["tokenizer"] = np.full((len(lengths), 1), fingerprint.encode())
    return payload


def used_values(rollout_batch: Rollout, columns: int) -> np.ndarray:
    """Return bool [b, columns]: True where the critic's value of a response token is needed."""
    lengths = rollout_batch["response_lengths"].cpu()
    prompts = rollout_batch.get("prompt_lengths", torch.ones_like(lengths)).cpu()
    column = torch.arange(columns)
    return ((column >= prompts[:, None] - 1) & (column < lengths[:, None] - 1)).numpy()


def training_payload(batch: PPOTrainBatch) -> Arrays | None:
    """Return the arrays of a train request for all data-parallel ranks on global rank 0, which
    share no memory with `batch`. Every rank calls it; ranks above 0 get None. Columns after the
    last response token of all samples are not sent.

    `batch`: this rank's `response_tokens` int64 [b, S]; `returns`, `values` (of the rollout) and
    `mask` [b, S-1]; optionally `sample_order` int64 [b], each sample's place among those of all
    ranks (else they go in rank order).
    """
    if parallel_state.get_data_parallel_src_rank() != 0:
        return None  # a model-parallel peer of a rank that sends the same samples
    group = parallel_state.get_data_parallel_group()
    several = parallel_state.get_data_parallel_world_size() > 1
    mask = batch["mask"]
    used = mask.bool().any(dim=0).nonzero()
    own = int(used.max()) + 2 if len(used) else 2
    width = max(gathered(own, group)) if several else own
    samples = {
        "tokens": batch["response_tokens"][:, :width].long(),
        "returns": batch["returns"][:, : width - 1].float(),
        "prev_values": batch["values"][:, : width - 1].float(),
        "mask": mask[:, : width - 1].float(),
    }
    if "sample_order" in batch:
        samples["order"] = batch["sample_order"]
    if several:
        samples = {name: rebalance_nd_tensor(each, group) for name, each in samples.items()}
    if parallel_state.get_rank() != 0:
        return None
    # The critic cuts its global batches from these samples: their order must not depend on the
    # number of actor ranks. Copied: the batch is the caller's, and sending goes on.
    order = samples.pop("order", torch.arange(len(samples["mask"]))).cpu().argsort()
    return {name: tensor.cpu()[order].numpy() for name, tensor in samples.items()}
