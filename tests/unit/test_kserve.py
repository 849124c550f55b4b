# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The wire form of requests and replies; the oracle is Triton's own client. The bytes of requests
are compared in test_served_model.py.
"""

import json

import numpy as np
import pytest
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import np_to_triton_dtype

from nemo_aligner.servers import kserve
from nemo_aligner.servers.schema import (
    Endpoint,
    RequestError,
    TensorSpec,
    critic_infer_endpoint,
    critic_save_endpoint,
)

DTYPES = [bool, *(np.dtype(f"{kind}{size}").type for kind in "iu" for size in (1, 2, 4, 8))]
DTYPES += [np.float16, np.float32, np.float64]
ANY = TensorSpec("texts", np.bytes_, (-1, -1))


def request_of_triton(arrays, binary, outputs=None):
    """Head and tensors of a request, as Triton's client sends it."""
    inputs = []
    for name, array in arrays.items():
        inputs.append(InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array, binary_data=binary)
    body, size = InferenceServerClient.generate_request_body(inputs, outputs=outputs)
    body = body if isinstance(body, bytes) else body.encode()
    size = len(body) if size is None else size
    return json.loads(body[:size]), body[size:]


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_requests_of_tritons_client_are_read(dtype, binary):
    if np.dtype(dtype) == np.float16 and not binary:
        pytest.skip("Triton's client sends these as binary data alone")
    spec = TensorSpec("numbers", dtype, (-1, -1))
    endpoint = Endpoint("model", (ANY, spec), (), batching=False)
    numbers = (np.arange(6).reshape(2, 3) % 2).astype(dtype)
    sent = {"texts": np.array([["é", ""], ["c", "dd"]], object), "numbers": numbers}
    read = kserve.decode_request(endpoint, *request_of_triton(sent, binary))
    assert read["texts"].tolist() == [["é".encode(), b""], [b"c", b"dd"]]
    assert read["numbers"].dtype == dtype and read["numbers"].flags.aligned
    np.testing.assert_array_equal(read["numbers"], sent["numbers"])


@pytest.mark.parametrize("binary", [True, False])
def test_replies_are_read_by_tritons_client_and_by_ours(binary):
    arrays = {"values": np.arange(6, dtype=np.float32).reshape(2, 3).T}
    arrays["rewards"] = np.zeros((0, 1), np.float32)
    arrays["status"] = np.array([b"{}", "é".encode()], object)
    outputs = tuple(TensorSpec(name, array.dtype.type, ()) for name, array in arrays.items())
    endpoint = Endpoint("model", (), outputs, batching=False)
    wanted = [InferRequestedOutput(name, binary_data=binary) for name in arrays]
    head, _ = request_of_triton({"x": np.zeros(1)}, True, wanted)
    chosen = kserve.wanted_outputs(endpoint, head)
    assert chosen == dict.fromkeys(arrays, binary)
    size, body = kserve.encode_reply(endpoint, arrays, {**head, "id": "7"}, chosen)
    theirs = InferenceServerClient.parse_response_body(body, header_length=size)
    assert theirs.get_response()["id"] == "7"
    ours = kserve.decode_reply(body, size)
    for name, array in arrays.items():
        for found in (theirs.as_numpy(name), ours[name]):
            assert found.shape == array.shape
            text = array.dtype == object and not binary and found is not ours[name]
            expected = np.array([x.decode() for x in array], object) if text else array
            np.testing.assert_array_equal(found, expected)


TOKENS = {"name": "tokens", "shape": [1, 2], "datatype": "INT64"}
SIXTEEN = {"parameters": {"binary_data_size": 16}}
TEXT = {"name": "sentences", "shape": [1, 1], "datatype": "BYTES"}


@pytest.mark.parametrize(
    "inputs, data, words",
    [
        (None, b"", "'inputs' is missing"),
        (3, b"", "not iterable"),
        ([3], b"", "cannot be read"),
        ([{**TOKENS, "datatype": "INT65"}], b"", "INT65"),
        ([TOKENS], b"", "'data' is missing"),
        ([{**TOKENS, **SIXTEEN}], bytes(15), "16 bytes, but 15 are left"),
        ([{**TOKENS, **SIXTEEN}], bytes(17), "1 bytes belong to no tensor"),
        ([{**TOKENS, **SIXTEEN, "shape": [1, 3]}], bytes(16), "'tokens'"),
        ([{**TOKENS, **SIXTEEN, "shape": [-1, 2]}], bytes(16), r"\[-1, 2\]"),
        ([{**TOKENS, **SIXTEEN, "shape": [10**30, 0]}], bytes(16), "cannot be read"),
        ([{**TOKENS, **SIXTEEN}] * 2, bytes(32), "'tokens' comes twice"),
        ([{**TOKENS, "parameters": {"binary_data_size": -8}}], b"", "-8 bytes"),
        ([{**TOKENS, "parameters": {"binary_data_size": "8"}}], b"", "8 bytes"),
        ([{**TOKENS, "data": [1, 1.5]}], b"", "no INT64"),
        ([{**TOKENS, "data": [1, 2**63]}], b"", "no INT64"),
        ([{**TOKENS, "data": [1, "2"]}], b"", "cannot be read"),
        ([{**TOKENS, "data": [[1], [2, 3]]}], b"", "cannot be read"),
        ([{**TEXT, "data": [3]}], b"", "cannot be read"),
        ([{**TEXT, "parameters": {"binary_data_size": 3}}], bytes(3), "behind the body"),
        ([{**TEXT, "parameters": {"binary_data_size": 5}}], b"\2\0\0\0a", "behind the body"),
        ([{**TEXT, "parameters": {"binary_data_size": 400}}], bytes(400), "'sentences'"),
        ([{**TOKENS, "shape": [513, 1], "data": [1] * 513}], b"", "must be <= 512"),
        ([], b"", "0 samples"),
    ],
)
def test_what_is_no_request_is_refused(inputs, data, words):
    head = {} if inputs is None else {"inputs": inputs}
    with pytest.raises(RequestError, match=words):
        kserve.decode_request(critic_infer_endpoint(True), head, data)


@pytest.mark.parametrize("endpoint", [critic_infer_endpoint(True), critic_save_endpoint()])
def test_pytriton_reads_the_description(endpoint):
    from pytriton.model_config.generator import ModelConfigGenerator
    from pytriton.model_config.parser import ModelConfigParser

    parsed = ModelConfigParser.from_dict(kserve.model_config(endpoint))
    assert parsed.model_name == endpoint.name and parsed.batching == endpoint.batching
    assert [(s.name, s.shape, s.optional) for s in parsed.inputs] == [
        (s.name, s.shape, s.optional) for s in endpoint.inputs
    ]
    ours, theirs = kserve.model_config(endpoint), ModelConfigGenerator(parsed).get_config()
    for key in ("input", "output"):
        found, wanted = ([item["data_type"] for item in each[key]] for each in (ours, theirs))
        assert found == wanted


def test_other_types_are_refused():
    with pytest.raises(RequestError, match="complex64"):
        kserve.type_name(np.dtype(np.complex64))
    with pytest.raises(ValueError, match="BF17"):
        kserve.numpy_type("BF17")
