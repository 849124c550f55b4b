# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The life of a server job: Triton on rank 0, one loop on every rank, signals and failures that
end all of it.

Who does what:
* Triton's threads (rank 0) only check requests and put jobs on a queue (`ServerLoop.submit`).
* The main thread of every rank runs `ServerLoop.run`. Rank 0 takes a job, announces it, and all
  ranks compute it together. The main thread alone touches the process groups.
* Announcements go over a gloo group of their own (`ControlGroup`), once a second even when idle,
  so that an idle rank never sits in a collective of the model's groups, a lost rank is noticed,
  and a stop request on any rank reaches all.
* A watcher thread on every rank sees signals even while the main thread sits in a collective,
  passes them on through the job's store, and ends the process when the main thread cannot.

A request that fails in the same way on every rank is answered with the traceback and the server
goes on. If only some
ranks fail, the process groups cannot be trusted any more: the client gets the traceback, the job
ends with an error.
"""

import concurrent.futures
import contextlib
import datetime
import gc
import glob
import os
import queue
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass, field

import numpy as np
import psutil
import torch
import torch.distributed as dist
from nemo.utils import logging

from nemo_aligner.servers.constants import ServerSignal
from nemo_aligner.servers.ports import check_port_is_free
from nemo_aligner.servers.schema import triton_tensors
from nemo_aligner.servers.triton_environment import prepare_triton_environment


class OperationFailedError(RuntimeError):
    """An operation raised; the message holds the tracebacks of the ranks."""


class ServerStoppingError(RuntimeError):
    """The request came too late: the server job is ending."""


class ServerJobError(RuntimeError):
    """The job cannot go on: a rank failed alone or is lost."""


class ControlGroup:
    """All ranks of the job, joined by gloo for commands and request data (numpy arrays on the
    CPU).

    Every rank constructs it, and every rank calls each of its methods in the same order. Without a
    process group, or with one rank, it answers for that rank alone.
    """

    def __init__(self):
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        # An idle server may wait for days; a lost rank shows itself as a closed connection.
        self.group = (
            dist.new_group(backend="gloo", timeout=datetime.timedelta(days=30))
            if self.size > 1
            else None
        )

    def exchange(self, signal_: ServerSignal | None, stop: bool) -> ServerSignal:
        """Rank 0's `signal_` on every rank (others pass None), or STOP if any rank passes
        `stop`.
        """
        wish = ServerSignal.STOP if stop else (signal_ or 0)
        if self.group is None:
            return ServerSignal(wish)
        wish = torch.tensor([wish], dtype=torch.int64)
        dist.all_reduce(wish, op=dist.ReduceOp.MAX, group=self.group)  # STOP is the largest signal
        return ServerSignal(int(wish))

    def from_rank_zero(self, make) -> dict:
        """{name: array} that `make()` returns on rank 0, on every rank; if it raises there, all
        ranks raise.
        """
        if self.group is None:
            return make()
        arrays = error = header = None
        if self.rank == 0:
            try:
                arrays = {name: np.ascontiguousarray(array) for name, array in make().items()}
                header = {name: (array.shape, array.dtype.str) for name, array in arrays.items()}
            except Exception as exception:
                error = exception
                header = f"{type(exception).__name__}: {exception}"
        box = [header]
        dist.broadcast_object_list(box, src=0, group=self.group)
        if isinstance(box[0], str):
            raise error or RuntimeError(f"on rank 0: {box[0]}")
        if self.rank:
            arrays = {name: np.empty(shape, dtype) for name, (shape, dtype) in box[0].items()}
        for array in arrays.values():
            if array.size:
                dist.broadcast(torch.from_numpy(array), src=0, group=self.group)
        return arrays

    def gather_objects(self, value) -> list:
        """`value` of every rank, in rank order, on every rank."""
        if self.group is None:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values


@dataclass
class _Job:
    """A request waiting for the main thread of rank 0."""

    signal: ServerSignal
    inputs: dict
    future: concurrent.futures.Future = field(default_factory=concurrent.futures.Future)

    def fail(self, error: Exception) -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self.future.set_exception(error)

    def finish(self, result) -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self.future.set_result(result)


class TritonHost:
    """Triton with its workspace, and the removal of everything it leaves on the machine."""

    def __init__(self, host: str, port: int):
        self.host, self.port = host, port
        self._triton = None
        self._directory = None
        self._lock = threading.Lock()

    def start(self, endpoints: list, batcher: dict, should_stop) -> None:
        """Serve `endpoints`, pairs of `Endpoint` and function(**arrays) -> arrays; returns once
        all are ready.

        Args:
            batcher: keyword arguments of PyTriton's DynamicBatcher for batching endpoints.
            should_stop: asked between endpoints (each takes about two seconds to start); True ends
                the start early.
        """
        prepare_triton_environment()
        check_port_is_free(self.host, self.port)
        from pytriton.decorators import batch, group_by_keys, sample
        from pytriton.model_config import DynamicBatcher, ModelConfig
        from pytriton.triton import Triton, TritonConfig

        # Triton's socket paths must stay under 108 characters.
        base = tempfile.gettempdir() if len(tempfile.gettempdir()) <= 30 else "/tmp"
        self._directory = tempfile.mkdtemp(prefix="triton_", dir=base)
        log_file = os.path.join(self._directory, "triton.log")
        try:
            self._triton = Triton(
                config=TritonConfig(
                    http_address=self.host,
                    http_port=self.port,
                    allow_grpc=False,
                    allow_metrics=False,
                    exit_timeout_secs=10,  # if this process is killed in the middle of a request
                    log_file=log_file,
                ),
                workspace=os.path.join(self._directory, "w"),
            )
            self._triton.run()
            for endpoint, function in endpoints:
                if should_stop():
                    return

                def call(function=function, **arrays):
                    return function(**arrays)

                self._triton.bind(
                    model_name=endpoint.name,
                    infer_func=group_by_keys(batch(call)) if endpoint.batching else sample(call),
                    inputs=triton_tensors(endpoint.inputs),
                    outputs=triton_tensors(endpoint.outputs),
                    config=(
                        ModelConfig(
                            batching=True,
                            max_batch_size=9999999,
                            batcher=DynamicBatcher(**batcher),
                        )
                        if endpoint.batching
                        else ModelConfig(batching=False, max_batch_size=0)
                    ),
                    strict=True,
                )
        except Exception:
            with contextlib.suppress(OSError), open(log_file, errors="replace") as log:
                logging.error(
                    "Triton did not start. The end of its log:\n" + "".join(log.readlines()[-15:])
                )
            raise

    def is_alive(self) -> bool:
        return self._triton is not None and self._triton.is_alive()

    def stop(self) -> None:
        """Stop Triton, remove its workspace and shared memory; a second call waits for the first
        and does nothing.
        """
        with self._lock:
            if self._triton is not None:
                # PyTriton collects garbage once per endpoint, half a second each with torch loaded
                gc.freeze()
                try:
                    self._triton.stop()
                except Exception:
                    logging.warning(f"stopping Triton: {traceback.format_exc()}")
                gc.unfreeze()
                self._triton = None
            self._clean()

    def kill(self) -> None:
        """As `stop`, for a process that is about to end and cannot wait for Triton: kill it."""
        for process in psutil.Process().children(recursive=True):
            if "triton" in process.name():
                with contextlib.suppress(psutil.Error):
                    process.kill()
        self._clean()

    def _clean(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
        for leftover in glob.glob(f"/dev/shm/pytrtion{os.getpid()}-*"):  # PyTriton's own spelling
            with contextlib.suppress(OSError):
                os.unlink(leftover)


class _JobStore:
    """Out-of-band notes to the other ranks, through the store that the process group was built
    with.
    """

    def __init__(self, size: int, prefix: str):
        self._store = None
        if size > 1:
            store = dist.distributed_c10d._get_default_store()
            with contextlib.suppress(Exception):
                store = (
                    store.clone()
                )  # a connection of our own: never behind a blocking call of another thread
            self._store = dist.PrefixStore(prefix, store)

    def put(self, key: str, text: str) -> None:
        if self._store is not None:
            self._store.set(key, text)

    def get(self, key: str) -> str | None:
        if self._store is None or not self._store.check([key]):
            return None
        return self._store.get(key).decode()

    def delete(self, key: str) -> None:
        if self._store is not None:
            with contextlib.suppress(Exception):  # not every kind of store can delete
                self._store.delete_key(key)


class ServerLoop:
    """See the module docstring. Every rank constructs one and calls `run`.

    Args:
        name: of the server, for log lines.
        host, port: address to listen on (rank 0).
        endpoints: pairs of `Endpoint` and function(**arrays) -> arrays, called on Triton's threads
            of rank 0.
        operations: by signal, function(**inputs) -> result; every rank calls it, ranks above 0
        without inputs.
        after_failure: called on every rank with the signal when an operation failed on all ranks
        alike.
        batcher: keyword arguments of PyTriton's DynamicBatcher.
        control: the group over which operations get their inputs.
        heartbeat_s: pause between two announcements when idle.
        stop_grace_s: how long an operation may run on after a stop request before the process ends
        without it.
        failure_grace_s: how long a failed rank waits for the others to fail too before the job is
        given up.
    """

    def __init__(
        self,
        name: str,
        host: str,
        port: int,
        endpoints: list,
        operations: dict,
        after_failure,
        batcher: dict,
        control: ControlGroup,
        heartbeat_s: float = 1.0,
        stop_grace_s: float = 5.0,
        failure_grace_s: float = 30.0,
    ):
        self.name, self.endpoints, self.operations, self.after_failure = (
            name,
            endpoints,
            operations,
            after_failure,
        )
        self.batcher, self.control, self.heartbeat_s = batcher, control, heartbeat_s
        self.stop_grace_s, self.failure_grace_s = stop_grace_s, failure_grace_s
        self.rank = control.rank
        self._triton = TritonHost(host, port)
        self._store = _JobStore(control.size, f"nemo_aligner/{name}/{port}")
        self._queue = queue.Queue()
        self._admission = threading.Lock()
        self._closed = False
        self._current = None  # the job that the main thread works on
        self._stop_reason = None
        self._stop_deadline = None
        self._failure_deadline = None
        self._watching = threading.Event()

    # ---- any thread ----

    def submit(self, signal_: ServerSignal, inputs: dict):
        """Have all ranks run an operation and return rank 0's result (Triton's threads call this).

        Raises:
            OperationFailedError: with the tracebacks.
            ServerStoppingError: the job is ending.
        """
        job = _Job(signal_, inputs)
        with self._admission:
            if self._closed:
                raise ServerStoppingError(f"{self.name} is shutting down")
            self._queue.put(job)
        return job.future.result()

    def stop(self, reason: str = "stop() was called") -> None:
        """Ask the whole job to end."""
        if self._stop_reason is None:
            self._stop_deadline = time.monotonic() + self.stop_grace_s
            self._stop_reason = reason
            logging.info(f"{self.name}, rank {self.rank}: {reason}; ending the job")
            with contextlib.suppress(Exception):
                self._store.put("stop", reason)

    # ---- main thread ----

    def run(self) -> None:
        """Serve until a stop request (SIGTERM or SIGINT to any rank, `stop()`); returns on every
        rank.

        Raises:
            ServerJobError: the job could not go on; the other ranks end as well.
        """
        try:
            with self._watcher():
                self._start()
                self._serve()
        except BaseException as error:
            with contextlib.suppress(Exception):  # the store may be gone, too
                self._hear_stop_request()  # the watcher thread may not have come round to it
            if self._stop_reason is None:
                self._fail_all(ServerJobError(f"{self.name} failed: {error}"))
                self._close(failed=True)
                if isinstance(error, dist.DistBackendError) or "closed by peer" in str(error):
                    raise ServerJobError(
                        f"{self.name}, rank {self.rank}: another rank of this job has ended; look "
                        "for the first error "
                        "in its log (killed for memory?). The same command resumes from the last "
                        "checkpoint."
                    ) from error
                raise
            # Ranks leave one by one after a stop request: what breaks then is not a failure.
            logging.info(
                f"{self.name}, rank {self.rank}: interrupted by the stop request ({error})"
            )
        self._close(failed=False)

    def _start(self) -> None:
        if self.rank != 0:
            return
        logging.info(f"{self.name}: starting Triton on {self._triton.host}:{self._triton.port}")
        try:
            self._triton.start(self.endpoints, self.batcher, lambda: self._stop_reason is not None)
        except BaseException:
            self.control.exchange(None, stop=True)  # the others wait for the first announcement
            raise
        if self._stop_reason is None:
            names = ", ".join(endpoint.name for endpoint, _ in self.endpoints)
            logging.info(
                f"{self.name}: serving {names} at {self._triton.host}:{self._triton.port}"
            )

    def _serve(self) -> None:
        next_check = time.monotonic() + 10
        while True:
            job = None
            if self.rank == 0:
                with contextlib.suppress(queue.Empty):
                    job = self._current = self._queue.get(timeout=self.heartbeat_s)
                if job is None and time.monotonic() >= next_check:
                    next_check = time.monotonic() + 10
                    if not self._triton.is_alive() and self._stop_reason is None:
                        raise ServerJobError(
                            "Triton ended by itself; its host may be out of memory or shared "
                            "memory"
                        )
            announced = (job.signal if job else ServerSignal.HEARTBEAT) if self.rank == 0 else None
            signal_ = self.control.exchange(announced, stop=self._stop_reason is not None)
            if signal_ == ServerSignal.STOP:
                if self._stop_reason is None:
                    self.stop("another rank ends the job")
                return
            if signal_ != ServerSignal.HEARTBEAT:
                self._operate(signal_, job)
                self._current = None

    def _operate(self, signal_: ServerSignal, job: _Job | None) -> None:
        """Run one operation on this rank, then find out how it went on all of them."""
        result = kind = text = None
        try:
            if signal_ not in self.operations:
                raise RuntimeError(f"{self.name} cannot handle the signal {signal_!r}")
            result = self.operations[signal_](**(job.inputs if job else {}))
        except Exception as error:
            kind = type(error).__name__
            text = f"[rank {self.rank}] {traceback.format_exc()}"
            self._complain(f"{signal_.name} failed:\n{text}")
            with contextlib.suppress(Exception):
                self._store.put("failure", text)  # for a rank that never reaches the next line
        outcomes = self.control.gather_objects((kind, text))
        self._failure_deadline = None
        kinds = {kind for kind, _text in outcomes}
        if kinds == {None}:
            if job:
                job.finish(result)
            return
        texts = "\n".join(dict.fromkeys(text for _kind, text in outcomes if text))
        error = OperationFailedError(f"{signal_.name} failed on the server:\n{texts}")
        if len(kinds) > 1:
            if job:
                job.fail(error)
            raise ServerJobError(
                f"{signal_.name} failed on some ranks only; the process groups cannot be trusted "
                f"any more:\n{texts}"
            )
        if self.rank == 0:
            self._store.delete("failure")
        self.control.gather_objects(
            None
        )  # no rank starts the next operation while the note is still there
        self._failure_deadline = None
        if job:
            job.fail(error)
        self.after_failure(signal_)

    def _complain(self, text: str) -> None:
        text = f"{self.name}, rank {self.rank}: {text}"
        if self.rank == 0:
            logging.error(text)
        else:
            print(text, file=sys.stderr, flush=True)  # NeMo's logger speaks on rank 0 only

    def _fail_all(self, error: Exception) -> None:
        """Refuse new requests and answer all waiting ones with `error`."""
        with self._admission:
            self._closed = True
        if self._current is not None:
            self._current.fail(error)
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait().fail(error)

    def _close(self, failed: bool) -> None:
        """Remove what this rank holds outside the process; rank 0 first when the job failed."""

        def give_up():
            self._triton.kill()
            os._exit(int(failed))

        guard = threading.Timer(12.0 if failed else 8.0, give_up)  # Triton itself hangs
        guard.daemon = True
        guard.start()
        if self.rank == 0:
            self._fail_all(ServerStoppingError(f"{self.name} is shutting down"))
            self._triton.stop()
            with contextlib.suppress(Exception):
                self._store.put("closed", "1")
            logging.info(f"{self.name}: closed port {self._triton.port}")
        elif failed:
            # A launcher kills every process when one ends with an error: give rank 0 the time to
            # stop Triton.
            deadline = time.monotonic() + 10
            with contextlib.suppress(Exception):
                while time.monotonic() < deadline and self._store.get("closed") is None:
                    time.sleep(0.2)
        guard.cancel()
        # the process ends next: its last garbage collections would take seconds with torch loaded
        gc.freeze()

    # ---- watcher thread ----

    @contextlib.contextmanager
    def _watcher(self):
        """Signal handlers and the watcher thread, for the time of `run`.

        After a stop request SIGTERM and SIGINT have no effect: launchers repeat them while the job
        ends by itself.
        """
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        previous = {}
        if threading.current_thread() is threading.main_thread():
            previous = {
                s: signal.signal(s, lambda *_: None) for s in (signal.SIGTERM, signal.SIGINT)
            }
            old_fd = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
            os.register_at_fork(after_in_child=self._forget_signals)
        self._watching.set()
        thread = threading.Thread(
            target=self._watch, args=(read_end,), daemon=True, name=f"{self.name}-watcher"
        )
        thread.start()
        try:
            yield
        finally:
            self._watching.clear()
            thread.join()
            if previous:
                signal.set_wakeup_fd(old_fd)
                if self._stop_reason is None:
                    for number, handler in previous.items():
                        signal.signal(number, handler)
            os.close(read_end)
            os.close(write_end)

    def _forget_signals(self) -> None:
        """In a forked child (checkpoint writers): SIGTERM ends the child again, and does not reach
        our watcher.
        """
        if self._watching.is_set():
            with contextlib.suppress(ValueError):
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)

    def _watch(self, read_end: int) -> None:
        store_errors = 0
        while self._watching.is_set():
            if select.select([read_end], [], [], 0.3)[0]:
                for number in os.read(read_end, 64):
                    if number in (signal.SIGTERM, signal.SIGINT):
                        self.stop(f"received {signal.Signals(number).name}")
            failure = None
            try:
                self._hear_stop_request()
                failure = self._store.get("failure")
                store_errors = 0
            except Exception:
                store_errors += 1  # the store lives in rank 0 or in the launcher
            now = time.monotonic()
            if failure and self._failure_deadline is None:
                self._failure_deadline = now + self.failure_grace_s
            elif not failure and store_errors == 0:
                self._failure_deadline = None
            if self._stop_deadline is not None and now > self._stop_deadline:
                self._abandon(
                    0,
                    f"{self._stop_reason}; the running operation did not end in "
                    f"{self.stop_grace_s:.0f} s",
                )
            if store_errors >= 10:
                self._abandon(
                    0 if self._stop_reason else 1,
                    "the job's store is gone: rank 0 or the launcher has ended",
                )
            if self._failure_deadline is not None and now > self._failure_deadline:
                self._abandon(
                    1, f"a rank failed and the others cannot go on without it:\n{failure}"
                )

    def _hear_stop_request(self) -> None:
        """Take over what another rank has noted."""
        if self._stop_reason is None and (reason := self._store.get("stop")):
            self.stop(f"another rank ends the job ({reason})")

    def _abandon(self, code: int, why: str) -> None:
        """End this process although its main thread is still busy."""
        self._complain(why)
        if self.rank == 0:
            error = ServerStoppingError(why) if code == 0 else OperationFailedError(why)
            self._fail_all(error)
            time.sleep(0.5)  # let Triton pass the answers on
        self._close(failed=bool(code))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
