# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Errors that end a job with one message and no traceback (a user's, whose message names the value
and the remedy; a server's; an alarm's), and how any error becomes one line.
"""

import re
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

LONGEST_LINE = 2000  # characters of an error in one line
_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'^\s*File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = ("<", *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


class UserError(ValueError):
    """Bad input (a value, file or address given by the user)."""


class ConfigError(UserError):
    """A configuration key or a combination of values that cannot work."""


class DamagedFileError(UserError):
    """A file of a checkpoint or a `.nemo` is not what was written."""


class SaveError(UserError):
    """A checkpoint or a `.nemo` could not be written; raised by all ranks together."""


class ServerRequestError(RuntimeError):
    """A request failed on the server, or no response arrived. The message is one line: the model,
    the address and the cause. The traceback is in the server's log (PyTriton's: the client's).
    """


class LostPeerError(ServerRequestError):
    """A process that this job needs has ended, or does not return in the configured time."""


class ServerEndingError(RuntimeError):
    """The server job ends; it did not finish the request."""


class ServerJobError(ServerEndingError):
    """A server job cannot continue: a rank failed alone."""


class AlarmError(RuntimeError):
    """An alarm ends the run; raised by all ranks together."""


class NonFiniteError(AlarmError):
    """A loss, a gradient, a reward or a value is NaN or infinite."""


class ReplicaError(AlarmError):
    """Weights that must be equal on several ranks are not."""


class PolicyReferenceError(AlarmError):
    """Policy and reference differ before the first update."""


def unknown(name: str, value: object, choices: Iterable[str]) -> ValueError:
    return ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(choices)}")


def one_line(text: str) -> str:
    """`text` without its line breaks, and without the end of a very long one."""
    line = " ".join(part.strip() for part in text.splitlines() if part.strip())
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}[...]"


def cause_of(error: BaseException) -> str:
    """`error` in one line: "TypeError: why (file.py:12 in function)", with the innermost place
    that is not in a library. A message of ours that says what to do stands alone.
    """
    if isinstance(error, (UserError, ServerRequestError)):
        return one_line(str(error))
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_own(frame.filename)] or frames
    place = [f"({Path(f.filename).name}:{f.lineno} in {f.name})" for f in own[-1:]]
    why = one_line(str(error))
    return " ".join([type(error).__name__ + (why and f": {why}"), *place])


def _is_own(file: str) -> bool:
    return file.startswith(_PACKAGE) or not file.startswith(_LIBRARIES)


def cause_in(text: str) -> str:
    """The error that `text`, which may hold tracebacks, is about: in one line, as `cause_of`."""
    _before, found, last = text.rpartition(_TRACEBACK)
    lines = [line for line in last.splitlines() if line.strip() and not line[0].isspace()]
    if not found or not lines:
        return one_line(text)
    places = [f"({Path(file).name}:{line} in {name})" for file, line, name in _FRAME.findall(last)]
    return " ".join([one_line(lines[0]), *places[-1:]])
