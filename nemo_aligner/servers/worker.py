# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The program that runs code of a user, one per worker of `user_code.py`: a reward function, or
the class of an environment.

    python worker.py FILE KIND NAME REQUESTS_FD REPLIES_FD SERVER_PID

It needs only the standard library, to start in a moment. It forks: the child is the worker, and
lines of JSON go through two pipes:

    worker -> job    ["ready", what is told of the code] or ["error", text] once, after loading
    job -> worker    [item, ...]
    worker -> job    ["value", value] or ["error", text] for each item, in order, at once

The item of a function is a `Sample`, its value a number, or with a `count` a list of so many. What
is told of a function is the name of the parameter that gets the lengths, and `columns_of` it.

The item of a class is [ended, conversation, seed, prompt, responses], with all responses of the
conversation so far, and asks for the reply to the last one, [observation, reward, done]. A worker
without the state, since its predecessor was killed, plays the conversation again. `ended` lists
conversations that are over. Python's `random` has a stream of its own in each conversation.

The job kills a worker that exceeds a time limit.

The parent is the *keeper*. It ends with the server, with the worker, or with SIGTERM, and then
kills every process that the worker has started; on Linux it adopts the orphans among them for
that. It ends as the worker did. What worker and descendants print goes through pipes which are
always read, so that no writer waits. In each `WINDOW_S`, `PRINTED_BYTES` of each go to the
server's own; a line says how much was left out.
"""

import contextlib
import ctypes
import importlib.util
import inspect
import json
import math
import os
import random
import reprlib
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TextIO

# Longest traceback; of a longer one the end, which names the error, is kept.
ERROR_CHARACTERS = 4000
LARGEST_FLOAT32 = 3.4028234663852886e38
ALL_COLUMNS = "**"
PRINTED_BYTES = 20_000
WINDOW_S = 60.0
# How long processes may take to die, and the server's output to accept what is left.
KILL_S, FLUSH_S = 10.0, 1.0
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
METHODS = {"reset": ("prompt",), "step": ("state", "response")}  # of an environment

# Prompt, response, its length, how many rewards it needs (None: one for the whole), and columns.
Sample = tuple[str, str, int, int | None, Mapping[str, Any]]
Outcome = tuple[str, Any]  # what goes back for an item: "value" or "error", and a JSON value
Call = Callable[[Any], Any]  # replies to an item with its value


class LoadError(Exception):
    """The file or its function cannot be used; the message says why."""


def main() -> None:
    path, kind, name = sys.argv[1:4]
    requests_fd, replies_fd, server = map(int, sys.argv[4:7])
    wake, waker = os.pipe()
    for number in (wake, waker):
        os.set_blocking(number, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    asked_to_end = []
    signal.signal(signal.SIGTERM, lambda *_: asked_to_end.append(True))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    end_with(server, signal.SIGTERM)
    outputs, keeper = [Output(1), Output(2)], os.getpid()
    worker = os.fork()
    if worker == 0:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        for output in outputs:
            os.dup2(output.writer, output.target)
        for number in (wake, waker, *(end for o in outputs for end in (o.reader, o.writer))):
            os.close(number)
        end_with(keeper, signal.SIGKILL)
        work(path, kind, name, requests_fd, replies_fd)
        return
    for number in (requests_fd, replies_fd, *(output.writer for output in outputs)):
        os.close(number)
    status = None
    while status is None and not asked_to_end:
        wait(wake, outputs, WINDOW_S)
        status = reap()[0].get(worker)
    status = kill_descendants(worker, status, wake, outputs)
    finish(outputs)
    end_like(status)


def prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def end_with(parent: int, number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends, for whatever reason."""
    prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent has ended already
        os._exit(1)


# ---- the worker ----


def work(path: str, kind: str, name: str, requests_fd: int, replies_fd: int) -> None:
    del sys.path[0]  # where Python put this script's folder
    _prefer_for_out_of_memory_kill()
    for number in (requests_fd, replies_fd):
        os.set_inheritable(number, False)  # not for processes that the function starts
    # Anew, as they were opened on other files; what was printed is not lost with the process.
    sys.stdout, sys.stderr = (
        open(number, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
        for number in (1, 2)
    )
    requests = os.fdopen(requests_fd, "r", encoding="ascii")
    replies = os.fdopen(replies_fd, "w", encoding="ascii")
    try:
        call, told = (load_function if kind == "function" else load_environment)(path, name)
    except LoadError as error:
        _send(replies, "error", str(error))
        return
    _send(replies, "ready", told)
    own_pid = os.getpid()
    for line in requests:
        for item in json.loads(line):
            outcome = _respond(call, item, path)
            if os.getpid() != own_pid:
                os._exit(1)  # the function forked, and its child came back here
            _send(replies, *outcome)


def _respond(call: Call, item: Any, path: str) -> Outcome:
    try:
        return "value", call(item)
    except BadValueError as error:
        return "error", str(error)
    except BaseException as error:  # sys.exit() in a function fails its sample
        return "error", f"it raised:\n{format_error(error, path)}"


def _send(replies: TextIO, kind: str, value: Any) -> None:
    print(json.dumps([kind, value]), file=replies, flush=True)


def _prefer_for_out_of_memory_kill() -> None:
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def load_named(path: str, name: str, kind: str, is_kind: Callable[[Any], bool]) -> Any:
    """What is called `name` in the file, which may import modules beside it; else `LoadError`."""
    sys.path.insert(0, os.path.dirname(path))
    module_name = os.path.basename(path).removesuffix(".py")
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None  # `path` ends with .py
    module = importlib.util.module_from_spec(spec)
    # A module of this program with the same name stays.
    sys.modules.setdefault(module_name, module)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # SystemExit too
        raise LoadError(f"the file cannot be imported:\n{format_error(error, path)}") from None
    found = getattr(module, name, None)
    if found is None:
        own = [n for n, v in vars(module).items() if is_kind(v) and v.__module__ == module_name]
        names = ", ".join(own) or "none at all"
        raise LoadError(f"the file has no {kind} '{name}'; it has {names}")
    return found


def load_function(path: str, name: str) -> tuple[Call, Any]:
    """What scores a `Sample` by a function, and what is told of it; `LoadError`: not callable."""
    function = load_named(path, name, "function", inspect.isfunction)
    if not callable(function):
        raise LoadError(f"'{name}' is a {type(function).__name__}, not a function")
    if inspect.iscoroutinefunction(function):
        raise LoadError(f"'{name}' is an async function; write it as a plain one")
    try:
        columns = columns_of(function)
    except ValueError as error:  # of some functions written in C
        raise LoadError(f"{error}; call it in a function of your own") from None
    try:
        inspect.signature(function).bind(
            [], [], [], **{column: [] for column in columns if column != ALL_COLUMNS}
        )
    except TypeError as error:
        raise LoadError(
            f"'{name}{inspect.signature(function)}' cannot be called as {name}(prompts, "
            f"responses, lengths): {error}"
        ) from None

    def score(sample: Sample) -> float | list[float]:
        prompt, response, length, count, record = sample
        others = {name: [value] for name, value in record.items()}
        return read_score(function([prompt], [response], [length], **others), count)

    return score, ["".join(_positional(function)[2:3]), *columns]


def columns_of(function: Callable[..., Any]) -> list[str]:
    """The columns that a function asks for: its parameters beyond the first three that have no
    default, and with `**` as the last of them all others.
    """
    given = _positional(function)[:3]
    return [
        ALL_COLUMNS if p.kind == p.VAR_KEYWORD else p.name
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty and p.kind != p.VAR_POSITIONAL and p.name not in given
    ]


def _positional(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]


def format_error(error: BaseException, path: str) -> str:
    """Format the traceback from the user's file on, without the frames of this program."""
    frames: TracebackType | None = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != path:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    if len(text) > ERROR_CHARACTERS:
        text = f"Traceback (most recent call last):\n  [...]{text[-ERROR_CHARACTERS:]}"
    return text


class BadValueError(Exception):
    """The code did not return what it should; the message shows what it returned."""


def read_score(returned: Any, count: int | None) -> float | list[float]:
    """The score in what a function returned for one sample: any sequence of one real number; with
    a `count` of one sequence of so many. `BadValueError`: it is something else, or not finite.
    """
    wanted = "one number" if count is None else f"a list of {count} numbers"
    if not _is_sequence(returned):
        raise BadValueError(f"it returned {brief(returned)}, not a list with {wanted} per sample")
    values = list(returned)
    if len(values) != 1:
        raise BadValueError(f"it returned {len(values)} scores for 1 sample: {brief(returned)}")
    (score,) = values
    if count is None:
        return finite_number(score, returned)
    if not _is_sequence(score):
        raise BadValueError(
            f"it returned {brief(returned)}, whose item is a {type(score).__name__}, not {wanted} "
            "(rewards_per)"
        )
    numbers = [finite_number(value, returned) for value in score]
    if len(numbers) != count:
        what = f"it returned {len(numbers)} rewards for a response of {count}"
        raise BadValueError(f"{what} (rewards_per): {brief(returned)}")
    return numbers


def _is_sequence(value: Any) -> bool:
    return hasattr(value, "__iter__") and not isinstance(value, str | bytes | dict)


def finite_number(value: Any, scores: Any) -> float:
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise BadValueError(
            f"it returned {brief(scores)}, whose score is a {type(value).__name__}, not a number"
        )
    number = float(value)
    if not math.isfinite(number) or abs(number) > LARGEST_FLOAT32:
        raise BadValueError(
            f"it returned {brief(scores)}, which is not a finite number in float32"
        )
    return number


def brief(value: Any) -> str:
    short = reprlib.Repr()
    short.maxother = short.maxstring = 100
    return short.repr(value)


def load_environment(path: str, name: str) -> tuple[Call, None]:
    """What replies in conversations by the class `name` of the file at `path`; `LoadError`."""
    cls = load_named(path, name, "class", inspect.isclass)
    if not inspect.isclass(cls):
        raise LoadError(f"'{name}' is a {type(cls).__name__}, not a class")
    for method, arguments in METHODS.items():
        wanted = f"{method}(self, {', '.join(arguments)})"
        function = getattr(cls, method, None)
        if not callable(function):
            raise LoadError(f"the class '{name}' has no method {wanted}")
        if inspect.iscoroutinefunction(function):
            raise LoadError(f"{name}.{method} is an async method; write it as a plain one")
        try:
            inspect.signature(function).bind(None, *arguments)
        except TypeError as error:
            raise LoadError(f"{name}.{method} cannot be called as {wanted}: {error}") from None
    try:
        return Conversations(cls()).reply, None
    except BaseException as error:
        raise LoadError(f"{name}() raised:\n{format_error(error, path)}") from None


class Conversations:
    """The conversations with `environment`, an object with the methods of `METHODS`."""

    def __init__(self, environment: Any):
        self._environment = environment
        # By conversation: its state, that of `random`, and how many responses it has seen.
        self._open: dict[int, tuple[Any, Any, int]] = {}

    def reply(self, item: list[Any]) -> tuple[str, float, bool]:
        ended, conversation, seed, prompt, responses = item
        for number in ended:
            self._open.pop(number, None)
        known = self._open.pop(conversation, None)
        if known is None or known[2] != len(responses) - 1:
            random.seed(seed % 2**64)
            state, seen = self._environment.reset(prompt), 0
        else:
            state, stream, seen = known
            random.setstate(stream)
        for number, response in enumerate(responses[seen:], seen + 1):
            observation, reward, done = checked_reply(self._environment.step(state, response))
            if done and number < len(responses):
                raise BadValueError(
                    f"it ended a conversation after {number} responses that it had continued when "
                    "it was first played: they must be all that replies depend on"
                )
        if not done:
            self._open[conversation] = state, random.getstate(), len(responses)
        return observation, reward, done


def checked_reply(returned: Any) -> tuple[str, float, bool]:
    """What `step` returned: observation, finite reward, is it over; else `BadValueError`."""
    said = f"step returned {brief(returned)}"
    if not isinstance(returned, (tuple, list)) or len(returned) != 3:
        raise BadValueError(f"{said}, not (observation, reward, done)")
    observation, reward, done = returned
    if str(done) not in ("True", "False"):
        raise BadValueError(f"{said}, whose done is not True or False")
    done = bool(done)
    if observation is None and done:
        observation = ""
    if not isinstance(observation, str):
        kind = type(observation).__name__
        raise BadValueError(f"{said}, whose observation is a {kind}, not a text")
    if not observation and not done:
        raise BadValueError(f"{said}: an empty observation leaves the policy nothing to read")
    return observation, finite_number(reward, returned), done


# ---- the keeper ----


class Output:
    """One of the worker's output streams on its way to the server's."""

    def __init__(self, target: int):
        self.target = target
        self.reader, self.writer = os.pipe()  # not inherited across exec
        os.set_blocking(self.reader, False)
        self.open = True
        self.pending = b""
        self._left, self._dropped, self._window_ends = PRINTED_BYTES, 0, 0.0

    def read(self) -> bool:
        """Take what lies in the pipe, up to its usual size; whether there was something."""
        try:
            data = os.read(self.reader, 1 << 16)
        except BlockingIOError:
            return False
        self.open = bool(data)
        self.renew()
        self.pending += data[: self._left]
        self._dropped += max(len(data) - self._left, 0)
        self._left = max(self._left - len(data), 0)
        return self.open

    def renew(self, end: bool = False) -> None:
        """Begin a new window if the last one is over (`end`: it is), and say what it dropped."""
        if end or time.monotonic() >= self._window_ends:
            # A server whose output is stuck gets the line later.
            if self._dropped and len(self.pending) <= PRINTED_BYTES:
                line = f"[{self._dropped} bytes of a reward function's output are left out]"
                self.pending += f"\n{line}\n".encode()
                self._dropped = 0
            self._left = max(PRINTED_BYTES - len(self.pending), 0)
            self._window_ends = time.monotonic() + WINDOW_S

    def write(self) -> None:
        """Write a part that a pipe which polls as writable takes without waiting."""
        try:
            self.pending = self.pending[os.write(self.target, self.pending[: select.PIPE_BUF]) :]
        except BlockingIOError:
            pass
        except OSError:  # a closed log must not fail a sample
            self.pending = b""


def wait(wake: int, outputs: list[Output], timeout_s: float) -> None:
    """Forward output until a signal comes or `timeout_s` is over, at least once."""
    deadline = time.monotonic() + timeout_s
    while True:
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        for output in outputs:
            if output.open:
                poll.register(output.reader, select.POLLIN)
            if output.pending:
                poll.register(output.target, select.POLLOUT)
        ready = {number for number, _ in poll.poll(1000 * max(deadline - time.monotonic(), 0))}
        for output in outputs:
            output.renew()
            if output.reader in ready:
                output.read()
            if output.target in ready:
                output.write()
        if wake in ready:
            os.read(wake, 1 << 10)
            return
        if time.monotonic() >= deadline:
            return


def reap() -> tuple[dict[int, int], bool]:
    """The wait statuses of children that have ended, by id, and whether others are left."""
    ended: dict[int, int] = {}
    try:
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended[child[0]] = child[1]
    except ChildProcessError:
        return ended, False
    return ended, True


def kill_descendants(
    worker: int, status: int | None, wake: int, outputs: list[Output]
) -> int | None:
    """Kill until no child is left; returns the worker's wait status, None if it still runs."""
    deadline = time.monotonic() + KILL_S
    left = True
    while left and time.monotonic() < deadline:
        for child in children() or [worker] * (status is None):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        ended, left = reap()
        status = ended.get(worker, status)
        if left:
            wait(wake, outputs, 0.01)
    return status


def children() -> list[int]:
    found, own = [], str(os.getpid()).encode()
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        with contextlib.suppress(OSError):
            if name.isdigit():
                with open(f"/proc/{name}/stat", "rb") as file:
                    # PID (NAME, which may hold anything) STATE PARENT ...
                    if file.read().rpartition(b")")[2].split()[1] == own:
                        found.append(int(name))
    return found


def finish(outputs: list[Output]) -> None:
    """Forward what still lies in the pipes, for `FLUSH_S` at most: nobody writes any more."""
    deadline = time.monotonic() + FLUSH_S
    for output in outputs:
        while output.open and output.read() and time.monotonic() < deadline:
            pass
        output.renew(end=True)
        while output.pending and time.monotonic() < deadline:
            poll = select.poll()
            poll.register(output.target, select.POLLOUT)
            if poll.poll(100):
                output.write()


def end_like(status: int | None) -> None:
    code = 1 if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
