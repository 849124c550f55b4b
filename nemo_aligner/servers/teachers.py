# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Served teachers (`serve_teacher.py`) as objects of the job that trains: `RemoteTeacherClient` of
a student in supervised distillation, `PolicyTeachers` of a policy in a rollout job.

b is the number of samples of a data-parallel rank, S their padded length, K a number of logits.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor

from nemo_aligner.config.server_rules import read_teachers
from nemo_aligner.core.types import Rollout, Scores
from nemo_aligner.parallel.device import get_device
from nemo_aligner.servers import schema
from nemo_aligner.servers.futures import (
    FutureScores,
    PendingReply,
    await_on_model_source,
    try_on_source,
    wait_for_all,
)
from nemo_aligner.servers.scoring_clients import RemoteClient, send_to_fleets


class TeacherLogits(NamedTuple):
    """What a teacher says of samples."""

    topk_logits: Tensor  # float32 [b, S, K], largest behind each token, less the largest
    topk_token_ids: Tensor  # int64 [b, S, K]
    log_sum_exp_logits: Tensor  # float32 [b, S], of all logits less the largest


class RemoteTeacherClient(RemoteClient):
    """A served teacher, on one server or several. Arguments and errors as of `RemoteClient`, with
    the section `remote_teacher` and the student as the policy. `ServerUnreachableError`: no server
    within `init_timeout_s`. `ServerRequestError`: it has another tokenizer, or gives no logits.
    """

    WANTED: tuple[str, ...] = TeacherLogits._fields  # outputs of the server

    def __init__(self, cfg: DictConfig, tokenizer: object, max_length: int | None = None):
        super().__init__(cfg, "remote_teacher", tokenizer, max_length)
        specs = read_teachers(self.cfg)
        self.names = [spec.name or spec.endpoint for spec in specs]
        self.connect(specs, schema.teacher_endpoint(self.WANTED))
        try:
            # Before anything is generated: the longest sample may exceed the teacher's context.
            count, longest = len(specs), max_length or 1
            tokens = torch.zeros(count, longest, dtype=torch.int64)
            self._found(tokens, torch.full((count,), longest), self.names)
        except Exception:
            self.close()
            raise

    def logits(self, tokens: Tensor, lengths: Tensor) -> TeacherLogits:
        """The teacher's logits behind each token of this data-parallel rank's samples, int64
        [b, S], padded on the right; some sample has S tokens. Every rank of the job calls it.
        `ServerRequestError`: on every rank, with the cause.
        """
        found = self._found(tokens, lengths, self.names * len(tokens))
        return TeacherLogits(**{**found, "topk_token_ids": found["topk_token_ids"].long()})

    def _found(self, tokens: Tensor, lengths: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        asked = _Asked(self, tokens, lengths, names)
        wait_for_all(asked.pending)
        return asked.result()


class _Asked:
    """What teachers are asked about samples, each about those that have its name in `names`."""

    def __init__(
        self, client: RemoteTeacherClient, tokens: Tensor, lengths: Tensor, names: Sequence[str]
    ):
        self._client, self._size = client, tokens.shape
        self._rows = {
            name: torch.tensor([row for row, own in enumerate(names) if own == name])
            for name in dict.fromkeys(names)
        }
        samples = {"response_tokens": tokens.cpu(), "response_lengths": lengths.cpu()}

        def send() -> PendingReply:
            payloads = {}
            for name, rows in self._rows.items():
                share: Any = {key: each[rows] for key, each in samples.items()}
                payloads[name] = client.payload(share)
            return send_to_fleets(client._fleets, payloads)

        self._reply = try_on_source(send)
        self.pending = () if self._reply is None else (self._reply,)

    def result(self) -> dict[str, Tensor]:
        """What is `WANTED`, [b, S, ...]; every rank of the model-parallel group calls it."""
        replies = await_on_model_source(self._reply)
        found: dict[str, Tensor] = {}
        for name, rows in self._rows.items():
            for wanted in self._client.WANTED:
                # Requests may be wider than the samples, or narrower.
                array = torch.from_numpy(np.array(replies[name][wanted][:, : self._size[1]]))
                empty = array.new_zeros(*self._size, *array.shape[2:])
                found.setdefault(wanted, empty)[rows, : array.size(1)] = array
        return found


class PolicyTeachers(RemoteTeacherClient):
    """A served teacher of a policy, or several, each for its share of the prompts; it gives
    log-probs of the policy's tokens. `named`: from the numbers of records, int64 [b], to the names
    of their teachers; None: there is one teacher.
    """

    WANTED = ("log_probs",)

    def __init__(
        self,
        cfg: DictConfig,
        tokenizer: object,
        max_length: int | None = None,
        named: Callable[[Tensor], Sequence[str]] | None = None,
    ):
        super().__init__(cfg, tokenizer, max_length)
        self._named = named

    def beside(self, scores: FutureScores, rollout_batch: Rollout) -> FutureScores:
        """Ask for the log-probs of a micro-batch; returns at once, and they come with `scores`."""
        tokens, lengths = rollout_batch["response_tokens"], rollout_batch["response_lengths"]
        names = self._named(rollout_batch["record"]) if self._named else self.names * len(tokens)
        return _TaughtScores(scores, _Asked(self, tokens, lengths, names))


class _TaughtScores(FutureScores):
    def __init__(self, scores: FutureScores, asked: _Asked):
        self._scores, self._asked = scores, asked
        self.pending = (*scores.pending, *asked.pending)

    def scores(self) -> Scores:
        log_probs = self._asked.result()["log_probs"][:, :-1].to(get_device())
        return dataclasses.replace(self._scores.scores(), teacher_logprobs=log_probs)
