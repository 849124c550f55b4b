# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Proximal policy optimization of a Megatron policy against a critic and reward model in other processes.

`PPOTrainer.fit` is the algorithm. It speaks to the policy only through `AlignableGenerativeInterface`, to the critic
only through futures (`infer_rm_critic`, `train`, `save`), and knows nothing of tensor or pipeline parallelism: the
ranks of one data-parallel (DP) replica hold equal batches and all call the same methods.

Shapes: N samples of a rollout over all DP ranks, B of them on this rank, S padded length (prompt + response), G the
global batch of one optimizer update. Tensors per transition are `[B, S-1]`; `nemo_aligner.types` has their alignment.

The split of the work does not change the numbers:

* a sample's random stream depends on (seed, step, dataset index), not on the rank or micro-batch that generates it;
* a gathered rollout is put in the order of the dataset indices before it is shuffled, whoever generated which row;
* one seeded permutation of the N rows is cut into global batches of G consecutive rows, and each global batch into one
  share per DP rank. So update k sees the same G samples with any number of ranks (`deal`).

References: Schulman et al. 2017 (arXiv:1707.06347), eq. 7 for the clipped loss, eq. 11 for the advantages;
Stiennon et al. 2020 (arXiv:2009.01325), section 3.4, for the KL term in the reward.
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Optional

import pandas as pd
import torch
from tqdm import tqdm

from nemo_aligner.algorithms.rollouts import (
    PPORolloutBatch,
    compute_num_rollout_microbatches,
    compute_ppo_data_metrics,
    compute_rollout_metrics,
    deal,
    sample_rows,
)
from nemo_aligner.utils import parallel_state
from nemo_aligner.utils.device import get_device
from nemo_aligner.utils.distributed import (
    all_reduce_dict,
    normalize_tensor,
)
from nemo_aligner.utils.errors import ConfigError
from nemo_aligner.utils.ppo_utils import (
    calculate_advantages_and_returns,
    calculate_kl_penalty,
    calculate_ppo_rewards,
    create_mask,
    sample_seeds,
)
from nemo_aligner.utils.timers import ScopedTimer
from nemo_aligner.utils.train_utils import learning_rate, optimizer_step
from nemo_aligner.utils.trainer_utils import check_progress, compute_num_steps_per_epoch

logger = logging.getLogger(__name__)

# "Step" of the random streams of every validation: always the same, so that validations can be compared. Rollouts of
# critic warm-up have the steps -critic_warmup_steps .. -1.
VALIDATION_STEP = -(2**31)
TABLE_COLUMNS = ["step", "prompt", "response", "reward"]
TRAIN_TABLE_ROWS, VAL_TABLE_ROWS = 1, 5
POSTFIX_KEYS = ("train_rewards", "train_init_policy_kl", "train_actor_loss", "train_critic_loss", "val_rewards")


def compute_max_steps(num_steps_per_epoch: int, max_epochs: int, max_steps: int) -> int:
    """PPO steps of a run: all epochs, capped by `max_steps` unless that is negative."""
    total = num_steps_per_epoch * max_epochs
    return min(total, max_steps) if max_steps >= 0 else total


def compute_num_optimizer_steps(
    ppo_steps: int, num_rollout_samples: int, global_batch_size: int, ppo_epochs: int
) -> int:
    """Optimizer updates in `ppo_steps` PPO steps: the horizon of the learning-rate schedule, which counts updates."""
    return ppo_steps * ppo_epochs * (num_rollout_samples // global_batch_size)


def _append_rows(table: pd.DataFrame, step: int, rows: list[dict]) -> pd.DataFrame:
    new = pd.DataFrame([{"step": step} | row for row in rows], columns=TABLE_COLUMNS)
    return pd.concat([table, new], ignore_index=True) if len(table) else new


def check_policy_equals_reference(logprobs: torch.Tensor, init_logprobs: torch.Tensor, mask: torch.Tensor) -> None:
    """Before the first update policy and reference are the same weights, so their log-probs must be the same bits.

    A difference is a defect that training would hide: the KL penalty would be off by it for the whole run. Args are
    `[B, S-1]`. All ranks call it, and all raise together.

    Raises:
        RuntimeError: with the largest difference over the response tokens of all ranks.
    """
    difference = torch.where(mask.bool(), (logprobs - init_logprobs).abs(), 0).nan_to_num(nan=torch.inf)
    largest = all_reduce_dict(
        {"largest": difference.max().item() if difference.numel() else 0.0},
        dtype=torch.float64,
        group=parallel_state.get_data_parallel_group(),
        op=torch.distributed.ReduceOp.MAX,
    )["largest"]
    if largest > 0:
        raise RuntimeError(
            f"before the first update, log-probs of the policy and of the reference differ by up to {largest:.3e}; "
            "they must be equal. Check that the reference was copied from the weights that are trained, that dropout "
            "is off during inference, and that no kernel in use is non-deterministic."
        )


class PPOTrainer:
    """Trains a policy with PPO; see `fit`.

    Attributes:
        step: finished PPO steps (one rollout each).
        consumed_samples: prompts that rollouts have used.
        ppo_optimization_step: finished optimizer updates.
    """

    def __init__(
        self,
        cfg,
        model,
        optimizer,
        scheduler,
        train_dataloader_builder,
        val_dataloader_builder,
        collate_fn,
        rm_critic,
        batch_iterator_cls,
        logger,
        ckpt_callback,
        run_timer,
    ):
        """Every rank builds one.

        Args:
            cfg: `trainer.ppo`.
            model: an `AlignableGenerativeInterface` with `cfg.seed` and `tokenizer`.
            optimizer, scheduler: what `utils.train_utils.optimizer_step` takes.
            train_dataloader_builder, val_dataloader_builder: `builder(consumed_samples=...)` gives a data loader whose
                batch sampler yields this rank's micro-batches of one rollout after the other.
            collate_fn: list of samples of the dataset to an inference batch; must carry `idx`, the dataset index.
            rm_critic: critic and reward model; its methods return futures and are called by all ranks.
            batch_iterator_cls: `(sampler_iter, num_microbatches, dataset, collate_fn)` to an iterable of inference
                batches.
            logger: `log_metrics(metrics, step, prefix)`, `log_table(key, dataframe, step)`, `log_samples(name, rows,
                step)`, `finalize()`.
            ckpt_callback: `custom_save(monitor_candidates, is_train_end, trainer_state)`.
            run_timer: `start_time()`, `is_finished()`: the wall-clock limit of this run.

        Raises:
            ConfigError: values that cannot work together.
        """
        self.cfg = cfg
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.train_dataloader_builder = train_dataloader_builder
        self.val_dataloader_builder = val_dataloader_builder
        self.collate_fn = collate_fn
        self.rm_critic = rm_critic
        self.batch_iterator_cls = batch_iterator_cls
        self.logger = logger
        self.ckpt_callback = ckpt_callback
        self.run_timer = run_timer

        self.consumed_samples = 0
        self.step = 0
        self.ppo_optimization_step = 0
        self.resumed = False

        self.seed = int(model.cfg.seed)
        self.ppo_epochs = int(cfg.get("ppo_epochs", 1))
        self.critic_warmup_steps = int(cfg.get("critic_warmup_steps", 0))
        self.compute_init_policy_kl = cfg.initial_policy_kl_penalty > 0

        val_dataloader_builder(consumed_samples=0)  # sizes that do not fit are refused now, not after the first steps
        sampler = train_dataloader_builder(consumed_samples=0).batch_sampler
        self.num_rollout_samples = sampler.global_batch_size
        self.num_steps_per_epoch = compute_num_steps_per_epoch(sampler)
        self._check_config(sampler)
        self.set_max_steps()

        self.train_df = pd.DataFrame(columns=TABLE_COLUMNS)  # samples of all rollouts since the start of this process
        self.val_df = pd.DataFrame(columns=TABLE_COLUMNS)  # and of all validations
        self.timer = ScopedTimer(reduction="mean", sync_cuda=True, buffer_size=1)

    def _check_config(self, sampler) -> None:
        gbs, dp_size = self.cfg.model_gbs, parallel_state.get_data_parallel_world_size()
        if gbs % dp_size:
            raise ConfigError(
                f"model.global_batch_size={gbs} is not divisible by the {dp_size} data-parallel ranks; change one."
            )
        if self.num_rollout_samples % gbs:
            raise ConfigError(
                f"model.ppo.num_rollout_samples={self.num_rollout_samples} is not a multiple of "
                f"model.global_batch_size={gbs}; change one of them."
            )
        if self.ppo_epochs < 1:
            raise ConfigError(f"trainer.ppo.ppo_epochs={self.ppo_epochs} must be at least 1.")
        if self.cfg.max_epochs > 1 and not getattr(sampler, "is_random", False):
            raise ConfigError(
                f"trainer.ppo.max_epochs={self.cfg.max_epochs} needs a random sampler, which starts over after an "
                f"epoch, but the data loader has a {type(sampler).__name__}."
            )

    @property
    def epoch(self) -> int:
        """Finished passes over the prompts."""
        return self.step // self.num_steps_per_epoch

    def set_max_steps(self) -> None:
        self.max_steps = compute_max_steps(self.num_steps_per_epoch, self.cfg.max_epochs, self.cfg.max_steps)

    # ---------------------------------------------------------------------------------------------- the algorithm

    def fit(self) -> None:
        """Train until the last step or the end of the time limit; all ranks call it.

        The critic learns from a rollout while the actor does. Its future is awaited after the actor's updates, so that
        a failed critic update ends the run with the server's error, and no later request can overtake it.
        """
        self.run_timer.start_time()
        if self.step == 0:
            self._log_initial_validation()
            self._warm_up_critic()

        with self._progress_bar() as progress:
            run_time_exceeded = False
            while self.step < self.max_steps and not run_time_exceeded:
                with self.timer("rollout_time"):
                    data, rollout_metrics, timings = self.generate_rollouts()
                self._log_rollouts(rollout_metrics, self.step)

                critic_update = self.rm_critic.train(data)
                with self.timer("train_time"):
                    _, train_metrics = self.run_training(self._global_batches(data))
                with self.timer("critic_train_wait"):
                    train_metrics["critic_loss"] = self._finish_critic_update(critic_update)
                self._log_timings(timings | self._consume_timings())
                self.step += 1

                run_time_exceeded = self.run_timer.is_finished()
                run_val, save_model, is_train_end = self._check_progress(run_time_exceeded)
                val_metrics = self._log_validation() if run_val else {}
                shown = self._show_progress(progress, rollout_metrics | train_metrics, val_metrics)
                if save_model:
                    self.save(shown, is_train_end=is_train_end)

        self.logger.finalize()

    @torch.no_grad()
    def generate_rollouts(self, sampling_step: Optional[int] = None) -> tuple[dict, dict, dict]:
        """One rollout with the current policy: `(data, metrics, timings)`; all ranks call it.

        Args:
            sampling_step: selects the random streams of the samples; `self.step` if not given.

        Returns:
            data: that of `generate_ppo_data` for this rank's rows, and `sample_order` (int64 `[B]`): the row's place
                in the shuffled rollout of all ranks.
        """
        sampling_step = self.step if sampling_step is None else sampling_step
        with self._inference_mode():
            rollout_batch, metrics = self._run_inference(
                self.train_dataloader_builder, self.consumed_samples, is_validation=False, sampling_step=sampling_step
            )
            self.consumed_samples += metrics["rollout_size"]
            data, ppo_metrics = self.generate_ppo_data(rollout_batch)
            if self.compute_init_policy_kl and self.ppo_optimization_step == 0 and not self.resumed:
                check_policy_equals_reference(rollout_batch["logprobs"], rollout_batch["init_logprobs"], data["mask"])
            data["sample_order"] = rollout_batch["sample_order"]

        timings = self._consume_timings()
        timings["generated_tokens_per_s"] = (
            metrics["rollout_size"] * metrics["generation_length"] / max(timings["generate"], 1e-9)
        )
        return data, metrics | ppo_metrics | {"consumed_samples": self.consumed_samples}, timings

    def _run_inference(self, dataloader_builder, consumed_samples: int, is_validation: bool, sampling_step: int):
        """Generate and score one rollout: `(rows of this rank or None, metrics of all rows)`.

        The rows of this rank: `response_tokens` int64 `[B, S]`; `response_lengths`, `prompt_lengths`, `idx`,
        `sample_order` int64 `[B]`; `is_end` bool `[B]`; `rewards` f32 `[B]`; `values`, `logprobs` and, with a KL
        penalty, `init_logprobs` f32 `[B, S-1]`. A validation needs rewards only, so nothing else is computed for it.
        """
        rollouts, futures = self._generate(dataloader_builder, consumed_samples, sampling_step)
        eos_id = self.model.tokenizer.eos_id
        min_width = None if is_validation else self.cfg.rollout_batch_seq_length
        rollout = PPORolloutBatch.from_rollout_batches(rollouts, eos_id, min_width).gather_and_balance_globally()
        # The order in which ranks delivered depends on their number; the order of the dataset does not. Rows with the
        # same index have the same prompt and random stream, so their order is of no matter.
        order = rollout["idx"].argsort(stable=True)
        rollout = rollout.select(order)

        local = None if is_validation else self._compute_logprobs(rollout)

        with self.timer("critic_wait"):
            scores = [dict(zip(("rewards", "values"), future.result(), strict=True)) for future in futures]
            if is_validation:
                scores = [{"rewards": score["rewards"]} for score in scores]
            width = rollout["response_tokens"].size(1)
            scores = PPORolloutBatch.from_rollout_batches(scores, eos_id, width).gather_and_balance_globally()
        scores = scores.select(order)
        rollout.update(scores)

        metrics = compute_rollout_metrics(rollout)
        metrics["table"] = sample_rows(
            rollout, self.model.tokenizer, len(rollout["idx"]) if is_validation else TRAIN_TABLE_ROWS
        )
        if local is not None:
            local.update(self._local_rows(scores))
        return local, metrics

    def _generate(self, dataloader_builder, consumed_samples: int, sampling_step: int) -> tuple[list, list]:
        """This rank's rollouts by micro-batch, and the futures of their scores: the critic works while we generate."""
        dataloader = dataloader_builder(consumed_samples=consumed_samples)
        num_microbatches = compute_num_rollout_microbatches(dataloader)
        with self.timer("batch_iterator_init"):
            batches = self.batch_iterator_cls(
                iter(dataloader.batch_sampler), num_microbatches, dataloader.dataset, self.collate_fn
            )
        rollouts, futures = [], []
        with self.timer("generate"):
            for batch in batches:
                batch["sample_seeds"] = sample_seeds(self.seed, sampling_step, batch["idx"])
                rollout = self.model.infer(batch)
                futures.append(self.rm_critic.infer_rm_critic(rollout))
                carried = {key: batch[key].to(get_device()) for key in ("idx", "loss_multiplier") if key in batch}
                rollouts.append(dict(rollout) | carried)
        return rollouts, futures

    def _compute_logprobs(self, rollout: PPORolloutBatch) -> PPORolloutBatch:
        """This rank's rows of a gathered rollout, with the log-probs of the policy and of the reference."""
        local = self._local_rows(rollout)
        local["sample_order"] = self._local_places(len(rollout["idx"]))
        with self.timer("logprobs"):
            local["logprobs"] = self.model.get_inference_log_probs(local["response_tokens"])
        if self.compute_init_policy_kl:
            with self.timer("init_logprobs"):
                local["init_logprobs"] = self.model.get_init_policy_logprobs(local["response_tokens"])
        return local

    def generate_ppo_data(self, rollout_batch) -> tuple[dict, dict]:
        """Rewards with KL, advantages and returns of this rank's rows: `(data, metrics)`; all ranks call it.

        Args:
            rollout_batch: what `_run_inference` describes. Slots outside the response may hold anything, NaN included.

        Returns:
            data: `response_tokens` int64 `[B, S]`, `is_end` bool `[B]`, and f32 `[B, S-1]`: `mask` (1 on response
                tokens), `advantages`, `returns`, `values`, `prev_logprobs`.
            metrics: of all ranks, before advantages are normalized.
        """
        group = parallel_state.get_data_parallel_group()
        prompt_lengths, response_lengths = rollout_batch["prompt_lengths"], rollout_batch["response_lengths"]
        mask = create_mask(
            values=rollout_batch["values"], prompt_lengths=prompt_lengths, response_lengths=response_lengths
        )
        if "loss_multiplier" in rollout_batch:  # 0: a stand-in for a prompt that could not be used
            mask = mask * (rollout_batch["loss_multiplier"] > 0)[:, None]
        is_response = mask.bool()
        values = torch.where(is_response, rollout_batch["values"], 0)
        logprobs = torch.where(is_response, rollout_batch["logprobs"], 0)

        if self.compute_init_policy_kl:
            init_policy_kl = calculate_kl_penalty(
                log_probs_a=logprobs,
                log_probs_b=torch.where(is_response, rollout_batch["init_logprobs"], 0),
                use_absolute_kl=self.cfg.use_absolute_kl,
            )
        else:
            init_policy_kl = torch.zeros_like(logprobs)
        rewards_with_kl = calculate_ppo_rewards(
            values,
            rollout_batch["rewards"],
            response_lengths,
            init_policy_kl,
            penalty_factor=self.cfg.initial_policy_kl_penalty,
        )
        advantages, returns = calculate_advantages_and_returns(
            values=values,
            rewards=rewards_with_kl,
            discount_factor=self.cfg.discount_factor,
            gae_lambda=self.cfg.gae_lambda,
            mask=mask,
        )
        metrics = compute_ppo_data_metrics(
            init_policy_kl=init_policy_kl,
            rewards_with_kl=rewards_with_kl,
            advantages=advantages,
            returns=returns,
            values=values,
            mask=mask,
            group=group,
        )
        if self.cfg.normalize_advantages:
            advantages = normalize_tensor(advantages, mask, group=group)
        data = {
            "response_tokens": rollout_batch["response_tokens"],
            "is_end": rollout_batch["is_end"],
            "mask": mask,
            "advantages": advantages,
            "returns": returns,
            "values": values,
            "prev_logprobs": logprobs,
        }
        return data, metrics

    def run_training(self, dataloader_iter) -> tuple[float, dict]:
        """One optimizer update per global batch (each rank has its share of it); all ranks call it.

        Returns:
            Loss and metrics of the last update.
        """
        self.model.prepare_for_training()
        loss, metrics = 0.0, {}
        for batch in dataloader_iter:
            self.optimizer.zero_grad()
            self.model.prepare_for_training_step()
            loss, metrics = self.model.get_loss_and_metrics(batch=batch, forward_only=False)
            self.model.finish_training_step()
            lr = learning_rate(self.optimizer)
            grad_norm = optimizer_step(self.optimizer, self.scheduler, self.cfg.gradient_clip_val)

            self.ppo_optimization_step += 1
            metrics = dict(metrics) | {
                "loss": loss,
                "actor_loss": loss,
                "lr": lr,
                "optim_step": self.ppo_optimization_step,
                "ppo_step": self.step,
            }
            if grad_norm is not None:
                metrics["grad_norm"] = float(grad_norm)
            self.logger.log_metrics(metrics, step=self.ppo_optimization_step, prefix="train_optim/")
        self.model.finish_training()
        self.optimizer.zero_grad()
        return loss, metrics

    @torch.no_grad()
    def run_validation(self) -> dict:
        """Rewards and lengths of one answer to each validation prompt, always from the same random streams."""
        with self._inference_mode():
            _, metrics = self._run_inference(
                self.val_dataloader_builder, 0, is_validation=True, sampling_step=VALIDATION_STEP
            )
        return metrics

    # --------------------------------------------------------------------------------------- checkpoint and resume

    def save(self, extra_candidates: Optional[dict] = None, is_train_end: bool = False) -> None:
        """Save actor and critic side by side; all ranks call it.

        Args:
            extra_candidates: metrics that a checkpoint may be ranked by, beside the counters.
        """
        self.model.prepare_for_training()  # brings back optimizer states that wait in host memory
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if parallel_state.get_world_size() > 1:
            torch.distributed.barrier()
        critic_save = self.rm_critic.save(actor_step=self.step)
        self.ckpt_callback.custom_save(
            monitor_candidates=self.state_dict() | (extra_candidates or {}),
            is_train_end=is_train_end,
            trainer_state=self.state_dict(),
        )
        critic_save.result()
        self.model.finish_training()

    def state_dict(self) -> dict[str, int]:
        return {
            "step": self.step,
            "consumed_samples": self.consumed_samples,
            "epoch": self.epoch,
            "ppo_optimization_step": self.ppo_optimization_step,
        }

    def load_state_dict(self, state_dict: dict) -> None:
        """Continue where `state_dict()` was taken; all ranks call it, with equal states.

        Raises:
            RuntimeError: a rank read another state than the first.
        """
        state = {key: int(state_dict[key]) for key in ("step", "consumed_samples", "ppo_optimization_step")}
        if parallel_state.get_world_size() > 1:
            states = [None] * parallel_state.get_world_size()
            torch.distributed.all_gather_object(states, state)
            for rank, other in enumerate(states):
                if other != states[0]:
                    raise RuntimeError(
                        f"rank {rank} resumes from {other}, but rank 0 from {states[0]}: give all one checkpoint."
                    )
        self.step, self.consumed_samples = state["step"], state["consumed_samples"]
        self.ppo_optimization_step = state["ppo_optimization_step"]
        self.resumed = True
        self.set_max_steps()

    # ------------------------------------------------------------------------------------------ steps of the above

    def _warm_up_critic(self) -> None:
        """Rollouts that train the critic only. Their prompts are given back: the actor starts at the first one."""
        for i in range(self.critic_warmup_steps):
            self.consumed_samples = (i % self.num_steps_per_epoch) * self.num_rollout_samples
            data, metrics, _ = self.generate_rollouts(sampling_step=i - self.critic_warmup_steps)
            metrics["critic_loss"] = self.rm_critic.train(data).result()
            metrics.pop("table")
            self.logger.log_metrics(metrics, step=i, prefix="critic_warmup/")
        self.consumed_samples = 0

    def _finish_critic_update(self, critic_update) -> float:
        """Wait for the critic's update; log its loss beside the actor's, at the last optimizer update of this step."""
        critic_loss = float(critic_update.result())
        self.logger.log_metrics({"critic_loss": critic_loss}, step=self.ppo_optimization_step, prefix="train_optim/")
        return critic_loss

    def _local_places(self, num_rows: int) -> torch.Tensor:
        rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        return deal(num_rows, rank, size, self.cfg.model_gbs).to(get_device())

    def _local_rows(self, rollout: PPORolloutBatch, passed: int = 0) -> PPORolloutBatch:
        """This rank's rows in pass number `passed` over a gathered rollout."""
        # Prompts use streams of index >= 0 of this step, so negative ones are free for shuffling.
        seed = int(sample_seeds(self.seed, self.step, torch.tensor([-2 - passed]))[0])
        rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        return rollout.chunk(rank, size, seed, self.cfg.model_gbs)

    def _global_batches(self, data: dict) -> Iterator[dict]:
        """This rank's share of each global batch, in `ppo_epochs` passes over the rollout, each in its own order."""
        data = PPORolloutBatch(data)
        per_rank = self.cfg.model_gbs // parallel_state.get_data_parallel_world_size()
        for passed in range(self.ppo_epochs):
            if passed == 1:  # later passes deal all rows anew, so every rank needs all of them
                gathered = data.gather_and_balance_globally()
                gathered = gathered.select(gathered["sample_order"].argsort())
            rows = data if passed == 0 else self._local_rows(gathered, passed)
            for start in range(0, len(rows["mask"]), per_rank):
                yield {key: rows[key][start : start + per_rank] for key in rows if key != "sample_order"}

    @contextlib.contextmanager
    def _inference_mode(self):
        with self.timer("prepare_for_inference"):
            self.model.prepare_for_inference()
        yield
        with self.timer("finish_inference"):
            self.model.finish_inference()

    def _check_progress(self, run_time_exceeded: bool) -> tuple[bool, bool, bool]:
        return check_progress(
            self.step,
            self.max_steps,
            self.cfg.val_check_interval,
            self.cfg.save_interval,
            1.0,
            run_time_exceeded=run_time_exceeded,
        )

    # ----------------------------------------------------------------------------------------------------- logging

    def _consume_timings(self) -> dict[str, float]:
        """Seconds by name since the last call, of the slowest rank; all ranks call it."""
        return all_reduce_dict(
            self.timer.consume_durations(), dtype=torch.float64, group=None, op=torch.distributed.ReduceOp.MAX
        )

    def _log_timings(self, timings: dict) -> None:
        self.logger.log_metrics(timings, step=self.step, prefix="timers/")

    def _log_rollouts(self, metrics: dict, step: int) -> None:
        self.train_df = _append_rows(self.train_df, step, metrics.pop("table"))
        self.logger.log_metrics(metrics | {"epoch": self.epoch + 1}, step=step, prefix="train_rollouts/")
        self.logger.log_table(key="table/train_rollouts", dataframe=self.train_df, step=step)

    def _log_validation(self) -> dict:
        with self.timer("validation_time"):
            metrics = self.run_validation()
        samples = metrics.pop("table")
        self.logger.log_samples("val_samples", samples, step=self.step)
        self.val_df = _append_rows(self.val_df, self.step, samples[:VAL_TABLE_ROWS])
        self.logger.log_metrics(metrics, step=self.step, prefix="val_rollouts/")
        self.logger.log_table(key="table/val_rollouts", dataframe=self.val_df, step=self.step)
        timings = self._consume_timings()
        total = timings.pop("validation_time")
        inner = {f"validation_{name}": seconds for name, seconds in timings.items()}
        self._log_timings({"validation_time": total} | inner)
        return metrics

    def _log_initial_validation(self) -> None:
        """Where the untrained policy stands, if `run_init_validation` asks for it."""
        if self.cfg.get("run_init_validation", False):
            self._log_validation()

    def _progress_bar(self) -> tqdm:
        return tqdm(
            total=self.max_steps,
            initial=self.step,
            desc="PPO Global Step",
            disable=parallel_state.get_rank() != 0,
            dynamic_ncols=True,
        )

    def _show_progress(self, progress: tqdm, train_metrics: dict, val_metrics: dict) -> dict[str, float]:
        """Advance the bar; returns all metrics of the step as `train_*` and `val_*`, to rank checkpoints by."""
        shown = {f"train_{key}": float(value) for key, value in train_metrics.items()}
        shown |= {f"val_{key}": float(value) for key, value in val_metrics.items()}
        progress.set_postfix({key: f"{shown[key]:.4g}" for key in POSTFIX_KEYS if key in shown}, refresh=False)
        progress.update(1)
        return shown
