# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A judge: a language model that is asked for rewards; a folder keeps and counts its replies."""

import contextlib
import fcntl
import hashlib
import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from io import BufferedRandom
from pathlib import Path
from typing import Any

from nemo_aligner.config.server_rules import JudgeSpec
from nemo_aligner.core.endings import progress
from nemo_aligner.core.errors import UserError
from nemo_aligner.servers.web import NoReplyError, RewardServers, UrlWorker, chat_text
from nemo_aligner.servers.worker import BadValueError, Outcome, Sample, brief

LOOK_S = 0.05  # between looks at a file that another worker has


class JudgeWorker(UrlWorker):
    """Has samples scored by a judge, of a `JudgeSpec`, one after the other."""

    most = 1

    def __init__(self, servers: RewardServers, first: int):
        super().__init__(servers, first)
        assert isinstance(servers.spec, JudgeSpec)
        self._judge, self._samples = servers.spec, deque[Sample]()
        self._folder = Path(servers.spec.options["cache"]).expanduser()

    def load(self) -> Sequence[str]:
        self._spend()
        return "lengths", *self._judge.columns

    def send(self, samples: Sequence[Sample], timeout_s: float) -> None:
        self._samples = deque(samples)

    def receive(self, timeout_s: float) -> Outcome:
        """The score of the next sample; `UserError`: the budget is spent; or see `UrlWorker`."""
        judge, (prompt, response, _, _, columns), why = self._judge, self._samples.popleft(), ""
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
