# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Who and what may enter a server: the rules of its front (front.py).

What may pass: a GET to the general paths and those of a served endpoint; a POST to a served
endpoint, in one body of known and limited size with readable JSON, with the server's token if it
has one, and with the lease if it changes the server (`LeaseBook`). Refused are requests for an
earlier start of this server, as its weights went back to the last checkpoint.
"""

import contextlib
import hmac
import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from nemo_aligner.core.errors import one_line
from nemo_aligner.servers.exchange import (
    INSTANCE_HEADER,
    LEASE_HEADER,
    LEASE_PATH,
    LEASE_S,
    token_header,
)
from nemo_aligner.servers.schema import Endpoint

_ID = re.compile(r"[!-~]{16,64}")

JSON, BINARY = "application/json", "application/octet-stream"
STOPPING = "Server is stopping"
Reply = tuple[int, dict[str, str], bytes]  # status, headers and body

SMALL_BODY = 2**16  # of a request without samples
LARGEST_HEAD = 2**20  # the JSON in front of the tensors, or a body that is all JSON
METHODS = ("GET", "POST", "DELETE")
HEAD_SIZE_HEADER = "Inference-Header-Content-Length"
MOST_CONNECTIONS = 512
# A connection that has sent no request yet, one between two requests, one within a body.
FIRST_REQUEST_S, NEXT_REQUEST_S, BODY_S = 10.0, 3600.0, 60.0

_NUMBER = re.compile(r"[0-9]{1,18}")
_GENERAL = re.compile(r"/v2(?:/health/(live|ready))?/?")
_MODEL = re.compile(r"/v2/models/([\w.-]+)(?:/versions/1)?(?:/(ready|config|infer))?/?")

GetHeader = Callable[[str], str | None]  # header of this name, any case


class RefusedError(Exception):
    """A request that may not pass: HTTP status and reason."""

    def __init__(self, status: int, reason: str):
        super().__init__(one_line(reason))
        self.status = status


@dataclass(frozen=True)
class Access:
    """What a server asks of its clients."""

    token: str | None = None  # that every request must bring; None: none
    largest_body: int = 2**26  # of a request with samples, in bytes
    lease_required: bool = True  # to change the server; False: only while somebody holds it


@dataclass(frozen=True)
class Admitted:
    """A request that may pass."""

    endpoint: Endpoint | None  # None for the server itself
    what: str | None  # "infer", "config", "ready" or "live"; None: a description
    length: int = 0  # of the body, in bytes
    head_size: int = 0  # of the JSON that the body begins with


class Admission:
    """The rules of one server; any thread may call it."""

    def __init__(self, endpoints: Iterable[Endpoint], access: Access):
        self.endpoints = {endpoint.name: endpoint for endpoint in endpoints}
        self.leases = LeaseBook(access.lease_required)
        self.instance = uuid.uuid4().hex  # names this start of the server, in every reply
        self._access = access

    def admit(self, method: str, path: str, header: GetHeader) -> Admitted | None:
        """What the request is; None: it was about the lease and is done. Else `RefusedError`."""
        check_token(header, self._access.token)
        if header(INSTANCE_HEADER) not in (None, self.instance):
            raise RefusedError(503, "the server was started anew since this client connected")
        if method not in METHODS:
            raise RefusedError(501, f"Unsupported method ({method[:40]!r})")
        length = body_length(header)
        if path != LEASE_PATH or not any(each.is_exclusive for each in self.endpoints.values()):
            return self._check(method, path, length, header)
        if length or method == "GET":
            raise RefusedError(405, f"{LEASE_PATH} takes POST and DELETE, without a body")
        if method == "DELETE":
            self.leases.give_back(header(LEASE_HEADER))
        elif (problem := self.leases.renew(header(LEASE_HEADER))) is not None:
            raise RefusedError(409, problem)
        return None

    def _check(self, method: str, path: str, length: int, header: GetHeader) -> Admitted:
        model, general = _MODEL.fullmatch(path), _GENERAL.fullmatch(path)
        name, what = model.groups() if model else (None, general and general[1])
        endpoint = self.endpoints.get(str(name))
        if endpoint is None and not general:
            served = ", ".join(self.endpoints)
            raise RefusedError(
                404, f"Request for unknown model: nothing at {path[:200]!r}; it serves {served}"
            )
        if method == "GET" and what != "infer":
            if length:
                raise RefusedError(400, "a GET has no body")
            return Admitted(endpoint, what)
        if method != "POST" or what != "infer" or endpoint is None:
            raise RefusedError(405, f"{path[:200]!r} does not take {method}")
        largest = SMALL_BODY if endpoint.has_fixed_size else self._access.largest_body
        if length > largest:
            too_large = f"a request to {name} has {length} bytes, but this server takes at most"
            remedy = "Send fewer samples at once, or raise max_request_mb of the server."
            raise RefusedError(413, f"{too_large} {largest}. {remedy}")
        problem = self.leases.refusal(endpoint.name, header(LEASE_HEADER))
        if endpoint.is_exclusive and problem:
            raise RefusedError(403, problem)
        return Admitted(endpoint, what, length, _head_size(header, length))


def check_token(header: GetHeader, token: str | None) -> None:
    """Refuse a request without the `token` of a server that has one; takes as long for any."""
    wanted = token_header(token).get("Authorization", "")
    given = header("Authorization") or ""
    if wanted and not hmac.compare_digest(given.encode(), wanted.encode()):
        raise RefusedError(401, "this server asks for a token")


def body_length(header: GetHeader) -> int:
    """The bytes of a request's body, which comes in one piece."""
    if header("Transfer-Encoding") is not None or header("Content-Encoding") is not None:
        raise RefusedError(411, "send the body in one piece, as it is, with Content-Length")
    length = header("Content-Length") or "0"
    if not _NUMBER.fullmatch(length):
        raise RefusedError(400, f"Content-Length is {length[:40]!r}; send a number of bytes")
    return int(length)


def _head_size(header: GetHeader, length: int) -> int:
    size = header(HEAD_SIZE_HEADER) or str(length)
    if not _NUMBER.fullmatch(size) or int(size) > min(length, LARGEST_HEAD):
        most = f"this server takes at most {LARGEST_HEAD}. Send tensors as binary data."
        raise RefusedError(413, f"the JSON of a request has {size[:40]} bytes, but {most}")
    return int(size)


def read_json(data: bytes | bytearray) -> dict[str, Any]:
    """The JSON object that `data` holds; else `RefusedError`."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        why = f"the request is refused: its JSON cannot be read: {error}"
        raise RefusedError(400, why[:400]) from error
    if not isinstance(content, dict):
        raise RefusedError(400, "the request is refused: its JSON is no object")
    return content


class LeaseBook:
    """Who holds the lease of a server; any thread may call it. Unless `required`, clients that
    know no lease, such as NeMo-Aligner's, may change the server while nobody holds it.

    A silent holder loses it LEASE_S after its last sign of life, but never while a request of its
    own is being worked on, and only if another actor asks.
    """

    def __init__(self, required: bool):
        self.required = required
        self._lock = threading.Lock()
        self._holder: str | None = None
        self._seen = 0.0  # the holder's last sign of life
        self._working = 0  # its requests that are being worked on

    def renew(self, lease: str | None) -> str | None:
        """Give the lease to the actor with this id, or renew its own; returns why not, or None."""
        if lease is None or not _ID.fullmatch(lease):
            return f"{LEASE_HEADER} must be 16 to 64 printable characters."
        with self._lock:
            silent = time.monotonic() - self._seen
            if self._holder not in (None, lease) and (self._working or silent < LEASE_S):
                other = "another actor holds the lease of this server and was heard of"
                remedy = "if it runs, give this actor a critic of its own"
                loses = f"It loses it {LEASE_S:.0f} s after its end"
                return f"{other} {silent:.0f} s ago. {loses}; {remedy}."
            self._holder, self._seen = lease, time.monotonic()
        return None

    def give_back(self, lease: str | None) -> None:
        with self._lock:
            if lease == self._holder:
                self._holder = None

    def refusal(self, endpoint: str, lease: str | None) -> str | None:
        """Return why a request that changes the server may not pass; None if it may."""
        with self._lock:
            silent = time.monotonic() - self._seen
            held = self._holder is not None and (self._working > 0 or silent < LEASE_S)
            if lease == self._holder if lease is not None else not (self.required or held):
                return None
        remedy = "Restart this actor."
        if lease is None:  # as clients of NeMo-Aligner
            remedy = "Without one it takes trainer.ppo.require_lease=False, and no holder."
        return f"{endpoint} is for the actor that holds the lease of this server. {remedy}"

    @contextlib.contextmanager
    def working_for(self, lease: str | None) -> Iterator[None]:
        """Keep the lease of a holder while its request is worked on."""
        with self._lock:
            mine = lease is not None and lease == self._holder
            self._working += mine
        try:
            yield
        finally:
            with self._lock:
                self._working -= mine
                if mine:
                    self._seen = time.monotonic()
