# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The data sets of two-digit sums (complete, split without a leak, right, and one token per
character) and of the guessing game (true hints, guesses without a plan, one token per word).
"""

import collections
import runpy
import sys
from pathlib import Path

import pytest
from nemo.collections.common.tokenizers import AutoTokenizer

from tests.data_sets import check_same_bytes, read

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "quickstart"))

import arithmetic_data  # noqa: E402
import guessing_data  # noqa: E402
import make_data  # noqa: E402
import run_arithmetic  # noqa: E402


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sums")
    arithmetic_data.make_data(folder, seed=3)
    return folder


@pytest.fixture(scope="module")
def tokenizer(data_dir):
    return AutoTokenizer(pretrained_model_name=str(data_dir / "tokenizer"))


def sums(data_dir: Path, split: str) -> list[tuple[int, int]]:
    """(a, b) of every SFT line."""
    found = [line["input"][:-1].split("+") for line in read(data_dir / f"sft_{split}.jsonl")]
    return [(int(a), int(b)) for a, b in found]


def test_every_sum_is_there_once_and_right(data_dir):
    everything = sums(data_dir, "train") + sums(data_dir, "validation")
    assert sorted(everything) == [(a, b) for a in range(10, 100) for b in range(10, 100)]
    for split in ("train", "validation"):
        texts = [(f"{a}+{b}=", str(a + b)) for a, b in sums(data_dir, split)]
        lines = read(data_dir / f"sft_{split}.jsonl")
        assert lines == [{"input": asked, "output": result} for asked, result in texts]
        prompts = read(data_dir / f"prompts_{split}.jsonl")
        assert prompts == [{"text": asked} for asked, _ in texts]


def test_held_out_sums_are_not_trained_on_in_any_order(data_dir):
    held_out, trained_on = sums(data_dir, "validation"), set(sums(data_dir, "train"))
    assert len(held_out) == arithmetic_data.NUM_VALIDATION == 512
    assert not any((a, b) in trained_on or (b, a) in trained_on for a, b in held_out)


def test_the_same_seed_writes_the_same_bytes(data_dir, tmp_path):
    arithmetic_data.make_data(tmp_path / "same", seed=3)
    arithmetic_data.make_data(tmp_path / "other", seed=4)
    check_same_bytes(tmp_path / "same", data_dir)
    assert set(sums(tmp_path / "other", "validation")) != set(sums(data_dir, "validation"))


def test_one_token_per_character(tokenizer):
    assert tokenizer.text_to_tokens("12+34=") == list("12+34=")
    assert tokenizer.ids_to_text(tokenizer.text_to_ids("12+34=46")) == "12+34=46"
    assert tokenizer.ids_to_tokens([tokenizer.eos_id]) == [make_data.END_OF_TEXT]
    assert tokenizer.vocab_size == len("0123456789+=") + 2  # the end and the unknown character
    unknown = arithmetic_data.UNKNOWN
    assert tokenizer.text_to_tokens("1 2\n") == ["1", unknown, "2", unknown]


def test_prompt_and_response_meet_at_a_token_boundary_and_fit_the_run(data_dir, tokenizer):
    for line in read(data_dir / "sft_train.jsonl")[::50]:
        prompt, response = (tokenizer.text_to_ids(line[key]) for key in ("input", "output"))
        assert prompt + response == tokenizer.text_to_ids(line["input"] + line["output"])
        assert len(response) + 1 <= run_arithmetic.MAX_RESPONSE
        assert len(prompt) <= run_arithmetic.SEQ_LENGTH - run_arithmetic.MAX_RESPONSE


def test_the_reward_function_agrees_with_the_data(data_dir):
    exact_answer = runpy.run_path(str(run_arithmetic.REWARD_FUNCTION))["exact_answer"]
    held_out = read(data_dir / "sft_validation.jsonl")
    prompts, answers = [line["input"] for line in held_out], [line["output"] for line in held_out]
    assert exact_answer(prompts, answers, [0] * 512) == [1.0] * 512
    assert exact_answer(prompts, ["1" + answer for answer in answers], [0] * 512) == [0.0] * 512


def test_games_are_told_as_they_are_played(tmp_path):
    guessing_data.make_data(tmp_path, seed=3)
    games = read(tmp_path / "sft_train.jsonl")
    assert len(games) == guessing_data.NUM_GAMES
    assert read(tmp_path / "prompts_validation.jsonl") == [{"text": "?"}] * 512
    first, ended = collections.Counter(), collections.Counter()
    for game in games:
        assert game["input"] == "?" and game["output"].endswith("!")
        possible, last = set(range(1, 10)), None
        for said in game["output"].split("!")[:-1]:
            guess = int(said[-1])
            hint = said[:-1]  # after the guess before
            if hint:
                possible &= set(range(1, last) if hint == "less" else range(last + 1, 10))
            last = guess
        assert possible
        first[game["output"][0]] += 1
        ended[game["output"].count("!")] += 1
    assert sorted(first) == list("123456789") and min(first.values()) > 380
    # A guess in nine is right: 1/9 of the games end with the first, and (8/9)^3 come to the last.
    assert abs(ended[1] / len(games) - 1 / 9) < 0.02
    assert abs(ended[4] / len(games) - (8 / 9) ** 3) < 0.03 and max(ended) == 4

    tokenizer = AutoTokenizer(pretrained_model_name=str(tmp_path / "tokenizer"))
    ids = tokenizer.text_to_ids("?5!more7!less6!")
    assert len(ids) == 9 and tokenizer.ids_to_text(ids) == "?5!more7!less6!"
    again = tmp_path / "again"
    guessing_data.make_data(again, seed=3)
    assert read(again / "sft_train.jsonl") == games
