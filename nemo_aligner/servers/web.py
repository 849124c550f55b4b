# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Rewards by JSON over HTTP, from web servers that know nothing of this package: reward servers,
and a judge, a language model whose replies a folder keeps and counts.
"""

import contextlib
import fcntl
import hashlib
import http.client
import itertools
import json
import os
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from typing import Any

from nemo.utils import logging

from nemo_aligner.config.access import shown_url
from nemo_aligner.config.server_rules import JudgeSpec, RewardServersSpec
from nemo_aligner.core.endings import progress
from nemo_aligner.core.errors import LostPeerError, ServerRequestError, UserError, one_line
from nemo_aligner.servers.exchange import token_header
from nemo_aligner.servers.worker import (
    ALL_COLUMNS,
    BadValueError,
    Outcome,
    Sample,
    brief,
    read_score,
)

MAX_LOST = 3  # servers that end or fall silent with the same samples, which may be the reason
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0
LONGEST_ASKED_S = 60.0  # of a pause that a server asks for
TAKEN = ("query", "prompts", "responses", "lengths")  # names of a request that no column has
SCORES = ("rewards", "scores", "reward", "score")

# Statuses of a server that may have room or be up again after a while.
TRY_AGAIN = (408, 425, 429, 502, 503, 504)
MOST_BYTES = 1 << 28  # of a reply
LOOK_S = 0.05  # between looks at a file that another worker has


class NoReplyError(ServerRequestError):
    """There is no usable reply; the message names the server. Another try may succeed if it
    `may_pass`; if it `was_sent` the server may have been at work on it.
    """

    pause_s = 0.0  # that the server asks for before another try

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
    """The reply to a request with `fields`, whole within `timeout_s`; `NoReplyError`."""
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
        refusal = NoReplyError(url, why, may_pass=error.code in try_again)
        asked = error.headers.get("Retry-After", "")
        refusal.pause_s = min(float(asked), LONGEST_ASKED_S) if asked.isdecimal() else 0.0
        raise refusal from None
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
    with contextlib.suppress(ValueError, TypeError, StopIteration):
        reply = json.loads(content)
        return one_line(str(next(reply[key] for key in ("error", "detail") if key in reply)))
    return one_line(content[:500].decode("utf-8", "replace"))


def chat_text(content: bytes) -> str:
    """The text of a chat completion, a reply in OpenAI's form; `BadValueError`: it is none."""
    with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
        text = json.loads(content)["choices"][0]["message"]["content"]
        if text is None or isinstance(text, str):
            return text or ""
    shown = one_line(content[:200].decode("utf-8", "replace")) or "nothing"
    raise BadValueError(f"something else than a chat completion: {shown}")


class UrlWorker:
    """Has samples scored by a server; a `WorkerProcess` for `RewardFunction`."""

    most = 32  # samples that it gets at once

    def __init__(self, servers: "RewardServers"):
        self._servers = servers
        self._place = next(servers.firsts)
        self._closed = threading.Event()

    def load(self) -> Sequence[str]:
        return "lengths", ALL_COLUMNS

    def kill(self) -> None:
        self._closed.set()

    def release(self) -> None:
        """Nothing to do."""

    def is_alive(self) -> bool:
        return True

    def outcomes(self, samples: Sequence[Sample], timeout_s: float) -> Iterator[Outcome]:
        """Scores of samples, each within `timeout_s`; `LostPeerError`: no server replied."""
        try:
            scores = _scores_in(self._reply(_fields(samples), timeout_s * len(samples)))
            if len(scores) != len(samples):
                raise BadValueError(f"it gave {len(scores)} scores for {len(samples)} samples")
        except (NoReplyError, BadValueError) as error:
            return iter([("error", str(error).rstrip("."))] * len(samples))
        return map(_outcome, scores, samples)

    def _post(self, fields: dict[str, Any], limit_s: float) -> bytes:
        spec = self._servers.spec
        return post_json(spec.urls[self._place], fields, spec.token, limit_s, spec.tls)

    def _reply(self, fields: dict[str, Any], limit_s: float) -> bytes:
        servers, spec, lost, pause = self._servers, self._servers.spec, 0, FIRST_PAUSE_S
        begin = time.monotonic()
        for tries in itertools.count(1):
            try:
                return self._post(fields, limit_s)
            except NoReplyError as error:
                lost, asked_s = lost + error.was_sent, error.pause_s
                if not error.may_pass or lost == MAX_LOST:
                    raise
                waited = time.monotonic() - begin
                if waited > servers.init_timeout_s or self._closed.is_set():
                    raise LostPeerError(
                        f"{spec} did not reply for {waited:.0f} s: {error} Check "
                        f"{spec.setting}, or start it again, and then this job."
                    ) from None
                if tries == 1:
                    logging.warning(f"{error} Its samples are sent again.")
            progress.made()
            self._place = (self._place + 1) % len(spec.urls)
            if tries % len(spec.urls) == 0:
                self._closed.wait(max(pause, asked_s))
                pause = min(2 * pause, LONGEST_PAUSE_S)
        raise AssertionError("the loop does not end")


def _fields(samples: Sequence[Sample]) -> dict[str, Any]:
    """A request; `query`, `prompts` and `labels` are OpenRLHF's names."""
    prompts, responses, lengths, _, records = zip(*samples, strict=True)
    names = {name: None for record in records for name in record}
    return {
        **{name: [record.get(name) for record in records] for name in names},
        "query": [prompt + response for prompt, response in zip(prompts, responses)],
        "prompts": prompts,
        "responses": responses,
        "lengths": lengths,
        "labels": [record.get("labels", record.get("label")) for record in records],
    }


def _scores_in(content: bytes) -> list[Any]:
    """The scores in a reply, a list or an object with one; `BadValueError` if there are none."""
    reply = None
    with contextlib.suppress(ValueError):
        reply = json.loads(content)
    if isinstance(reply, dict):
        reply = next((reply[name] for name in SCORES if name in reply), None)
    if isinstance(reply, int | float):
        reply = [reply]
    if not isinstance(reply, list):
        said = error_text(content) or "nothing"
        raise BadValueError(f"it gave no list of scores ({' or '.join(SCORES)}), but {said}")
    return reply


def _outcome(score: Any, sample: Sample) -> Outcome:
    count = sample[3]
    if count is None and isinstance(score, list) and len(score) == 1:
        (score,) = score
    try:
        return "value", read_score([score], count)
    except BadValueError as error:
        return "error", str(error)


class JudgeWorker(UrlWorker):
    """Has samples scored by a judge, of a `JudgeSpec`, one after the other."""

    most = 1

    def __init__(self, servers: "RewardServers"):
        super().__init__(servers)
        assert isinstance(servers.spec, JudgeSpec)
        self._judge = servers.spec
        self._folder = Path(servers.spec.options["cache"]).expanduser()

    def load(self) -> Sequence[str]:
        self._spend()
        return "lengths", *self._judge.columns

    def outcomes(self, samples: Sequence[Sample], timeout_s: float) -> Iterator[Outcome]:
        """Their scores; `UserError`: the budget is spent; or see `UrlWorker`."""
        return (self._score(sample, timeout_s) for sample in samples)

    def _score(self, sample: Sample, timeout_s: float) -> Outcome:
        judge, (prompt, response, _, _, columns), why = self._judge, sample, ""
        values = {**columns, "prompt": prompt, "response": response}
        for number in range(judge.options["tries"]):
            try:
                text = self._text(judge.request(values, number), number, timeout_s)
            except NoReplyError as error:
                return "error", str(error).rstrip(".") + error.was_sent * " (reward_fn_timeout_s)"
            except BadValueError as error:
                why = f"it gave {error}"
                continue
            score = judge.score_in(text)
            if score is not None:
                return "value", score
            why = f"there is no {judge.setting}.score from least to most in {brief(text)}"
        return "error", f"{why}, the last of {judge.options['tries']} replies"

    def _text(self, fields: dict[str, Any], number: int, limit_s: float) -> str:
        asked = json.dumps([fields, number], sort_keys=True)
        name = hashlib.sha256(asked.encode()).hexdigest()
        with self._locked(f"{name[:2]}/{name}.json") as file:
            with contextlib.suppress(ValueError):  # none is there, or a kill has left half of it
                return str(json.loads(file.read())["reply"])
            reply = self._reply(fields, limit_s)
            text = chat_text(reply)
            self._spend(tokens=self._tokens(reply))
            if json.loads(reply)["choices"][0].get("finish_reason") == "length":
                raise BadValueError(  # a number in it may be no verdict
                    f"a reply that was cut off at {self._judge.setting}.max_tokens: {brief(text)}"
                )
            file.seek(0)
            file.truncate()
            file.write(json.dumps({"request": fields, "reply": text}).encode())
        return text

    def _tokens(self, reply: bytes) -> int:
        usage = json.loads(reply).get("usage")
        tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
        if isinstance(tokens, int) and tokens >= 0:
            return tokens
        if self._judge.options["budget_tokens"] is None:
            return 0
        raise UserError(
            f"{self._judge.setting}.budget_tokens cannot be kept, as replies of {self._judge} "
            "have no usage.total_tokens; set budget_requests in its place."
        )

    def _post(self, fields: dict[str, Any], limit_s: float) -> bytes:
        self._spend(requests=1)
        try:
            return super()._post(fields, limit_s)
        except NoReplyError as error:
            self._spend(requests=0 if error.was_sent else -1)  # one refused costs nothing
            raise

    def _spend(self, requests: int = 0, tokens: int = 0) -> None:
        """Count a cost; `UserError`: a request for which nothing is left."""
        with self._locked("spent") as file:
            try:
                spent = [*map(int, file.read().split())] or [0, 0]
            except ValueError as error:
                raise UserError(
                    f"{self._judge.setting}.cache={self._folder} has no count of costs: {error}"
                ) from None
            for name, count in zip(("budget_requests", "budget_tokens"), spent):
                budget = self._judge.options[name]
                if requests > 0 and budget is not None and count >= budget:
                    raise UserError(
                        f"{self._judge.setting}.{name}={budget}: replies in {self._folder} cost "
                        f"{count}, and no reward, no training. Raise {name}, and resume the job."
                    )
            file.seek(0)  # it is never empty meanwhile, as a kill would leave it
            file.write(b"%20d %20d\n" % (spent[0] + requests, spent[1] + tokens))

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[BufferedRandom]:
        """A file of the folder, for this thread alone; `UserError`: it cannot be used."""
        path = self._folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
                while True:
                    with contextlib.suppress(BlockingIOError):
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    progress.made()  # another has it, and may wait for its server
                    if self._closed.wait(LOOK_S):
                        raise UserError(f"{self._judge} is not asked any more: the job ends.")
                try:
                    yield file
                    file.flush()
                finally:  # closing is not enough where a process was forked meanwhile
                    fcntl.flock(file, fcntl.LOCK_UN)
        except OSError as error:
            raise UserError(
                f"{self._judge.setting}.cache={self._folder} cannot be used: {error}. Give a "
                "folder that can be written, with room and locks."
            ) from None


@dataclass
class RewardServers:
    """Web servers in place of a function; samples wait for them up to `init_timeout_s`."""

    spec: RewardServersSpec
    init_timeout_s: float

    def __post_init__(self) -> None:
        self.kind = JudgeWorker if isinstance(self.spec, JudgeSpec) else UrlWorker
        # The server that the next worker asks first.
        self.firsts = itertools.cycle(range(len(self.spec.urls)))
