# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Import of other libraries, whose PPO mathematics or LoRA adapters ours are compared with. See
tests/oracles.txt for what and why.

They lie in a folder that is on `sys.path` only while they are imported, last. What of them needs a
cluster or a GPU (ray, vLLM) is not installed: inside their own modules, and only there, an absent
package is an inert stand-in. None of the functions that the tests call touches one.
"""

import ast
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

FOLDER = Path(sys.prefix) / "oracles"
ALIGNER = FOLDER / "nemo_aligner"  # 0.7.0
LIBRARIES = ("verl", "openrlhf", "torchrl", "peft")
# Imported by them, not needed by what we call.
ABSENT = ("ray", "vllm", "codetiming", "openrlhf.trainer.ray")
# Packages whose __init__ wants a GPU.
UNRUN = ("openrlhf", "openrlhf.models", "openrlhf.trainer", "openrlhf.utils")


@functools.cache
def oracle(name: str) -> types.ModuleType:
    """The module `name` of one of LIBRARIES, the way `importlib.import_module` gives it; skips
    where there is none.
    """
    if not FOLDER.exists():
        pytest.skip(f"{FOLDER} does not exist; `make test` installs tests/oracles.txt there")
    # These look at what is installed once, so before any stand-in exists.
    for library in ("transformers", "accelerate", "trl.core"):
        importlib.import_module(library)
    with _import_path():
        return importlib.import_module(name)


@functools.cache
def nemo_aligner_ppo_utils() -> types.ModuleType:
    """`nemo_aligner/utils/ppo_utils.py` of NeMo-Aligner 0.7.0, by its file: the package has our
    name.

    Its one import from there, `masked_mean`, is taken out: `calculate_entropy` must not be called.
    """
    module = types.ModuleType("oracle_nemo_aligner_ppo_utils")
    source = _source(ALIGNER / "utils" / "ppo_utils.py")
    line = "from nemo_aligner.utils.utils import masked_mean\n"
    assert line in source
    exec(compile(source.replace(line, "\n"), module.__name__, "exec"), vars(module))
    return module


def _source(path: Path) -> str:
    if not path.exists():
        pytest.skip(f"{path} does not exist; `make test` installs tests/oracles.txt there")
    return path.read_text()


def with_methods(path: Path, class_name: str, names: str, config=None, **given: object) -> Any:
    """An object with only the methods `names` of a class in the source file `path`, for modules
    that cannot be imported; `config`: its attributes. `given`: globals that the methods read,
    beside torch.
    """
    module = ast.parse(_source(path))
    (found,) = (n for n in module.body if isinstance(n, ast.ClassDef) and n.name == class_name)
    found.bases, found.decorator_list = [], []
    found.body = [n for n in found.body if getattr(n, "name", None) in names.split()]
    assert len(found.body) == len(names.split())
    space: dict = {"torch": torch, "F": torch.nn.functional, **given}
    space |= {"List": list, "Dict": dict, "Tuple": tuple, "Union": Any}
    exec(compile(ast.Module([found], []), str(path), "exec"), space)
    made = space[class_name]()
    vars(made).update(config or {})
    return made


def _trl(trainer: str, *arguments: Any, **given: object) -> Any:
    """Of trl, whose modules of trainers want an older transformers; on one process."""
    folder = Path(importlib.util.find_spec("trl").origin).parent / "trainer"
    made = with_methods(folder / f"{trainer}_trainer.py", *arguments, **given)
    made.accelerator = types.SimpleNamespace(device="cpu", gather=lambda tensor: tensor)
    return made


def trl_dpo(**config: object) -> Any:
    """`DPOTrainer` of trl with `get_batch_logps` and `dpo_loss` alone."""
    config |= {"reference_free": False, "f_divergence_type": "", "f_divergence_params": {}}
    inert = {"FDivergenceType": _Inert("_", (), {})}
    return _trl("dpo", "DPOTrainer", "get_batch_logps dpo_loss", config, **inert)


def trl_kto(**config: object) -> Any:
    """`KTOTrainer` of trl with `get_batch_logps` and `kto_loss` alone."""
    config |= {"calculate_KL": True, "loss_type": "kto"}
    return _trl("kto", "KTOTrainer", "get_batch_logps kto_loss", config)


def trl_jsd(*args: object, **options: object) -> torch.Tensor:
    """The loss of trl's `GKDTrainer`."""
    return _trl("gkd", "GKDTrainer", "generalized_jsd_loss").generalized_jsd_loss(*args, **options)


def _nemo_aligner(model: str, names: str, config: dict, **given: object) -> Any:
    """Of the model of NeMo-Aligner 0.7.0 for `model`."""
    path = ALIGNER / "models" / "nlp" / "gpt" / f"megatron_gpt_{model}_model.py"
    names += " get_reduced_masked_logps loss_func split_output_tensor"
    return with_methods(path, f"MegatronGPT{model.upper()}Model", names, config, **given)


def nemo_aligner_dpo(**config: object) -> Any:
    """The losses of DPO."""
    one_rank = types.SimpleNamespace(get_context_parallel_world_size=lambda: 1)
    return _nemo_aligner("dpo", "sft_loss_func", config, parallel_state=one_rank)


def nemo_aligner_kto(**config: object) -> Any:
    joined = lambda losses: torch.cat([loss.reshape(1) for loss in losses])
    return _nemo_aligner("kto", "", config, average_losses_across_data_parallel_group=joined)


def nemo_aligner_steerlm2_loss(*args: torch.Tensor) -> torch.Tensor:
    """That of a micro-batch, of mask, mean number of tokens, losses of tokens, and weights."""
    path = ALIGNER / "models" / "nlp" / "gpt" / "gpt_steerlm_model.py"
    return with_methods(path, "GPTSteerLMModel", "weight_loss_func").weight_loss_func(*args)


def nemo_aligner_distillation(logits: torch.Tensor, *args: object) -> tuple[torch.Tensor, ...]:
    """Loss, KL and negative log-likelihood `[B, S]`, and the gradient of the sum of the loss, by
    `_TopKLogitsCrossEntropy` of NeMo-Aligner 0.7.0, on one rank.
    """
    vocabulary = types.SimpleNamespace(
        vocab_range_from_per_partition_vocab_size=lambda size, rank, _: (0, size)
    )
    utils = types.SimpleNamespace(VocabUtility=vocabulary)
    alone = types.SimpleNamespace(get_tensor_model_parallel_group=lambda: None)
    alone.get_tensor_model_parallel_rank = lambda: 0
    alone.get_tensor_model_parallel_world_size = lambda: 1
    own = {"parallel_state": alone, "tensor_parallel": types.SimpleNamespace(utils=utils)}
    path = ALIGNER / "utils" / "distributed.py"
    function = with_methods(path, "_TopKLogitsCrossEntropy", "forward backward", **own)
    context = types.SimpleNamespace()
    context.save_for_backward = lambda *tensors: setattr(context, "saved_tensors", tensors)
    with mock.patch.object(torch.distributed, "all_reduce", lambda *_, **__: None):
        losses = function.forward(context, logits, *args)
        return *losses, function.backward(context, torch.ones_like(losses[0]))[0]


class _Inert(type):
    """A class each of whose attributes is itself, and which, called as a decorator, gives back
    what it decorates.
    """

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) else cls


class _StandIn(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Inert(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stand-ins for ABSENT, and empty packages for UNRUN, to be seen by modules of LIBRARIES
    alone.
    """

    def find_spec(self, name, path=None, target=None):
        absent = any(name == package or name.startswith(package + ".") for package in ABSENT)
        if not (absent or name in UNRUN) or not _asked_by_oracle():
            return None
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        if name in UNRUN:
            spec.submodule_search_locations.append(str(FOLDER.joinpath(*name.split("."))))
        return spec

    def create_module(self, spec):
        return types.ModuleType(spec.name) if spec.name in UNRUN else _StandIn(spec.name)

    def exec_module(self, module):
        pass


def _asked_by_oracle() -> bool:
    """Whether the import statement under way stands in a module of LIBRARIES, or in this one."""
    frame = sys._getframe(2)
    while frame and (frame.f_globals.get("__name__") or "").partition(".")[0] == "importlib":
        frame = frame.f_back
    asker = frame.f_globals.get("__name__", "") if frame else ""
    return asker == __name__ or asker.partition(".")[0] in LIBRARIES


@contextmanager
def _import_path() -> Iterator[None]:
    """The oracles' folder at the end of the import path; afterwards neither it nor a stand-in is
    left.
    """
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    sys.path.append(str(FOLDER))
    try:
        yield
    finally:
        sys.path.remove(str(FOLDER))
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _StandIn)]:
            del sys.modules[name]
