# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Both jobs of a pair under scripts/launch_local.sh, and each of them killed once."""

import os
import subprocess
import sys

import psutil
import pytest

from tests.chaos.pair import END_S, Pair
from tests.chaos.phases import ROOT
from tests.functional import jobs
from tests.patience import patience, wait_until
from tests.processes import family


def commands(pair: Pair, monkeypatch) -> list[str]:
    """The arguments of launch_local.sh for this pair."""
    found: list[list[str]] = []
    with monkeypatch.context() as patched:
        patched.setattr(jobs, "start_python", lambda command, *_: found.append(command))
        pair.start_server()
        pair.start_actor()
    server, actor = found
    return [*server, "--", *actor]


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_launcher_ends_a_killed_pair(inputs, tiny_tokenizer_dir, tmp_path, monkeypatch):
    undisturbed = Pair("ppo", inputs, tmp_path / "undisturbed", tiny_tokenizer_dir)
    undisturbed.run()
    pair = Pair("ppo", inputs, tmp_path / "pair", tiny_tokenizer_dir)
    words = commands(pair, monkeypatch)
    with (tmp_path / "log").open("w") as log:
        words = ["bash", str(ROOT / "scripts/launch_local.sh"), *words]
        environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
        streams = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
        process = subprocess.Popen(words, env=environment, **streams)
    try:
        for script, step in (("train_gpt_ppo_actor", 1), ("serve_ppo_critic", 2)):
            saved = f"actor/checkpoints/megatron_gpt-step={step}-*/COMPLETE"
            wait_until(
                lambda saved=saved: list(pair.folder.glob(saved)),
                2 * END_S,
                lambda: (tmp_path / "log").read_text()[-3000:],
            )
            for child in family(process.pid)[1:]:
                if script in " ".join(child.cmdline()[:2]):
                    child.kill()
        assert process.wait(patience(2 * END_S)) == 0, (tmp_path / "log").read_text()[-3000:]
    finally:
        for child in psutil.Process().children(recursive=True):
            if str(pair.folder) in " ".join(child.cmdline()):
                child.kill()
    text = (tmp_path / "log").read_text()
    assert "the actor ended with exit code 137; restart 1" in text
    assert "the server ended with exit code 137; restart 1" in text
    assert pair.outcome() == undisturbed.outcome()
