# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Versions: what is installed against setup.py, said in one line at start; and the locks."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from packaging.requirements import Requirement

from nemo_aligner.launch import start_up

ROOT = Path(__file__).parents[2]
LOCKS = runpy.run_path(str(ROOT / "scripts/locks.py"))


def test_what_does_not_fit_is_named(monkeypatch):
    assert start_up.metadata.requires(start_up.DISTRIBUTION) and start_up.unsupported() == {}
    lines = ["numpy<1.20,>=1.19", "no-such-package[extra]>=3", "pytest>=1"]
    lines += ["also-missing>=1; extra == 'gpu'", "of-another-python; python_version < '3.0'"]
    monkeypatch.setattr(start_up.metadata, "requires", lambda _name: lines)
    found = start_up.unsupported()
    assert list(found) == ["numpy<1.20,>=1.19", "no-such-package[extra]>=3"]
    assert re.fullmatch(r"installed: [\d.]+", found["numpy<1.20,>=1.19"])
    assert found["no-such-package[extra]>=3"] == "not installed"
    # Remains of a package: a folder of metadata without a version, or with one that is no number.
    monkeypatch.setattr(start_up.metadata, "requires", lambda _name: ["psutil>=5.9"])
    for version, said in ((TypeError, "not installed"), (["5.9.custom"], "installed: 5.9.custom")):
        monkeypatch.setattr(start_up.metadata, "version", Mock(side_effect=version))
        assert start_up.unsupported() == {"psutil>=5.9": said}


def test_without_an_installation_nothing_is_known(monkeypatch):
    monkeypatch.setattr(start_up, "DISTRIBUTION", "not-installed-at-all")
    assert start_up.unsupported() == {}


@pytest.mark.full
@pytest.mark.parametrize(
    "command",
    [
        ["examples/nlp/gpt/train_gpt_sft.py", "+model.no_such_key=1"],
        ["-m", "nemo_aligner.convert", "nemo-info", "missing.nemo"],
        ["-m", "nemo_aligner.plan", "missing.nemo", "--gpus", "1", "--memory", "1GB"],
    ],
)
def test_each_start_says_so_in_one_line(tmp_path, command):
    found = tmp_path / "psutil-1.0.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: psutil\nVersion: 1.0\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path}
    options = {"capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, **options)
    assert done.returncode != 0  # for another reason: the mistake in the command
    (line,) = [line for line in done.stderr.splitlines() if "psutil" in line]
    said = "WARNING: nemo_aligner needs psutil>=5.9 (installed: 1.0). "
    assert line == f"{said}Remedy: pip install 'psutil>=5.9'"


@pytest.mark.parametrize("python", LOCKS["PYTHONS"])
def test_the_locks_fit_together(python):
    users, developers = (
        LOCKS["lock_file"](python, dev).read_text(encoding="utf-8") for dev in (False, True)
    )
    pins = LOCKS["pins"]
    assert pins(users).items() <= pins(developers).items()
    assert {"pytest", "ruff", "mkdocs"} <= pins(developers).keys()
    left_out = {"torch", "cuda-toolkit", "nvidia-cudnn-cu13", "transformer-engine"}
    assert not left_out & pins(developers).keys()
    for text in (users, developers):
        entries = re.split(r"(?m)^(?=[a-z])", text)[1:]
        assert len(entries) == len(pins(text)) > 100
        assert all("--hash=sha256:" in entry for entry in entries)


@pytest.mark.parametrize("python", LOCKS["PYTHONS"])
def test_every_requirement_is_locked(python):
    setup = (ROOT / "setup.py").read_text()
    listed = re.search(r"INSTALL_REQUIRES = \[(.*?)\n\]", setup, re.DOTALL).group(1)
    requirements = [Requirement(text) for text in re.findall(r'(?m)^    "(.+?)",', listed)]
    assert len(requirements) > 15
    pins = LOCKS["pins"](LOCKS["lock_file"](python).read_text())
    for requirement in requirements:
        marker = requirement.marker
        name = requirement.name.replace("_", "-").lower()
        if name != "torch" and (not marker or marker.evaluate({"python_version": python})):
            assert requirement.specifier.contains(pins[name]), name
        elif name == "triton":
            assert name not in pins
