# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`MegatronGPTPolicyModel`: a policy that generates answers and is trained on them, in turns.

It has everything but the loss: the actor of PPO and the model of rejection sampling are thin over
it.
"""

import dataclasses

import torch
from omegaconf import DictConfig

from nemo_aligner.core.seeds import sample_seeds
from nemo_aligner.generation import GenerationParams, MegatronGenerator
from nemo_aligner.models.alignable_interface import AlignableGenerativeInterface
from nemo_aligner.models.nlp.gpt.adapter_mixin import NLPAdapterModelMixin
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.parallel.device import get_device
from nemo_aligner.parallel.vocab_parallel import (
    from_parallel_logits_to_logprobs,
    logprobs_and_entropy,
)
from nemo_aligner.training.megatron_steps import forward_collect


class MegatronGPTPolicyModel(NLPAdapterModelMixin, MegatronGPTModel, AlignableGenerativeInterface):
    """Policy on Megatron Core; a subclass gives the loss (`get_loss_and_metrics`).

    Args:
        cfg: model configuration with the section that `SECTION` names (docs/config.md).
        trainer: Lightning trainer.

    Attributes:
        SECTION: section of the model configuration that holds the settings of this policy.
        settings: that section.
        temperature: of the log-probs; the sampler has its own, in `generation_params`.
        forward_micro_batch_size: rows per forward pass of the log-probs.

    Shapes: B rows on this rank, S padded length, P prompt length, R total length (prompt +
    response).
    """

    SECTION: str

    def __init__(self, cfg: DictConfig, trainer=None):
        super().__init__(cfg, trainer=trainer)
        settings = self.settings = self.cfg[self.SECTION]
        self.loss_reduction = settings.get("loss_reduction", "token")
        self.forward_micro_batch_size = settings.forward_micro_batch_size
        self.to_offload_adam_states = settings.get("offload_adam_states", False)
        self.generation_params = GenerationParams.from_config(
            settings.length_params, settings.sampling_params
        )
        self.temperature = 1.0
        self.generator = MegatronGenerator(
            self.model, self.tokenizer, max_sequence_length=self.cfg.encoder_seq_length
        )

    # --- turns of generation and training -------------------------------------------------------------------------

    def prepare_for_training(self) -> None:
        self.onload_optimizer(self.to_offload_adam_states)

    def finish_training(self) -> None:
        """Nothing to undo."""

    def prepare_for_inference(self) -> None:
        """Evaluation mode (dropout off), Adam's states in host memory if `offload_adam_states`."""
        self.set_eval()
        self.offload_optimizer(self.to_offload_adam_states)

    def finish_inference(self) -> None:
        self.set_train()

    # --- generation -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def infer(self, inference_batch: dict) -> dict:
        """Sample one response to each prompt; every rank of a TP x PP x CP group calls it with the
        same prompts.

        Args:
            inference_batch: `text` int64 `[B, W]` prompts padded on the right, `length` int64
                `[B]`; optional `sample_seeds` int64 `[B]`, the random stream of each row. Without
                it a stream depends on `model.seed` and the prompt alone. The text does not depend
                on batch, rank or split. Optional `return_logprobs`.

        Returns:
            `response_tokens` int64 `[B, S]` (prompt + response, eos-padded), `response_lengths`
            int64 `[B]` (R), `prompt_lengths` int64 `[B]` (P), `is_end` bool `[B]` (an end was
            generated), on `get_device()`. With `return_logprobs`, `sampling_logprobs` float32 `[B,
            S-1]`: of the sampler, in the convention of `get_inference_log_probs`
            (`GenerationOutput.logprobs`), 0 outside the response.

        Raises:
            UserError: a prompt that leaves no room for a response.
        """
        prompts, lengths = (
            inference_batch["text"].to(get_device()),
            inference_batch["length"].to(get_device()),
        )
        seeds = inference_batch.get("sample_seeds")
        if seeds is None:
            seeds = self._seeds_of_prompts(prompts, lengths)
        wanted = bool(inference_batch.get("return_logprobs", False))
        params = dataclasses.replace(self.generation_params, return_logprobs=wanted)
        generated = self.generator.generate(prompts, lengths, seeds.cpu(), params)
        return {
            "response_tokens": generated.response_tokens,
            "response_lengths": generated.response_lengths,
            "prompt_lengths": lengths,
            "is_end": generated.is_end,
            **({"sampling_logprobs": generated.logprobs} if wanted else {}),
        }

    def _seeds_of_prompts(self, prompts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """A stream per prompt text: a polynomial hash (mod 2^61 - 1) of its tokens mixed with
        `model.seed`.
        """
        hashes = []
        for row, length in zip(prompts.tolist(), lengths.tolist(), strict=True):
            value = length
            for token in row[:length]:
                value = (value * 1_000_003 + token + 1) % (2**61 - 1)
            hashes.append(value)
        return sample_seeds(self.cfg.get("seed", 1234), 0, torch.tensor(hashes))

    # --- log-probs ------------------------------------------------------------------------------------------------

    def logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, inference_only: bool
    ) -> torch.Tensor:
        """Log-probs `[b, S-1]` of the tokens of a micro-batch from its vocabulary-parallel logits.

        A backward pass writes the gradient over the logits; nothing else may need them.
        """
        return from_parallel_logits_to_logprobs(
            logits,
            tokens,
            inference_only=inference_only,
            overwrite_logits=True,
            **self._distribution(),
        )

    def logprobs_and_entropy(
        self, logits: torch.Tensor, tokens: torch.Tensor, inference_only: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`logprobs`, the same bits, and the entropy `[b, S-1]` of the same distributions, at
        little cost.
        """
        return logprobs_and_entropy(
            logits,
            tokens,
            inference_only=inference_only,
            overwrite_logits=True,
            **self._distribution(),
        )

    def _distribution(self) -> dict:
        return {"temperature": self.temperature, "vocab_size": self.tokenizer.vocab_size}

    def get_inference_log_probs(
        self, response_tokens, forward_micro_batch_size: int | None = None
    ) -> torch.Tensor:
        """Log-prob of each token given those before it; a TP x PP x CP group calls it with the
        same rows.

        Args:
            response_tokens: int64 `[B, S]`.
            forward_micro_batch_size: rows per pass; that of the configuration by default.

        Returns:
            float32 `[B, S-1]`; column t scores token t+1.
        """
        return forward_collect(
            self.model,
            {"tokens": response_tokens},
            micro_batch_size=forward_micro_batch_size or self.forward_micro_batch_size,
            output_fn=lambda logits, batch: self.logprobs(
                logits, batch["tokens"], inference_only=True
            ),
        )
