# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The runner of scripts that import NeMo's removed collection `nlp`."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nemo_aligner import compat

ROOT = Path(__file__).parents[2]
REMOVED = "nemo.collections.nlp.parts.nlp_overrides"


def test_a_normal_import_changes_nothing():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(REMOVED)


def test_every_stand_in_can_be_imported(installed):
    for module, names in compat.STAND_INS.items():
        for name, own in names.items():
            own_module, _, own_name = own.partition(":")
            expected = getattr(importlib.import_module(own_module), own_name)
            assert getattr(importlib.import_module(module), name) is expected
        package, _, name = module.rpartition(".")
        exec(f"from {package} import {name}", scope := {})
        assert scope[name] is importlib.import_module(module)


def test_what_has_no_stand_in_says_so(installed):
    with pytest.raises(ImportError, match="nothing of nemo_aligner stands in for .*FSDPStrategy"):
        exec(f"from {REMOVED} import NLPFSDPStrategy")
    with pytest.raises(ImportError, match="stands in for .*.megatron_gpt,"):  # begins like another
        exec("from nemo.collections.nlp.models.language_modeling import megatron_gpt")
    assert not hasattr(importlib.import_module(REMOVED), "__wrapped__")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("nemo.collections.nlp.modules")


def test_stand_ins_do_what_the_scripts_need(installed):
    from nemo.collections.nlp.parts.megatron_trainer_builder import MegatronTrainerBuilder
    from nemo.collections.nlp.parts.nlp_overrides import NLPDDPStrategy

    from nemo_aligner.parallel.device import get_backend

    assert NLPDDPStrategy(no_ddp_communication_hook=True).process_group_backend == get_backend()
    cfg = OmegaConf.create({"trainer": {"accelerator": "cpu", "devices": 1, "num_nodes": 1}})
    assert MegatronTrainerBuilder(cfg).create_trainer().world_size == 1
    chat = importlib.import_module(
        "nemo.collections.nlp.data.language_modeling.megatron.gpt_sft_chat_dataset"
    )
    names = ("system_turn_start", "turn_start", "label_start", "end_of_turn", "end_of_name")
    example = chat.get_prompt_template_example(dict(zip(names, "<>:;.", strict=True)))
    assert example.startswith("<System.{system message};>User.{turn 1 user message};>Assistant.:")


def test_runner_runs_a_script_as_python_would(tmp_path):
    script = tmp_path / "folder" / "script.py"
    script.parent.mkdir()
    (script.parent / "beside.py").write_text("VALUE = 7\n")
    script.write_text(
        "import sys\n"
        "import beside\n"
        f"import {REMOVED}\n"
        "if __name__ == '__main__':\n"
        "    print(beside.VALUE, __file__, sys.argv, __spec__.name)\n"
    )
    runner = [sys.executable, "-m", "nemo_aligner.compat"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(*arguments, **more):
        options = {"cwd": tmp_path, "env": environment | more, "timeout": 120}
        return subprocess.run([*runner, *arguments], **options, capture_output=True, text=True)

    expected = f"7 {script} {[str(script), 'a.b=1', '+c=2']} nemo_aligner.compat.__main__\n"
    assert run("folder/script.py", "a.b=1", "+c=2").stdout == expected
    # As Lightning starts further processes: the module and the overrides alone.
    again = run("a.b=1", "+c=2", NEMO_ALIGNER_COMPAT_SCRIPT=str(script))
    assert again.stdout == expected
    without = run()
    assert without.returncode == 1 and "usage" in without.stderr
