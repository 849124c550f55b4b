# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Every fault, to every process of a pair, in every phase of a step: both jobs end or go on within
a bounded time, the logs name the culprit, and with the same commands the run finishes with the
numbers of an undisturbed one, to the bit.

`make chaos` runs each fault of each process once and SIGKILL in each phase, `CHAOS=all make chaos`
all cells, `make test` those of `SELECTED`. With CHAOS_REPORT=FILE each cell adds
a line to FILE, from which scripts/fault_table.py makes a table.
"""

import json
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.chaos.pair import STEPS, Pair, chaos
from tests.chaos.phases import PLACES, owner_of
from tests.faulty_network import FAULTS, FaultyNetwork
from tests.processes import family

SIGNALS = ("SIGKILL", "SIGTERM", "SIGSTOP")
CLOCK_JUMPS = ("clock jump forward", "clock jump back")
DAMAGES = ("flipped bit", "torn file", "empty state")
INSTANTS = int(os.environ.get("CHAOS_INSTANTS", 10))  # 200 in a long run
CLOCK_JUMP_S = 86400.0
HUNG = ("hung", "stopped for good")  # a loop that never ends, SIGSTOP without SIGCONT
HANG_TIMEOUT_S = 20.0  # `trainer.hang_timeout_s` of the jobs that meet one of these


class Cell(NamedTuple):
    """A fault of the matrix."""

    kind: str  # "ppo", "rs"
    role: str  # "actor 0", "critic 1", "triton", "stub", "reward server", "reward worker"
    phase: str
    fault: str

    @property
    def name(self) -> str:
        return "-".join(self).replace(" ", "_")

    @property
    def ranks(self) -> int:
        """Of each job; two where one of them must notice the end of the other."""
        ends = self.fault in ("SIGKILL", "SIGTERM", "exception", "full disk", *HUNG)
        return 2 if self.role[-1] == "1" or (self.role[-1] == "0" and ends) else 1


ACTORS, CRITICS = ("actor 0", "actor 1"), ("critic 0", "critic 1")
ACTOR = ("start", "generate", "score", "log-probs", "train", "critic train", "save", "resume")
CRITIC = ("start", "score", "train", "save", "resume")
SEEDS = [f"seed {number}" for number in range(INSTANTS)]
TABLE = [  # kind, roles, phases, faults
    ("ppo", ACTORS, ACTOR, SIGNALS),
    ("ppo", CRITICS, CRITIC, SIGNALS),
    ("ppo", ACTORS, ACTOR, ["exception"]),
    ("ppo", CRITICS, CRITIC, ["exception"]),
    ("ppo", ACTORS, ["generate", "train", "save"], HUNG),
    ("ppo", CRITICS, ["score", "train", "save"], HUNG),
    ("ppo", ACTORS + CRITICS, ["save"], ["full disk"]),
    ("ppo", ["actor 0", "critic 0"], ["score", "train"], CLOCK_JUMPS),
    ("ppo", ["triton", "stub"], ["score", "train", "save"], SIGNALS),
    ("rs", ["actor 0"], ["generate", "score", "train", "save", "resume"], SIGNALS),
    ("rs", ["reward server"], ["start", "score"], SIGNALS),
    ("rs", ["triton", "stub", "reward worker"], ["score"], SIGNALS),
    ("ppo", ["network"], ["score", "train", "save"], FAULTS),
    ("rs", ["network"], ["score"], FAULTS),
    ("ppo", ["actor files", "critic files"], ["resume"], DAMAGES),
    ("ppo", ["drawn"], ["any"], SEEDS),
]
ALL_CELLS = [
    Cell(kind, role, phase, fault)
    for kind, roles, phases, faults in TABLE
    for phase in phases
    for role in roles
    for fault in faults
]


def once(cells: list[Cell]) -> list[Cell]:
    """Each fault of each process in one phase, another one from fault to fault; SIGKILL in all."""
    phases: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        phases.setdefault((cell.kind, cell.role, cell.fault), []).append(cell)
    chosen = []
    for number, (key, same) in enumerate(phases.items()):
        chosen += same if key[-1] == "SIGKILL" else [same[number % len(same)]]
    return chosen


CELLS = ALL_CELLS if os.environ.get("CHAOS") == "all" else once(ALL_CELLS)
# For `make test`, of two ranks. Other faults are in tests/functional: test_ppo_job.py (pairs that
# are killed in their saves in the background), test_critic_server.py (processes of Triton, a disk
# without space), test_code_reward.py (reward workers), and in tests/unit/test_pair.py (damaged
# files).
SELECTED = {Cell("ppo", "actor 1", "train", "SIGKILL")}
# Endpoints of the phases in which the network loses things.
ENDPOINTS = {"score": ("critic_infer", "reward_model"), "train": ("critic_train",)}
ENDPOINTS |= {"save": ("critic_save",)}


def marks(cell: Cell) -> list:
    return [] if cell in SELECTED else [pytest.mark.chaos]


@pytest.fixture(scope="module")
def new_pair(inputs, tiny_tokenizer_dir, tmp_path_factory):
    def make(kind: str, folder: Path, **settings) -> Pair:
        return Pair(kind, inputs, folder, tiny_tokenizer_dir, **settings)

    return make


@pytest.fixture(scope="module")
def undisturbed(new_pair, tmp_path_factory):
    """`undisturbed(kind, ranks) -> outcome` of a run without any fault; made once."""
    found: dict[tuple[str, int], dict] = {}

    def outcome(kind: str, ranks: int) -> dict:
        case = kind, ranks
        if case not in found:
            pair = new_pair(kind, tmp_path_factory.mktemp("undisturbed"), ranks=ranks)
            pair.run()
            assert not pair.endings, pair.story("a run without a fault did not end at once")
            found[case] = pair.outcome()
            assert len(found[case]["actor train_optim/loss"]) == 2 * STEPS
        return found[case]

    return outcome


def test_the_places_of_faults_are_there():
    absent = [place for place in PLACES.values() if not hasattr(owner_of(place), place.function)]
    assert not absent


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cell", [pytest.param(c, id=c.name, marks=marks(c)) for c in CELLS])
def test_a_fault_changes_no_number(cell, new_pair, undisturbed, tmp_path):
    expected, began = undisturbed(cell.kind, cell.ranks), time.monotonic()
    pair = happens(cell, new_pair, tmp_path)
    found = pair.outcome()
    assert found.keys() == expected.keys()
    differing = [name for name in expected if found[name] != expected[name]]
    assert not differing, pair.story(f"other numbers than without the fault: {differing}")
    check_endings(cell, pair)
    report(cell, pair, time.monotonic() - began)


def happens(cell: Cell, new_pair, folder: Path) -> Pair:
    """Run a pair to the end with the fault in it."""
    if cell.role == "network":
        return network_fault(cell, new_pair, folder)
    more = {"hang_timeout_s": HANG_TIMEOUT_S} if cell.fault in HUNG else {}
    pair = new_pair(cell.kind, folder, ranks=cell.ranks, **more)
    if cell.role.endswith("files"):
        damage(cell, pair)
    elif cell.role == "drawn":
        drawn(cell, pair)
    elif cell.fault in (*SIGNALS, "stopped for good"):
        signal_in_phase(cell, pair)
    else:
        from_within(cell, pair)
    return pair


# ---- what happens ----


def signal_in_phase(cell: Cell, pair: Pair) -> None:
    number = getattr(signal, cell.fault, signal.SIGSTOP)
    stopped_s = None if cell.fault in HUNG else 3.0
    if cell.phase == "resume":
        stop_early(pair)
    if cell.role == "reward worker":
        (pair.folder / "worker").touch()
        pair.run(lambda pair: pair.send(psutil.Process(pair.wait_until_reached()), number))
        return

    def happen(pair: Pair) -> None:
        pid = pair.wait_until_reached()
        endpoint = ENDPOINTS[cell.phase][cell.kind == "rs"] if cell.role == "stub" else ""
        within = {"triton": "tritonserver", "stub": f"/{endpoint}/"}.get(cell.role)
        process = pair.of_triton(within) if within else psutil.Process(pid)
        pair.send(process, number, stopped_s)

    side, rank = place(cell, pair)
    with chaos(pair, side, rank, cell.phase, cell.fault):
        pair.run(happen)


def from_within(cell: Cell, pair: Pair) -> None:
    if cell.phase == "resume":
        stop_early(pair)
    side, rank = place(cell, pair)
    fault, seconds = cell.fault, CLOCK_JUMP_S
    if fault.startswith("clock jump"):
        seconds *= 1 if fault.endswith("forward") else -1
        fault = "clock jump"
    with chaos(pair, side, rank, cell.phase, fault, seconds=seconds):
        pair.run(lambda pair: pair.wait_until_reached())


def place(cell: Cell, pair: Pair) -> tuple[str, int]:
    """The side and rank whose phase the fault meets; that of a child of the server is its."""
    if cell.role in ("triton", "stub", "reward server"):
        return pair.server_side, 0
    side, rank = cell.role.rsplit(" ", 1)
    return side, int(rank)


def stop_early(pair: Pair) -> None:
    """Kill both jobs in the second step, so that the next start of both resumes."""
    with chaos(pair, "actor", 0, "train", "SIGKILL"), pair.start_server() as server:
        with pair.start_actor() as actor:
            pair.server, pair.actor = server, actor
            pair.wait_until_reached()
    (pair.folder / "reached").unlink()


def damage(cell: Cell, pair: Pair) -> None:
    """Damage the newest checkpoint of one job while both are down."""
    stop_early(pair)
    folders = (pair.folder / cell.role.split()[0] / "checkpoints").glob("*/COMPLETE")
    newest = max((mark.parent for mark in folders), key=saved_at)
    if cell.fault == "empty state":
        (newest / "state.json").write_bytes(b"")
    else:
        weights = max((newest / "weights").rglob("*.distcp"), key=lambda file: file.stat().st_size)
        content = bytearray(weights.read_bytes())
        if cell.fault == "torn file":
            del content[len(content) // 2 :]
        else:
            content[len(content) // 2] ^= 4
        weights.write_bytes(content)
    pair.run()
    assert "damaged" in "".join(e.log for e in pair.endings) + pair.server.log + pair.actor.log


def saved_at(checkpoint: Path) -> int:
    return json.loads((checkpoint / "state.json").read_text())["save_number"]


def network_fault(cell: Cell, new_pair, folder: Path) -> Pair:
    """Each second sending of a request of this phase meets the fault; of those that take until
    the client notices a silence, only the first one.
    """
    asked = [0]
    silent = cell.fault.startswith("silent")

    def fault(_number: int, path: str) -> str | None:
        if path.split("/")[3] not in ENDPOINTS[cell.phase]:
            return None
        asked[0] += 1
        return cell.fault if asked[0] == 3 or (asked[0] % 2 and not silent) else None

    pair = new_pair(cell.kind, folder, ranks=cell.ranks)
    with FaultyNetwork(("127.0.0.1", pair.port), fault) as network:
        pair.network_port = network.port
        pair.run()
    # A critic's updates and saves go one after another: nothing can overtake them.
    assert network.overtaken or cell.fault != "reordered" or cell.phase != "score"
    assert network.happened and {what for _, what in network.happened} == {cell.fault}
    return pair


def drawn(cell: Cell, pair: Pair) -> None:
    """A signal to a drawn process of the pair at a drawn instant."""
    draw = random.Random(cell.fault)
    delay_s, stopped_s = draw.uniform(0.0, 20.0), draw.uniform(0.5, 5.0)
    number = getattr(signal, draw.choice(SIGNALS))
    place = draw.random()

    def happen(pair: Pair) -> None:
        end = time.monotonic() + delay_s
        while time.monotonic() < end and pair.actor.process.poll() is None:
            pair.actor.note_processes()
            pair.server.note_processes()
            time.sleep(0.1)
        jobs = [job for job in (pair.actor, pair.server) if job.process.poll() is None]
        processes = [each for job in jobs for each in family(job.process.pid)]
        try:
            pair.send(processes[int(place * len(processes))], number, stopped_s)
        except psutil.NoSuchProcess:  # it has just ended by itself
            pair.folder.joinpath("missed").touch()

    pair.run(happen)


# ---- how the jobs may end ----


def check_endings(cell: Cell, pair: Pair) -> None:
    """A stop that ends, and all that comes through the network, ends no job, but for that of a
    stub, which Triton gives up after a second. Of what a fault ends, the log or the exit code
    names the culprit.
    """
    logs = "".join(ending.log for ending in pair.endings)
    codes = [ending.code for ending in pair.endings]
    harmless = ("SIGSTOP", *CLOCK_JUMPS, *FAULTS)
    given_up = cell.role == "stub" and cell.fault == "SIGSTOP" and pair.endings
    if (cell.fault in harmless or cell.role.endswith("files")) and not given_up:
        assert not pair.endings, pair.story("a job ended")
    elif cell.fault == "exception":
        assert f"a fault of the test in {cell.phase}" in logs, pair.story("no culprit")
    elif cell.fault == "hung":
        assert re.search(f"rank {cell.role[-1]} stands in phase", logs), pair.story("no culprit")
    elif cell.fault == "stopped for good":
        assert f"HUNG: rank {cell.role[-1]} of 2 has not run" in logs, pair.story("no culprit")
    elif cell.fault == "full disk":
        assert "no space left" in logs.lower(), pair.story("no culprit")
    elif given_up or (cell.role in ("triton", "stub") and cell.fault == "SIGKILL"):
        assert re.search("Triton.* ended by itself", logs), pair.story("no culprit")
    elif cell.role != "drawn" and cell.fault == "SIGKILL":
        killed = re.search(r"code -9|signal 9|SIGKILL|killed", logs)
        assert -signal.SIGKILL in codes or killed, pair.story("no culprit")
    for ending in pair.endings:
        assert ending.log.count("ERROR: ") <= 1, pair.story("more than one message")


def report(cell: Cell, pair: Pair, seconds: float) -> None:
    if file := os.environ.get("CHAOS_REPORT"):
        ends = [(ending.side, ending.code) for ending in pair.endings]
        with open(file, "a") as out:
            record = {**cell._asdict(), "seconds": round(seconds, 1), "ends": ends}
            out.write(json.dumps(record) + "\n")
