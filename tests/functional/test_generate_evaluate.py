# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The commands generate and evaluate as users start them, in processes of their own."""

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from nemo_aligner.core.endings import ExitCode
from tests.functional.jobs import ScriptJob, must_succeed
from tests.patience import patience
from tests.tiny_models import tiny_config

ROOT = Path(__file__).resolve().parents[2]
LINES = ["the film", "a dull plot", "Review: the film was bad."]
CPU = ("trainer.accelerator=cpu", "length_params.max_length=7")


def command(*words: str, stdin: str = "", terminal=False):
    """`python -m nemo_aligner.generate words`; in a `terminal` in place of this process."""
    launched = "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"
    environment = {key: value for key, value in os.environ.items() if key not in launched}
    environment |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    line = [sys.executable, "-m", "nemo_aligner.generate", *words]
    if terminal:
        os.execve(line[0], line, environment)
    return subprocess.run(
        line, input=stdin, env=environment, capture_output=True, text=True, timeout=patience(120)
    )


@pytest.fixture(scope="module")
def folder(tiny_tokenizer_dir, tmp_path_factory) -> Path:
    from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
    from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel

    folder = tmp_path_factory.mktemp("commands")
    MegatronGPTModel(tiny_config(tiny_tokenizer_dir)).save_to(str(folder / "policy.nemo"))
    cfg = tiny_config(tiny_tokenizer_dir, seed=3)
    MegatronGPTRewardModel(cfg).save_to(str(folder / "rm.nemo"))
    records = [json.dumps({"text": text}) + "\n" for text in LINES]
    (folder / "prompts.jsonl").write_text("".join(records))
    return folder


@pytest.mark.full  # tests/unit/test_generate.py has conversations on one rank
@pytest.mark.timeout(300)
def test_a_conversation_with_two_ranks(folder):
    """Rank 0 alone reads and prints; a prompt that is too long is refused by both."""
    split = ["trainer.devices=2", "model.tensor_model_parallel_size=2"]
    policy, said = str(folder / "policy.nemo"), f"the film\n{'x' * 60}\nthe film\n"
    ended = command(policy, *CPU, "sampling_params.use_greedy=True", *split, stdin=said)
    assert ended.returncode == 0, ended.stderr
    first, second = ended.stdout[: len(ended.stdout) // 2], ended.stdout[len(ended.stdout) // 2 :]
    assert first == second and first.endswith("\n") and len(first) > 3
    assert ended.stderr.count("has 60 tokens: no room for a response within 48") == 1
    assert ended.stderr.count("each line is a prompt of its own") == 1


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("chats", [True, False])
def test_ctrl_c_in_a_terminal_ends_two_ranks_in_one_line(folder, tmp_path, chats):
    """At the prompt, where readline has changed the terminal, and while responses are written."""
    many = tmp_path / "many.jsonl"  # their responses take seconds
    many.write_text(300 * (folder / "prompts.jsonl").read_text())
    prompts = ["--prompts", str(many), "--out", str(tmp_path / "out.jsonl")]
    process, terminal = pty.fork()
    if not process:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        two = ["trainer.devices=2", "model.tensor_model_parallel_size=2"]
        policy = str(folder / "policy.nemo")
        command(policy, *CPU, *two, *([] if chats else prompts), terminal=True)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))  # for the bar
    shown = b""
    wait_until_s = time.monotonic() + patience(120)
    with contextlib.suppress(OSError):  # nobody has the terminal open any more
        while time.monotonic() < wait_until_s:
            shown += os.read(terminal, 4096)
            is_ready = shown.endswith(b"> ") if chats else b"responses:   0%" in shown
            if is_ready and b"\x03" not in shown:
                os.write(terminal, b"\x03")
                shown += b"\x03"
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == ExitCode.INTERRUPTED, shown
    os.close(terminal)
    lines = re.split("[\r\n]+", shown.partition(b"\x03")[2].decode().replace("^C", ""))
    said = [line for line in lines if line and "responses: " not in line]
    assert said == ["Ctrl-C: the command has ended."], shown


@pytest.mark.full
@pytest.mark.timeout(600)
def test_every_way_to_start_two_ranks_writes_the_same_file(folder, tmp_path):
    words = f"generate {folder / 'policy.nemo'} --prompts {folder / 'prompts.jsonl'}"
    two, found = "model.pipeline_model_parallel_size=2", []
    for ranks, launcher in ((1, "python"), (2, "python"), (2, "torchrun")):
        out = tmp_path / f"{ranks}-{launcher}.jsonl"
        more = [two] * (ranks == 2)
        own = [*more, *CPU], ranks, launcher
        job = ScriptJob(f"{words} --out {out}", tmp_path / "log", *own)
        must_succeed(job)
        assert job.log.count("3 responses") == 1
        records = [json.loads(line) for line in out.read_text().splitlines()]
        assert [record["prompt"] for record in records] == LINES
        for record in records:
            record["logprob_sum"] = round(record["logprob_sum"], 3)
        found.append(records)
    assert found[0] == found[1] == found[2]
