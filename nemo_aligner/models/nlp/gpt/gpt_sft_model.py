# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`GPTSFTModel`: supervised fine-tuning, the language-model loss on the responses;
`GPTSteerLMModel`: the same on weighted responses of an earlier policy (SteerLM 2.0).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from omegaconf import DictConfig
from torch import Tensor

from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.losses import loss_weights, sft_loss
from nemo_aligner.core.preference import prompt_weights
from nemo_aligner.core.tensors import counted_lengths, masked_mean, masked_sum, sample_seeds
from nemo_aligner.core.types import SFTBatch
from nemo_aligner.data.nlp.steerlm import LOG_Q
from nemo_aligner.generation import GenerationParams, MegatronGenerator
from nemo_aligner.generation.interface import tokenize_batch
from nemo_aligner.models.alignable_interface import SupervisedInterface
from nemo_aligner.models.nlp.gpt.log_probs import LogProbsMixin
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import sum_over_dp
from nemo_aligner.parallel.device import get_device
from nemo_aligner.training.megatron_steps import Batch, forward_collect
from nemo_aligner.training.passes import micro_batch_group

# What `generate` uses where nothing is given: NeMo's defaults.
DEFAULT_LENGTH_PARAMS = {"max_length": 30, "min_length": 0}
DEFAULT_SAMPLING_PARAMS = {"use_greedy": True, "end_strings": []}


class GPTSFTModel(LogProbsMixin, SupervisedInterface):
    """Language model that learns the responses of a data set: the loss is the mean over what
    `model.loss_reduction` names (`core.losses.loss_weights`) of the global batch. `cfg`: section
    `model` of `gpt_sft.yaml`.
    """

    CONFIG_NAME = "gpt_sft"

    def __init__(self, cfg: DictConfig, trainer: Trainer | None = None):
        super().__init__(cfg, trainer=trainer)
        self.loss_reduction = self.cfg.loss_reduction
        self.forward_micro_batch_size = self.cfg.micro_batch_size
        self.generator = MegatronGenerator(
            self.model, self.tokenizer, max_sequence_length=self.cfg.encoder_seq_length
        )
        inference = self.cfg.get("inference") or {}
        self.set_inference_params(
            **{key: inference.get(key) for key in ("length_params", "sampling_params", "strategy")}
        )

    def get_loss_and_metrics(
        self, batch: SFTBatch, forward_only: bool = False
    ) -> tuple[float, dict[str, float]]:
        """`compute_sft_loss`."""
        return self.compute_sft_loss(
            batch, forward_only, self.loss_reduction, self.cfg.micro_batch_size
        )

    def set_inference_params(
        self,
        length_params: Mapping[str, Any] | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        strategy: None = None,
    ) -> None:
        """Choose how `infer` generates, as `model.inference` does; None: up to 30 tokens, greedy.
        A `strategy` of NeMo's text generation is refused.
        """
        _refuse_strategy(strategy)
        self._inference_params = {
            "length_params": length_params or DEFAULT_LENGTH_PARAMS,
            "sampling_params": sampling_params or DEFAULT_SAMPLING_PARAMS,
            "strategy": None,
        }

    def get_inference_params(self) -> dict[str, Any]:
        return self._inference_params

    def generate(
        self,
        inputs: Sequence[str] | tuple[Tensor, Tensor],
        length_params: Mapping[str, Any],
        sampling_params: Mapping[str, Any] | None = None,
        *,
        strategy: None = None,
    ) -> dict[str, Any]:
        """A response to each prompt; every rank of a TP x PP x CP group calls it with the same
        prompts: texts, or (int64 `[B, W]`, int64 `[B]`), tokens padded on the right, and lengths.
        `UserError`: a prompt leaves no room for a response, or a strategy is given.

        Returns lists of B: `sentences` (prompt and response), `predictions` (the response) and
        `token_ids` (of the sentence); `offsets` is not computed.
        """
        _refuse_strategy(strategy)
        sampling: Mapping[str, Any] = sampling_params or DEFAULT_SAMPLING_PARAMS
        if sampling.get("compute_logprob"):
            raise UserError(
                "sampling_params.compute_logprob=True is not available; score tokens with "
                "nemo_aligner.parallel.vocab_parallel.from_parallel_logits_to_logprobs."
            )
        given: Any = inputs
        if isinstance(given[0], str):
            limit = self.cfg.encoder_seq_length
            given = tokenize_batch(given, self.tokenizer, limit, sampling.get("add_BOS"))
        prompts, lengths = given
        with self.adapters_for_generation():
            generated = self.generator.generate(
                prompts,
                lengths,
                sample_seeds(self.cfg.seed, 0, torch.arange(len(lengths))),
                GenerationParams.from_config(length_params, sampling),
            )
        ends = zip(lengths.tolist(), generated.response_lengths.tolist(), strict=True)
        token_ids, predictions = [], []
        for tokens, (start, end) in zip(generated.response_tokens.tolist(), ends, strict=True):
            token_ids.append(tokens[:end])
            predictions.append(self.tokenizer.ids_to_text(tokens[start:end]))
        return {
            "sentences": [self.tokenizer.ids_to_text(tokens) for tokens in token_ids],
            "predictions": predictions,
            "token_ids": token_ids,
        }

    def infer(
        self,
        inference_batch: Mapping[str, Tensor],
        length_params: Mapping[str, Any] | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        strategy: None = None,
    ) -> dict[str, Any]:
        """`generate` in evaluation mode, by default as `set_inference_params` chose.
        `inference_batch`: `text` int64 `[B, W]` and `length` int64 `[B]`.
        """
        chosen = self.get_inference_params()
        self.prepare_for_inference()
        outputs = self.generate(
            (inference_batch["text"], inference_batch["length"]),
            length_params or chosen["length_params"],
            sampling_params or chosen["sampling_params"],
            strategy=strategy,
        )
        self.finish_inference()
        return outputs


def _refuse_strategy(strategy: object) -> None:
    if strategy is not None:
        raise UserError("NeMo's text generation strategies are gone: set strategy=null.")


class GPTSteerLMModel(GPTSFTModel):
    """Policy of SteerLM 2.0; it starts from the one that sampled the responses. `cfg`: section
    `model` of `gpt_sft.yaml`; `steerlm2` has the sizes of micro-batches, in responses.

    Notation: B prompts on this data-parallel rank, n responses to each, S padded length.
    """

    def __init__(self, cfg: DictConfig, trainer: Trainer | None = None):
        super().__init__(cfg, trainer=trainer)
        self.forward_micro_batch_size = self.cfg.steerlm2.forward_micro_batch_size

    def check_responses(self, num_responses: int) -> None:
        """Raise `ConfigError` unless n responses make whole micro-batches of an update."""
        if self.micro_batch_tokens is not None:
            return
        prompts = self.cfg.global_batch_size // parallel_state.get_data_parallel_world_size()
        size = self.cfg.steerlm2.micro_batch_size
        group = micro_batch_group(self.model)
        if prompts * num_responses % (size * group):
            unit = f"groups of {group} micro-batches" if group > 1 else "micro-batches"
            raise ConfigError(
                f"model.steerlm2.micro_batch_size={size}: the {prompts} prompts x {num_responses} "
                f"responses of a rank make no whole {unit}; change it, or model.global_batch_size."
            )

    def get_loss_and_metrics(  # type: ignore[override]  # it learns from other batches
        self, batch: Batch, forward_only: bool = False
    ) -> tuple[float, dict[str, float]]:
        """Divergence of the policy from the target over a global batch
        (`SteerLM2Dataset.collate_fn`), and its gradient unless `forward_only`; all ranks call it
        with their share. The weights need the log-probs of all responses to a prompt, which have a
        forward pass of their own, without dropout.

        Returns the loss and, over the prompts of the global batch: `loss` (the divergence of a
        prompt divided by the mean number of tokens of its responses), `distance` (not divided),
        `log_ratio` (mean over responses of |log Q - log Q'|), `effective_responses` (1 / sum of
        squares of the target's weights) and `weights`, the number of prompts.
        """
        mask = batch["loss_mask"].to(get_device())
        tokens = mask.ne(0).sum(-1)
        valid = tokens.any(-1).float()
        shares = loss_weights(valid, sum_over_dp=sum_over_dp)
        rows = {key: batch[key].flatten(0, 1) for key in ("tokens", "labels")}
        log_q, targets = (batch[key].to(get_device()) for key in (LOG_Q, "ws"))
        log_policy = self.response_log_probs({**rows, "mask": mask.flatten(0, 1)})
        log_policy = log_policy.view_as(log_q).double()
        found = prompt_weights(log_policy, log_q, targets, tokens)

        def mean(values: Tensor) -> float:
            return float(sum_over_dp(masked_sum(shares.double() * values, shares)))

        metrics: dict[str, float] = {}
        if not forward_only:
            self.set_train()
            factors = (found.factors * shares.unsqueeze(1)).flatten()
            # Of log Q; `sft_loss` takes the negative log-likelihood.
            rows["weights"] = mask.flatten(0, 1).ne(0) * -factors.unsqueeze(1)
            _, metrics = self.compute_loss(
                sft_loss, rows, False, micro_batch_size=self.cfg.steerlm2.micro_batch_size
            )
        metrics["loss"] = mean(found.losses)
        metrics["distance"] = mean(found.divergences)
        metrics["log_ratio"] = mean(masked_mean((log_policy - log_q).abs(), tokens, 1))
        metrics["effective_responses"] = mean(1 / masked_sum(targets.square(), tokens, 1))
        metrics["weights"] = float(sum_over_dp(valid.sum()))
        return metrics["loss"], metrics

    def response_log_probs(self, batch: Batch) -> Tensor:
        """Log-prob float32 `[R]` of each of R responses: `tokens`, `labels` int64 `[R, S]`, `mask`
        `[R, S]` (non-zero where the label is the response's). All ranks call it.
        """
        self.set_eval()
        return forward_collect(
            self.model,
            batch,
            micro_batch_size=self.forward_micro_batch_size,
            output_fn=lambda logits, rows: masked_sum(
                self.logprobs(logits, rows["labels"], True, labels=True), rows["mask"], 1
            ),
            lengths=counted_lengths(batch["mask"], batch["tokens"].size(1)),
            micro_batch_tokens=self.micro_batch_tokens,
        )
