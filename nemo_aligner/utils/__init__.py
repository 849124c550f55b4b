# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Doors: modules at their former paths, and at NeMo-Aligner's, for users' scripts. None of them is
a file: the table below says where the names of each are now, and nothing inside imports them.
"""

import importlib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# Door -> the modules that have its names; `A=module:B`: `A` is now `B`. All below `nemo_aligner`.
_TABLE = """
algorithms.dynamic_sampling: algorithms.policy_gradient
algorithms.kto: algorithms.dpo
algorithms.on_policy_distillation: algorithms.distillation
algorithms.ppo_corrections: algorithms.ppo_data
algorithms.topk_logits: algorithms.distillation
losses: core.estimators core.losses core.preference
metrics: core.metrics launch.script_steps
metrics.common: launch.script_steps
models.nlp.gpt.gpt_steerlm_model: models.nlp.gpt.gpt_sft_model
models.nlp.gpt.megatron_gpt_kto_model: models.nlp.gpt.megatron_gpt_dpo_model
models.nlp.gpt.megatron_gpt_ppo_actor: models.nlp.gpt.megatron_gpt_policy
models.nlp.gpt.megatron_gpt_regression_reward_model: models.nlp.gpt.megatron_gpt_reward_model
models.nlp.gpt.megatron_gpt_reinforce_actor: models.nlp.gpt.megatron_gpt_policy
models.nlp.gpt.megatron_gpt_rs_actor: models.nlp.gpt.megatron_gpt_policy
models.nlp.gpt.megatron_gpt_spin_model: models.nlp.gpt.megatron_gpt_dpo_model
models.nlp.gpt.reward_critic_clients: get_future_result=servers.futures:result_of_future
    servers.critic_client servers.scoring_clients
models.nlp.gpt.reward_model_classes: config.jobs.supervised
    models.nlp.gpt.megatron_gpt_reward_model
models.nlp.gpt.rewards_in_place_of_critic: NothingToDo=servers.scoring_clients:NoCriticFuture
    servers.scoring_clients RewardsWithoutValues=servers.scoring_clients:RMFutureResult
types: core.types
utils.advantages: core.advantages
utils.batch_iterators: data.nlp.samplers
utils.checkpointing: checkpoint.checkpointing checkpoint.folders
utils.config_rules: config.rules check_flags=config.rules:check_keys_alone
    check_required=config.rules:check_keys_alone core.estimators
utils.config_schema: config.inert_keys config.schema
utils.config_utils: config.checks config.defaults
utils.config_values: config.values
utils.context_parallel: parallel.collectives
utils.device: parallel.device parallel.megatron_adaptation
utils.dist_ckpt: checkpoint.dist_ckpt
utils.distributed: parallel.collectives parallel.vocab_parallel training.schedule
utils.errors: core.errors
utils.expert_losses: training.passes
utils.finite: training.megatron_steps
utils.kl: core.kl
utils.loggers: parallel.environment training.loggers
utils.megatron_steps: training.megatron_steps
utils.nemo_archive: checkpoint.nemo_archive check_restore_path=checkpoint.forms:check_restore_path
    checkpoint.sources
utils.optim: config.optim_rules training.optim
utils.parallel_rules: config.parallel_rules
utils.parallel_state: parallel.parallel_state
utils.ports: servers.ports
utils.ppo_rules: config.jobs.actors core.estimators
utils.ppo_utils: core.advantages core.kl core.losses core.tensors
utils.replicas: checksum=parallel.collectives:checksum_of_shard parallel.collectives
utils.resume_pair: checkpoint.folders
utils.reward_models: config.server_rules
utils.server_utils: core.tokenizer servers.futures servers.requests servers.triton_environment
    servers.triton_host
utils.text_generation_utils: generation.interface
utils.timers: training.schedule
utils.train_script_utils: launch.endings launch.experiment launch.model_loading launch.processes
    launch.script_steps training.loggers training.schedule
utils.train_utils: models.nlp.gpt.model_functions training.optim
utils.trainer_utils: training.schedule
utils.trt_llm: core.tensors
utils.utils: checkpoint.dist_ckpt checkpoint.folders checkpoint.nemo_archive core.tensors
    data.nlp.prompts launch.model_loading launch.script_steps models.nlp.gpt.model_functions
    parallel.collectives parallel.device
utils.vocab_parallel: parallel.vocab_parallel
"""
DOORS = dict(" ".join(entry.split()).split(": ") for entry in re.split(r"\n(?! )", _TABLE.strip()))


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

    words = DOORS[door.removeprefix("nemo_aligner.")].split()
    places = [
        (alias, f"nemo_aligner.{place}") for alias, _, place in (w.rpartition("=") for w in words)
    ]
    if name == "__all__":  # import *, dir()
        modules = [importlib.import_module(place) for alias, place in places if not alias]
        own = [each for module in modules for each in vars(module) if _is_own(module, each)]
        return [*own, *(alias for alias, _ in places if alias)]
    for alias, place in places if not name.startswith("__") else ():
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
