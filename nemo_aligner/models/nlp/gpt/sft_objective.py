# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The objective of supervised fine-tuning: the likelihood of the responses of the data."""

import torch
from torch import Tensor

from nemo_aligner.core.losses import loss_count, loss_weights, sft_loss
from nemo_aligner.core.masks import counted_lengths, one_row_per_sample
from nemo_aligner.core.types import SFTBatch
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.parallel.collectives import sum_over_dp
from nemo_aligner.parallel.device import get_device
from nemo_aligner.parallel.vocab_parallel import from_parallel_logits_to_logprobs
from nemo_aligner.training.megatron_steps import Batch, forward_backward


def sft_loss_and_metrics(
    model: MegatronGPTModel,
    batch: SFTBatch,
    *,
    loss_reduction: str,
    micro_batch_size: int,
    forward_only: bool,
) -> tuple[float, dict[str, float]]:
    """Negative log-likelihood of a global batch, and its gradient unless `forward_only`; all ranks
    call it.

    Args:
        batch: this data-parallel rank's share of the global batch.
        loss_reduction, micro_batch_size: see `losses.loss_weights`.

    Returns:
        The loss and, over the global batch, `loss` and `weights`: how many tokens count, or how
        many of what `loss_reduction` averages over.
    """
    mask = batch["loss_mask"].to(get_device())
    inputs = {"tokens": batch["tokens"], "labels": batch["labels"]}
    if "packed_position_ids" in batch:
        inputs["packed_position_ids"] = batch["packed_position_ids"]
        if loss_reduction == "sequence":
            mask = one_row_per_sample(mask, batch["packed_position_ids"].to(get_device()))
    weights = loss_weights(mask, loss_reduction, micro_batch_size, sum_over_dp)
    # Of the rows of a pack's samples, a column has a weight in one.
    inputs["weights"] = weights.reshape(len(batch["tokens"]), -1, weights.size(1)).sum(1)

    def loss_fn(logits: Tensor, micro_batch: Batch) -> tuple[Tensor, Batch]:
        logprobs = from_parallel_logits_to_logprobs(
            logits,
            micro_batch["labels"],
            inference_only=forward_only,
            ignore_last=False,
            # As in sampling: ids in the padding of the vocabulary are not tokens.
            vocab_size=model.tokenizer.vocab_size,
            overwrite_logits=True,  # nothing else needs them
        )
        return sft_loss(logprobs=logprobs, weights=micro_batch["weights"])

    metrics, _ = forward_backward(
        model.model,
        inputs,
        micro_batch_size=micro_batch_size,
        loss_fn=loss_fn,
        forward_only=forward_only,
        lengths=counted_lengths(inputs["weights"], inputs["tokens"].size(1)),
        micro_batch_tokens=model.micro_batch_tokens,
        keep_order=loss_reduction == "microbatch",
    )
    count = torch.tensor(loss_count(mask, loss_reduction, micro_batch_size), dtype=torch.float64)
    metrics["weights"] = float(sum_over_dp(count.to(get_device())))
    return metrics["loss"], metrics
