# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`TopKTeacherModel`: a language model that gives its largest logits to a student."""

import torch
from torch import Tensor

from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.parallel.vocab_candidates import TopLogits, top_logits
from nemo_aligner.training.megatron_steps import Batch, forward_collect


class TopKTeacherModel(MegatronGPTModel):
    """Language model without a loss of its own."""

    def top_logits(self, tokens: Tensor, lengths: Tensor, top_k: int) -> TopLogits:
        """The `top_k` largest logits behind each token; every rank of a TP x PP x CP group calls
        it with the same samples.

        Args:
            tokens: int64 `[B, S]`.
            lengths: int64 `[B]`: how many tokens of each sample matter, at least 1.
            top_k: K, at most the size of the vocabulary.

        Returns:
            `[B, S, K]` and `[B, S]`, 0 beyond the lengths.
        """

        def output_fn(logits: Tensor, micro_batch: Batch) -> Tensor:
            width = micro_batch["tokens"].size(1)
            found = top_logits(logits, top_k, width, self.tokenizer.vocab_size)
            # In one tensor: float32 holds every id below 2^24 exactly.
            parts = (found.logits, found.token_ids, found.log_sum_exp.unsqueeze(-1))
            return torch.cat([part.float() for part in parts], -1)

        collected = forward_collect(
            self.model,
            {"tokens": tokens},
            micro_batch_size=self.cfg.micro_batch_size,
            output_fn=output_fn,
            lengths=lengths,
            micro_batch_tokens=self.micro_batch_tokens,
            by_position=True,
        )
        logits, ids, log_sum_exp = collected.split([top_k, top_k, 1], -1)
        return TopLogits(logits, ids.long(), log_sum_exp.squeeze(-1))
