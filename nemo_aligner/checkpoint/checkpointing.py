# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Training checkpoints: one directory each, over `megatron.core.dist_checkpointing`.

    <log dir>/checkpoints/<filename with metrics>/
        weights/             model, optimizer and schedule; loads at another TP / PP / DP
        rng/rank_00000.pt    random-number states of each rank
        state.json           counters of the trainer, monitored metrics, number of the save
        COMPLETE             written last; a directory without it is ignored and removed

A checkpoint is written under a temporary name and renamed when it is complete, and only then are
old ones removed. Nothing is ever read out of a file name.
"""

import json
import math
import random
import re
import shutil
from pathlib import Path

import numpy as np
import torch
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from nemo.utils import logging

from nemo_aligner.checkpoint import dist_ckpt
from nemo_aligner.core.errors import UserError
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.megatron_switches import all_weights_named, groups_in_order
from nemo_aligner.training.optim import chained_optimizers

MARKER = "COMPLETE"
STATE_FILE = "state.json"
WRITING_SUFFIX = ".writing"
# in Megatron Core's optimizer states, where a bf16 model's fp32 weights are
MAIN_WEIGHTS = "fp32_from_fp16_params"
FULLY_RESHARDABLE = (
    "fully_reshardable"  # Megatron Core's name of a form of the distributed optimizer's state
)


def _barrier() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def format_name(template: str, metrics: dict[str, float]) -> str:
    """`"gpt-{step}-{val:.3f}"` -> `"gpt-step=10-val=0.812"`; a metric that is not there reads
    `nan`.
    """

    def fill(match):
        key, spec = match.group(1), match.group(2) or ""
        value = metrics.get(key, float("nan"))
        if not spec and float(value).is_integer():
            value = int(value)
        return f"{key}={format(value, spec)}"

    return re.sub(r"\{([^{}:]+)(?::([^{}]*))?\}", fill, template)


def read_state(folder: Path) -> dict | None:
    """Contents of `state.json` of a complete checkpoint, else None."""
    if not (folder / MARKER).is_file():
        return None
    try:
        return json.loads((folder / STATE_FILE).read_text())
    except FileNotFoundError:  # another thread or job is just removing the folder
        return None


def complete_checkpoints(root: Path) -> list[tuple[Path, dict]]:
    """Complete checkpoints under `root`, oldest first."""
    found = (
        [(path, read_state(path)) for path in root.iterdir() if path.is_dir()]
        if root.is_dir()
        else []
    )
    return sorted(
        [(p, s) for p, s in found if s is not None], key=lambda item: item[1]["save_number"]
    )


def _rng_state() -> dict:
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": np.random.get_state(),
        "python": random.getstate(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def _set_rng_state(state: dict) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def _optimizer_settings(optimizer) -> list[dict]:
    """What the configuration says for each parameter group; the rate and weight decay come from
    the schedule.
    """
    keys = ("max_lr", "min_lr", "betas", "eps")
    return [{key: group[key] for key in keys if key in group} for group in optimizer.param_groups]


def _with_step(state: dict) -> dict:
    """Optimizer state with a step count: Megatron Core writes none before the first step, and
    needs one to load.

    With experts there are two optimizers, and `state` holds theirs under 0 and 1.
    """
    if "state" in state:
        state["state"].setdefault("common_step", torch.tensor(0.0))
    for key, part in state.items():
        if key == "optimizer" or isinstance(key, int):
            _with_step(part)
    return state


def _parts(state: dict) -> list[dict]:
    """The states of the optimizers that are chained (experts have one of their own), or that of
    the only one.
    """
    return (
        [state[key] for key in sorted(state)]
        if state and all(isinstance(key, int) for key in state)
        else [state]
    )


# Where the fp32 copies of the weights are: the distributed optimizer's, and that of a bf16 model
# without it. Without either the weights are fp32 themselves.
_MAIN_PREFIXES = ("optimizer.state.param.", "optimizer.state.fp32_param.", "")


def _read_main_weights(state: dict, stored: set[str]) -> None:
    """Let `state`, about to be loaded, read the fp32 weights under the names that the checkpoint
    has for them.
    """
    for tensor in nested_values(state):
        prefix = next(
            (p for p in _MAIN_PREFIXES[:2] if str(getattr(tensor, "key", "")).startswith(p)), None
        )
        if prefix is not None:
            names = [
                other + tensor.key.removeprefix(prefix) for other in (prefix, *_MAIN_PREFIXES)
            ]
            tensor.key = next((name for name in names if name in stored), tensor.key)


def _in_form_of(optimizer, loaded: dict) -> dict:
    """What was loaded for `optimizer`, in its own form; another kind of optimizer may have saved
    it.

    A distributed optimizer keeps its step count with the settings of the parameter groups,
    PyTorch's Adam with the parameters. Of the stored settings only that count is needed, the rest
    comes from the configuration. And without
    the distributed optimizer they could not be used: they list the parameters of the first
    pipeline stage.
    """
    was_distributed = "param_state_sharding_type" in loaded
    is_distributed = isinstance(optimizer, DistributedOptimizer)
    if (was_distributed and is_distributed) or getattr(optimizer, "is_stub_optimizer", False):
        return loaded
    own, nested = optimizer.state_dict(), loaded.get("optimizer", {})
    state = loaded.get("state", nested.get("state", {}))
    old_groups = [*loaded.get("param_groups", []), *nested.get("param_groups", [])]
    step = state.get(
        "common_step", next((group["step"] for group in old_groups if group.get("step")), 0)
    )
    groups = (own if "param_groups" in own else own["optimizer"])["param_groups"]
    native = isinstance(optimizer.optimizer, torch.optim.AdamW)
    if is_distributed or not native:
        groups = [{**group, "step": float(step) if native else int(step)} for group in groups]
    if is_distributed:
        sharding = {"param_state_sharding_type": FULLY_RESHARDABLE}
        return {
            "optimizer": {"param_groups": groups},
            "param_state": loaded["param_state"],
            **sharding,
        }
    if native:
        state = {**state, "common_step": torch.tensor(float(step))}
    plain = {"state": state, "param_groups": groups}
    if "param_groups" in own:
        return plain
    main = iter(loaded[MAIN_WEIGHTS])
    return {
        "optimizer": plain,
        MAIN_WEIGHTS: [next(main) if group else [] for group in own[MAIN_WEIGHTS]],
    }


class CheckpointCallback:
    """Saves and loads the training state of one job.

    Args:
        log_dir: directory of the job; checkpoints go to `<log_dir>/checkpoints`. All ranks must
            share it.
        model: `MegatronGPTModel`, set up for training.
        optimizer, scheduler: from `model.setup_megatron_optimization`.
        name: name of the final `.nemo`.
        filename: template of the directory names (`{metric}` or `{metric:format}`).
        monitor, mode, save_top_k: keep the `save_top_k` checkpoints with the best `monitor` ("max"
            or "min") beside the last two; -1 keeps all, 0 keeps the last two alone.
        save_nemo_on_train_end, always_save_nemo: write `<name>.nemo` at the end of training, or
        with every checkpoint.
        enabled: False writes nothing (`exp_manager.create_checkpoint_callback`).
    """

    def __init__(
        self,
        log_dir,
        model,
        optimizer,
        scheduler,
        *,
        name: str,
        filename: str = "checkpoint-{step}",
        monitor: str | None = None,
        mode: str = "max",
        save_top_k: int = 1,
        save_nemo_on_train_end: bool = True,
        always_save_nemo: bool = False,
        enabled: bool = True,
    ):
        self.root = Path(log_dir) / "checkpoints"
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.name, self.filename = name, filename
        self.monitor, self.mode, self.save_top_k = monitor, mode, save_top_k
        self.save_nemo_on_train_end, self.always_save_nemo = (
            save_nemo_on_train_end,
            always_save_nemo,
        )
        self.enabled = enabled

    def _metadata(self) -> dict:
        return {
            # The layout that loads at another TP, PP or DP.
            "distrib_optim_sharding_type": FULLY_RESHARDABLE,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
            "chained_optim_avoid_prefix": True,
        }

    def _sharded_state(self, is_loading: bool) -> dict:
        metadata = self._metadata()
        weights = self.model.sharded_weights(metadata=metadata)
        state = {"weights": weights, "scheduler": self.scheduler.state_dict()}
        with all_weights_named(chained_optimizers(self.optimizer)):
            state["optimizer"] = self.optimizer.sharded_state_dict(
                weights, is_loading=is_loading, metadata=metadata
            )
        for part in _parts(state["optimizer"]):
            if (
                MAIN_WEIGHTS in part
            ):  # Megatron Core cannot put lists together again that have empty ones among them
                part[MAIN_WEIGHTS] = [group for group in part[MAIN_WEIGHTS] if group]
        return state

    def _in_own_form(self, loaded: dict) -> dict:
        """The loaded optimizer state for this job's optimizer, which may be another than the one
        that was saved.
        """
        own = chained_optimizers(self.optimizer)
        parts = [
            _in_form_of(optimizer, part)
            for optimizer, part in zip(own, _parts(loaded), strict=True)
        ]
        return dict(enumerate(parts)) if len(parts) > 1 else parts[0]

    @staticmethod
    def _as_numbers(metrics: dict) -> dict[str, float]:
        return {key: float(value) for key, value in metrics.items()}

    def custom_save(
        self,
        monitor_candidates: dict,
        is_train_end: bool = False,
        trainer_state: dict | None = None,
    ) -> Path | None:
        """Write a checkpoint, then remove those that are neither among the best nor the last two;
        all ranks call it.

        Args:
            monitor_candidates: metrics (numbers or 0-d tensors) for the directory name and the
                monitor.
            is_train_end: the last save of the job: the `.nemo` is written too, if asked for.
            trainer_state: counters that `load_latest` gives back, JSON values.

        Returns:
            The directory written, or None if checkpoints are switched off.
        """
        if not self.enabled:
            return None
        metrics = self._as_numbers(monitor_candidates)
        folder = self.root / format_name(self.filename, {**(trainer_state or {}), **metrics})
        writing = folder.with_name(folder.name + WRITING_SUFFIX)
        rank_zero = parallel_state.get_rank() == 0
        if rank_zero:
            for leftover in self.root.glob("*" + WRITING_SUFFIX):
                shutil.rmtree(leftover)
            (writing / "weights").mkdir(parents=True)
            (writing / "rng").mkdir()
        _barrier()
        dist_ckpt.save(self._sharded_state(is_loading=False), writing / "weights")
        torch.save(_rng_state(), writing / "rng" / f"rank_{parallel_state.get_rank():05d}.pt")
        _barrier()
        if rank_zero:
            previous = complete_checkpoints(self.root)
            number = previous[-1][1]["save_number"] + 1 if previous else 0
            state = {"save_number": number, "trainer": trainer_state or {}, "metrics": metrics}
            (writing / STATE_FILE).write_text(json.dumps(state, indent=1))
            (writing / MARKER).touch()
            if folder.exists():
                shutil.rmtree(folder)
            writing.rename(folder)
            self._remove_old()
            logging.info(f"saved checkpoint {folder}")
        _barrier()
        if self.always_save_nemo or (is_train_end and self.save_nemo_on_train_end):
            self.model.save_to(str(self.root / f"{self.name}.nemo"))
        return folder

    def _remove_old(self) -> None:
        checkpoints = complete_checkpoints(self.root)
        if self.save_top_k < 0 or not checkpoints:
            return
        sign = 1 if self.mode == "min" else -1

        def rank(item) -> tuple:
            """A monitor that was not measured, or is NaN, is behind all others; among equals the
            newer one wins.
            """
            value = sign * item[1]["metrics"].get(self.monitor, math.nan)
            return (math.inf if math.isnan(value) else value, -item[1]["save_number"])

        ranked = sorted(checkpoints, key=rank)
        # Two of the newest: if a job dies between the critic's save and the actor's, the older
        # ones match.
        keep = {path for path, _ in ranked[: self.save_top_k]} | {
            path for path, _ in checkpoints[-2:]
        }
        for path, _ in checkpoints:
            if path not in keep:
                shutil.rmtree(path)

    def saved_at(self, counter: str) -> dict[int, str]:
        """Absolute folder of each complete checkpoint, by the trainer's counter `counter`; of two
        the newer one.
        """
        found = complete_checkpoints(self.root)
        return {
            int(s["trainer"][counter]): str(path.resolve())
            for path, s in found
            if counter in s["trainer"]
        }

    def latest(self, resume_from=None) -> Path | None:
        """The checkpoint to resume from: `resume_from` if given, else the newest complete one,
        else None.
        """
        if resume_from is not None:
            return Path(resume_from)
        found = complete_checkpoints(self.root)
        return found[-1][0] if found else None

    def load_latest(self, resume_from=None) -> dict | None:
        """Load the checkpoint to resume from into model, optimizer, schedule and random-number
        generators; all ranks call it.

        Args:
            resume_from: a checkpoint directory (`exp_manager.resume_from_checkpoint`); default the
                newest complete
            one.

        Returns:
            The trainer's counters, or None if there is no checkpoint.

        Raises:
            UserError: `resume_from` is not a complete checkpoint.
        """
        _barrier()
        folder = self.latest(resume_from)
        if folder is None:
            return None
        stored = read_state(folder)
        if stored is None:
            raise UserError(
                f"{folder} is not a complete checkpoint (no {MARKER} file); give another one in "
                "exp_manager.resume_from_checkpoint."
            )
        settings = _optimizer_settings(self.optimizer)
        state = self._sharded_state(is_loading=True)
        _read_main_weights(
            state["optimizer"],
            set(dist_checkpointing.load_tensors_metadata(str(folder / "weights"))),
        )
        # By itself: it may read weights that the model reads too.
        optimizer = dist_checkpointing.load(
            {"optimizer": state.pop("optimizer")}, str(folder / "weights")
        )
        loaded = dist_checkpointing.load(state, str(folder / "weights"))
        self.model.load_sharded_weights(loaded["weights"])
        with groups_in_order(chained_optimizers(self.optimizer)):
            self.optimizer.load_state_dict(_with_step(self._in_own_form(optimizer["optimizer"])))
        # The job's configuration wins over the checkpoint's: a user may resume with another
        # learning rate.
        for group, setting in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(setting)
        self.scheduler.num_steps = 0  # Megatron Core adds the stored number to it
        self.scheduler.load_state_dict(loaded["scheduler"])
        rng_files = sorted((folder / "rng").glob("rank_*.pt"))
        if len(rng_files) == parallel_state.get_world_size():
            _set_rng_state(torch.load(rng_files[parallel_state.get_rank()], weights_only=False))
        else:
            logging.warning(
                f"{folder} was saved by {len(rng_files)} rank(s), this job has "
                f"{parallel_state.get_world_size()}: "
                "dropout will draw other numbers than in an uninterrupted run."
            )
        logging.info(f"resumed from {folder}")
        return stored["trainer"]
