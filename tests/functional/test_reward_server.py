# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The reward-model server as users start it: real scripts, one and two ranks, real clients.

Expected numbers come from the same model in this process, called on one unpadded row at a time.
"""

import concurrent.futures
import contextlib
import random
import socket

import numpy as np
import pytest
import torch

from nemo_aligner.core.endings import ExitCode
from nemo_aligner.core.errors import ServerRequestError
from nemo_aligner.core.tokenizer import tokenizer_fingerprint
from nemo_aligner.servers.ports import find_free_port
from nemo_aligner.servers.scoring_clients import RemoteGPTRMClient
from tests.cases import says
from tests.functional.jobs import assert_ended_well, remote_rm, reward_server, wait_until_serving
from tests.patience import patience
from tests.tiny_models import tiny_config

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings(
        "ignore:Client network and/or connection timeout"
    ),  # said of time-outs that are larger
]
CONTEXT, VOCAB = 48, 300  # of the tiny model
TOLERANCE = {"rtol": 0, "atol": 1e-5}
TEXTS = ["the film", "a dull plot and a long evening", "I", "Review: the story is"]
TEXTS += ["loved the music", "no", "scenes"]


@pytest.fixture(scope="module")
def model(tiny_tokenizer_dir):
    """The served model as this process has it; random weights."""
    from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel

    model = MegatronGPTRewardModel(
        tiny_config(tiny_tokenizer_dir, seed=4, output_sequence=False, force_head_dtype="float32")
    )
    model.prepare_for_inference()
    return model


@pytest.fixture(scope="module")
def rm_file(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "rm.nemo"
    model.save_to(str(path))
    return path


def make_rows(count: int, seed: int = 0, longest: int = CONTEXT) -> list[torch.Tensor]:
    """`count` texts of 1 to `longest` tokens; the first one has `longest`."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [longest] + torch.randint(1, longest + 1, (count - 1,), generator=generator).tolist()
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]


def request(rows: list[torch.Tensor], width: int | None = None, fill=None) -> dict:
    """Arrays of an infer request; columns after a row's end hold 0, or random tokens if `fill` is
    a seed.
    """
    lengths = np.array([[len(row)] for row in rows])
    shape = (len(rows), width or int(lengths.max()))
    odd = lambda: np.random.default_rng(fill).integers(0, VOCAB, shape)
    tokens = np.zeros(shape, np.int64) if fill is None else odd()
    for row, tokens_of_row in zip(rows, tokens):
        tokens_of_row[: len(row)] = row.numpy()
    return {"tokens": tokens, "sequence_lengths": lengths}


def direct(model, rows: list[torch.Tensor]) -> np.ndarray:
    """Rewards [N, 1] of the model itself, one unpadded row at a time."""
    scores = [model.infer((row[None], torch.tensor([len(row)]))) for row in rows]
    return torch.cat(scores).reshape(-1, 1).numpy()


def ask(port: int, name: str = "reward_model", **arrays) -> dict:
    """A request without any of our client's checks."""
    from pytriton.client import ModelClient

    limits = {"init_timeout_s": patience(20), "inference_timeout_s": patience(60)}
    with ModelClient(f"http://127.0.0.1:{port}", name, **limits) as client:
        return client.infer_batch(**{key: np.asarray(array) for key, array in arrays.items()})


def through_client(
    port: int, rows: list[torch.Tensor], pad_to_length=None, tokenizer=None
) -> np.ndarray:
    """Rewards [N, 1] as an actor gets them; the rollout is padded with the last token id, as
    `infer` pads with eos.
    """
    with contextlib.closing(
        RemoteGPTRMClient(remote_rm(port, pad_to_length=pad_to_length), tokenizer)
    ) as client:
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=VOCAB - 1)
        lengths = torch.tensor([len(row) for row in rows])
        rollout = {"response_tokens": tokens, "response_lengths": lengths}
        return client.infer_rm(rollout).result().numpy()


def assert_scores_are_direct(port: int, model) -> None:
    """Whatever the number of rows, the padding and the way in, the rewards are those of the model
    itself.
    """
    sizes = [(1, 1, None, None), (1, 5, 48, 3), (2, 48, None, None), (3, 9, 11, 4)]
    sizes += [(5, 30, 48, None), (9, 17, 31, 5), (16, 48, 48, 6)]
    for count, longest, width, fill in sizes:
        rows = make_rows(count, seed=count, longest=longest)
        answer = ask(port, **request(rows, width, fill))
        assert set(answer) == {"rewards"} and answer["rewards"].dtype == np.float32
        np.testing.assert_allclose(answer["rewards"], direct(model, rows), **TOLERANCE)
    rows = make_rows(7, seed=11, longest=20)
    for pad_to_length in (None, 20, 48):
        np.testing.assert_allclose(
            through_client(port, rows, pad_to_length), direct(model, rows), **TOLERANCE
        )
    answer = ask(port, sentences=[[text.encode()] for text in TEXTS])
    np.testing.assert_allclose(
        answer["rewards"], [[float(model.infer([text]))] for text in TEXTS], **TOLERANCE
    )


# ---- one rank ----


@pytest.fixture(scope="module", params=["asgi", pytest.param("triton", marks=pytest.mark.full)])
def port(request, rm_file):
    """Port of a running server with one rank."""
    port, front = find_free_port(), f"server.frontend={request.param}"
    folder = rm_file.parent / request.param
    with reward_server(rm_file, folder, port, front) as job:
        wait_until_serving(job)
        yield port
        assert_ended_well(job, job.stop())


def test_scores_equal_the_model_called_directly(port, model):
    assert_scores_are_direct(port, model)


def test_requests_that_come_together_get_their_own_rewards(port, model, tiny_tokenizer):
    """Many clients at once: requests of the same width and of others, some that name their
    tokenizer, and sentences. Triton merges what comes together.
    """
    name = tokenizer_fingerprint(tiny_tokenizer).encode()

    def one(seed):
        rng = random.Random(seed)
        if seed % 4 == 3:
            texts = rng.sample(TEXTS, 3)
            rewards = ask(port, sentences=[[text.encode()] for text in texts])["rewards"]
            return rewards, [[float(expected[text])] for text in texts]
        rows = make_rows(rng.randint(1, 5), seed, longest=12)
        arrays = request(rows, rng.choice([12, 12, 15]))
        named = {"tokenizer": np.full((len(rows), 1), name)} if seed % 4 == 1 else {}
        return ask(port, **arrays, **named)["rewards"], rows

    expected = {text: model.infer([text]) for text in TEXTS}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(one, range(24)))
    for rewards, wanted in results:
        wanted = wanted if isinstance(wanted[0], list) else direct(model, wanted)
        np.testing.assert_allclose(rewards, wanted, **TOLERANCE)


GOOD = {"tokens": np.ones((2, 5), np.int64), "sequence_lengths": np.full((2, 1), 5)}


@pytest.mark.parametrize(
    "request_, words",
    [
        ({"tokens": GOOD["tokens"]}, ["'sequence_lengths' is missing", "'sentences'"]),
        ({**GOOD, "tokens": np.full((2, 5), 300)}, ["the id 300", "[0, 300)"]),
        ({**GOOD, "tokens": np.ones((2, 49), np.int64)}, ["49 columns", "encoder_seq_length"]),
        ({"sentences": [[b"fine"], [b""]]}, ["sentence 1 has 0 tokens"]),
        ({"sentences": [[b"x y z " * 40]]}, ["sentence 0 has", "encoder_seq_length=48"]),
        ({"sentences": [[b"fine"], [b"\xff\xfe"]]}, ["'sentences'", "sample 1", "UTF-8"]),
    ],
    ids=lambda value: "-".join(value)[:40] if isinstance(value, list) else "",
)
def test_wrong_requests_are_refused_and_the_server_goes_on(port, model, request_, words):
    from pytriton.client.exceptions import PyTritonClientInferenceServerError

    with pytest.raises(PyTritonClientInferenceServerError) as caught:
        ask(port, **request_)
    said = str(caught.value).replace(" ", "").lower()  # each front has words of its own
    for word in words:
        assert word.replace(" ", "").lower() in said, caught.value
    rows = make_rows(3, seed=1)
    found = ask(port, **request(rows))["rewards"]
    np.testing.assert_allclose(found, direct(model, rows), **TOLERANCE)


def test_a_policy_of_other_tokens_is_refused(port, tiny_tokenizer, reversed_tokenizer_dir):
    from nemo.collections.common.tokenizers import AutoTokenizer

    rows = make_rows(3, seed=3)
    other = AutoTokenizer(reversed_tokenizer_dir)
    theirs, own = tokenizer_fingerprint(other), tokenizer_fingerprint(tiny_tokenizer)
    assert theirs != own
    both = f"the policy's tokenizer ({theirs})", f"this server's ({own})"
    with says(ServerRequestError, *both, "Serve a reward model"):
        through_client(port, rows, tokenizer=other)


# ---- two ranks ----


@pytest.mark.full
@pytest.mark.parametrize(
    "launcher, tp, strip",
    [("python", 1, 4), ("torchrun", 2, "null")],
    ids=["python-dp2", "torchrun-tp2"],
)
def test_two_ranks_give_these_scores_and_end_clean(rm_file, model, tmp_path, launcher, tp, strip):
    port = find_free_port()
    extra = [f"++model.tensor_model_parallel_size={tp}"]
    extra.append(f"inference.strip_sequence_length_to_multiple={strip}")
    extra.append("inference.inference_micro_batch_size=[2,4]")
    with reward_server(rm_file, tmp_path / "two", port, *extra, ranks=2, launcher=launcher) as job:
        wait_until_serving(job)
        assert_scores_are_direct(port, model)
        assert_ended_well(job, job.stop())
        until_the_end, closed, _ = job.log.partition(f"closed port {port}")
        assert (
            closed and "Traceback" not in until_the_end
        )  # torchrun itself shows one for a SIGTERM, afterwards


# ---- other models, and what cannot be served ----


@pytest.fixture(scope="module")
def regression(tiny_tokenizer_dir, tmp_path_factory):
    """The file of a model of two attributes."""
    from nemo_aligner.models.nlp.gpt.megatron_gpt_regression_reward_model import (
        MegatronGPTRegressionRewardModel,
    )

    both = {"num_attributes": 2, "merge_attributes": False}
    cfg = tiny_config(tiny_tokenizer_dir, reward_model_type="regression", regression=both)
    path = tmp_path_factory.mktemp("regression") / "rm.nemo"
    MegatronGPTRegressionRewardModel(cfg).save_to(str(path))
    return path


def test_what_cannot_be_served_is_one_error(regression, rm_file, tiny_tokenizer_dir, tmp_path):
    """A language model; a critic; a port in use; attributes that are not merged. All at once, to
    save their starts.
    """
    from nemo_aligner.models.nlp.gpt.megatron_gpt_critic import MegatronGPTCriticModel
    from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel

    MegatronGPTModel(tiny_config(tiny_tokenizer_dir)).save_to(str(tmp_path / "policy.nemo"))
    cfg = tiny_config(tiny_tokenizer_dir, output_sequence=True)
    MegatronGPTCriticModel(cfg).save_to(str(tmp_path / "critic.nemo"))
    policy, critic = tmp_path / "policy.nemo", tmp_path / "critic.nemo"
    merged = "model.regression.merge_attributes=True"
    weights = "model.regression.attribute_weights=[2.0]"  # of one attribute, not merged
    with socket.socket() as taken, contextlib.ExitStack() as stack:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = taken.getsockname()[1]
        cases = [
            (policy, None, [], ["policy.nemo holds no head", "train_reward_model.py"]),
            (critic, None, [], ["model.output_sequence=True", "serve a reward model"]),
            (rm_file, busy, [], [f"127.0.0.1:{busy}", "inference.port"]),
            (rm_file, None, [weights], ["attribute_weights=[2.0]", merged]),
            (regression, None, ["inference.rewards_per=token"], ["2 attributes", merged]),
        ]
        jobs = []
        for i, (path, port, extra, words) in enumerate(cases):
            job = reward_server(path, tmp_path / str(i), port or find_free_port(), *extra)
            jobs.append((stack.enter_context(job), words))
        for job, words in jobs:
            assert job.wait(150) == ExitCode.USER_ERROR
            message = job.log.split("ERROR: ")[-1]
            assert all(word in message for word in words), job.log[-2000:]
            assert "Traceback" not in job.log


@pytest.mark.full
def test_a_name_of_its_own_and_standardized_rewards(rm_file, model, tmp_path):
    port = find_free_port()
    standard = "{enable: True, mean: 0.5, std: 2.0}"
    extra = ["inference.model_name=helpfulness", f"model.reward_standardization={standard}"]
    with reward_server(rm_file, tmp_path / "named", port, *extra) as job:
        wait_until_serving(job)
        rows = make_rows(4, seed=3)
        answer = ask(port, "helpfulness", **request(rows))
        np.testing.assert_allclose(
            answer["rewards"], (direct(model, rows) - 0.5) / 2.0, **TOLERANCE
        )
        assert_ended_well(job, job.stop())
