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
from nemo_aligner.servers.ports import find_free_port
from tests.patience import patience
from tests.tiny_models import tiny_config

ROOT = Path(__file__).resolve().parents[2]
LINES = ["the film", "a dull plot", "Review: the film was bad."]
CPU = ("trainer.accelerator=cpu", "length_params.max_length=7")


def command(
    name: str,
    *words: str,
    torchrun: int = 0,
    stdin: str = "",
    limit_s: float = 120,
    terminal=False,
):
    """`python -m nemo_aligner.<name> words`, or under torchrun with so many ranks; in a `terminal`
    in place of this process.
    """
    launcher = [sys.executable]
    if torchrun:
        launcher += ["-m", "torch.distributed.run", f"--nproc_per_node={torchrun}"]
        launcher += [f"--master_port={find_free_port()}"]
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    }
    environment |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    line = [*launcher, "-m", f"nemo_aligner.{name}", *words]
    if terminal:
        os.execve(line[0], line, environment)
    return subprocess.run(
        line,
        input=stdin,
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience(limit_s),
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
    ended = command(
        "generate",
        str(folder / "policy.nemo"),
        *CPU,
        "sampling_params.use_greedy=True",
        "trainer.devices=2",
        "model.tensor_model_parallel_size=2",
        stdin=f"the film\n{'x' * 60}\nthe film\n",
    )
    assert ended.returncode == 0, ended.stderr
    first, second = ended.stdout[: len(ended.stdout) // 2], ended.stdout[len(ended.stdout) // 2 :]
    assert first == second and first.endswith("\n") and len(first) > 3
    assert ended.stderr.count("has 60 tokens; the model has 48 positions") == 1
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
        command("generate", policy, *CPU, *two, *([] if chats else prompts), terminal=True)
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
    words = [str(folder / "policy.nemo"), "--prompts", str(folder / "prompts.jsonl"), *CPU]
    two = ["trainer.devices=2", "model.pipeline_model_parallel_size=2"]
    found = []
    for number, (extra, torchrun) in enumerate((([], 0), (two, 0), (two, 2))):
        out = tmp_path / f"{number}.jsonl"
        ended = command("generate", *words, "--out", str(out), *extra, torchrun=torchrun)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.count("3 responses") == 1
        records = [json.loads(line) for line in out.read_text().splitlines()]
        assert [record["prompt"] for record in records] == LINES
        for record in records:
            record["logprob_sum"] = round(record["logprob_sum"], 3)
        found.append(records)
    assert found[0] == found[1] == found[2]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_evaluation_on_two_ranks_is_that_of_one(folder, tmp_path):
    policy = str(folder / "policy.nemo")
    words = ["--prompts", str(folder / "prompts.jsonl"), "--reward", str(folder / "rm.nemo"), *CPU]
    words += ["bootstrap.resamples=100"]
    found = []
    for extra in ([], ["trainer.devices=2"]):
        out = tmp_path / str(len(extra))
        ended = command("evaluate", policy, *words, "--out", str(out), *extra)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.count("reward, mean") == 1
        assert (out / "evaluation.html").read_text().count("<h3>Samples") == 1
        found.append(json.loads((out / "metrics.json").read_text())["policies"][policy])
    assert found[0].keys() == found[1].keys()
    for key, number in found[0].items():
        assert found[1][key]["value"] == pytest.approx(number["value"], abs=1e-5)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_mistake_ends_all_ranks_with_one_message(folder, tmp_path):
    ended = command(
        "generate",
        str(folder / "policy.nemo"),
        "--prompts",
        str(folder / "prompts.jsonl"),
        "--out",
        str(tmp_path / "out.jsonl"),
        "sampling_params.add_BOS=True",
        "trainer.devices=2",
        *CPU,
    )
    assert ended.returncode == ExitCode.USER_ERROR
    assert ended.stderr.count("ERROR: ") == 1 and "has no bos token" in ended.stderr
    assert "Traceback" not in ended.stderr
