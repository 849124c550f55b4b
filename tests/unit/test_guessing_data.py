# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The data set of the guessing game: true hints, guesses without a plan, one token per word."""

import collections
import sys
from pathlib import Path

from nemo.collections.common.tokenizers import AutoTokenizer

from tests.data_sets import read

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart"
sys.path.insert(0, str(QUICKSTART))

import guessing_data  # noqa: E402


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
