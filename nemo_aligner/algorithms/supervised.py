# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Training on labelled data: supervised fine-tuning and reward models.

`TrainingLoop.fit` is the loop; the model knows the loss (`SupervisedInterface`). One step is
one optimizer update on one global batch. Metrics at step k describe the weights after k updates,
so the training loss at k and a validation at k belong to the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from omegaconf import DictConfig
from torch import Tensor
from torch.utils.data import DataLoader

from nemo_aligner.algorithms.training_loop import Parts, TrainingLoop
from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.core.types import Optimizer, Scheduler
from nemo_aligner.data.nlp.samplers import BatchSampler, MegatronPretrainingRandomBatchSampler
from nemo_aligner.models.alignable_interface import SupervisedInterface
from nemo_aligner.training import schedule
from nemo_aligner.training.loggers import CustomLoggerWrapper, named
from nemo_aligner.training.megatron_steps import naming_step
from nemo_aligner.training.optim import train_on_batch
from nemo_aligner.training.passes import TRAIN, in_short, token_metrics


class SupervisedTrainer(TrainingLoop):
    """Runs the steps, validates, logs and saves.

    Attributes:
        step: finished optimizer updates.
        consumed_samples: samples of all ranks that they used.
        passes, used: where in the data it goes on: passes over them that were finished before the
            present one, and samples of this one that are used, in batches of whatever size.
        more_steps: that the epochs have, because global batches had another size for some time.
        held_out: latest metrics of each validation set, and of the test set as `test`, with the
            number of samples that they are over (the sum of the model's metric `weights`).
    """

    JOB = ("gpt_sft", "trainer.sft")  # the configuration whose section has the defaults of `cfg`
    counts_batches = False  # something beside the data and `limit_train_batches` does

    def __init__(
        self,
        cfg: DictConfig,
        model: SupervisedInterface,
        optimizer: Optimizer,
        scheduler: Scheduler,
        train_dataloader: DataLoader[Any],
        val_dataloader: DataLoader[Any] | Mapping[str, DataLoader[Any] | None] | None,
        test_dataloader: DataLoader[Any] | None,
        logger: CustomLoggerWrapper,
        ckpt_callback: CheckpointCallback,
        run_timer: schedule.Timer,
        run_init_validation: bool = False,
        section: str | None = None,
    ):
        """Every rank builds one; `ConfigError`: values that cannot work together.

        Args:
            cfg: `trainer.sft` or `trainer.rm`; missing keys have the values of
                `conf/gpt_sft.yaml`.
            train_dataloader: yields this rank's share of each global batch.
            val_dataloader: the same; or several by name, of which `validation` ranks checkpoints.
            test_dataloader: is run through once at the end of training, under `test/`.
            section: name of `cfg` in messages; None: that of `JOB`.
        """
        parts = Parts(cfg, model, optimizer, scheduler, logger, ckpt_callback, run_timer)
        super().__init__(parts, self.JOB, section)
        cfg = self.cfg
        self.train_dataloader = train_dataloader
        if not isinstance(val_dataloader, Mapping):
            val_dataloader = {"validation": val_dataloader}
        self.val_dataloaders = {
            name: loader for name, loader in val_dataloader.items() if loader is not None
        }
        self.test_dataloader = test_dataloader
        self.run_init_validation = run_init_validation
        self.timer = schedule.ScopedTimer(reduction="mean", sync_cuda=True, buffer_size=1)

        self.passes = self.used = self.more_steps = 0
        self.held_out: dict[str, tuple[dict[str, float], float]] = {}
        self.sampler = cast(BatchSampler, train_dataloader.batch_sampler)
        self.global_batch_size = self.sampler.global_batch_size
        self.num_steps_per_epoch = schedule.compute_num_steps_per_epoch(
            self.sampler, cfg.limit_train_batches
        )
        if self.num_steps_per_epoch == 0:
            raise ConfigError(
                f"limit_train_batches={cfg.limit_train_batches} leaves no batch to train on."
            )
        self.val_check_interval, self.save_interval = (
            schedule.interval_in_steps(key, cfg[key], self.num_steps_per_epoch)
            for key in ("val_check_interval", "save_interval")
        )
        self.set_max_steps()
        epochs = -(-self.max_steps // self.num_steps_per_epoch)
        if epochs > 1 and not isinstance(self.sampler, MegatronPretrainingRandomBatchSampler):
            raise ConfigError(
                f"{epochs} epochs need a random sampler (trainer.rm.train_random_sampler=True, or "
                f"shuffle=True in the SFT data section), not {type(self.sampler).__name__}; or "
                "set max_epochs=1 (in SPIN also max_iterations=1)."
            )

    @property
    def limit_val_batches(self) -> int | float | None:
        limit: int | float | None = self.cfg.limit_val_batches
        return limit if self.val_dataloaders else 0

    @property
    def epoch(self) -> int:
        return (self.step - self.more_steps) // self.num_steps_per_epoch

    @property
    def batches_left(self) -> int:
        """Whole global batches that are left in the present pass over the data."""
        return (self.sampler.total_samples - self.used) // self.global_batch_size

    @property
    def sampler_start(self) -> int:
        used = self.used if self.batches_left else self.sampler.samples_per_epoch
        return self.passes * self.sampler.samples_per_epoch + used

    def set_max_steps(self) -> None:
        self.max_steps = schedule.supervised_max_steps(
            self.cfg, self.train_dataloader, self.more_steps
        )

    # ----------------------------------------------------------------------------------- the loop

    def fit(self) -> None:
        self.batches = self.training_batches()
        try:
            super().fit()
        finally:
            del self.batches  # it knows the trainer: in a circle, its workers would live on

    def run_step(self) -> dict[str, float]:
        metrics = self.train_single_step(next(self.batches))
        counts = token_metrics({TRAIN: "train"}, {"train": metrics["step_time"]})
        self.logger.log_metrics(named("train/", metrics) | counts, step=self.step)
        self.alarms.check_replicas(self.model, self.step)
        return metrics | in_short(counts)

    def training_batches(self) -> Iterator[Any]:
        """What the steps train on, without an end; each is drawn after the step before it."""
        return schedule.endless_batches(self.train_dataloader, self)

    @property
    def objective_age(self) -> int:
        """Finished steps since the objective began at chance, for the alarms."""
        return self.step

    def train_single_step(self, batch: Any) -> dict[str, float]:
        return self.train_on(batch, {})

    def train_on(self, batch: Any, known: Mapping[str, float]) -> dict[str, float]:
        """`train_single_step` on a batch of which some metrics are `known`; returns them too."""
        with self.timer("step_time"), naming_step(f"training step {self.step}"):
            metrics = train_on_batch(
                self.model, self.optimizer, self.scheduler, batch, self.cfg.gradient_clip_val
            )
        if not self.batches_left:
            self.passes, self.used = self.passes + 1, 0
        self.used += self.global_batch_size
        self.consumed_samples += self.global_batch_size
        summary: dict[str, float] = self.model.summarize_metrics(metrics) | dict(known)
        if self.alarms.concern(summary):
            summary |= self.alarms.watch(summary, self.step, self.objective_age)
        counters = {"consumed_samples": self.consumed_samples, "epoch": self.epoch + 1}
        return summary | self.timer.consume_durations() | counters

    def run_validation(self) -> dict[str, float]:
        found: dict[str, float] = {}
        with self.timer("validation_time"):
            for key, dataloader in self.val_dataloaders.items():
                found |= self._score(key, dataloader, self.limit_val_batches)
        found |= named("timers/", self.timer.consume_durations())
        self.logger.log_metrics(found, step=self.step)
        return self.held_out["validation"][0] if "validation" in self.val_dataloaders else {}

    def validate(self) -> dict[str, float]:
        return self.run_validation()

    def after_last_step(self) -> None:
        if self.test_dataloader is not None:
            found = self._score("test", self.test_dataloader, limit_batches=None)
            self.logger.log_metrics(found, step=self.step)

    def _score(
        self, key: str, dataloader: DataLoader[Any], limit_batches: int | float | None
    ) -> dict[str, float]:
        """Means over the batches by their metric `weights` (else 1), to log."""
        sums: dict[str, float | Tensor] = {}
        total = 0.0
        sampler: Any = dataloader.batch_sampler
        sampler.consumed_samples = 0  # a random one would go on where the last pass ended
        limit = schedule.compute_limit_batches(len(dataloader), limit_batches)
        for _, batch in zip(range(limit), dataloader, strict=False):
            loss, metrics = self.validation_step(batch)
            metrics = {**metrics, "loss": loss}
            weight = float(metrics.pop("weights", 1.0))
            if not weight:
                continue  # a batch of stand-ins has no values
            total += weight
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + weight * value
        means = self.model.summarize_metrics({k: value / total for k, value in sums.items()})
        self.held_out[key] = means, total
        return named(f"{key}/", means)

    def validation_step(self, batch: Any) -> tuple[float, Mapping[str, float | Tensor]]:
        """Loss and metrics of one global batch without learning from it; all ranks call it."""
        self.model.prepare_for_validation_step()
        loss, metrics = self.model.get_loss_and_metrics(batch=batch, forward_only=True)
        self.model.finish_validation_step()
        return loss, metrics

    def run_validation_one_dataset(self, key: str) -> tuple[float, dict[str, float]]:
        """Validate on the set `key` and log it: (loss, metrics); all ranks call it."""
        found = self._score(key, self.val_dataloaders[key], self.limit_val_batches)
        self.logger.log_metrics(found, step=self.step)
        metrics = self.held_out[key][0]
        return metrics["loss"], metrics

    def run_generation(self, batch: Mapping[str, Tensor]) -> Any:
        """The model's responses to `contexts` int64 `[b, P]` of `context_lengths` int64 `[b]`."""
        generative: Any = self.model
        return generative.infer({"text": batch["contexts"], "length": batch["context_lengths"]})

    # ------------------------------------------------------------------------- checkpoint, resume

    def state_dict(self) -> dict[str, int]:
        return {
            "step": self.step,
            "consumed_samples": self.consumed_samples,
            "epoch": self.epoch,
            "global_batch_size": self.global_batch_size,
            "passes": self.passes,
            "used": self.used,
        }

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Go on with the samples that the earlier job would have had next, also in global batches
        of another size. `ConfigError`: another size, and something counts batches.
        """
        self.step = int(state_dict["step"])
        self.consumed_samples = int(state_dict["consumed_samples"])
        # A version before did not store it.
        before = state_dict.get("global_batch_size", self.consumed_samples // max(self.step, 1))
        before = before or self.global_batch_size
        batches = self.sampler.total_samples // self.global_batch_size
        counts_batches = self.counts_batches or self.num_steps_per_epoch < batches
        if before != self.global_batch_size and counts_batches:
            raise ConfigError(
                f"a global batch has {self.global_batch_size} items of the data, in the job that "
                f"wrote the checkpoint {before}, and {self.section}.limit_train_batches, or an "
                "iteration of SPIN, counts batches. Set model.global_batch_size as before, or "
                "start from the checkpoint in another exp_manager.explicit_log_dir."
            )
        whole = self.sampler.total_samples // before * before
        passes, used = divmod(max(self.consumed_samples - 1, 0), max(whole, 1))
        self.passes = state_dict.get("passes", passes)
        self.used = state_dict.get("used", used + 1 if self.consumed_samples else 0)
        self.more_steps = self.step + self.batches_left - (self.passes + 1) * batches
        self.set_max_steps()
