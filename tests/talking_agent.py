# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A game in both forms: a class as an environment, and an agent that plays the same over HTTP,
`python talking_agent.py PORT`. Imports nothing heavy.
"""

import contextlib
import http.client
import json
import random
import sys
import time

# What follows a response does not depend on how it ended.
TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def write_tokenizer(tokenizer_dir, folder):
    """A tokenizer with `TEMPLATE`; returns its folder."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


class Talk:
    """An environment whose replies are drawn, in the form of `TEMPLATE`."""

    def reset(self, prompt):
        return [prompt]

    def step(self, state, response):
        state.append(response)
        hint = " ".join(random.choice("abcdefg") for _ in range(1 + len(response) % 4))
        reward = len(response) / 10 + random.random()
        return f"\nuser: {hint}\nassistant: ", reward, len(hint) == 5


def post(port, path, content=None, token=None, timeout_s=60.0):
    """(status, JSON) of a request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    with contextlib.closing(connection):
        body = content if isinstance(content, str) else json.dumps(content or {})
        headers = {"Authorization": f"Bearer {token}"}
        connection.request("POST", f"/v1/sessions{path}", body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b"null")


def play(port):
    """Play `Talk` until the job is gone."""
    while True:
        status, session = post(port, "")
        if status == 200:
            random.seed(session["seed"])
            game, messages, name = Talk(), session["messages"], session["id"]
            state, done = game.reset(""), False
            _, reply = post(port, f"/{name}/chat/completions", {"messages": messages})
            while status == 200:
                said = reply["choices"][0]["message"]["content"]
                text, reward, done = game.step(state, said)
                if done:
                    break
                hint = text.removeprefix("\nuser: ").removesuffix("\nassistant: ")
                messages.append({"role": "assistant", "content": said})
                messages.append({"role": "user", "content": hint})
                request = {"messages": messages, "reward": reward}
                status, reply = post(port, f"/{name}/chat/completions", request)
            post(port, f"/{name}/reward", {"reward": reward})


if __name__ == "__main__":
    while True:  # before the job is there, and after it, until somebody ends this process
        with contextlib.suppress(OSError, http.client.HTTPException):
            play(int(sys.argv[1]))
        time.sleep(0.1)
