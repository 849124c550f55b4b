# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Errors in one line."""

import json
import time
import traceback

import pytest

from nemo_aligner.core.errors import (
    LONGEST_LINE,
    ServerRequestError,
    UserError,
    cause_in,
    cause_of,
    one_line,
)
from nemo_aligner.servers import served_model
from nemo_aligner.servers.exchange import INSTANCE_HEADER, Peer
from nemo_aligner.servers.served_model import ModelProbe
from tests.patience import patience, wait_until
from tests.scripted_server import ScriptedServer


def raised(function):
    with pytest.raises(Exception) as caught:
        function()
    return caught.value


def fail(error):
    raise error


def test_a_line_has_no_breaks_and_an_end():
    assert one_line("  a\n\n\tb \r\nc") == "a b c"
    assert one_line("x" * (LONGEST_LINE + 1)) == "x" * LONGEST_LINE + "[...]"


@pytest.mark.parametrize(
    "function, line",
    [
        (lambda: fail(KeyError("x\ny")), r"KeyError: 'x\ny' (test_errors.py:{} in fail)"),
        (lambda: fail(OSError("two\nlines")), "OSError: two lines (test_errors.py:{} in fail)"),
        (lambda: fail(RuntimeError()), "RuntimeError (test_errors.py:{} in fail)"),
        (lambda: fail(UserError("set\nit")), "set it"),
        (lambda: fail(ServerRequestError("on rank 1: no")), "on rank 1: no"),
    ],
)
def test_the_cause_and_its_place(function, line):
    error = raised(function)
    line = line.format(fail.__code__.co_firstlineno + 1)
    assert cause_of(error) == line
    if not isinstance(error, (UserError, ServerRequestError, OSError)):
        text = "".join(traceback.format_exception(error))
        assert cause_in(f"Failed: x: {text}\n\nAt:\n  /a/model.py(405): execute\n") == line


def test_the_place_is_not_in_a_library():
    error = raised(lambda: json.loads("{"))
    assert cause_of(error).endswith(" in <lambda>)") and "decoder.py" not in cause_of(error)


def test_a_text_without_a_traceback_is_its_own_cause():
    assert cause_in("unexpected input\n'x'") == "unexpected input 'x'"


# ---- models that a server does not have ----


def reply(status, text="", own=False):
    head = f"HTTP/1.1 {status} X\r\n" + (f"{INSTANCE_HEADER}: 1\r\n" if own else "")
    body = json.dumps({"error": text}).encode()
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def test_a_server_of_this_package_says_at_once_what_it_has():
    with ScriptedServer(ready=200) as server:
        probe = ModelProbe(Peer("127.0.0.1", server.port), "x", "cfg", "cfg.name")
        assert probe.status(patience(5)) == 200 and probe.unusable is None
        text = "Request for unknown model: nothing at '/v2/models/x/ready'; it serves a, b"
        server.replies = {b"/v2/models/x/ready": reply(404, text, own=True)}
        assert probe.status(patience(5)) == 404
        assert probe.unusable == (
            f"the server at 127.0.0.1:{server.port} serves no model 'x'; it serves a, b. Correct "
            "cfg.name, or the server's own setting."
        )
    assert probe.status(patience(5)) is None and probe.unusable is None


def test_a_server_of_others_gets_time_to_load(monkeypatch):
    grace = patience(1.0)  # once: it changes with the load
    monkeypatch.setattr(served_model, "UNKNOWN_MODEL_S", grace)
    with ScriptedServer(ready=200) as server:
        server.replies = {b"/v2/models/x/ready": reply(400, "unknown")}
        probe = ModelProbe(Peer("127.0.0.1", server.port), "x", "cfg", "cfg.name")
        start = time.monotonic()
        wait_until(lambda: probe.status(patience(5)) == 400 and probe.unusable, 20)
        assert time.monotonic() - start >= grace
        assert "has been ready without one for" in probe.unusable and "cfg.name" in probe.unusable
        server.ready = 503  # it is not ready itself
        assert probe.status(patience(5)) == 400 and probe.unusable is None

        server.ready = 200
        monkeypatch.setattr(served_model, "UNKNOWN_MODEL_S", 0.5)
        assert probe.status(patience(5)) == 400 and probe.unusable is None
    time.sleep(0.6)
    assert probe.status(patience(5)) is None
    with ScriptedServer(ready=200) as server:  # started anew, it gets the time again
        server.replies = {b"/v2/models/x/ready": reply(400, "unknown")}
        probe.peer = Peer("127.0.0.1", server.port)
        assert probe.status(patience(5)) == 400 and probe.unusable is None
