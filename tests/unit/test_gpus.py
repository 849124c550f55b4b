# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Processes on the CPU of a machine that has GPUs, and Megatron Core around PyTorch's Adam."""

import os
import subprocess
import sys

import pytest
import torch
from omegaconf import OmegaConf

from nemo_aligner.core.errors import ConfigError
from nemo_aligner.generate.settings import compose_settings
from nemo_aligner.launch import processes

FINDS = """
import importlib.util
found = [importlib.util.find_spec(name) is not None for name in ("transformer_engine", "apex")]
try:
    import transformer_engine
except ImportError:
    found.append("refused")
print(found, os.environ["CUDA_VISIBLE_DEVICES"])
"""


def run(tmp_path, code: str, visible: str) -> str:
    """What a process prints that finds Transformer Engine and apex in `tmp_path`."""
    for name in ("transformer_engine", "apex"):
        (tmp_path / f"{name}.py").write_text("")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": visible}
    command = [sys.executable, "-c", f"import os\n{code}\n{FINDS}"]
    own = {"check": True, "capture_output": True, "text": True}
    return subprocess.run(command, env=environment, **own).stdout


HIDE = "from nemo_aligner.parallel.environment import hide_gpus; hide_gpus()"
IMPORT, HIDDEN = "import nemo_aligner", "[False, False, 'refused']"
HIDING = [(IMPORT, value, f"{HIDDEN} {value}") for value in ("", "-1,0", "NoDevFiles")]


@pytest.mark.parametrize(
    "code, visible, said", [*HIDING, (HIDE, "0", f"{HIDDEN} "), (IMPORT, "0", "[True, True] 0")]
)
def test_packages_that_need_a_gpu_are_found_only_where_it_is_seen(tmp_path, code, visible, said):
    assert run(tmp_path, code, visible) == f"{said}\n"


def test_a_script_hides_them_before_anything_else(tmp_path):
    """In a process of its own: Hydra closes handlers of logs, and that of absl its stream."""
    folder = os.path.abspath(os.path.join(os.path.dirname(__file__), "../../conf"))
    code = f"""
import sys
from nemo_aligner.launch import command_line

def main(cfg):
    print(cfg.trainer.accelerator, repr(os.environ["CUDA_VISIBLE_DEVICES"]))

main.__module__ = "examples.nlp.gpt.train_gpt_sft"
sys.argv = ["script", "trainer.accelerator=cpu"]
command_line.hydra_runner(config_path={folder!r}, config_name="gpt_sft")(main)()
"""
    said = run(tmp_path, code, "0").splitlines()
    assert said == ["cpu ''", "[False, False, 'refused'] "]


@pytest.mark.parametrize(
    "name, found", [("cuda_devices", 2), ("environment.packages_in_use", ["transformer_engine"])]
)
def test_a_gpu_that_was_found_is_not_used_silently(monkeypatch, name, found):
    monkeypatch.setattr(f"nemo_aligner.launch.processes.{name}", lambda: found)
    cfg = OmegaConf.create({"trainer": {"accelerator": "cpu", "devices": 1, "num_nodes": 1}})
    with pytest.raises(ConfigError, match="cpu, but .* had found .*empty.*CUDA_VISIBLE_DEVICES"):
        processes.resolve_and_create_trainer(cfg)


def test_the_commands_without_a_script_hide_them(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    cfg = compose_settings("generate", ["trainer.accelerator=gpu", "trainer.accelerator=cpu"])
    assert cfg.trainer.accelerator == "cpu"  # the last of two settings counts
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_code_of_the_user_keeps_the_gpus(tmp_path):
    code = "from nemo_aligner.parallel.environment import *; hide_gpus(); hide_gpus()"
    code += "; print(users_environment()['CUDA_VISIBLE_DEVICES'])"
    assert run(tmp_path, code, "0,1").splitlines()[0] == "0,1"


def test_the_tests_see_no_gpu():
    assert not torch.cuda.is_available()
