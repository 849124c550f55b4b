# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A Python function as reward, as users start it: the real server script and real clients."""

import concurrent.futures
import contextlib
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from nemo_aligner.core import leftovers
from nemo_aligner.core.errors import ServerRequestError
from nemo_aligner.servers.ports import find_free_port
from nemo_aligner.servers.scoring_clients import RemoteGPTRMClient
from tests.functional.jobs import (
    ScriptJob,
    assert_ended_well,
    remote_rm,
    reward_server,
    wait_until_serving,
)
from tests.patience import patience, wait_until
from tests.processes import family, left_of
from tests.tiny_models import tiny_config

SAMPLE_S = round(patience(1))  # time limit of a sample
pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings(
        "ignore:Client network and/or connection timeout"
    ),  # said of time-outs that are larger
]
# What a response asks the function to do; of any other text all three arguments enter the score.
FUNCTION = """
    import ctypes, os, signal, time

    def score(prompts, responses, lengths):
        (prompt,), (response,), (length,) = prompts, responses, lengths
        if response == "raise":
            raise LookupError("nothing to see")
        if response == "slow":
            time.sleep(60)
        if response == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            ctypes.PyDLL(None).sleep(60)  # in C, with Python's lock held
        if response == "die":
            os._exit(3)
        texts = prompt.count("a") + 0.5 * len(response) + 0.25 * sum(map(str.isupper, response))
        return [texts + 1000 * length]
"""


def code_reward_server(folder, port, tokenizer_dir, *extra) -> ScriptJob:
    """The server job in `folder`, where it finds reward.py by a relative path; without
    `tokenizer_dir` the tokenizer is that of a .nemo in `extra`.
    """
    folder.mkdir(exist_ok=True)
    (folder / "reward.py").write_text(textwrap.dedent(FUNCTION))
    own = ["model.tokenizer.library=huggingface", f"model.tokenizer.type={tokenizer_dir}"]
    own = [*(own if tokenizer_dir else []), "inference.reward_fn=reward.py:score"]
    return reward_server("null", folder, port, *own, *extra)


def rollout(tokenizer, pairs: list[tuple[str, str]], ended: bool = True) -> dict:
    """What `infer` of a policy returns for these prompts and responses."""
    prompts = [tokenizer.text_to_ids(prompt) for prompt, _ in pairs]
    ids, end = tokenizer.text_to_ids, [tokenizer.eos_id] * ended
    rows = [p + ids(r) + end for p, (_, r) in zip(prompts, pairs)]
    width = max(map(len, rows)) + 2
    tokens = [row + [tokenizer.eos_id] * (width - len(row)) for row in rows]
    columns = {"response_tokens": tokens, "response_lengths": [*map(len, rows)]}
    columns["prompt_lengths"] = [*map(len, prompts)]
    return {name: torch.tensor(column) for name, column in columns.items()}


def ask(port, batch: dict, **changes) -> list[float]:
    with contextlib.closing(RemoteGPTRMClient(remote_rm(port, **changes))) as client:
        return client.infer_rm(batch).scores().rewards.tolist()


def expected(tokenizer, pairs, ended=True) -> list[float]:
    """By hand, one sample at a time."""
    counted = lambda r: 1000 * (len(tokenizer.text_to_ids(r)) + ended)
    score = lambda p, r: p.count("a") + 0.5 * len(r) + 0.25 * sum(c.isupper() for c in r)
    return [score(p, r) + counted(r) for p, r in pairs]


def workers_of(job: ScriptJob) -> list[psutil.Process]:
    """Without their keepers."""
    children = family(job.process.pid)[1:]
    pairs = {child for child in children if "worker.py" in " ".join(child.cmdline())}
    return [child for child in pairs if child.parent() in pairs]


@pytest.fixture(scope="module")
def port(tmp_path_factory, tiny_tokenizer_dir):
    """A running server with two workers and `SAMPLE_S` per sample; SIGTERM ends it clean."""
    folder, port = tmp_path_factory.mktemp("code") / "server", find_free_port()
    with code_reward_server(
        folder, port, tiny_tokenizer_dir, f"inference.reward_fn_timeout_s={SAMPLE_S}"
    ) as job:
        wait_until_serving(job)
        yield port
        # The last test may have had one replaced.
        wait_until(lambda: len(workers_of(job)) == 2, 30, lambda: str(workers_of(job)))
        assert_ended_well(job, job.stop())


PAIRS = [("a film", "was Bad."), ("", "X"), ("\u00e9t\u00e9 a", "\u2192 \U0001f600 fin")]
PAIRS += [("banana", ""), ("a\nb", "\n")]


def test_scores_are_the_functions_own(port, tiny_tokenizer):
    for ended in (True, False):
        pairs = [pair for pair in PAIRS if ended or "".join(pair)]
        found = ask(port, rollout(tiny_tokenizer, pairs, ended))
        assert found == expected(tiny_tokenizer, pairs, ended)
    many = [(f"a{'a' * (i % 7)}", "x" * (i % 11) + str(i)) for i in range(700)]
    assert ask(port, rollout(tiny_tokenizer, many)) == expected(tiny_tokenizer, many)


@pytest.mark.parametrize(
    "response, words",
    [
        ("raise", ["1 of 3: LookupError: nothing to see (reward.py:7 in score); prompt"]),
        ("slow", [f"took longer than {SAMPLE_S} s", "inference.reward_fn_timeout_s"]),
        ("die", ["exit code 3"]),
    ],
)
def test_a_sample_that_fails_is_one_error_and_others_go_on(port, tiny_tokenizer, response, words):
    pairs = [("p", "fine"), ("the prompt", response), ("p", "fine")]
    start = time.monotonic()
    with pytest.raises(ServerRequestError) as caught:
        ask(port, rollout(tiny_tokenizer, pairs))
    assert time.monotonic() - start < 55  # it sleeps for a minute
    message = str(caught.value)
    sample = f"prompt 'the prompt', response '{response}', length "
    assert all(word in message for word in [sample, "reward_fn_fallback", *words]), message
    where = f"reward_model at 127.0.0.1:{port}"
    failed = f"request to {where} failed: the reward function reward.py:score"
    assert message.startswith(f"{failed} failed on sample 1 of 3: ") and "\n" not in message
    assert ask(port, rollout(tiny_tokenizer, PAIRS)) == expected(tiny_tokenizer, PAIRS)


def test_a_bad_sample_fails_its_own_request_alone(tmp_path, tiny_tokenizer, tiny_tokenizer_dir):
    """Although Triton hands over all requests together."""
    port = find_free_port()
    extra = ["inference.max_queue_delay_microseconds=500000", "inference.micro_batch_size=32"]
    with code_reward_server(tmp_path / "s", port, tiny_tokenizer_dir, *extra) as job:
        wait_until_serving(job)

        def one(number):
            pairs = [("p", "fine"), ("a", "raise" if number == 3 else "fine")]
            try:
                return ask(port, rollout(tiny_tokenizer, pairs))
            except ServerRequestError as error:
                return str(error)

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            replies = list(pool.map(one, range(8)))
        assert "sample 1 of 2: LookupError" in replies.pop(3)
        assert replies == [expected(tiny_tokenizer, [("p", "fine"), ("a", "fine")])] * 7
        assert job.log.count('raise LookupError("nothing to see")') >= 1  # the traceback


@pytest.mark.full
def test_a_stop_within_a_request_and_the_fallback(tmp_path, tiny_tokenizer, tiny_tokenizer_dir):
    """Bad samples get the fallback score with a warning; then a sample that hears nothing does not
    delay SIGTERM. The tokenizer is that of a .nemo.
    """
    from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel

    port, nemo = find_free_port(), tmp_path / "policy.nemo"
    MegatronGPTModel(tiny_config(tiny_tokenizer_dir)).save_to(str(nemo))
    extra = ["inference.reward_fn_fallback=-7.5", "inference.reward_fn_workers=3"]
    extra += [f"inference.reward_fn_timeout_s={2 * SAMPLE_S}", f"rm_model_file={nemo}"]
    with code_reward_server(tmp_path / "s", port, None, *extra) as job:
        wait_until_serving(job)
        pairs = [("p", "fine"), ("p", "raise"), ("p", "die"), ("p", "slow"), ("a", "Well")]
        first, *bad, last = ask(port, rollout(tiny_tokenizer, pairs))
        wanted = expected(tiny_tokenizer, [pairs[0], pairs[-1]])
        assert bad == [-7.5] * 3 and [first, last] == wanted
        assert "3 of 5 samples got the fallback score -7.5" in job.log
        assert "LookupError: nothing to see" in job.log

        errors = []

        def doomed():
            try:
                deaf = rollout(tiny_tokenizer, [("p", "deaf")] * 60)  # takes 40 s and more
                # The time that it waits for another server.
                ask(port, deaf, init_timeout_s=patience(3))
            except ServerRequestError as error:
                errors.append(str(error))

        thread = threading.Thread(target=doomed)
        thread.start()
        time.sleep(patience(1))
        workers = workers_of(job)
        start = time.monotonic()
        code = job.stop(20)
        assert time.monotonic() - start < 20 * 2 * SAMPLE_S  # what its sixty samples take
        assert_ended_well(job, code)
        assert len(workers) >= 2 and not left_of(workers, 1)
        thread.join(patience(30))
        assert errors


@pytest.mark.full  # tests/unit/test_leftovers.py has it without Triton
def test_a_start_removes_what_a_killed_server_left(tmp_path, tiny_tokenizer, tiny_tokenizer_dir):
    """Folders and shared memory of Triton, PyTriton and this package; others' stay."""
    port = find_free_port()
    with code_reward_server(tmp_path / "s", port, tiny_tokenizer_dir) as job:
        wait_until_serving(job)
        assert ask(port, rollout(tiny_tokenizer, PAIRS)) == expected(tiny_tokenizer, PAIRS)
        links = [path.readlink() for path in Path(f"/proc/{job.process.pid}/fd").iterdir()]
        (record,) = [link for link in links if link.parent == leftovers.RECORDS]
        claimed = [Path(word) for word in record.read_text().split("\0")[:-1]]
        folders = [path for path in claimed if path.is_dir()]
        (prefix,) = [path for path in claimed if path.parent == Path("/dev/shm")]
        memory = list(prefix.parent.glob(f"{prefix.name}*"))
        assert [path.name[:7] for path in folders] == ["triton_"] and len(memory) > 1
        maps = [m for each in family(job.process.pid) for m in each.memory_maps()]
        mapped = {m.path.split(" ")[0] for m in maps if m.path.startswith("/dev/shm/")}
        assert mapped <= set(map(str, memory)), "shared memory that no record names"
    strangers = [folders[0].with_name("triton_stays"), prefix.with_name("nemo_aligner_stays")]
    try:
        for path in strangers:
            path.write_text("")
        with code_reward_server(tmp_path / "s", port, tiny_tokenizer_dir) as job:
            wait_until_serving(job)
            assert not any(path.exists() for path in [*folders, *memory, record])
            assert all(path.exists() for path in strangers)
            assert ask(port, rollout(tiny_tokenizer, PAIRS)) == expected(tiny_tokenizer, PAIRS)
            assert_ended_well(job, job.stop())
    finally:
        for path in strangers:
            path.unlink(missing_ok=True)
