# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Any arrays as a request: accepted, and then the same after the wire, or refused by name."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from nemo_aligner.core.errors import UserError
from nemo_aligner.servers import schema
from nemo_aligner.servers.exchange import InferRequest
from nemo_aligner.servers.requests import process_inputs
from nemo_aligner.servers.schema import ReplyError, RequestError
from tests.properties import tried
from tests.unit.test_served_model import sent as read

ENDPOINTS = [schema.critic_infer_endpoint(True), schema.critic_train_endpoint()]
ENDPOINTS += [schema.critic_save_endpoint(), schema.critic_resume_endpoint()]
ENDPOINTS += [schema.critic_status_endpoint(), schema.reward_model_endpoint()]
NAMES = sorted({spec.name for endpoint in ENDPOINTS for spec in endpoint.inputs})
SHAPES = arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
FEW = st.binary(max_size=4)
BYTES = arrays_of.arrays(np.dtype(object), SHAPES, elements=FEW, fill=st.nothing())
NUMBERS = arrays_of.arrays(
    st.sampled_from([np.int64, np.float32, np.int32, np.float64, bool]).map(np.dtype), SHAPES
)


def fitting(spec, batching, rows):
    """Arrays of the right type and number of dimensions, with any content, and never empty."""
    sizes = [st.integers(1, 3) if size == -1 else st.just(size) for size in spec.shape]
    shape = st.tuples(*([st.just(rows)] * batching), *sizes)
    if spec.dtype is np.bytes_:
        elements = st.binary(max_size=70)
        return arrays_of.arrays(np.dtype(object), shape, elements=elements, fill=st.nothing())
    few = st.sampled_from([-1, 0, 1, 2]) if spec.dtype is np.int64 else st.sampled_from([0, 1])
    values = arrays_of.from_dtype(np.dtype(spec.dtype))
    return arrays_of.arrays(np.dtype(spec.dtype), shape, elements=few | values)


@st.composite
def fitting_requests(draw, endpoint):
    rows = draw(st.integers(1, 3))
    given = [spec for spec in endpoint.inputs if not spec.optional or draw(st.booleans())]
    return {spec.name: draw(fitting(spec, endpoint.batching, rows)) for spec in given}


def accepted(endpoint, data):
    """Whether the client sends it; a refusal names a tensor."""
    try:
        schema.validate_request(endpoint, data)
    except RequestError as error:
        assert any(name in str(error) for name in [*data, *NAMES])
        return False
    return True


@tried(150)
@given(
    endpoint=st.sampled_from(ENDPOINTS),
    data=st.dictionaries(st.sampled_from([*NAMES, "other"]), BYTES | NUMBERS, max_size=4),
)
def test_any_arrays_are_refused_by_name_or_fit_the_endpoint(endpoint, data):
    if accepted(endpoint, data):
        specs = {spec.name: spec for spec in endpoint.inputs}
        for name, array in data.items():
            assert array.ndim == len(specs[name].shape) + endpoint.batching and array.size


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.name)
@tried(25)
@given(data=st.data())
def test_what_is_accepted_comes_out_the_same(endpoint, data):
    sent = data.draw(fitting_requests(endpoint))
    assert accepted(endpoint, sent)
    received = read(InferRequest(endpoint.name, sent))
    assert received.keys() == sent.keys()
    for name, array in sent.items():
        assert received[name].shape == array.shape
        if array.dtype == object:
            assert received[name].tolist() == array.tolist()
        else:
            assert received[name].dtype == array.dtype
            assert received[name].tobytes() == np.ascontiguousarray(array).tobytes()  # NaN too


@tried(100)
@given(data=fitting_requests(schema.critic_train_endpoint()))
def test_any_content_of_a_train_request(data):
    samples = {name: data[name] for name in ("tokens", "returns", "prev_values", "mask")}
    try:
        schema.validate_training_inputs(**samples, vocab_size=9, max_length=3)
    except RequestError as error:
        assert any(f"'{name}'" in str(error) for name in samples)
    else:
        assert samples["tokens"].size and set(np.unique(samples["mask"])) <= {0, 1}
        used = samples["mask"] == 1
        assert (np.abs(samples["returns"][used]) <= 1e6).all()
        assert (np.abs(samples["prev_values"][used]) <= 1e6).all()
    if "request_id" in data:
        try:
            assert 1 <= len(schema.read_request_id(data["request_id"])) <= 64
        except RequestError as error:
            assert "'request_id'" in str(error)


def tokenize(texts):
    return np.ones((len(texts), 2), np.int64), np.full((len(texts),), 2, np.int64)


@tried(100)
@given(data=fitting_requests(schema.reward_model_endpoint()))
def test_any_content_of_a_scoring_request(data):
    try:
        schema.validate_tokenizer(data.pop("tokenizer", None), own="a")
        found = process_inputs(data, tokenize)
        limits = {"vocab_size": 9, "max_length": 3, "prompt_lengths": data.get("prompt_lengths")}
        schema.validate_scoring_inputs(found["inputs"], found["sequence_length"], **limits)
    except UserError as error:
        assert any(name in str(error) for name in [*NAMES, "sentences", "tokenizer"])
    else:
        assert found["inputs"].size and (found["inputs"] < 9).all()


@pytest.mark.full
@tried(50)
@given(texts=st.lists(st.text(max_size=5), max_size=3))
def test_texts_arrive_as_they_were(texts):
    sent = np.empty((len(texts), 1), object)
    sent[:, 0] = [text.encode() for text in texts]
    arrived = []
    process_inputs({"sentences": sent}, lambda them: (arrived.extend(them) or [], []))
    assert arrived == texts


def test_one_long_text_takes_no_room_in_the_rows_of_others():
    sent = np.array([[b"x" * 2**20]] + [[b"y"]] * 511, object)
    tracemalloc.start()
    try:
        process_inputs({"sentences": sent}, lambda texts: ([], []))
        assert tracemalloc.get_traced_memory()[1] < 2**24  # 512 MiB before
    finally:
        tracemalloc.stop()


@tried(100)
@given(
    endpoint=st.sampled_from(ENDPOINTS[:1] + ENDPOINTS[-1:]),
    reply=st.dictionaries(st.sampled_from(["rewards", "values"]), BYTES | NUMBERS),
    samples=st.integers(0, 3),
)
def test_any_reply(endpoint, reply, samples):
    try:
        schema.validate_reply(endpoint, reply, samples, np.ones((samples, 2), bool))
    except ReplyError as error:
        assert any(f"'{spec.name}'" in str(error) for spec in endpoint.outputs)
    else:
        assert np.isfinite(reply["rewards"]).all()


@tried(60)
@given(
    endpoint=st.sampled_from(ENDPOINTS[1:3]),
    reply=st.dictionaries(st.sampled_from(["loss_mean", "status"]), BYTES | NUMBERS),
)
def test_any_outcome(endpoint, reply):
    (spec,) = endpoint.outputs
    try:
        schema.validate_outcome(endpoint, reply)
    except ReplyError as error:
        assert spec.name in str(error) or endpoint.name in str(error)
    else:
        assert np.isfinite(reply[spec.name]).all()
