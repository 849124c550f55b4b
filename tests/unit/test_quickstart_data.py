# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The quickstart's data set: what is in the files, the gold score by hand, and a tokenizer without
surprises.
"""

import random
from pathlib import Path

import grammar
import make_data
import pytest
import run
from gold import gold_score
from nemo.collections.common.tokenizers import AutoTokenizer

from tests.data_sets import check_same_bytes, read

pytestmark = pytest.mark.slow

KINDS = ("sft", "pairs", "prompts", "labels", "preferences", "thumbs")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    make_data.make_data(folder, seed=3)
    return folder


@pytest.fixture(scope="module")
def tokenizer(data_dir):
    return AutoTokenizer(pretrained_model_name=str(data_dir / "tokenizer"))


def prompts_of(data_dir: Path, kind: str, split: str) -> list[str]:
    found = read(data_dir / f"{kind}_{split}.jsonl")
    if kind == "sft":
        return [line["input"] for line in found]
    texts = [line["text"] if "text" in line else line["prompt"] for line in found]
    return [text.partition(":")[0] + ":" for text in texts]


@pytest.mark.parametrize(
    ("review", "score"),
    [
        ("The plot is very superb. I loved the cast.", 1.0),
        ("The plot is very dull. I hated the cast.", -1.0),
        ("This is one funny hero. I disliked the pace.", 0.0),
        ("I LOVED the hero. The cast is moving. This is one weak plot.", 1 / 3),
        ("superb superb superb superb awful", 0.0),  # repetition gains nothing
        ("It is set in Oslo.", 0.0),
        ("", 0.0),
    ],
)
def test_gold_score_by_hand(review, score):
    assert gold_score(review) == pytest.approx(score)


def test_every_opinion_has_one_sentiment_word_of_the_right_kind():
    rng = random.Random(0)
    for good, score in ((True, 1.0), (False, -1.0)):
        assert {gold_score(grammar.opinion(rng, good)) for _ in range(300)} == {score}
    assert {gold_score(grammar.fact(rng)) for _ in range(50)} == {0.0}
    assert not grammar.GOOD_WORDS & grammar.BAD_WORDS


def test_no_film_of_a_validation_file_is_in_any_training_file(data_dir):
    held_out, trained_on = (
        {prompt for kind in KINDS for prompt in prompts_of(data_dir, kind, split)}
        for split in ("validation", "train")
    )
    assert held_out and not held_out & trained_on


def test_sft_reviews_are_as_often_kind_as_unkind(data_dir):
    scores = [gold_score(line["output"]) for line in read(data_dir / "sft_train.jsonl")]
    assert abs(sum(scores) / len(scores)) < 0.05
    kind, unkind = (sum(sign * score > 0 for score in scores) for sign in (1, -1))
    assert kind == pytest.approx(unkind, rel=0.1)


def test_pairs_are_of_one_film_with_the_kinder_review_first(data_dir):
    found = [line["text"] for line in read(data_dir / "pairs_train.jsonl")]
    for better, worse in zip(found[::2], found[1::2], strict=True):
        assert better.partition(":")[0] == worse.partition(":")[0]
        assert gold_score(better.partition(":")[2]) > gold_score(worse.partition(":")[2])


def test_thumbs_are_one_review_per_film_half_of_them_liked(data_dir):
    for split, size in make_data.SIZES["thumbs"].items():
        thumbs = read(data_dir / f"thumbs_{split}.jsonl")
        assert len({line["prompt"] for line in thumbs}) == len(thumbs) == size
        scores = {"chosen": [], "rejected": []}
        for line in thumbs:
            assert line["response"].startswith(" ")
            scores[line["preference"]].append(gold_score(line["response"]))
        assert len(scores["chosen"]) == size / 2
        assert sum(scores["chosen"]) > sum(scores["rejected"])


def test_labels_are_gold_scores_of_their_reviews(data_dir):
    found = read(data_dir / "labels_train.jsonl")
    for line in found:
        assert line["label"] == [gold_score(line["text"].partition(":")[2])]
    scores = [line["label"][0] for line in found]
    assert abs(sum(scores) / len(scores)) < 0.1
    assert {-1.0, 0.0, 1.0} < set(scores)  # and shades between


@pytest.mark.full
def test_the_same_seed_writes_the_same_bytes(data_dir, tmp_path):
    make_data.make_data(tmp_path / "same", seed=3)
    make_data.make_data(tmp_path / "other", seed=4)
    check_same_bytes(tmp_path / "same", data_dir)
    files = [folder / "sft_train.jsonl" for folder in (data_dir, tmp_path / "other")]
    assert files[0].read_bytes() != files[1].read_bytes()


def test_tokenizer_round_trips_and_responses_begin_at_a_token_boundary(data_dir, tokenizer):
    for line in read(data_dir / "sft_train.jsonl")[:500]:
        texts = line["input"], f" {line['output']}"
        prompt, response = map(tokenizer.text_to_ids, texts)
        whole = "".join(texts)
        assert prompt + response == tokenizer.text_to_ids(whole)
        assert tokenizer.ids_to_text(prompt + response) == whole
    odd = "  Ünïcode 漢字\n\ttabs <x> {y}"
    assert tokenizer.ids_to_text(tokenizer.text_to_ids(odd)) == odd


def test_tokenizer_ends_texts_and_stays_small(tokenizer):
    assert tokenizer.ids_to_tokens([tokenizer.eos_id]) == [make_data.END_OF_TEXT]
    assert tokenizer.vocab_size == make_data.VOCAB_SIZE
    tokens = tokenizer.text_to_tokens("Red Song, a fable by Weber: I loved it.")
    assert make_data.END_OF_TEXT not in tokens


def test_texts_fit_the_lengths_of_the_run(data_dir, tokenizer):
    for kind, key, limit in (
        ("pairs", "text", run.SEQ_LENGTH - 1),
        ("sft", "output", run.MAX_RESPONSE - 1),
        ("prompts", "text", run.SEQ_LENGTH - run.MAX_RESPONSE),
    ):
        lines, space = read(data_dir / f"{kind}_train.jsonl"), " " * (kind == "sft")
        texts = [space + line[key] for line in lines]
        assert max(len(tokenizer.text_to_ids(text)) for text in texts) <= limit
