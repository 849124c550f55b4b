# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""JSON over HTTP, to web servers that know nothing of this package."""

import http.client
import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from nemo_aligner.config.access import shown_url
from nemo_aligner.core.errors import ServerRequestError, one_line
from nemo_aligner.servers.exchange import token_header

# Statuses of a server that may have room or be up again after a while.
TRY_AGAIN = (408, 425, 429, 502, 503, 504)
MOST_BYTES = 1 << 28  # of a reply


class NoReplyError(ServerRequestError):
    """There is no usable reply; the message names the server.

    Attributes:
        may_pass: another try may succeed.
        was_sent: the server may have been at work on the request when it ended.
    """

    def __init__(self, url: str, why: str, may_pass: bool = True, was_sent: bool = False):
        super().__init__(f"the server {shown_url(url)} {why}.")
        self.may_pass, self.was_sent = may_pass, was_sent


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirection, which would take the token along and leave the body."""

    def redirect_request(self, *_args: Any) -> None:
        return None


def post_json(
    url: str,
    fields: Any,
    token: str | None,
    timeout_s: float,
    tls: ssl.SSLContext | None = None,
    try_again: Sequence[int] = TRY_AGAIN,
) -> bytes:
    """The reply to a request with `fields`.

    Args:
        timeout_s: how long it may be silent, and within which its reply must be there.

    Raises:
        NoReplyError: it did not reply, or with an error.
    """
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    request = urllib.request.Request(
        url, json.dumps(fields).encode(), headers | token_header(token)
    )
    opener = urllib.request.build_opener(_NoRedirect(), urllib.request.HTTPSHandler(context=tls))
    deadline = time.monotonic() + timeout_s
    try:
        with opener.open(request, timeout=timeout_s) as reply:
            return _body(reply, deadline)
    except urllib.error.HTTPError as error:
        try:
            text = error_text(_body(error.fp, deadline)) or error.reason
        except (OSError, http.client.HTTPException):  # the status says enough
            text = error.reason
        if error.code in (401, 403):
            have = "this job has none" if token is None else "that of this job is another one"
            text += f" (it may ask for a token, and {have})"
        elif 300 <= error.code < 400:
            text += f" (it names {shown_url(error.headers.get('Location', 'nothing'))})"
        why = f"replied with HTTP {error.code}: {text}"
        raise NoReplyError(url, why, may_pass=error.code in try_again) from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        was_sent = not isinstance(error, urllib.error.URLError)
        if isinstance(reason, TimeoutError):
            why = f"gave no reply within {timeout_s:g} s"
            raise NoReplyError(url, why, was_sent=True) from None
        what = "broke off the connection" if was_sent else "cannot be reached"
        why = f"{what} ({one_line(str(reason)) or type(reason).__name__})"
        is_other = isinstance(reason, ssl.SSLCertVerificationError)
        raise NoReplyError(url, why, may_pass=not is_other, was_sent=was_sent) from None


def _body(reply: Any, deadline: float) -> bytes:
    content, length = bytearray(), reply.length  # None: it ends with the connection, or in chunks
    most = MOST_BYTES if length is None else min(length, MOST_BYTES)
    while len(content) < most:
        piece = reply.read1(min(most - len(content), 1 << 16))
        content += piece
        if not piece and length is not None:
            raise http.client.IncompleteRead(bytes(content), length - len(content))
        if not piece:
            break
        if time.monotonic() > deadline:
            raise TimeoutError
    return bytes(content)


def error_text(content: bytes) -> str:
    try:
        reply = json.loads(content)
        return one_line(str(next(reply[key] for key in ("error", "detail") if key in reply)))
    except (ValueError, TypeError, StopIteration):
        return one_line(content[:500].decode("utf-8", "replace"))
