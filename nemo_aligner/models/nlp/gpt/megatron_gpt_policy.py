# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`MegatronGPTPolicyModel`: a policy that generates responses and is trained on them, in turns;
the policies of PPO, REINFORCE and rejection sampling are this one with a loss.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from megatron.core.process_groups_config import ProcessGroupCollection
from nemo.utils import logging
from omegaconf import DictConfig
from torch import Tensor

from nemo_aligner.config.rollout_rules import asked_reshard, generation_sizes
from nemo_aligner.core.advantages import spread_over_response
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.core.losses import loss_weights, ppo_actor_loss, reinforce_loss, sft_loss
from nemo_aligner.core.tensors import sample_seeds
from nemo_aligner.core.types import (
    InferenceBatch,
    PPOTrainBatch,
    ReinforceTrainBatch,
    Rollout,
    RSTrainBatch,
)
from nemo_aligner.data.nlp.record_encoder import chat_end_strings
from nemo_aligner.generation import GenerationOutput, GenerationParams, MegatronGenerator
from nemo_aligner.generation.interface import Environment, Prompts
from nemo_aligner.generation.split import Split, divided, regrouped, reshard, training_split
from nemo_aligner.models.alignable_interface import (
    AlignableGenerativeInterface,
    PolicyWithReference,
)
from nemo_aligner.models.nlp.gpt.log_probs import LogProbsMixin, ReferencePolicyMixin
from nemo_aligner.models.nlp.gpt.megatron_layers import GPTModel, add_to_module, build_layer_spec
from nemo_aligner.parallel.collectives import sum_over_dp
from nemo_aligner.parallel.device import get_device


class MegatronGPTPolicyModel(LogProbsMixin, AlignableGenerativeInterface):
    """Policy on Megatron Core; a subclass adds `get_loss_and_metrics`.

    Attributes:
        SECTION: name of the part of `cfg` that holds the settings of this policy, `settings`.
        temperature: of the log-probs; the sampler's is in `generation_params`.
        environment: replies to responses, for samples of several turns; None: one response each.

    Shapes: B samples on this rank, S padded length, P prompt length, R total length.
    """

    SECTION: str

    def __init__(self, cfg: DictConfig, trainer: Trainer | None = None):
        super().__init__(cfg, trainer=trainer)
        self.settings: DictConfig = self.cfg[self.SECTION]
        self._read_loss_settings()
        self.to_offload_adam_states: bool = self.settings.offload_adam_states
        self.generation_params = GenerationParams.from_config(
            self.settings.length_params, self.settings.sampling_params
        ).with_end_strings(chat_end_strings(self.cfg.get("data"), self.tokenizer))
        self.environment: Environment | None = None
        self.generator = MegatronGenerator(
            self.model,
            self.tokenizer,
            max_sequence_length=self.cfg.encoder_seq_length,
            split=self._generation_split(),
            cuda_graphs=self.settings.generation.cuda_graphs,
        )

    def _read_loss_settings(self) -> None:
        self.loss_reduction: str = self.settings.loss_reduction
        self.longest = self.settings.length_params.max_length
        self.forward_micro_batch_size = self.settings.forward_micro_batch_size

    def take_logprobs_as_sampled(self) -> None:
        """Compute log-probs at the temperature of the sampler, as policy gradients need them."""
        params = self.generation_params
        if params.changes_distribution:
            logging.warning(
                "top_k, top_p, repetition_penalty or min_length above 1: tokens are not sampled "
                "from softmax(logits / temperature), so the updates are off-policy to that extent."
            )
        # Greedy decoding ignores the temperature, so the log-probs do too.
        self.temperature = 1.0 if params.use_greedy else params.temperature

    def _generation_split(self) -> Split:
        """How the ranks share weights and samples in generation, by `generation.reshard`."""
        config = self.transformer_config
        trained = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
        tp, pp = generation_sizes(asked_reshard(self.settings), *trained)
        if (tp, pp) == trained:
            return training_split()
        if self.padded_vocab_size % tp:
            raise ConfigError(
                f"model.{self.SECTION}.generation.reshard: tp={tp} does not divide the padded "
                f"vocabulary of {self.padded_vocab_size} ids; choose one that does, or auto."
            )
        return regrouped(tp, pp, lambda split, chunks: [reshard(split, chunks, self._divided)])

    def _divided(self, split: Split) -> GPTModel:
        """A module without values, for the groups of `split`."""
        stages, stage = split.pipeline_ranks, split.pipeline.rank()
        config = divided(self.transformer_config, split.tensor_ranks, stages)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        groups.tp, groups.pp, groups.mp = split.tensor, split.pipeline, split.copy
        groups.embd = split.embedding
        device = get_device()
        # PyTorch's modules have initial values all the same; training is to draw as without them.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            module = GPTModel(
                transformer_layer_spec=build_layer_spec(config),
                pre_process=stage == 0,
                post_process=stage == stages - 1,
                pg_collection=groups,
                **(self.module_args() | {"config": config}),
            )
        add_to_module(module, self.cfg.apply_embedding_scaling)
        return module.to(device)

    def prepare_for_training(self) -> None:
        self.onload_adam_states()

    def prepare_for_inference(self) -> None:
        """Enter evaluation mode; with `offload_adam_states` move Adam's states to host memory."""
        self.set_eval()
        self.offload_adam_states()

    def infer(self, inference_batch: InferenceBatch) -> Rollout:
        """Sample one response to each prompt; every rank of a TP x PP x CP group calls it with the
        same prompts. A response does not depend on the batch, the rank or the split.

        `inference_batch` needs `text` and `length`; without `sample_seeds` the random stream of a
        sample depends on `model.seed` and its prompt alone. The samples are on `get_device()`;
        `sampling_logprobs` only with `return_logprobs`, `observed` and `token_rewards` only with
        an `environment`. `UserError`: a prompt leaves no room, or the environment failed.
        """
        prompts, lengths, seeds, *records = self._prompts(inference_batch)
        with self.adapters_for_generation():
            generated = self.generator.generate(
                prompts,
                lengths,
                seeds,
                self._params(inference_batch),
                environment=self.environment,
                records=records[0] if records else None,
            )
        return _rollout(generated, lengths)

    def infer_all(
        self, batches: Iterable[InferenceBatch]
    ) -> Iterator[tuple[InferenceBatch, Rollout]]:
        """`infer` for all batches as one queue: as many samples as the first batch has, or as
        `generation.kv_cache_gb` has room for, are decoded together. Every rank of a TP x PP x CP
        group calls it with the same batches and iterates to the end. Yields the one-dimensional
        columns of as many prompts as the first batch has (the last group may be smaller), in the
        order in which their responses ended, and these.
        """
        iterator = iter(batches)
        first = next(iterator, None)
        if first is None:
            return
        columns: dict[str, list[Tensor]] = {}

        def prompts() -> Iterator[Prompts]:
            for batch in itertools.chain([first], iterator):
                for key, value in batch.items():
                    if isinstance(value, Tensor) and value.dim() == 1:
                        columns.setdefault(key, []).extend(value)
                yield self._prompts(batch)

        params, size = self._params(first), len(first["length"])
        slots, share = self.responses_together(size), first.get("rank_batches")
        if share is not None:
            # Of a common queue (`batch_iterator.use_flask`) a rank leaves others some.
            slots = min(slots, share * size)
        with self.adapters_for_generation():
            stream = self.generator.stream(prompts(), params, slots, self.environment)
            for places, generated in stream:
                for part in torch.arange(len(places)).split(size):
                    group: Any = {
                        key: torch.stack([values[places[i]] for i in part])
                        for key, values in columns.items()
                    }
                    yield group, _rollout(generated.at(part), group["length"])

    def responses_together(self, size: int) -> int:
        """How many responses to a batch of `size` prompts are decoded together, by
        `generation.kv_cache_gb`. All ranks that generate together call it.
        """
        memory = self.settings.generation.kv_cache_gb
        return size if memory is None else self.generator.slots_within(memory * 1e9)

    def _prompts(self, batch: InferenceBatch) -> Prompts:
        seeds = batch.get("sample_seeds")
        if seeds is None:
            seeds = self._seeds_of_prompts(batch["text"], batch["length"])
        records = (batch["record"],) if "record" in batch else ()
        return batch["text"], batch["length"], seeds, *records

    def _params(self, batch: InferenceBatch) -> GenerationParams:
        return _returning(self.generation_params, bool(batch.get("return_logprobs")))

    def _seeds_of_prompts(self, prompts: Tensor, lengths: Tensor) -> Tensor:
        """int64 `[B]`: a polynomial hash (mod 2^61 - 1) of a prompt, mixed with `model.seed`."""
        hashes = []
        for tokens, length in zip(prompts.tolist(), lengths.tolist(), strict=True):
            value = length
            for token in tokens[:length]:
                value = (value * 1_000_003 + token + 1) % (2**61 - 1)
            hashes.append(value)
        return sample_seeds(self.cfg.seed, 0, torch.tensor(hashes))

    def get_ltor_masks_and_position_ids(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Attention mask bool `[B, 1, S, S]` (True: must not see) of causal attention over samples
        int64 `[B, S]`, loss mask float32 `[B, S]` of ones, and position ids int64 `[B, S]`.
        """
        samples, width = tokens.shape
        hidden = torch.ones(width, width, dtype=torch.bool, device=tokens.device).triu(1)
        positions = torch.arange(width, device=tokens.device).expand(samples, -1)
        ones = torch.ones(samples, width, device=tokens.device)
        return hidden.expand(samples, 1, -1, -1), ones, positions


@functools.lru_cache
def _returning(params: GenerationParams, logprobs: bool) -> GenerationParams:
    return dataclasses.replace(params, return_logprobs=logprobs)


def _rollout(generated: GenerationOutput, prompt_lengths: Tensor) -> Rollout:
    rollout: Rollout = {
        "response_tokens": generated.response_tokens,
        "response_lengths": generated.response_lengths,
        "prompt_lengths": prompt_lengths.to(get_device()),
        "is_end": generated.is_end,
    }
    if generated.logprobs is not None:
        rollout["sampling_logprobs"] = generated.logprobs
    if generated.observed is not None and generated.token_rewards is not None:
        rollout["observed"] = generated.observed
        rollout["token_rewards"] = generated.token_rewards
    return rollout


# ------------------------------------------------------------------------- policies with a loss

# Arguments of `ppo_actor_loss` that are keys of `model.ppo`.
PPO_SETTINGS = """
    entropy_bonus ratio_eps ratio_eps_high policy_loss dual_clip kl_loss_coef kl_loss_estimator
""".split()


class MegatronGPTActorModel(ReferencePolicyMixin, MegatronGPTPolicyModel, PolicyWithReference):
    """Policy of PPO on Megatron Core. Log-probs: fp32, at the sampling temperature.

    Attributes:
        entropy_bonus, and all in `PPO_SETTINGS`; surrogate_of: arguments of `ppo_actor_loss`.
        train_on_truncated: responses that did not end count in the loss too.
    """

    CONFIG_NAME = "gpt_ppo_actor"
    SECTION = "ppo"
    without_reference = (
        ", or set trainer.ppo.initial_policy_kl_penalty=0 (and model.ppo.kl_loss_coef=0)"
    )

    kl_loss_coef: float
    kl_loss_estimator: str
    surrogate_of: Callable[..., Tensor] | None = None

    def __init__(self, cfg: DictConfig, trainer: Trainer | None = None):
        super().__init__(cfg, trainer=trainer)
        for name in PPO_SETTINGS:
            setattr(self, name, self.settings[name])
        self.train_on_truncated: bool = self.settings.train_on_truncated
        if self.kl_loss_coef and self.kl_loss_estimator == "k1":
            logging.warning(
                "model.ppo.kl_loss_estimator=k1 has a gradient of 0 on average: it does not hold "
                "the policy to the reference; k2 and k3 do."
            )
        self.take_logprobs_as_sampled()

    def get_loss_and_metrics(
        self, batch: PPOTrainBatch, forward_only: bool = False
    ) -> tuple[float, dict[str, float]]:
        """PPO loss (`core.losses.ppo_actor_loss`) of a global batch, and its gradient unless
        `forward_only`, over the samples whose response ended (`is_end`) unless
        `train_on_truncated`; all ranks call it with their share.
        """
        mask = batch["mask"]
        if not self.train_on_truncated:
            mask = mask * batch["is_end"].unsqueeze(-1)
        columns = {
            "tokens": batch["response_tokens"],
            "advantages": batch["advantages"],
            "prev_logprobs": batch["prev_logprobs"],
        }
        if self.kl_loss_coef:
            columns["ref_logprobs"] = batch["init_logprobs"]
        if "old_kl_coefs" in batch:
            columns["old_kl_coefs"] = batch["old_kl_coefs"]
        if self.loss_reduction == "constant":  # its weights do not add up to 1
            columns["metric_weights"] = loss_weights(mask, sum_over_dp=sum_over_dp)
        settings = {name: getattr(self, name) for name in (*PPO_SETTINGS, "surrogate_of")}
        return self.compute_loss(
            partial(ppo_actor_loss, **settings), columns, forward_only, mask=mask
        )


class MegatronGPTReinforceActorModel(
    ReferencePolicyMixin, MegatronGPTPolicyModel, PolicyWithReference
):
    """Policy of REINFORCE on Megatron Core; section `model` of `gpt_reinforce_actor.yaml`."""

    CONFIG_NAME = "gpt_reinforce_actor"
    SECTION = "reinforce"
    without_reference = ", or set trainer.reinforce.initial_policy_kl_penalty=0"

    def __init__(self, cfg: DictConfig, trainer: Trainer | None = None):
        super().__init__(cfg, trainer=trainer)
        self.take_logprobs_as_sampled()

    def get_loss_and_metrics(
        self, batch: ReinforceTrainBatch, forward_only: bool = False
    ) -> tuple[float, dict[str, float]]:
        """REINFORCE loss (`reinforce_loss`) of a global batch, over samples whose response ended
        (`is_end`), and its gradient unless `forward_only`; all ranks call it with their share.
        """
        mask = batch["mask"] * batch["is_end"].unsqueeze(-1)
        columns = {
            "tokens": batch["response_tokens"],
            "advantages": spread_over_response(batch["rewards_with_kl"] - batch["baseline"], mask),
        }
        return self.compute_loss(reinforce_loss, columns, forward_only, mask=mask)


class MegatronGPTRSModel(MegatronGPTPolicyModel):
    """The policy of rejection sampling, which learns its own best responses. Its log-probs are at
    temperature 1: the loss is the likelihood under the model.
    """

    CONFIG_NAME = "gpt_rs_actor"
    SECTION = "rs"

    def get_loss_and_metrics(
        self, batch: RSTrainBatch, forward_only: bool = False
    ) -> tuple[float, dict[str, float]]:
        """Negative log-likelihood (`core.losses.sft_loss`) of the responses in a global batch, and
        its gradient unless `forward_only`; all ranks call it with their share.
        """
        columns = {"tokens": batch["response_tokens"]}
        return self.compute_loss(sft_loss, columns, forward_only, mask=batch["mask"])
