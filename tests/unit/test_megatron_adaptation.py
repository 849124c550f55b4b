# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The adaptation of Megatron Core: its list is complete, and a missing name is reported."""

import ast
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nemo_aligner
from nemo_aligner.parallel import megatron_adaptation
from tests.cases import in_one_test
from tests.patience import patience

PACKAGE = Path(nemo_aligner.__file__).parent


@in_one_test("touched", megatron_adaptation.TOUCHED)
def test_every_touched_name_exists_and_says_why_and_where(touched):
    if touched.module.startswith("transformer_engine"):
        if importlib.util.find_spec("transformer_engine") is None:
            return
    megatron_adaptation.resolve(touched.module, touched.name)
    assert touched.reason
    paths = [word for word in touched.where.split() if word.endswith(".py") and "/" in word]
    if paths:
        assert all((PACKAGE / path).is_file() for path in paths), touched.where
    else:
        module, function = touched.where.split(".")
        assert hasattr(importlib.import_module(f"nemo_aligner.parallel.{module}"), function)


def test_releases_are_given_for_names_that_are_touched():
    text = Path(megatron_adaptation.__file__).read_text()
    for name in megatron_adaptation.SINCE | megatron_adaptation.UNTIL:
        assert text.count(f" {name}\n") == 1, name


@pytest.mark.parametrize(
    "module, name",
    [("clip_grads", "get_grad_norm_fp64"), ("optimizer", "MegatronOptimizer.no_such")],
)
def test_missing_name_is_reported(module, name):
    module = f"megatron.core.optimizer.{module}"
    with pytest.raises(ImportError, match=f"{module}.{name}.*setup.py"):
        megatron_adaptation.resolve(module, name)


def test_private_methods_that_subclasses_override_are_listed():
    has_hybrid = importlib.util.find_spec("megatron.core.models.hybrid")  # 0.16 has none
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        text, is_there = path.read_text(), path.name != "hybrid_model.py" or has_hybrid
        if not is_there or not re.search(r"(from|import) megatron", text):
            continue
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        members = vars(importlib.import_module(name)).values()
        for cls in (each for each in members if getattr(each, "__module__", "") == name):
            for base in cls.__mro__[1:] if inspect.isclass(cls) else ():
                private = {name for name in vars(cls) if re.match("_[^_]", name)}
                private = {name for name in private if inspect.isfunction(vars(base).get(name))}
                if base.__module__.startswith("megatron."):
                    found |= {f"{base.__name__}.{name}" for name in private}
    assert "TopKRouter._apply_expert_bias" in found
    assert found <= {touched.name for touched in megatron_adaptation.TOUCHED}


def test_private_names_of_megatron_that_modules_use_are_listed():
    """Those reached through an imported module or imported by name."""
    listed = {touched.name.rpartition(".")[2] for touched in megatron_adaptation.TOUCHED}
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        aliases = set()
        for node in ast.walk(tree := ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron"):
                aliases |= {alias.asname or alias.name for alias in node.names}
                found |= {alias.name for alias in node.names if alias.name.startswith("_")}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id in aliases and node.attr.startswith("_"):
                    found.add(node.attr)
    found = {name for name in found if not name.startswith("__")}
    assert "_get_block_submodules" in found
    assert found <= listed


@pytest.mark.full
def test_importing_the_package_changes_nothing():
    """Only `parallel_state.initialize()` adapts Megatron Core, whatever the order of imports."""
    code = """
import torch
before = torch.cuda.current_device, torch.Tensor.cuda
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from nemo_aligner.models.nlp.gpt import megatron_gpt_model
from nemo_aligner.parallel import parallel_state
assert (torch.cuda.current_device, torch.Tensor.cuda) == before
parallel_state.initialize()
changed = (torch.cuda.current_device, torch.Tensor.cuda) != before
assert changed is not torch.cuda.is_available()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=patience(100))


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="looks at the adaptation of a machine without CUDA"
)
def test_remapped_functions_name_no_cuda_device():
    megatron_adaptation.adapt_megatron_core()
    for touched in megatron_adaptation.REMAPPED_CONSTANTS:
        name = touched.name
        function = inspect.unwrap(megatron_adaptation.resolve(touched.module, name)[2])
        function = getattr(function, "__func__", function)
        constants = function.__code__.co_consts
        inner = [
            each for constant in constants if isinstance(constant, tuple) for each in constant
        ]
        texts = {each for each in (*constants, *inner) if isinstance(each, str)}
        assert not {"cuda", "torch.cuda.FloatTensor", "torch.cuda.HalfTensor"} & texts, name
