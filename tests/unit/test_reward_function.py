# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A user's function as a reward: real worker processes, and functions that do what functions
should not.
"""

import contextlib
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.launch.rollout_job import check_names
from nemo_aligner.servers import reward_function, user_code
from nemo_aligner.servers.requests import no_sentences
from nemo_aligner.servers.reward_function import RewardFunction, RewardFunctionError
from nemo_aligner.servers.schema import RequestError
from tests import processes
from tests.patience import patience, wait_until
from tests.processes import is_alive, left_of

pytestmark = pytest.mark.slow

SAMPLE_S = round(patience(0.5), 1)  # time limit of a sample
ROOT = Path(__file__).resolve().parents[2]
# What a response asks the function to do; a number is its score.
NAUGHTY = """
    import os, signal, sys, time, ctypes
    import numpy as np

    def score(prompts, responses, lengths):
        (word,) = responses
        if word == "raise":
            raise KeyError("no such key")
        if word == "sleep":
            time.sleep(60)
        if word == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            ctypes.PyDLL(None).sleep(60)  # in C, with Python's lock held
        if word == "die":
            os._exit(7)
        if word == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "memory":
            return [float(len(bytearray(1 << 60)))]
        if word == "exit":
            sys.exit("enough")
        if word == "print":
            for _ in range(2000):
                print("x" * 200)
                print("\\u2192", file=sys.stderr)
            return [1.0]
        returned = {
            "int": [3], "bool": [True], "numpy": np.array([2.5], dtype=np.float32),
            "tuple": (np.int64(4),), "none": None, "nones": [None], "two": [1.0, 2.0],
            "empty": [], "nan": [float("nan")], "huge": [1e39], "bare": 1.0,
        }
        return returned[word] if word in returned else [float(word)]
"""


def write(folder: Path, text: str, name: str = "reward.py") -> str:
    (folder / name).write_text(textwrap.dedent(text))
    return f"{folder}/{name}:score"


def served(folder: Path, text: str = "", tokenizer=None, **options) -> RewardFunction:
    options = {"workers": 1, "timeout_s": 50} | options
    return RewardFunction(write(folder, text or NAUGHTY), tokenizer, **options)


def score_words(function: RewardFunction, words: list[str]) -> list[float]:
    return function.score(["p"] * len(words), words, [1] * len(words)).tolist()


def family() -> set[psutil.Process]:
    """Keepers and workers of this process, and what they have started, that are alive.

    The servers of Python's own multiprocessing, which other tests leave running, are none of them.
    """
    children = psutil.Process().children(recursive=True)
    python = [c for c in children if is_alive(c) and "multiprocessing." in " ".join(c.cmdline())]
    helpers = {each for child in python for each in (child, *child.children(recursive=True))}
    return {child for child in children if is_alive(child)} - helpers


@contextlib.contextmanager
def program(folder: Path, text: str, does: str, workers: int = 1, **streams):
    """A process that `does` something with the function of `text`; it is killed at the end."""
    code = "import pathlib, sys\n"
    code += "from nemo_aligner.servers.reward_function import RewardFunction\n"
    code += f"with RewardFunction({write(folder, text)!r}, None, {workers}, 90) as function:\n"
    code += textwrap.indent(textwrap.dedent(does), "    ")
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, bufsize=0, **streams)
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


@pytest.fixture(scope="module")
def naughty(tmp_path_factory):
    """No fallback; `SAMPLE_S` per sample."""
    with served(tmp_path_factory.mktemp("n"), workers=2, timeout_s=SAMPLE_S) as function:
        yield function


@pytest.fixture
def forgiving(tmp_path):
    """Fallback -1."""
    with served(tmp_path, workers=2, timeout_s=SAMPLE_S, fallback=-1.0) as function:
        yield function


# ---- loading ----


@pytest.mark.parametrize(
    "spec", ["reward.py", "reward:score", "a/b.txt:score", "reward.py:", ":score", "r.py:a-b"]
)
def test_a_spec_that_names_no_function(spec):
    with pytest.raises(ConfigError, match="write path/to/file.py:function"):
        RewardFunction(spec, None)


@pytest.mark.parametrize(
    "text, words",
    [
        ("import no_module_x\ndef score(p, r, l): return [1]", ["'no_module_x'", "line 1"]),
        ("def score(p, r, l)\n    return [1]", ["cannot be imported", "line 1"]),
        ("def other(p, r, l): return [1]\nfrom os.path import join", ["'score'; it has other.\n"]),
        ("x = 1", ["no function 'score'; it has none at all"]),
        ("score = 5", ["'score' is a int, not a function"]),
        ("def score(prompts, responses): return [1]", ["too many positional arguments"]),
        ("def score(p, r, l, *, scale): return [1]", ["asks for columns", "(scale)", "a default"]),
        ("def score(p, r, l, scale, /): return [1]", ["cannot be called as score(", "scale"]),
        ("async def score(p, r, l): return [1]", ["async"]),
        ("score = 1\nimport os\nos._exit(3)", ["file ended the process (exit code 3)"]),
        ("score = 1\nimport sys\nsys.exit('not today')", ["SystemExit: not today"]),
    ],
)
def test_a_file_that_cannot_serve_is_one_error_that_names_it(tmp_path, text, words):
    spec, before = write(tmp_path, text), family()
    with pytest.raises(UserError) as caught:
        RewardFunction(spec, None, workers=2)
    message = str(caught.value) + "\n"
    assert all(word in message for word in [f"inference.reward_fn={spec}", *words]), message
    assert "servers/worker.py" not in message  # frames of ours are no help
    assert family() <= before


def test_a_column_in_the_place_of_the_lengths(tmp_path):
    record = {"text": "p", "answer": "4", "query": "q", "length": 1}
    with served(tmp_path, "def score(prompts, responses, answer): return [1]") as function:
        check_names(function, {"text": "p"})
        with pytest.raises(UserError, match=r"write .prompts, responses, lengths, answer.\."):
            check_names(function, record)
    text = "def score(prompts, responses, length, answer): return [1]"
    with served(tmp_path, text, gives_columns=True) as function:
        check_names(function, record)
        assert function.columns == ["answer"]


def test_a_file_that_never_ends_loading(tmp_path, monkeypatch):
    before = family()
    monkeypatch.setattr(user_code, "LOAD_TIMEOUT_S", 0.3)
    with pytest.raises(UserError, match="longer than 0.3 s"):
        served(tmp_path, "import time\ntime.sleep(60)\ndef score(p, r, l): return [1]")
    assert family() <= before


def test_siblings_relative_paths_defaults_and_callable_objects(tmp_path, monkeypatch):
    """A file called like a module of ours or of the standard library is the user's own all the
    same.
    """
    write(tmp_path, "FACTOR = 3.0", name="constants.py")
    text = """
        from constants import FACTOR
        import schema

        class Scorer:
            def __call__(self, prompts, responses, lengths, bonus=0.5):
                return [FACTOR * length + bonus + schema.ZERO for length in lengths]

        score = Scorer()
    """
    write(tmp_path, "ZERO = 0.0", name="schema.py")
    write(tmp_path, text, name="json.py")
    monkeypatch.chdir(tmp_path)
    with RewardFunction("json.py:score", None, workers=1) as function:
        assert function.score(["p"], ["r"], [2]).tolist() == [6.5]


# ---- scoring ----


def test_many_samples_keep_their_order_and_type(naughty):
    words = [str(number) for number in np.random.default_rng(0).integers(-1000, 1000, 3001)]
    scores = naughty.score(["p"] * len(words), words, [1] * len(words))
    assert scores.dtype == np.float32 and scores.tolist() == [float(word) for word in words]
    assert score_words(naughty, []) == []


def test_each_call_is_one_sample_with_its_own_texts(tmp_path):
    text = """
        seen = 0
        def score(prompts, responses, lengths):
            types = [type(x) for x in (*prompts, *responses, *lengths)]
            assert types == [str, str, int], (prompts, responses)
            (prompt,), (response,), (length,) = prompts, responses, lengths
            return [len(prompt) + 10 * len(response.encode()) + 1000 * length]
    """
    with served(tmp_path, text, workers=2) as function:
        long = "\u2192" * 300_000  # more than a pipe holds
        prompts, lengths = ["", "a\nb", "\U0001f600\ud800", "x"], [0, 2, 3, 4]
        responses = ["", "\x00\r\n", "é\u2028", long]
        assert function.score(prompts, responses, lengths).tolist() == [0, 2033, 3052, 9_004_001]


def test_numbers_of_any_kind_are_scores(naughty):
    words = ["int", "bool", "numpy", "tuple", "-0.25"]
    assert score_words(naughty, words) == [3, 1, 2.5, 4, -0.25]


@pytest.mark.parametrize(
    "word, why",
    [
        ("none", "it returned None, not a list with one number per sample"),
        ("bare", "it returned 1.0, not a list"),
        ("nones", "whose score is a NoneType"),
        ("two", "it returned 2 scores for 1 sample: [1.0, 2.0]"),
        ("empty", "it returned 0 scores for 1 sample"),
        ("nan", "it returned [nan], which is not a finite number"),
        ("huge", "it returned [1e+39], which is not a finite number in float32"),
        ("raise", "KeyError: 'no such key'"),
        ("exit", "SystemExit: enough"),
        ("memory", "MemoryError"),
        ("die", "it ended its process (exit code 7)"),
        ("kill", "it ended its process (killed by SIGKILL: out of memory?)"),
        ("sleep", "it took longer than {} s (inference.reward_fn_timeout_s)"),
        ("deaf", "it took longer than {} s (inference.reward_fn_timeout_s)"),
    ],
)
def test_a_sample_without_a_score_is_one_clear_error_and_the_next_request_is_served(
    naughty, word, why, monkeypatch
):
    logged = []
    monkeypatch.setattr(reward_function.logging, "error", logged.append)
    start = time.monotonic()
    with pytest.raises(RewardFunctionError) as caught:
        score_words(naughty, ["1", "2", word, "3"])
    assert time.monotonic() - start < 50  # it sleeps for a minute
    message = str(caught.value)
    said = "failed on sample 2 of 4: ", f"; prompt 'p', response '{word}', length 1. "
    assert all(each in message for each in (why.replace("{}", f"{SAMPLE_S:g}"), *said)), message
    assert "inference.reward_fn_fallback" in message and "worker.py" not in message
    assert "\n" not in message
    # The place, and in the log the traceback.
    assert ("(reward.py:8 in score)" in message) == (word == "raise"), message
    assert any('raise KeyError("no such key")' in line for line in logged) == (word == "raise")
    assert score_words(naughty, ["1", "2"]) == [1, 2]
    assert len(family()) <= 4  # two keepers, two workers


def test_a_worker_that_was_ended_is_replaced_before_the_next_request(naughty):
    with pytest.raises(RewardFunctionError, match="exit code 7"):
        score_words(naughty, ["die"])
    # Two keepers, two workers.
    wait_until(lambda: len(family()) == 4, 10, lambda: str(family()))


def test_what_is_left_of_a_failed_request_ends_no_worker(naughty, monkeypatch):
    starts, start = [], naughty._pool.start
    monkeypatch.setattr(naughty._pool, "start", lambda: starts.append(1) or start())
    with pytest.raises(RewardFunctionError, match="no such key"):
        score_words(naughty, ["raise"] + ["1"] * 2000)
    assert score_words(naughty, ["2"] * 8) == [2] * 8
    assert len(starts) <= 2  # each worker was at a chunk when the first sample failed


def test_with_a_fallback_only_the_bad_samples_get_it(forgiving, warnings):
    words = [str(number) for number in range(60)]
    bad = {3: "raise", 4: "die", 5: "die", 17: "nan", 30: "sleep", 31: "none", 44: "deaf"}
    bad[59] = "kill"
    for row, word in bad.items():
        words[row] = word
    scores = score_words(forgiving, words)
    assert scores == [-1.0 if row in bad else float(row) for row in range(60)]
    (warning,) = warnings
    assert warning.startswith("8 of 60 samples got the fallback score -1 ")
    assert "sample 3 of 60" in warning


@pytest.mark.full
def test_the_time_limit_is_for_each_sample_not_for_the_request(tmp_path):
    """Twelve samples in chunks behind one worker; the limit is three times what one takes."""
    sample_s = patience(0.2)
    text = "import time\ndef score(p, r, l):\n    time.sleep(float(r[0]))\n    return [1]"
    with served(tmp_path, text, timeout_s=3 * sample_s, fallback=0) as function:
        assert score_words(function, [str(sample_s)] * 12) == [1] * 12
        assert score_words(function, [str(sample_s), "50", str(sample_s)]) == [1, 0, 1]


@pytest.mark.full
def test_what_a_function_prints_is_shown_and_bounded(tmp_path):
    """In a process of its own: the workers print to its output."""
    does = 'print(function.score(["p"] * 3, ["print", "print", "7"], [1] * 3).tolist())'
    streams = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    with program(tmp_path, NAUGHTY, does, **streams) as process:
        out, err = process.communicate(timeout=patience(60))
    assert b"[1.0, 1.0, 7.0]" in out, err[-2000:]
    assert b"x" * 200 in out and out.count(b"left out") == 1
    assert len(out) < 25_000 and "\u2192".encode() in err


@pytest.mark.full
@pytest.mark.parametrize("read", [True, False], ids=["read", "stuck"])
def test_megabytes_written_past_python_do_not_reach_the_log(tmp_path, read):
    """By the function and by what it starts; also where nobody reads the server's output."""
    text = """
        import os, subprocess
        def score(prompts, responses, lengths):
            for number in (1, 2):
                for _ in range(30):
                    os.write(number, b"x" * 1_000_000)
            subprocess.run("head -c 10000000 /dev/zero", shell=True, check=True)
            return [float(responses[0])]
    """
    does = f"""
        print("ready", flush=True)
        sys.stdin.readline()
        scores = function.score(["p"] * 3, ["1", "2", "3"], [1] * 3).tolist()
        pathlib.Path("{tmp_path}/scores").write_text(str(scores))
    """
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with program(tmp_path, text, does, **pipes) as server:
        while b"ready" not in (line := server.stdout.readline()):
            assert line, "the program ended"
        if not read:
            fill(f"/proc/{server.pid}/fd/1")
        server.stdin.write(b"\n")
        if not read:
            server.wait(min(patience(60), 100))
        out, err = server.communicate(timeout=patience(60))
    assert (tmp_path / "scores").read_text() == "[1.0, 2.0, 3.0]", err[-2000:]
    if read:
        assert b"bytes of a reward function's output are left out" in out and b"xxx" in out
        (dropped,) = re.findall(rb"\[(\d+) bytes of a reward", out)
        assert out.count(b"x") + out.count(b"\0") + int(dropped) == 3 * 40_000_000
        assert len(out) < 25_000 and err.count(b"x") < 25_000


def fill(path: str) -> None:
    """Write to the pipe at `path` until it takes no more."""
    writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    try:
        while True:
            os.write(writer, b"-")
    except BlockingIOError:
        os.close(writer)


def test_requests_of_several_threads_do_not_mix(forgiving):
    results = {}

    def ask(number):
        results[number] = score_words(forgiving, [str(number), "raise", str(number + 0.5)] * 20)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(60))
    assert results == {number: [number, -1, number + 0.5] * 20 for number in range(6)}


# ---- the end ----


def test_closing_fails_what_is_in_progress_at_once_and_leaves_nothing(tmp_path):
    text = """
        import signal, subprocess, time
        def score(prompts, responses, lengths):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            subprocess.Popen(["sleep", "60"])
            time.sleep(60)
    """
    before = family()
    function = served(tmp_path, text, workers=2, fallback=0.0)
    outcome = []

    def ask():
        try:
            outcome.append(score_words(function, ["x"] * 4))
        except RewardFunctionError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: len(family() - before) == 6, 10)  # both workers have started their sleep
    mine = family() - before
    start = time.monotonic()
    function.close()
    thread.join(40)
    assert time.monotonic() - start < 40  # it sleeps for a minute
    assert "shutting down" in outcome[0]
    assert not left_of(mine, 10)
    function.close()  # a second time does nothing
    with pytest.raises(RewardFunctionError, match="shut down"):
        score_words(function, ["x"])


ESCAPED = """
    import ctypes, os, pathlib, signal, time
    def score(prompts, responses, lengths):
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)  # the next one is an orphan, in a session of its own
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            for number in range(3):
                os.close(number)
            if os.fork() == 0:
                os.setsid()
            file = pathlib.Path(__file__).parent / str(os.getpid())
            file.touch()
            time.sleep(100)
        os.wait()
        if responses[0] == "stay":
            return [1.0]
        if responses[0] == "die":
            os._exit(3)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ctypes.PyDLL(None).sleep(100)  # in C, with Python's lock held
"""


def escaped(folder: Path) -> list[int]:
    """The process ids that `ESCAPED` has started."""
    return [int(path.name) for path in folder.iterdir() if path.name.isdigit()]


@pytest.mark.parametrize("how", ["stay", "sleep", "die"])
def test_processes_in_sessions_of_their_own_end_with_the_worker(tmp_path, how):
    """Stay: the server closes it later. Sleep: it is killed for its time limit. Die: by itself."""
    pids, is_there = lambda: escaped(tmp_path), psutil.pid_exists
    limit = {} if how == "die" else {"timeout_s": patience(1.5)}
    with served(tmp_path, ESCAPED, fallback=-1.0, **limit) as function:
        assert score_words(function, [how]) == [1.0 if how == "stay" else -1.0]
        if how == "stay":
            wait_until(lambda: len(pids()) == 2)
            assert all(map(is_there, pids()))
        elif how == "die":
            wait_until(lambda: not any(map(is_there, pids())), 10)
    assert how == "die" or len(pids()) == 2 and not any(map(is_there, pids()))


def test_all_processes_end_with_a_server_that_is_killed(tmp_path):
    """The worker that is idle, the one whose sample hears no signal, and what that has started."""
    does = 'function.score(["p"], ["sleep"], [1])'
    with program(tmp_path, ESCAPED, does, workers=2) as server:
        wait_until(lambda: len(escaped(tmp_path)) == 2)
        started = {*map(psutil.Process, escaped(tmp_path)), *processes.family(server.pid)[1:]}
    assert len(started) == 6 and not left_of(started, 5)  # two keepers, too


def test_descriptors_do_not_leak(forgiving):
    """Ten workers end. One that has not been replaced yet, before or after, has none."""
    score_words(forgiving, ["1"])
    before = len(os.listdir("/proc/self/fd"))
    score_words(forgiving, ["die", "kill"] * 5)
    score_words(forgiving, ["1"] * 4)
    assert len(os.listdir("/proc/self/fd")) < before + 10


# ---- tokens to text ----


def make_rows(tokenizer, pairs, end: bool):
    ids, eos = tokenizer.text_to_ids, [tokenizer.eos_id]
    rows = [(ids(p), ids(r) + eos * end) for p, r in pairs]
    width = max(len(p) + len(r) for p, r in rows) + 3
    tokens = np.array([p + r + eos * (width - len(p) - len(r)) for p, r in rows])
    starts = np.array([[len(p)] for p, _ in rows])
    return tokens, starts + np.array([[len(r)] for _, r in rows]), starts


@pytest.fixture(scope="module")
def tokenizers(tiny_tokenizer, tiny_sentencepiece_model):
    from nemo.collections.common.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer

    sentencepiece = SentencePieceTokenizer(tiny_sentencepiece_model)
    return {"huggingface": tiny_tokenizer, "sentencepiece": sentencepiece}


@pytest.mark.parametrize("library", ["huggingface", "sentencepiece"])
@pytest.mark.parametrize("end", [True, False], ids=["ended", "cut"])
def test_a_rollout_becomes_prompt_response_and_length(tmp_path, tokenizers, library, end):
    tokenizer = tokenizers[library]
    pairs = [("12+34=", "46"), ("a film", "was bad"), ("été", "\u2192 \U0001f600"), ("x", "")]
    tokens, ends, starts = make_rows(tokenizer, pairs, end)
    with served(tmp_path, "def score(p, r, l): return [l[0]]", tokenizer) as function:
        prompts, responses, lengths = function.decode(tokens, ends[:, 0], starts[:, 0])
        assert list(zip(prompts, responses)) == pairs
        assert lengths == [len(tokenizer.text_to_ids(r)) + end for _, r in pairs]
        import torch

        rewards = function.infer(*map(torch.from_numpy, (tokens, ends, starts)))
        assert rewards.dtype == np.float32 and rewards.tolist() == [[length] for length in lengths]


def test_an_end_token_that_the_tokenizer_spells_out_is_no_part_of_the_response(tmp_path):
    """Only the last one: an end token before it is text that the policy wrote."""

    class Spelling:
        eos_id = 0

        def ids_to_text(self, ids):
            return "".join("</s>" if i == 0 else chr(96 + i) for i in ids)

    rows = [1, 2, 3, 0, 0, 0], [0, 1, 0, 2, 0, 0], [1, 2, 3, 4, 0, 0], [1, 0, 0, 0, 0, 0]
    ends, starts = np.array([4, 5, 4, 2]), np.array([2, 1, 3, 1])
    with served(tmp_path, "def score(p, r, l): return [1]", Spelling()) as function:
        prompts, responses, lengths = function.decode(np.array(rows), ends, starts)
    assert prompts == ["ab", "</s>", "abc", "a"] and responses == ["c", "a</s>b", "d", ""]
    assert lengths == [2, 4, 1, 1]


def test_sentences_are_refused():
    with pytest.raises(RequestError, match="send 'tokens' and 'sequence_lengths'.*prompt_lengths"):
        no_sentences(["a text"])


# ---- the examples ----


def test_the_arithmetic_example():
    spec = f"{ROOT}/examples/rewards/arithmetic.py:exact_answer"
    with RewardFunction(spec, None, workers=1) as function:
        prompts = ["12+34=", "12+34=", "12+34=", "12+34=", "Compute 9-12=", "3 * 4 = ", "99+99="]
        responses = ["46", "046", " 46", "", "-3", "12", "198"]
        assert function.score(prompts, responses, [3] * 7).tolist() == [1, 0, 0, 0, 1, 1, 1]
        words = "the prompt 'Hello' does not end with a task"
        with pytest.raises(RewardFunctionError, match=words):
            function.score(["Hello"], ["46"], [1])


def test_the_length_and_format_example():
    spec = f"{ROOT}/examples/rewards/length_format.py:concise_sentences"
    with RewardFunction(spec, None, workers=1) as function:
        good, half = ["A good film.", 'It ends. "Well!"'], "no capital, no stop"
        responses = [*good, half, "One. two three", "", good[0]]
        scores = function.score(["p"] * 6, responses, [8, 32, 32, 32, 0, 48]).tolist()
    assert scores == pytest.approx([1.0, 1.0, 0.5, 0.5 / 3 + 0.5, 0.5, 0.5 + 0.25])
