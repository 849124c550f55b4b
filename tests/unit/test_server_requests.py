# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Decoding, tokenizing and padding of requests on the server."""

import numpy as np
import pytest
import torch

from nemo_aligner.core.errors import UserError
from nemo_aligner.parallel import parallel_state
from nemo_aligner.servers import requests


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
