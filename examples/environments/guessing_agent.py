# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The game of `guessing.py` as an agent: a program that finds the policy of a training job at an
OpenAI-compatible address (docs/rewards.md, "Agents").

    pip install openai
    python guessing_agent.py http://127.0.0.1:5600

Start as many as are to play at a time; each ends when the job is gone. The job has
`model.ppo.environment.port=5600` in place of `path`, and prompts that are conversations.
"""

import json
import os
import random
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from guessing import GuessingGame


def main() -> None:
    from openai import OpenAI

    token = os.environ.get("NEMO_ALIGNER_TOKEN", "none")
    client = OpenAI(base_url=sys.argv[1], api_key=token)
    while (session := post(f"{sys.argv[1]}/v1/sessions", {}, token)) is not None:
        if session:  # else there is none for a while
            policy = client.with_options(base_url=session["base_url"])
            reward = play(session, policy.chat.completions.create)
            post(f"{session['base_url']}/reward", {"reward": reward}, token)


def play(session: dict, ask: Callable[..., Any]) -> float:
    """Play a game; returns its reward.

    Args:
        session: with the messages to begin with, and a seed: a run that is repeated, or resumed,
            and another agent that has to go on with this game, draw the same secret.
        ask: `create` of the `openai` client.
    """
    random.seed(session["seed"])
    game, messages = GuessingGame(), session["messages"]
    state = game.reset(messages[-1]["content"])
    while True:
        choice = ask(model="policy", messages=messages).choices[0]
        said = choice.message.content
        hint, reward, done = game.step(state, said)
        if done or choice.finish_reason != "stop":  # cut off: the policy cannot go on
            return reward
        answer = {"role": "assistant", "content": said}
        messages = [*messages, answer, {"role": "user", "content": hint}]


def post(url: str, content: dict, token: str) -> dict | None:
    """What the job replies; None: it is gone."""
    request = urllib.request.Request(url, json.dumps(content).encode(), method="POST")
    request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request) as reply:
            return json.loads(reply.read() or b"{}")
    except OSError as error:
        if isinstance(error, urllib.error.HTTPError) and error.code != 503:  # 503: it is ending
            raise
        return None


if __name__ == "__main__":
    main()
