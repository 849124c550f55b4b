# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The wire form of requests and replies: KServe v2 over HTTP, with tensors as binary data.

A body is a JSON object, the *head*, which lists name, shape and type of each tensor, and then the
bytes of the tensors in that order, numbers in little-endian order, each text behind its length. A
tensor may also stand in the head itself, as a list.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from nemo_aligner.servers.schema import (
    MOST_ROWS,
    Array,
    Arrays,
    Endpoint,
    RequestError,
    TensorSpec,
    validate_request,
)

# Kind and bytes of a numpy dtype, as in `dtype.str`.
_NAMES = {"b1": "BOOL", "f2": "FP16", "f4": "FP32", "f8": "FP64"}
_NAMES |= {f"i{size}": f"INT{8 * size}" for size in (1, 2, 4, 8)}
_NAMES |= {f"u{size}": f"UINT{8 * size}" for size in (1, 2, 4, 8)}
_DTYPES = {name: np.dtype(f"<{code}") for code, name in _NAMES.items()}
# Kinds of numbers in JSON that a tensor of a kind takes.
_TAKES = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}

Buffer = bytes | bytearray | memoryview
# What is raised of a head that lists no tensors.
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError)


def type_name(dtype: np.dtype) -> str:
    """Return the name of a dtype on the wire, such as INT64; texts are BYTES."""
    if dtype.kind in "OSU":
        return "BYTES"
    if dtype.str[1:] not in _NAMES:
        raise RequestError(f"no tensor on the wire holds numbers of dtype {dtype}")
    return _NAMES[dtype.str[1:]]


def numpy_type(name: str) -> type:
    """The numpy type of tensors of the wire's type `name`; `ValueError` if there is none."""
    if name == "BYTES":
        return np.bytes_
    if name not in _DTYPES:
        raise ValueError(f"data type {name}")
    return _DTYPES[name].type


def to_bytes(array: Array) -> Buffer:
    """Return the elements of an array as they are sent; those of numbers are not copied."""
    if array.dtype.kind not in "OSU":
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        return little.reshape(-1).view(np.uint8).data
    texts = [text if isinstance(text, bytes) else str(text).encode() for text in array.flat]
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)


def _from_bytes(data: memoryview, name: str, count: int) -> Array:
    if name != "BYTES":
        # Aligned, as torch takes it; a copy only where it is not.
        return np.require(np.frombuffer(data, _DTYPES[name]), requirements="A")
    texts: list[bytes] = []
    at = 0
    while at < len(data) and len(texts) <= count:
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        if end > len(data):
            raise ValueError("a text ends behind the body")
        texts.append(bytes(data[at + 4 : end]))
        at = end
    return np.array(texts, dtype=object)


def _from_list(content: Any, name: str) -> Array:
    if name == "BYTES":
        flat = np.array(content, dtype=object).reshape(-1)
        return np.array([text.encode() for text in flat], dtype=object)
    found, dtype = np.array(content), _DTYPES[name]
    if found.size and found.dtype.kind not in _TAKES[dtype.kind]:
        raise ValueError(f"its data are no {name}")
    array = found.astype(dtype)
    if dtype.kind != "f" and not np.array_equal(array, found):
        raise ValueError(f"its data are no {name}")
    return array.reshape(-1)


def _describe(arrays: Mapping[str, Array]) -> tuple[list[dict[str, Any]], list[Buffer]]:
    buffers = [to_bytes(array) for array in arrays.values()]
    return [
        {
            "name": name,
            "shape": list(array.shape),
            "datatype": type_name(array.dtype),
            "parameters": {"binary_data_size": len(buffer)},
        }
        for (name, array), buffer in zip(arrays.items(), buffers)
    ], buffers


def _read_tensors(entries: list[dict[str, Any]], data: memoryview) -> Arrays:
    """The tensors of the head, binary ones in `data`; an error of UNREADABLE: they are none."""
    arrays: Arrays = {}
    at = 0
    for entry in entries:
        name, kind, shape = entry["name"], entry["datatype"], entry["shape"]
        numpy_type(kind)
        if name in arrays:
            raise ValueError(f"'{name}' comes twice")
        if not all(isinstance(size, int) and size >= 0 for size in shape):
            raise ValueError(f"'{name}' has the shape {shape}")
        size = (entry.get("parameters") or {}).get("binary_data_size")
        try:
            if size is None:
                array = _from_list(entry["data"], kind)
            elif not (isinstance(size, int) and 0 <= size <= len(data) - at):
                raise ValueError(f"it has {size} bytes, but {len(data) - at} are left")
            else:
                array = _from_bytes(data[at : at + size], kind, math.prod(shape))
                at += size
            arrays[name] = array.reshape(shape)
        except ValueError as error:
            raise ValueError(f"'{name}': {error}") from error
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes belong to no tensor")
    return arrays


def encode_request(
    data: Mapping[str, Array], parameters: Mapping[str, str] | None = None
) -> tuple[bytes, list[Buffer]]:
    """The head of a request, with these parameters of its own, and the bytes of its tensors."""
    inputs, buffers = _describe(data)
    head = {"inputs": inputs, "parameters": {"binary_data_output": True, **(parameters or {})}}
    return json.dumps(head).encode(), buffers


def decode_request(endpoint: Endpoint, head: dict[str, Any], tensors: Buffer) -> Arrays:
    """The arrays of a request, with the dtypes and shapes of `endpoint`; else `RequestError`."""
    try:
        arrays = _read_tensors(head["inputs"], memoryview(tensors))
    except UNREADABLE as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise RequestError(f"the tensors of the request cannot be read: {why[:500]}") from error
    validate_request(endpoint, arrays)
    if endpoint.batching:
        rows = max((len(array) for array in arrays.values()), default=0)
        if not 1 <= rows <= MOST_ROWS:
            has = f"a request to '{endpoint.name}' has {rows} samples, but their number"
            raise RequestError(f"{has} must be <= {MOST_ROWS} and at least 1. Send several.")
    return arrays


def rows_of(head: dict[str, Any]) -> int:
    """How many samples a request says that it has; 0 if `head` says nothing that can be read."""
    try:
        return max(int(tensor["shape"][0]) for tensor in head["inputs"])
    except (*UNREADABLE, IndexError):
        return 0


def wanted_outputs(endpoint: Endpoint, head: dict[str, Any]) -> dict[str, bool]:
    """The outputs that a request wants, and whether as binary data; `RequestError`: not there."""
    names = [spec.name for spec in endpoint.outputs]
    try:
        binary = bool((head.get("parameters") or {}).get("binary_data_output", False))
        wanted = {
            entry["name"]: bool((entry.get("parameters") or {}).get("binary_data", binary))
            for entry in head.get("outputs") or [{"name": name} for name in names]
        }
    except UNREADABLE as error:
        raise RequestError("'outputs' or 'parameters' of the request cannot be read") from error
    for name in wanted.keys() - names:
        raise RequestError(f"'{endpoint.name}' has no output '{name}'; it has {', '.join(names)}.")
    return wanted


def encode_reply(
    endpoint: Endpoint, arrays: Arrays, head: dict[str, Any], wanted: dict[str, bool]
) -> tuple[int | None, bytes]:
    """The body of a reply to a request, and the length of its head if tensors follow it."""
    outputs, buffers = _describe({name: arrays[name] for name in wanted if wanted[name]})
    listed, _ = _describe({name: arrays[name] for name in wanted if not wanted[name]})
    for entry in listed:
        del entry["parameters"]
        entry["data"] = [
            text.decode(errors="replace") if isinstance(text, bytes) else text
            for text in arrays[entry["name"]].reshape(-1).tolist()
        ]
    outputs += listed
    reply = {"model_name": endpoint.name, "model_version": "1", "outputs": outputs}
    if "id" in head:
        reply["id"] = head["id"]
    encoded = json.dumps(reply).encode()
    return (len(encoded) if buffers else None), b"".join([encoded, *buffers])


def decode_reply(body: bytes, head_size: int | None) -> Arrays:
    """Return the arrays of a reply by wire name; an error of UNREADABLE: it is none."""
    size = len(body) if head_size is None else head_size
    return _read_tensors(json.loads(body[:size])["outputs"], memoryview(body)[size:])


def model_config(endpoint: Endpoint) -> dict[str, Any]:
    """What is said of an endpoint at /v2/models/NAME/config, in the form of Triton's."""

    def entry(spec: TensorSpec) -> dict[str, Any]:
        kind = type_name(np.dtype(spec.dtype)).replace("BYTES", "STRING")
        return {"name": spec.name, "data_type": f"TYPE_{kind}", "dims": list(spec.shape)}

    return {
        "name": endpoint.name,
        "backend": "python",
        "max_batch_size": MOST_ROWS if endpoint.batching else 0,
        "input": [{**entry(spec), "optional": spec.optional} for spec in endpoint.inputs],
        "output": [entry(spec) for spec in endpoint.outputs],
    }


def model_metadata(endpoint: Endpoint) -> dict[str, Any]:
    """What is said of an endpoint at /v2/models/NAME."""

    def entry(spec: TensorSpec) -> dict[str, Any]:
        shape = [*[-1] * endpoint.batching, *spec.shape]
        return {"name": spec.name, "datatype": type_name(np.dtype(spec.dtype)), "shape": shape}

    return {
        "name": endpoint.name,
        "versions": ["1"],
        "platform": "python",
        "inputs": [entry(spec) for spec in endpoint.inputs],
        "outputs": [entry(spec) for spec in endpoint.outputs],
    }
