# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Rewards of a judge: of a scripted server, and of one of Hugging Face with a language model."""

import contextlib
import importlib.util
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections import Counter

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from nemo_aligner.config.defaults import complete_config
from nemo_aligner.config.server_rules import read_web_rewards
from nemo_aligner.config.values import plain_dict
from nemo_aligner.core.errors import ConfigError, LostPeerError, UserError
from nemo_aligner.servers.ports import find_free_port
from nemo_aligner.servers.reward_function import RewardFunction, RewardFunctionError
from nemo_aligner.servers.web import RewardServers
from tests.hugging_face import SIZES
from tests.json_server import JsonServer
from tests.patience import patience, wait_until
from tests.unit.test_config_checks import check

pytestmark = pytest.mark.slow

ASKED = {"model": "m", "prompt": "Rate {response} as {prompt}", "least": 0, "most": 10}


def judge_spec(url, cache, **changes):
    cfg = plain_dict(complete_config({}, "gpt_rs_actor"))
    options = {"url": url, "cache": str(cache), "score": r"Score: (\S+)", **ASKED, **changes}
    options = {**cfg["trainer"]["rs"], "judge": {**cfg["trainer"]["rs"]["judge"], **options}}
    return read_web_rewards(options, "trainer.rs")


def rewards(url, cache, fallback=None, timeout_s=5.0, workers=4, init_timeout_s=60.0, **changes):
    servers = RewardServers(judge_spec(url, cache, **changes), init_timeout_s)
    return RewardFunction(
        servers, None, workers, timeout_s, fallback, section="trainer.rs", gives_columns=True
    )


def score(source, *responses):
    prompts = [f"p{number}" for number in range(len(responses))]
    return source.score(prompts, list(responses), [1] * len(responses)).tolist()


def says(text, tokens=7):
    return {"choices": [{"message": {"content": text}}], "usage": {"total_tokens": tokens}}


def by_length(_path, fields):
    """The score is the number of letters of the response."""
    return says(f"Score: 3? No. Score: {len(fields['messages'][-1]['content'].split()[1])}")


def test_what_a_judge_is_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("NEMO_ALIGNER_REWARD_TOKEN", "a-token")
    (tmp_path / "rubric.txt").write_text('"{response}" {answer} {parts} {{"score": 1}}')
    more = {"max_tokens": None, "response_format": {"type": "json_object"}}
    files = {"prompt": str(tmp_path / "rubric.txt"), "system": "You judge {prompt}"}
    with JsonServer(lambda *_: says('{"score": 2}')) as server:
        with rewards(server.url, tmp_path, score="score", request=more, **files) as source:
            assert source.columns == ["answer", "parts"]
            columns = {"answer": "{prompt}", "parts": ["é", 1], "other": 5}
            assert source.score(["2+2="], ["{answer}"], [1], [columns]).tolist() == [2.0]
    texts = ["You judge 2+2=", '"{answer}" {prompt} ["é", 1] {"score": 1}']
    messages = [{"role": r, "content": text} for r, text in zip(("system", "user"), texts)]
    expected = {"model": "m", "messages": messages, "temperature": 0.0, "seed": 0}
    assert server.requests == [expected | {"response_format": {"type": "json_object"}}]
    assert server.headers[0]["Authorization"] == "Bearer a-token"


def test_the_score_in_a_reply(tmp_path):
    forms = (r"Score: (\S+)", r"Score: (?:(\d+)|none)", "score", "verdict.score")
    specs = [judge_spec("http://j", tmp_path, score=form) for form in forms]
    text, optional, field, deep = (spec.score_in for spec in specs)
    assert text("Score: 1\nno, Score: 7.5") == 7.5 and optional("Score: 4, Score: none") == 4.0
    assert field('Well: ```json\n{"why": "{", "score": 4}\n```') == 4.0
    assert field('{"score": "4.5"} {"score": 5, "a": {"score": 6}} {"b": 1}') == 5.0
    assert deep('{"score": 1, "verdict": {"score": 2}}') == 2.0 and deep('{"verdict": 3}') is None
    for each in ("NaN", "inf", "11", "-1", "7/10", ""):
        assert text(f"Score: {each}") is None
    for each in ("NaN}", "1e999}", "true}", "[3]}", "4", '{"score":' * 3000):
        assert field('{"score": ' + each) is None


def test_a_reply_without_a_score_is_asked_for_again(tmp_path):
    def reply(_path, fields):
        return says("Score: 9" if fields["seed"] == 2 and fields["temperature"] == 1 else "hm")

    words = "trainer.rs.judge.score .* 'hm', the last of 2 replies.* response 'r'.*_fn_fallback"
    with JsonServer(reply) as server:
        for _ in range(2):  # also from the folder
            with rewards(server.url, tmp_path) as source:
                assert score(source, "r") == [9.0]
        asked = [(each["seed"], each["temperature"]) for each in server.requests]
        assert asked == [(0, 0), (1, 1), (2, 1)]
        with rewards(server.url, tmp_path, tries=2) as source:
            with pytest.raises(RewardFunctionError, match=words):
                score(source, "r")
        with rewards(server.url, tmp_path, tries=1, fallback=-2.0) as source:
            assert score(source, "r") == [-2.0]
        assert len(server.requests) == 3


CUT = {**says('They wrote "Score: 10", but'), "usage": []}  # what a server may send
CUT["choices"][0]["finish_reason"] = "length"


@pytest.mark.parametrize(
    "reply, words, tries",
    [
        ((500, b'{"error": {"message": "no"}}'), "HTTP 500: .*no", 1),
        ((200, b"<html>"), "something else than a chat completion: <html>", 3),
        ({"choices": [{"message": {"content": ["a"]}}]}, "than a chat completion", 3),
        (says(None), "score from least to most in ''", 3),
        (CUT, "cut off at trainer.rs.judge.max_tokens", 3),
        (None, r"within 0.3 s \(reward_fn_timeout_s\)|broke off", 3),
    ],
)
def test_faults_of_a_server_are_one_error_or_the_fallback(tmp_path, reply, words, tries):
    with JsonServer(lambda *_: reply) as server:
        with rewards(server.url, tmp_path, timeout_s=0.3) as source:
            with pytest.raises(RewardFunctionError, match=words) as caught:
                score(source, "r")
        assert "\n" not in str(caught.value) and len(server.requests) == tries
        with rewards(server.url, tmp_path, timeout_s=0.3, fallback=-7.0) as source:
            assert score(source, "r") == [-7.0]
        is_kept = reply == says(None)  # others are asked for again
        assert len(server.requests) == (tries if is_kept else 2 * tries)


def test_a_server_that_is_busy_says_when_to_come_back(tmp_path):
    times, busy = [], iter([(429, b"", {"Retry-After": "2"}), (503, b"")])

    def reply(*given):
        times.append(time.monotonic())
        return next(busy, None) or by_length(*given)

    with JsonServer(reply) as server, rewards(server.url, tmp_path, budget_requests=1) as source:
        assert score(source, "abcd") == [4.0]
    assert times[1] - times[0] >= 2.0 > times[2] - times[1]
    with rewards(server.url, tmp_path, 1.0, init_timeout_s=0.2) as source:  # it has ended
        with pytest.raises(LostPeerError, match=r"the judge m at .* Check trainer.rs.judge"):
            score(source, "new")


def test_nothing_is_asked_twice_and_numbers_do_not_depend_on_order(tmp_path):
    numbers = iter(range(1000))  # other ones each time, as of a server that batches requests

    def reply(*_):
        time.sleep(0.02)
        return says(f"Score: {next(numbers) / 100}")

    names = [f"r{number}" for number in range(6)]
    with JsonServer(reply) as server, rewards(server.url, tmp_path, workers=8) as source:
        orders = [[("p", r, 1, None, {}) for r in each] for each in (names, names[::-1])]
        first, last = (future.result() for future in [source._submit(each) for each in orders])
    assert first == last[::-1] and len(set(first)) == 6 == len(server.requests)
    kept = sorted(tmp_path.glob("*/*.json"))
    kept[0].write_bytes(kept[0].read_bytes()[:-9])  # as a kill may leave it
    with JsonServer(by_length) as server, rewards(server.url, tmp_path, workers=1) as source:
        again = source.score(["p"] * 6, names, [1] * 6).tolist()
    assert sum(a != pytest.approx(b) for a, b in zip(again, first)) == 1 == len(server.requests)
    assert (tmp_path / "spent").read_text().split() == ["7", "49"]


def test_processes_that_share_a_folder_ask_once_together_and_one_may_be_killed(tmp_path):
    asked, pause_s, fork = Counter(), [2.0], multiprocessing.get_context("fork")

    def reply(path, fields):
        asked[json.dumps(fields)] += 1
        time.sleep(pause_s[0])
        return by_length(path, fields)

    def score_all():
        with rewards(server.url, tmp_path) as source:
            assert score(source, *("r" * length for length in range(1, 9))) == [*range(1, 9)]

    with JsonServer(reply) as server:
        killed, *others = (fork.Process(target=score_all) for _ in range(3))
        killed.start()
        wait_until(lambda: len(server.requests) == 4)
        killed.kill()
        killed.join(10)
        pause_s[0] = 0.05
        for process in others:
            process.start()
        for process in others:
            process.join(patience(60))
            assert process.exitcode == 0
    assert len(asked) == 8 and sum(asked.values()) == 8 + 4  # those of the killed one again


def test_a_budget_ends_the_job_and_not_a_reward(tmp_path):
    responses = ["r" * length for length in range(1, 7)]
    with JsonServer(by_length) as server:
        for budget in ({"budget_requests": 4}, {"budget_tokens": 22}):  # 7 tokens each
            for _ in range(2):  # a job that is started again has no new one
                with rewards(server.url, tmp_path, fallback=0.0, workers=1, **budget) as source:
                    with pytest.raises(UserError, match="Raise budget_.*resume") as caught:
                        score(source, *responses)
                assert len(server.requests) == 4 and f"{[*budget][0]}=" in str(caught.value)
        with rewards(server.url, tmp_path, budget_requests=6) as source:
            assert score(source, *responses) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        assert len(server.requests) == 6
    silent = {**says("Score: 1"), "usage": None}
    with JsonServer(lambda *_: silent) as server:
        with rewards(server.url, tmp_path / "b", 0.0, budget_tokens=100) as source:
            with pytest.raises(UserError, match="no usage.total_tokens; set budget_requests"):
                score(source, "r")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="judge.cache=.*file cannot be used: .*exists"):
        rewards("http://j", tmp_path / "file")


REFUSED = """
url=null | judge.model='m' has no effect without a judge; set its address
url=localhost:8000 | judge.url=localhost:8000 must be an address http://
cache=null | judge.cache is not set; a judge
most=0 | judge.least=0 must be below trainer.ppo.judge.most=0
prompt=rubric.txt | 'rubric.txt' is no file, or has no {response} to judge
system=rules.txt | judge.system=rules.txt is no file; correct its path
prompt='{response} {' | cannot be used: Single '{' encountered in format string. Write {{
prompt='{response} {"score": 1}' | {"score"...} names no column. Write {{
prompt='{response!r}' | {response...} names no column
score='(a' | judge.score=(a cannot be used: missing
score='(a)(b)' | it has 2 groups; one is the score
tries=0 | judge.tries=0 must be at least 1
request=7 | judge.request=7 must be a mapping
../rewards_per=token | rewards_per=token: a judge gives rewards per response
../reward_fn=f.py:g | reward_fn=f.py:g gives the rewards, and so does trainer.ppo.judge.url=
../reward_tls_ca_file=no.pem | no.pem
"""


@pytest.mark.parametrize(
    "line", ["request={top_p: null, x: {y: 1}} | ", *REFUSED.split("\n")[1:-1]]
)
def test_what_is_refused(tmp_path, line):
    change, words = line.split(" | ")
    keys = {"url": "http://j/v1", "score": "score", "cache": str(tmp_path), **ASKED}
    keys["prompt"] = f"'{ASKED['prompt']}'"
    given = [f"trainer.ppo.judge.{name}={value}" for name, value in keys.items()]
    given += ["trainer.ppo.advantage_estimator=grpo", "model.ppo.num_rollouts_per_prompt=4"]
    given.append(f"trainer.ppo.judge.{change}".replace("judge.../", ""))
    refused = pytest.raises(ConfigError, match=re.escape(words) or None)
    with refused if words else contextlib.nullcontext():
        assert check("gpt_ppo_actor", tmp_path, *given) == []


# ---- a language model

MISSING = [n for n in ("fastapi", "openai") if importlib.util.find_spec(n) is None]


@pytest.mark.skipif(
    bool(MISSING), reason=f"`transformers serve` needs {' and '.join(MISSING)}: not installed"
)
def test_a_language_model_that_is_served_gives_the_scores(tmp_path):
    """It is random, and says digits; the oracle is the model in this process."""
    words = {word: number for number, word in enumerate(["<eos>", *map(str, range(10))])}
    tokens = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<eos>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    ends = {"vocab_size": 11, "pad_token_id": 0, "eos_token_id": None}
    transformers.set_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | ends))
    for each in (tokenizer, model):
        each.save_pretrained(tmp_path / "model")
    port, program = find_free_port(), "from transformers.cli.transformers import main; main()"
    command = [sys.executable, "-c", program, "serve", str(tmp_path / "model"), "--device", "cpu"]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    server = subprocess.Popen([*command, "--port", str(port)], env=offline)
    given = (f"http://127.0.0.1:{port}/v1/chat/completions", tmp_path / "kept", None, 60.0)
    changes = {"model": str(tmp_path / "model"), "prompt": "{response}", "max_tokens": 6}
    changes |= {"score": r"(\d)", "init_timeout_s": patience(120)}
    responses = ["1 2", "3", "9 9 9", "0", "5 6"]
    try:
        with rewards(*given, budget_tokens=10000, **changes) as source:  # waits for the server
            found = score(source, *responses)
    finally:
        server.terminate()
        server.wait(patience(30))
    for response, reward in zip(responses, found):
        asked = tokenizer(response, return_tensors="pt")
        said = model.generate(**asked, max_new_tokens=6, do_sample=False)[0].tolist()
        assert reward == next(token - 1.0 for token in reversed(said) if token > 0)
    assert len(set(found)) > 1
    with rewards(*given, **changes) as source:  # nobody is there any more
        assert score(source, *reversed(responses)) == found[::-1]
