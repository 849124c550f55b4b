# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Several teachers of a policy, without a network: each prompt gets the log-probs of its own."""

from concurrent.futures import Future

import torch

from nemo_aligner.core.types import Scores
from nemo_aligner.servers.teachers import PolicyTeachers
from tests.ppo_fakes import FakeFuture


class FakeFleet:
    """Its log-prob of a token is the token times `factor`; of columns that were sent."""

    def __init__(self, factor):
        self.factor, self.sent = factor, []

    def submit(self, payload):
        tokens = payload["tokens"]
        self.sent.append(payload)
        future = Future()
        following = torch.from_numpy(tokens).roll(-1, 1).float() * self.factor
        future.set_result({"log_probs": following.numpy()})
        return future

    describe = staticmethod(lambda: "a fake")


def test_each_sample_is_sent_to_its_teacher_and_gets_its_log_probs_back():
    teachers = PolicyTeachers.__new__(PolicyTeachers)
    teachers._fleets = {name: FakeFleet(factor) for name, factor in (("a", 1), ("b", 100))}
    teachers.fingerprint, teachers.pad_to_length, teachers.max_length = "f", None, 64
    named = {40: "b", 41: "a", 42: "b"}
    teachers._named = lambda records: [named[record] for record in records.tolist()]
    tokens = torch.arange(1, 31).view(3, 10)
    lengths = torch.tensor([6, 10, 4])
    rollout = {"response_tokens": tokens, "response_lengths": lengths}
    rollout["record"] = torch.tensor([42, 41, 40])
    scores = FakeFuture([], "scored", Scores(torch.ones(3)))
    found = teachers.beside(scores, rollout).scores()
    assert found.rewards.tolist() == [1, 1, 1]
    assert [len(fleet.sent) for fleet in teachers._fleets.values()] == [1, 1]
    assert teachers._fleets["b"].sent[0]["sequence_lengths"].flatten().tolist() == [6, 4]
    for row, factor in enumerate((100, 1, 100)):
        span = slice(0, int(lengths[row]) - 1)
        wanted = (tokens[row, 1:] * factor).float()
        assert found.teacher_logprobs[row, span].equal(wanted[span])
