# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The lease of a critic: one actor at a time may change its weights and checkpoints.

An actor takes the lease when it connects and renews it every few seconds; all of its requests name
it. The front of the server (front.py) lets requests that change the critic pass only with the
lease. An actor that ends gives it back. One that dies or falls silent loses it LEASE_S after its
last sign of life, but never while a request of its own is being worked on, and only if another one
asks for it.
"""

import contextlib
import http.client
import json
import re
import ssl
import threading
import time
import uuid
from collections.abc import Iterator

from nemo.utils import logging

from nemo_aligner.core.errors import UserError
from nemo_aligner.servers.exchange import make_connection, token_header

LEASE_PATH = "/v2/nemo_aligner/lease"
LEASE_HEADER = "NeMo-Aligner-Lease"
LEASE_S = 30.0
RENEWAL_S = 5.0
_ID = re.compile(r"[!-~]{16,64}")


class LeaseTakenError(UserError):
    """Another actor has the lease of this critic."""


# ---- the server's side ----


class LeaseBook:
    """Who holds the lease of a server; any thread may call it. Unless `required`, clients that
    know no lease, such as NeMo-Aligner's, may change the server while nobody holds it.
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
                return (
                    f"another actor holds the lease of this server and was heard of {silent:.0f} "
                    f"s ago. It loses the lease {LEASE_S:.0f} s after its end; if it runs, give "
                    "this actor a critic of its own."
                )
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
        remedy = (
            "Restart this actor."
            if lease is not None
            else "Clients that know no lease, such as NeMo-Aligner's, need a critic with "
            "trainer.ppo.require_lease=False, and that no actor holds its lease."
        )
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


# ---- the client's side ----


class Lease:
    """The lease of one actor, renewed by a thread of its own until `close`.

    Attributes:
        id: that requests name; None for a server that knows no lease.

    Raises:
        LeaseTakenError: another actor has kept it for longer than it could without renewing it.
    """

    def __init__(self, host: str, port: int, token: str | None, tls: ssl.SSLContext | None = None):
        self._address, self._token, self._tls = (host, port), token, tls
        self.id: str | None = uuid.uuid4().hex
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._keep, daemon=True, name=f"lease of {host}:{port}"
        )
        self._take()
        if self.id is not None:
            self._thread.start()

    def close(self) -> None:
        if self._closed.is_set() or self.id is None:
            return
        self._closed.set()
        self._thread.join(15.0)
        self._ask("DELETE")

    def _take(self) -> None:
        """Wait for the lease of an actor that has ended, and for a reply."""
        deadline = time.monotonic() + LEASE_S + 2 * RENEWAL_S
        is_said = False
        while (reply := self._ask("POST"))[0] in (None, 409):
            if time.monotonic() > deadline:
                break
            if not is_said:
                is_said = True
                logging.info(f"waiting for the lease of {self._where}: {reply[1]}")
            time.sleep(1.0)
        status, error = reply
        if status == 409:
            raise LeaseTakenError(f"the critic at {self._where} cannot be used: {error}")
        if status is None:
            logging.warning(f"{self._where} has not replied to requests for its lease")
        if status is not None and status != 200:
            self.id = None  # a server of others

    @property
    def _where(self) -> str:
        return "{}:{}".format(*self._address)

    def _ask(self, method: str) -> tuple[int | None, str]:
        """Return HTTP status, None without a reply, and the server's error."""
        connection = make_connection(*self._address, 10.0, self._tls)
        headers = {**token_header(self._token), LEASE_HEADER: str(self.id)}
        with contextlib.closing(connection):
            try:
                connection.request(method, LEASE_PATH, headers=headers)
                response = connection.getresponse()
                body = response.read()
            except (OSError, http.client.HTTPException):
                return None, "no reply"
        try:
            return response.status, str(json.loads(body)["error"])
        except (ValueError, KeyError, TypeError):
            return response.status, ""

    def _keep(self) -> None:
        """Thread: renew the lease. A server that is gone is noticed by the requests."""
        while not self._closed.wait(RENEWAL_S):
            status, error = self._ask("POST")
            if status == 409:
                logging.error(f"this actor has lost the lease of {self._where}: {error}")
