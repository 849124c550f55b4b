# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The program that runs a user's reward function, one process per worker of `reward_function.py`.

    python worker.py FILE FUNCTION REQUESTS_FD REPLIES_FD PARENT_PID

It is started as a script and needs only the standard library, so that a worker starts in a moment,
also after its predecessor was killed. Lines of JSON go through the two pipes:

    worker -> server    ["ready", columns] or ["error", text] once, after loading
    server -> worker    [[prompt, response, length, count, values of the columns], ...]
    worker -> server    ["score", value] or ["error", text] for each sample, in order, at once

`columns` are those of a prompt's record that the function asks for by its parameters
(`columns_of`), after the name of the parameter that gets the lengths. The value is a number; with
a `count`, which is null for one reward per response, a list of so many numbers, for the steps or
tokens of the response.

The server sets the time limits, and kills the worker that exceeds one. Its parent is a keeper
(`worker_keeper.py`), which bounds what it prints and kills what it has started.
"""

import contextlib
import ctypes
import importlib.util
import inspect
import io
import json
import math
import os
import reprlib
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, TextIO

# Longest traceback; of a longer one the end, which names the error, is kept.
ERROR_CHARACTERS = 4000
LARGEST_FLOAT32 = 3.4028234663852886e38
ALL_COLUMNS = "**"


class LoadError(Exception):
    """The file or its function cannot be used; the message says why."""


def main() -> None:
    """Load the function, then score samples until the server closes the pipe."""
    run(load_function, score_samples, lambda loaded: [_third(loaded), *columns_of(loaded)])


# Prompt, response, its length, how many rewards it needs (None: one for the whole), and columns.
Sample = tuple[str, str, int, int | None, Mapping[str, Any]]
# What goes back for a message: its kind and a JSON value.
Outcome = tuple[str, Any]


def run(
    load: Callable[[str, str], Any],
    respond: Callable[[Any, str, Any], Iterable[Outcome]],
    describe: Callable[[Any], Any] = lambda loaded: None,
) -> None:
    """Load the user's code, then respond to messages until the other side closes the pipe.

    Args:
        load: (path, name) to what is used of the file; may raise `LoadError`.
        respond: (what was loaded, path, message) to the replies.
        describe: what was loaded, to what the other side is told of it.
    """
    del sys.path[0]  # where Python put this script's folder
    path, name = sys.argv[1:3]
    requests_fd, replies_fd, parent = map(int, sys.argv[3:6])
    _end_with(parent)
    _prefer_for_out_of_memory_kill()
    for number in (requests_fd, replies_fd):
        os.set_inheritable(number, False)  # not for processes that the function starts
    for stream in (sys.stdout, sys.stderr):  # what was printed is not lost with the process
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    requests = os.fdopen(requests_fd, "r", encoding="ascii")
    replies = os.fdopen(replies_fd, "w", encoding="ascii")
    try:
        loaded = load(path, name)
    except LoadError as error:
        _send(replies, "error", str(error))
        return
    _send(replies, "ready", describe(loaded))
    own_pid = os.getpid()
    for line in requests:
        for outcome in respond(loaded, path, json.loads(line)):
            if os.getpid() != own_pid:
                os._exit(1)  # the function forked, and its child came back here
            _send(replies, *outcome)


def _send(replies: TextIO, kind: str, value: Any) -> None:
    print(json.dumps([kind, value]), file=replies, flush=True)


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, for whatever reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # the parent has ended already
        os._exit(1)


def _prefer_for_out_of_memory_kill() -> None:
    """Have the kernel kill this process when memory runs out, not the server or a training job."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


# ---- loading ----


def load_named(path: str, name: str, kind: str, is_kind: Callable[[Any], bool]) -> Any:
    """What is called `name` in the file at `path`, which may import modules beside it.

    Raises:
        LoadError: the file cannot be run, or holds nothing of that name.
    """
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
        raise LoadError(
            f"the file has no {kind} '{name}'; it has {', '.join(own) or 'none at all'}"
        )
    return found


def load_function(path: str, name: str) -> Callable[..., Any]:
    """The callable `name` of the file at `path`; `LoadError` if it cannot be called as it must."""
    function = load_named(path, name, "function", inspect.isfunction)
    if not callable(function):
        raise LoadError(f"'{name}' is a {type(function).__name__}, not a function")
    if inspect.iscoroutinefunction(function):
        raise LoadError(f"'{name}' is an async function; write it as a plain one")
    try:
        columns: dict[str, Any] = {
            name: [] for name in columns_of(function) if name != ALL_COLUMNS
        }
        inspect.signature(function).bind([], [], [], **columns)
    except TypeError as error:
        raise LoadError(
            f"'{name}{inspect.signature(function)}' cannot be called as {name}(prompts, "
            f"responses, lengths): {error}"
        ) from None
    except ValueError:
        pass  # some functions written in C have no signature: the first sample shows
    return function


def columns_of(function: Callable[..., Any]) -> list[str]:
    """The columns that a function asks for: its parameters beyond the first three that have no
    default, and with `**` as the last of them all others.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return []
    kinds = inspect.Parameter
    given = _positional(function)[:3]
    asked = [p for p in parameters if p not in given and p.kind != kinds.VAR_POSITIONAL]
    return [
        ALL_COLUMNS if p.kind == kinds.VAR_KEYWORD else p.name
        for p in asked
        if p.default is p.empty
    ]


def _positional(function: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return [p for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]


def _third(function: Callable[..., Any]) -> str:
    """The name of the parameter that gets the lengths; "" if it has none of its own."""
    try:
        return "".join(p.name for p in _positional(function)[2:3])
    except ValueError:
        return ""


def format_error(error: BaseException, path: str) -> str:
    """Format the traceback from the user's file on, without the frames of this program."""
    frames: TracebackType | None = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != path:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    if len(text) > ERROR_CHARACTERS:
        text = f"Traceback (most recent call last):\n  [...]{text[-ERROR_CHARACTERS:]}"
    return text


# ---- scoring ----


class BadScoreError(Exception):
    """The function did not return the numbers of a sample; the message shows what it returned."""


def score_samples(function: Callable[..., Any], path: str, samples: Any) -> Iterable[Outcome]:
    """Yield ("score", value) or ("error", why there is none) of each `Sample`."""
    for prompt, response, length, count, columns in samples:
        others = {name: [value] for name, value in columns.items()}
        try:
            returned = function([prompt], [response], [length], **others)
            yield "score", read_score(returned, count)
        except BadScoreError as error:
            yield "error", str(error)
        except BaseException as error:  # sys.exit() in a function fails its sample
            yield "error", f"it raised:\n{format_error(error, path)}"


def read_score(returned: Any, count: int | None) -> float | list[float]:
    """The score in what a function returned for one sample: any sequence of one real number; with
    a `count`, for steps or tokens, of one sequence of so many.

    Raises:
        BadScoreError: it is something else, or not finite in float32.
    """
    wanted = "one number" if count is None else f"a list of {count} numbers"
    if not _is_sequence(returned):
        raise BadScoreError(f"it returned {brief(returned)}, not a list with {wanted} per sample")
    values = list(returned)
    if len(values) != 1:
        raise BadScoreError(f"it returned {len(values)} scores for 1 sample: {brief(returned)}")
    (score,) = values
    if count is None:
        return finite_number(score, returned)
    if not _is_sequence(score):
        raise BadScoreError(
            f"it returned {brief(returned)}, whose item is a {type(score).__name__}, not {wanted} "
            "(rewards_per)"
        )
    numbers = [finite_number(value, returned) for value in score]
    if len(numbers) != count:
        raise BadScoreError(
            f"it returned {len(numbers)} rewards for a response of {count} "
            f"(rewards_per): {brief(returned)}"
        )
    return numbers


def _is_sequence(value: Any) -> bool:
    return hasattr(value, "__iter__") and not isinstance(value, str | bytes | dict)


def finite_number(value: Any, scores: Any) -> float:
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise BadScoreError(
            f"it returned {brief(scores)}, whose score is a {type(value).__name__}, not a number"
        )
    number = float(value)
    if not math.isfinite(number) or abs(number) > LARGEST_FLOAT32:
        raise BadScoreError(
            f"it returned {brief(scores)}, which is not a finite number in float32"
        )
    return number


def brief(value: Any) -> str:
    short = reprlib.Repr()
    short.maxother = short.maxstring = 100
    return short.repr(value)


if __name__ == "__main__":
    main()
