# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Training checkpoints: one folder each, over `megatron.core.dist_checkpointing`.

    <log dir>/checkpoints/<filename with metrics>/
        weights/             model, optimizer, schedule and a reference policy that changes; loads
                             at another TP / PP / DP
        model_config.yaml    and the tokenizer's files: the folder can be used like a `.nemo`
        rng/rank_00000.pt    random-number states of each rank
        state.json           counters of the trainer, monitored metrics, number of the save, what
                             the job was made from (`made_from.py`)
        CHECKSUMS.xxh128     checksums of all of these (`checksums.py`)
        COMPLETE             written last, with the checksum of the former; a folder without it is
                             ignored and removed

Old checkpoints are removed after the new one is complete. A damaged one is set aside, and the one
before is taken. With `async_save` files are written from a copy in host memory; the rest comes
when all ranks see that all are written (`check_save`), or need to know (`finish_save`).
"""

import contextlib
import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from nemo.utils import logging

from nemo_aligner.checkpoint import dist_ckpt, folders
from nemo_aligner.checkpoint.checksums import Checksums, check_files_together, write_manifest
from nemo_aligner.checkpoint.dist_ckpt import failing_together
from nemo_aligner.checkpoint.forms import CHECKPOINT_WEIGHTS, REFERENCE, RNG_FOLDER, check_complete
from nemo_aligner.checkpoint.made_from import MadeFrom, compare
from nemo_aligner.checkpoint.torch_dist_stream import TorchDistTensors, load, read_objects
from nemo_aligner.config.rules import EVERY_CHECKPOINT, check_saving
from nemo_aligner.core.endings import progress
from nemo_aligner.core.errors import DamagedFileError, SaveError, UserError
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import gathered
from nemo_aligner.parallel.megatron_switches import (
    all_weights_named,
    groups_in_order,
    places_without_padding,
)
from nemo_aligner.training.optim import chained_optimizers, is_pytorch_adam, is_sgd


@dataclass(eq=False, repr=False)
class CheckpointCallback:
    """Saves and loads the training state of one job.

    Raises:
        ConfigError: an unknown `save_hf`, or `async_save` with exports at every checkpoint.
        UserError: `save_hf`, and Hugging Face cannot express the model.
        SaveError: on all ranks; a name or a folder cannot be written.
    """

    log_dir: str | Path  # folder of the job, shared by all ranks, in which is `checkpoints`
    model: Any  # a `MegatronGPTModel`; its methods are called on all ranks
    # From `model.setup_megatron_optimization`.
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    _: KW_ONLY
    name: str  # of the final `.nemo`
    filename: str = "checkpoint-{step}"  # template of folders (`{metric}` or `{metric:format}`)
    # Keep the `save_top_k` best ("max" or "min") and the last two; -1: all, 0: the last two only.
    monitor: str | None = None
    mode: str = "max"
    save_top_k: int = 1
    save_nemo_on_train_end: bool = True  # write `<name>.nemo` at the end of training
    always_save_nemo: bool = False  # write it with every checkpoint
    # Write the folder `<name>-hf` at the end (True) or each time (EVERY_CHECKPOINT).
    save_hf: bool | str | None = False
    async_save: bool = False  # write checkpoints in the background, all but the last one
    enabled: bool = True  # False writes nothing (`exp_manager.create_checkpoint_callback`)
    # A checkpoint of something else is refused; None: not compared.
    made_from: MadeFrom | None = None
    # Number of the save that the weights are from, on rank 0; None: not known.
    save_number: int | None = field(default=None, init=False)
    folder: Path | None = field(default=None, init=False)  # of that save
    # What is being written, its temporary name, its folder, its `state.json`.
    _begun: tuple[dist_ckpt.Save, Path, Path, dict[str, Any]] | None = field(
        default=None, init=False
    )

    def __post_init__(self) -> None:
        check_saving(self.async_save, self.always_save_nemo, self.save_hf)
        if self.save_hf and self.enabled:
            self.model.check_hugging_face()
        self.root = Path(self.log_dir) / folders.CHECKPOINTS
        if self.enabled:
            others = [f"{self.name}.nemo"] * (self.save_nemo_on_train_end or self.always_save_nemo)
            others += [f"{self.name}-hf"] * bool(self.save_hf)
            with failing_together(self.root):
                if parallel_state.get_rank() == 0:
                    folders.try_names(self.root, self.filename, others)

    # --- saving ---------------------------------------------------------------------------------

    def custom_save(
        self,
        monitor_candidates: Mapping[str, Any],
        is_train_end: bool = False,
        trainer_state: dict[str, Any] | None = None,
    ) -> Path | None:
        """Write a checkpoint, then remove outdated ones; all ranks call it. Returns the folder, or
        None if checkpoints are switched off. `async_save`: first finishes the save before, and
        returns when the state is copied.

        Args:
            is_train_end: the last save of the job: write the exports too.
            trainer_state: counters that `load_latest` returns, JSON values.

        Raises:
            SaveError: on all ranks; this one or, with `async_save`, the one before could not be
                written. Earlier checkpoints are untouched.
        """
        if not self.enabled:
            return None
        self.finish_save()
        metrics = {key: float(value) for key, value in monitor_candidates.items()}
        unranked = folders.why_unranked(metrics, self.monitor, self.save_top_k)
        if unranked is not None:
            logging.warning(unranked)
        counters = trainer_state or {}
        folder = self.root / folders.format_name(self.filename, {**counters, **metrics})
        state = {"trainer": counters, "metrics": metrics}
        if self.made_from is not None:
            state["made_from"] = self.made_from
        in_background = self.async_save and not is_train_end
        self._begin(folder, state, in_background)
        if not in_background:
            self.finish_save()
            self._export(folder, is_train_end)
        return folder

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written in the background; the same on all ranks."""
        return self._begun is not None

    def check_save(self) -> None:
        """`finish_save` if all ranks have written their parts; all ranks call it."""
        if self._begun is not None and all(gathered(self._begun[0].written.done())):
            self.finish_save()

    def finish_save(self) -> None:
        """Complete the checkpoint being written, if any; all ranks call it. `SaveError` on all."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        save, writing, folder, state = begun
        with self._removed_if_failed(writing):
            checksums = save.finish()
            with failing_together(folder):
                if parallel_state.get_rank() == 0:
                    self._finish_writing(writing, folder, state, checksums)
        self.folder = folder

    def _begin(self, folder: Path, state: dict[str, Any], in_background: bool) -> None:
        writing = folder.with_name(folder.name + folders.WRITING_SUFFIX)
        rank = parallel_state.get_rank()
        with self._removed_if_failed(writing):
            with failing_together(writing):
                if rank == 0:
                    if self.save_number is not None:
                        folders.abandon_after(self.root, self.save_number)
                    for path in self.root.iterdir() if self.root.is_dir() else ():
                        if folders.is_leftover(path):
                            shutil.rmtree(path)
                    for name in (CHECKPOINT_WEIGHTS, RNG_FOLDER):
                        (writing / name).mkdir(parents=True)
            save = dist_ckpt.Save(
                self._sharded_state(is_loading=False, with_reference=True),
                writing / CHECKPOINT_WEIGHTS,
                {writing / RNG_FOLDER / f"rank_{rank:05d}.pt": _rng_bytes()},
                in_background,
            )
        self._begun = (save, writing, folder, state)

    def _export(self, folder: Path, is_train_end: bool) -> None:
        """Write exports; the weights of `folder` are in memory."""
        with progress.expected(False):
            if self.always_save_nemo or (is_train_end and self.save_nemo_on_train_end):
                self.model.save_to(str(self.root / f"{self.name}.nemo"))
            if self.save_hf == EVERY_CHECKPOINT or (is_train_end and self.save_hf):
                hf_folder = self.root / f"{self.name}-hf"
                self.model.save_hugging_face(hf_folder, folder / CHECKPOINT_WEIGHTS)
            if is_train_end and parallel_state.get_rank() == 0:
                (folder / folders.EXPORTED).touch()

    def finish_export(self) -> None:
        """Write the exports that a job which died after its last checkpoint did not; all ranks
        call it, with the weights of that checkpoint in memory.
        """
        folder = self.folder
        if not self.enabled or folder is None:
            return
        if not gathered((folder / folders.EXPORTED).exists())[0]:
            logging.info(f"the job died after {folder}: writing what comes at the end of training")
            self._export(folder, is_train_end=True)

    @contextlib.contextmanager
    def _removed_if_failed(self, writing: Path) -> Iterator[None]:
        try:
            yield
        except SaveError:
            if parallel_state.get_rank() == 0:
                shutil.rmtree(writing, ignore_errors=True)
            raise

    def _finish_writing(
        self, writing: Path, folder: Path, state: dict[str, Any], checksums: Checksums
    ) -> None:
        previous = folders.complete_checkpoints(self.root)
        number = previous[-1][1]["save_number"] + 1 if previous else 0
        text = json.dumps({"save_number": number, **state}, indent=1)
        (writing / folders.STATE_FILE).write_text(text)
        self.model.save_config_to(writing)
        known = {f"{CHECKPOINT_WEIGHTS}/{name}": found for name, found in checksums.items()}
        checksum = write_manifest(writing, known)
        folders.replace(folder, writing, lambda: folders.mark(folder, checksum))
        self.save_number = number
        kept = (self.monitor, self.mode, self.save_top_k)
        for path in folders.outdated(folders.complete_checkpoints(self.root), *kept):
            folders.remove_checkpoint(path)
        logging.info(f"saved checkpoint {folder}")

    def _sharded_state(self, is_loading: bool, with_reference: bool) -> dict[str, Any]:
        metadata = {
            "distrib_optim_sharding_type": FULLY_RESHARDABLE,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
            "chained_optim_avoid_prefix": True,
        }
        weights = self.model.sharded_weights(metadata=metadata)
        state = {
            "weights": weights,
            "scheduler": self.scheduler.state_dict(),
            "optimizer": sharded_optimizer_state(self.optimizer, weights, is_loading, metadata),
        }
        reference = self.model.sharded_reference(weights, is_loading) if with_reference else {}
        return {**state, REFERENCE: reference} if reference else state

    # --- loading --------------------------------------------------------------------------------

    def saved_at(self, counter: str) -> dict[int, str]:
        """Absolute folders of complete checkpoints, not abandoned; at equal counts the newer."""
        return {
            int(state["trainer"][counter]): str(path.resolve())
            for path, state in folders.complete_checkpoints(self.root)
            if counter in state["trainer"] and not folders.is_abandoned(path)
        }

    def newest_sound(
        self, accept: Callable[[dict[str, Any]], bool] = lambda _state: True
    ) -> Path | None:
        """The newest undamaged checkpoint with a `state.json` to `accept`, or None; all ranks call
        it. Newer damaged ones are renamed; those that the job has gone back behind are left out.
        """
        while True:
            chosen: Path | None = None
            with failing_together(self.root):
                if parallel_state.get_rank() == 0:
                    for path, state in folders.complete_checkpoints(self.root, folders.set_aside):
                        if accept(state) and not folders.is_abandoned(path):
                            chosen = path
            folder: Path | None = gathered(chosen)[0]
            if folder is None or self.is_sound(folder):
                return folder

    def is_sound(self, folder: Path) -> bool:
        """Whether a checkpoint is undamaged; else it is set aside. All ranks call it."""
        try:
            check_files_together(folder)
        except DamagedFileError as error:
            with failing_together(folder):
                if parallel_state.get_rank() == 0:
                    folders.set_aside(folder, error)
            return False
        return True

    def load_latest(self, resume_from: str | Path | None = None) -> dict[str, Any] | None:
        """Load model, optimizer, schedule and random-number generators from `resume_from`, else
        the newest sound checkpoint; all ranks call it. Returns the trainer's counters, or None if
        there is no checkpoint.

        Raises:
            DamagedFileError: `resume_from` is damaged.
            UserError: `resume_from` is not complete, or all checkpoints are NeMo-Aligner's.
        """
        if resume_from is not None:
            check_complete(Path(resume_from))
            check_files_together(Path(resume_from))
        folder = self.newest_sound() if resume_from is None else Path(resume_from)
        if folder is not None:
            return self.load_sound(folder)
        if others := folders.checkpoints_of_others(self.root):
            raise UserError(
                f"{self.root} holds training checkpoints that are not of this package, such as "
                f"{others[-1]}, so the job cannot resume from them; start from the .nemo file of "
                "that job in another folder (exp_manager.explicit_log_dir), or set "
                "exp_manager.resume_if_exists=False to start afresh here."
            )
        return None

    def load_at(self, counter: str, count: int) -> dict[str, Any]:
        """Load the newest checkpoint with `counter` at `count`; returns the counters. All ranks
        call it. `UserError`: there is no sound one; nothing has changed in memory.
        """
        folder = self.newest_sound(lambda state: state["trainer"].get(counter) == count)
        if folder is None:
            raise UserError(
                f"{self.root} holds no checkpoint of {counter}={count} that is not damaged; there "
                f"are those of {', '.join(map(str, sorted(self.saved_at(counter)))) or 'no step'}."
            )
        return self.load_sound(folder)

    def start_anew(self) -> None:
        """The weights in memory are no checkpoint's: the next save abandons all."""
        self.save_number = -1

    def load_sound(self, folder: Path) -> dict[str, Any]:
        """Load a complete checkpoint after `is_sound`; returns the counters. All ranks call it."""
        stored = folders.read_state(folder)
        assert stored is not None, f"{folder} is not complete"
        if self.made_from is not None:
            compare(self.made_from, stored, folder)
        self.model.check_checkpoint(folder)
        with progress.expected(False):
            self._load(folder)
        _restore_rng(folder)
        if folder.resolve().parent == self.root.resolve():
            self.save_number, self.folder = stored["save_number"], folder
        logging.info(f"resumed from {folder}")
        return stored["trainer"]

    def _load(self, folder: Path) -> None:
        with failing_together():
            stored = TorchDistTensors(folder / CHECKPOINT_WEIGHTS, prefix=None)
        names = set(stored.shapes())
        with_reference = any(key.startswith(f"{REFERENCE}.") for key in names)
        state = self._sharded_state(is_loading=True, with_reference=with_reference)
        # By itself: it may read weights that the model reads too.
        own = {"optimizer": state.pop("optimizer")}
        fit_to_stored(own["optimizer"], names)
        optimizer, loaded = load(own, stored), load(state, stored)
        self.model.load_sharded_weights(loaded["weights"])
        if REFERENCE in loaded:
            self.model.load_sharded_reference(loaded[REFERENCE])
        load_optimizer_state(self.optimizer, optimizer["optimizer"])
        self.scheduler.num_steps = 0  # Megatron Core adds the stored number to it
        self.scheduler.load_state_dict(loaded["scheduler"])


def _rng_bytes() -> bytes:
    state = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": np.random.get_state(),
        "python": random.getstate(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    return dist_ckpt.saved(state).getvalue()


def _restore_rng(folder: Path) -> None:
    """Restore this rank's random generators; with another number of ranks warn instead."""
    files = sorted((folder / RNG_FOLDER).glob("rank_*.pt"))
    if len(files) != parallel_state.get_world_size():
        logging.warning(
            f"{folder} was saved by {len(files)} rank(s), this job has "
            f"{parallel_state.get_world_size()}: dropout will draw other numbers than in an "
            "uninterrupted run."
        )
        return
    file = files[parallel_state.get_rank()]
    array = np.zeros(1, np.uint32)  # that of NumPy's generator
    classes: list[Any] = [array.__reduce__()[0], np.ndarray, np.dtype, type(array.dtype)]
    state = read_objects(file, file, classes=classes)
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


# --- optimizer states that another kind of optimizer can load. Megatron Core has three forms, and
# loads each only into the kind of optimizer that saved it:
#
# * fp32 weights: `{"state", "param_groups"}`;
# * bf16 weights: `{"optimizer": {"state", "param_groups"}, MAIN_WEIGHTS}`;
# * the distributed optimizer: `{"optimizer": {"param_groups"}, "param_state", ...}`.
#
# With experts there are two optimizers, whose states are under 0 and 1.

State = dict[Any, Any]

# Megatron Core's key of a bf16 model's fp32 weights.
MAIN_WEIGHTS = "fp32_from_fp16_params"
# The form of the distributed optimizer that loads at another split.
FULLY_RESHARDABLE = "fully_reshardable"
# Prefixes of fp32 weights: the distributed optimizer's, a bf16 model's without it, fp32 weights'.
_MAIN_PREFIXES = ("optimizer.state.param.", "optimizer.state.fp32_param.", "")


def sharded_optimizer_state(
    optimizer: MegatronOptimizer, weights: State, is_loading: bool, metadata: dict[str, Any]
) -> State:
    """Megatron Core's sharded state, right for weights of two dtypes and several buckets."""
    parts = chained_optimizers(optimizer)
    with all_weights_named(parts), places_without_padding(parts):
        state = optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata)
    for part in _parts(state):
        if MAIN_WEIGHTS in part:  # Megatron Core cannot reassemble lists with empty lists in them
            part[MAIN_WEIGHTS] = [group for group in part[MAIN_WEIGHTS] if group]
    return state


def fit_to_stored(state: State, stored: set[str]) -> None:
    """Let `state`, to be loaded, read the fp32 weights by their names among the tensors `stored`;
    `UserError`: these are of another kind of optimizer.
    """
    tensors = list(nested_values(state))
    wanted = {str(getattr(tensor, "key", "")) for tensor in tensors}
    for name, kind in (("exp_avg", "Adam"), ("momentum_buffer", "SGD with momentum")):
        prefix = f"optimizer.state.{name}."
        is_wanted, is_stored = (any(k.startswith(prefix) for k in s) for s in (wanted, stored))
        if is_wanted and not is_stored:
            raise UserError(
                f"model.optim asks for {kind}, but the checkpoint was saved with another kind of "
                "optimizer. Resume with its model.optim.name (and momentum), or start anew from "
                "its weights."
            )
    for tensor in tensors:
        key = str(getattr(tensor, "key", ""))
        main = next((p for p in _MAIN_PREFIXES[:2] if key.startswith(p)), None)
        if main is not None:
            names = [other + key.removeprefix(main) for other in (main, *_MAIN_PREFIXES)]
            tensor.key = next((name for name in names if name in stored), key)


def load_optimizer_state(optimizer: MegatronOptimizer, loaded: State) -> None:
    """Load any optimizer's state; settings of the job, such as its learning rate, win."""
    keys = ("max_lr", "min_lr", "betas", "eps")  # those that do not come from the schedule
    groups = optimizer.param_groups
    settings = [{key: group[key] for key in keys if key in group} for group in groups]
    own = chained_optimizers(optimizer)
    parts = [_in_form_of(part, state) for part, state in zip(own, _parts(loaded), strict=True)]
    state = dict(enumerate(parts)) if len(parts) > 1 else parts[0]
    with groups_in_order(own):
        optimizer.load_state_dict(state)
    for group, setting in zip(optimizer.param_groups, settings, strict=True):
        group.update(setting)


def _parts(state: State) -> list[State]:
    if state and all(isinstance(key, int) for key in state):
        return [state[key] for key in sorted(state)]
    return [state]


def _in_form_of(optimizer: MegatronOptimizer, loaded: State) -> State:
    """The state `loaded` in the form of `optimizer`, with the settings of `optimizer`.

    Of the stored settings the step count alone is taken, which the distributed optimizer and the
    Adam of Transformer Engine or apex keep there, PyTorch's Adam with the parameters. Megatron
    Core 0.19 refuses groups of another learning rate; without the distributed optimizer they list
    the parameters of the first pipeline stage only.
    """
    if getattr(optimizer, "is_stub_optimizer", False):
        return loaded
    is_distributed = isinstance(optimizer, DistributedOptimizer)
    nested = loaded.get("optimizer", {})
    state = loaded.get("state", nested.get("state", {}))
    stored_groups = [*loaded.get("param_groups", []), *nested.get("param_groups", [])]
    step = next((group["step"] for group in stored_groups if group.get("step")), 0)
    step = state.get("common_step", step)
    own = optimizer.state_dict()
    groups = (own if "param_groups" in own else own["optimizer"])["param_groups"]
    is_pytorch = is_pytorch_adam(optimizer.optimizer)
    state = {key: value for key, value in state.items() if key != "common_step"}
    if not is_sgd(optimizer) and (is_distributed or not is_pytorch):
        groups = [{**group, "step": float(step) if is_pytorch else int(step)} for group in groups]
    if is_distributed:
        return {
            "optimizer": {"param_groups": groups},
            "param_state": loaded["param_state"],
            "param_state_sharding_type": FULLY_RESHARDABLE,
        }
    if is_pytorch:
        # Megatron Core needs it, but does not write it before a step.
        state["common_step"] = torch.tensor(float(step))
    plain = {"state": state, "param_groups": groups}
    if "param_groups" in own:
        return plain
    main = iter(loaded[MAIN_WEIGHTS])
    return {
        "optimizer": plain,
        MAIN_WEIGHTS: [next(main) if group else [] for group in own[MAIN_WEIGHTS]],
    }
