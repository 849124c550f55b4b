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

import pytest
import torch

FOLDER = Path(sys.prefix) / "oracles"
LIBRARIES = ("verl", "openrlhf", "torchrl", "peft")
ABSENT = (
    "ray",
    "vllm",
    "codetiming",
    "openrlhf.trainer.ray",
)  # imported by them, not needed by what we call
UNRUN = (
    "openrlhf",
    "openrlhf.models",
    "openrlhf.trainer",
    "openrlhf.utils",
)  # packages whose __init__ wants a GPU


@functools.cache
def oracle(name: str) -> types.ModuleType:
    """The module `name` of one of LIBRARIES, the way `importlib.import_module` gives it; skips
    where there is none.
    """
    if not FOLDER.exists():
        pytest.skip(f"{FOLDER} does not exist; `make test` installs tests/oracles.txt there")
    for library in ("transformers", "accelerate", "trl.core"):
        importlib.import_module(
            library
        )  # they look at what is installed once, so before any stand-in exists
    with _import_path():
        return importlib.import_module(name)


@functools.cache
def nemo_aligner_ppo_utils() -> types.ModuleType:
    """`nemo_aligner/utils/ppo_utils.py` of NeMo-Aligner 0.7.0, by its file: the package has our
    name.

    Its one import from there, `masked_mean`, is taken out: `calculate_entropy` must not be called.
    """
    path = FOLDER / "nemo_aligner" / "utils" / "ppo_utils.py"
    if not path.exists():
        pytest.skip(f"{path} does not exist; `make test` installs tests/oracles.txt there")
    module = types.ModuleType("oracle_nemo_aligner_ppo_utils")
    source = path.read_text()
    line = "from nemo_aligner.utils.utils import masked_mean\n"
    assert line in source
    exec(compile(source.replace(line, "\n"), str(path), "exec"), vars(module))
    return module


def methods_of(path: Path, class_name: str, names: str, **given: object) -> type:
    """A class with only the methods `names` of a class in the source file `path`, for modules that
    cannot be imported. `given`: globals that the methods read, beside torch.
    """
    if not path.exists():
        pytest.skip(f"{path} does not exist; `make test` installs tests/oracles.txt there")
    module = ast.parse(path.read_text())
    (found,) = (n for n in module.body if isinstance(n, ast.ClassDef) and n.name == class_name)
    found.bases, found.decorator_list = [], []
    found.body = [n for n in found.body if getattr(n, "name", None) in names.split()]
    assert len(found.body) == len(names.split())
    space: dict = {"torch": torch, "F": torch.nn.functional, "Tuple": tuple, **given}
    exec(compile(ast.Module([found], []), str(path), "exec"), space)
    return space[class_name]


def trl_dpo(**config: object) -> Any:
    """`DPOTrainer` of trl with `get_batch_logps` and `dpo_loss` alone; its module wants an older
    transformers.
    """
    path = Path(importlib.util.find_spec("trl").origin).parent / "trainer" / "dpo_trainer.py"
    names = "get_batch_logps dpo_loss"
    trainer = methods_of(path, "DPOTrainer", names, FDivergenceType=_Inert("_", (), {}))()
    trainer.accelerator = types.SimpleNamespace(device="cpu")
    trainer.reference_free, trainer.f_divergence_type, trainer.f_divergence_params = False, "", {}
    vars(trainer).update(config)
    return trainer


def nemo_aligner_dpo(**config: object) -> Any:
    """The losses of `MegatronGPTDPOModel` of NeMo-Aligner 0.7.0."""
    path = FOLDER / "nemo_aligner" / "models" / "nlp" / "gpt" / "megatron_gpt_dpo_model.py"
    names = "get_reduced_masked_logps loss_func sft_loss_func split_output_tensor"
    one_rank = types.SimpleNamespace(get_context_parallel_world_size=lambda: 1)
    model = methods_of(path, "MegatronGPTDPOModel", names, parallel_state=one_rank)()
    vars(model).update(config)
    return model


def nemo_aligner_spin(**config: object) -> Any:
    """The loss of `MegatronGPTSPINModel` of NeMo-Aligner 0.7.0."""
    path = FOLDER / "nemo_aligner" / "models" / "nlp" / "gpt" / "megatron_gpt_spin_model.py"
    names = "get_reduced_masked_logps loss_func split_output_tensor"
    model = methods_of(path, "MegatronGPTSPINModel", names)()
    vars(model).update(config)
    return model


def nemo_aligner_steerlm2_loss(
    mask: torch.Tensor, mean_tokens: torch.Tensor, losses: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """That of a micro-batch by `GPTSteerLMModel` of NeMo-Aligner 0.7.0; `losses`: of tokens."""
    path = FOLDER / "nemo_aligner" / "models" / "nlp" / "gpt" / "gpt_steerlm_model.py"
    model = methods_of(path, "GPTSteerLMModel", "weight_loss_func")()
    return model.weight_loss_func(mask, mean_tokens, losses, weights)


def trl_jsd(*args: object, **options: object) -> torch.Tensor:
    """The loss of trl's `GKDTrainer`, whose module wants an older transformers."""
    path = Path(importlib.util.find_spec("trl").origin).parent / "trainer" / "gkd_trainer.py"
    trainer = methods_of(path, "GKDTrainer", "generalized_jsd_loss")
    return trainer.generalized_jsd_loss(*args, **options)


def nemo_aligner_distillation(logits: torch.Tensor, *args: object) -> tuple[torch.Tensor, ...]:
    """Loss, KL and negative log-likelihood `[B, S]`, and the gradient of the sum of the loss, by
    `_TopKLogitsCrossEntropy` of NeMo-Aligner 0.7.0.
    """
    alone = types.SimpleNamespace(get_tensor_model_parallel_group=lambda: None)
    alone.get_tensor_model_parallel_rank = lambda: 0
    alone.get_tensor_model_parallel_world_size = lambda: 1

    class VocabUtility:
        @staticmethod
        def vocab_range_from_per_partition_vocab_size(size, rank, _world_size):
            return rank * size, (rank + 1) * size

    class OneRank:
        distributed = types.SimpleNamespace(
            all_reduce=lambda *a, **k: None, ReduceOp=torch.distributed.ReduceOp
        )

        def __getattr__(self, name):
            return getattr(torch, name)

    function = methods_of(
        FOLDER / "nemo_aligner" / "utils" / "distributed.py",
        "_TopKLogitsCrossEntropy",
        "forward backward",
        torch=OneRank(),
        parallel_state=alone,
        tensor_parallel=types.SimpleNamespace(
            utils=types.SimpleNamespace(VocabUtility=VocabUtility)
        ),
    )
    context = types.SimpleNamespace()
    context.save_for_backward = lambda *tensors: setattr(context, "saved_tensors", tensors)
    losses = function.forward(context, logits, *args)
    return *losses, function.backward(context, torch.ones_like(losses[0]))[0]


def trl_kto(**config: object) -> Any:
    """`KTOTrainer` of trl with `get_batch_logps` and `kto_loss` alone, of one process."""
    path = Path(importlib.util.find_spec("trl").origin).parent / "trainer" / "kto_trainer.py"
    lists = {"List": list, "Dict": dict, "Union": Any}
    trainer = methods_of(path, "KTOTrainer", "get_batch_logps kto_loss", **lists)()
    trainer.accelerator = types.SimpleNamespace(device="cpu", gather=lambda tensor: tensor)
    trainer.calculate_KL, trainer.loss_type = True, "kto"
    vars(trainer).update(config)
    return trainer


def nemo_aligner_kto(**config: object) -> Any:
    """The loss of `MegatronGPTKTOModel` of NeMo-Aligner 0.7.0, on one rank."""
    path = FOLDER / "nemo_aligner" / "models" / "nlp" / "gpt" / "megatron_gpt_kto_model.py"
    names = "get_reduced_masked_logps loss_func split_output_tensor"
    joined = lambda losses: torch.cat([loss.reshape(1) for loss in losses])
    mean = {"average_losses_across_data_parallel_group": joined}
    model = methods_of(path, "MegatronGPTKTOModel", names, **mean)()
    vars(model).update(config)
    return model


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
