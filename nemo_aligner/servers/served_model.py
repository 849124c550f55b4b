# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What a server says of a model that it serves, and requests in the form that it takes.

Servers of this package take every tensor of schema.py; those of NeMo-Aligner or of users take
fewer, and Triton refuses an input that it does not know. So a client reads the server's own
description (GET /v2/models/NAME/config) first, and sends what is listed there, in those dtypes and
shapes. N is the number of samples, S the padded token length.
"""

import http.client
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from nemo_aligner.core.errors import UserError
from nemo_aligner.servers.exchange import (
    INSTANCE_HEADER,
    InferRequest,
    Peer,
    UntrustedServerError,
    error_text,
    token_problem,
)
from nemo_aligner.servers.kserve import numpy_type
from nemo_aligner.servers.schema import (
    ATTRIBUTES,
    NOT_COMBINED,
    Array,
    Arrays,
    Endpoint,
    ReplyError,
    RequestError,
    TensorSpec,
)

PIECE_BYTES = 2**25  # of one piece: half of what a server of this package takes by default
# Of a server that takes no pieces; the rest is left for the header of the body.
LARGEST_BODY = 2**31 - 2**20


@dataclass(frozen=True)
class Addition:
    """Something of this package's servers that NeMo-Aligner's do not have."""

    kind: str  # "input" or "endpoint"
    name: str  # on the wire
    without: str  # what a client does with a server that does not have it
    warns: bool = False  # the client says so when it connects


_NO_TOKENIZER = "whether the server has the policy's tokenizer is not checked"
_NO_STATUS = "whether actor and critic resume from the same step is not checked"
ADDITIONS = (
    Addition("input", "tokenizer", _NO_TOKENIZER, warns=True),
    Addition("input", "prompt_lengths", "the server is not told where the responses start"),
    Addition("input", "request_id", "every update is sent once, and never again after a failure"),
    Addition("input", "piece", "an update of more than 2 GiB is refused"),
    Addition("input", "actor_step", "the checkpoint does not say which actor step it belongs to"),
    Addition("endpoint", "critic_resume", "the critic does not go back to the actor's step"),
    Addition("endpoint", "critic_status", _NO_STATUS, warns=True),
)
_MAY_BE_LEFT_OUT = {addition.name for addition in ADDITIONS if addition.kind == "input"}
# The clients send tokens. Not a requirement of a server, and no way to feed one.
_NEVER_SENT = {"sentences"}


class ServerMismatchError(UserError):
    """The served model is not one that this client can use: names what is missing."""


class DescriptionError(Exception):
    """The server's description of a model cannot be read now."""


@dataclass(frozen=True)
class ServedModel:
    """A model as its server describes it."""

    name: str  # under which it is served
    inputs: tuple[TensorSpec, ...]  # their shapes do not hold the batch dimension
    outputs: tuple[str, ...]  # names
    max_batch_size: int  # most samples of one request; 0 if its tensors have no batch dimension
    attributes: int = 1  # numbers in its `rewards` of a sample; 1 unless it lists more
    # name of this start of the server; None for one that is not of this package
    instance: str | None = field(default=None, compare=False)

    def lists(self, name: str) -> bool:
        return any(spec.name == name for spec in self.inputs)

    def describe(self) -> str:
        inputs = "; ".join(spec.describe(self.max_batch_size > 0) for spec in self.inputs)
        return f"inputs {inputs or 'none'}, outputs {', '.join(self.outputs) or 'none'}"


# For so long a server of others may be ready without a model that it will serve.
UNKNOWN_MODEL_S = 20.0


def read_served_model(peer: Peer, name: str, timeout_s: float) -> ServedModel:
    """The description of the model `name` at `peer`; `DescriptionError` if it gives none."""
    path = f"/v2/models/{name}/config"
    try:
        response, body = peer.ask("GET", path, timeout_s)
    except (OSError, http.client.HTTPException) as error:
        raise DescriptionError(f"no reply to GET {path} ({error!r})") from error
    if response.status != 200:
        raise DescriptionError(f"GET {path} gave HTTP {response.status}")
    try:
        return replace(_parse(json.loads(body)), instance=response.getheader(INSTANCE_HEADER))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DescriptionError(f"the reply to GET {path} cannot be read ({error!r})") from error


class ModelProbe:
    """Asks a server again and again for a model. `setting`, `name_key`: for messages."""

    def __init__(self, peer: Peer, name: str, setting: str, name_key: str):
        self.peer, self.name, self._setting, self._key = peer, name, setting, name_key
        self.state = "no reply"  # what the last probe found, unless the model is served
        # why this server will never serve a model of this name; None as long as it may
        self.unusable: str | None = None
        self._up_since: float | None = None  # since when the server is ready without the model

    def status(self, timeout_s: float) -> int | None:
        """HTTP status for the model, 200 once it is served; None: no reply."""
        self.state, self.unusable = "no reply", None
        cannot = f"'{self.name}' at {self.peer} cannot be used"
        try:
            reply = self.peer.get(f"/v2/models/{self.name}/ready", timeout_s)
            if reply is None:
                self._up_since = None  # it may be starting anew
                return None
            unknown = self._unknown(*reply, timeout_s)
        except UntrustedServerError as error:
            self.state, self.unusable = str(error), f"{cannot}: {error} ({self._setting})."
            return None
        status = reply[0].status
        if status == 401:
            self.state = token_problem(self.peer.token, self._setting)
            self.unusable = f"{cannot}: {self.state}"
        elif status != 200:
            self.state = f"a server replies, but '{self.name}' is not ready"
        if unknown is not None:
            serves = f"the server at {self.peer} serves no model '{self.name}'; {unknown}"
            self.unusable = f"{serves}. Correct {self._key}, or the server's own setting."
        return status

    def _unknown(
        self, response: http.client.HTTPResponse, body: bytes, timeout_s: float
    ) -> str | None:
        """What says that the server will never have the model."""
        # One of this package opens its port with all it will ever serve; others may still load.
        if response.status == 404 and response.getheader(INSTANCE_HEADER):
            return error_text(404, body).rpartition("; ")[2]
        may_lack_it = response.status in (400, 404)
        if not may_lack_it or self.peer.status("/v2/health/ready", timeout_s) != 200:
            self._up_since = None
            return None
        self._up_since = self._up_since or time.monotonic()
        waited = time.monotonic() - self._up_since
        is_late = waited >= UNKNOWN_MODEL_S
        return f"it has been ready without one for {waited:.0f} s" if is_late else None

    def read(self, endpoint: Endpoint | None, timeout_s: float) -> tuple[ServedModel, list[str]]:
        """The description of the model (empty without `endpoint`, the schema of requests), and
        warnings. `DescriptionError`: it cannot be read now. `ServerMismatchError`: no fit.
        """
        served, warnings = ServedModel(self.name, (), (), 0), []
        if endpoint is not None:
            served = read_served_model(self.peer, self.name, timeout_s)
            check_served_model(served, endpoint, str(self.peer))
            warnings = warnings_about(served, endpoint, str(self.peer))
        without = replace(self.peer, token=None)
        path = f"/v2/models/{self.name}/ready"
        if self.peer.token is not None and without.status(path, timeout_s) == 200:
            warnings.append(
                f"the server at {self.peer} takes requests without the token of this job: whoever "
                "reaches it can use it. Start it with the token too, if it can take one."
            )
        return served, warnings


def _parse(config: dict) -> ServedModel:
    inputs = tuple(
        TensorSpec(
            item["name"],
            numpy_type(item["data_type"].removeprefix("TYPE_").replace("STRING", "BYTES")),
            tuple(int(size) for size in item["dims"]),
            optional=bool(item.get("optional", False)),
        )
        for item in config.get("input", [])
    )
    outputs = {item["name"]: item.get("dims", []) for item in config.get("output", [])}
    rewards = [int(size) for size in outputs.get("rewards", [])]
    return ServedModel(
        config["name"],
        inputs,
        tuple(outputs),
        int(config.get("max_batch_size", 0)),
        attributes=max([1, *rewards]),
    )


def check_served_model(served: ServedModel, endpoint: Endpoint, where: str) -> None:
    """`ServerMismatchError`: `served` lacks what `endpoint` needs, or needs what is never sent."""
    sent = {spec.name for spec in endpoint.inputs} - _NEVER_SENT
    problem = None
    for spec in endpoint.inputs:
        if spec.name in sent - _MAY_BE_LEFT_OUT and not served.lists(spec.name):
            problem = f"it has no input '{spec.name}'"
    for spec in served.inputs:
        if not spec.optional and spec.name not in sent:
            problem = f"it requires an input '{spec.name}', which is never sent"
    for spec in endpoint.outputs:
        if spec.name not in served.outputs:
            problem = f"it has no output '{spec.name}' ({spec.meaning})"
            if spec.name == "rewards" and "values" in served.outputs:
                problem += f": {NOT_COMBINED}"
    if served.attributes > 1 and endpoint.outputs != (ATTRIBUTES,):
        gives = f"it gives {served.attributes} attributes of each sample, not one reward"
        problem = f"{gives}; serve it with model.regression.merge_attributes=True"
    if problem:
        needed = ", ".join(sorted(sent - _MAY_BE_LEFT_OUT))
        outputs = ", ".join(spec.name for spec in endpoint.outputs)
        raise ServerMismatchError(
            f"'{served.name}' at {where} cannot be used: {problem}. It has {served.describe()}; "
            f"a client sends {needed} and needs {outputs}. Is this the right server?"
        )


def warnings_about(served: ServedModel, endpoint: Endpoint, where: str) -> list[str]:
    """What a client cannot do with a server that lists fewer inputs than ours."""
    missing = {spec.name for spec in endpoint.inputs if not served.lists(spec.name)}
    return [
        f"'{served.name}' at {where} has no input '{each.name}': {each.without}"
        for each in ADDITIONS
        if each.warns and each.name in missing
    ]


def fit_requests(
    served: ServedModel, endpoint: Endpoint | None, data: Arrays
) -> list[InferRequest]:
    """`data`, which fits `endpoint`, as the requests that `served` takes; without one as it is.

    A scoring request of more samples than the server takes at once, or of more than `PIECE_BYTES`,
    becomes several. So does an update, if the server puts pieces together; no other request that
    changes its state is cut. `RequestError`: its dtypes, sizes or limits cannot hold the data.
    """
    if endpoint is None:
        return [InferRequest(served.name, data)]
    specs = {spec.name: spec for spec in served.inputs}
    for spec in served.inputs:
        if not spec.optional and spec.name not in data:
            requires = f"'{served.name}' requires the input '{spec.name}', which is not sent"
            raise RequestError(f"{requires}. The server has {served.describe()}.")
    fitted = {
        name: _fit(served, endpoint, specs[name], array)
        for name, array in data.items()
        if name in specs
    }
    if not endpoint.batching:
        return _pieces_of_update(served, fitted)
    rows = piece_rows(fitted, PIECE_BYTES)
    if served.max_batch_size:
        rows = min(rows, served.max_batch_size)
    return [InferRequest(served.name, piece) for _, piece in _cut(fitted, rows)]


def _cut(arrays: Arrays, rows: int) -> list[tuple[int, Arrays]]:
    firsts = range(0, len(next(iter(arrays.values()))), rows)
    return [(at, {name: each[at : at + rows] for name, each in arrays.items()}) for at in firsts]


def _pieces_of_update(served: ServedModel, data: Arrays) -> list[InferRequest]:
    size = sum(array.nbytes for array in data.values())
    if size > PIECE_BYTES and served.lists("piece") and "request_id" in data:
        whole = {name: array for name, array in data.items() if name != "request_id"}
        rows, samples = piece_rows(whole, PIECE_BYTES), len(next(iter(whole.values())))
        id_ = {"request_id": data["request_id"]}
        return [
            InferRequest(served.name, piece | id_ | {"piece": np.array([first, samples])})
            for first, piece in _cut(whole, rows)
        ]
    if size > LARGEST_BODY:
        raise RequestError(
            f"a request to '{served.name}' has {size / 2**30:.1f} GiB, but Triton takes at most "
            "2 GiB. Use smaller rollouts (model.ppo.num_rollout_samples), or a critic server of "
            "this package."
        )
    return [InferRequest(served.name, data)]


def _fit(served: ServedModel, endpoint: Endpoint, spec: TensorSpec, array: Array) -> Array:
    """`array` in the form of `spec`, an input of `served`, if that holds the same numbers."""
    whole = replace(spec, shape=(-1, *spec.shape)) if served.max_batch_size else spec
    candidates = [array]
    if array.ndim > 0 and array.shape[-1] == 1:
        candidates.append(array[..., 0])  # [N, 1] for a server that takes [N]
    if not endpoint.batching:
        candidates.append(array[None])  # one sample of a server that takes batches of them
    fitting = [candidate for candidate in candidates if whole.fits(candidate.shape)]
    wanted = f"'{served.name}' takes {spec.describe(served.max_batch_size > 0)}"
    if not fitting:
        advice = " (set pad_to_length to the server's width)" if spec.name == "tokens" else ""
        raise RequestError(f"{wanted}, and '{spec.name}' is {list(array.shape)} here{advice}.")
    array = fitting[0]
    of_text = array.dtype.kind in "OSU"
    if of_text == (spec.dtype is np.bytes_):
        if of_text or array.dtype == np.dtype(spec.dtype):
            return array
        with np.errstate(invalid="ignore", over="ignore"):
            cast: Array = array.astype(spec.dtype)
            back = cast.astype(array.dtype)
        if np.array_equal(back, array, equal_nan=array.dtype.kind == "f"):
            return cast
    raise RequestError(f"{wanted}, which cannot hold the {array.dtype} values of this request.")


def merge_replies(endpoint: Endpoint | None, replies: Sequence[Arrays]) -> Arrays:
    """The replies to the requests of `fit_requests` as one, in dtypes and shapes of `endpoint`,
    where [N] becomes [N, 1]; of an update that to its last piece. `ReplyError`: they do not match.
    """
    if endpoint is None:
        return replies[0]
    names = replies[0].keys()
    if any(reply.keys() != names for reply in replies):
        raise ReplyError(f"the replies hold different tensors: {[sorted(r) for r in replies]}")
    merged = replies[-1]
    if endpoint.batching and len(replies) > 1:
        try:
            merged = {name: np.concatenate([reply[name] for reply in replies]) for name in names}
        except ValueError as error:
            shapes = {name: [list(reply[name].shape) for reply in replies] for name in names}
            raise ReplyError(f"the replies have different widths: {shapes}") from error
    merged = dict(merged)
    for spec in endpoint.outputs:
        array = merged.get(spec.name)
        if array is None or spec.dtype is np.bytes_ or array.dtype.kind not in "fiub":
            continue  # checked by schema.py
        if endpoint.batching and array.ndim == 1:
            array = array[:, None]
        merged[spec.name] = array.astype(spec.dtype, copy=False)
    return merged


def piece_rows(arrays: Arrays, limit: int) -> int:
    """Return how many rows of `arrays`, [N, ...] each, have at most `limit` bytes; at least 1."""
    rows = len(next(iter(arrays.values())))
    size = sum(array.nbytes for array in arrays.values())
    return max(rows if size <= limit else rows * limit // size, 1)
