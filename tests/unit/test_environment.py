# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A user's class as the environment of conversations: real worker processes, and environments that
do what environments should not.
"""

import textwrap
import time
from pathlib import Path

import psutil
import pytest
import torch

from nemo_aligner.core.errors import UserError
from nemo_aligner.generation.interface import Reply
from nemo_aligner.servers import user_code
from nemo_aligner.servers.environment import EnvironmentFailedError, PythonEnvironment
from tests.cases import says
from tests.patience import patience

pytestmark = pytest.mark.slow

REPLY_S = round(patience(0.5), 1)
GUESSING = Path(__file__).resolve().parents[2] / "examples" / "environments" / "guessing.py"
# What a response asks the environment to do; anything else is noted and drawn from `random`.
NAUGHTY = """
    import os, random, sys, time

    class Notes:
        def reset(self, prompt):
            return [prompt, random.random()]

        def step(self, state, response):
            state.append(response)
            if response == "raise":
                raise KeyError("no such key")
            if response == "sleep":
                time.sleep(60)
            if response == "die":
                os._exit(7)
            if response == "exit":
                sys.exit("enough")
            odd = {
                "none": None, "pair": ("a", 1.0), "number": (3, 1.0, False), "text": "abc",
                "empty": ("", 1.0, False), "nan": ("a", float("nan"), False),
                "string": ("a", "1", False), "unsure": ("a", 1.0, "no"),
                "over": (None, 2, True), "blank": ("___", 1.0, False),
            }
            if response in odd:
                return odd[response]
            told = " ".join(map(str, state[:1] + state[2:]))
            return f"{told} {state[1]:.6f} {random.random():.6f}", 0.5, False
"""


class Letters:
    """A tokenizer of characters; "~" ends a response, and "_" has no token."""

    eos_id, bos_id, vocab_size = ord("~"), None, 256

    def text_to_ids(self, text):
        return [ord(letter) for letter in text if letter != "_"]

    def ids_to_text(self, ids, **_options):
        return "".join(map(chr, ids))


def ids(text):
    return tuple(map(ord, text))


def write(folder, text, name="notes.py", of="Notes"):
    (folder / name).write_text(textwrap.dedent(text))
    return f"{folder}/{name}:{of}"


def environment(folder, text=NAUGHTY, **options):
    return PythonEnvironment(write(folder, text), Letters(), **{"timeout_s": REPLY_S} | options)


def ask(played, number, *responses, seed=1):
    """The reply to the last of `responses`, as (observation, reward, done)."""
    played.submit(number, seed, ids("start"), tuple(ids(response) for response in responses))
    (found,) = played.replies(wait=True).items()
    assert found[0] == number
    reply = found[1]
    return "".join(map(chr, reply.observation)), reply.reward, reply.done


@pytest.fixture(scope="module")
def naughty(tmp_path_factory):
    with environment(tmp_path_factory.mktemp("naughty")) as played:
        yield played


def test_a_conversation_keeps_its_state_and_its_random_stream(naughty):
    first, reward, done = ask(naughty, 0, "a~")
    assert (first.split()[:2], reward, done) == (["start", "a"], 0.5, False)
    between = ask(naughty, 2, "x", seed=2)[0]  # of the same worker
    second = ask(naughty, 0, "a~", "b")[0]
    assert second.split()[:3] == ["start", "a", "b"]
    drawn = first.split()[-2:] + second.split()[-1:]
    assert second.split()[-2] == drawn[0] and len({*drawn, *between.split()[-2:]}) == 5

    naughty.end(0)
    assert ask(naughty, 0, "a~")[0] == first
    assert ask(naughty, 0, "a~", "b")[0] == second


def test_replies_come_as_they_are_ready(tmp_path):
    text = """
    import time
    class Notes:
        def reset(self, prompt): return prompt
        def step(self, state, response):
            time.sleep(float(response)); return response, 0.0, False
    """
    with environment(tmp_path, text, timeout_s=60.0) as played:
        assert played.replies(wait=False) == {}
        played.submit(0, 0, ids("p"), (ids("0.6"),))
        played.submit(1, 0, ids("p"), (ids("0"),))
        assert list(played.replies(wait=True)) == [1]
        assert played.replies(wait=True) == {0: Reply(ids("0.6"), 0.0, False)}


@pytest.mark.parametrize("reason", ["die", "sleep"])
def test_conversations_go_on_after_another_one_ended_their_worker(tmp_path, reason):
    with environment(tmp_path, workers=1, fallback=-1.0) as played:
        ask(played, 0, "a")
        expected = ask(played, 0, "a", "b")
        played.end(0)
        ask(played, 0, "a")
        assert ask(played, 1, reason) == ("", -1.0, True)
        assert ask(played, 0, "a", "b") == expected


def test_the_time_limit_is_that_of_one_reply_once_a_conversation_was_repeated(tmp_path):
    with environment(tmp_path, workers=1, fallback=-1.0) as played:
        ask(played, 0, "a")
        ask(played, 1, "die")
        said = [*"abcdefgh"]
        for turns in range(2, len(said) + 1):
            ask(played, 0, *said[:turns])
        begun = time.monotonic()
        assert ask(played, 0, *said, "sleep") == ("", -1.0, True)
        assert time.monotonic() - begun < 4 * REPLY_S  # not that of nine


def test_a_machine_that_starts_no_more_processes_is_an_error(tmp_path, monkeypatch):
    def start(_workers):
        raise BlockingIOError("no more processes")

    with environment(tmp_path, workers=1, fallback=-1.0) as played:
        monkeypatch.setattr(user_code.Pool, "start", start)
        assert ask(played, 0, "die") == ("", -1.0, True)
        played.submit(1, 1, ids("start"), (ids("a"),))
        with pytest.raises(UserError, match="cannot be started .BlockingIOError"):
            played.replies(wait=True)
    with pytest.raises(UserError, match="cannot be started .BlockingIOError"):
        environment(tmp_path)


@pytest.mark.parametrize(
    "response, words",
    [
        ("raise", ["KeyError: 'no such key'"]),
        ("exit", ["SystemExit: enough"]),
        ("sleep", [f"longer than {REPLY_S:g} s (model.ppo.environment.timeout_s)"]),
        ("die", ["it ended its process (exit code 7)"]),
        ("none", ["step returned None, not (observation, reward, done)"]),
        ("pair", ["not (observation, reward, done)"]),
        ("text", ["not (observation, reward, done)"]),
        ("number", ["whose observation is a int, not a text"]),
        ("empty", ["an empty observation", "nothing to read"]),
        ("blank", ["observation '___' has no token"]),
        ("nan", ["not a finite number"]),
        ("string", ["a str, not a number"]),
        ("unsure", ["whose done is not True or False"]),
    ],
)
def test_a_response_without_a_reply_is_one_clear_error(tmp_path, response, words):
    with environment(tmp_path, section="model.ppo.environment") as played:
        played.submit(0, 1, ids("start"), (ids("a"),))
        assert played.replies(wait=True)[0].reward == 0.5
        played.submit(0, 1, ids("start"), (ids("a"), ids(response)))
        place = "failed on response 2 of a conversation", "prompt 'start'", f"'{response}'"
        remedy, but = "model.ppo.environment.fallback", ("\n", "Traceback")
        with says(EnvironmentFailedError, *words, *place, remedy, but=but):
            played.replies(wait=True)


def test_an_environment_that_is_not_repeatable_is_found_out(tmp_path):
    text = """
    import os
    from pathlib import Path
    count = Path(__file__).with_name("count")
    class Notes:
        def reset(self, prompt): return None
        def step(self, state, response):
            if response == "die":
                os._exit(1)
            count.write_text(count.read_text() + "x" if count.exists() else "x")
            return "on", 0.0, len(count.read_text()) > 1
    """
    with environment(tmp_path, text, workers=1, fallback=0.0) as played:
        assert ask(played, 0, "a") == ("on", 0.0, False)
        assert ask(played, 1, "die")[2]
        played.fallback = None
        played.submit(0, 1, ids("start"), (ids("a"), ids("b")))
        with pytest.raises(EnvironmentFailedError, match="that it had continued when it was"):
            played.replies(wait=True)


def test_the_end_needs_no_observation(naughty):
    assert ask(naughty, 5, "over") == ("", 2.0, True)


RESET, STEP = "\n    def reset(self, p): pass", "\n    def step(self, a, b): pass"


@pytest.mark.parametrize(
    "text, words",
    [
        ("x = 1", "the file has no class 'Notes'; it has none at all"),
        ("class Other: pass", "the file has no class 'Notes'; it has Other"),
        ("Notes = 3", "'Notes' is a int, not a class"),
        ("class Notes: pass", "has no method reset(self, prompt)"),
        ("class Notes:" + RESET, "no method step(self, state, resp"),
        (
            "class Notes:" + RESET.replace(", p", "") + STEP,
            "cannot be called as reset(self",
        ),
        ("class Notes:" + RESET.replace("def", "async def") + STEP, "reset is an async method"),
        ("class Notes:" + RESET + STEP + "\n    def __init__(self): 1 / 0", "ZeroDivisionError"),
        ("import no_such_module as Notes", "No module named 'no_such_module'"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, text, words):
    with says(UserError, words, "environment.path="):
        environment(tmp_path, text)


@pytest.mark.parametrize(
    "spec, words",
    [
        ("guessing.py", "does not name a class; write path/to/file.py:class"),
        ("no/such/file.py:Game", "no/such/file.py does not exist"),
    ],
)
def test_paths_that_name_nothing(spec, words):
    with pytest.raises(UserError, match=words):
        PythonEnvironment(spec, Letters())


def test_a_rank_that_does_not_ask_starts_nothing():
    before = psutil.Process().children()
    own = {"max_turns": 4, "starts_workers": False}
    played = PythonEnvironment(f"{GUESSING}:GuessingGame", Letters(), **own)
    assert psutil.Process().children() == before and played.max_turns == 4
    played.close()


def test_what_waits_when_it_is_closed_starts_no_more_workers(tmp_path, monkeypatch):
    with environment(tmp_path, workers=1, timeout_s=60.0) as played:
        started = []
        monkeypatch.setattr(played._pool, "_make", lambda: started.append(1))
        for number in range(8):
            played.submit(number, 1, ids("start"), (ids("sleep"),))
        time.sleep(0.2)
    (thread,) = played._pool.threads
    assert not thread.is_alive() and not started


def test_rewards_of_conversations_are_scores():
    nan = float("nan")
    rewards = torch.tensor([[nan, 0.25, nan, 1.0], [nan, nan, -2.0, nan]])
    played = PythonEnvironment(f"{GUESSING}:GuessingGame", Letters(), starts_workers=False)
    scores = played.score({"token_rewards": rewards}).scores()
    assert scores.rewards.tolist() == [1.25, -2.0] and scores.values is None
    assert torch.equal(scores.token_rewards.nan_to_num(9.0), rewards.nan_to_num(9.0))


def test_the_guessing_game():
    with PythonEnvironment(f"{GUESSING}:GuessingGame", Letters()) as played:
        for seed in range(20):
            low, high, said = 1, 9, []
            while True:
                guess = (low + high) // 2
                said.append(f"{guess}!")
                hint, reward, done = ask(played, seed, *said, seed=seed)
                if done:
                    break
                assert hint in ("more", "less") and reward == 0.0
                low, high = (guess + 1, high) if hint == "more" else (low, guess - 1)
            assert reward == 1.0 and len(said) <= 4
        assert ask(played, 50, "12!") == ask(played, 51, "four") == ("", 0.0, True)
        lost = [ask(played, 52, *["9!"] * k, seed=3)[1:] for k in range(1, 5)]
        assert lost == [(0.0, False)] * 3 + [(0.0, True)]
