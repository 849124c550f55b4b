# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Doors: modules at their former paths, and at NeMo-Aligner's, for users' scripts. None of them is
a file: the table below says where the names of each are now, and nothing inside imports them.
"""

import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# Door, below `nemo_aligner` -> the modules that have its names; `A=module:B`: `A` is now `B`.
DOORS = {
    "losses": (
        "nemo_aligner.core.distillation nemo_aligner.core.estimators nemo_aligner.core.losses "
        "nemo_aligner.core.preference"
    ),
    "metrics": "nemo_aligner.core.metrics nemo_aligner.launch.script_steps",
    "metrics.common": "nemo_aligner.launch.script_steps",
    "models.nlp.gpt.rewards_in_place_of_critic": (
        "NothingToDo=nemo_aligner.servers.scoring_clients:NoCriticFuture "
        "nemo_aligner.servers.scoring_clients "
        "RewardsWithoutValues=nemo_aligner.servers.scoring_clients:RMFutureResult"
    ),
    "types": "nemo_aligner.core.types",
    "utils.advantages": "nemo_aligner.core.advantages",
    "utils.batch_iterators": "nemo_aligner.data.nlp.batch_iterators",
    "utils.checkpointing": (
        "nemo_aligner.checkpoint.checkpointing nemo_aligner.checkpoint.folders "
        "nemo_aligner.checkpoint.optimizer_forms"
    ),
    "utils.config_rules": (
        "nemo_aligner.config.rules check_flags=nemo_aligner.config.rules:check_keys_alone "
        "check_required=nemo_aligner.config.rules:check_keys_alone "
        "nemo_aligner.core.estimators"
    ),
    "utils.config_schema": "nemo_aligner.config.inert_keys nemo_aligner.config.schema",
    "utils.config_utils": "nemo_aligner.config.checks nemo_aligner.config.defaults",
    "utils.config_values": "nemo_aligner.config.values",
    "utils.context_parallel": "nemo_aligner.parallel.context_parallel",
    "utils.device": "nemo_aligner.parallel.device nemo_aligner.parallel.megatron_adaptation",
    "utils.dist_ckpt": "nemo_aligner.checkpoint.dist_ckpt",
    "utils.distributed": (
        "nemo_aligner.parallel.collectives nemo_aligner.parallel.vocab_parallel "
        "nemo_aligner.training.timers"
    ),
    "utils.errors": "nemo_aligner.core.errors",
    "utils.expert_losses": "nemo_aligner.training.expert_losses",
    "utils.finite": "nemo_aligner.training.finite",
    "utils.kl": "nemo_aligner.core.kl",
    "utils.loggers": "nemo_aligner.parallel.environment nemo_aligner.training.loggers",
    "utils.megatron_steps": "nemo_aligner.training.megatron_steps",
    "utils.nemo_archive": (
        "nemo_aligner.checkpoint.nemo_archive nemo_aligner.checkpoint.nemo_writing "
        "check_restore_path=nemo_aligner.checkpoint.forms:check_restore_path "
        "nemo_aligner.checkpoint.sources"
    ),
    "utils.optim": "nemo_aligner.config.optim_rules nemo_aligner.training.optim",
    "utils.parallel_rules": "nemo_aligner.config.parallel_rules",
    "utils.parallel_state": "nemo_aligner.parallel.parallel_state",
    "utils.ports": "nemo_aligner.servers.ports",
    "utils.ppo_rules": "nemo_aligner.config.ppo_rules nemo_aligner.core.estimators",
    "utils.ppo_utils": (
        "nemo_aligner.core.advantages nemo_aligner.core.kl nemo_aligner.core.losses "
        "nemo_aligner.core.masks nemo_aligner.core.tensors"
    ),
    "utils.replicas": "nemo_aligner.parallel.replicas",
    "utils.resume_pair": "nemo_aligner.checkpoint.folders",
    "utils.reward_models": "nemo_aligner.config.server_rules",
    "utils.server_utils": (
        "nemo_aligner.core.tokenizer nemo_aligner.servers.futures "
        "nemo_aligner.servers.requests nemo_aligner.servers.triton_environment "
        "nemo_aligner.servers.triton_host"
    ),
    "utils.text_generation_utils": (
        "nemo_aligner.generation.interface nemo_aligner.generation.text"
    ),
    "utils.timers": "nemo_aligner.training.timers",
    "utils.train_script_utils": (
        "nemo_aligner.launch.endings nemo_aligner.launch.experiment "
        "nemo_aligner.launch.model_loading nemo_aligner.launch.processes "
        "nemo_aligner.launch.script_steps nemo_aligner.training.loggers "
        "nemo_aligner.training.schedule"
    ),
    "utils.train_utils": "nemo_aligner.models.nlp.gpt.model_functions nemo_aligner.training.optim",
    "utils.trainer_utils": "nemo_aligner.training.schedule",
    "utils.trt_llm": "nemo_aligner.core.tensors",
    "utils.utils": (
        "nemo_aligner.checkpoint.dist_ckpt nemo_aligner.checkpoint.folders "
        "nemo_aligner.checkpoint.nemo_archive nemo_aligner.core.masks "
        "nemo_aligner.core.tensors nemo_aligner.data.nlp.prompts "
        "nemo_aligner.launch.model_loading nemo_aligner.launch.script_steps "
        "nemo_aligner.models.nlp.gpt.model_functions nemo_aligner.parallel.collectives "
        "nemo_aligner.parallel.device"
    ),
    "utils.vocab_parallel": "nemo_aligner.parallel.vocab_parallel",
}


class Doors:
    """Finds `modules` that are no files, and the packages above them; `find(module, name)` gives
    each name when it is asked for, also `__all__`.
    """

    def __init__(self, modules: Iterable[str], find: Callable[[str, str], Any]) -> None:
        self._modules, self._find = set(modules), find

    def install(self) -> None:
        # First: of a module that was a folder once, Python's own finder finds what is left of it.
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_package = any(module.startswith(f"{fullname}.") for module in self._modules)
        if fullname not in self._modules:
            if not is_package or PathFinder.find_spec(fullname, path) is not None:
                return None
        return ModuleSpec(fullname, self, is_package=is_package)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Python makes it."""

    def exec_module(self, module: ModuleType) -> None:
        def __getattr__(name: str) -> Any:
            return self._find(module.__name__, name)

        def __dir__() -> list[str]:
            return sorted({*vars(module), *getattr(module, "__all__", ())})

        vars(module).update(__getattr__=__getattr__, __dir__=__dir__)


def _present(door: str, name: str) -> Any:
    """What `name` of `door` is now; `AttributeError`: nothing."""
    from nemo_aligner.core.retired import retired_names

    places = [word.rpartition("=") for word in DOORS[door.removeprefix("nemo_aligner.")].split()]
    if name == "__all__":  # import *, dir()
        modules = [importlib.import_module(place) for alias, _, place in places if not alias]
        own = [each for module in modules for each in vars(module) if _is_own(module, each)]
        return [*own, *(alias for alias, _, _ in places if alias)]
    for alias, _, place in places if not name.startswith("__") else ():
        own_module, _, own_name = place.partition(":")
        if alias == name or (not alias and hasattr(importlib.import_module(own_module), name)):
            return getattr(importlib.import_module(own_module), own_name or name)
    return retired_names(door, stacklevel=4)(name)


def _is_own(module: ModuleType, name: str) -> bool:
    """Whether a name of `module` is public and not of what it imports."""
    value, here = vars(module)[name], module.__name__
    is_here = not isinstance(value, ModuleType) and getattr(value, "__module__", here) == here
    return is_here and not name.startswith("_")


def open_doors() -> None:
    """Let the modules of `DOORS` be imported."""
    Doors((f"nemo_aligner.{door}" for door in DOORS), _present).install()
