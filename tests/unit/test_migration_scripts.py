# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What docs/migration.md says of NeMo-Aligner's scripts and names: which scripts find what they
import, what a script made of its steps does and does not, what takes the place of a name.
"""

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from nemo.utils.exp_manager import exp_manager
from omegaconf import OmegaConf

from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.retired import RETIRED
from nemo_aligner.data.nlp.datasets import RewardModelDataset, RLHFDataset
from nemo_aligner.models.alignable_interface import (
    AlignableGenerativeInterface,
    PolicyWithReference,
)
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import (
    RETIRED_HOOKS,
    MegatronGPTModel,
    RetiredHooks,
)
from nemo_aligner.servers.critic_client import RemoteGPTRMCriticClient, SaveFuture
from nemo_aligner.utils import train_script_utils as steps
from tests.cases import rows, says
from tests.unit.test_migration_page import generator

ROOT = Path(__file__).parents[2]
GONE = "nemo.collections.nlp"


def read_imports():
    """{script: what it imports, as `module:name` or `module`}."""
    found = {}
    text = Path(__file__).with_name("nemo_aligner_scripts.txt").read_text()
    for part in text.split("\n== ")[1:]:
        script, _, lines = part.partition("\n")
        table = rows(lines) if lines else []
        imports = [(module, name) for module, names in table for name in names.split()]
        found[script] = [f"{module}:{name}".removeprefix("import:") for module, name in imports]
    return found


IMPORTS = read_imports()
PAGE = generator()
OWN = [f"nlp/gpt/{name}" for name in PAGE.SCRIPTS]


def can_import(where):
    module, _, name = where.partition(":")
    try:
        exec(f"from {module} import {name}" if name else f"import {module}", {})
    except ImportError:
        return False
    return True


# --- scripts


def test_every_script_is_on_the_page():
    others = [script for scripts in PAGE.OTHER_SCRIPTS.values() for script in scripts]
    data = (*PAGE.OWN_DATA_SCRIPTS, *PAGE.FREE_DATA_SCRIPTS, *PAGE.BOUND_DATA_SCRIPTS)
    assert sorted([*OWN, *others, *data]) == sorted(IMPORTS)
    for script in PAGE.OWN_DATA_SCRIPTS:
        assert (ROOT / "examples" / script).is_file()


@pytest.mark.parametrize("script", OWN)
def test_a_script_finds_what_it_imports(script):
    removed = [where.partition(":")[2] for where in IMPORTS[script] if where.startswith(GONE)]
    assert sorted(removed) == sorted(PAGE.SCRIPTS[Path(script).name])
    missing = [where for where in IMPORTS[script] if not can_import(where)]
    assert len(IMPORTS[script]) > 8
    assert missing == [where for where in IMPORTS[script] if where.startswith(GONE)]


@pytest.mark.parametrize("script", [each for each in OWN if PAGE.SCRIPTS[Path(each).name]])
def test_a_script_finds_the_rest_with_the_runner(script, installed):
    assert [where for where in IMPORTS[script] if not can_import(where)] == []


def test_scripts_of_other_algorithms_cannot_run(installed):
    """An import of theirs is missing or retired, with the runner too."""
    retired = {f"{module}:{name}" for module, names in RETIRED.items() for name in names}
    for scripts in PAGE.OTHER_SCRIPTS.values():
        for script in scripts:
            assert any(w in retired or not can_import(w) for w in IMPORTS[script]), script


def test_scripts_that_write_data(installed):
    for script in PAGE.FREE_DATA_SCRIPTS:
        assert IMPORTS[script] == []
    needed = {where for script in PAGE.BOUND_DATA_SCRIPTS for where in IMPORTS[script]}
    assert needed and not any(can_import(where) for where in needed)


def test_the_reward_server_of_the_last_revision_needs_another_import():
    from lightning.pytorch import Trainer
    from pytorch_lightning import Trainer as OtherTrainer

    from nemo_aligner.compat.nemo_classes import NLPDDPStrategy

    options = {"accelerator": "cpu", "devices": 1, "logger": False}
    assert Trainer(strategy=NLPDDPStrategy(), **options).world_size == 1
    with pytest.raises(ValueError, match="invalid strategy"):
        OtherTrainer(strategy=NLPDDPStrategy(), **options)


@pytest.mark.full
def test_the_runner_works_under_torchrun(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "from nemo.collections.nlp.parts import nlp_overrides\n"
        "open(os.environ['RANK'], 'w').write(' '.join([sys.argv[1], os.environ['WORLD_SIZE']]))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    command += ["--master_port=0", "-m", "nemo_aligner.compat", "script.py", "a.b=1"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["a.b=1 2"] * 2


# --- what a script of these steps does, and does not


def test_nemos_experiment_manager_writes_tensorboard_files_alone(tmp_path):
    cfg = {
        "trainer": {"devices": 1, "accelerator": "cpu", "precision": 32, "rm": {"odd": 1}},
        "exp_manager": {"explicit_log_dir": str(tmp_path), "create_checkpoint_callback": False},
    }
    trainer = steps.resolve_and_create_trainer(OmegaConf.create(cfg), "rm")
    exp_manager(trainer, OmegaConf.create(cfg["exp_manager"]))
    logger = steps.CustomLoggerWrapper(trainer.loggers)
    logger.log_metrics({"loss": 1.0}, step=1, prefix="train/")
    logger.finalize()
    assert list(tmp_path.rglob("events.out.tfevents.*"))
    assert not list(tmp_path.rglob("*.jsonl"))


# --- names


@pytest.mark.parametrize("name", PAGE.NOT_HERE)
def test_what_is_not_here_cannot_be_imported(name):
    module, _, constant = name.partition(":")
    if constant:
        assert not hasattr(importlib.import_module(module), constant)
        return
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(module)


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in RETIRED.items() for name in names]
)
def test_a_retired_name_says_what_to_do(module, name):
    with pytest.warns(UserWarning, match="cannot be used") as said:
        retired = getattr(importlib.import_module(module), name)
    assert RETIRED[module][name] in str(said[0].message)
    with says(UserError, "cannot be used", RETIRED[module][name]):
        retired("anything", key="anything")


@pytest.mark.parametrize("name", RETIRED_HOOKS)
def test_a_method_that_nothing_calls_cannot_be_overridden_or_called(name):
    with says(ConfigError, f"Mine.{name} would never be called", RETIRED_HOOKS[name]):
        type("Mine", (MegatronGPTModel,), {name: lambda self: None})
    method = getattr(type("Mine", (RetiredHooks,), {})(), name)
    with says(UserError, RETIRED_HOOKS[name]):
        method(*([None] * len(inspect.signature(method).parameters)))


def test_calls_that_need_another_form(tiny_tokenizer, write):
    path = write({"text": "the film"}, {"text": "the film"})
    for cls in (RLHFDataset, RewardModelDataset):
        encoded = cls([path], tiny_tokenizer, 24).encode("the film")
        assert list(encoded) == list(tiny_tokenizer.text_to_ids("the film"))
    assert not hasattr(AlignableGenerativeInterface, "get_init_policy_logprobs")
    assert hasattr(PolicyWithReference, "get_init_policy_logprobs")
    arguments = list(inspect.signature(RemoteGPTRMCriticClient.train).parameters)
    assert arguments == ["self", "rollout_batch"]
    returned = inspect.signature(RemoteGPTRMCriticClient.save).return_annotation
    assert returned in (SaveFuture, "SaveFuture")
