# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What trainers share that learn from their own rollouts: the loop with validation, saving and the
time limit, counters and resuming, alarms, timers and logging, and collecting a rollout.

Shapes: N samples of a rollout over all data-parallel (DP) ranks, B of them on this rank, G the
global batch of one optimizer update.
"""

from __future__ import annotations

import contextlib
import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, cast

import torch
from omegaconf import DictConfig
from torch import Tensor

from nemo_aligner.algorithms import rollouts, training_loop
from nemo_aligner.algorithms.alarms import check_rewards
from nemo_aligner.algorithms.training_loop import Parts, TrainingLoop, scores_of
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.types import InferenceBatch, PromptSampler, Rollout, Scores
from nemo_aligner.models.alignable_interface import AlignableGenerativeInterface
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import gathered
from nemo_aligner.servers.futures import FutureScores, wait_for_all
from nemo_aligner.training import schedule
from nemo_aligner.training.loggers import named
from nemo_aligner.training.megatron_steps import naming_step
from nemo_aligner.training.optim import train_on_batch
from nemo_aligner.training.passes import FORWARD, TRAIN, in_short, token_metrics

# "Step" of the random streams of every validation: always the same, so that validations can be
# compared. Rollouts of critic warm-up have the steps -critic_warmup_steps .. -1.
VALIDATION_STEP = -(2**31)


def updates_of_rollouts(
    kind: str, settings: DictConfig, model_cfg: DictConfig, steps_per_epoch: int
) -> int:
    """Updates of the job `kind` ("ppo", "rs" or "reinforce"): the horizon of the learning-rate
    schedule. Updates that `target_kl` skips are counted, so the schedule then does not come to its
    end. `settings` are `trainer.<kind>`, complete, and `model_cfg` the section `model`.
    """
    rollout = model_cfg[kind]
    if kind == "rs":
        responses = rollout.top_n_rollouts
    else:
        responses = (settings if kind == "reinforce" else rollout).num_rollouts_per_prompt
    steps = schedule.compute_max_steps(steps_per_epoch, settings.max_epochs, settings.max_steps)
    epochs: int = settings.ppo_epochs if kind == "ppo" else 1  # over each rollout
    samples: int = rollout.num_rollout_samples * responses
    return steps * epochs * (samples // int(model_cfg.global_batch_size))


class RolloutTrainer(TrainingLoop):
    """Runs the steps of an algorithm that learns from its own rollouts; see `fit`.

    Attributes:
        step: finished steps (one rollout and what is learned from it).
        consumed_samples: prompts that rollouts have used.
        optimization_step: finished optimizer updates.
        train_df, val_df: newest samples of this process's rollouts, and of the validations.
    """

    SECTION: ClassVar[str]  # name of the algorithm's sections: trainer.<name> and model.<name>
    NAME: ClassVar[str]  # of the algorithm, for messages
    WAIT_TIMER: ClassVar[str]  # of the time spent waiting for scores
    has_validation = True  # there are prompts for it

    model: AlignableGenerativeInterface

    def __init__(
        self,
        parts: Parts,
        sampler: PromptSampler,
        responses_per_prompt: int,
        score: Callable[[Rollout], FutureScores],
    ):
        """Every rank builds one; `ConfigError`: epochs that the sampler cannot make.

        `sampler`: of the training prompts; `score` sends a micro-batch off to be scored.
        """
        super().__init__(parts, (f"gpt_{self.SECTION}_actor", f"trainer.{self.SECTION}"))
        self.bar = f"{self.NAME} Global Step"
        self.score = scores_of(score)

        self.optimization_step = 0
        self.seed = int(self.model.cfg.seed)
        self.num_rollouts_per_prompt = int(responses_per_prompt)
        self.num_rollout_samples = sampler.global_batch_size
        self.num_steps_per_epoch = schedule.compute_num_steps_per_epoch(sampler)
        self.set_max_steps()
        for key in ("val_check_interval", "save_interval", "run_init_validation"):
            setattr(self, key, self.cfg[key])

        self.train_df = self.val_df = training_loop.empty_table()
        self.timer = schedule.ScopedTimer(
            reduction="sum",  # a step may draw several times
            sync_cuda=True,
            buffer_size=-1,
            on_scope=lambda phase: self._phases.append(phase),
        )
        self.update_timer = schedule.ScopedTimer(reduction="mean", sync_cuda=True, buffer_size=-1)
        self._gathered: dict[int, dict[str, Any]] = {}  # metrics by step, for `logged_together`
        self._phases: list[dict[str, Any]] = []  # of the timeline, likewise

        for key, least in (("max_epochs", 1), ("dynamic_sampling_rounds", 0)):
            asked = self.cfg.get(key) or least
            if asked > least and not getattr(sampler, "is_random", False):
                raise ConfigError(
                    f"trainer.{self.SECTION}.{key}={asked} needs a random sampler, which starts "
                    f"over at the end of the data, but the loader has a {type(sampler).__name__}. "
                    f"Change it, or set {key} to {least}."
                )

    def check_sizes(self, samples: int, name: str) -> None:
        """Raise `ConfigError` unless the `samples` of a step, which the user calls `name`, make
        whole global batches, and these whole shares of ranks.
        """
        gbs, dp_size = self.cfg.model_gbs, parallel_state.get_data_parallel_world_size()
        if gbs % dp_size:
            raise ConfigError(
                f"model.global_batch_size={gbs} is not divisible by the {dp_size} data-parallel "
                "ranks; change one."
            )
        if samples % gbs:
            raise ConfigError(
                f"{name}={samples} is not a multiple of model.global_batch_size={gbs}; change one "
                "of them."
            )

    @property
    def epoch(self) -> int:
        return self.step // self.num_steps_per_epoch

    @property
    def sampler_start(self) -> int:
        return self.consumed_samples

    @property
    def limit_val_batches(self) -> float:
        return float(self.has_validation)

    def set_max_steps(self) -> None:
        self.max_steps = schedule.compute_max_steps(
            self.num_steps_per_epoch, self.cfg.max_epochs, self.cfg.max_steps
        )

    # ------------------------------------------------------------------------------------- a step

    def run_step(self) -> dict[str, Any]:
        with self.logged_together(), self.timer.forgotten_on_error():
            with self.phase("rollout_time"):
                data, rollout_metrics, timings = self.generate_rollouts()
            rollout_metrics = self.log_rollouts(rollout_metrics)
            train_metrics = self.learn(data, rollout_metrics)
            speeds = self.log_timings(timings)
        return rollout_metrics | train_metrics | speeds

    @abstractmethod
    def generate_rollouts(self) -> tuple[Any, dict[str, Any], dict[str, float]]:
        """Roll out with the current policy: `(data, metrics, timings)`; all ranks call it.

        `data` of this rank is what `learn` takes; the metrics are of all ranks, with `table`, some
        samples; the timings are seconds of the phases, of the slowest rank.
        """

    @abstractmethod
    def learn(self, data: Any, rollout_metrics: dict[str, Any]) -> dict[str, Any]:
        """What the algorithm does with the data of a rollout; returns the metrics of training."""

    def run_training(
        self, dataloader_iter: Iterable[dict[str, Tensor]]
    ) -> tuple[float, dict[str, Any]]:
        """One update per global batch: loss and metrics of the last one; all ranks call it."""
        last: dict[str, Any] = {"loss": 0.0}
        for metrics in self.updates(dataloader_iter):
            last = metrics
        return last["loss"], last

    def train_policy(self, batches: Iterable[dict[str, Tensor]]) -> dict[str, Any]:
        with self.phase("train_time"):
            _, metrics = self.run_training(batches)
        self.alarms.watch(metrics, self.step)
        self.alarms.check_replicas(self.model, self.step, self.timer)
        return metrics

    # ---------------------------------------------------------------------------------- a rollout

    @abstractmethod
    def validation_prompts(self) -> Iterable[InferenceBatch]:
        """This rank's micro-batches of validation prompts, always the same."""

    def draw(
        self, prompts: Iterable[InferenceBatch], sampling_step: int, return_logprobs: bool = False
    ) -> rollouts.CollectedRollout:
        """`collect` responses to the next training prompts, which count as consumed."""
        collected = self.collect(
            prompts,
            self.num_rollouts_per_prompt,
            sampling_step,
            self.cfg.rollout_batch_seq_length,
            return_logprobs,
        )
        self.consumed_samples += self.num_rollout_samples
        return collected

    def collect(
        self,
        prompts: Iterable[InferenceBatch],
        num_responses: int,
        sampling_step: int,
        min_width: int | None = None,
        return_logprobs: bool = False,
    ) -> rollouts.CollectedRollout:
        """Generate `num_responses` to each of this rank's micro-batches of prompts, and send them
        off to be scored as they end; all ranks call it.

        `sampling_step` selects the random streams, `min_width` is the least S, and
        `return_logprobs` keeps the sampler's log-probs.
        """
        micro_batches, pending = [], []
        with self.timer("generate"):
            first = 0 if sampling_step == VALIDATION_STEP else self.consumed_samples
            numbered = rollouts.with_indices(prompts, first)
            repeated = rollouts.repeat_prompts(numbered, num_responses, self.seed, sampling_step)
            share = getattr(prompts, "num_microbatches", None)  # of our batch iterators
            settings = {
                "return_logprobs": return_logprobs,
                "rank_batches": None if share is None else share * num_responses,
            }
            batches = (cast(InferenceBatch, {**batch, **settings}) for batch in repeated)
            for batch, rollout in self.model.infer_all(batches):
                if "record" in batch:  # for rewards that look at columns of the prompts' records
                    rollout["record"] = batch["record"]
                # Scored while generation continues.
                pending.append(self.send_off(rollout, sampling_step))
                micro_batches.append(rollouts.with_prompt_columns(rollout, batch))
        gathered = rollouts.PPORolloutBatch.from_rollout_batches(
            micro_batches, self.model.tokenizer.eos_id, min_width
        ).gather_and_balance_globally()
        # The same with any number of ranks. Samples with the same key have the same prompt and
        # random stream, so their order does not matter.
        order = gathered["sample_key"].argsort(stable=True)
        return rollouts.CollectedRollout(gathered.select(order), order, pending)

    def send_off(self, rollout: Rollout, sampling_step: int) -> FutureScores:
        return self.score(rollout)

    def wait_for_scores(
        self, collected: rollouts.CollectedRollout, with_values: bool = True
    ) -> Scores:
        """The scores of all samples of the rollout, in its order, on every rank; all call it.

        Raises:
            ServerRequestError: a request failed; the message has the cause.
            NonFiniteError: a reward is NaN or infinite; names the sample.
        """
        with self.timer(self.WAIT_TIMER):
            wait_for_all(each for future in collected.pending for each in future.pending)
            scores = [future.scores() for future in collected.pending]
            if not with_values:
                scores = [dataclasses.replace(each, values=None) for each in scores]
            width = collected.rollout["response_tokens"].size(1)
            gathered = rollouts.gather_scores(scores, width, collected.order)
        check_rewards(collected.rollout.columns, gathered, self.model.tokenizer)
        return gathered

    def rollout_metrics(self, rollout: Rollout, scores: Scores) -> dict[str, Any]:
        return rollouts.compute_rollout_metrics(rollout, scores)

    @contextlib.contextmanager
    def inference(self) -> Iterator[None]:
        with torch.no_grad(), self.timer.forgotten_on_error():
            with self.timer("prepare_for_inference"):
                self.model.prepare_for_inference()
            yield
            with self.timer("finish_inference"):
                self.model.finish_inference()

    def run_validation(self) -> dict[str, Any]:
        """Rewards and lengths of one response per prompt, always from the same random streams."""
        with self.inference():
            collected = self.collect(self.validation_prompts(), 1, VALIDATION_STEP)
            scores = self.wait_for_scores(collected, with_values=False)
        metrics = self.rollout_metrics(collected.rollout.columns, scores)
        metrics["table"] = rollouts.sample_table(
            collected.rollout.columns, scores, self.model.tokenizer
        )
        return metrics

    def validate(self) -> dict[str, Any]:
        with self.logged_together():
            with (
                self.timer("validation_time"),
                naming_step(f"validation after {self.step} {self.NAME} steps"),
            ):
                metrics = self.run_validation()
            samples, timings = metrics.pop("table"), training_loop.consume_timings(self.timer)
            total = {"validation_time": timings.pop("validation_time")}
            self.gather("val_rollouts/", metrics)
            self.gather("timers/", total | named("validation_", timings))
        self.logger.log_samples("val_samples", samples, step=self.step)
        shown = samples[: training_loop.VAL_TABLE_ROWS]
        self.val_df = training_loop.log_table(
            self.logger, "table/val_rollouts", self.val_df, shown, self.step
        )
        return metrics

    # ------------------------------------------------------------------------------------ updates

    def updates(self, batches: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Any]]:
        """An optimizer update per global batch (each rank has a share), logged: yields the metrics
        of each; all ranks iterate to the end. `NonFiniteError` names the update.
        """
        self.model.prepare_for_training()
        for number, batch in enumerate(batches, 1):
            with (
                self.update_timer("train_step_time"),
                naming_step(f"update {number} of its rollout"),
            ):
                metrics = train_on_batch(
                    self.model, self.optimizer, self.scheduler, batch, self.cfg.gradient_clip_val
                )
            self.optimization_step += 1
            metrics |= self.update_counters(metrics)
            self.gather("train_optim/", metrics, self.optimization_step)
            yield metrics
        self.model.finish_training()
        self.optimizer.zero_grad()

    def update_counters(self, metrics: dict[str, Any]) -> dict[str, Any]:
        return {"optim_step": self.optimization_step, f"{self.SECTION}_step": self.step}

    # -------------------------------------------------------------------------- logging of a step

    def gather(self, family: str, metrics: dict[str, Any], step: int | None = None) -> None:
        """Keep metrics for the loggers, which get them at `step` (None: the present one)."""
        kept = self._gathered.setdefault(self.step if step is None else step, {})
        kept |= named(family, metrics)

    @contextlib.contextmanager
    def logged_together(self) -> Iterator[None]:
        """At its end, after an error too, the loggers get what was gathered, each step once."""
        try:
            yield
        finally:
            gathered, self._gathered = self._gathered, {}
            phases, self._phases = self._phases, []
            # The present step comes last.
            for step in sorted(gathered, key=lambda step: step == self.step):
                self.logger.log_metrics(gathered[step], step=step)
            self.logger.log_samples(schedule.FILE, phases, step=self.step)

    @contextlib.contextmanager
    def phase(self, timer_name: str) -> Iterator[None]:
        """A phase of the step: timed, and named in errors about numbers that are not finite."""
        with self.timer(timer_name), naming_step(f"{self.NAME} step {self.step}"):
            yield

    def log_rollouts(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Watch and keep the metrics of a rollout; returns them, with alarms, without table."""
        metrics = metrics | self.alarms.watch(metrics, self.step)
        samples, logged = metrics.pop("table"), metrics | {"epoch": self.epoch + 1}
        self.gather("train_rollouts/", logged)
        self.train_df = training_loop.log_table(
            self.logger, "table/train_rollouts", self.train_df, samples, self.step
        )
        return metrics

    def generation_timings(self, rollout: Rollout) -> dict[str, float]:
        """Seconds of the phases since the last call, and what one rank generated per second."""
        timings = training_loop.consume_timings(self.timer)
        generated = rollouts.generated_tokens(rollout).double()
        rank_seconds = max(timings["generate"], 1e-9) * parallel_state.get_world_size()
        timings["generate_tokens_per_s"] = float(generated.sum()) / rank_seconds
        timings["generate_samples_per_s"] = len(generated) / rank_seconds
        return timings

    def log_timings(self, timings: dict[str, float]) -> dict[str, float]:
        """Gather the seconds of this step's phases, `timings` and those measured since, and how
        many tokens they computed; returns the speeds for the progress bar.
        """
        timings = timings | training_loop.consume_timings(self.timer, self.update_timer)
        speeds = {key: timings.pop(key) for key in list(timings) if key.endswith("_per_s")}
        seconds = {
            "logprobs": timings.get("logprobs", 0.0) + timings.get("init_logprobs", 0.0),
            "train": timings["train_time"],
        }
        names = {FORWARD: "logprobs", TRAIN: "train"}
        counts = token_metrics(names, seconds, speeds)
        self.gather("", named("timers/", timings) | counts)
        return in_short(counts)

    # ---------------------------------------------------------------------- checkpoint and resume

    @contextlib.contextmanager
    def ready_to_save(self) -> Iterator[None]:
        """Inside, optimizer states are back from host memory, and every rank is here."""
        self.model.prepare_for_training()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if parallel_state.get_world_size() > 1:
            torch.distributed.barrier()
        yield
        self.model.finish_training()

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "consumed_samples": self.consumed_samples,
            "epoch": self.epoch,
            f"{self.SECTION}_optimization_step": self.optimization_step,
            "num_rollout_samples": self.num_rollout_samples,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict()` was taken; all ranks call it, with equal states.

        Raises:
            RuntimeError: a rank read another state than the first.
            UserError: the state is of a job with another `num_rollout_samples`.
        """
        states = gathered({k: state_dict[k] for k in self.state_dict() if k in state_dict})
        for rank, other in enumerate(states):
            if other != states[0]:
                raise RuntimeError(
                    f"rank {rank} resumes from {other}, but rank 0 from {states[0]}: give all one "
                    "checkpoint."
                )
        before = state_dict.get("num_rollout_samples", self.num_rollout_samples)
        if before != self.num_rollout_samples:
            key = f"model.{self.SECTION}.num_rollout_samples"
            raise UserError(
                f"{key}={self.num_rollout_samples}, but the checkpoint to resume is of a job with "
                f"{before}: steps count rollouts. Set {key}={before}, or start again from the "
                "checkpoint's .nemo file in another exp_manager.explicit_log_dir."
            )
        self.step = int(state_dict["step"])
        self.consumed_samples = int(state_dict["consumed_samples"])
        self.optimization_step = int(state_dict[f"{self.SECTION}_optimization_step"])
        self.set_max_steps()
