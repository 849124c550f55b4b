# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The HTTP of agents (`agents.py`), all of it JSON:

    POST /v1/sessions                          the next session; 204: there is none for a while
    POST /v1/sessions/<id>/chat/completions    OpenAI's request; the rest is its `base_url`
    POST /v1/sessions/<id>/reward              {"reward": 1.0}; ends the session

A refusal is OpenAI's {"error": {"message": ...}}: 400, or 404 for a session that is over. Their
client would repeat a request that gets 409.
"""

import json
import re
import select
import socket
import traceback
from typing import Any

from nemo.utils import logging

from nemo_aligner.core.errors import UserError, cause_of
from nemo_aligner.servers.admission import BODY_S, JSON, RefusedError, body_length, check_token
from nemo_aligner.servers.agents import AgentEnvironment
from nemo_aligner.servers.front import HttpHandler, HttpServer

LARGEST_BODY = 2**24
_PATH = re.compile(r"/v1/sessions(?:/(\w{1,64})/(chat/completions|reward))?/?")


class AgentDoor(HttpServer):
    """Serves `environment` until `close`. `token`: every request must bring it as OpenAI's key."""

    def __init__(
        self, host: str, port: int, environment: AgentEnvironment, token: str | None, key: str
    ):
        self.environment, self.token = environment, token
        super().__init__((host, port), _Handler, key)
        self.open()


class _Handler(HttpHandler):
    server: AgentDoor
    timeout = BODY_S

    def do_POST(self) -> None:
        try:
            session = self._reply(self._read())
        except (RefusedError, UserError) as refusal:
            status = refusal.status if isinstance(refusal, RefusedError) else 400
            reply = self.refuse if self.close_connection else self.send_refusal
            reply(status, str(refusal))
        except Exception as error:
            if isinstance(error, OSError):
                raise
            logging.error(f"{self.path}: {traceback.format_exc()}")
            self.send_refusal(500, cause_of(error))
        else:
            self._send(204 if session is None else 200, session)

    def _read(self) -> dict[str, Any]:
        closes, self.close_connection = self.close_connection, True  # unless the body is read
        check_token(self.headers.get, self.server.token)
        length = body_length(self.headers.get)
        if length > LARGEST_BODY:
            raise RefusedError(413, f"a body has {LARGEST_BODY} bytes at most, not {length}")
        data = self.rfile.read(length)
        self.close_connection = closes
        try:
            request = json.loads(data or b"{}")
        except (ValueError, RecursionError) as error:
            raise RefusedError(400, f"the JSON of the body cannot be read: {error}") from error
        if not isinstance(request, dict):
            raise RefusedError(400, "the JSON of the body is no object")
        return request

    def _reply(self, request: dict[str, Any]) -> dict[str, Any] | None:
        environment, path = self.server.environment, _PATH.fullmatch(self.path)
        if path is None:
            raise RefusedError(404, f"nothing at {self.path[:200]!r}; start at /v1/sessions")
        if path[1] is not None:
            act = environment.reward if path[2] == "reward" else environment.chat
            return act(path[1], request)
        session = environment.take(self._is_there)
        host = self.headers.get("Host") or "{}:{}".format(*self.server.server_address[:2])
        return session and session | {"base_url": f"http://{host}/v1/sessions/{session['id']}"}

    def send_refusal(self, status: int, line: str) -> None:
        self._send(status, {"error": {"message": line}})

    def _is_there(self) -> bool:
        """Whether the client still waits; one that has given up has closed its connection."""
        try:
            gone = bool(select.select([self.connection], [], [], 0)[0])
            return not (gone and self.connection.recv(1, socket.MSG_PEEK) == b"")
        except OSError:
            return False

    def _send(self, status: int, content: dict[str, Any] | None) -> None:
        if content is None:
            self.send(status, {}, b"")
        else:
            body = json.dumps(content).encode()
            self.send(status, {"Content-Type": JSON, "Content-Length": str(len(body))}, body)
