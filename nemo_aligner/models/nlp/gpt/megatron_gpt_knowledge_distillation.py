# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Knowledge distillation: `GPTKnowledgeDistillationModel`, a student that learns the distributions
of a teacher, and `TopKTeacherModel`, which gives its largest logits.
"""

from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from omegaconf import DictConfig
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nemo_aligner.config.jobs.distillation import check_candidates
from nemo_aligner.core.losses import distillation_loss
from nemo_aligner.core.types import DistillationBatch
from nemo_aligner.data.nlp.record_encoder import chat_end_strings
from nemo_aligner.generation import GenerationOutput, GenerationParams, MegatronGenerator
from nemo_aligner.models.alignable_interface import SupervisedInterface
from nemo_aligner.models.nlp.gpt.adapter_mixin import NLPAdapterModelMixin
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.parallel.device import get_device
from nemo_aligner.parallel.vocab_parallel import candidate_logprobs, top_logits
from nemo_aligner.training.megatron_steps import Batch, forward_collect


class Taught(NamedTuple):
    """What a teacher says of samples."""

    logits: Tensor  # as in `TopLogits`, and so are the next two
    token_ids: Tensor
    log_sum_exp: Tensor
    log_probs: Tensor  # float32 [B, S], of the token that follows each; of no use at the last one


class TopKTeacherModel(MegatronGPTModel):
    """Language model without a loss of its own."""

    def top_logits(self, tokens: Tensor, lengths: Tensor, top_k: int) -> Taught:
        """The `top_k` largest logits behind each token, `[B, S, K]`, and the log-prob of the next
        one, `[B, S]`, 0 beyond the lengths; every rank of a TP x PP x CP group calls it with the
        same samples: tokens int64 `[B, S]`, and how many of each matter, int64 `[B]`, at least 1.
        """

        def output_fn(logits: Tensor, micro_batch: Batch) -> Tensor:
            width, size = micro_batch["tokens"].size(1), self.tokenizer.vocab_size
            found = top_logits(logits, top_k, width, size)
            following = micro_batch["tokens"].roll(-1, 1).unsqueeze(-1)
            log_probs = candidate_logprobs(logits, following, vocab_size=size, inference_only=True)
            # In one tensor: float32 holds every id below 2^24 exactly.
            parts = found.logits, found.token_ids, found.log_sum_exp.unsqueeze(-1), log_probs
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
        logits, ids, log_sum_exp, log_probs = collected.split([top_k, top_k, 1, 1], -1)
        return Taught(logits, ids.long(), log_sum_exp.squeeze(-1), log_probs.squeeze(-1))


class GPTKnowledgeDistillationModel(NLPAdapterModelMixin, SupervisedInterface):
    """Student of a teacher whose largest logits stand beside the data, or are served
    (`algorithms/distillation.py`).

    Attributes:
        loss_settings: arguments of `core.losses.distillation_loss`.
        logits_scale: factor of the student's logits.
        rollout_micro_batch_size: of its own responses, generated together on a rank; None: all.
        outside_top_k: one of `core.estimators.OUTSIDE_TOP_K`.
    """

    CONFIG_NAME = "gpt_knowledge_distillation"

    def __init__(self, cfg: DictConfig, trainer: Trainer | None = None):
        super().__init__(cfg, trainer=trainer)
        distillation = self.cfg.knowledge_distillation
        self.loss_reduction: str = self.cfg.loss_reduction
        self.generator = MegatronGenerator(
            self.model, self.tokenizer, max_sequence_length=self.cfg.encoder_seq_length
        )
        own = distillation.on_policy
        self.generation_params = GenerationParams.from_config(
            own.length_params, own.sampling_params
        )
        if own.fraction is not None:
            ends = chat_end_strings(self.cfg.get("data"), self.tokenizer)
            self.generation_params = self.generation_params.with_end_strings(ends)
        self.rollout_micro_batch_size: int | None = own.rollout_micro_batch_size
        self.logits_scale: float = distillation.logits_scale
        self.outside_top_k: str = distillation.outside_top_k
        names = "kd_loss jsd_beta target_logits_scale kd_loss_weight sft_loss_weight".split()
        self.loss_settings: dict[str, Any] = {name: distillation[name] for name in names}

    def respond(self, prompts: Tensor, lengths: Tensor, seeds: Tensor) -> GenerationOutput:
        """The student's responses to this data-parallel rank's prompts, without dropout; all ranks
        call it, with arguments as of `MegatronGenerator.generate`.
        """
        self.set_eval()
        with self.adapters_for_generation():
            generated = self.generator.generate(
                *(prompts, lengths, seeds, self.generation_params),
                slots=self.rollout_micro_batch_size,
            )
        self.set_train()
        return generated

    def get_loss_and_metrics(
        self, batch: DistillationBatch, forward_only: bool = False
    ) -> tuple[float, dict[str, float]]:
        """Divergence from the teacher over a global batch, and its gradient unless `forward_only`.
        Metrics: those of `distillation_loss` and `weights`, the number of what `loss_reduction`
        averages over. `ConfigError`: the teacher gives one logit of a token.
        """
        mask = batch["loss_mask"].to(get_device())
        log_sum_exp: Any = batch["log_sum_exp_logits"]
        if not isinstance(log_sum_exp, Tensor):  # as NeMo-Aligner's script collates it
            log_sum_exp = pad_sequence(list(log_sum_exp), batch_first=True)
        inputs = {
            "tokens": batch["tokens"],
            "labels": batch["labels"],
            "topk_logits": batch["topk_logits"],
            "topk_token_ids": batch["topk_token_ids"],
            "log_sum_exp": log_sum_exp,
        }
        top_k = batch["topk_token_ids"].size(-1)
        check_candidates(top_k, self.outside_top_k, self.loss_settings["sft_loss_weight"])
        # With all tokens there is nothing outside.
        bucket = self.outside_top_k == "bucket" and top_k < self.tokenizer.vocab_size

        def loss_fn(logits: Tensor, micro_batch: Batch) -> tuple[Tensor, Batch]:
            labels = micro_batch["labels"]
            width = labels.size(1)  # entries with three dimensions are not cut with the tokens
            token_ids = micro_batch["topk_token_ids"][:, :width]
            found = candidate_logprobs(
                logits,
                torch.cat([token_ids, labels.unsqueeze(-1)], -1),
                rest_of=top_k if bucket else 0,
                temperature=1 / self.logits_scale,
                vocab_size=self.tokenizer.vocab_size,
                inference_only=forward_only,
                overwrite_logits=True,  # nothing else needs them
            )
            return distillation_loss(
                logprobs=found[..., :top_k],
                label_logprobs=found[..., top_k],
                rest_logprobs=found[..., -1] if bucket else None,
                teacher_logits=micro_batch["topk_logits"][:, :width],
                teacher_log_sum_exp=micro_batch["log_sum_exp"],
                weights=micro_batch["weights"],
                **self.loss_settings,
            )

        metrics, _ = self.run_loss(loss_fn, inputs, forward_only, mask=mask)
        metrics["weights"] = self.count_of_loss(
            mask, self.loss_reduction, self.cfg.micro_batch_size
        )
        return metrics["loss"], metrics
