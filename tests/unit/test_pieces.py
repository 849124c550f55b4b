# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Train requests in pieces (servers/requests.py): how a client cuts them, and how the server puts
them together.
"""

import numpy as np
import pytest

from nemo_aligner.servers import requests, schema, served_model
from nemo_aligner.servers.requests import PieceStore
from nemo_aligner.servers.schema import RequestError
from nemo_aligner.servers.served_model import ServedModel, fit_requests, piece_rows
from tests.patience import patience, wait_until
from tests.unit.test_served_model import sent as received

TRAIN = schema.critic_train_endpoint()
SERVED = ServedModel(TRAIN.name, TRAIN.inputs, ("loss_mean",), 0)
ROWS, COLUMNS = 10, 4


def request(rows: int = ROWS) -> dict:
    numbers = np.arange(rows * (COLUMNS - 1), dtype=np.float32).reshape(rows, -1)
    tokens = np.arange(rows * COLUMNS).reshape(rows, COLUMNS)
    data = {"tokens": tokens, "returns": numbers, "prev_values": -numbers}
    return data | {"mask": np.ones_like(numbers), "request_id": np.array([b"abc"])}


@pytest.mark.parametrize("rows_of_a_piece", [1, 3, 5, 9])
def test_the_pieces_of_an_update_are_the_update(monkeypatch, rows_of_a_piece):
    row_bytes = 8 * COLUMNS + 3 * 4 * (COLUMNS - 1)
    monkeypatch.setattr(served_model, "PIECE_BYTES", row_bytes * rows_of_a_piece + 1)
    pieces = fit_requests(SERVED, TRAIN, request())
    assert len(pieces) == -(-ROWS // rows_of_a_piece)
    store, whole = PieceStore(), None
    for each in pieces:
        assert whole is None
        arrays = received(each)
        assert arrays.pop("request_id").tolist() == [b"abc"]
        first, rows = arrays.pop("piece").tolist()
        whole = store.add("abc", first, rows, arrays)
    assert whole is not None
    for name, array in request().items():
        if name != "request_id":
            assert whole[name].dtype == array.dtype and (whole[name] == array).all()


def test_a_server_without_pieces_gets_one_body_up_to_tritons_limit(monkeypatch):
    inputs = tuple(spec for spec in TRAIN.inputs if spec.name != "piece")
    others = ServedModel("theirs", inputs, ("loss_mean",), 0)
    monkeypatch.setattr(served_model, "PIECE_BYTES", 100)
    (sent,) = fit_requests(others, TRAIN, request())
    assert "piece" not in received(sent)
    monkeypatch.setattr(served_model, "LARGEST_BODY", 200)
    with pytest.raises(RequestError, match="'theirs' has .* GiB, but Triton takes at most 2 GiB"):
        fit_requests(others, TRAIN, request())


def test_a_large_scoring_request_becomes_several(monkeypatch):
    scoring = schema.critic_infer_endpoint(True)
    served = ServedModel(scoring.name, scoring.inputs, ("values", "rewards"), 10**6)
    data = {"tokens": request()["tokens"], "sequence_lengths": np.full((ROWS, 1), COLUMNS)}
    monkeypatch.setattr(served_model, "PIECE_BYTES", 3 * 8 * (COLUMNS + 1))
    rows = [received(each)["tokens"] for each in fit_requests(served, scoring, data)]
    assert [len(each) for each in rows] == [3, 3, 3, 1]
    assert (np.concatenate(rows) == data["tokens"]).all()


def test_a_row_beyond_the_limit_is_a_piece_of_its_own():
    assert piece_rows({"a": np.zeros((4, 100))}, limit=10) == 1
    assert piece_rows({"a": np.zeros((4, 0))}, limit=10) == 4


# ---- what the server refuses ----


def part(first: int, last: int) -> dict:
    return {name: array[first:last] for name, array in request().items() if name != "request_id"}


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (("abc", 4, ROWS, part(4, 8)), "begins with row 4, but 3 rows of it have come"),
        (("abc", 2, ROWS, part(2, 5)), "begins with row 2, but 3 rows"),
        (("xyz", 3, ROWS, part(3, 6)), "its first rows have not come"),
        (("abc", 3, 11, part(3, 6)), r"but the first piece promised \[10, 4\]"),
        (("abc", 3, ROWS, {"tokens": np.zeros((3, 5))}), r"promised \[10, 4\] in all"),
        (("abc", 3, ROWS, {k: np.repeat(v, 4, 0) for k, v in part(3, 6).items()}), "rows 3 to 15"),
        (("abc", 3, ROWS, part(3, 3)), "rows 3 to 3 of 10"),
    ],
)
def test_a_piece_that_does_not_continue_the_request_drops_it(second, words):
    store = PieceStore()
    assert store.add("abc", 0, ROWS, part(0, 3)) is None
    with pytest.raises(RequestError, match=words):
        store.add(*second)
    with pytest.raises(RequestError, match="its first rows have not come, or were dropped"):
        store.add("abc", 3, ROWS, part(3, 10))
    assert store.add("abc", 0, ROWS, part(0, 10)) is not None  # it still works


def test_more_than_the_machine_can_hold_is_refused(monkeypatch):
    memory = type("Memory", (), {"available": 1000})
    monkeypatch.setattr(requests.psutil, "virtual_memory", lambda: memory)
    store = PieceStore()
    with pytest.raises(RequestError, match="10 rows, .* GiB left. Use smaller rollouts"):
        store.add("abc", 0, ROWS, {"tokens": np.zeros((1, 100))})


def test_pieces_of_a_client_that_is_gone_are_dropped():
    store = PieceStore(timeout_s=0.2)
    store.add("abc", 0, ROWS, part(0, 3))
    wait_until(lambda: not store._arrays, patience(5), lambda: "pieces are kept")
    with pytest.raises(RequestError, match="its first rows have not come, or were dropped since"):
        store.add("abc", 3, ROWS, part(3, 6))
