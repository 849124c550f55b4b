# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Slices of scoring requests: which samples share one, and who has to wait for whom."""

import threading
import time

import numpy as np
import pytest
import torch

from nemo_aligner.core.errors import UserError
from nemo_aligner.parallel import parallel_state
from nemo_aligner.servers import scoring
from nemo_aligner.servers.admission import is_large
from nemo_aligner.servers.scoring import Scorer, Turns
from nemo_aligner.training.micro_batches import plan_micro_batches
from tests.patience import patience, wait_until


def micro_batches(lengths, rows):
    """The samples of each forward pass for `rows` of a request, as a model plans them."""
    plan = plan_micro_batches([lengths[row] for row in rows], -(-len(rows) // 4))
    return [(tuple(rows[place] for place in part.rows), part.width) for part in plan]


@pytest.mark.parametrize("shares", [1, 2, 3])
def test_slices_have_the_micro_batches_of_the_whole(shares):
    generator = np.random.default_rng(shares)
    for count in (1, 2, 5, 8):
        lengths = generator.integers(1, 9, 4 * count * shares)
        cut = scoring.cut_rows(lengths, shares, 8, by_length=True)
        assert len(cut) == -(-count // 2)
        for share in range(shares):
            own = list(range(share * 4 * count, (share + 1) * 4 * count))
            found = []
            for rows in cut:
                size = len(rows) // shares
                found += micro_batches(lengths, rows[share * size : (share + 1) * size].tolist())
            assert found == micro_batches(lengths, own)


def test_samples_of_a_function_stay_in_order():
    cut = scoring.cut_rows(np.array([1, 9, 1, 9, 1, 9]), 2, 2, by_length=False)
    assert [rows.tolist() for rows in cut] == [[0, 1, 3, 4], [2, 5]]
    cut = scoring.cut_rows(np.array([1, 9, 5]), 1, 3, by_length=True)
    assert [rows.tolist() for rows in cut] == [[0, 1, 2]]  # one slice is the request itself


def test_slices_are_whole_micro_batches_of_all_stages():
    assert scoring.slice_size(64, 4, 1) == 256
    assert scoring.slice_size(4096, 4, 1) == 4
    assert scoring.slice_size(10**6, 4, 1) == 4
    assert scoring.slice_size(4096, 4, 4) == 16 * 4
    assert scoring.slice_size(200, 4, 3) == 21 * 4


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
    monkeypatch.setattr(scoring, "SLICE_TOKENS", 12)
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


# ---- decoding, tokenizing and padding ----


def test_decode_bytes_ndarray():
    array = np.array([["Grüße".encode()], [b"b"]], dtype=object)
    assert scoring.decode_bytes_ndarray(array).tolist() == ["Grüße", "b"]


def test_pad_input():
    padded = [[1, 2], [3, 4], [5, 6], [9, 9]]
    assert scoring.pad_input(np.array(padded[:3]), 2, pad_value=9) == (padded, 1)
    assert scoring.pad_input([7], 3) == ([7, 0, 0], 2)
    assert scoring.pad_input(["a", "b"], 2, "") == (["a", "b"], 0)
    assert scoring.pad_input(None, 4) == (None, 0)


@pytest.mark.parametrize(
    "rows, dp, expected", [(3, 2, 2), (8, 2, 2), (9, 2, 8), (1, 1, 1), (5, 1, 4)]
)
def test_padding_multiple(monkeypatch, rows, dp, expected):
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: dp)
    assert scoring.calculate_inference_batch_padding_multiple(rows, 4) == expected


def test_process_inputs_prefers_sentences():
    inputs = {
        "sentences": np.array([[b"ab"]]),
        "tokens": np.array([[9]]),
        "sequence_lengths": np.array([[1]]),
    }
    out = scoring.process_inputs(inputs, lambda texts: (torch.tensor([[len(texts[0]), 0]]), [1]))
    assert out["inputs"].tolist() == [[2, 0]] and out["sequence_length"].tolist() == [1]
    del inputs["sentences"]
    out = scoring.process_inputs(inputs, None)
    assert out["inputs"].tolist() == [[9]] and out["sequence_length"].tolist() == [1]
    with pytest.raises(UserError, match="'sequence_lengths' is missing"):
        scoring.process_inputs({"tokens": np.array([[9]])}, None)
    for bad, message in (
        ([[b"a", b"b"]], r"'sentences' has shape \[1, 2\]"),
        ([[b"a"], [b"\xff"]], "in sample 1 that are not UTF-8"),
    ):
        with pytest.raises(UserError, match=message):
            scoring.process_inputs({"sentences": np.array(bad)}, None)


@pytest.mark.parametrize("strip, width", [(None, 8), (4, 4), (3, 3), (16, 8)])
def test_pad_batch_and_strip_sequence(strip, width):
    tokens = np.arange(24).reshape(3, 8)
    out, added, old_width = scoring.pad_batch_and_strip_sequence(
        tokens, np.array([3, 2, 1]), 4, strip
    )
    assert out["inputs"].shape == (4, width) and added == 1 and old_width == 8
    assert (out["inputs"][:3] == tokens[:, :width]).all() and (out["inputs"][3] == 0).all()
    assert out["sequence_length"].tolist() == [3, 2, 1, 0]
