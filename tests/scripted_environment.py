# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""An environment in the process of a test, whose replies come after a while, in any order."""

import random

from nemo_aligner.generation.interface import Reply


def reply_to(prompt, responses, longest=6):
    """A reply that depends on all that was said: (observation, reward, done)."""
    draws = random.Random(str((list(prompt), [list(each) for each in responses])))
    observation = [draws.randrange(200) for _ in range(draws.randint(1, longest))]
    return observation, draws.random(), draws.random() < 0.25


class ScriptedEnvironment:
    """An `Environment` of the engine.

    Args:
        reply: (prompt, responses so far), ids, to (observation, reward, done).
        max_turns: of a conversation.
        seed: of the order in which replies come.
    """

    def __init__(self, reply=reply_to, max_turns=3, seed=0):
        self.reply, self.max_turns = reply, max_turns
        self.draws = random.Random(seed)
        self.waiting, self.open, self.most_waiting = [], set(), 0
        self.logprobs = {}  # by conversation: of the tokens of its responses

    def submit(self, number, seed, prompt, responses, details):
        """The number of a record, where there is one, must be three times the seed."""
        assert (number in self.open) == (len(responses) > 1)
        assert details.record in (None, 3 * seed)
        self.logprobs.setdefault(number, []).extend(details.logprobs or ())
        self.open.add(number)
        self.waiting.append((number, prompt, responses))
        self.most_waiting = max(self.most_waiting, len(self.waiting))

    def replies(self, wait):
        come = [each for each in self.waiting if self.draws.random() < 0.2]
        if wait and not come:
            come = self.waiting[:1]
        self.waiting = [each for each in self.waiting if each not in come]
        found = {}
        for number, prompt, responses in come:
            observation, reward, done = self.reply(prompt, responses)
            found[number] = Reply(tuple(observation), reward, done)
            if done:
                self.open.discard(number)
        return found

    def end(self, number):
        self.open.remove(number)
