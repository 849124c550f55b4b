# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The command `nemo-aligner`: it finds every job and tool, and explains every key of them."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from nemo_aligner import __main__ as command
from nemo_aligner.config.defaults import complete_config
from nemo_aligner.config.jobs import JOBS
from nemo_aligner.config.schema import explained, meaning
from nemo_aligner.config.values import leaves
from nemo_aligner.core.endings import ExitCode
from tests.cases import some_of

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [*ROOT.glob("examples/nlp/gpt/*.py"), *ROOT.glob("examples/nlp/synthetic_data_gen/*.py")]


HEAVY = {"torch", "nemo", "hydra"}


@pytest.mark.parametrize(
    ("words", "heavy"),
    [([], HEAVY | {"omegaconf"}), (["generate"], HEAVY), (["evaluate"], HEAVY)],
    ids=["itself", "generate", "evaluate"],
)
def test_help_imports_nothing_heavy(words, heavy):
    code = "import sys; from nemo_aligner.__main__ import main\n"
    code += f"try:\n    main([*{words}, '--help'])\nfinally:\n    "
    code += f"print('heavy:', *{heavy} & set(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0 and ended.stdout.endswith("heavy:\n"), ended.stderr
    assert "examples:" in ended.stdout or not words


def test_help_lists_everything(capsys):
    command.main(["--help"])
    said = capsys.readouterr().out
    listed = re.findall(r"(?m)^  (\S+(?: \S+)?)  +[A-Z].+\.$", said)
    assert {"train ppo", "serve critic", "logits"} < {*command.job_modules()}
    assert {*listed} == {*command.job_modules(), *command.TOOLS}
    assert max(map(len, said.splitlines())) < 100


@pytest.mark.full
def test_an_error_of_a_tool_is_one_line_without_remarks_of_libraries():
    command_line = [sys.executable, "-m", "nemo_aligner", "convert", "nemo-to-hf", "/no", "/none"]
    ended = subprocess.run(command_line, capture_output=True, text=True)
    assert ended.stderr.startswith("error: NEMO=/no ") and ended.stderr.count("\n") == 1


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_and_a_job_are_one(script):
    text = script.read_text(encoding="utf-8")
    ((module, function),) = re.findall(r"from nemo_aligner\.jobs\.(\w+) import (\w+)", text)
    name = function.replace("_", " ")
    assert command.job_modules()[name][0] == module
    job = command.load_job(name, module)
    assert f'config_path="conf", config_name="{job.config_name}"' in text
    assert f"nemo-aligner {name} " in job.__doc__
    assert len(command.job_modules()) == len(SCRIPTS)


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        ("trian ppo", "train ppo"),
        ("ppo", "train ppo"),
        ("serve critik trainer.devices=2", "serve critic"),
        ("train trainer.devices=2", None),
    ],
)
def test_an_unknown_command_names_the_nearest(words, nearest, capsys):
    assert command.main(words.split()) == ExitCode.USER_ERROR
    error = capsys.readouterr().err
    assert f"Did you mean {nearest}?" in error if nearest else "is no command" in error


def test_help_of_groups_jobs_and_tools(capsys):
    command.main(["serve", "--help"])
    assert "serve critic" in (said := capsys.readouterr().out) and "train" not in said
    command.main(["train", "ppo", "trainer.devices=2", "-h"])
    said = capsys.readouterr().out
    assert "nemo-aligner train ppo pretrained_checkpoint" in said and "config ppo" in said
    with pytest.raises(SystemExit):
        command.main(["plan", "--help"])
    assert "usage: nemo-aligner plan" in capsys.readouterr().out


@some_of("name", JOBS, keep=2)
def test_every_key_has_its_default_and_a_meaning(name):
    defaults = OmegaConf.to_container(complete_config({}, name))
    text = explained(name)
    assert yaml.safe_load(text) == defaults
    assert "](" not in text and "**" not in text
    for key, _ in leaves(defaults):
        parts = key.split(".")  # a section may be explained as a whole
        assert any(meaning(".".join(parts[:n]), name) for n in range(len(parts), 0, -1)), key


def test_config_takes_the_name_of_a_job_or_tool(capsys):
    assert command.main(["config", "critic"]) is None
    assert "port to listen on\n    port: 5556" in capsys.readouterr().out
    assert command.main(["config", "critics"]) == ExitCode.USER_ERROR
    assert "name one of " in capsys.readouterr().err
    assert command.main(["config", "pop"]) == ExitCode.USER_ERROR
    assert "Did you mean ppo?" in capsys.readouterr().err
    assert command.main(["config", "--help"]) is None
    assert "critic, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("a.f=http://h/x?key=hidden", "a.f=http://h/x?*** cannot be read; put its value in"),
        ("sft", "sft cannot be read; write KEY=VALUE"),
    ],
)
def test_a_word_that_cannot_be_read_is_named(word, says, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["train", "ppo", word])
    error = capsys.readouterr().err
    assert ended.value.code == ExitCode.USER_ERROR and says in error and "hidden" not in error


def test_ctrl_c_ends_a_command_in_one_line(monkeypatch, capsys):
    def interrupted(_args):
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr("nemo_aligner.convert.__main__._run", interrupted)
    with pytest.raises(SystemExit) as ended:
        command.main(["convert", "nemo-info", "a.nemo"])
    signal.signal(signal.SIGINT, before)
    assert ended.value.code == ExitCode.INTERRUPTED == 130
    assert capsys.readouterr().err.strip() == "Ctrl-C: the command has ended."
