# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Rewards of web servers, with real ones."""

import contextlib
import socket
import struct
import threading
import time
from collections import Counter

import numpy as np
import pytest
from chat_models import Sampling, ServedChatModel

from nemo_aligner.config.access import shown_config, shown_url, shown_word
from nemo_aligner.config.server_rules import RewardServersSpec, read_reward_servers
from nemo_aligner.core.errors import ConfigError, LostPeerError, UserError
from nemo_aligner.servers.reward_function import RewardFunction, RewardFunctionError
from nemo_aligner.servers.web import NoReplyError, RewardServers, post_json
from tests.json_server import JsonServer
from tests.patience import patience

pytestmark = pytest.mark.slow

TOKEN = "a-token-of-the-tests"
TEXTS = ["p", "q", "p"], ["x", "yy", "zzz"], [1, 2, 4]


def rewards(*urls, fallback=None, token=TOKEN, per="response", timeout_s=2.0, init_timeout_s=60.0):
    spec = RewardServersSpec("trainer.ppo.reward_fn", urls, token)
    given = RewardServers(spec, init_timeout_s), None, len(urls), timeout_s, fallback, per
    return RewardFunction(*given, section="trainer.ppo", gives_columns=True)


def lengths(_path, fields):
    return {"rewards": [len(text) for text in fields["responses"]]}


def test_texts_and_columns_go_out_and_scores_come_back():
    with JsonServer(lengths) as server, rewards(server.url) as source:
        assert source.score(*TEXTS).tolist() == [1.0, 2.0, 3.0]
        records = [{"answer": "4", "label": 1}, {"answer": ["a", None]}]
        sample = [("2+2=", "4", 2, None, records[0]), ("?", "", 1, None, records[1])]
        assert source._submit(sample).result() == [1.0, 0.0]
    plain, with_columns = server.requests
    columns = dict(zip(("prompts", "responses", "lengths"), TEXTS))
    assert plain == {"query": ["px", "qyy", "pzzz"], "labels": [None] * 3, **columns}
    assert with_columns["answer"] == ["4", ["a", None]] and with_columns["labels"] == [1, None]
    assert server.headers[0]["Authorization"] == f"Bearer {TOKEN}"


@pytest.mark.parametrize(
    "reply",
    [
        {"rewards": [0.5, -1, 2]},
        {"scores": [[0.5], [-1], [2]], "extra_logs": {"x": 1}},
        {"reward": [0.5, -1, 2]},
        [0.5, -1, 2],
    ],
)
def test_forms_of_replies(reply):
    with JsonServer(lambda *_: reply) as server, rewards(server.url, token=None) as source:
        assert source.score(*TEXTS).tolist() == [0.5, -1.0, 2.0]
    assert "Authorization" not in server.headers[0]


@pytest.mark.parametrize(
    "reply, words",
    [
        ((500, b'{"detail": "no such model"}'), "replied with HTTP 500: no such model"),
        ((401, b"who?"), "HTTP 401: who.*may ask for a token, and that of this job is another"),
        ((302, b""), r"HTTP 302: Found .it names http://elsewhere/\?\*\*\*"),
        ([1.0, 2.0], "gave 2 scores for 3 samples"),
        ({"rewards": [1.0, float("nan"), 1.0]}, r"sample 1 of 3: it returned \[nan\]"),
        ({"rewards": [1.0, 1.0, None]}, r"sample 2 of 3: it returned \[None\].*NoneType"),
        ({"error": "out of memory"}, "gave no list of scores .*, but out of memory"),
        ((200, b"<html>"), "gave no list of scores .*, but <html>"),
        pytest.param(
            None, r"broke off the connection|gave no reply within 1.5 s", marks=pytest.mark.full
        ),
    ],
)
def test_what_is_no_score_is_one_error_or_the_fallback(reply, words):
    with JsonServer(lambda *_: reply) as server:
        url = f"{server.url}/rate?key=hidden"
        with rewards(url, timeout_s=0.5, init_timeout_s=10.0) as source:
            with pytest.raises((RewardFunctionError, LostPeerError), match=words) as caught:
                source.score(*TEXTS)
        tries = len(server.requests)
        message = str(caught.value)
        assert caught.type is RewardFunctionError
        assert "trainer.ppo.reward_fn_fallback" in message and f"{server.url}/rate?***" in message
        assert TOKEN not in message and "hidden" not in message and "\n" not in message
        assert tries == (3 if reply is None else 1)  # what another try cannot change
        with rewards(url, timeout_s=0.5, fallback=-7.0) as source:
            scores = source.score(*TEXTS).tolist()
        assert -7.0 in scores and set(scores) <= {-7.0, 1.0}


@pytest.mark.parametrize(
    ("head", "pieces", "words", "may_pass"),
    [
        ("200 OK\r\nContent-Length: 900", [b"x"] * 40, "gave no reply within 0.3 s", True),
        ("200 OK", [b"x"] * 40, "gave no reply within 0.3 s", True),
        ("200 OK\r\nContent-Length: 900", [b"[1, 2]"], r"broke off .* 894 more expected", True),
        ("503 Busy\r\nContent-Length: 900", [b"part"], "HTTP 503: Busy", True),
        ("400 Bad\r\nContent-Length: 900", [b"part"], "HTTP 400: Bad", False),
    ],
)
def test_a_reply_that_is_slow_or_not_whole(head, pieces, words, may_pass):
    def serve(listener):
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            while not connection.recv(1 << 16).endswith(b"{}"):
                pass
            connection.sendall(f"HTTP/1.1 {head}\r\n\r\n".encode())
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(0.1)
            if head[0] != "2":  # reset
                option = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        begin = time.monotonic()
        with pytest.raises(NoReplyError, match=words) as caught:
            post_json(f"http://127.0.0.1:{listener.getsockname()[1]}/", {}, None, 0.3)
    assert caught.value.may_pass == may_pass and time.monotonic() - begin < patience(2)


def test_several_servers_share_the_load_and_the_others_do_the_work_of_a_dead_one():
    asked = Counter()

    def reply(path, fields):
        asked[path] += 1
        if path == "/full":
            return 503, b"later"
        time.sleep(0.02)
        return lengths(path, fields)

    with JsonServer(reply) as server, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        taken.close()  # nobody listens there
        urls = [f"{server.url}/{name}" for name in ("a", "b", "full")]
        with rewards(*urls, f"http://127.0.0.1:{port}/") as source:
            for _ in range(4):
                scores = source.score(["p"] * 60, ["r" * (i % 7) for i in range(60)], [1] * 60)
                assert scores.tolist() == [i % 7 for i in range(60)]
    assert min(asked["/a"], asked["/b"]) >= 4 and asked["/full"] >= 1


def test_a_server_that_comes_later_and_one_that_does_not_come():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        url = f"http://127.0.0.1:{probe.getsockname()[1]}/?key=hidden"
    with rewards(url, init_timeout_s=0.3, fallback=1.0) as source:  # not the fault of a sample
        with pytest.raises(LostPeerError, match="did not reply for .*cannot be") as caught:
            source.score(*TEXTS)
    assert "trainer.ppo.reward_fn" in str(caught.value) and "hidden" not in str(caught.value)
    busy = iter([(503, b""), (429, b"")])
    with JsonServer(lambda *given: next(busy, None) or lengths(*given)) as server:
        with rewards(server.url) as source:
            assert source.score(*TEXTS).tolist() == [1.0, 2.0, 3.0]


def test_rewards_of_tokens():
    with JsonServer(lambda _, fields: [[0.5] * n for n in fields["lengths"]]) as server:
        with rewards(server.url, per="token") as source:
            source.decode = lambda tokens, ends, starts: (["p"] * 2, ["r"] * 2, [2, 1])
            found = source.infer(np.zeros((2, 4)), np.array([3, 3]), np.array([1, 2]))
    expected = [[np.nan, 0.5, 0.5, np.nan], [np.nan, np.nan, 0.5, np.nan]]
    np.testing.assert_array_equal(found, expected)


def test_closing_ends_a_wait():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    source, begin = rewards(f"http://127.0.0.1:{port}"), time.monotonic()
    future = source._submit([("p", "r", 1, None, {})])
    time.sleep(0.2)
    source.close()
    assert isinstance(future.exception(), RewardFunctionError)
    assert time.monotonic() - begin < patience(5)
    assert not any(thread.is_alive() for thread in source._pool.threads)


@pytest.mark.parametrize(
    "spec, words",
    [
        ("http://user:hidden@host/x", "hold no user or password; a token comes from"),
        (["http://a/x", "http://a/x"], "list of different addresses"),
        (["http://a/x", "f.py:g"], "list of different addresses"),
        ("http:///x?k=hidden", "must name a host"),
        ("http://h:abc/x", "a port from 1 to 65535"),
        ("HTTPS://h:70000/x", "a port from 1 to 65535"),
        ("", "must be path/to/file.py:function"),
        (5, "must be path/to/file.py:function"),
    ],
)
def test_addresses_that_are_refused(spec, words):
    def read(reward_fn):
        options = {"reward_token_file": None, "reward_tls_ca_file": None, "reward_fn": reward_fn}
        return read_reward_servers(options, "trainer.rs")

    with pytest.raises(ConfigError, match=words) as caught:
        read(spec)
    assert "trainer.rs.reward_fn" in str(caught.value) and "hidden" not in str(caught.value)
    with pytest.raises(UserError, match="no user or password"):
        ServedChatModel("http://user:hidden@host/v1", "", Sampling())
    assert read("f.py:g") is None and read(None) is None and read("HTTP://a/x").urls
    assert read("https://a:1/x?k=v").urls == ["https://a:1/x?k=v"]


def test_configurations_are_shown_without_secrets():
    assert shown_url("GET 'https://u:p@a.b/x?k=v' [http://c/?q,file.py?]") == (
        "GET 'https://***@a.b/x?***' [http://c/?***,file.py?]"
    )
    assert shown_url("https://u:p@S@h/x db://u:S/E@h http://h:80/x@y") == (
        "https://***@h/x db://***@h http://h:80/x@y"
    )
    words = {
        "a.wandb_logger_kwargs.api_key=s3cr3t": "a.wandb_logger_kwargs.api_key=***",
        "+a={api_key: s3, auth: B x s, n: 1}": "+a={api_key: '***', auth: '***', n: 1}",
        '+a=[{hfToken: "s\\"3", n: null}]': "+a=[{hfToken: '***', n: null}]",
        "+a.credentials.user=s3": "+a.credentials.user=***",
        "a=choice({token: s3},2)": "a=***",  # several values, or what Hydra cannot read
        "a={b: {token: s3}": "a=***",
        "+a.add_token=True": "+a.add_token=True",
        'a={label_key: "{prompt}\\n", n: 2.50}': 'a={label_key: "{prompt}\\n", n: 2.50}',
        "f=http://a/?k=v": "f=http://a/?***",
        "a.special_tokens.eos_token=</s>": "a.special_tokens.eos_token=</s>",
    }
    assert [*map(shown_word, words)] == [*words.values()]
    ends = {"eos_token": "</s>", "mask_token": "m", "add_token": True}
    assert shown_config(ends) == ends
    names = """secret_key private_key auth Authorization db_passwd hf_token credentials passphrase
    pwd api_keys tokens wandb_key accessToken HFToken X-Api-Key apikey"""
    assert {*shown_config(dict.fromkeys(names.split(), "s")).values()} == {"***"}
    names = """label_key truncation_field key_padding key token_file tls_key eosToken max_tokens
    additional_special_tokens chat_prompt_tokens end_token_ids tokenizer author"""
    assert {*shown_config(dict.fromkeys(names.split(), "s")).values()} == {"s"}
    given = {"reward_fn": ["http://a/?k=v"], "api_key": "s", "token_file": "f", "token": None}
    hidden = {"reward_fn": ["http://a/?***"], "api_key": "***", "token_file": "f", "token": None}
    assert shown_config({"trainer": given, "n": 1}) == {"trainer": hidden, "n": 1}
