# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Rewards of web servers: texts go to them as JSON, and scores come back (docs/rewards.md). To
`RewardFunction` they look like worker processes; each asks one of the addresses, and the next one
when that does not reply.
"""

import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from nemo.utils import logging

from nemo_aligner.config.reward_models import RewardServersSpec
from nemo_aligner.core.endings import progress
from nemo_aligner.core.errors import LostPeerError, one_line
from nemo_aligner.servers.reward_worker import (
    ALL_COLUMNS,
    BadScoreError,
    Outcome,
    Sample,
    read_score,
)
from nemo_aligner.servers.web import NoReplyError, error_text, post_json

MAX_LOST = 3  # servers that end or fall silent with the same samples, which may be the reason
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0
TAKEN = ("query", "prompts", "responses", "lengths")  # names of a request that no column has
SCORES = ("rewards", "scores", "reward", "score")


class RewardServers:
    """Web servers in place of `Workers`; samples wait for them up to `init_timeout_s`."""

    described = ("lengths", ALL_COLUMNS)

    def __init__(self, spec: RewardServersSpec, init_timeout_s: float):
        self.spec, self.init_timeout_s = spec, init_timeout_s
        self.closed = threading.Event()
        self._firsts = itertools.cycle(range(len(spec.urls)))

    def start(self) -> "UrlWorker":
        return UrlWorker(self, next(self._firsts))

    def end(self, worker: Any) -> None:
        """Nothing to do."""

    def close(self) -> None:
        self.closed.set()


class UrlWorker:
    """Has samples scored by a server; a `WorkerProcess` for `RewardFunction`."""

    def __init__(self, servers: RewardServers, first: int):
        self._servers, self._place = servers, first
        self._outcomes: deque[Outcome] = deque()

    def is_alive(self) -> bool:
        return True

    def send(self, samples: Sequence[Sample], timeout_s: float) -> None:
        """Have samples scored, each within `timeout_s`; `LostPeerError`: no server replied."""
        try:
            scores = _scores_in(self._reply(samples, timeout_s * len(samples)))
            if len(scores) != len(samples):
                raise BadScoreError(f"it gave {len(scores)} scores for {len(samples)} samples")
        except (NoReplyError, BadScoreError) as error:
            self._outcomes.extend([("error", str(error).rstrip("."))] * len(samples))
        else:
            self._outcomes.extend(map(_outcome, scores, samples))

    def receive(self, timeout_s: float) -> Outcome:
        return self._outcomes.popleft()

    def _reply(self, samples: Sequence[Sample], limit_s: float) -> bytes:
        """The reply of the first server that gives one."""
        servers, spec, lost, pause = self._servers, self._servers.spec, 0, FIRST_PAUSE_S
        fields, begin = _fields(samples), time.monotonic()
        for tries in itertools.count(1):
            try:
                return post_json(spec.urls[self._place], fields, spec.token, limit_s, spec.tls)
            except NoReplyError as error:
                lost += error.was_sent
                if not error.may_pass or lost == MAX_LOST:
                    raise
                waited = time.monotonic() - begin
                if waited > servers.init_timeout_s or servers.closed.is_set():
                    raise LostPeerError(
                        f"{spec} did not reply for {waited:.0f} s: {error} Check "
                        f"{spec.setting}, or start it again, and then this job."
                    ) from None
                if tries == 1:
                    logging.warning(f"{error} Its samples are sent again.")
            progress.made()
            self._place = (self._place + 1) % len(spec.urls)
            if tries % len(spec.urls) == 0:
                servers.closed.wait(pause)
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
    """The scores in a reply, a list or an object with one; `BadScoreError` if there are none."""
    try:
        reply = json.loads(content)
    except ValueError:
        reply = None
    if isinstance(reply, dict):
        reply = next((reply[name] for name in SCORES if name in reply), None)
    if isinstance(reply, int | float):
        reply = [reply]
    if not isinstance(reply, list):
        said = one_line(error_text(content)) or "nothing"
        raise BadScoreError(f"it gave no list of scores ({' or '.join(SCORES)}), but {said}")
    return reply


def _outcome(score: Any, sample: Sample) -> Outcome:
    count = sample[3]
    if count is None and isinstance(score, list) and len(score) == 1:
        (score,) = score
    try:
        return "score", read_score([score], count)
    except BadScoreError as error:
        return "error", str(error)
