# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The project's scripts as child processes of a test, with time limits and nothing left behind."""

import functools
import json
import os
import re
import signal
import string
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from omegaconf import DictConfig, OmegaConf

from nemo_aligner.core.endings import ExitCode
from nemo_aligner.servers.ports import find_free_port
from tests.patience import patience, wait_until
from tests.processes import family, kill_all, left_of
from tests.warm_start import start_python

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples" / "nlp" / "gpt"
CPU = ("trainer.accelerator=cpu", "trainer.precision=32")


class ScriptJob:
    """One script with Hydra overrides. Use it in a `with` block: leaving it kills whatever is
    left.

    Args:
        script: file name in examples/nlp/gpt, or an absolute path; or what stands behind
            `nemo-aligner`, such as "train sft", with its words up to the overrides.
        log: path of its output.
        overrides: `key=value` arguments.
        ranks: processes on this machine.
        launcher: "python" (the script starts its other processes itself) or "torchrun".
    """

    def __init__(
        self,
        script: str,
        log: Path,
        overrides: list[str],
        ranks: int = 1,
        launcher: str = "python",
    ):
        self.log_path, self.launcher, self.stopped = log, launcher, False
        self.overrides = overrides
        command = []
        if launcher == "torchrun":
            command += ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
            command.append(f"--master_port={find_free_port()}")
        is_command = str(script).startswith(("train ", "serve ", "generate ", "evaluate "))
        words = ["-m", "nemo_aligner", *script.split()] if is_command else [str(SCRIPTS / script)]
        command += [*words, f"trainer.devices={ranks}", *overrides]
        environment = {
            k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        }
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environment["TOKENIZERS_PARALLELISM"] = "false"
        environment |= {"PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
        log.write_bytes(b"")
        others = ranks - (launcher == "python")  # processes that the first one starts
        self.process = start_python(command, environment, log.parent, log, others)
        self._family: dict[int, psutil.Process] = {}
        self._noted = 0.0  # when, on the monotonic clock

    def __enter__(self) -> "ScriptJob":
        return self

    def __exit__(self, *_exc) -> None:
        self.note_processes(0.0)
        kill_all(self._family.values())
        self.process.wait(10)

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def note_processes(self, after_s: float = 0.5) -> None:
        """Remember the job's processes, to see what is left of them, if that is `after_s` ago:
        listing the processes of a machine costs some milliseconds.
        """
        if time.monotonic() - self._noted < after_s:
            return
        self._noted = time.monotonic()
        self._family |= {member.pid: member for member in family(self.process.pid)}

    def wait(self, timeout_s: float = 150.0) -> int:
        """Exit code of the job."""

        def has_ended() -> bool:
            self.note_processes()
            return self.process.poll() is not None

        wait_until(has_ended, timeout_s, lambda: f"the end of\n{self.log[-3000:]}", 0.1)
        return self.process.returncode

    def stop(self, timeout_s: float = 20.0) -> int:
        """SIGTERM, as a scheduler sends it; returns the exit code."""
        self.note_processes(0.0)
        self.stopped = True
        self.process.send_signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def leftovers(self, grace_s: float = 5.0) -> list[psutil.Process]:
        """Processes of the job that are still alive after `grace_s`."""
        return left_of(self._family.values(), grace_s)


def must_succeed(job: ScriptJob, timeout_s: float = 150.0) -> ScriptJob:
    """It ends well within the time limit, and no process is left."""
    with job:
        assert_ended_well(job, job.wait(timeout_s))
    return job


def must_end_well(job: ScriptJob) -> ScriptJob:
    """As `must_succeed`, for a job of minutes."""
    return must_succeed(job, 240)


def must_fail_with(job: ScriptJob, *words: str) -> None:
    """The exit code of a user's error, no traceback, and one message at the end of the log that
    holds `words`.
    """
    with job:
        assert job.wait(120) == ExitCode.USER_ERROR, job.log[-4000:]
        assert not job.leftovers()
        assert "Traceback" not in job.log, job.log[-4000:]
        assert job.log.count("ERROR: ") == 1, job.log[-4000:]
        message = job.log.split("ERROR: ")[1]
        for word in words:
            assert word in message, message


def read_metrics(folder: Path, key: str) -> list[float]:
    """Values of one metric by step; the later one if a step was logged twice. A line that the job
    is about to write does not count.
    """
    values = {}
    for line in (folder / "metrics.jsonl").read_text().split("\n")[:-1]:
        record = json.loads(line)
        if key in record:
            values[record["step"]] = record[key]
    return [values[step] for step in sorted(values)]


def count_of(folder: Path, key: str) -> int:
    """How many values of a metric a job has logged so far."""
    return len(read_metrics(folder, key)) if (folder / "metrics.jsonl").exists() else 0


def samples_of(folder: Path, part: str = "val") -> list[dict]:
    """The samples that a job has logged."""
    return [json.loads(line) for line in (folder / f"{part}_samples.jsonl").open()]


def texts_of(folder: Path) -> list[tuple]:
    """Those of the samples of an actor's validations."""
    return [(each["prompt"], each["response"], each["is_end"]) for each in samples_of(folder)]


def assert_same_metrics(folder: Path, expected: Path, names=None, last=False, **tolerance) -> None:
    """Two jobs have logged the same numbers.

    Args:
        names: of metrics; None: all but times.
        last: `folder` has those of the last steps only.
        tolerance: of `pytest.approx`; without it they agree to the bit.
    """
    assert last or names or {*metric_names(folder)} == {*metric_names(expected)}
    names = names or [n for n in metric_names(folder) if not n.endswith(("time", "/generate"))]
    assert names
    for name in names:
        found, wanted = read_metrics(folder, name), read_metrics(expected, name)
        wanted = wanted[-len(found) :] if last else wanted
        assert wanted, name
        assert found == (pytest.approx(wanted, **tolerance) if tolerance else wanted), name


def write_lines(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def metric_names(folder: Path) -> list[str]:
    """Names of all metrics that a job has logged, except its timers. Fails if there is one that
    docs/metrics.md does not explain.
    """
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = {name for record in records for name in record} - {"step", "time"}
    ends = {name: name.rpartition("/")[2] for name in names}
    unexplained = sorted(name for name in names if not _explained().fullmatch(ends[name]))
    assert not unexplained, f"docs/metrics.md does not explain {unexplained}"
    return sorted(name for name in names if not name.startswith(("timers/", "tokens/", "speed/")))


@functools.cache
def _explained() -> re.Pattern[str]:
    """Matches the names, without their family, that docs/metrics.md explains."""
    quoted = re.findall(r"`([^`]+)`", (ROOT / "docs/metrics.md").read_text(encoding="utf-8"))
    names = "|".join(map(re.escape, quoted)).replace("correlation_<i>", r"correlation_\d+")
    return re.compile(f"(validation_)?({names})")


def reward_server(
    rm_file,
    folder: Path,
    port: int,
    *extra: str,
    ranks=1,
    launcher="python",
    script: str = "serve_reward_model.py",
) -> ScriptJob:
    """serve_reward_model.py with the reward model of `rm_file`; it logs to `folder`/reward.log."""
    folder.mkdir(exist_ok=True)
    overrides = [*CPU, f"rm_model_file={rm_file}", "inference.host=127.0.0.1"]
    overrides += [f"inference.port={port}", "model.forward_micro_batch_size=2"]
    return ScriptJob(script, folder / "reward.log", [*overrides, *extra], ranks, launcher)


def remote_rm(port, **changes) -> DictConfig:
    """The section of a client of the reward servers at `port`, one or several."""
    limits = {"init_timeout_s": patience(100), "inference_timeout_s": patience(60)}
    server = {"reward_model": {"ip": "127.0.0.1", "port": port}}
    return OmegaConf.create({"pad_to_length": None, **limits, **server, **changes})


def rollout_options(inputs: Path, folder: Path, kind: str) -> list[str]:
    """Of an actor of `kind`: the policy and the prompts of `inputs`, 4 prompts to a rollout."""
    prompts = f"[{inputs}/prompts.jsonl]"
    return [
        *CPU,
        f"pretrained_checkpoint.restore_from_path={inputs}/policy.nemo",
        f"exp_manager.explicit_log_dir={folder}/actor",
        "model.encoder_seq_length=48",
        "model.micro_batch_size=2",
        "model.optim.lr=1e-3",
        f"model.{kind}.num_rollout_samples=4",
        f"model.{kind}.rollout_micro_batch_size=2",
        f"model.{kind}.num_val_samples=4",
        f"model.{kind}.length_params.max_length=12",
        # Random weights rarely end a response; letters end one often enough to have many lengths,
        # and both kinds of samples.
        f"model.{kind}.sampling_params.end_strings={list(string.ascii_lowercase)}",
        f"model.data.data_prefix={{train: {prompts}, validation: {prompts}, test: {prompts}}}",
    ]


def second_rank(job: ScriptJob) -> psutil.Process | None:
    """The process of rank 1 of a job that plain `python` started, once it is there."""
    started = psutil.Process(job.process.pid).children()
    return min(started, key=lambda child: (child.create_time(), child.pid), default=None)


def wait_until_serving(job: ScriptJob, timeout_s: float = 120.0) -> None:
    """Return once the job's endpoints reply."""
    wait_for_log(job, ": serving ", timeout_s)


def wait_for(
    job: ScriptJob, condition: Callable[[], object], what: str, timeout_s: float = 150.0
) -> None:
    """Return once `condition()` is true; fails if the job ends before."""

    def is_true() -> object:
        has_ended = job.process.poll() is not None
        found = condition()
        assert found or not has_ended, f"it ended before {what}:\n{job.log[-4000:]}"
        return found

    wait_until(is_true, timeout_s, lambda: f"{what} of\n{job.log[-4000:]}", 0.1)


def wait_for_log(job: ScriptJob, text: str, timeout_s: float = 150.0) -> None:
    """Return once the job has logged `text`; fails if it ends before."""
    wait_for(job, lambda: text in job.log, repr(text), timeout_s)


def kill_after_checkpoint(job: ScriptJob, folder: Path, step: int) -> None:
    """SIGKILL to the job once the actor's checkpoint of `step` in `folder` is complete: in the
    middle of a later step.
    """
    saved = lambda: [*(folder / "actor/checkpoints").glob(f"megatron_gpt-step={step}-*")]
    wait_for(job, saved, f"step {step}")
    job.process.send_signal(signal.SIGKILL)
    assert job.wait(10) == -signal.SIGKILL


def kill_and_resume(start: Callable[[], ScriptJob], folder: Path, step: int) -> None:
    """Run a job to its end in two starts; the first is killed as `kill_after_checkpoint` does."""
    with start() as job:
        kill_after_checkpoint(job, folder, step)
    with start() as job:
        assert_ended_well(job, job.wait(240))
        assert "resumed from" in job.log


def assert_ended_well(job: ScriptJob, code: int) -> None:
    # torchrun itself reports a SIGTERM with exit code 1, however well its workers ended.
    ended_well = code == 0 or (job.launcher == "torchrun" and job.stopped)
    assert ended_well, f"exit code {code} of\n{job.log[-4000:]}"
    left = job.leftovers()
    assert not left, f"{left} is left of\n{job.log[-4000:]}"
