# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Proximal policy optimization against a critic and a reward model in other processes.

`PolicyGradientTrainer.generate_rollouts` and `PPOTrainer.learn` are the algorithm. The trainer
uses the policy only through `AlignableGenerativeInterface` and the critic only through futures.
The ranks of one data-parallel (DP) replica hold equal batches and all call the same methods.
`ppo_data.py` turns rewards into advantages. For estimators without a critic, an object that
returns rewards only replaces it.

References: Schulman et al. 2017 (arXiv:1707.06347), eq. 7 for the clipped loss, eq. 11 for the
advantages; Stiennon et al. 2020 (arXiv:2009.01325), section 3.4, for the KL in the reward.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from nemo.utils import logging
from omegaconf import DictConfig
from torch import Tensor

from nemo_aligner.algorithms import ppo_data
from nemo_aligner.algorithms.policy_gradient import PolicyGradientTrainer
from nemo_aligner.algorithms.rollout_trainer import VALIDATION_STEP
from nemo_aligner.algorithms.rollouts import PPORolloutBatch, compute_num_rollout_microbatches
from nemo_aligner.algorithms.training_loop import Parts, complete_critic
from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.config.values import Values
from nemo_aligner.core import types
from nemo_aligner.core.advantages import RunningMoments
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.core.estimators import ADVANTAGE_ESTIMATORS
from nemo_aligner.core.kl import name_kl_estimator
from nemo_aligner.models.alignable_interface import PolicyWithReference
from nemo_aligner.parallel.collectives import all_reduce_dict
from nemo_aligner.servers.critic_client import RemoteGPTRMCriticClient
from nemo_aligner.servers.futures import FutureResult, FutureScores
from nemo_aligner.servers.scoring_clients import RewardsInPlaceOfCritic
from nemo_aligner.training.loggers import CustomLoggerWrapper
from nemo_aligner.training.megatron_steps import naming_step
from nemo_aligner.training.schedule import Timer

if TYPE_CHECKING:
    from nemo_aligner.servers.teachers import PolicyTeachers

# The other two are here in NeMo-Aligner.
__all__ = ["PPORolloutBatch", "PPOTrainer", "compute_num_rollout_microbatches"]


# Or what has the same methods: fakes of tests, and those of users as `complete_critic` has them.
Critic = RemoteGPTRMCriticClient | RewardsInPlaceOfCritic


class PPOTrainer(PolicyGradientTrainer):
    """Trains a policy with PPO; `ppo_optimization_step` counts the optimizer updates."""

    SECTION, NAME = "ppo", "PPO"
    WAIT_TIMER = "critic_wait"

    def __init__(
        self,
        cfg: DictConfig,
        model: PolicyWithReference,
        optimizer: types.Optimizer,
        scheduler: types.Scheduler,
        train_dataloader_builder: types.PromptLoaderBuilder,
        val_dataloader_builder: types.PromptLoaderBuilder | None,
        collate_fn: Any,
        rm_critic: Critic,
        batch_iterator_cls: types.PromptIterator,
        logger: CustomLoggerWrapper,
        ckpt_callback: CheckpointCallback,
        run_timer: Timer,
        num_rollouts_per_prompt: int = 1,
        max_response_length: int | None = None,
        kl_loss_coef: float = 0.0,
        rollout_logprobs: str = "recompute",
        advantages_of: Callable[..., Tensor] | None = None,
        reward_weights: Sequence[float] = (),
        teacher: "PolicyTeachers | None" = None,
    ):
        """Every rank builds one; `ConfigError`: values that cannot work together.

        Args:
            cfg: `trainer.ppo`; missing keys have the values of `conf/gpt_ppo_actor.yaml`.
            model: the policy, with `cfg.seed`.
            train_dataloader_builder, val_dataloader_builder: give, with `consumed_samples=`, a
                loader whose batch sampler yields this rank's micro-batches of rollouts.
            collate_fn: samples of the data set to an `InferenceBatch` with `idx`, its index there.
            batch_iterator_cls: (sampler_iter, num_microbatches, dataset, collate_fn) to batches.
            rm_critic: critic and reward model; where no critic is needed the latter alone.
            max_response_length: most tokens of a response, where an overlong penalty ends.
            kl_loss_coef: of the model's loss; above 0 the updates get the reference's log-probs.
            rollout_logprobs: "recompute" (a pass of their own) or "sampler" (generation).
            advantages_of: a user's own advantages (`ppo_data.own_advantages`).
            reward_weights: of an ensemble's models in the order of their names, for gdpo.
            teacher: gives its log-probs of what the policy says; with `teacher_kl_coef`.
        """
        parts = Parts(cfg, model, optimizer, scheduler, logger, ckpt_callback, run_timer)
        prompts = train_dataloader_builder, val_dataloader_builder, collate_fn, batch_iterator_cls
        super().__init__(parts, *prompts, num_rollouts_per_prompt, rm_critic.infer_rm_critic)
        cfg = self.cfg
        values = Values({"trainer": {"ppo": cfg}})
        values.choice("trainer.ppo.advantage_estimator", tuple(ADVANTAGE_ESTIMATORS))
        values.size("trainer.ppo.ppo_epochs")
        if cfg.advantage_estimator == "gdpo" and not reward_weights:
            raise ConfigError(
                "trainer.ppo.advantage_estimator=gdpo needs reward_weights, those of the reward "
                "models of an ensemble; give them, or use grpo."
            )
        self.rm_critic: Critic = complete_critic(rm_critic)
        self.critic_is_checked = False

        self.rollout_logprobs, self.teacher = rollout_logprobs, teacher
        self.dynamic_sampling_rounds = int(cfg.dynamic_sampling_rounds)
        self.data_settings = ppo_data.DataSettings(
            cfg, max_response_length, advantages_of, reward_weights
        )
        estimator = name_kl_estimator(cfg.use_absolute_kl, cfg.kl_estimator)
        if estimator != "k1" and cfg.initial_policy_kl_penalty > 0:
            key = f"kl_estimator={estimator}" if cfg.kl_estimator else "use_absolute_kl=True"
            remedy = "use_absolute_kl=False and kl_estimator=null (which is k1)"
            logging.warning(ppo_data.harm_of_kl(f"trainer.ppo.{key}", remedy))
        if kl_loss_coef > 0 and cfg.initial_policy_kl_penalty > 0:
            logging.warning(
                "the KL to the reference is penalized twice: by trainer.ppo."
                f"initial_policy_kl_penalty={cfg.initial_policy_kl_penalty} and by "
                f"model.ppo.kl_loss_coef={kl_loss_coef}; set one of them to 0."
            )
        rescaled_by = self.data_settings.rescaled_by()
        if kl_loss_coef > 0 and rescaled_by:
            logging.warning(
                f"model.ppo.kl_loss_coef={kl_loss_coef} is not in units of the reward, which "
                f"trainer.ppo.{rescaled_by} divides by a standard deviation. Where it is to be "
                "beta, take rloo, or initial_policy_kl_penalty (docs/ppo.md)."
            )
        self.kl_controller = ppo_data.make_kl_controller(cfg)
        self.compute_init_policy_kl |= kl_loss_coef > 0
        self.reward_moments = RunningMoments() if cfg.normalize_rewards else None
        self._critic_save: FutureResult[Any] | None = None  # that nobody has waited for
        self.check_rollout("model.ppo.num_rollouts_per_prompt")

    ppo_optimization_step = property(attrgetter("optimization_step"))

    def fit(self) -> None:
        """As the base class; `UserError`: actor and critic resume from different steps."""
        if not self.critic_is_checked:
            self.rm_critic.check_status(self.step, self.ckpt_callback.saved_at("step"))
            self.critic_is_checked = True  # from here on the critic is ahead of its checkpoint
        super().fit()

    # ------------------------------------------------------------------------------- the algorithm

    def learn(self, data: types.PPOTrainBatch, rollout_metrics: dict[str, Any]) -> dict[str, Any]:
        """Let critic and actor learn from the rollout together, and adapt the weight of the KL.

        The critic's future is awaited after the actor's updates, so that a failed critic update
        ends the run with the server's error, and no later request can overtake it.
        """
        critic_update = self.rm_critic.train(data)
        metrics = self.train_policy(self.global_batches(data, self.cfg.ppo_epochs))
        with self.timer("critic_train_wait"):
            metrics |= self._finish_critic_update(critic_update)
        kl = rollout_metrics["init_policy_kl_per_sample"]
        self.kl_controller.update(kl, num_samples=rollout_metrics["rollout_size"])
        return metrics

    def make_data(self, local: types.RolloutBatch) -> tuple[types.PPOTrainBatch, dict[str, Any]]:
        if self.reward_moments is not None:
            local = ppo_data.with_normalized_rewards(local, self.reward_moments)
        return self.generate_ppo_data(local)

    def generate_ppo_data(
        self, rollout_batch: types.RolloutBatch
    ) -> tuple[types.PPOTrainBatch, dict[str, Any]]:
        """Rewards with KL, advantages and returns of this rank's samples: `(data, metrics)`; all
        ranks call it.

        Args:
            rollout_batch: `response_tokens` int64 `[B, S]`; `response_lengths`, `prompt_lengths`,
                `idx` int64 `[B]`; `is_end` bool `[B]`; `rewards` f32 `[B]`; `logprobs`, with a
                critic `values` and with a KL to measure `init_logprobs` f32 `[B, S-1]`. Slots
                outside the response may hold anything, NaN included. With the keys that read them
                `sampling_logprobs` f32 `[B, S-1]`, `sample_order` int64 `[B]`, `reward_parts` f32
                `[B, K]`; `loss_multiplier` f32 `[B]`, the weights of samples, if there are any.

        Returns:
            data: `response_tokens` int64 `[B, S]`, `is_end` bool `[B]`, and f32 `[B, S-1]`: `mask`
                (1 on response tokens), `advantages`, `prev_logprobs`; with a critic `returns` and
                `values`; with a KL to measure `init_logprobs`; with KL-Cov `old_kl_coefs`.
            metrics: of all ranks, before advantages are normalized.
        """
        kl_penalty = self.kl_controller.value
        data, metrics = ppo_data.make_ppo_data(rollout_batch, self.data_settings, kl_penalty)
        return data, metrics | {"kl_penalty": kl_penalty}

    def run_training(
        self, dataloader_iter: Iterable[dict[str, Tensor]]
    ) -> tuple[float, dict[str, Any]]:
        """As the base class. With `target_kl`, the updates after one that found the policy farther
        than that from the one that generated the rollout are skipped.
        """
        metrics: dict[str, Any] = {"loss": 0.0}
        batches, target_kl, skipped = iter(dataloader_iter), self.cfg.target_kl, 0
        for number, metrics in enumerate(self.updates(batches)):
            if target_kl is not None:
                # The largest KL of all ranks decides: they must stop together.
                found = {"approx_kl": metrics["approx_kl"]}
                largest = all_reduce_dict(found, torch.float64, op=torch.distributed.ReduceOp.MAX)
                if largest["approx_kl"] > target_kl:
                    skipped = sum(1 for _ in batches)  # none are left for `updates`
            if number == 0:
                self.alarms.watch({"first_update_kl": metrics.get("approx_kl")}, self.step)
        counted = {} if target_kl is None else {"updates_skipped": skipped}
        self.gather("train_optim/", counted, self.optimization_step)
        return metrics["loss"], metrics | counted

    # ---------------------------------------------------------------------------- parts of a step

    @property
    def needs_sampling_logprobs(self) -> bool:
        return super().needs_sampling_logprobs or self.data_settings.corrects_sampler

    @property
    def source_of_logprobs(self) -> str:
        """Before the first update "recompute": policy and reference are compared to the bit."""
        first = not self.optimization_step and not self.resumed
        return "recompute" if first else self.rollout_logprobs

    def send_off(self, rollout: types.Rollout, sampling_step: int) -> FutureScores:
        scores = super().send_off(rollout, sampling_step)
        if self.teacher is None or sampling_step == VALIDATION_STEP:
            return scores
        return self.teacher.beside(scores, rollout)

    def update_counters(self, metrics: dict[str, Any]) -> dict[str, Any]:
        return {"actor_loss": metrics["loss"]} | super().update_counters(metrics)

    def _finish_critic_update(self, critic_update: FutureResult[Any]) -> dict[str, float]:
        """Log the critic's loss beside the actor's, at the last update of this step."""
        critic_loss = critic_update.result()  # None: there is no critic
        metrics = {} if critic_loss is None else {"critic_loss": float(critic_loss)}
        self.gather("train_optim/", metrics, self.optimization_step)
        return metrics

    def before_first_step(self) -> None:
        """Validate if asked to, and warm the critic up: rollouts that train the critic only. Their
        prompts are given back: the actor starts at the first one.
        """
        super().before_first_step()
        warmup_steps = self.cfg.critic_warmup_steps
        for i in range(warmup_steps):
            self.consumed_samples = (i % self.num_steps_per_epoch) * self.num_rollout_samples
            with self.logged_together():
                with naming_step(f"critic warm-up {i}"):
                    data, metrics, _ = self.generate_rollouts(sampling_step=i - warmup_steps)
                critic_loss = self.rm_critic.train(data).result()
                if critic_loss is not None:
                    metrics["critic_loss"] = float(critic_loss)
                metrics.pop("table")
                self.gather("critic_warmup/", metrics, i)
        self.consumed_samples = 0

    # ---------------------------------------------------------------------- checkpoint and resume

    def save(
        self, extra_candidates: dict[str, Any] | None = None, is_train_end: bool = False
    ) -> None:
        """Save actor and critic side by side; all ranks call it.

        If the actor saves in the background, the next save, or the end of the job, waits for both:
        so the two are never farther apart than one checkpoint.
        """
        self.finish_saves()
        with self.ready_to_save():
            self._critic_save = self.rm_critic.save(actor_step=self.step)
            self.write_checkpoint(extra_candidates, is_train_end)
            if not self.ckpt_callback.is_saving:
                self.finish_saves()

    def finish_saves(self) -> None:
        super().finish_saves()
        critic_save, self._critic_save = self._critic_save, None
        if critic_save is not None:
            critic_save.result()

    def state_dict(self) -> dict[str, Any]:
        moments = {} if self.reward_moments is None else asdict(self.reward_moments)
        kept = {"reward_moments": moments} if moments else {}
        return super().state_dict() | self.kl_controller.state_dict() | kept

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.kl_controller.load_state_dict(state_dict)
        if self.reward_moments is not None:
            self.reward_moments = RunningMoments(**state_dict.get("reward_moments", {}))
