# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of a training loop: steps per epoch, and when to validate, save and stop."""

from collections.abc import Iterator
from typing import Any

from nemo.utils import logging
from omegaconf import DictConfig

from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.types import PromptSampler


def compute_limit_batches(number_of_batches: int, limit_batches: int | float | None) -> int:
    """Batches to use: `limit_batches` is a fraction (a float; at least one batch unless 0), a cap
    (an int), or None for all. `ConfigError`: a negative limit, or a float above 1.
    """
    if limit_batches is None:
        return number_of_batches
    if limit_batches < 0:
        raise ConfigError(
            f"limit_train_batches / limit_val_batches = {limit_batches} must not be negative."
        )
    if isinstance(limit_batches, float):
        if limit_batches > 1:
            raise ConfigError(
                f"limit_train_batches / limit_val_batches = {limit_batches}: a float is at most "
                f"1.0; write {int(limit_batches)} without the point for a number of batches."
            )
        # 100 * 0.29 is 28.999...: the small addend keeps the floor at 29.
        share = int(number_of_batches * limit_batches + 1e-6)
        limit_batches = max(share, 1) if limit_batches else 0
    return min(number_of_batches, limit_batches)


def interval_in_steps(key: str, interval: int | float, steps_per_epoch: int) -> int:
    """Steps between two validations or checkpoints (`key`); 0 and below: never. `interval` is in
    steps, or a float: a part of an epoch, of at least one step (else `ConfigError`).
    """
    if not isinstance(interval, float):
        return interval
    if not 0 <= interval <= 1:
        raise ConfigError(
            f"{key}={interval}: a float is a part of an epoch, from 0.0 to 1.0; write "
            f"{int(interval)} without the point for a number of steps."
        )
    return compute_limit_batches(steps_per_epoch, interval)


def compute_num_steps_per_epoch(
    sampler: PromptSampler, limit_train_batches: int | float | None = 1.0
) -> int:
    """Whole global batches in an epoch of a sampler that drops incomplete ones (`ConfigError`)."""
    if not sampler.drop_last:
        raise ConfigError("training needs drop_last=True: an incomplete batch makes no step.")
    batches = sampler.total_samples // sampler.global_batch_size
    return compute_limit_batches(batches, limit_train_batches)


def compute_max_steps(num_steps_per_epoch: int, max_epochs: int, max_steps: int) -> int:
    """Steps of a run: all epochs, capped by `max_steps` unless that is negative."""
    total = num_steps_per_epoch * max_epochs
    return min(total, max_steps) if max_steps >= 0 else total


def say_complete(step: int, max_steps: int, section: str) -> None:
    logging.warning(
        f"step {step} of {max_steps}: training is already complete, nothing was trained; raise "
        f"{section}.max_steps or max_epochs to continue, or give another job a folder of its own "
        "(exp_manager.explicit_log_dir)."
    )


def warn_of_unreachable_steps(section: str, cfg: Any, reached: int, steps_per_epoch: int) -> None:
    """Say that the data end before `max_steps`."""
    asked = cfg.max_steps
    if asked is None or asked <= reached:
        return
    step = steps_per_epoch * cfg.get("max_iterations", 1)
    logging.warning(
        f"{section}.max_steps={asked} is not reached: {section}.max_epochs={cfg.max_epochs} ends "
        f"the job after step {reached}, with {steps_per_epoch} steps in an epoch of the data; set "
        f"{section}.max_epochs={cfg.max_epochs - (reached - asked) // step}."
    )


def endless_batches(dataloader: Any, counters: Any) -> Iterator[Any]:
    """The batches, epoch after epoch, of a loader with a sampler of `data/nlp/samplers.py`, from
    the position of a trainer (`counters`) on; `UserError`: there is none.
    """
    while True:
        # Set here: the sampler of a loader with workers runs ahead of the training.
        dataloader.batch_sampler.consumed_samples = counters.sampler_start
        started_at = counters.consumed_samples
        yield from dataloader
        if counters.consumed_samples == started_at:
            raise UserError(
                f"no training data left after {started_at} samples, at step {counters.step} of "
                f"{counters.max_steps}: the data set or the batch size has changed since the "
                "checkpoint."
            )


def safe_is_divisible(a: int, b: int) -> bool:
    """Whether `b` divides `a`; 0 divides nothing."""
    return b != 0 and a % b == 0


def check_progress(
    step: int,
    max_steps: int,
    val_check_interval: int,
    save_interval: int,
    limit_val_batches: int | float | None,
    run_time_exceeded: bool = False,
    must_save: bool = False,
) -> tuple[bool, bool, bool]:
    """What to do after `step` finished steps: (run validation, save a checkpoint, training is at
    its end). Each of the first two is on if its interval is positive (and there are batches), and
    happens at its multiples, at the end, and when the time is over; a validation also with a save
    at its interval, whose checkpoint is ranked by it; a save also when the job must end
    (`must_save`).
    """
    validation_enabled = limit_val_batches != 0 and val_check_interval > 0
    save_enabled = save_interval > 0
    is_train_end = step == max_steps
    last = is_train_end or run_time_exceeded
    save_due = save_enabled and (last or step % save_interval == 0)
    run_val = validation_enabled and (last or save_due or step % val_check_interval == 0)
    save_model = save_due or (save_enabled and must_save)
    return run_val, save_model, is_train_end


def supervised_max_steps(
    trainer_cfg: DictConfig, train_dataloader: Any, more_steps: int = 0
) -> int:
    """Optimizer updates of a supervised job, the horizon of its learning rate, from its complete
    section `trainer.sft`, ... (`max_iterations`, of SPIN: repetitions of its epochs) and the
    `more_steps` of epochs that had another global batch size for some time. `ConfigError`: neither
    epochs nor steps say when training ends.
    """
    max_epochs, max_steps = trainer_cfg.max_epochs, trainer_cfg.max_steps
    limits = [] if max_steps is None or max_steps < 0 else [max_steps]
    if max_epochs is not None:
        steps_per_epoch = compute_num_steps_per_epoch(
            train_dataloader.batch_sampler, trainer_cfg.limit_train_batches
        )
        epochs = trainer_cfg.get("max_iterations", 1) * max_epochs
        limits.append(epochs * steps_per_epoch + more_steps)
    if not limits:
        raise ConfigError("max_epochs=null needs max_steps: set one, so that training ends.")
    return min(limits)
