# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Jobs that are asked to end: by signals to one of their processes or to all, and by their time
limit. (An actor with its critic: test_ppo_job.py; a critic in its save: test_critic_server.py.)
"""

import json
import os
import signal
from pathlib import Path

import pytest

from nemo_aligner.core.endings import ExitCode
from tests.functional.jobs import (
    assert_same_metrics,
    count_of,
    must_succeed,
    second_rank,
    wait_for,
    wait_for_log,
)
from tests.functional.test_sft_rm_scripts import data, sft  # noqa: F401  (a fixture)

pytestmark = pytest.mark.timeout(300)
STEPS = 60
LONG = [
    "trainer.sft.max_epochs=1000",
    "trainer.sft.val_check_interval=30",
    "trainer.sft.save_interval=30",
    "model.hidden_dropout=0.1",  # a resumed job must draw the same numbers
]


def ending(folder):
    return json.loads((folder / "ending.json").read_text())


def test_a_job_that_is_stopped_again_and_again_ends_with_the_same_bits(
    data,  # noqa: F811
    tiny_tokenizer_dir,
    tmp_path,
):
    limits = [*LONG, f"trainer.sft.max_steps={STEPS}"]
    must_succeed(sft(data, tiny_tokenizer_dir, tmp_path / "whole", *limits, ranks=2))
    # Those that are stopped save in the background, and wait for it.
    limits.append("exp_manager.checkpoint_callback_params.async_save=True")
    folder, done = tmp_path / "stopped", 0
    for launcher, number, name, rank in [
        ("python", signal.SIGINT, "Ctrl-C", "all"),  # the process group, as a terminal does
        ("python", signal.SIGUSR1, "SIGUSR1", 1),
        ("torchrun", signal.SIGTERM, "SIGTERM", None),  # torchrun hands it on
    ]:
        with sft(data, tiny_tokenizer_dir, folder, *limits, ranks=2, launcher=launcher) as job:
            more = lambda: count_of(folder, "train/loss") > done + 3  # noqa: B023
            wait_for(job, more, "three more steps")
            if rank == "all":
                os.killpg(job.process.pid, number)
            else:
                (second_rank(job) if rank == 1 else job.process).send_signal(number)
            code = job.wait(60)
            assert code == (1 if launcher == "torchrun" else ExitCode.PRE_EMPTED), job.log[-3000:]
            assert not job.leftovers()
        assert "Traceback" not in job.log or launcher == "torchrun", job.log[-3000:]
        assert f"{name}: the job ends after step" in job.log
        if rank != 1:
            assert f"{name}: the job saves and ends after the running step" in job.log
        found = ending(folder)
        assert (found["code"], found["reason"]) == (ExitCode.PRE_EMPTED, name)
        assert done < found["step"] < STEPS
        done = found["step"]
        assert (folder / f"checkpoints/step-step={done}/COMPLETE").exists()
    must_succeed(sft(data, tiny_tokenizer_dir, folder, *limits, ranks=2))
    assert ending(folder)["name"] == "FINISHED" and ending(folder)["step"] == STEPS
    assert_same_metrics(folder, tmp_path / "whole")


def takes_signals(process):
    """Whether it is there and ends in order when it is asked to."""
    if process is None:
        return False
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition("SigCgt:")[2].split()[0], 16) >> (signal.SIGTERM - 1) & 1


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_that_has_not_begun_ends_at_once(
    rank,
    data,  # noqa: F811
    tiny_tokenizer_dir,
    tmp_path,
):
    with sft(data, tiny_tokenizer_dir, tmp_path / "sft", *LONG, ranks=2) as job:
        wait_for_log(job, "CPU threads of each rank")
        if rank == 0:
            assert job.stop(10) == ExitCode.PRE_EMPTED, job.log[-3000:]
        else:  # started by rank 0, which ends by the same request
            wait_for(job, lambda: takes_signals(second_rank(job)), "a second rank", 60)
            second_rank(job).send_signal(signal.SIGTERM)
            assert job.wait(20) == ExitCode.PRE_EMPTED, job.log[-3000:]
            assert ending(tmp_path / "sft")["code"] == ExitCode.PRE_EMPTED
        assert not job.leftovers()
    assert "SIGTERM before the first step: the job ends at once" in job.log
