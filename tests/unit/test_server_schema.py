# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The wire format, and the checks of requests and replies."""

import numpy as np
import pytest

from nemo_aligner.core.errors import UserError
from nemo_aligner.servers import schema
from nemo_aligner.servers.constants import ServerSignal
from tests.cases import says


def training_request(rows=2, width=5):
    return {
        "tokens": np.ones((rows, width), np.int64),
        "returns": np.zeros((rows, width - 1), np.float32),
        "prev_values": np.zeros((rows, width - 1), np.float32),
        "mask": np.ones((rows, width - 1), np.float32),
    }


def scoring_request(rows=2, width=5):
    lengths = np.full((rows, 1), width, np.int64)
    return {"tokens": np.ones((rows, width), np.int64), "sequence_lengths": lengths}


def table(specs):
    names = [np.dtype(s.dtype).name if s.dtype is not np.bytes_ else "bytes" for s in specs]
    return [(s.name, name, s.shape, s.optional) for s, name in zip(specs, names)]


def test_endpoints_are_those_of_the_protocol():
    rows = "int64", (-1,), True
    scoring = [("sentences", "bytes", (-1,), True), ("tokens", *rows), ("sequence_lengths", *rows)]
    tokenizer = ("tokenizer", "bytes", (1,), True)
    combined, alone = schema.critic_infer_endpoint(True), schema.critic_infer_endpoint(False)
    assert combined.name == alone.name == "critic_infer" and combined.batching
    assert table(combined.inputs) == table(alone.inputs) == [*scoring, tokenizer]
    assert table(combined.outputs) == [
        ("values", "float32", (-1,), False),
        ("rewards", "float32", (-1,), False),
    ]
    assert table(alone.outputs) == [("values", "float32", (-1,), False)]

    train = schema.critic_train_endpoint()
    assert train.name == "critic_train" and not train.batching
    assert table(train.inputs) == [
        ("tokens", "int64", (-1, -1), False),
        ("returns", "float32", (-1, -1), False),
        ("prev_values", "float32", (-1, -1), False),
        ("mask", "float32", (-1, -1), False),
        ("request_id", "bytes", (1,), True),
        ("piece", "int64", (2,), True),
    ]
    assert table(train.outputs) == [("loss_mean", "float32", (1,), False)]

    save = schema.critic_save_endpoint()
    assert save.name == "critic_save" and not save.batching
    assert table(save.inputs) == [
        ("dummy_var", "int64", (1,), False),
        ("actor_step", "int64", (1,), True),
    ]
    assert table(save.outputs) == [("status", "int64", (1,), False)]

    reward = schema.reward_model_endpoint()
    assert reward.name == "reward_model" and reward.batching
    assert table(reward.inputs) == [*scoring, ("prompt_lengths", "int64", (1,), True), tokenizer]
    assert table(reward.outputs) == [("rewards", "float32", (1,), False)]


def test_signals_keep_their_numbers():
    assert [ServerSignal(n).name for n in range(1, 5)] == ["FORWARD", "TRAIN", "INVALID", "SAVE"]
    # Ranks agree on the largest signal, and STOP must win.
    assert max(ServerSignal) == ServerSignal.STOP


@pytest.mark.parametrize(
    "change, words",
    [
        ({"tokns": np.ones((2, 5), np.int64)}, ["tokns", "tokens: int64"]),
        ({"mask": None}, ["mask", "missing"]),
        ({"tokens": np.ones((2, 5), np.int32)}, ["tokens", "int32", "int64"]),
        ({"returns": np.ones((2, 4), np.float64)}, ["returns", "float64", "float32"]),
        ({"tokens": np.ones(5, np.int64)}, ["tokens", "[5]", "['any', 'any']"]),
        ({"mask": [[1.0]]}, ["mask", "list", "numpy"]),
    ],
)
def test_wrong_training_requests_name_the_tensor_and_the_remedy(change, words):
    changed = {**training_request(), **change}.items()
    request = {name: value for name, value in changed if value is not None}
    with says(UserError, *words, "critic_train"):
        schema.validate_request(schema.critic_train_endpoint(), request)


def test_a_request_of_a_policy_with_another_tokenizer_names_both_and_the_remedy():
    mine, other = "9 tokens, end 0, aaaaaaaaaaaa", "9 tokens, end 0, bbbbbbbbbbbb"
    sent = np.array([[mine.encode()], [mine.encode()], [other.encode()]])  # merged: two clients
    for array in (sent, sent.astype(object)):
        schema.validate_request(
            schema.critic_infer_endpoint(True), {**scoring_request(rows=3), "tokenizer": array}
        )
        both = f"tokenizer ({other}) is not this server's ({mine})"
        with says(schema.RequestError, both, "rm_model_file"):
            schema.validate_tokenizer(array, mine)
        schema.validate_tokenizer(array[:2], mine)
        schema.validate_tokenizer(array, None)
    schema.validate_tokenizer(None, mine)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"tokens": np.full((2, 5), 32, np.int64)}, ["id 32", "[0, 32)"]),
        ({"tokens": np.full((2, 5), -1, np.int64)}, ["id -1"]),
        ({"tokens": np.ones((2, 9), np.int64)}, ["9 columns", "at most 8"]),
        ({"returns": np.zeros((2, 5), np.float32)}, ["'returns' has shape [2, 5]", "[2, 4]"]),
        ({"mask": np.full((2, 4), 0.5, np.float32)}, ["'mask'", "0 and 1"]),
        (
            {"returns": np.array([[0, 0, 0, 0], [0, np.nan, 0, 0]], np.float32)},
            ["'returns' is nan", "sample 1, column 1"],
        ),
        ({"returns": np.full((2, 4), 1e18, np.float32)}, ["'returns' is 9.99", "at most 1e+06"]),
        ({"prev_values": np.full((2, 4), -2e6, np.float32)}, ["'prev_values' is -2000000.0"]),
        ({"returns": np.full((2, 4), np.inf, np.float32)}, ["'returns' is inf"]),
    ],
)
def test_content_of_a_training_request(change, words):
    with says(UserError, *words):
        schema.validate_training_inputs(
            **{**training_request(), **change}, vocab_size=32, max_length=8
        )


@pytest.mark.parametrize(
    "sent, words",
    [
        (b"x" * 65, "has 65 bytes"),
        (b"x" * 10**6, "has 1000000 bytes and begins with b'xxxxxxxxxxxxxxxx'"),
        (b"", "has 0 bytes"),
        ("ä".encode(), "ASCII"),
    ],
)
def test_ids_have_a_limit(sent, words):
    assert schema.read_request_id(np.array([b"x" * 64])) == "x" * 64
    with pytest.raises(UserError, match=words) as caught:
        schema.read_request_id(np.array([sent], dtype=object))
    assert len(str(caught.value)) < 200


def test_nan_is_allowed_where_the_mask_is_zero():
    request = training_request()
    request["returns"][0, 2] = np.nan
    request["mask"][0, 2] = 0
    schema.validate_training_inputs(**request, vocab_size=32, max_length=8)


@pytest.mark.parametrize(
    "prompts, words",
    [
        ([[1]], ["'prompt_lengths'", "[1, 1]", "2 rows"]),
        ([[1], [5]], ["'prompt_lengths' holds 5 in sample 1", "is 4"]),
        ([[-1], [4]], ["'prompt_lengths' holds -1 in sample 0"]),
    ],
)
def test_prompt_lengths_of_a_scoring_request(prompts, words):
    tokens, lengths = np.ones((2, 5), np.int64), np.array([[5], [4]])
    schema.validate_scoring_inputs(tokens, lengths, prompt_lengths=np.array([[1], [4]]))
    with says(UserError, *words):
        schema.validate_scoring_inputs(tokens, lengths, prompt_lengths=np.array(prompts))


@pytest.mark.parametrize(
    "lengths, words",
    [
        ([[5]], ["'sequence_lengths'", "2 rows"]),
        ([[5], [0]], ["holds 0"]),
        ([[5], [6]], ["holds 6", "[1, 5]"]),
    ],
)
def test_content_of_a_scoring_request(lengths, words):
    with says(UserError, *words):
        schema.validate_scoring_inputs(
            np.ones((2, 5), np.int64), np.array(lengths), vocab_size=32, max_length=8
        )


def rewards(*numbers):
    return np.array(numbers, np.float32)[:, None]


def test_good_answers_pass():
    reply = {"rewards": rewards(1, -2)}
    schema.validate_reply(schema.reward_model_endpoint(), reply, samples=2)
    values = np.array([[np.nan, 1, 2, np.nan], [0, 1, np.inf, 0]], np.float32)
    # A server may answer more columns than are used.
    used = np.array([[False, True, True], [True, True, False]])
    answer = {"rewards": rewards(0, 0), "values": values}
    schema.validate_reply(schema.critic_infer_endpoint(True), answer, samples=2, used=used)
    schema.validate_reply(schema.critic_infer_endpoint(False), {"values": values}, samples=2)


@pytest.mark.parametrize(
    "answer, words",
    [
        ({}, ["no tensor 'rewards'", "another kind of server"]),
        ({"values": rewards(1, 2, 3)}, ["no tensor 'rewards'", "['values']"]),
        ({"rewards": np.ones((3, 1), np.int64)}, ["int64", "rewards: float32 ['N', 1]"]),
        ({"rewards": np.ones(3, np.float32)}, ["[3] for 3 sample(s)", "[3, 1] is needed"]),
        ({"rewards": rewards(1, 2)}, ["[2, 1] for 3 sample(s)", "[3, 1] is needed"]),
        ({"rewards": np.ones((3, 2), np.float32)}, ["[3, 2]", "regression.merge_attributes"]),
        ({"rewards": rewards(1, np.nan, np.nan)}, ["nan in sample 1", "2 of 3", "weights"]),
        ({"rewards": rewards(1, 2, -np.inf)}, ["'rewards' is -inf in sample 2", "1 of 3"]),
    ],
)
def test_unusable_rewards_are_refused(answer, words):
    with says(schema.ReplyError, *words):
        schema.validate_reply(schema.reward_model_endpoint(), answer, samples=3)


@pytest.mark.parametrize(
    "values, words",
    [
        (np.ones((2, 2), np.float32), ["[2, 2] for 2 sample(s)", "[2, at least 3]"]),
        (np.ones((3, 4), np.float32), ["[3, 4] for 2 sample(s)"]),
        (np.ones(8, np.float32), ["[8]"]),
        (
            np.array([[np.nan, 1, 1, 1], [1, np.nan, 1, 1]], np.float32),
            ["is nan in sample 1, column 1"],
        ),
        (
            np.array([[1, 1, -np.inf, 1], [1, 1, 1, 1]], np.float32),
            ["is -inf in sample 0, column 2"],
        ),
    ],
)
def test_unusable_values_are_refused(values, words):
    used = np.array([[False, True, True, False], [True, True, False, False]])
    answer = {"rewards": rewards(0, 0), "values": values}
    with says(schema.ReplyError, *words):
        schema.validate_reply(schema.critic_infer_endpoint(True), answer, samples=2, used=used)
