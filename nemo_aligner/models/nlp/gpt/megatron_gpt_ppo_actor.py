# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`MegatronGPTActorModel`: the policy of PPO, and beside it the weights of the reference policy in host memory.

Log-probs come from one function for policy, reference and training, in fp32 and at the temperature that sampled the
tokens.
"""

import torch
from nemo.utils import logging
from omegaconf import DictConfig

from nemo_aligner.generation import GenerationParams, MegatronGenerator
from nemo_aligner.losses import loss_weights, ppo_actor_loss
from nemo_aligner.models.alignable_interface import AlignableGenerativeInterface
from nemo_aligner.models.nlp.gpt.adapter_mixin import NLPAdapterModelMixin
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.utils.device import get_device
from nemo_aligner.utils.distributed import sum_over_dp
from nemo_aligner.utils.megatron_steps import forward_backward, forward_collect
from nemo_aligner.utils.ppo_utils import sample_seeds
from nemo_aligner.utils.vocab_parallel import calculate_distributed_entropy, from_parallel_logits_to_logprobs


class MegatronGPTActorModel(NLPAdapterModelMixin, MegatronGPTModel, AlignableGenerativeInterface):
    """Policy of PPO on Megatron Core.

    Args:
        cfg: model configuration with a section `ppo` (docs/config.md).
        trainer: Lightning trainer.

    Attributes:
        init_policy_state_dict: weights of the reference policy in host memory, from `set_reference_policy`, or None.
        entropy_bonus, ratio_eps: coefficients of the loss.
        forward_micro_batch_size: rows per forward pass of the log-probs.

    Shapes: B rows on this rank, S padded length, P prompt length, R total length (prompt + response).
    """

    def __init__(self, cfg: DictConfig, trainer=None):
        super().__init__(cfg, trainer=trainer)
        ppo = self.cfg.ppo
        self.entropy_bonus = ppo.get("entropy_bonus", 0.0)
        self.ratio_eps = ppo.ratio_eps
        self.loss_reduction = ppo.get("loss_reduction", "token")
        self.forward_micro_batch_size = ppo.forward_micro_batch_size
        self.to_offload_adam_states = ppo.get("offload_adam_states", False)
        self.init_policy_state_dict = None
        self.generation_params = GenerationParams.from_config(ppo.length_params, ppo.sampling_params)
        if self.generation_params.changes_distribution:
            logging.warning(
                "top_k, top_p, repetition_penalty and min_length above 1 make the sampler draw from another "
                "distribution than the one whose log-probs PPO uses (softmax of logits / temperature): the updates "
                "are off-policy to that extent."
            )
        # Greedy decoding ignores the temperature, so the log-probs do too.
        self.temperature = 1.0 if self.generation_params.use_greedy else self.generation_params.temperature
        self.generator = MegatronGenerator(self.model, self.tokenizer, max_sequence_length=self.cfg.encoder_seq_length)

    # --- roles of the weights -------------------------------------------------------------------------------------

    def set_reference_policy(self) -> None:
        """Keep a copy of the present weights as the reference policy; call it before a checkpoint is resumed."""
        self.init_policy_state_dict = self.weights_to_cpu()

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
        """Sample one response to each prompt; every rank of a TP x PP group calls it with the same prompts.

        Args:
            inference_batch: `text` int64 `[B, W]` prompts padded on the right, `length` int64 `[B]`; optional
                `sample_seeds` int64 `[B]`, the random stream of each row. Without it a stream depends on `model.seed`
                and the prompt alone. The text does not depend on batch, rank or split.

        Returns:
            `response_tokens` int64 `[B, S]` (prompt + response, eos-padded), `response_lengths` int64 `[B]` (R),
            `prompt_lengths` int64 `[B]` (P), `is_end` bool `[B]` (an end was generated), on `get_device()`.

        Raises:
            UserError: a prompt that leaves no room for a response.
        """
        prompts, lengths = inference_batch["text"].to(get_device()), inference_batch["length"].to(get_device())
        seeds = inference_batch.get("sample_seeds")
        if seeds is None:
            seeds = self._seeds_of_prompts(prompts, lengths)
        generated = self.generator.generate(prompts, lengths, seeds.cpu(), self.generation_params)
        return {
            "response_tokens": generated.response_tokens,
            "response_lengths": generated.response_lengths,
            "prompt_lengths": lengths,
            "is_end": generated.is_end,
        }

    def _seeds_of_prompts(self, prompts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """A stream per prompt text: a polynomial hash (mod 2^61 - 1) of its tokens mixed with `model.seed`."""
        hashes = []
        for row, length in zip(prompts.tolist(), lengths.tolist(), strict=True):
            value = length
            for token in row[:length]:
                value = (value * 1_000_003 + token + 1) % (2**61 - 1)
            hashes.append(value)
        return sample_seeds(self.cfg.get("seed", 1234), 0, torch.tensor(hashes))

    # --- log-probs ------------------------------------------------------------------------------------------------

    def _logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, inference_only: bool) -> torch.Tensor:
        return from_parallel_logits_to_logprobs(
            logits,
            tokens,
            inference_only=inference_only,
            temperature=self.temperature,
            vocab_size=self.tokenizer.vocab_size,
        )

    def get_inference_log_probs(self, response_tokens, forward_micro_batch_size: int | None = None) -> torch.Tensor:
        """Log-prob of each token given those before it; every rank of a TP x PP group calls it with the same rows.

        Args:
            response_tokens: int64 `[B, S]`.
            forward_micro_batch_size: rows per pass; `model.ppo.forward_micro_batch_size` by default.

        Returns:
            float32 `[B, S-1]`; column t scores token t+1.
        """
        return forward_collect(
            self.model,
            {"tokens": response_tokens},
            micro_batch_size=forward_micro_batch_size or self.forward_micro_batch_size,
            output_fn=lambda logits, batch: self._logprobs(logits, batch["tokens"], inference_only=True),
        )

    def get_init_policy_logprobs(self, response_tokens) -> torch.Tensor:
        """`get_inference_log_probs` under the reference policy; one swap of the weights there and back.

        Raises:
            RuntimeError: `set_reference_policy` was not called.
        """
        if self.init_policy_state_dict is None:
            raise RuntimeError("there is no reference policy; call set_reference_policy() before training.")
        with self.swapped_weights(self.init_policy_state_dict):
            return self.get_inference_log_probs(response_tokens)

    # --- training -------------------------------------------------------------------------------------------------

    def get_loss_and_metrics(self, batch: dict, forward_only: bool = False) -> tuple[float, dict[str, float]]:
        """PPO loss (`nemo_aligner.losses.ppo_actor_loss`) of a global batch, with its gradient unless `forward_only`.

        Only samples that ended properly (`is_end`) count. All ranks call it, each with its share of the rows.

        Args:
            batch: `response_tokens` int64 `[B, S]`, `is_end` bool `[B]`; `mask`, `advantages` and `prev_logprobs`
                `[B, S-1]`.

        Returns:
            The loss and its metrics over the global batch, equal on every rank.
        """
        mask = batch["mask"] * batch["is_end"].unsqueeze(-1)
        micro_batch_size = self.cfg.micro_batch_size
        rows = {
            "tokens": batch["response_tokens"],
            "advantages": batch["advantages"],
            "prev_logprobs": batch["prev_logprobs"],
            "weights": loss_weights(mask, self.loss_reduction, micro_batch_size, sum_over_dp),
        }

        def loss_fn(logits, rows):
            # An entropy that is not in the loss is not worth a pass over the vocabulary.
            entropy = None
            if self.entropy_bonus > 0:
                entropy = calculate_distributed_entropy(
                    logits, temperature=self.temperature, vocab_size=self.tokenizer.vocab_size
                )
            return ppo_actor_loss(
                logprobs=self._logprobs(logits, rows["tokens"], inference_only=forward_only),
                prev_logprobs=rows["prev_logprobs"],
                advantages=rows["advantages"],
                weights=rows["weights"],
                ratio_eps=self.ratio_eps,
                entropy=entropy,
                entropy_bonus=self.entropy_bonus,
            )

        metrics = forward_backward(
            self.model, rows, micro_batch_size=micro_batch_size, loss_fn=loss_fn, forward_only=forward_only
        )
        return metrics["loss"], metrics
