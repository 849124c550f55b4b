# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Three steps of every job, at several splits, give the numbers that are stored in `numbers/`:
losses, metrics, samples and weights. On the kind of CPU that they were made on to the bit, on
others to 1e-6. `make golden` makes them anew and shows what has changed.
"""

import contextlib
import math
import os
from pathlib import Path

import pytest

from nemo_aligner.servers.ports import find_free_port
from tests.functional.jobs import ScriptJob, assert_ended_well
from tests.golden import numbers
from tests.golden.jobs import CRITIC, JOBS, Job, write_inputs
from tests.golden.numbers import BETWEEN_SPLITS, ELSEWHERE, MACHINE, SAME_MACHINE, differences

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(90),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # by `read_weights`
]

REMAKE = os.environ.get("GOLDEN") == "remake"  # tests.golden.__main__ sets it


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_tokenizer_dir) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    write_inputs(folder, Path(tiny_tokenizer_dir))
    return folder


def start(job: Job, folder: Path, name: str, split: str, *overrides: str) -> ScriptJob:
    arguments = [*job.arguments(split, name), *overrides]
    return ScriptJob(job.command, folder / f"{name}.log", arguments, 1 if split == "one" else 2)


def run(name: str, split: str, folder: Path) -> dict:
    """What a job leaves, and its critic."""
    own, critics, port = f"{name}-{split}", f"{name}-{split}-critic", find_free_port()
    address = f"remote_critic_rm.critic.port={port}", "remote_critic_rm.critic.ip=127.0.0.1"
    with contextlib.ExitStack() as stack:
        if name == "ppo":
            server = start(CRITIC, folder, critics, "one", f"trainer.ppo.port={port}")
            stack.enter_context(server)
        more = address if name == "ppo" else ()
        job = stack.enter_context(start(JOBS[name], folder, own, split, *more))
        assert_ended_well(job, job.wait(60))
        if name == "ppo":
            assert_ended_well(server, server.stop())
    found = {MACHINE: numbers.machine(), **numbers.numbers_of(folder / own)}
    return found | (numbers.numbers_of(folder / critics, "critic: ") if name == "ppo" else {})


@pytest.mark.parametrize("name, split", [(n, split) for n in JOBS for split in JOBS[n].splits])
def test_a_job_gives_the_stored_numbers(name, split, folder):
    found, splits = run(name, split, folder), numbers.stored(name)
    expected = splits.get(split, {})
    if REMAKE:
        lines = differences(name, expected, found, SAME_MACHINE)
        print(f"\n{name}, {split}: {len(lines) or 'no'} differences", *lines, sep="\n    ")
        splits[split] = found
        numbers.store(name, {each: splits[each] for each in JOBS[name].splits if each in splits})
        return
    same = expected.get(MACHINE) == found[MACHINE]
    lines = differences(name, expected, found, SAME_MACHINE if same else ELSEWHERE)
    assert not lines, "\n".join([f"{name}, {split}: stored -> found (deviation)", *lines])


def test_what_differs_is_named():
    expected, found = {"a": [1.0, 2.0], "b": 1.0}, {"a": [math.nan, 2.5], "b": 1.0}
    assert differences("sft", expected, expected, SAME_MACHINE) == []
    assert differences("sft", found, found, SAME_MACHINE) == []
    for one, other, deviation in ((expected, found, "inf"), ({"b": 1.0}, {"b": 1.5}, "5.0e-01")):
        (line,) = differences("sft", one, other, ELSEWHERE)
        assert line.endswith(f"({deviation})")


def test_all_splits_give_the_numbers_of_one_rank():
    """Of what is stored, which is of all jobs and no others."""
    assert {file.stem for file in numbers.FOLDER.iterdir()} == {*JOBS}
    lines = []
    for name, job in JOBS.items():
        splits = numbers.stored(name)
        assert tuple(splits) == job.splits
        for split in job.splits[1:]:
            found = differences(name, splits["one"], splits[split], BETWEEN_SPLITS)
            lines += [f"{name}, one -> {split}: {line}" for line in found]
    assert not lines, "\n".join(lines)
