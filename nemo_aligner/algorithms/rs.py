# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Rejection sampling of a Megatron policy against a reward model in another process.

`RSTrainer.fit` is the algorithm: answer each prompt several times, score the answers, keep the
best of each prompt, and train on them with the likelihood loss. (Llama 2, arXiv:2307.09288,
section 3.2.3, calls it rejection sampling fine-tuning; RAFT, arXiv:2304.06767, is the same with
one answer kept.) It speaks to the policy only through `AlignableGenerativeInterface` and to the
reward model only through futures (`infer_rm`).

Shapes: N rollouts of a step over all DP ranks (prompts x answers to each), M of them selected, B
of these on this rank, S padded length (prompt + response). Tensors per transition are `[B, S-1]`;
`nemo_aligner.core.types` has their alignment.

As in PPO, the split of the work does not change the numbers: an answer's random stream depends on
(seed, step, dataset index, number of the answer), the gathered rollouts are put in the order of
(dataset index, number of the answer), and one seeded permutation of the selected rows is dealt to
the updates and ranks.
"""

from collections.abc import Iterable
from itertools import islice

import torch

from nemo_aligner.algorithms.alarms import Alarms, check_rewards
from nemo_aligner.algorithms.rollout_training import (
    TRAIN_TABLE_ROWS,
    VALIDATION_STEP,
    agreed_counters,
    check_sizes,
    consume_timings,
    empty_table,
    inference_mode,
    local_rows,
    log_rollouts,
    log_validation,
    optimizer_updates,
    progress_bar,
    ready_to_save,
    shares_of_global_batches,
    show_progress,
    what_is_due,
)
from nemo_aligner.algorithms.rollouts import (
    PPORolloutBatch,
    answer_mask,
    answers_to,
    compute_num_rollout_microbatches,
    compute_rollout_metrics,
    reward_columns,
    sample_rows,
    with_prompt_columns,
)
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.core.rewards import select_topk
from nemo_aligner.servers.source_rank import wait_for_all
from nemo_aligner.training.finite import naming_step
from nemo_aligner.training.schedule import (
    compute_max_steps,
    compute_num_steps_per_epoch,
    endless_batches,
    is_complete,
)
from nemo_aligner.training.timers import ScopedTimer

POSTFIX_KEYS = (
    "train_global_rewards",
    "train_selected_rewards",
    "train_loss",
    "val_global_rewards",
)


def compute_num_optimizer_steps(
    rs_steps: int, num_rollout_samples: int, top_n_rollouts: int, global_batch_size: int
) -> int:
    """Optimizer updates in `rs_steps` steps: the horizon of the learning-rate schedule, which
    counts updates.
    """
    return rs_steps * (num_rollout_samples * top_n_rollouts // global_batch_size)


def compute_global_rollout_metrics(rollout) -> dict[str, float]:
    """Means over all rollouts of a step, gathered from all ranks; lengths in tokens.

    `global_response_lengths_mean` is that of the answers alone, `response_lengths` counts the
    prompt too.
    """
    metrics = compute_rollout_metrics(rollout)
    return {
        "global_rewards": metrics.pop("rewards"),
        "global_response_lengths_mean": metrics.pop("generation_length"),
        "global_prompt_lengths": metrics.pop("prompt_lengths"),
    } | metrics


class RSTrainer:
    """Trains a policy with rejection sampling; see `fit`.

    Attributes:
        step: finished steps (one round of rollouts each).
        consumed_samples: prompts that rollouts have used; it alone says where in the data a
            resumed job goes on.
        rs_optimization_step: finished optimizer updates.
    """

    def __init__(
        self,
        cfg,
        model,
        optimizer,
        scheduler,
        train_dataloader,
        val_dataloader,
        logger,
        ckpt_callback,
        run_timer,
        num_rollouts_per_prompt,
        top_n_rollouts,
        rm,
    ):
        """Every rank builds one.

        Args:
            cfg: `trainer.rs`.
            model: an `AlignableGenerativeInterface` with `cfg.seed` and `tokenizer`.
            optimizer, scheduler: what `training.update.optimizer_step` takes.
            train_dataloader, val_dataloader: data loaders of inference batches (they must carry
                `idx`, the dataset index) whose batch samplers yield this rank's micro-batches of
                one round of prompts after the other.
            logger: `log_metrics(metrics, step, prefix)`, `log_table(key, dataframe, step)`,
                `log_samples(name, rows, step)`, `finalize()`.
            ckpt_callback: `custom_save(monitor_candidates, is_train_end, trainer_state)`.
            run_timer: `start_time()`, `is_finished()`: the wall-clock limit of this run.
            num_rollouts_per_prompt: answers to each prompt.
            top_n_rollouts: how many of them are trained on, the best rewarded.
            rm: reward model; `infer_rm(rollout)` returns a future and is called by all ranks.

        Raises:
            ConfigError: values that cannot work together.
        """
        self.cfg = cfg
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.train_dataloader = train_dataloader
        self.val_dataloader = val_dataloader
        self.logger = logger
        self.ckpt_callback = ckpt_callback
        self.run_timer = run_timer
        self.num_rollouts_per_prompt = int(num_rollouts_per_prompt)
        self.top_n_rollouts = int(top_n_rollouts)
        self.rm = rm

        self.consumed_samples = 0
        self.step = 0
        self.rs_optimization_step = 0

        self.seed = int(model.cfg.seed)
        sampler = train_dataloader.batch_sampler
        self.num_rollout_samples = sampler.global_batch_size
        self._check_config(sampler)
        self.num_train_microbatches = compute_num_rollout_microbatches(train_dataloader)
        self.num_val_microbatches = compute_num_rollout_microbatches(val_dataloader)
        self.num_steps_per_epoch = compute_num_steps_per_epoch(sampler)
        self.set_max_steps()
        self.train_batches = endless_batches(train_dataloader, self)
        self.alarms = Alarms("trainer.rs.alarms", cfg.get("alarms"))

        self.train_df = empty_table()  # samples of all rollouts since the start of this process
        self.val_df = empty_table()  # and of all validations
        self.timer = ScopedTimer(reduction="mean", sync_cuda=True, buffer_size=1)
        self.update_timer = ScopedTimer(reduction="mean", sync_cuda=True, buffer_size=-1)

    def _check_config(self, sampler) -> None:
        answers, kept = self.num_rollouts_per_prompt, self.top_n_rollouts
        if kept < 1:
            raise ConfigError(f"model.rs.top_n_rollouts={kept} must be at least 1.")
        if kept > answers:
            raise ConfigError(
                f"model.rs.top_n_rollouts={kept} is more than "
                f"model.rs.num_rollouts_per_prompt={answers}: of each "
                "prompt's answers that many are to be kept. Lower the one or raise the other."
            )
        check_sizes(
            "trainer.rs",
            self.cfg,
            sampler,
            self.num_rollout_samples * kept,
            f"model.rs.num_rollout_samples={self.num_rollout_samples} x "
            f"model.rs.top_n_rollouts={kept}",
        )

    @property
    def epoch(self) -> int:
        """Finished passes over the prompts."""
        return self.step // self.num_steps_per_epoch

    def set_max_steps(self) -> None:
        self.max_steps = compute_max_steps(
            self.num_steps_per_epoch, self.cfg.max_epochs, self.cfg.max_steps
        )

    # ------------------------------------------------------------------------------- the algorithm

    def fit(self) -> None:
        """Train until the last step or the end of the time limit; all ranks call it."""
        self.run_timer.start_time()
        is_complete(self.step, self.max_steps, "trainer.rs.max_steps or max_epochs")
        if self.step == 0 and self.cfg.get("run_init_validation", False):
            self._log_validation()

        with progress_bar("RS Global Step", self.step, self.max_steps) as progress:
            run_time_exceeded = False
            while self.step < self.max_steps and not run_time_exceeded:
                with self.timer("rollout_time"), naming_step(f"RS step {self.step}"):
                    data, rollout_metrics, timings = self.generate_rollouts()
                rollout_metrics |= self.alarms.watch(rollout_metrics, self.step)
                self.train_df = log_rollouts(
                    self.logger, self.train_df, rollout_metrics, self.step, epoch=self.epoch + 1
                )

                with self.timer("train_time"), naming_step(f"RS step {self.step}"):
                    _, train_metrics = self.run_training(
                        shares_of_global_batches(data, self.cfg.model_gbs)
                    )
                self.alarms.check_replicas(self.model, self.step, self.timer)
                timings |= consume_timings(self.timer, self.update_timer)
                self.logger.log_metrics(timings, step=self.step, prefix="timers/")
                self.step += 1

                run_time_exceeded = self.run_timer.is_finished()
                run_val, save_model, is_train_end = what_is_due(
                    self.cfg, self.step, self.max_steps, run_time_exceeded
                )
                val_metrics = self._log_validation() if run_val else {}
                shown = show_progress(
                    progress, rollout_metrics | train_metrics, val_metrics, POSTFIX_KEYS
                )
                if save_model:
                    self.save(shown, is_train_end=is_train_end)

        self.logger.finalize()

    @torch.no_grad()
    def generate_rollouts(self) -> tuple[dict, dict, dict]:
        """Answers to the next prompts, and the best of them: `(data, metrics, timings)`; all ranks
        call it.

        Returns:
            data: that of `generate_rs_data` for this rank's share of the selected rollouts.
        """
        with inference_mode(self.model, self.timer):
            batches = islice(self.train_batches, self.num_train_microbatches)
            rollout = self._run_inference(batches, self.num_rollouts_per_prompt, self.step)
            self.consumed_samples += self.num_rollout_samples
            # The answers were put in order, so that of equal rewards the same are kept for any
            # number of ranks; and equal texts are no reason to take two prompts for one.
            selected = PPORolloutBatch(
                select_topk(rollout.data, self.top_n_rollouts, group_by="idx")
            )
            data = self.generate_rs_data(
                local_rows(selected, self.seed, self.step, self.cfg.model_gbs)
            )

        metrics = compute_global_rollout_metrics(rollout)
        metrics["selected_rewards"] = compute_rollout_metrics(selected)["rewards"]
        metrics["consumed_samples"] = self.consumed_samples
        metrics["table"] = sample_rows(selected, self.model.tokenizer, TRAIN_TABLE_ROWS)
        timings = consume_timings(self.timer)
        generated = metrics["rollout_size"] * metrics["global_response_lengths_mean"]
        timings["generated_tokens_per_s"] = generated / max(timings["generate"], 1e-9)
        return data, metrics, timings

    def _run_inference(
        self, batches: Iterable[dict], answers: int, sampling_step: int
    ) -> PPORolloutBatch:
        """Generate and score `answers` rollouts of each prompt in this rank's micro-batches.

        Returns:
            The rollouts of all ranks on every rank, in the order of `sample_key` (dataset index,
            then number of the answer): `response_tokens` int64 `[N, S]`; `response_lengths`,
            `prompt_lengths`, `idx`, `sample_key` int64 `[N]`; `is_end` bool `[N]`; `rewards` (and
            `rewards_<name>` of an ensemble's models) f32 `[N]`.
        """
        rollouts, futures = [], []
        with self.timer("generate"):
            for batch in answers_to(batches, answers, self.seed, sampling_step):
                rollout = self.model.infer(batch)
                futures.append(self.rm.infer_rm(rollout))  # scored while we generate on
                rollouts.append(with_prompt_columns(rollout, batch))
        with self.timer("rm_wait"):
            wait_for_all(pending for future in futures for pending in future.pending)
            for rollout, future in zip(rollouts, futures, strict=True):
                rollout.update(reward_columns(future.result()))
        eos_id, min_width = self.model.tokenizer.eos_id, self.cfg.rollout_batch_seq_length
        rollout = PPORolloutBatch.from_rollout_batches(
            rollouts, eos_id, min_width
        ).gather_and_balance_globally()
        check_rewards(rollout, self.model.tokenizer)
        return rollout.select(rollout["sample_key"].argsort())

    def generate_rs_data(self, rollout_batch) -> dict:
        """What the updates consume, of selected rollouts: `response_tokens` int64 `[B, S]`; `mask`
        f32 `[B, S-1]`, 1 exactly on the answers' tokens (`answer_mask`).
        """
        return {
            "response_tokens": rollout_batch["response_tokens"],
            "mask": answer_mask(rollout_batch),
        }

    def run_training(self, dataloader_iter) -> tuple[float, dict]:
        """One optimizer update per global batch (each rank has its share of it); all ranks call
        it.

        Returns:
            Loss and metrics of the last update.
        """
        metrics = {"loss": 0.0}
        for metrics in optimizer_updates(
            dataloader_iter,
            self.model,
            self.optimizer,
            self.scheduler,
            self.cfg.gradient_clip_val,
            self.update_timer,
        ):
            self.rs_optimization_step += 1
            metrics |= {"optim_step": self.rs_optimization_step, "rs_step": self.step}
            self.logger.log_metrics(metrics, step=self.rs_optimization_step, prefix="train_optim/")
        return metrics["loss"], metrics

    @torch.no_grad()
    def run_validation(self) -> dict:
        """Rewards and lengths of one answer to each validation prompt, always from the same random
        streams.
        """
        with inference_mode(self.model, self.timer):
            self.val_dataloader.batch_sampler.consumed_samples = 0
            batches = islice(self.val_dataloader, self.num_val_microbatches)
            rollout = self._run_inference(batches, answers=1, sampling_step=VALIDATION_STEP)
        metrics = compute_global_rollout_metrics(rollout)
        metrics["table"] = sample_rows(rollout, self.model.tokenizer, len(rollout["idx"]))
        return metrics

    # ----------------------------------------------------------------------- checkpoint and resume

    def save(self, extra_candidates: dict | None = None, is_train_end: bool = False) -> None:
        """Save a checkpoint; all ranks call it.

        Args:
            extra_candidates: metrics that a checkpoint may be ranked by, beside the counters.
        """
        with ready_to_save(self.model):
            self.ckpt_callback.custom_save(
                monitor_candidates=self.state_dict() | (extra_candidates or {}),
                is_train_end=is_train_end,
                trainer_state=self.state_dict(),
            )

    def state_dict(self) -> dict[str, int]:
        return {
            "step": self.step,
            "consumed_samples": self.consumed_samples,
            "epoch": self.epoch,
            "rs_optimization_step": self.rs_optimization_step,
            "num_rollout_samples": self.num_rollout_samples,
        }

    def load_state_dict(self, state_dict: dict) -> None:
        """Continue where `state_dict()` was taken; all ranks call it, with equal states.

        Raises:
            RuntimeError: a rank read another state than the first.
            UserError: the state is of a job with another `num_rollout_samples`.
        """
        counters = ("step", "consumed_samples", "rs_optimization_step")
        state = agreed_counters(state_dict, counters, "model.rs", self.num_rollout_samples)
        self.step, self.consumed_samples = state["step"], state["consumed_samples"]
        self.rs_optimization_step = state["rs_optimization_step"]
        self.set_max_steps()

    # -------------------------------------------------------------------------- steps of the above

    def _log_validation(self) -> dict:
        with self.timer("validation_time"), naming_step(f"validation after {self.step} RS steps"):
            metrics = self.run_validation()
        self.val_df = log_validation(
            self.logger, self.val_df, metrics, consume_timings(self.timer), self.step
        )
        return metrics
