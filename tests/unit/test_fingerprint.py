# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of tokenizers: equal exactly when the ids mean the same tokens."""

import json
import re

from nemo_aligner.core.tokenizer import PADDING, tokenizer_fingerprint


def test_the_fingerprint_of_a_hugging_face_tokenizer(
    tiny_tokenizer, tiny_tokenizer_dir, reversed_tokenizer_dir
):
    from nemo.collections.common.tokenizers import AutoTokenizer

    fingerprint = tokenizer_fingerprint(tiny_tokenizer)
    assert re.fullmatch(r"300 tokens, end 299, [0-9a-f]{12}", fingerprint)
    assert tokenizer_fingerprint(AutoTokenizer(tiny_tokenizer_dir)) == fingerprint
    other = AutoTokenizer(reversed_tokenizer_dir)
    assert other.text_to_tokens("the film") == tiny_tokenizer.text_to_tokens("the film")
    assert tokenizer_fingerprint(other)[:-12] == fingerprint[:-12]
    assert tokenizer_fingerprint(other) != fingerprint
    padded = AutoTokenizer(tiny_tokenizer_dir)
    padded.tokenizer.add_special_tokens({"pad_token": PADDING})  # as an exported reward model has
    assert padded.vocab_size == 301 and tokenizer_fingerprint(padded) == fingerprint


def test_the_fingerprint_of_a_sentencepiece_tokenizer(tmp_path):
    """Another order of its pieces shows; that the same tokens come from a Hugging Face tokenizer
    does not.
    """
    from nemo.collections.common.tokenizers import AutoTokenizer, SentencePieceTokenizer
    from sentencepiece import SentencePieceTrainer
    from tokenizers import Tokenizer, models

    for name, symbols in (("a.model", ["<user>", "<bot>"]), ("b.model", ["<bot>", "<user>"])):
        with open(tmp_path / name, "wb") as file:
            texts = iter(["the film was a joy from the first scene to the last"])
            options = {"vocab_size": 40, "model_type": "bpe", "user_defined_symbols": symbols}
            SentencePieceTrainer.train(sentence_iterator=texts, model_writer=file, **options)
    tokenizer = SentencePieceTokenizer(str(tmp_path / "a.model"))
    fingerprint = tokenizer_fingerprint(tokenizer)
    assert re.fullmatch(rf"{tokenizer.vocab_size} tokens, end 2, [0-9a-f]{{12}}", fingerprint)
    again = SentencePieceTokenizer(str(tmp_path / "a.model"))
    assert tokenizer_fingerprint(again) == fingerprint
    swapped = tokenizer_fingerprint(SentencePieceTokenizer(str(tmp_path / "b.model")))
    assert swapped[:-12] == fingerprint[:-12] and swapped != fingerprint

    pieces = tokenizer.ids_to_tokens(range(tokenizer.vocab_size))
    words = Tokenizer(
        models.WordLevel({piece: id_ for id_, piece in enumerate(pieces)}, unk_token="<unk>")
    )
    words.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    config["unk_token"] = "<unk>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert tokenizer_fingerprint(AutoTokenizer(str(tmp_path))) == fingerprint


def test_what_cannot_list_its_tokens_has_no_fingerprint():
    assert tokenizer_fingerprint(None) is None
    assert tokenizer_fingerprint(type("Tokenizer", (), {"vocab_size": 9})) is None
