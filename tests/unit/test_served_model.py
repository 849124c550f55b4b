# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests in the form that a server lists, and what is refused: by numbers, without a server,
except for sockets that follow a script.

Real servers of others are in tests/functional/test_servers_of_others.py.
"""

import dataclasses
import json
import socket

import numpy as np
import pytest
from tritonclient.utils import deserialize_bytes_tensor, np_to_triton_dtype, triton_to_np_dtype

from nemo_aligner.core.errors import ServerRequestError
from nemo_aligner.servers import exchange, schema
from nemo_aligner.servers.exchange import InferRequest, Peer
from nemo_aligner.servers.fleet import ServerUnreachableError
from nemo_aligner.servers.http_communicator import HTTPCommunicator
from nemo_aligner.servers.schema import (
    Endpoint,
    ReplyError,
    RequestError,
    TensorSpec,
    validate_outcome,
)
from nemo_aligner.servers.served_model import (
    ADDITIONS,
    DescriptionError,
    ServedModel,
    ServerMismatchError,
    check_served_model,
    fit_requests,
    merge_replies,
    read_served_model,
    warnings_about,
)
from tests.patience import patience
from tests.scripted_server import ScriptedServer, triton_config

pytestmark = pytest.mark.timeout(60)

REWARD = schema.reward_model_endpoint()
TRAIN = schema.critic_train_endpoint()
SAVE = schema.critic_save_endpoint()
OURS = {"infer": schema.critic_infer_endpoint(True)}
OURS |= {"infer alone": schema.critic_infer_endpoint(False), "train": TRAIN, "save": SAVE}
OURS |= {"resume": schema.critic_resume_endpoint(), "status": schema.critic_status_endpoint()}
OURS |= {"reward": REWARD}
SCORING = {"tokens": np.array([[5, 6, 0], [7, 8, 9]]), "sequence_lengths": np.array([[2], [3]])}
SCORING |= {"tokenizer": np.full((2, 1), b"300 tokens, end 299, abc")}
SCORING |= {"prompt_lengths": np.array([[1], [1]])}
TRAINING = {"tokens": np.array([[5, 6, 0], [7, 8, 9]])}
TRAINING |= {"returns": np.array([[0.5, np.nan], [0.25, -1.0]], np.float32)}
TRAINING |= {"prev_values": np.array([[0.5, 0.0], [0.1, -1.0]], np.float32)}
TRAINING |= {"mask": np.array([[1, 0], [1, 1]], np.float32), "request_id": np.array([b"abc"])}
TRAINING |= {"piece": np.array([0, 2])}
SAVING = {"dummy_var": np.zeros(1, np.int64), "actor_step": np.array([3])}


def described(endpoint: Endpoint, max_batch_size: int | None = None) -> ServedModel:
    """`endpoint` as a server of this package lists it, read over HTTP."""
    with ScriptedServer() as server:
        server.config = triton_config(endpoint, max_batch_size)
        return read_served_model(Peer("127.0.0.1", server.port), endpoint.name, patience(5))


def others(endpoint: Endpoint, *names: str, batched: bool | None = None, **forms) -> ServedModel:
    """A server that lists the inputs `names` of `endpoint`, and `forms`: (dtype, shape)."""
    inputs = tuple(spec for spec in endpoint.inputs if spec.name in names)
    inputs += tuple(TensorSpec(name, *form) for name, form in forms.items())
    size = 100 if (endpoint.batching if batched is None else batched) else 0
    return ServedModel(endpoint.name, inputs, tuple(o.name for o in endpoint.outputs), size)


def sent(request: InferRequest) -> dict:
    """The arrays of a request, read by the definition of KServe v2's binary tensors."""
    body = b"".join(request.body)
    assert len(body) == int(request.headers["Content-Length"])
    start = int(request.headers["Inference-Header-Content-Length"])
    arrays = {}
    for item in json.loads(body[:start])["inputs"]:
        end = start + item["parameters"]["binary_data_size"]
        raw, start = body[start:end], end
        is_text = item["datatype"] == "BYTES"
        dtype = triton_to_np_dtype(item["datatype"])
        flat = deserialize_bytes_tensor(raw) if is_text else np.frombuffer(raw, dtype)
        arrays[item["name"]] = flat.reshape(item["shape"])
    assert start == len(body)
    return arrays


# ---- servers of this package ----


@pytest.mark.parametrize("name", OURS)
def test_a_server_of_this_package_gets_the_same_bytes_as_ever(name):
    endpoint = OURS[name]
    everything = {**SCORING, **TRAINING, **SAVING}
    data = {s.name: everything[s.name] for s in endpoint.inputs if s.name != "sentences"}
    served = described(endpoint)
    check_served_model(served, endpoint, "here")
    assert warnings_about(served, endpoint, "here") == []
    (request,) = fit_requests(served, endpoint, data)
    assert vars(request) == vars(InferRequest(endpoint.name, data))


def test_large_arrays_are_sent_from_where_they_lie_and_small_ones_in_one_part():
    large = np.zeros((2, exchange.ONE_PART_BYTES // 8))
    request = InferRequest("m", {"large": large, "text": np.array([b"ab", b""]), "no": large[:0]})
    head, data, text = request.body
    assert np.shares_memory(np.frombuffer(data, np.uint8), large)
    assert bytes(text) == b"\x02\0\0\0ab\0\0\0\0"
    none = {"name": "no", "shape": [0, large.shape[1]], "datatype": "FP64"}
    assert json.loads(head)["inputs"][2] == {**none, "parameters": {"binary_data_size": 0}}
    assert len(InferRequest("m", {"small": large[:, :2].T}).body) == 1


@pytest.mark.parametrize("dtype", [bool, np.int8, np.float16, np.float32, np.int64, np.uint8])
def test_the_bytes_are_those_of_tritons_own_client(dtype):
    import tritonclient.http

    numbers = np.arange(6).reshape(2, 3).T.astype(dtype)
    data = {"a": numbers, "b": np.array([["é"], [b"c"]], object)}
    inputs = []
    for name, array in data.items():
        kind = np_to_triton_dtype(array.dtype)
        inputs.append(tritonclient.http.InferInput(name, array.shape, kind))
        inputs[-1].set_data_from_numpy(array)
    theirs, length = tritonclient.http.InferenceServerClient.generate_request_body(inputs)
    request = InferRequest("m", data)
    ours = b"".join(request.body)
    size = int(request.headers["Inference-Header-Content-Length"])
    assert json.loads(ours[:size]) == json.loads(theirs[:length])
    assert ours[size:] == theirs[length:]


def test_every_addition_is_a_tensor_or_endpoint_of_the_schema():
    inputs = {spec.name for endpoint in OURS.values() for spec in endpoint.inputs}
    endpoints = {endpoint.name for endpoint in OURS.values()}
    for addition in ADDITIONS:
        assert addition.name in {"input": inputs, "endpoint": endpoints}[addition.kind]


# ---- servers of others ----


def test_what_a_server_does_not_list_is_not_sent():
    served = others(REWARD, "tokens", "sequence_lengths")
    (request,) = fit_requests(served, REWARD, SCORING)
    assert list(sent(request)) == ["tokens", "sequence_lengths"]
    assert sent(request)["tokens"].tolist() == SCORING["tokens"].tolist()
    (warning,) = warnings_about(served, REWARD, "h:1")
    assert warning.startswith("'reward_model' at h:1 has no input 'tokenizer'")

    served = others(TRAIN, "tokens", "returns", "prev_values", "mask")
    (request,) = fit_requests(served, TRAIN, TRAINING)
    assert list(sent(request)) == ["tokens", "returns", "prev_values", "mask"]
    assert warnings_about(served, TRAIN, "h:1") == []


def test_dtypes_and_shapes_are_those_that_the_server_lists():
    lengths = {"sequence_lengths": (np.int64, ()), "prompt_lengths": (np.float32, (1,))}
    served = others(REWARD, tokens=(np.int32, (-1,)), **lengths)
    arrays = sent(fit_requests(served, REWARD, SCORING)[0])
    assert arrays["tokens"].dtype == np.int32
    assert arrays["tokens"].tolist() == SCORING["tokens"].tolist()
    assert arrays["sequence_lengths"].tolist() == [2, 3]
    assert arrays["prompt_lengths"].tolist() == [[1.0], [1.0]]

    flags = others(TRAIN, "tokens", "returns", "prev_values", mask=(np.bool_, (-1, -1)))
    mask = sent(fit_requests(flags, TRAIN, TRAINING)[0])["mask"]
    assert mask.tolist() == [[True, False], [True, True]]
    # One sample of a model that takes batches of samples, PyTriton's default.
    batched = others(SAVE, "dummy_var", batched=True)
    assert sent(fit_requests(batched, SAVE, SAVING)[0])["dummy_var"].tolist() == [[0]]
    batched = others(TRAIN, "tokens", "returns", "prev_values", "mask", batched=True)
    (request,) = fit_requests(batched, TRAIN, TRAINING)
    assert sent(request)["tokens"].shape == (1, 2, 3) and sent(request)["mask"].shape == (1, 2, 2)


@pytest.mark.parametrize(
    "endpoint, data, forms, words",
    [
        (REWARD, SCORING, {"tokens": (np.int64, (9,))}, ["[2, 3]", "pad_to_length", "'N', 9"]),
        (REWARD, {**SCORING, "tokens": np.array([[300]])}, {"tokens": (np.int8, (-1,))}, ["int8"]),
        (REWARD, SCORING, {"tokens": (np.bytes_, (-1,))}, ["tokens: bytes", "int64 values"]),
        (REWARD, SCORING, {"sequence_lengths": (np.int64, (1, 1))}, ["'sequence_lengths' is"]),
        (TRAIN, TRAINING, {"returns": (np.float16, (-1, -1))}, None),
        (TRAIN, TRAINING, {"prev_values": (np.float16, (-1, -1))}, ["float16", "float32 values"]),
        (TRAIN, TRAINING, {"returns": (np.int64, (-1, -1))}, ["returns: int64", "float32 values"]),
        (REWARD, SCORING, {"length": (np.int64, (1,))}, ["requires the input 'length'"]),
    ],
)
def test_what_would_change_a_number_is_refused(endpoint, data, forms, words):
    listed = [s.name for s in endpoint.inputs if s.name in data and s.name not in forms]
    served = others(endpoint, *listed, **forms)
    if words is None:  # 0.5, 0.25, -1 and nan fit
        returns = sent(fit_requests(served, endpoint, data)[0])["returns"]
        np.testing.assert_array_equal(returns, data["returns"])
        return
    with pytest.raises(RequestError) as caught:
        fit_requests(served, endpoint, data)
    for word in words:
        assert word in str(caught.value)


def test_replies_take_the_form_of_the_schema():
    for rewards in (np.array([1, 2]), np.array([[1.0], [2.0]]), np.array([1.0, 2.0], np.float16)):
        merged = merge_replies(REWARD, [{"rewards": rewards}])["rewards"]
        assert merged.dtype == np.float32 and merged.tolist() == [[1.0], [2.0]]
    ours = {"rewards": np.ones((2, 1), np.float32)}
    assert merge_replies(REWARD, [ours])["rewards"] is ours["rewards"]
    loss = merge_replies(TRAIN, [{"loss_mean": np.array([0.5])}])["loss_mean"]
    assert loss.dtype == np.float32 and loss.tolist() == [0.5]
    with pytest.raises(ReplyError, match="different tensors"):
        merge_replies(REWARD, [ours, {}])
    with pytest.raises(ReplyError, match="different widths"):
        merge_replies(REWARD, [ours, {"rewards": np.ones((2, 2), np.float32)}])


@pytest.mark.parametrize(
    "endpoint, served, words",
    [
        (REWARD, others(REWARD, "tokens"), "has no input 'sequence_lengths'"),
        (REWARD, others(REWARD, "sentences"), "has no input"),
        (
            REWARD,
            others(REWARD, "tokens", "sequence_lengths", language=(np.bytes_, (1,))),
            "requires an input 'language', which is never sent.*language: bytes",
        ),
        (
            REWARD,
            dataclasses.replace(others(REWARD, *SCORING), outputs=("score",)),
            "no output 'rewards'.*outputs score; a client sends sequence_lengths, tokens",
        ),
        (
            OURS["infer"],
            dataclasses.replace(others(OURS["infer"], *SCORING), outputs=("values",)),
            "no output 'rewards'.*combine_rm_and_critic_server=False.*Set both alike",
        ),
        (TRAIN, others(TRAIN, "tokens", "returns", "mask"), "has no input 'prev_values'"),
        (SAVE, others(SAVE, "actor_step"), "has no input 'dummy_var'"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused_with_what_it_has(endpoint, served, words):
    with pytest.raises(ServerMismatchError, match=f"'{endpoint.name}' at h:1 cannot.*{words}"):
        check_served_model(served, endpoint, "h:1")


def test_a_critic_that_gives_rewards_nobody_asked_for_is_taken():
    check_served_model(described(OURS["infer"]), OURS["infer alone"], "h:1")


@pytest.mark.parametrize(
    "config, words",
    [
        ({}, "cannot be read .KeyError"),
        ([1], "cannot be read"),
        ({**triton_config(SAVE), "input": [{"name": "a"}]}, "cannot be read .KeyError"),
        ({"input": [{"name": "a", "data_type": "TYPE_ODD", "dims": [1]}]}, "data type ODD"),
    ],
)
def test_a_description_that_cannot_be_read_is_named(config, words):
    with ScriptedServer() as server:
        server.config = config
        with pytest.raises(DescriptionError, match=f"/v2/models/x/config.*{words}"):
            read_served_model(Peer("127.0.0.1", server.port), "x", patience(5))
        communicator = HTTPCommunicator(init_timeout_s=0.5)
        with communicator, pytest.raises(ServerUnreachableError, match=words):
            communicator.add_server_by_name("critic_save", "127.0.0.1", server.port, SAVE)
    with pytest.raises(DescriptionError, match="no reply"):
        with socket.create_server(("127.0.0.1", 0)) as unused:
            port = unused.getsockname()[1]
        read_served_model(Peer("127.0.0.1", port), "x", patience(5))


# ---- requests that change a server's state ----


def test_an_update_is_sent_once_whatever_happens():
    """Without a `request_id` the server could not tell a repeated one from a new one."""
    bare = dataclasses.replace(TRAIN, inputs=TRAIN.inputs[:4])
    with ScriptedServer(lambda *_: b"") as server, HTTPCommunicator() as communicator:
        server.config = triton_config(bare)
        communicator.add_server_by_name("critic_train", "127.0.0.1", server.port, TRAIN)
        pending = communicator.send_data_to_server("critic_train", TRAINING, batching=False)
        with pytest.raises(ServerRequestError, match="RemoteDisconnected"):
            pending.result()
        assert server.requests == 1


@pytest.mark.parametrize(
    "endpoint, reply, words",
    [
        (TRAIN, {}, "no number 'loss_mean'.*whether 'critic_train' was carried out is unknown"),
        (TRAIN, {"loss_mean": np.array([np.nan])}, "'loss_mean' is nan.*of no use"),
        (TRAIN, {"loss_mean": np.array([], np.float32)}, "no number 'loss_mean'"),
        (SAVE, {"status": np.array([1])}, "status .1., not 0: the checkpoint was not written"),
        (SAVE, {"stat": np.array([0])}, "only .'stat'.*whether 'critic_save'"),
    ],
)
def test_an_update_or_checkpoint_that_failed_is_noticed(endpoint, reply, words):
    with pytest.raises(ReplyError, match=words):
        validate_outcome(endpoint, reply)
