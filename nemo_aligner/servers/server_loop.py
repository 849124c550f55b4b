# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The life of a server job: its endpoints on rank 0, one loop on every rank, signals and failures.

* The threads of the host (rank 0) only check requests and put jobs on a queue
  (`ServerLoop.submit`); a large scoring request comes in slices, each a job of its own.
* The main thread of every rank runs `ServerLoop.run`: rank 0 takes a job, announces it, and all
  ranks compute it together. The main thread alone uses the process groups.
* Announcements go over a gloo group of their own (`ControlGroup`), once a second even when idle:
  so no idle rank waits in a collective of the model's groups, a lost rank is noticed, and a stop
  request on any rank reaches all.
* A watcher thread on every rank sees signals even while the main thread is in a collective, passes
  them on through the job's store, and ends the process when the main thread cannot.

An operation that raises the same type of error on every rank fails its request alone. If only some
ranks fail, the process groups cannot be trusted any more, and the job ends with an error. Either
way the client gets the cause in one line. What a stop request does: docs/jobs.md.
"""

import concurrent.futures
import contextlib
import gc
import os
import queue
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from nemo.utils import logging

from nemo_aligner.config.access import server_token
from nemo_aligner.config.server_rules import read_frontend
from nemo_aligner.core.endings import ExitCode, note_ending, progress
from nemo_aligner.core.errors import (
    LostPeerError,
    ServerEndingError,
    ServerJobError,
    ServerRequestError,
    cause_of,
)
from nemo_aligner.parallel import parallel_state
from nemo_aligner.servers.admission import Access
from nemo_aligner.servers.constants import ServerSignal
from nemo_aligner.servers.control_group import ControlGroup, JobStore, StoreLostError
from nemo_aligner.servers.front import Front
from nemo_aligner.servers.schema import MOST_ROWS, Arrays, Endpoint, Handler
from nemo_aligner.servers.threads import in_thread, settle
from nemo_aligner.training.stop_requests import REPEATED_S, caught

CHECK_INTERVAL_S = 5.0  # between two looks at the host
HEARTBEAT_S = 1.0  # between two announcements when idle
STOP_GRACE_S = 5.0  # how long an operation that is no save may run on after a stop request
FAILURE_GRACE_S = 30.0  # how long a failed rank waits for the others to fail too
SAVE_GRACE_S = 600.0  # how long a save may run on after a stop request
SAME_COMMAND = "The same command resumes from the last checkpoint."


def batcher_options(
    max_queue_delay_microseconds: float, inference_micro_batch_size: int | Sequence[int]
) -> dict[str, Any]:
    """The arguments of PyTriton's DynamicBatcher: how long Triton holds a request back for others
    to hand over with it, and at how many samples per data-parallel rank it waits no more.
    """
    sizes = inference_micro_batch_size
    sizes = [sizes] if isinstance(sizes, int) else sizes
    dp_size = parallel_state.get_data_parallel_world_size()
    return {
        "max_queue_delay_microseconds": int(max_queue_delay_microseconds),
        "preferred_batch_size": sorted({min(size * dp_size, MOST_ROWS) for size in sizes}),
    }


MakeFront = Callable[[Sequence[tuple[Endpoint, Handler]]], Front]


def read_front(options: Any, server: Any, section: str, lease_required: bool = True) -> MakeFront:
    """What makes the front of a server for its endpoints. `options`: has the keys of `section` as
    attributes; `server`: those of section `server`. `ConfigError`: a token that is needed is
    missing, or a file cannot be read.
    """
    token = server_token(options.host, options.token_file, section)
    access = Access(token, int(options.max_request_mb * 2**20), lease_required)
    tls = read_frontend(server.frontend, server.tls_certificate, server.tls_key)

    def make(endpoints: Sequence[tuple[Endpoint, Handler]]) -> Front:
        where = options.host, int(options.port), endpoints, access, tls
        if server.frontend == "asgi":
            return Front(*where)
        from nemo_aligner.servers.triton_host import TritonHost

        delay_us = options.max_queue_delay_microseconds
        return TritonHost(*where, batcher_options(delay_us, options.inference_micro_batch_size))

    return make


class OperationFailedError(ServerRequestError):
    """An operation raised; the message holds the cause, and the ranks if there are several."""


class ServerStoppingError(ServerEndingError):
    """The request came too late: the server job is ending."""


@dataclass
class _Job:
    signal: ServerSignal
    inputs: Arrays
    future: "concurrent.futures.Future[Arrays]" = field(default_factory=concurrent.futures.Future)


class ServerLoop:
    """Every rank constructs one and calls `run`.

    Args:
        endpoints: each with the function that handles its requests, on threads of rank 0.
        operations: by signal, function(**inputs) -> result, rank 0's; each rank calls it.
        after_failure: called on every rank with the signal when an operation failed on all alike.
        control: the group over which they get their inputs.
        is_saving: whether a save goes on beside the operations; any thread calls it.
        end_save: completes it if it has come to its end, or waits (True); all ranks call it.
    """

    def __init__(
        self,
        name: str,
        endpoints: Sequence[tuple[Endpoint, Handler]],
        operations: Mapping[ServerSignal, Handler],
        after_failure: Callable[[ServerSignal], None],
        control: ControlGroup,
        make_front: MakeFront,
        is_saving: Callable[[], bool] = lambda: False,
        end_save: Callable[[bool], None] = lambda wait: None,
    ):
        self.name, self.endpoints = name, endpoints
        self.operations, self.after_failure = operations, after_failure
        self.control, self.is_saving, self.end_save = control, is_saving, end_save
        self.rank = control.rank
        self._front = make_front(endpoints)
        self._store = JobStore(control.size, f"nemo_aligner/{name}/{self._front.port}")
        self._queue: queue.Queue[_Job] = queue.Queue()
        self._admission = threading.Lock()
        self.is_closed = False  # no more jobs are taken
        self._current: _Job | None = None  # the job that the main thread works on
        self._operating: ServerSignal | None = None  # what this rank works on
        self._stop_reason: str | None = None
        self._stopped_at: float | None = None
        self._failure_deadline: float | None = None
        self._watching = threading.Event()

    # ---- any thread ----

    def submit(self, signal_: ServerSignal, inputs: Arrays) -> Arrays:
        """Have all ranks run an operation and return rank 0's result; a host's thread calls it.
        `OperationFailedError`: it raised. `ServerStoppingError`: the job is ending.
        """
        job = _Job(signal_, inputs)
        with self._admission:
            if self.is_closed:
                raise ServerStoppingError(f"{self.name} is shutting down")
            self._queue.put(job)
        return job.future.result()

    @property
    def _is_saving(self) -> bool:
        return self._operating == ServerSignal.SAVE or self.is_saving()

    def stop(self, reason: str = "stop() was called") -> None:
        if self._stop_reason is None:
            self._stopped_at = time.monotonic()
            self._stop_reason = reason
            save = f" after the running save, which has {SAVE_GRACE_S:.0f} s"
            when = save if self._is_saving else ""
            logging.info(f"{self.name}, rank {self.rank}: {reason}; ending the job{when}")
            with contextlib.suppress(Exception):
                self._store.put("stop", reason)

    # ---- main thread ----

    def run(self) -> None:
        """Serve until a stop request (SIGTERM or SIGINT to any rank, `stop()`), on every rank.
        `ServerJobError`: the job could not continue; the other ranks end as well. `LostPeerError`:
        the same, as a rank or Triton has ended.
        """
        try:
            with self._watcher():
                self._start()
                progress.before_exit = self._front.kill
                with progress.expected():
                    self._serve()
        except BaseException as error:
            with contextlib.suppress(Exception):  # the store may be gone, too
                self._read_stop_request()  # the watcher thread may not have read it yet
            if self._stop_reason is None or self._is_saving:
                self._fail_all(ServerJobError(f"{self.name} failed: {error}"))
                failure = self._failure(error)
                is_lost = isinstance(failure, LostPeerError)
                self._close(ExitCode.LOST_PEER if is_lost else ExitCode.FAILED, cause_of(failure))
                if failure is error:
                    raise
                raise failure from error
            # Ranks leave one by one after a stop request: what breaks then is not a failure.
            rank = f"{self.name}, rank {self.rank}"
            logging.info(f"{rank}: interrupted by the stop request ({error})")
        ending = ExitCode.FINISHED, self._stop_reason or "stopped"
        self._close(*ending)
        note_ending(*ending)

    def _failure(self, error: BaseException) -> BaseException:
        if isinstance(error, dist.DistBackendError) or "closed by peer" in str(error):
            lost = f"{self.name}, rank {self.rank}: another rank of this job has ended"
            return LostPeerError(f"{lost} (killed for memory?); look into its log. {SAME_COMMAND}")
        return error

    def _start(self) -> None:
        """Start the host on rank 0. If it fails, the other ranks end with `SystemExit`."""
        error: BaseException | None = None
        if self.rank == 0:
            where = f"{self._front.host}:{self._front.port}"
            logging.info(f"{self.name}: starting {self._front.name} on {where}")
            try:
                self._front.start(lambda: self._stop_reason is not None)
            except BaseException as failure:
                error = failure
        failed = self.control.gather_objects(error is not None)
        if error is not None:
            raise error
        if failed[0]:
            self._log_error("rank 0 could not start the server")
            raise SystemExit(1)
        if self.rank == 0 and self._stop_reason is None:
            names = ", ".join(endpoint.name for endpoint, _ in self.endpoints)
            logging.info(f"{self.name}: serving {names} at {where}")

    def _serve(self) -> None:
        next_check = time.monotonic() + CHECK_INTERVAL_S
        while True:
            progress.made()
            job = None
            if self.rank == 0:
                with contextlib.suppress(queue.Empty):
                    job = self._current = self._queue.get(timeout=HEARTBEAT_S)
                if time.monotonic() >= next_check:
                    next_check = time.monotonic() + CHECK_INTERVAL_S
                    failure = self._front.failure()
                    if failure is not None and self._stop_reason is None:
                        short = "its host may be short of memory, shared memory or processors"
                        raise LostPeerError(f"{failure}; {short}. {SAME_COMMAND}")
            announced = (job.signal if job else ServerSignal.HEARTBEAT) if self.rank == 0 else None
            signal_ = self.control.exchange(announced, stop=self._stop_reason is not None)
            if signal_ == ServerSignal.STOP:
                if self._stop_reason is None:
                    self.stop("another rank ends the job")
                self.end_save(True)
                return
            if self.is_saving():
                self.end_save(False)
            if signal_ != ServerSignal.HEARTBEAT:
                self._operate(signal_, job)
                self._current = None

    def _operate(self, signal_: ServerSignal, job: _Job | None) -> None:
        result: Arrays = {}
        kind = cause = None
        self._operating = signal_
        try:
            with progress.in_phase(signal_.name.lower()):
                inputs = self.control.from_rank_zero(lambda: job.inputs if job else {})
                result = self.operations[signal_](**inputs)
        except Exception as error:
            kind, cause = type(error).__name__, cause_of(error)
            self._log_error(f"{signal_.name} failed:\n{traceback.format_exc()}")
            with contextlib.suppress(Exception):  # for a rank that never reaches the next line
                self._store.put("failure", f"on rank {self.rank}: {cause}")
        outcomes = self.control.gather_objects((kind, cause))
        if self._stopped_at is not None:
            self._stopped_at = time.monotonic()  # now for the reply and the other ranks
        self._failure_deadline = self._operating = None
        if {kind for kind, _cause in outcomes} == {None}:
            if job:
                settle(job.future, result)
            return
        self._handle_failure(signal_, job, outcomes)

    def _handle_failure(
        self, signal_: ServerSignal, job: _Job | None, outcomes: list[tuple[str, str]]
    ) -> None:
        ranks: dict[str, list[str]] = {}  # by their cause
        for rank, (_kind, cause) in enumerate(outcomes):
            if cause:
                ranks.setdefault(cause, []).append(str(rank))
        causes = "; ".join(f"on rank {', '.join(at)}: {cause}" for cause, at in ranks.items())
        error = OperationFailedError(causes if len(outcomes) > 1 else outcomes[0][1])
        if len({kind for kind, _cause in outcomes}) > 1:
            if job:
                settle(job.future, error)
            some = f"{signal_.name} failed on some ranks only"
            raise ServerJobError(
                f"{some}; the process groups cannot be trusted any more: {causes}"
            )
        if self.rank == 0:
            with contextlib.suppress(Exception):  # the store may be gone
                self._store.withdraw("failure")
        # No rank starts the next operation while the note is still there.
        self.control.gather_objects(None)
        self._failure_deadline = None
        if job:
            settle(job.future, error)
        self.after_failure(signal_)

    def _log_error(self, text: str) -> None:
        text = f"{self.name}, rank {self.rank}: {text}"
        if self.rank == 0:
            logging.error(text)
        else:  # where NeMo's logger is silent
            print(text, file=sys.stderr, flush=True)

    def _fail_all(self, error: Exception) -> None:
        with self._admission:
            self.is_closed = True
        if self._current is not None:
            settle(self._current.future, error)
        with contextlib.suppress(queue.Empty):
            while True:
                settle(self._queue.get_nowait().future, error)

    def _close(self, code: ExitCode, why: str) -> None:
        """Remove what this rank holds outside the process; rank 0 first when the job failed."""
        failed, ending = bool(code), threading.Lock()  # who has it ends the process

        def give_up() -> None:
            if not ending.acquire(blocking=False):
                return
            if failed:
                print(f"\nERROR: {why}", file=sys.stderr, flush=True)
            note_ending(code, why)
            self._front.kill()
            os._exit(code)

        guard = threading.Timer(12.0 if failed else 8.0, give_up)  # Triton itself may hang
        guard.daemon = True
        guard.start()
        if self.rank == 0:
            self._fail_all(ServerStoppingError(f"{self.name} is shutting down"))
            self._front.close()
            with contextlib.suppress(Exception):
                self._store.put("closed", "1")
            logging.info(f"{self.name}: closed port {self._front.port}")
        elif failed:
            # A launcher kills all processes when one fails: rank 0 needs time to stop the host.
            deadline = time.monotonic() + 10
            with contextlib.suppress(Exception):
                while time.monotonic() < deadline and self._store.get("closed") is None:
                    time.sleep(0.2)
        if not ending.acquire(blocking=False):
            guard.join()  # for ever: it says why, cleans up and ends the process
        guard.cancel()
        # The process ends next: its last garbage collections would take seconds with torch.
        gc.freeze()

    # ---- watcher thread ----

    @contextlib.contextmanager
    def _watcher(self) -> Iterator[None]:
        """After a stop request SIGTERM has no effect: launchers repeat it while the job ends by
        itself. A second Ctrl-C does not wait for that.
        """
        self._watching.set()
        # SIGUSR1 asks the actor.
        signals, ignored = (signal.SIGTERM, signal.SIGINT), [signal.SIGUSR1]
        with caught(signals, ignored, restore=lambda: self._stop_reason is None) as read_end:
            thread = in_thread(f"{self.name}-watcher", self._watch, read_end)
            try:
                yield
            finally:
                self._watching.clear()
                thread.join()

    def _watch(self, read_end: int) -> None:
        store_errors = 0
        while self._watching.is_set():
            if select.select([read_end], [], [], 0.3)[0]:
                for number in os.read(read_end, 64):
                    if number in (signal.SIGTERM, signal.SIGINT):
                        self._take(signal.Signals(number))
            failure = None
            try:
                self._read_stop_request()
                failure = self._store.get("failure")
                store_errors = 0
            except StoreLostError:
                failure = None  # the link may come back; else the watchdog ends the job
            except Exception:
                store_errors += 1  # the store lives in rank 0 or in the launcher
            now = time.monotonic()
            if failure and self._failure_deadline is None:
                self._failure_deadline = now + FAILURE_GRACE_S
            elif not failure and store_errors == 0:
                self._failure_deadline = None
            self._check_stop_deadline(now)
            if store_errors >= 10:
                is_safe = self._stop_reason and not self._is_saving
                code = ExitCode.FINISHED if is_safe else ExitCode.LOST_PEER
                self._abandon(code, "the job's store is gone: rank 0 or the launcher has ended")
            if self._failure_deadline is not None and now > self._failure_deadline:
                why = f"a rank failed and the others cannot continue without it: {failure}"
                self._abandon(ExitCode.FAILED, why)

    def _take(self, number: signal.Signals) -> None:
        at = self._stopped_at
        if number == signal.SIGINT and at and time.monotonic() > at + REPEATED_S:
            code = ExitCode.PRE_EMPTED if self._is_saving else ExitCode.FINISHED
            self._abandon(code, "a second Ctrl-C")
        self.stop(f"received {number.name}")

    def _check_stop_deadline(self, now: float) -> None:
        code, what, grace = ExitCode.FINISHED, "operation", STOP_GRACE_S
        if self._is_saving:
            code, what, grace = ExitCode.PRE_EMPTED, "save", SAVE_GRACE_S
        if self._stopped_at is not None and now > self._stopped_at + grace:
            why = f"the running {what} did not end in {grace:.0f} s"
            self._abandon(code, f"{self._stop_reason}; {why}")

    def _read_stop_request(self) -> None:
        if self._stop_reason is None and (reason := self._store.get("stop")):
            self.stop(f"another rank ends the job ({reason})")

    def _abandon(self, code: ExitCode, why: str) -> None:
        self._log_error(why)
        if self.rank == 0:
            error = (ServerStoppingError if self._stop_reason else OperationFailedError)(why)
            self._fail_all(error)
            time.sleep(0.5)  # for the host to deliver the replies
        self._close(code, why)
        note_ending(code, why)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
