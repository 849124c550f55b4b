# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The critic server as a job of its own, behind each front: real Triton processes or uvicorn, one
and two ranks.

Expected numbers come from the same small model run here, in one process, with plain torch on
unpadded rows.
"""

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import threading
import time

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from nemo_aligner.config.access import client_tls
from nemo_aligner.config.server_rules import FRONTENDS
from nemo_aligner.core.endings import ExitCode
from nemo_aligner.core.errors import ServerRequestError, UserError
from nemo_aligner.servers import exchange
from nemo_aligner.servers.critic_client import RemoteGPTRMCriticClient
from tests.cases import some_of
from tests.certificates import make_certificate
from tests.distributed.launcher import run_ranks
from tests.functional.critic_job import NAP, RAISE, SLEEP, CriticJob, build_model
from tests.patience import patience, wait_until

pytestmark = [
    pytest.mark.timeout(600),
    # PyTriton's client warns of time-outs above its default.
    pytest.mark.filterwarnings("ignore:Client network and/or connection timeout"),
]

# Of what both do alike, that of Triton is in `make test-full`: it takes twice as long.
asgi_frontend = pytest.mark.parametrize(
    "frontend",
    [pytest.param(name, marks=[pytest.mark.full] * (name != "asgi")) for name in FRONTENDS],
)


def expected_scores(model, tokens, lengths):
    """(rewards [N], values [N, S]) row by row; values after a row's end are those of its
    padding.
    """
    with torch.no_grad():
        ends = [row[length - 1] for row, length in zip(tokens, lengths)]
        rewards = torch.stack([model.reward[end] for end in ends])
        return rewards, torch.cat([model(row[None]) for row in tokens])


def expected_update(model, data, gbs):
    """Mean loss of plain SGD steps on `model` (changed in place), each over the response tokens of
    `gbs` rows.
    """
    losses = []
    for start in range(0, len(data["tokens"]), gbs):
        rows = slice(start, start + gbs)
        mask = data["mask"][rows].bool()
        errors = model(data["tokens"][rows])[:, :-1][mask] - data["returns"][rows][mask]
        loss = (errors**2).mean()
        gradients = torch.autograd.grad(loss, [model.embedding, model.value])
        with torch.no_grad():
            model.embedding -= 0.1 * gradients[0]
            model.value -= 0.1 * gradients[1]
        losses.append(loss.item())
    return sum(losses) / len(losses)


def make_training_data(rows, width, seed=0):
    """Ragged responses; slots outside the mask hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 28, (rows, width), generator=generator)
    mask = torch.zeros(rows, width - 1)
    for row in range(rows):
        mask[row, 1 : 2 + (row * 3) % (width - 2)] = 1
    nan = torch.full((rows, width - 1), float("nan"))
    returns = torch.where(mask > 0, torch.randn(rows, width - 1, generator=generator), nan)
    return {"tokens": tokens, "returns": returns, "prev_values": returns.clone(), "mask": mask}


def numpy(data):
    return {name: tensor.numpy() for name, tensor in data.items()}


class Raw:
    """A client without any of our checks, one per test."""

    def __init__(self, job):
        from pytriton.client import ModelClient

        limits = {"init_timeout_s": patience(20), "inference_timeout_s": patience(30)}
        self._make = lambda name: ModelClient(f"http://127.0.0.1:{job.port}", name, **limits)

    def __call__(self, endpoint, **arrays):
        with self._make(endpoint) as client:
            arrays = {name: np.asarray(array) for name, array in arrays.items()}
            infer = client.infer_batch if endpoint == "critic_infer" else client.infer_sample
            return infer(**arrays)


def client_config(job, **changes):
    return OmegaConf.create(
        {
            "pad_to_length": None,
            "combine_rm_and_critic_server": True,
            "init_timeout_s": patience(20),
            "inference_timeout_s": patience(90),
            "critic": {"ip": "127.0.0.1", "port": job if isinstance(job, int) else job.port},
            "reward_model": {"ip": "127.0.0.1", "port": 1},
            **changes,
        }
    )


@pytest.fixture(scope="module", params=["triton", pytest.param("asgi", marks=pytest.mark.full)])
def job(request):
    with CriticJob(ranks=1, server={"frontend": request.param}) as job:
        yield job.wait_until_serving()


@pytest.fixture(scope="module")
def mirror(job):
    """The served model as this process knows it: tests that train the server train it too."""
    return build_model()


def assert_serving(raw, model):
    tokens = torch.tensor([[1, 2, 3, 0], [4, 5, 6, 7], [8, 9, 0, 0]])
    lengths = torch.tensor([3, 4, 2])
    answer = raw("critic_infer", tokens=tokens, sequence_lengths=lengths[:, None])
    rewards, values = expected_scores(model, tokens, lengths)
    assert answer["values"].dtype == answer["rewards"].dtype == np.float32
    np.testing.assert_allclose(answer["values"], values.numpy(), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(answer["rewards"], rewards[:, None].numpy(), rtol=1e-6)


# ---- one rank ----


def test_scores_equal_a_direct_call(job, mirror):
    raw = Raw(job)
    assert_serving(raw, mirror)
    answer = raw("critic_infer", sentences=[[b"abc"], [b"de"]])
    tokens = torch.tensor([[1, 2, 3, 0, 0, 0, 0, 0], [4, 5, 0, 0, 0, 0, 0, 0]])
    rewards, values = expected_scores(mirror, tokens, torch.tensor([3, 2]))
    np.testing.assert_allclose(answer["values"], values.numpy(), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(answer["rewards"], rewards[:, None].numpy(), rtol=1e-6)


def test_training_equals_direct_steps_and_is_applied_once(job, mirror):
    raw = Raw(job)
    data = make_training_data(6, 9)  # two steps of 4 rows, the second with two empty ones
    request = {**numpy(data), "request_id": [b"update-1"]}
    answer = raw("critic_train", **request)
    loss = expected_update(mirror, data, gbs=4)
    assert answer["loss_mean"].dtype == np.float32 and answer["loss_mean"].shape == (1,)
    np.testing.assert_allclose(answer["loss_mean"][0], loss, rtol=1e-5)
    assert_serving(raw, mirror)

    again = raw("critic_train", **request)
    assert again["loss_mean"] == answer["loss_mean"]
    assert_serving(raw, mirror)  # nothing was applied twice
    lines = (job.directory / "metrics.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in lines]
    assert [line["step"] for line in lines] == [1, 2]
    names = {f"train/{name}" for name in ("loss", "lr", "grad_norm", "step_time")}
    assert set(lines[0]) == {"step", *names}
    np.testing.assert_allclose(np.mean([line["train/loss"] for line in lines]), loss, rtol=1e-5)


def test_save_and_status(job):
    raw = Raw(job)
    status = raw("critic_status", dummy_var=[0])
    assert json.loads(status.pop("checkpoints")[0]) == {}
    steps = "actor_step", "critic_step", "saved_critic_step"
    assert [int(status[name][0]) for name in steps] == [0, 2, 0] and len(status) == 3
    answer = raw("critic_save", dummy_var=[0], actor_step=[3])
    assert answer["status"].tolist() == [0] and answer["status"].dtype == np.int64
    written = json.loads((job.directory / "checkpoint.json").read_text())
    assert written == {"step": 2, "actor_step": 3}
    status = raw("critic_status", dummy_var=[0])
    checkpoint = str(job.directory / "checkpoint.json")
    assert json.loads(status.pop("checkpoints")[0]) == {"3": checkpoint}
    assert all(value.dtype == np.int64 for value in status.values())
    assert [int(status[name][0]) for name in steps] == [3, 2, 2]


@pytest.mark.full
def test_small_requests_are_served_between_the_slices_of_a_large_one(job, mirror):
    """512 long samples in 64 slices, each scored twice (values and rewards), 16 of these 128
    passes of half a second. What changes the model waits for the last slice.
    """
    tokens = torch.randint(1, NAP - 1, (512, 64), generator=torch.Generator().manual_seed(3))
    tokens[::64, 7] = NAP
    lengths = torch.full((512,), 64)
    rewards, values = expected_scores(mirror, tokens, lengths)
    data = make_training_data(4, 9, seed=5)
    raw = Raw(job)
    raw("critic_status", dummy_var=[0])
    step = int(raw("critic_status", dummy_var=[0])["critic_step"][0])

    def score_all():
        return raw("critic_infer", tokens=tokens, sequence_lengths=lengths[:, None])

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        naps = job.log().count("met NAP")
        large = pool.submit(score_all)
        wait_until(lambda: job.log().count("met NAP") > naps, 60, job.log)
        small = raw("critic_infer", tokens=tokens[:1] * 0 + 5, sequence_lengths=[[64]])
        update = pool.submit(raw, "critic_train", **numpy(data))
        assert int(raw("critic_status", dummy_var=[0])["critic_step"][0]) == step
        assert not large.done() and not update.done()
        answer = large.result()
        update.result()
    np.testing.assert_allclose(answer["values"], values.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(answer["rewards"], rewards[:, None].numpy(), rtol=1e-6)
    ones = expected_scores(mirror, tokens[:1] * 0 + 5, [64])[0]
    np.testing.assert_allclose(small["rewards"][0], ones, rtol=1e-6)
    expected_update(mirror, data, gbs=4)
    assert_serving(raw, mirror)


TRAIN = {name: tensor.nan_to_num().numpy() for name, tensor in make_training_data(2, 5).items()}
INFER = {"tokens": np.ones((2, 5), np.int64), "sequence_lengths": np.full((2, 1), 5)}


# By endpoint: what is sent in place of a tensor, or None, and words of the error; others are in
# tests/unit/test_server_schema.py.
WRONG = {
    "critic_infer": [
        ({"tokns": INFER["tokens"]}, ["tokns"]),
        ({"tokens": INFER["tokens"].astype(np.int32)}, ["tokens", "int64", "int32"]),
        ({"sequence_lengths": np.full((2, 1), 6)}, ["'sequence_lengths'holds6", "[1,5]"]),
    ],
    "critic_train": [
        ({"mask": None}, ["mask"]),
        ({"mask": np.ones((2, 5), np.float32)}, ["'mask'hasshape[2,5]", "[2,4]"]),
    ],
    "critic_save": [({"dummy_var": np.zeros(2, np.int64)}, ["dummy_var", "[1]", "[2]"])],
}
GOOD = {"critic_infer": INFER, "critic_train": TRAIN}


@pytest.mark.parametrize(
    "endpoint, change, words", [(name, *case) for name, cases in WRONG.items() for case in cases]
)
def test_wrong_requests_are_refused_and_the_server_goes_on(job, mirror, endpoint, change, words):
    from pytriton.client.exceptions import PyTritonClientInferenceServerError

    raw = Raw(job)
    changed = {**GOOD.get(endpoint, {}), **change}.items()
    with pytest.raises(PyTritonClientInferenceServerError) as caught:
        raw(endpoint, **{name: array for name, array in changed if array is not None})
    said = str(caught.value).replace(" ", "").lower()  # each front has words of its own
    for word in words:
        assert any(form in said for form in word.split("|")), caught.value
    assert_serving(raw, mirror)


def test_an_error_of_the_model_comes_back_in_one_line_with_its_place(job, mirror):
    with contextlib.closing(RemoteGPTRMCriticClient(client_config(job))) as client:
        tokens = torch.full((2, 5), RAISE)
        rollout = {"response_tokens": tokens, "response_lengths": torch.tensor([5, 5])}
        data = make_training_data(2, 5)
        training = {"response_tokens": tokens, "values": data["prev_values"], **data}
        for future in (client.infer_rm_critic(rollout), client.train(training)):
            with pytest.raises(ServerRequestError) as caught:
                future.result()
            assert re.fullmatch(
                rf"request to critic_\w+ at 127.0.0.1:{job.port} failed: ArithmeticError: the "
                r"model met a token it cannot stand \(critic_job.py:\d+ in misbehave\)",
                str(caught.value),
            )
        assert 'raise ArithmeticError("the model met' in job.log()  # the traceback
    assert_serving(Raw(job), mirror)


@pytest.mark.full
def test_a_bad_request_fails_alone():
    """Although the server computes it together with good ones."""
    model = build_model()
    own = {"max_queue_delay_microseconds": 500_000, "inference_micro_batch_size": 16}
    with CriticJob(**own, server={"frontend": "asgi"}) as job:
        raw = Raw(job.wait_until_serving())
        tokens = np.arange(1, 11).reshape(2, 5)
        lengths = np.full((2, 1), 5)
        rewards, _values = expected_scores(model, torch.from_numpy(tokens), [5, 5])
        bad = {
            1: ({"tokens": tokens, "sequence_lengths": lengths + 1}, "holds 6"),
            4: ({"tokens": np.full((2, 5), RAISE), "sequence_lengths": lengths}, "cannot stand"),
            6: ({"tokens": tokens, "sequence_lengths": lengths[:, :0]}, "shape [2, 0]"),
            7: ({"tokens": tokens, "tokenizer": [[b"x"]] * 2}, "policy's tokenizer"),
        }

        def ask(number):
            good = {"tokens": tokens, "sequence_lengths": lengths}
            try:
                return raw("critic_infer", **bad.get(number, (good, ""))[0])["rewards"]
            except Exception as error:
                return str(error)

        with concurrent.futures.ThreadPoolExecutor(10) as pool:
            replies = list(pool.map(ask, range(10)))
        for number, reply in enumerate(replies):
            if number in bad:
                assert bad[number][1] in reply and "Traceback" not in reply, reply
            else:
                np.testing.assert_allclose(reply, rewards[:, None].numpy(), rtol=1e-6)
        assert_serving(raw, model)


def two_rank_client(port):
    """On each rank: what the client's calls return or raise."""
    from nemo_aligner.parallel import parallel_state

    parallel_state.initialize(tensor_model_parallel_size=1)
    rank = parallel_state.get_data_parallel_rank()
    client = RemoteGPTRMCriticClient(client_config(port))
    tokens = torch.tensor([[1, 2, 3, 0, 0, 0], [4, 5, 6, 7, 0, 0]]) + rank
    rewards, values = client.infer_rm_critic(
        {"response_tokens": tokens, "response_lengths": torch.tensor([3, 4])}
    ).result()
    data = make_training_data(6, 9, seed=1)
    rows = slice(0, 4) if rank == 0 else slice(4, 6)  # shares may be uneven
    data = {name: tensor[rows] for name, tensor in data.items()}
    data |= {"response_tokens": data["tokens"], "values": data["prev_values"]}
    loss = client.train(data).result()
    status = client.save(actor_step=7).result()
    client.check_status(7, {})
    tokens = torch.full((1, 4), RAISE if rank == 0 else 1)
    bad = {"response_tokens": tokens, "response_lengths": torch.tensor([4])}
    data["response_tokens"] = torch.full_like(data["tokens"], RAISE)
    errors = []
    for call in (
        lambda: client.infer_rm_critic(bad).result(),
        lambda: client.train(data).result(),
        lambda: client.check_status(8, {}),
    ):
        try:
            call()
            errors.append("")
        except (ServerRequestError, UserError) as error:
            errors.append(str(error))
    client.communicator.close()
    return rewards, values, loss, status, errors


@pytest.mark.full
def test_clients_of_two_ranks(job, mirror):
    """Scores reach every rank, training rows are gathered, a remote error is raised on all with
    its place.
    """
    results = run_ranks(two_rank_client, 2, 100, job.port)
    for rank, (rewards, values, _loss, _status, _errors) in enumerate(results):
        tokens = torch.tensor([[1, 2, 3, 0, 0, 0], [4, 5, 6, 7, 0, 0]]) + rank
        want_rewards, want_values = expected_scores(mirror, tokens, torch.tensor([3, 4]))
        torch.testing.assert_close(rewards, want_rewards)
        want_values = want_values[:, :-1].clone()
        want_values[:, 4:] = 0  # columns after the longest row are not sent
        torch.testing.assert_close(values, want_values)
    loss = expected_update(mirror, make_training_data(6, 9, seed=1), gbs=4)
    for _rewards, _values, got_loss, status, errors in results:
        assert got_loss == pytest.approx(loss, rel=1e-5) and status == 0
        infer_error, train_error, status_error = errors
        assert re.search(r"cannot stand \(critic_job.py:\d+ in misbehave\)$", train_error)
        assert "actor is at step 8" in status_error
    assert "cannot stand" in results[0][4][0]
    assert_serving(Raw(job), mirror)


def test_an_update_in_pieces_is_one_update(job, mirror, monkeypatch):
    """Six rows make two optimizer steps; the pieces have two rows."""
    from nemo_aligner.servers import served_model

    raw, data = Raw(job), make_training_data(rows=6, width=9, seed=5)
    row_bytes = 8 * 9 + 3 * 4 * 8
    monkeypatch.setattr(served_model, "PIECE_BYTES", 2 * row_bytes + 20)
    sizes = []
    run = exchange.Exchange.run
    sized = lambda sent: sizes.append(sum(map(len, sent.body)))
    counted = lambda self, sent, limit: sized(sent) or run(self, sent, limit)
    monkeypatch.setattr(exchange.Exchange, "run", counted)
    before = int(raw("critic_status", dummy_var=[0])["critic_step"][0])
    with contextlib.closing(RemoteGPTRMCriticClient(client_config(job))) as client:
        batch = {"response_tokens": data["tokens"], "values": data["prev_values"], **data}
        loss = client.train(batch).result()
    assert len(sizes) == 3 and max(sizes) < 2 * row_bytes + 1000
    assert loss == pytest.approx(expected_update(mirror, data, gbs=4), rel=1e-5)
    assert_serving(raw, mirror)
    assert int(raw("critic_status", dummy_var=[0])["critic_step"][0]) == before + 2

    # A client that disappears: its pieces change nothing, and the next update is whole again.
    part = {name: tensor[:3].numpy() for name, tensor in data.items()}
    request = {**part, "request_id": [b"gone"], "piece": [0, 6]}
    assert np.isnan(raw("critic_train", **request)["loss_mean"]).all()
    data = {name: tensor[:4] for name, tensor in data.items()}
    answer = raw("critic_train", **numpy(data), request_id=[b"whole"], piece=[0, 4])
    assert answer["loss_mean"][0] == pytest.approx(expected_update(mirror, data, 4), rel=1e-5)
    again = raw("critic_train", **part, request_id=[b"whole"], piece=[0, 4])
    assert again["loss_mean"] == answer["loss_mean"]
    assert_serving(raw, mirror)


def test_sigint_ends_the_job_clean(job):
    """Last of this job's tests: with a client connected, and after all the errors above."""
    raw = Raw(job)
    with raw._make("critic_infer") as client:
        client.infer_batch(**INFER)
        job.signal_rank(0, signal.SIGINT)
        job.must_exit_with(0)


# ---- two ranks ----


def in_background(function, **arguments):
    """Start `function` on a thread; returns a list that will hold its exception, and the
    thread.
    """
    errors = []

    def run():
        try:
            function(**arguments)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return errors, thread


@pytest.mark.full
def test_a_server_with_triton_encrypts(tmp_path):
    certificate, key = make_certificate(tmp_path)
    section = {"frontend": "triton", "tls_certificate": str(certificate), "tls_key": str(key)}
    rows = {"tokens": np.arange(1, 6)[None], "sequence_lengths": np.full((1, 1), 5)}
    with CriticJob(server=section) as job:
        address = "localhost", job.wait_until_serving().port
        peer = exchange.Peer(*address, tls=client_tls(certificate, "remote_critic_rm.critic"))
        request = exchange.InferRequest("critic_infer", rows)
        values = exchange.Exchange(peer).run(request, patience(60))["values"]
        assert values.shape == (1, 5) and values.any()
        with pytest.raises(exchange.ConnectionLostError):
            exchange.Exchange(exchange.Peer(*address)).run(request, patience(20))


@pytest.mark.full
@asgi_frontend
def test_two_data_parallel_ranks_under_torchrun(frontend):
    """Numbers, an error that all ranks share, then SIGTERM to rank 1 in the middle of an
    update.
    """
    model = build_model()
    with CriticJob(ranks=2, launcher="torchrun", server={"frontend": frontend}) as job:
        raw = Raw(job.wait_until_serving())
        assert_serving(raw, model)  # 3 rows are padded to 4
        data = make_training_data(rows=10, width=9)
        answer = raw("critic_train", **numpy(data))
        loss = expected_update(model, data, gbs=4)
        np.testing.assert_allclose(answer["loss_mean"][0], loss, rtol=1e-5)
        assert_serving(raw, model)

        bad = {**data, "tokens": torch.full_like(data["tokens"], RAISE)}
        said = r"Message: on rank 0, 1: ArithmeticError: .* cannot stand \(critic_job.py:\d+"
        with pytest.raises(Exception, match=said):
            raw("critic_train", **numpy(bad))
        assert_serving(raw, model)

        raw("critic_save", dummy_var=[0], actor_step=[3])
        raw("critic_train", **TRAIN)
        status = raw("critic_status", dummy_var=[0])
        assert (status["critic_step"][0], status["saved_critic_step"][0]) == (4, 3)
        said = "Message: on rank 0, 1: .*no checkpoint of actor_step=7"
        with pytest.raises(Exception, match=said):
            raw("critic_resume", actor_step=[7])
        for _ in range(2):  # the second time it is there
            status = raw("critic_resume", actor_step=[3])
            status.pop("checkpoints")
            steps = "actor_step", "critic_step", "saved_critic_step"
            assert {name: int(x[0]) for name, x in status.items()} == dict.fromkeys(steps, 3)

        slow = {**data, "tokens": torch.full_like(data["tokens"], SLEEP)}
        errors, thread = in_background(raw, endpoint="critic_train", **numpy(slow))
        wait_until(lambda: job.log().count("SLEEP") == 2, 60, job.log)  # both ranks are in it
        job.signal_rank(1)
        job.must_exit_with(0)
        thread.join(patience(10))
        assert errors and "did not end" in str(errors[0])


@pytest.mark.full
@asgi_frontend
def test_sigterm_waits_for_a_save(frontend):
    """Longer than for other operations; and the client gets its reply. SIGUSR1 to the server and
    all of its processes, as a scheduler sends it to actor and critic, changes nothing.
    """
    with CriticJob(ranks=2, save_s=7.0, server={"frontend": frontend}) as job:
        errors, thread = save_in_background(job)
        for pid in job.rank_pids():
            os.killpg(pid, signal.SIGUSR1)
        job.signal_rank(1)
        wait_until(lambda: "ending the job after the running save" in job.log(), 10, job.log)
        job.must_exit_with(0, 0, limit_s=30)
        thread.join(patience(10))
        assert not errors and json.loads((job.directory / "checkpoint.json").read_text())


@asgi_frontend
@some_of(
    "grace_s, number, times, why",
    [
        (1.0, signal.SIGTERM, 1, "the running save did not end in 1 s"),
        (60.0, signal.SIGINT, 2, "a second Ctrl-C"),
    ],
)
def test_a_save_that_is_abandoned_is_no_success(frontend, grace_s, number, times, why):
    """On both ranks, as a terminal sends Ctrl-C to all processes."""
    own = {"save_grace_s": grace_s, "server": {"frontend": frontend}}
    with CriticJob(ranks=2, save_s=60.0, **own) as job:
        errors, thread = save_in_background(job)
        for _ in range(times):
            for rank in (0, 1):
                job.signal_rank(rank, number)
            wait_until(lambda: "ending the job after the running save" in job.log(), 10, job.log)
            time.sleep(1.2 * (times > 1))
        job.must_exit_with(ExitCode.PRE_EMPTED, ExitCode.PRE_EMPTED)
        thread.join(patience(10))
        assert errors and why in str(errors[0])


def test_parts_of_nemo_aligner_are_enough():
    """Logger and checkpoints with its interface: the critic learns as with others, and knows of
    what step its last checkpoint is.
    """
    own = {"minimal": True, "gradient_clip_val": None, "server": {"frontend": "asgi"}}
    with CriticJob(ranks=2, **own) as job:
        raw, model, data = Raw(job.wait_until_serving()), build_model(), make_training_data(4, 9)
        raw("critic_train", **numpy(data))
        expected_update(model, data, gbs=4)
        assert_serving(raw, model)
        raw("critic_save", dummy_var=[0], actor_step=[7])
        assert (job.directory / "checkpoint.json.minimal").read_text() == "1"
        status = raw("critic_status", dummy_var=[0])
        assert json.loads(status.pop("checkpoints")[0]) == {}
        assert [int(status[name][0]) for name in ("actor_step", "saved_critic_step")] == [7, 1]
        job.signal_rank(1)  # alone, and idle
        job.must_exit_with(0, 0)


@pytest.mark.full
@asgi_frontend
def test_a_checkpoint_is_written_in_the_background(frontend):
    """Meanwhile requests are served and the critic learns; the reply says how it went; SIGTERM
    waits for it.
    """
    with CriticJob(ranks=2, save_s=3.0, background=True, server={"frontend": frontend}) as job:
        raw, model = Raw(job.wait_until_serving()), build_model()
        checkpoint = job.directory / "checkpoint.json"
        full = job.directory / "checkpoint.json.full"
        data = make_training_data(4, 9)

        def written():
            return job.log().count("the checkpoint is being written")

        def save(actor_step):
            before = written()
            sent = {"dummy_var": [0], "actor_step": [actor_step]}
            started = in_background(raw, endpoint="critic_save", **sent)
            wait_until(lambda: written() == before + job.ranks, 60, job.log)
            return started

        def steps():
            status = raw("critic_status", dummy_var=[0])
            names = ("actor_step", "critic_step", "saved_critic_step")
            return [int(status[name][0]) for name in names]

        assert steps() == [0, 0, 0]
        errors, thread = save(1)
        raw("critic_train", **numpy(data))
        expected_update(model, data, gbs=4)
        assert_serving(raw, model)
        assert thread.is_alive() and steps() == [0, 1, 0] and not checkpoint.exists()
        thread.join(patience(20))
        assert not errors and not thread.is_alive() and steps() == [1, 1, 0]
        assert json.loads(checkpoint.read_text()) == {"step": 0, "actor_step": 1}

        full.touch()
        errors, thread = save(2)
        thread.join(patience(20))
        assert "no space left for the checkpoint" in str(errors[0]) and steps() == [1, 1, 0]
        full.unlink()
        assert_serving(raw, model)

        errors, thread = save(3)
        job.signal_rank(1)
        job.must_exit_with(0, 0, limit_s=30)
        thread.join(patience(10))
        assert not errors and json.loads(checkpoint.read_text()) == {"step": 1, "actor_step": 3}


def save_in_background(job):
    """Start a save and return when it runs on all ranks: what `in_background` returns."""
    started = in_background(
        Raw(job.wait_until_serving()), endpoint="critic_save", dummy_var=[0], actor_step=[1]
    )
    being_written = "the checkpoint is being written"
    wait_until(lambda: job.log().count(being_written) == job.ranks, 60, job.log)
    job.look_around()
    return started


@asgi_frontend
def test_a_rank_that_fails_alone_ends_the_job_and_tells_the_client(frontend):
    with CriticJob(ranks=2, server={"frontend": frontend}) as job:
        raw = Raw(job.wait_until_serving())
        job.look_around()
        tokens = np.ones((4, 5), np.int64)
        tokens[3] = RAISE  # a row of rank 1; rank 0 waits for it in a collective
        with pytest.raises(Exception, match=r"on rank 1: ArithmeticError: .* cannot stand \("):
            raw("critic_infer", tokens=tokens, sequence_lengths=np.full((4, 1), 5))
        job.must_exit_with(limit_s=30)


@asgi_frontend
def test_killing_the_critic_in_an_update_is_one_error_with_its_cause(frontend):
    """The update fails, and so does the scoring request that waits for it: nothing is sent to a
    server that may have come back with other weights.
    """
    from nemo_aligner.servers.connection import RESTART_REMEDY

    with CriticJob(server={"frontend": frontend}) as job:
        with contextlib.closing(
            RemoteGPTRMCriticClient(client_config(job.wait_until_serving()))
        ) as client:
            data = make_training_data(4, 9)
            data["tokens"] = torch.full_like(data["tokens"], SLEEP)
            data |= {"response_tokens": data["tokens"], "values": data["prev_values"]}
            update = client.train(data)
            lengths = torch.tensor([5, 5])
            batch = {"response_tokens": torch.ones(2, 5).long(), "response_lengths": lengths}
            scores = client.infer_rm_critic(batch)
            wait_until(lambda: "SLEEP" in job.log(), 60, job.log)  # the model says so
            job.signal_rank(0, signal.SIGKILL)
            killed = time.monotonic()
            with pytest.raises(ServerRequestError) as caught:
                update.result()
            print(f"noticed after {time.monotonic() - killed:.1f} s: {caught.value}")
            where = f"critic_train at 127.0.0.1:{job.port} failed: "
            assert where in str(caught.value) and RESTART_REMEDY in str(caught.value)
            assert time.monotonic() - killed < patience(60)  # long before inference_timeout_s
            with pytest.raises(ServerRequestError, match="critic_infer at .* failed: "):
                scores.result()


def kill_starting_triton(job, times):
    """Kill Triton in each of so many starts of it."""
    killed = set()
    for _ in range(times):

        def starting():
            new = [p for p in job.children_named("tritonserver") if p.pid not in killed]
            return job.children_named("triton_python") and new

        wait_until(starting, 120, job.log, 0.05)
        job.look_around()
        # The others are forks of the first that are to be stubs.
        triton, *forks = (p for p in job.children_named("tritonserver") if p.pid not in killed)
        killed.update([triton.pid, *(fork.pid for fork in forks)])
        triton.kill()


def lose_a_stub(job):
    """Triton alone would wait for it without end."""
    wait_until(lambda: len(job.children_named("triton_python")) >= 3, 120, job.log, 0.02)
    time.sleep(0.3)  # the server has seen them
    job.look_around()
    job.children_named("triton_python")[0].kill()


def suspend_triton(job):
    wait_until(lambda: job.children_named("triton_python"), 120, job.log, 0.02)
    job.look_around()
    job.children_named("tritonserver")[0].suspend()  # others are forks that are to be stubs


def end_once(job):
    kill_starting_triton(job, 1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "start_s", "said"),
    [
        (lose_a_stub, None, r"ended while it started; starting it again \(2 of 3\)"),
        (end_once, None, r"Triton ended while it started; starting it again \(2 of 3\)"),
        (suspend_triton, [10.0, 120.0], r"is not ready after \d+ s; starting it again \(2 of 2\)"),
    ],
    ids=["stub", "end", "hang"],
)
def test_a_triton_that_fails_while_it_starts_is_started_again(fault, start_s, said):
    with CriticJob(start_s=start_s and [patience(start_s[0]), start_s[1]]) as job:
        fault(job)
        job.wait_until_serving()
        assert re.search(said, job.log())
        job.signal_rank(0)
        job.must_exit_with(0)


@pytest.mark.full
def test_a_triton_that_ends_while_it_starts_fails_the_job_on_every_rank():
    with CriticJob(ranks=2) as job:
        kill_starting_triton(job, 3)
        job.must_exit_with(limit_s=30)  # PyTriton alone would wait for two minutes
        assert "Triton ended while it started" in job.log()


BY_ITSELF = "Triton's process for critic_.* ended by itself"
SILENT = "Triton runs, but has not replied to 6 requests in a row; its host"
LOSSES = [
    # One in `make test`: the server looks at all of them in the same way.
    pytest.param("triton_python", signal.SIGKILL, BY_ITSELF),
    pytest.param("tritonserver", signal.SIGKILL, "Triton ended by itself", marks=pytest.mark.full),
    # It holds the tensors of an endpoint.
    pytest.param("spawn_main", signal.SIGKILL, BY_ITSELF, marks=pytest.mark.full),
    pytest.param("tritonserver", signal.SIGSTOP, SILENT, marks=pytest.mark.full),
]


@pytest.mark.parametrize("process, number, words", LOSSES)
def test_a_job_whose_triton_is_lost_ends_with_one_message(process, number, words):
    """A Triton that has lost one of its own processes says that it is ready."""
    with CriticJob(look_s=patience(1.0) if number == signal.SIGSTOP else 5.0) as job:
        job.wait_until_serving()
        job.look_around()
        job.children_named(process)[0].send_signal(number)
        job.must_exit_with(1, limit_s=30)
        assert re.search(words, job.log()), job.log()[-3000:]
