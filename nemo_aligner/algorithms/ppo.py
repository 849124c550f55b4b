# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Proximal policy optimization of a Megatron policy against a critic and reward model in other
processes.

`PPOTrainer.fit` is the algorithm. It speaks to the policy only through
`AlignableGenerativeInterface`, to the critic only through futures (`infer_rm_critic`, `train`,
`save`), and knows nothing of tensor or pipeline parallelism: the ranks of one data-parallel (DP)
replica hold equal batches and all call the same methods. How rewards become advantages is in
`ppo_data.py`; some ways need no critic, whose part an object then plays that has rewards only.

Shapes: N samples of a rollout over all DP ranks (prompts x answers to each), B of them on this
rank, S padded length (prompt + response), G the global batch of one optimizer update. Tensors per
transition are `[B, S-1]`; `nemo_aligner.core.types` has their alignment.

The split of the work does not change the numbers:

* a sample's random stream depends on (seed, step, dataset index, number of the answer), not on the
  rank or micro-batch that generates it;
* a gathered rollout is put in the order of dataset index and answer before it is shuffled, whoever
  generated what;
* one seeded permutation of the N rows is cut into global batches of G consecutive rows, and each
  global batch into one share per DP rank. So update k sees the same G samples with any number of
  ranks (`deal`).

References: Schulman et al. 2017 (arXiv:1707.06347), eq. 7 for the clipped loss, eq. 11 for the
advantages; Stiennon et al. 2020 (arXiv:2009.01325), section 3.4, for the KL term in the reward.
"""

from collections.abc import Iterator

import torch

from nemo_aligner.algorithms.alarms import (
    Alarms,
    check_policy_equals_reference,
    check_rewards,
    rollout_health,
)
from nemo_aligner.algorithms.ppo_data import DataSettings, make_kl_controller, make_ppo_data
from nemo_aligner.algorithms.rollout_training import (
    TRAIN_TABLE_ROWS,
    VALIDATION_STEP,
    EarlyStop,
    agreed_counters,
    check_sizes,
    consume_timings,
    empty_table,
    inference_mode,
    local_places,
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
    answers_to,
    compute_num_rollout_microbatches,
    compute_rollout_metrics,
    reward_columns,
    sample_rows,
    with_prompt_columns,
)
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.servers.source_rank import wait_for_all
from nemo_aligner.training.finite import naming_step
from nemo_aligner.training.schedule import (
    compute_max_steps,
    compute_num_steps_per_epoch,
    is_complete,
)
from nemo_aligner.training.timers import ScopedTimer

POSTFIX_KEYS = (
    "train_rewards",
    "train_init_policy_kl",
    "train_actor_loss",
    "train_critic_loss",
    "val_rewards",
)


def compute_num_optimizer_steps(
    ppo_steps: int,
    num_rollout_samples: int,
    global_batch_size: int,
    ppo_epochs: int,
    num_rollouts_per_prompt: int = 1,
) -> int:
    """Optimizer updates in `ppo_steps` PPO steps: the horizon of the learning-rate schedule, which
    counts updates.

    Updates that `target_kl` leaves out are counted; the schedule then does not come to its end.
    """
    return (
        ppo_steps
        * ppo_epochs
        * (num_rollout_samples * num_rollouts_per_prompt // global_batch_size)
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
        num_rollouts_per_prompt=1,
        max_response_length=None,
        kl_loss_coef=0.0,
    ):
        """Every rank builds one.

        Args:
            cfg: `trainer.ppo`.
            model: an `AlignableGenerativeInterface` with `cfg.seed` and `tokenizer`.
            optimizer, scheduler: what `training.update.optimizer_step` takes.
            train_dataloader_builder, val_dataloader_builder: `builder(consumed_samples=...)` gives
                a data loader whose batch sampler yields this rank's micro-batches of one rollout
                after the other.
            collate_fn: list of samples of the dataset to an inference batch; must carry `idx`, the
            dataset index.
            rm_critic: critic and reward model; its methods return futures and are called by all
                ranks. With an `advantage_estimator` that needs no critic, the reward model alone
                with the same methods.
            batch_iterator_cls: `(sampler_iter, num_microbatches, dataset, collate_fn)` to an
                iterable of inference batches.
            logger: `log_metrics(metrics, step, prefix)`, `log_table(key, dataframe, step)`,
                `log_samples(name, rows, step)`, `finalize()`.
            ckpt_callback: `custom_save(monitor_candidates, is_train_end, trainer_state)`.
            run_timer: `start_time()`, `is_finished()`: the wall-clock limit of this run.
            num_rollouts_per_prompt: answers to each training prompt.
            max_response_length: most tokens of an answer, where an overlong penalty ends.
            kl_loss_coef: of the model's loss; above 0 the updates get the reference's log-probs.

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
        self.num_rollouts_per_prompt = int(num_rollouts_per_prompt)
        self.data_settings = DataSettings.from_config(cfg, max_response_length)
        self.kl_controller = make_kl_controller(cfg)
        self.compute_init_policy_kl = cfg.initial_policy_kl_penalty > 0 or kl_loss_coef > 0

        val_dataloader_builder(
            consumed_samples=0
        )  # sizes that do not fit are refused now, not after the first steps
        sampler = train_dataloader_builder(consumed_samples=0).batch_sampler
        self.num_rollout_samples = sampler.global_batch_size
        self.num_steps_per_epoch = compute_num_steps_per_epoch(sampler)
        if self.ppo_epochs < 1:
            raise ConfigError(f"trainer.ppo.ppo_epochs={self.ppo_epochs} must be at least 1.")
        rows, name = self.num_rollout_samples, "model.ppo.num_rollout_samples"
        if self.num_rollouts_per_prompt != 1:
            name += f"={rows} x model.ppo.num_rollouts_per_prompt={self.num_rollouts_per_prompt}"
        check_sizes("trainer.ppo", cfg, sampler, rows * self.num_rollouts_per_prompt, name)
        self.set_max_steps()
        self.alarms = Alarms("trainer.ppo.alarms", cfg.get("alarms"))

        self.train_df = empty_table()  # samples of all rollouts since the start of this process
        self.val_df = empty_table()  # and of all validations
        self.timer = ScopedTimer(reduction="mean", sync_cuda=True, buffer_size=1)
        self.update_timer = ScopedTimer(reduction="mean", sync_cuda=True, buffer_size=-1)

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
        """Train until the last step or the end of the time limit; all ranks call it.

        The critic learns from a rollout while the actor does. Its future is awaited after the
        actor's updates, so that a failed critic update ends the run with the server's error, and
        no later request can overtake it.
        """
        self.run_timer.start_time()
        is_complete(self.step, self.max_steps, "trainer.ppo.max_steps or max_epochs")
        if self.step == 0:
            if self.cfg.get("run_init_validation", False):
                self._log_validation()
            self._warm_up_critic()

        with progress_bar("PPO Global Step", self.step, self.max_steps) as progress:
            run_time_exceeded = False
            while self.step < self.max_steps and not run_time_exceeded:
                with self.timer("rollout_time"), naming_step(f"PPO step {self.step}"):
                    data, rollout_metrics, timings = self.generate_rollouts()
                rollout_metrics |= self.alarms.watch(rollout_metrics, self.step)
                self.train_df = log_rollouts(
                    self.logger, self.train_df, rollout_metrics, self.step, epoch=self.epoch + 1
                )

                critic_update = self.rm_critic.train(data)
                with self.timer("train_time"), naming_step(f"PPO step {self.step}"):
                    _, train_metrics = self.run_training(self._global_batches(data))
                self.alarms.watch(train_metrics, self.step)
                self.alarms.check_replicas(self.model, self.step, self.timer)
                with self.timer("critic_train_wait"):
                    train_metrics |= self._finish_critic_update(critic_update)
                kl = rollout_metrics["init_policy_kl_per_sample"]
                self.kl_controller.update(kl, num_samples=rollout_metrics["rollout_size"])
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
    def generate_rollouts(self, sampling_step: int | None = None) -> tuple[dict, dict, dict]:
        """One rollout with the current policy: `(data, metrics, timings)`; all ranks call it.

        Args:
            sampling_step: selects the random streams of the samples; `self.step` if not given.

        Returns:
            data: that of `generate_ppo_data` for this rank's rows, and `sample_order` (int64
                `[B]`): the row's place in the shuffled rollout of all ranks.
        """
        sampling_step = self.step if sampling_step is None else sampling_step
        with inference_mode(self.model, self.timer):
            rollout_batch, metrics = self._run_inference(
                self.train_dataloader_builder,
                self.consumed_samples,
                is_validation=False,
                sampling_step=sampling_step,
            )
            self.consumed_samples += self.num_rollout_samples
            data, ppo_metrics = self.generate_ppo_data(rollout_batch)
            ppo_metrics |= rollout_health(rollout_batch, data)
            if (
                self.compute_init_policy_kl
                and self.ppo_optimization_step == 0
                and not self.resumed
            ):
                ppo_metrics |= check_policy_equals_reference(
                    rollout_batch["logprobs"], rollout_batch["init_logprobs"], data["mask"]
                )
            data["sample_order"] = rollout_batch["sample_order"]

        timings = consume_timings(self.timer)
        timings["generated_tokens_per_s"] = (
            metrics["rollout_size"] * metrics["generation_length"] / max(timings["generate"], 1e-9)
        )
        return data, metrics | ppo_metrics | {"consumed_samples": self.consumed_samples}, timings

    def _run_inference(
        self, dataloader_builder, consumed_samples: int, is_validation: bool, sampling_step: int
    ):
        """Generate and score one rollout: `(rows of this rank or None, metrics of all rows)`.

        The rows of this rank: `response_tokens` int64 `[B, S]`; `response_lengths`,
        `prompt_lengths`, `idx`, `sample_key`, `sample_order` int64 `[B]`; `is_end` bool `[B]`;
        `rewards` f32 `[B]`; `logprobs`, with a critic `values` and with a KL to measure
        `init_logprobs` f32 `[B, S-1]`. A validation needs one answer to a prompt and its reward
        only, so nothing else is computed for it.
        """
        answers = 1 if is_validation else self.num_rollouts_per_prompt
        rollouts, futures = self._generate(
            dataloader_builder, consumed_samples, sampling_step, answers
        )
        eos_id = self.model.tokenizer.eos_id
        min_width = None if is_validation else self.cfg.rollout_batch_seq_length
        rollout = PPORolloutBatch.from_rollout_batches(
            rollouts, eos_id, min_width
        ).gather_and_balance_globally()
        # The order in which ranks delivered depends on their number; the order of the dataset does
        # not. Rows with the same key have the same prompt and random stream, so their order is of
        # no matter.
        order = rollout["sample_key"].argsort(stable=True)
        rollout = rollout.select(order)

        local = None if is_validation else self._compute_logprobs(rollout)

        with self.timer("critic_wait"):
            wait_for_all(pending for future in futures for pending in future.pending)
            scores = []
            for future in futures:
                scored = future.result()
                unused = is_validation or scored.values is None  # without a critic there are none
                scores.append(
                    reward_columns(scored) | ({} if unused else {"values": scored.values})
                )
            width = rollout["response_tokens"].size(1)
            scores = PPORolloutBatch.from_rollout_batches(
                scores, eos_id, width
            ).gather_and_balance_globally()
        scores = scores.select(order)
        rollout.update(scores)
        check_rewards(rollout, self.model.tokenizer)

        metrics = compute_rollout_metrics(rollout)
        metrics["table"] = sample_rows(
            rollout,
            self.model.tokenizer,
            len(rollout["idx"]) if is_validation else TRAIN_TABLE_ROWS,
        )
        if local is not None:
            local.update(self._local_rows(scores))
        return local, metrics

    def _generate(
        self, dataloader_builder, consumed_samples: int, sampling_step: int, answers: int
    ) -> tuple[list, list]:
        """This rank's rollouts by micro-batch, and the futures of their scores: the critic works
        while we generate.
        """
        dataloader = dataloader_builder(consumed_samples=consumed_samples)
        num_microbatches = compute_num_rollout_microbatches(dataloader)
        with self.timer("batch_iterator_init"):
            batches = self.batch_iterator_cls(
                iter(dataloader.batch_sampler),
                num_microbatches,
                dataloader.dataset,
                self.collate_fn,
            )
        rollouts, futures = [], []
        watched = self.alarms.needs_sampling_logprobs and sampling_step != VALIDATION_STEP
        with self.timer("generate"):
            for batch in answers_to(batches, answers, self.seed, sampling_step):
                rollout = self.model.infer(batch | {"return_logprobs": watched})
                futures.append(self.rm_critic.infer_rm_critic(rollout))
                rollouts.append(with_prompt_columns(rollout, batch))
        return rollouts, futures

    def _compute_logprobs(self, rollout: PPORolloutBatch) -> PPORolloutBatch:
        """This rank's rows of a gathered rollout, with the log-probs of the policy and of the
        reference.
        """
        local = self._local_rows(rollout)
        local["sample_order"] = local_places(len(rollout["idx"]), self.cfg.model_gbs)
        with self.timer("logprobs"):
            local["logprobs"] = self.model.get_inference_log_probs(local["response_tokens"])
        if self.compute_init_policy_kl:
            with self.timer("init_logprobs"):
                local["init_logprobs"] = self.model.get_init_policy_logprobs(
                    local["response_tokens"]
                )
        return local

    def generate_ppo_data(self, rollout_batch) -> tuple[dict, dict]:
        """Rewards with KL, advantages and returns of this rank's rows: `(data, metrics)`; all
        ranks call it.

        Args:
            rollout_batch: what `_run_inference` describes. Slots outside the response may hold
                anything, NaN included.

        Returns:
            data: `response_tokens` int64 `[B, S]`, `is_end` bool `[B]`, and f32 `[B, S-1]`: `mask`
                (1 on response tokens), `advantages`, `prev_logprobs`; with a critic `returns` and
                `values`; with a KL to measure `init_logprobs`.
            metrics: of all ranks, before advantages are normalized.
        """
        kl_penalty = self.kl_controller.value
        data, metrics = make_ppo_data(rollout_batch, self.data_settings, kl_penalty)
        return data, metrics | {"kl_penalty": kl_penalty}

    def run_training(self, dataloader_iter) -> tuple[float, dict]:
        """One optimizer update per global batch (each rank has its share of it); all ranks call
        it.

        With `target_kl`, those after an update that found the policy farther than that from the
        one that generated the rollout are skipped.

        Returns:
            Loss and metrics of the last update.
        """
        metrics = {"loss": 0.0}
        early_stop = EarlyStop(self.cfg.get("target_kl"))
        for metrics in optimizer_updates(
            early_stop.until_reached(dataloader_iter),
            self.model,
            self.optimizer,
            self.scheduler,
            self.cfg.gradient_clip_val,
            self.update_timer,
        ):
            self.ppo_optimization_step += 1
            metrics |= {
                "actor_loss": metrics["loss"],
                "optim_step": self.ppo_optimization_step,
                "ppo_step": self.step,
            }
            self.logger.log_metrics(
                metrics, step=self.ppo_optimization_step, prefix="train_optim/"
            )
            early_stop.look_at(metrics)
        skipped = early_stop.metrics()
        self.logger.log_metrics(skipped, step=self.ppo_optimization_step, prefix="train_optim/")
        return metrics["loss"], metrics | skipped

    @torch.no_grad()
    def run_validation(self) -> dict:
        """Rewards and lengths of one answer to each validation prompt, always from the same random
        streams.
        """
        with inference_mode(self.model, self.timer):
            _, metrics = self._run_inference(
                self.val_dataloader_builder, 0, is_validation=True, sampling_step=VALIDATION_STEP
            )
        return metrics

    # ----------------------------------------------------------------------- checkpoint and resume

    def save(self, extra_candidates: dict | None = None, is_train_end: bool = False) -> None:
        """Save actor and critic side by side; all ranks call it.

        Args:
            extra_candidates: metrics that a checkpoint may be ranked by, beside the counters.
        """
        with ready_to_save(self.model):
            critic_save = self.rm_critic.save(actor_step=self.step)
            self.ckpt_callback.custom_save(
                monitor_candidates=self.state_dict() | (extra_candidates or {}),
                is_train_end=is_train_end,
                trainer_state=self.state_dict(),
            )
            critic_save.result()

    def state_dict(self) -> dict[str, int | float]:
        return {
            "step": self.step,
            "consumed_samples": self.consumed_samples,
            "epoch": self.epoch,
            "ppo_optimization_step": self.ppo_optimization_step,
            "num_rollout_samples": self.num_rollout_samples,
            **self.kl_controller.state_dict(),
        }

    def load_state_dict(self, state_dict: dict) -> None:
        """Continue where `state_dict()` was taken; all ranks call it, with equal states.

        Raises:
            RuntimeError: a rank read another state than the first.
            UserError: the state is of a job with another `num_rollout_samples`.
        """
        counters = ("step", "consumed_samples", "ppo_optimization_step")
        state = agreed_counters(state_dict, counters, "model.ppo", self.num_rollout_samples)
        self.step, self.consumed_samples = state["step"], state["consumed_samples"]
        self.ppo_optimization_step = state["ppo_optimization_step"]
        self.kl_controller.load_state_dict(state)
        self.resumed = True
        self.set_max_steps()

    # -------------------------------------------------------------------------- steps of the above

    def _warm_up_critic(self) -> None:
        """Rollouts that train the critic only. Their prompts are given back: the actor starts at
        the first one.
        """
        for i in range(self.critic_warmup_steps):
            self.consumed_samples = (i % self.num_steps_per_epoch) * self.num_rollout_samples
            with naming_step(f"critic warm-up {i}"):
                data, metrics, _ = self.generate_rollouts(
                    sampling_step=i - self.critic_warmup_steps
                )
            metrics["critic_loss"] = float(self.rm_critic.train(data).result())
            metrics.pop("table")
            self.logger.log_metrics(metrics, step=i, prefix="critic_warmup/")
        self.consumed_samples = 0

    def _finish_critic_update(self, critic_update) -> dict:
        """Wait for the critic's update; log its loss beside the actor's, at the last optimizer
        update of this step.
        """
        critic_loss = critic_update.result()
        metrics = (
            {} if critic_loss is None else {"critic_loss": float(critic_loss)}
        )  # None: there is no critic
        self.logger.log_metrics(metrics, step=self.ppo_optimization_step, prefix="train_optim/")
        return metrics

    def _local_rows(self, rollout: PPORolloutBatch, passed: int = 0) -> PPORolloutBatch:
        """This rank's rows in pass number `passed` over a gathered rollout."""
        return local_rows(rollout, self.seed, self.step, self.cfg.model_gbs, passed)

    def _global_batches(self, data: dict) -> Iterator[dict]:
        """This rank's share of each global batch, in `ppo_epochs` passes over the rollout, each in
        its own order.
        """
        data = PPORolloutBatch(data)
        for passed in range(self.ppo_epochs):
            if passed == 1:  # later passes deal all rows anew, so every rank needs all of them
                gathered = data.gather_and_balance_globally()
                gathered = gathered.select(gathered["sample_order"].argsort())
            rows = data if passed == 0 else self._local_rows(gathered, passed)
            trained_on = {key: tensor for key, tensor in rows.items() if key != "sample_order"}
            yield from shares_of_global_batches(trained_on, self.cfg.model_gbs)

    def _log_validation(self) -> dict:
        with self.timer("validation_time"), naming_step(f"validation after {self.step} PPO steps"):
            metrics = self.run_validation()
        self.val_df = log_validation(
            self.logger, self.val_df, metrics, consume_timings(self.timer), self.step
        )
        return metrics
