# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Agents that talk to the policy over HTTP: exact tokens, histories that differ, agents that fall
silent, and the same samples as with the same game as a Python class.
"""

import contextlib
import http.client
import importlib
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nemo_aligner.core.errors import UserError
from nemo_aligner.data.nlp.chat_template import ChatTemplate
from nemo_aligner.generation import GenerationParams, MegatronGenerator
from nemo_aligner.generation.interface import Details, Reply
from nemo_aligner.models.nlp.gpt.megatron_gpt_ppo_actor import MegatronGPTActorModel
from nemo_aligner.servers import agents
from nemo_aligner.servers.agents import AgentDoor, AgentEnvironment
from nemo_aligner.servers.environment import EnvironmentFailedError, PythonEnvironment
from nemo_aligner.servers.ports import find_free_port
from tests import talking_agent
from tests.chat_forms import FAMILIES, write_tokenizer
from tests.patience import patience, wait_until
from tests.scripted_triton import ask
from tests.talking_agent import post
from tests.tiny_models import PPO, tiny_config
from tests.unit.test_turns import LETTERS

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "environments"
TOKEN = "a-token-of-these-tests"
SYSTEM, ASKED = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello?"}
RECORD = {"messages": [SYSTEM, ASKED], "answer": 42}
SILENCE_S, LONGEST = patience(0.6), 96
PARAMS = GenerationParams(max_length=8, temperature=0.9)


def load(folder):
    from nemo.collections.common.tokenizers import AutoTokenizer

    return AutoTokenizer(pretrained_model_name=folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load(write_tokenizer(tmp_path_factory.mktemp("chatml"), FAMILIES["chatml"]))


class Job:
    """An agent environment with its door; the test is the engine and the agents."""

    def __init__(self, tokenizer, **options):
        self.tokenizer = tokenizer
        options = {"timeout_s": 60.0, "longest": 200, "params": PARAMS} | options
        self.environment = AgentEnvironment(
            ChatTemplate(tokenizer), tokenizer, lambda number: RECORD, **options
        )
        self.port, self.said = find_free_port(), {}
        self.door = AgentDoor("127.0.0.1", self.port, self.environment, TOKEN, "port")

    def says(self, *texts, number=0, is_end=True, logprobs=None):
        """The policy responds, letter by letter, to conversation `number`."""
        end = self.tokenizer.tokenizer.convert_tokens_to_ids("<|im_end|>")
        ids = tuple(id_ for text in texts for id_ in self.tokenizer.text_to_ids(text))
        self.said.setdefault(number, []).append(ids + ((end,) if is_end else ()))
        details = Details(is_end, 7, logprobs)
        self.environment.submit(number, 5, (1, 2, 3), tuple(self.said[number]), details)

    def post(self, path, content=None, token=TOKEN):
        return post(self.port, path, content, token, patience(30))

    def take(self):
        status, session = self.post("")
        assert status == 200
        return session

    def chat(self, session, *messages, **more):
        return self.post(f"/{session['id']}/chat/completions", {"messages": messages, **more})


@pytest.fixture
def start(tokenizer):
    with contextlib.ExitStack() as stack:

        def made(**options):
            job = Job(tokenizer, **options)
            stack.callback(job.door.close)
            return job

        yield made


def test_an_agent_that_has_left_gets_no_session(start):
    job = start()
    left = http.client.HTTPConnection("127.0.0.1", job.port)
    left.request("POST", "/v1/sessions", "{}", {"Authorization": f"Bearer {TOKEN}"})
    wait_until(lambda: job.environment._heard > 0)
    left.close()
    job.says("a")
    session = job.take()
    assert job.environment._named(session["id"]).tries == 1


def answer(text):
    return {"role": "assistant", "content": text}


def user(text):
    return {"role": "user", "content": text}


def content(reply):
    status, completion = reply
    assert status == 200, completion
    return completion["choices"][0]["message"]["content"]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tokens_after_a_response_are_those_of_the_template(tmp_path, name):
    family = FAMILIES[name]
    tokenizer = load(write_tokenizer(tmp_path, family))
    talk = [("user", "Hello?"), ("assistant", " x \n"), ("user", "Well, and?")]
    pieces = family.write(talk)
    end = next(n for n, (_, trained) in enumerate(pieces) if trained)
    after = "".join(text for text, _ in pieces[end + 1 :]) + family.generation_prompt
    ids = ChatTemplate(tokenizer).tokenize([after, family.end_of_turn])
    messages = [{"role": role, "content": text} for role, text in talk]
    record = {"messages": messages[:1]}

    def found(response):
        return ChatTemplate(tokenizer).continuation(messages, record, response)

    assert found([5, *ids[1]]) == ids[0]
    assert found([5, 6]) == ids[1] + ids[0]  # cut off, or ended otherwise


def test_a_session_keeps_the_ids_that_were_sampled(start):
    job = start()
    job.says(*"Hello", logprobs=(-0.5,) * 6)  # as no tokenizer would write it
    session = job.take()
    assert session["messages"] == RECORD["messages"] and session["seed"] == 5
    assert session["columns"] == {"answer": 42}
    assert session["base_url"] == f"http://127.0.0.1:{job.port}/v1/sessions/{session['id']}"
    status, first = job.chat(session, SYSTEM, ASKED, logprobs=True, return_token_ids=True)
    choice, ids = first["choices"][0], job.said[0][0]
    assert (status, choice["message"], choice["finish_reason"]) == (200, answer("Hello"), "stop")
    assert tuple(choice["token_ids"]) == ids != tuple(job.tokenizer.text_to_ids("Hello"))
    logprobs = choice["logprobs"]["content"]
    assert [(each["token"], each["logprob"]) for each in logprobs] == [
        (letter, -0.5) for letter in [*"Hello", "<|im_end|>"]
    ]
    assert first["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}

    sent = SYSTEM, ASKED, answer("Hello") | {"refusal": None}, user("More")
    replies = []
    for _ in range(2):  # a client repeats what it gets no reply to
        thread = threading.Thread(
            target=lambda: replies.append(content(job.chat(session, *sent, reward=0.25)))
        )
        thread.start()
        replies and thread.join()
    text = "\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
    observation = tuple(job.tokenizer.text_to_ids(text))
    assert job.environment.replies(wait=True) == {0: Reply(observation, 0.25, False)}
    assert job.post(f"/{session['id']}/reward", {"reward": 1})[0] == 400
    job.says("ok", is_end=False)
    wait_until(lambda: len(replies) == 2, patience(10), lambda: str(replies))
    assert replies == ["ok", "ok"] and content(job.chat(session, SYSTEM, ASKED)) == "Hello"
    status, last = job.chat(session, *sent)
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["usage"]["prompt_tokens"] == 9 + len(observation)
    assert job.post(f"/{session['id']}/reward", {"reward": 1})[0] == 200
    assert job.environment.replies(wait=True) == {0: Reply((), 1.0, True)}
    status, error = job.chat(session, *sent)
    assert status == 404 and "it is over" in error["error"]["message"]
    assert job.environment.replies(wait=False) == {}


@pytest.mark.parametrize(
    "messages, words",
    [
        ((SYSTEM, ASKED, answer("hello"), user("x")), "message 3 is {'role': 'assistant'"),
        ((ASKED, answer("Hello"), user("x")), "message 1 is {'role': 'user'"),
        ((SYSTEM, user("Hello!")), "'content': 'Hello!'}, but in this session it was"),
        ((SYSTEM,), "message 2 of this session is missing"),
        ((SYSTEM, ASKED, user("x")), "message 3 is {'role': 'user'"),
        ((SYSTEM, ASKED, answer("Hello")), "message 4 of this session is missing"),
        ((SYSTEM, ASKED, answer("Hello"), user("x"), answer("y")), "not said what follows"),
        ((SYSTEM, ASKED, answer("Hello"), user([{"type": "image_url"}])), "type 'image_url'"),
        ((), "an empty list"),
        (("x",), "message 1 of field 'messages'"),
    ],
)
def test_a_history_that_differs_is_refused(start, messages, words):
    job = start()
    job.says("Hello")
    session = job.take()
    status, error = job.chat(session, *messages)
    assert status == 400 and words in error["error"]["message"], error
    assert job.environment.replies(wait=False) == {}
    assert content(job.chat(session, SYSTEM, ASKED)) == "Hello"  # the session goes on


@pytest.mark.parametrize(
    "more, refused",
    [
        ({"temperature": 0.9, "n": 1, "stream": False, "tools": [], "max_tokens": 9}, None),
        ({"temperature": 1.0}, "temperature=1.0 is not what this rollout does"),
        ({"n": 2}, "n=2"),
        ({"stream": True}, "stream=True"),
        ({"max_completion_tokens": 7}, "max_completion_tokens=7"),
        ({"stop": ["x"]}, "stop=['x']"),
        ({"tools": [{"type": "function"}]}, "tools those of the session"),
        ({"reasoning_effort": "low"}, "reasoning_effort='low'"),
        ({"logprobs": True}, "computes no logprobs"),
        ({"reward": float("nan")}, "not a finite number"),
        ({"messages": 3}, "must be a list of messages"),
    ],
)
def test_what_a_rollout_does_not_do_is_refused(start, more, refused):
    job = start()
    job.says("Hello")
    status, reply = job.chat(job.take(), SYSTEM, ASKED, **more)
    assert status == (400 if refused else 200)
    assert refused is None or refused in reply["error"]["message"]


@pytest.mark.parametrize(
    "options, is_end, words",
    [
        ({}, False, "exceeds the configured limit length_params.max_length"),
        ({"max_turns": 1}, True, "environment.max_turns=1"),
        ({"longest": 14}, True, "maximum context length is 14"),
    ],
)
def test_a_session_that_cannot_go_on_takes_its_reward(start, options, is_end, words):
    job = start(**options)
    job.says("Hello", is_end=is_end)
    session = job.take()
    status, error = job.chat(session, SYSTEM, ASKED, answer("Hello"), user("More"))
    assert status == 400 and words in error["error"]["message"]
    for reward in (None, "1", float("inf")):
        assert job.post(f"/{session['id']}/reward", {"reward": reward})[0] == 400
    job.post(f"/{session['id']}/reward", {"reward": -2})
    reply = job.environment.replies(wait=True)[0]
    # Not done: the engine ends it, as one that did not end by itself.
    assert reply.reward == -2 and not reply.done and len(reply.observation) > 10


@pytest.mark.parametrize("fallback", [None, -1.0])
def test_the_session_of_a_silent_agent_is_played_again_by_another(start, fallback):
    job = start(timeout_s=SILENCE_S, fallback=fallback, section="model.ppo.environment")
    job.says("Hello")
    first = job.take()
    sent = SYSTEM, ASKED, answer("Hello"), user("More")
    threading.Thread(target=job.chat, args=(first, *sent), daemon=True).start()
    assert not job.environment.replies(wait=True)[0].done
    time.sleep(1.5 * SILENCE_S)  # the policy may take its time
    assert job.environment.replies(wait=False) == {}
    job.says("ok")
    for _ in range(3):  # the same again, and what is refused, are nothing new
        time.sleep(SILENCE_S / 2)
        assert content(job.chat(first, SYSTEM, ASKED)) == "Hello"
        assert job.chat(first, SYSTEM)[0] == 400
    assert job.environment.replies(wait=False) == {}
    second = job.take()
    assert second["id"] != first["id"] and second["messages"] == first["messages"]
    assert job.chat(first, *sent)[0] == 404
    assert content(job.chat(second, SYSTEM, ASKED)) == "Hello"
    assert job.chat(second, *sent[:3], user("Other"))[0] == 400
    assert content(job.chat(second, *sent)) == "ok"
    assert job.environment.replies(wait=False) == {}  # the engine has that observation
    if fallback is None:
        with pytest.raises(EnvironmentFailedError, match="response 2 of a session, 'ok'.*the ag"):
            job.environment.replies(wait=True)
    else:
        assert job.environment.replies(wait=True) == {0: Reply((), fallback, True)}


def test_the_example_wins_with_a_policy_that_halves_what_is_left(start, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    play = importlib.import_module("guessing_agent").play
    job, rewards, low, high = start(), [], 1, 9
    job.says("5!")
    session = job.take()

    def create(model, messages):
        completion = json.dumps(job.chat(session, *messages, model=model)[1])
        return json.loads(completion, object_hook=lambda fields: SimpleNamespace(**fields))

    thread = threading.Thread(target=lambda: rewards.append(play(session, create)))
    thread.start()
    while thread.is_alive():
        for reply in job.environment.replies(wait=False).values():
            more = "more" in job.tokenizer.ids_to_text(list(reply.observation))
            guess = (low + high) // 2
            low, high = (guess + 1, high) if more else (low, guess - 1)
            job.says(f"{(low + high) // 2}!")
    assert rewards == [1.0]


def test_no_agent_is_one_clear_error(start):
    job = start(idle_timeout_s=SILENCE_S, section="model.ppo.environment")
    job.says("Hello")
    with pytest.raises(UserError, match=r"1 session\(s\) wait.*model.ppo.environment.port"):
        job.environment.replies(wait=True)


def test_what_may_not_enter_is_refused(start, monkeypatch):
    job = start()
    job.says("Hello")
    monkeypatch.setattr(agents, "POLL_S", 0.1)
    assert start().post("") == (204, None)
    assert job.post("", token="another-token-123456")[0] == 401
    assert job.post("", "{")[0] == 400 and job.post("", "[]")[0] == 400
    assert job.post("/0/reward", {"reward": 1})[0] == 404 and job.post("/0/other")[0] == 404
    door, mine = ("127.0.0.1", job.port), {"Authorization": f"Bearer {TOKEN}"}
    assert ask(door, "GET", "/v1/sessions", headers=mine)[0] == 501
    with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{job.port}.*the key"):
        AgentDoor(*door, job.environment, None, "the key")
    assert ask(door, "POST", "/v1/sessions", headers=mine)[0] == 200  # also without a body


@pytest.mark.slow
@pytest.mark.parametrize("slots", [3, 16])
def test_agents_get_the_samples_that_a_class_gets(tiny_tokenizer_dir, tmp_path, slots):
    folder = talking_agent.write_tokenizer(tiny_tokenizer_dir, tmp_path / "tokenizer")
    sizes = dict(encoder_seq_length=LONGEST, max_position_embeddings=LONGEST, init_method_std=0.4)
    policy = MegatronGPTActorModel(tiny_config(folder, "llama", ppo=PPO, **sizes))
    tokenizer, template = policy.tokenizer, ChatTemplate(policy.tokenizer)
    records = [{"messages": [user(f"Say {number % 5}")], "answer": number} for number in range(16)]
    ids = [torch.tensor(template.prompt(record)) for record in records]
    lengths = torch.tensor([len(each) for each in ids])
    prompts = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True), lengths
    params = GenerationParams(max_length=8, end_strings=LETTERS, return_logprobs=True)

    def generate(environment):
        generator = MegatronGenerator(policy.model, tokenizer, LONGEST)
        own = {"environment": environment, "slots": slots, "records": torch.arange(16)}
        return generator.generate(*prompts, torch.arange(16) + 100, params, **own)

    game = f"{talking_agent.__file__}:Talk"
    with PythonEnvironment(game, tokenizer, max_turns=2) as environment:
        expected = generate(environment)
    asked = []

    def record(number):
        asked.append(number)
        return records[number]

    environment = AgentEnvironment(template, tokenizer, record, params, LONGEST, max_turns=2)
    door = AgentDoor("127.0.0.1", find_free_port(), environment, None, "port")
    command = [sys.executable, talking_agent.__file__, str(door.port)]
    players = [subprocess.Popen(command) for _ in range(3)]
    found = generate(environment)
    door.close()
    for player in players:
        player.kill()
        player.wait()
    assert sorted(asked) == list(range(16))
    for name in ("response_tokens", "response_lengths", "is_end", "observed"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    rewards = [each.token_rewards.nan_to_num(99.0) for each in (found, expected)]
    assert torch.equal(*rewards)
    assert torch.allclose(found.logprobs, expected.logprobs, atol=1e-5)
    turns = (~found.token_rewards.isnan()).sum(1)
    assert turns.max() == 2 and turns.min() < 2 and 0 < found.is_end.sum() < 16
