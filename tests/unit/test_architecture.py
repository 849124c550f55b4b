# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The rooms of the package: imports go down the floors, never up and never in circles; doors lead
in from NeMo-Aligner's module paths and nothing inside uses them.
"""

import ast
import functools
import importlib
import re
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from nemo_aligner import utils
from tests.cases import in_one_test

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "nemo_aligner"

# From the ground up; rooms on one line may import each other, but not in circles.
FLOORS = """
core
parallel config
training checkpoint
servers generation data
models
algorithms launch report
__main__ api jobs compat convert generate evaluate plan inspection doctor synthetic
""".split("\n")[1:-1]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms.split()}


def _module(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


MODULES = {_module(path): path for path in sorted(PACKAGE.rglob("*.py"))}


# `compat` takes the mechanism of the first; the others are no files.
DOORS = {"nemo_aligner.utils", *(f"nemo_aligner.{door}" for door in utils.DOORS)}
INSIDE = [module for module in MODULES if module not in {*DOORS, "nemo_aligner"}]


@functools.cache
def _imports(module: str, only_itself: bool = False) -> set[str]:
    """Modules of the package that `module` imports, anywhere in its text; `only_itself`: not those
    that its functions import, nor those for types alone.
    """
    found = set()
    tree = ast.parse(MODULES[module].read_text())
    for node in tree.body if only_itself else ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import in line {node.lineno}"
            both = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in {*MODULES, *DOORS} else node.module for name in both]
        found |= {name for name in names if name in {*MODULES, *DOORS}}
    return found - {module}


def _room(module: str) -> str:
    return module.split(".")[1]


def _floor(module: str) -> int:
    """That of its room; a command line is wiring, wherever it is called."""
    return len(FLOORS) - 1 if module.endswith(".__main__") else FLOOR.get(_room(module), -1)


@in_one_test("module", INSIDE)
def test_imports_go_down_the_floors(module):
    assert _room(module) in FLOOR, f"{module} is in no room; put its room on a floor"
    upward = {other for other in _imports(module) if FLOOR.get(_room(other), -1) > _floor(module)}
    assert not upward, f"{module} imports from a floor above its own: {sorted(upward)}"


@in_one_test("module", INSIDE)
def test_nothing_inside_imports_a_door(module):
    assert _room(module) == "compat" or not _imports(module) & DOORS


def test_no_import_circles():
    graph = {module: _imports(module) - {"nemo_aligner"} for module in MODULES}
    # A package's __init__ may gather what its modules define.
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other in a circle: {' -> '.join(error.args[1])}")


# What other jobs read, and checkpoints and rewards of kinds that only some jobs have.
NOT_OF_PPO = """
algorithms.supervised checkpoint.hugging_face checkpoint.megatron checkpoint.old_weights
data.nlp.chat_records data.nlp.chat_template data.nlp.datasets data.nlp.nemo_chat data.nlp.sft
data.nlp.steerlm data.nlp.topk_logits
models.nlp.gpt.megatron_gpt_reward_model servers.agents servers.environment servers.front
servers.reward_function servers.teachers servers.user_code servers.web
""".split()


def test_the_ppo_actor_imports_what_it_uses():
    jobs = ast.parse(MODULES["nemo_aligner.jobs.rollouts"].read_text())
    job = next(f for f in jobs.body if isinstance(f, ast.FunctionDef) and f.name == "train_ppo")
    loaded = {"nemo_aligner.jobs.rollouts"}
    new = loaded | {n.module for n in ast.walk(job) if isinstance(n, ast.ImportFrom)}
    while new:
        loaded |= new
        new = {other for module in new for other in _imports(module, only_itself=True)} - loaded
    unused = tuple(f"nemo_aligner.{name}" for name in NOT_OF_PPO)
    assert len(loaded) > 100 and not [name for name in loaded if name.startswith(unused)]


@in_one_test("room", [path for path in PACKAGE.iterdir() if path.is_dir()])
def test_every_room_is_a_package(room):
    no_room = room.name in ("__pycache__", "conf")  # conf: the YAML files of the repository
    assert no_room or (room / "__init__.py").exists()


# Where the classes that were asked for must be found, whatever lies behind.
INTERFACE = """
nemo_aligner.algorithms.critic_server_trainer: CriticServerTrainer
nemo_aligner.algorithms.ppo: PPOTrainer
nemo_aligner.algorithms.rs: RSTrainer
nemo_aligner.models.nlp.gpt.megatron_gpt_ppo_actor: MegatronGPTActorModel
nemo_aligner.models.nlp.gpt.megatron_gpt_rs_actor: MegatronGPTRSModel
nemo_aligner.models.nlp.gpt.reward_critic_clients: RemoteGPTRMClient RemoteGPTRMCriticClient
    RMCriticFutureResult
nemo_aligner.data.nlp.builders: build_dataloader build_train_valid_test_rlhf_datasets
    collate_with_pad_to_max_batch
nemo_aligner.servers.http_communicator: HTTPCommunicator
"""
# What could be imported through a door before the rooms were made.
DOOR_NAMES = (Path(__file__).parent / "door_names.txt").read_text()


def _listed(text: str) -> list[tuple[str, str]]:
    """(module, name) of each name behind `module:`."""
    parts = re.split(r"(\S+):", text)[1:]
    return [(m, n) for m, names in zip(*[iter(parts)] * 2, strict=True) for n in names.split()]


@in_one_test("module, name", _listed(INTERFACE + DOOR_NAMES))
def test_public_names_stay_where_scripts_import_them(module, name):
    assert hasattr(importlib.import_module(module), name)


def test_a_door_lists_its_names_and_not_what_stands_beside_them():
    names = dir(importlib.import_module("nemo_aligner.losses"))
    assert {"ppo_actor_loss", "dpo_loss", "loss_weights"} <= set(names)
    assert not {"torch", "Tensor", "dataclass"} & set(names)
    scope = {}
    exec("from nemo_aligner.utils.config_rules import *", scope)
    assert {"check_flags", "ADVANTAGE_ESTIMATORS"} <= scope.keys()
    assert "DictConfig" not in scope


def test_a_folder_that_is_left_of_a_former_module_is_no_door(tmp_path, monkeypatch):
    for folder in ("room/__pycache__", "room/door/__pycache__"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "room" / "__init__.py").write_text("real = 1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    utils.Doors(["room.door"], lambda module, name: (module, name)).install()
    try:
        assert importlib.import_module("room").real == 1
        assert importlib.import_module("room.door").name == ("room.door", "name")
    finally:
        for module in ("room", "room.door"):  # whoever looks at all modules would ask the door
            sys.modules.pop(module, None)


# Modules that write down the time of day, or compare two clocks for the user.
WALL_CLOCK = """doctor training.loggers training.schedule report.elements
core.endings data.nlp.chat_template launch.experiment"""


def test_no_decision_is_taken_by_a_clock_that_may_jump():
    clock = re.compile(r"\btime\.time\(|\btime_ns\(|\.now\(|\.today\(|from time import")
    found = {name for name, path in MODULES.items() if clock.search(path.read_text())}
    assert found == {f"nemo_aligner.{name}" for name in WALL_CLOCK.split()}
