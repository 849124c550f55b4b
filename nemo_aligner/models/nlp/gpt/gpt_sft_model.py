# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`GPTSFTModel`: supervised fine-tuning, the language-model loss on the responses."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from omegaconf import DictConfig
from torch import Tensor

from nemo_aligner.core.errors import UserError
from nemo_aligner.core.tensors import sample_seeds
from nemo_aligner.core.types import SFTBatch
from nemo_aligner.generation import GenerationParams, MegatronGenerator
from nemo_aligner.generation.text import tokenize_batch
from nemo_aligner.models.alignable_interface import SupervisedInterface
from nemo_aligner.models.nlp.gpt.log_probs import LogProbsMixin

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
