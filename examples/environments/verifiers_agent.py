# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Environments of the `verifiers` package as agents (docs/rewards.md, "Agents"): one that
`verifiers.load_environment` knows, by its name, with its arguments as JSON.

    pip install "verifiers<0.2" reasoning-gym
    python verifiers_agent.py ReasoningGymEnv '{"gym": "basic_arithmetic"}' prompts.jsonl
    python verifiers_agent.py ReasoningGymEnv '{"gym": "basic_arithmetic"}' http://127.0.0.1:5600

The first command writes the prompts for the job: `messages`, and in `task` what the environment
knows beside. The second one plays sessions; start as many as are to play at a time. A name that
`verifiers` itself has, such as ReasoningGymEnv, is one of its classes.
"""

import asyncio
import contextlib
import json
import os
import sys

import verifiers
from guessing_agent import post
from openai import AsyncOpenAI


def main() -> None:
    name, arguments, target = sys.argv[1:]
    make = getattr(verifiers, name, None) or (
        lambda **more: verifiers.load_environment(name, **more)
    )
    environment = make(**json.loads(arguments))
    if "://" not in target:
        with open(target, "w") as file:
            for row in environment.get_dataset():
                messages = row.pop("prompt")
                file.write(json.dumps({"messages": messages, "task": row}) + "\n")
        return
    asyncio.run(play_sessions(environment, target, os.environ.get("NEMO_ALIGNER_TOKEN", "none")))


async def play_sessions(environment: verifiers.Environment, url: str, token: str) -> None:
    client = AsyncOpenAI(base_url=url, api_key=token)
    while (session := post(f"{url}/v1/sessions", {}, token)) is not None:
        if session:  # else there is none for a while
            task = {"prompt": session["messages"], **session["columns"]["task"]}
            policy = client.with_options(base_url=session["base_url"])
            state = await environment.rollout(task, policy, "policy")
            await environment.rubric.score_rollout(state, contextlib.AsyncExitStack())
            post(f"{session['base_url']}/reward", {"reward": state["reward"]}, token)


if __name__ == "__main__":
    main()
