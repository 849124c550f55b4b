# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Slices of scoring requests: which samples share one, and who has to wait for whom."""

import threading
import time

import numpy as np
import pytest
import torch

from nemo_aligner.parallel import parallel_state
from nemo_aligner.servers import requests
from nemo_aligner.servers.front import is_large
from nemo_aligner.servers.scoring import Scorer, Turns
from nemo_aligner.training.passes import plan_micro_batches
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
