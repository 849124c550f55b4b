# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests on the server: decoding, tokenizing and padding; train requests in pieces; slices of
scoring requests, which samples share one, and who has to wait for whom.
"""

import threading
import time

import numpy as np
import pytest
import torch

from nemo_aligner.core.errors import UserError
from nemo_aligner.parallel import parallel_state
from nemo_aligner.servers import requests, schema, served_model
from nemo_aligner.servers.front import is_large
from nemo_aligner.servers.requests import PieceStore
from nemo_aligner.servers.schema import RequestError
from nemo_aligner.servers.scoring import Scorer, Turns
from nemo_aligner.servers.served_model import ServedModel, fit_requests, piece_rows
from nemo_aligner.training.passes import plan_micro_batches
from tests.patience import patience, wait_until
from tests.unit.test_served_model import sent as received


def test_decode_bytes_ndarray():
    array = np.array([["Grüße".encode()], [b"b"]], dtype=object)
    assert requests.decode_bytes_ndarray(array).tolist() == ["Grüße", "b"]


def test_pad_input():
    padded = [[1, 2], [3, 4], [5, 6], [9, 9]]
    assert requests.pad_input(np.array(padded[:3]), 2, pad_value=9) == (padded, 1)
    assert requests.pad_input([7], 3) == ([7, 0, 0], 2)
    assert requests.pad_input(["a", "b"], 2, "") == (["a", "b"], 0)
    assert requests.pad_input(None, 4) == (None, 0)


@pytest.mark.parametrize(
    "rows, dp, expected", [(3, 2, 2), (8, 2, 2), (9, 2, 8), (1, 1, 1), (5, 1, 4)]
)
def test_padding_multiple(monkeypatch, rows, dp, expected):
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: dp)
    assert requests.calculate_inference_batch_padding_multiple(rows, 4) == expected


def test_process_inputs_prefers_sentences():
    inputs = {"sentences": np.array([[b"ab"]]), "tokens": np.array([[9]])}
    inputs["sequence_lengths"] = np.array([[1]])
    out = requests.process_inputs(inputs, lambda texts: (torch.tensor([[len(texts[0]), 0]]), [1]))
    assert out["inputs"].tolist() == [[2, 0]] and out["sequence_length"].tolist() == [1]
    del inputs["sentences"]
    out = requests.process_inputs(inputs, None)
    assert out["inputs"].tolist() == [[9]] and out["sequence_length"].tolist() == [1]
    with pytest.raises(UserError, match="'sequence_lengths' is missing"):
        requests.process_inputs({"tokens": np.array([[9]])}, None)
    wide = [[b"a", b"b"]], r"'sentences' has shape \[1, 2\]"
    for bad, message in (wide, ([[b"a"], [b"\xff"]], "in sample 1 that are not UTF-8")):
        with pytest.raises(UserError, match=message):
            requests.process_inputs({"sentences": np.array(bad)}, None)


@pytest.mark.parametrize("strip, width", [(None, 8), (4, 4), (3, 3), (16, 8)])
def test_pad_batch_and_strip_sequence(strip, width):
    tokens = np.arange(24).reshape(3, 8)
    given = tokens, np.array([3, 2, 1]), 4, strip
    out, added, old_width = requests.pad_batch_and_strip_sequence(*given)
    assert out["inputs"].shape == (4, width) and added == 1 and old_width == 8
    assert (out["inputs"][:3] == tokens[:, :width]).all() and (out["inputs"][3] == 0).all()
    assert out["sequence_length"].tolist() == [3, 2, 1, 0]


# ---- train requests in pieces ----

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


# ---- slices of scoring requests ----


def micro_batches(lengths, rows):
    """The samples of each forward pass for `rows` of a request, as a model plans them."""
    plan = plan_micro_batches([lengths[row] for row in rows], -(-len(rows) // 4))
    return [(tuple(rows[place] for place in part.rows), part.width) for part in plan]


@pytest.mark.parametrize("shares", [1, 2, 3])
def test_slices_have_the_micro_batches_of_the_whole(shares):
    generator = np.random.default_rng(shares)
    for count in (1, 2, 5, 8):
        lengths = generator.integers(1, 9, 4 * count * shares)
        cut = requests.cut_rows(lengths, shares, 8, by_length=True)
        assert len(cut) == -(-count // 2)
        for share in range(shares):
            own = list(range(share * 4 * count, (share + 1) * 4 * count))
            found = []
            for rows in cut:
                size = len(rows) // shares
                found += micro_batches(lengths, rows[share * size : (share + 1) * size].tolist())
            assert found == micro_batches(lengths, own)


def test_samples_of_a_function_stay_in_order():
    cut = requests.cut_rows(np.array([1, 9, 1, 9, 1, 9]), 2, 2, by_length=False)
    assert [rows.tolist() for rows in cut] == [[0, 1, 3, 4], [2, 5]]
    cut = requests.cut_rows(np.array([1, 9, 5]), 1, 3, by_length=True)
    assert [rows.tolist() for rows in cut] == [[0, 1, 2]]  # one slice is the request itself


def test_slices_are_whole_micro_batches_of_all_stages():
    assert requests.slice_size(64, 4, 1) == 256
    assert requests.slice_size(4096, 4, 1) == 4
    assert requests.slice_size(10**6, 4, 1) == 4
    assert requests.slice_size(4096, 4, 4) == 16 * 4
    assert requests.slice_size(200, 4, 3) == 21 * 4


def test_large_requests():
    def head(*rows):
        return {"inputs": [{"shape": [count, 1]} for count in rows]}

    assert not is_large(head(1, 32), 2**17)
    assert is_large(head(1, 33), 10)
    assert is_large(head(1), 2**17 + 1)
    for odd in ({}, {"inputs": 3}, {"inputs": []}, head("x"), {"inputs": [{"shape": []}]}):
        assert not is_large(odd, 10)


def test_a_change_waits_for_what_is_scored_and_scoring_for_the_change():
    turns, order = Turns(), []
    release, begun = threading.Event(), threading.Event()

    def score(name, until=None):
        with turns.scoring():
            begun.set()
            if until is not None:
                until.wait(patience(20))
            order.append(name)

    def change():
        with turns.changing():
            order.append("change")

    threads = [threading.Thread(target=score, args=("first", release))]
    threads[0].start()
    assert begun.wait(patience(20))
    threads.append(threading.Thread(target=change))
    threads[1].start()
    wait_until(lambda: turns._waiting, 20, lambda: "the change")
    threads.append(threading.Thread(target=score, args=("second",)))
    threads[2].start()
    time.sleep(0.05)
    assert not order
    release.set()
    for thread in threads:
        thread.join(patience(20))
    assert order == ["first", "change", "second"]


class Loop:
    """Runs each operation at once, and notes what came."""

    def __init__(self, scorer):
        self.scorer, self.seen = scorer, []

    def submit(self, _signal, arrays):
        self.seen.append((len(arrays["tokens"]), int(arrays.get("pass", [-1])[0])))
        return self.scorer.forward(**arrays)


@pytest.mark.parametrize("slice_rows", [None, 3])
def test_the_passes_of_all_slices_make_the_scores(monkeypatch, slice_rows):
    monkeypatch.setattr(requests, "SLICE_TOKENS", 12)
    assert not parallel_state.is_initialized()

    def values(tokens, lengths, _prompt_lengths):
        return {"values": tokens * 1.5}

    def rewards(tokens, lengths, _prompt_lengths):
        return {"rewards": tokens.gather(1, lengths[:, None] - 1)}

    def both(*arrays):
        return {**values(*arrays), **rewards(*arrays)}

    scorer = Scorer(both, None, 2, passes=(values, rewards), slice_rows=slice_rows)
    tokens = torch.arange(35).reshape(7, 5).numpy() + 1
    lengths = np.array([1, 4, 2, 5, 3, 1, 2])
    request = {"tokens": tokens, "sequence_lengths": lengths[:, None]}
    loop = Loop(scorer)
    for answer in (scorer.reply_to(request, loop), scorer.run(request)):
        assert (answer["values"] == tokens * 1.5).all()
        assert (answer["rewards"][:, 0] == tokens[np.arange(7), lengths - 1]).all()
    sizes = [2, 2, 2, 2] if slice_rows is None else [3, 3, 2]
    assert loop.seen == [(size, number) for number in (0, 1) for size in sizes]
    small = {name: array[:2] for name, array in request.items()}
    loop.seen.clear()
    assert (scorer.reply_to(small, loop)["values"] == tokens[:2] * 1.5).all()
    assert loop.seen == [(2, -1)]
