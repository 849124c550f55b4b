# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What libraries say goes to a file of the run; what this project and users say stays visible."""

import os
import subprocess
import sys

import pytest

from nemo_aligner.launch.start_up import FILE, VERBOSE

pytestmark = pytest.mark.slow

# Says something in every way, as a library does and as a user's script.
SAYS = """
import logging, warnings
from nemo.utils import logging as nemo_logging

def say(who):
    warnings.warn(f"warning of {who}")
    logging.getLogger(who).warning(f"logged by {who}")
    nemo_logging.warning(f"nemo-logged by {who}")
    logging.getLogger(who).error(f"error of {who}")
"""
JOB = """
import logging, sys
sys.path.append("lib/python3/site-packages")
from nemo_aligner.launch.endings import user_errors_end_the_job
from nemo_aligner.launch.start_up import remarks
from pathlib import Path

@user_errors_end_the_job
def main():
    logging.basicConfig(level=logging.INFO)
    import library, mine
    library.say("a library")
    mine.say("the user")
    if "folder" in sys.argv:
        remarks.write_to(Path("."))
        library.say("a library, later")
    if "crash" in sys.argv:
        raise RuntimeError("it broke")

main()
"""
QUIET = ["warning of {}", "WARNING:{0}:logged by {0}", "nemo-logged by {}"]


@pytest.fixture
def job(tmp_path):
    """Runs the job in `tmp_path` with words and variables; returns all that it printed."""
    library = tmp_path / "lib/python3/site-packages/library.py"
    library.parent.mkdir(parents=True)
    for file, text in ((library, SAYS), (tmp_path / "mine.py", SAYS), (tmp_path / "job.py", JOB)):
        file.write_text(text)

    def run(*words, **environment):
        where = {"cwd": tmp_path, "env": os.environ | environment}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.run([sys.executable, "job.py", *words], **where, **pipes).stdout

    return run


def said_by(who, printed):
    return [text.partition(" ")[0] for text in QUIET if text.format(who) in printed]


@pytest.mark.full
def test_remarks_of_libraries_are_kept_for_a_crash_or_shown_on_demand(job):
    printed = job()
    assert len(said_by("the user", printed)) == 3, printed
    assert said_by("a library", printed) == []
    assert "error of a library" in printed and "error of the user" in printed
    said, _, before = job("crash").partition("What libraries said before:")
    assert len(said_by("the user", said)) == 3
    assert "warning of a library" in before and "logged by a library" in before
    assert "RuntimeError: it broke" in before
    assert len(said_by("a library", job("folder", **{VERBOSE: "1"}))) == 3


@pytest.mark.full
def test_they_go_to_a_file_of_the_run(job, tmp_path):
    printed = job("folder", "crash")
    assert said_by("a library", printed) == [] and f"said before: {FILE}" in printed
    lines = (tmp_path / FILE).read_text()
    for who in ("a library", "a library, later"):
        for text in ("UserWarning: warning of", "WARNING nemo_logger: nemo-logged by"):
            assert f"{text} {who}\n" in lines
        assert f"WARNING {who}: logged by {who}\n" in lines
    assert "the user" not in lines and "error of" not in lines
