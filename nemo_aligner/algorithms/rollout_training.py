# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What the trainers that learn from their own rollouts (PPO, rejection sampling) share: dealing
rollouts to updates, the updates themselves, saving, the check of a resumed state, and logging. The
algorithms are in `ppo.py` and `rs.py`.

Shapes: N samples of a rollout over all DP ranks, B of them on this rank, G the global batch of one
optimizer update.
"""

import contextlib
from collections.abc import Iterable, Iterator

import pandas as pd
import torch
from tqdm import tqdm

from nemo_aligner.algorithms.rollouts import PPORolloutBatch, deal
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.seeds import sample_seeds
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import all_reduce_dict
from nemo_aligner.parallel.device import get_device
from nemo_aligner.training.finite import naming_step
from nemo_aligner.training.schedule import check_progress
from nemo_aligner.training.timers import ScopedTimer
from nemo_aligner.training.update import learning_rate, optimizer_step

# "Step" of the random streams of every validation: always the same, so that validations can be
# compared. Rollouts of critic warm-up have the steps -critic_warmup_steps .. -1.
VALIDATION_STEP = -(2**31)
TABLE_COLUMNS = ["step", "prompt", "response", "reward"]
TRAIN_TABLE_ROWS, VAL_TABLE_ROWS = 1, 5


# -------------------------------------------------------------------------------- rows and batches


def check_sizes(trainer_section: str, cfg, sampler, rows_per_step: int, rows_name: str) -> None:
    """Refuse sizes that cannot work together, and epochs that the sampler cannot make.

    Args:
        trainer_section: of `cfg`, for messages: "trainer.ppo".
        cfg: `model_gbs` and `max_epochs` are read.
        sampler: of the training prompts.
        rows_per_step: N, the rows of one step that are trained on; `rows_name` is what the user
            calls them.

    Raises:
        ConfigError: with the keys and a remedy.
    """
    gbs, dp_size = cfg.model_gbs, parallel_state.get_data_parallel_world_size()
    if gbs % dp_size:
        raise ConfigError(
            f"model.global_batch_size={gbs} is not divisible by the {dp_size} data-parallel "
            "ranks; change one."
        )
    if rows_per_step % gbs:
        raise ConfigError(
            f"{rows_name}={rows_per_step} is not a multiple of model.global_batch_size={gbs}; "
            "change one of them."
        )
    if cfg.max_epochs > 1 and not getattr(sampler, "is_random", False):
        raise ConfigError(
            f"{trainer_section}.max_epochs={cfg.max_epochs} needs a random sampler, which starts "
            "over after an "
            f"epoch, but the data loader has a {type(sampler).__name__}."
        )


def local_places(num_rows: int, global_batch_size: int) -> torch.Tensor:
    """Places in the shuffled rollout of this rank's rows, int64 `[B]`."""
    rank, size = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )
    return deal(num_rows, rank, size, global_batch_size).to(get_device())


def local_rows(
    rollout: PPORolloutBatch, seed: int, step: int, global_batch_size: int, passed: int = 0
) -> PPORolloutBatch:
    """This rank's rows of a gathered rollout, shuffled anew for each step and each pass over the
    rollout.
    """
    # Prompts use streams of index >= 0 of this step, so negative ones are free for shuffling.
    shuffle_seed = int(sample_seeds(seed, step, torch.tensor([-2 - passed]))[0])
    rank, size = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )
    return rollout.chunk(rank, size, shuffle_seed, global_batch_size)


def shares_of_global_batches(rows: dict, global_batch_size: int) -> Iterator[dict]:
    """This rank's share of one global batch after the other, from the rows that `local_rows` gave
    it.
    """
    per_rank = global_batch_size // parallel_state.get_data_parallel_world_size()
    for start in range(0, len(rows["mask"]), per_rank):
        yield {key: tensor[start : start + per_rank] for key, tensor in rows.items()}


# -------------------------------------------------------------------------------- phases of a step


@contextlib.contextmanager
def inference_mode(model, timer: ScopedTimer):
    """Inside, the model answers prompts."""
    with timer("prepare_for_inference"):
        model.prepare_for_inference()
    yield
    with timer("finish_inference"):
        model.finish_inference()


def optimizer_updates(
    batches: Iterable[dict],
    model,
    optimizer,
    scheduler,
    clip_val: float | None,
    timer: ScopedTimer,
) -> Iterator[dict]:
    """One optimizer update per global batch (each rank has its share of it), between the model's
    hooks of training.

    All ranks iterate to the end.

    Args:
        timer: collects the `train_step_time` of all updates (`buffer_size=-1`).

    Yields:
        The metrics of each update: the model's own, `loss`, `lr` (that of this update) and
        `grad_norm`.

    Raises:
        NonFiniteError: a loss or a gradient is NaN or infinite; names the update.
    """
    model.prepare_for_training()
    for number, batch in enumerate(batches, 1):
        with timer("train_step_time"), naming_step(f"update {number} of its rollout"):
            optimizer.zero_grad()
            model.prepare_for_training_step()
            loss, metrics = model.get_loss_and_metrics(batch=batch, forward_only=False)
            model.finish_training_step()
            metrics = dict(metrics) | {"loss": loss, "lr": learning_rate(optimizer)}
            grad_norm = optimizer_step(optimizer, scheduler, clip_val)
        yield metrics if grad_norm is None else metrics | {"grad_norm": float(grad_norm)}
    model.finish_training()
    optimizer.zero_grad()


class EarlyStop:
    """Ends the updates on a rollout once the policy is too far from the one that generated it.

    Args:
        target_kl: farther than this is too far; None: nothing is.
    """

    def __init__(self, target_kl: float | None):
        self.target_kl, self.reached, self.skipped = target_kl, False, 0

    def until_reached(self, batches: Iterable[dict]) -> Iterator[dict]:
        """The batches until then; the others are only counted."""
        for batch in batches:
            if self.reached:
                self.skipped += 1
            else:
                yield batch

    def look_at(self, metrics: dict) -> None:
        """Look at an update's `approx_kl`: of the rollout's policy to that before the update; all
        ranks call it.

        The largest of all ranks decides: should a bit differ between them, they must still stop
        together.
        """
        if self.target_kl is None:
            return
        kl = {"approx_kl": metrics["approx_kl"]}
        largest = all_reduce_dict(
            kl, dtype=torch.float64, group=None, op=torch.distributed.ReduceOp.MAX
        )
        self.reached = largest["approx_kl"] > self.target_kl

    def metrics(self) -> dict[str, int]:
        """`updates_skipped` so far, if there is a target."""
        return {} if self.target_kl is None else {"updates_skipped": self.skipped}


def what_is_due(
    cfg, step: int, max_steps: int, run_time_exceeded: bool
) -> tuple[bool, bool, bool]:
    """(validate, save, training has reached its end) after `step` finished steps, by the intervals
    in `cfg`.
    """
    return check_progress(
        step, max_steps, cfg.val_check_interval, cfg.save_interval, 1.0, run_time_exceeded
    )


@contextlib.contextmanager
def ready_to_save(model):
    """Inside, a checkpoint can be written: optimizer states are back from host memory, and every
    rank is here.
    """
    model.prepare_for_training()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if parallel_state.get_world_size() > 1:
        torch.distributed.barrier()
    yield
    model.finish_training()


def agreed_counters(
    state_dict: dict, names: Iterable[str], section: str, num_rollout_samples: int
) -> dict[str, int]:
    """The counters `names` of a resumed state, which all ranks must have read alike; all ranks
    call it.

    Args:
        state_dict: may hold `num_rollout_samples` of the job that it is from, and `kl_coef`
            (`AdaptiveKLController`).
        section: of this job's `num_rollout_samples`, for messages: "model.ppo".

    Raises:
        RuntimeError: a rank read another state than the first.
        UserError: steps of that job had another number of prompts, so that `step` counts something
        else.
    """
    state = {name: int(state_dict[name]) for name in names}
    state |= {
        name: state_dict[name] for name in ("num_rollout_samples", "kl_coef") if name in state_dict
    }
    if parallel_state.get_world_size() > 1:
        states = [None] * parallel_state.get_world_size()
        torch.distributed.all_gather_object(states, state)
        for rank, other in enumerate(states):
            if other != states[0]:
                raise RuntimeError(
                    f"rank {rank} resumes from {other}, but rank 0 from {states[0]}: give all one "
                    "checkpoint."
                )
    before = state.get("num_rollout_samples", num_rollout_samples)
    if before != num_rollout_samples:
        raise UserError(
            f"{section}.num_rollout_samples={num_rollout_samples}, but the checkpoint to resume "
            "is of a job with"
            f" {before}: its steps, and with them epochs and max_steps, count rounds of {before} "
            "prompts. Set"
            f" {section}.num_rollout_samples={before}, or start anew from the checkpoint's .nemo "
            "file"
            " (pretrained_checkpoint.restore_from_path) in another exp_manager.explicit_log_dir."
        )
    return state


# ----------------------------------------------------------------------------------------- logging


def consume_timings(*timers: ScopedTimer) -> dict[str, float]:
    """Seconds by name since the last call, of the slowest rank; all ranks call it."""
    durations = {
        name: seconds for timer in timers for name, seconds in timer.consume_durations().items()
    }
    return all_reduce_dict(
        durations, dtype=torch.float64, group=None, op=torch.distributed.ReduceOp.MAX
    )


def log_rollouts(
    logger, table: pd.DataFrame, metrics: dict, step: int, epoch: int
) -> pd.DataFrame:
    """Log what `generate_rollouts` measured; its samples leave `metrics`.

    Returns:
        `table`, the samples of all rollouts so far, with the new ones.
    """
    table = _append_rows(table, step, metrics.pop("table"))
    logger.log_metrics(metrics | {"epoch": epoch}, step=step, prefix="train_rollouts/")
    logger.log_table(key="table/train_rollouts", dataframe=table, step=step)
    return table


def log_validation(
    logger, table: pd.DataFrame, metrics: dict, timings: dict, step: int
) -> pd.DataFrame:
    """Log what `run_validation` measured, and how long it took; its samples leave `metrics`.

    Args:
        timings: `validation_time` and its parts.

    Returns:
        `table`, samples of all validations so far, with the new ones.
    """
    samples = metrics.pop("table")
    logger.log_samples("val_samples", samples, step=step)
    table = _append_rows(table, step, samples[:VAL_TABLE_ROWS])
    logger.log_metrics(metrics, step=step, prefix="val_rollouts/")
    logger.log_table(key="table/val_rollouts", dataframe=table, step=step)
    total = timings.pop("validation_time")
    inner = {f"validation_{name}": seconds for name, seconds in timings.items()}
    logger.log_metrics({"validation_time": total} | inner, step=step, prefix="timers/")
    return table


def empty_table() -> pd.DataFrame:
    """The table of samples before the first one."""
    return pd.DataFrame(columns=TABLE_COLUMNS)


def _append_rows(table: pd.DataFrame, step: int, rows: list[dict]) -> pd.DataFrame:
    new = pd.DataFrame([{"step": step} | row for row in rows], columns=TABLE_COLUMNS)
    return pd.concat([table, new], ignore_index=True) if len(table) else new


def progress_bar(name: str, step: int, max_steps: int) -> tqdm:
    """A bar over the steps of a run, on rank 0."""
    return tqdm(
        total=max_steps,
        initial=step,
        desc=name,
        disable=parallel_state.get_rank() != 0,
        dynamic_ncols=True,
    )


def show_progress(
    progress: tqdm, train_metrics: dict, val_metrics: dict, postfix_keys: tuple[str, ...]
) -> dict[str, float]:
    """Advance the bar; returns all metrics of the step as `train_*` and `val_*`, to rank
    checkpoints by.
    """
    shown = {f"train_{key}": float(value) for key, value in train_metrics.items()}
    shown |= {f"val_{key}": float(value) for key, value in val_metrics.items()}
    progress.set_postfix(
        {key: f"{shown[key]:.4g}" for key in postfix_keys if key in shown}, refresh=False
    )
    progress.update(1)
    return shown
