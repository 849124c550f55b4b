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
from collections.abc import Callable
from typing import Any

from nemo_aligner.core.errors import UserError
from nemo_aligner.servers.admission import JSON, RefusedError, Reply, body_length, check_token
from nemo_aligner.servers.agents import AgentEnvironment
from nemo_aligner.servers.http_server import HttpServer, Request, future_of

LARGEST_BODY = 2**24
_PATH = re.compile(r"/v1/sessions(?:/(\w{1,64})/(chat/completions|reward))?/?")


class AgentDoor(HttpServer):
    """Serves `environment` until `close`. `token`: every request must bring it as OpenAI's key."""

    def __init__(
        self, host: str, port: int, environment: AgentEnvironment, token: str | None, key: str
    ):
        super().__init__(host, port, key=key)
        self.environment, self.token = environment, token
        self.open()

    def error(self, status: int, line: str) -> Reply:
        return _json(status, {"error": {"message": line}})

    async def reply(self, request: Request) -> Reply:
        check_token(request.header, self.token)
        if request.method != "POST":
            raise RefusedError(501, f"Unsupported method ({request.method[:40]!r})")
        request.note_admitted()
        fields = await _read(request)
        act = self._action(request, fields, request.asker())
        try:
            session = await request.wait_for(future_of("agent", act))
        except UserError as error:
            raise RefusedError(400, str(error)) from error
        return (204, {}, b"") if session is None else _json(200, session)

    def _action(
        self, request: Request, fields: dict[str, Any], is_there: Callable[[], bool]
    ) -> Callable[[], dict[str, Any] | None]:
        environment, path = self.environment, _PATH.fullmatch(request.path)
        if path is None:
            raise RefusedError(404, f"nothing at {request.path[:200]!r}; start at /v1/sessions")
        if path[1] is not None:
            act = environment.reward if path[2] == "reward" else environment.chat
            return lambda: act(path[1], fields)
        host = request.header("Host") or f"{self.host}:{self.port}"

        def take() -> dict[str, Any] | None:
            session = environment.take(is_there)
            return session and session | {"base_url": f"http://{host}/v1/sessions/{session['id']}"}

        return take


async def _read(request: Request) -> dict[str, Any]:
    length = body_length(request.header)
    if length > LARGEST_BODY:
        raise RefusedError(413, f"a body has {LARGEST_BODY} bytes at most, not {length}")
    data = await request.read(length)
    try:
        fields = json.loads(data or b"{}")
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"the JSON of the body cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise RefusedError(400, "the JSON of the body is no object")
    return fields


def _json(status: int, content: dict[str, Any]) -> Reply:
    return status, {"Content-Type": JSON}, json.dumps(content).encode()
