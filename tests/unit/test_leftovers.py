# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What killed processes leave is removed by the next one, and nothing else is.

The processes are real. A server that is killed is in tests/functional/test_code_reward.py.
"""

import os
import secrets
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_aligner.core import leftovers

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, pathlib, sys
from nemo_aligner.core import leftovers
leftovers.RECORDS = pathlib.Path(sys.argv[1])
folder = leftovers.temporary_folder("nemo_", sys.argv[2])
(folder / "deep").mkdir()
(folder / "deep" / "file").write_text("text")
(folder / "link").symlink_to(sys.argv[3])
prefix = leftovers.shared_memory_prefix()
from multiprocessing import resource_tracker, shared_memory
memory = shared_memory.SharedMemory(prefix + "-x", create=True, size=100)
resource_tracker.unregister(memory._name, "shared_memory")  # it is to be killed too
print(folder, memory.name, flush=True)
"""
WAIT = "sys.stdin.read()\n"


@pytest.fixture
def places(tmp_path):
    """Folders of the records, of temporary things, and of somebody else's."""
    for name in ("temporary", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "other" / "kept").write_text("text")
    return [tmp_path / name for name in ("records", "temporary", "other")]


def start(places, program=PROGRAM + WAIT) -> tuple[subprocess.Popen, Path, Path]:
    """A process, its temporary folder and its shared memory."""
    command = [sys.executable, "-c", program, *map(str, places)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, **pipes)
    folder, memory = process.stdout.readline().split()
    return process, Path(folder), Path("/dev/shm") / memory


def end(process, number=None) -> int:
    if number is not None:
        process.send_signal(number)
    process.communicate(timeout=60)
    return process.returncode


def test_the_next_process_removes_what_a_killed_one_left_and_nothing_else(places):
    records, temporary, other = places
    living, *lives = start(places)
    killed, folder, memory = start(places)
    end(killed, signal.SIGKILL)
    left, words = (folder, memory), secrets.token_hex(8)
    strangers = [folder.with_name(f"nemo_{words}"), folder.with_name(folder.name + "x")]
    strangers.append(memory.with_name(f"nemo_aligner_{words}-x"))
    for path in strangers:
        path.write_text("text")
    try:
        assert all(path.exists() for path in (*left, *lives)) and len(os.listdir(records)) == 2
        third, *own = start(places)
        assert not any(path.exists() for path in left) and len(os.listdir(records)) == 2
        assert all(path.exists() for path in (*lives, *own, *strangers, other / "kept"))
        assert end(third) == 0 and end(living) == 0  # in order: each removes its own
        assert not any(path.exists() for path in (*lives, *own)) and not os.listdir(records)
        assert all(path.exists() for path in (*strangers, other / "kept"))
    finally:
        for path in strangers:
            path.unlink()


def test_a_forked_process_keeps_what_its_parent_has(places):
    """It ends in order while the parent lives, and lives on when the parent is killed."""
    fork = """
if os.fork() == 0:
    sys.exit()
os.wait()
assert folder.exists()
if os.fork():
    os.kill(os.getpid(), 9)
"""
    process, folder, memory = start(places, PROGRAM + fork + WAIT)
    assert process.wait(60) == -signal.SIGKILL
    assert end(start(places, PROGRAM)[0]) == 0
    assert folder.exists() and memory.exists()
    process.communicate(timeout=60)  # the forked one ends
    assert end(start(places, PROGRAM)[0]) == 0
    assert not folder.exists() and not memory.exists()


def swept(records: Path, monkeypatch) -> None:
    monkeypatch.setattr(leftovers, "RECORDS", records)
    monkeypatch.setattr(leftovers, "_swept", False)
    leftovers.sweep_once()


def test_records_that_were_tampered_with_remove_nothing_of_others(places, monkeypatch):
    records, temporary, other = places
    records.mkdir(mode=0o700)
    name = f"nemo_{secrets.token_hex(8)}"
    (temporary / name).symlink_to(other)
    (other / name).write_text("a file where a folder is named")
    words = [other, other / "kept", temporary / name, other / name, f"../{name}", "/dev/shm/x", ""]
    (records / "record").write_bytes(b"\0".join(os.fsencode(word) for word in words) + b"\0/cut")
    (records / "link").symlink_to(other / "kept")
    (records / "folder").mkdir()
    os.mkfifo(records / "pipe")
    swept(records, monkeypatch)
    assert other.is_dir()
    assert (temporary / name).is_symlink() and sorted(os.listdir(other)) == ["kept", name]
    assert not (records / "record").exists()


@pytest.mark.parametrize("how", ["open", "link", "another user's"])
def test_records_that_others_can_write_are_not_read(places, monkeypatch, how):
    records, temporary, _other = places
    victim = temporary / f"nemo_{secrets.token_hex(8)}"
    victim.mkdir()
    real = records.with_name("real") if how == "link" else records
    real.mkdir(mode=0o700)
    (real / "record").write_bytes(os.fsencode(victim) + b"\0")
    if how == "open":
        real.chmod(0o770)
    elif how == "link":
        records.symlink_to(real)
    elif os.geteuid() == 0:
        os.chown(real, 12345, 12345)
    else:
        pytest.skip("only root can give a folder away")
    swept(records, monkeypatch)
    assert victim.exists() and (real / "record").exists()
    process, folder, memory = start((records, temporary, temporary))  # works without a record
    assert end(process) == 0 and os.listdir(real) == ["record"]
    assert not folder.exists() and not memory.exists()


def test_machines_that_share_a_folder_have_names_of_their_own(monkeypatch):
    token = secrets.token_hex(8)
    here = leftovers.token_of_machine(token)
    assert leftovers.token_of_machine(token) == here != leftovers.token_of_machine(here)
    assert leftovers._OURS.fullmatch(f"nemo_weights_{here}")
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert leftovers.token_of_machine(token) != here
