# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of each library that NeMo's configurations name."""

import base64
import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.models.nlp.gpt.tokenizers import build_tokenizer
from tests.tiny_models import tiny_config

TEXT = "the film was bad. Ünïcode & 123\n"


def build(**section):
    return build_tokenizer(OmegaConf.create(section))


@pytest.fixture(scope="module")
def gpt2_files(tiny_tokenizer_dir, tmp_path_factory):
    """vocab.json and merges.txt of GPT-2's form: those of the tiny tokenizer."""
    folder = tmp_path_factory.mktemp("gpt2")
    content = json.loads((Path(tiny_tokenizer_dir) / "tokenizer.json").read_text())
    vocab = dict(content["model"]["vocab"])
    vocab["<|endoftext|>"] = len(vocab)
    merges = [m if isinstance(m, str) else " ".join(m) for m in content["model"]["merges"]]
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    return {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}


@pytest.mark.parametrize("kind", ["GPT2BPETokenizer", "megatron-gpt-345m"])
def test_megatron_gpt2_bpe(gpt2_files, tiny_tokenizer, kind):
    tokenizer = build(library="megatron", type=kind, **gpt2_files)
    assert tokenizer.text_to_ids(TEXT) == tiny_tokenizer.text_to_ids(TEXT)
    assert tokenizer.ids_to_text(tokenizer.text_to_ids(TEXT)) == TEXT
    assert tokenizer.vocab_size == tiny_tokenizer.vocab_size
    assert tokenizer.eos_id == tiny_tokenizer.eos_id == 299


def test_megatron_tokenizer_travels_in_a_nemo_file(gpt2_files, tmp_path):
    section = {"library": "megatron", "type": "GPT2BPETokenizer"}
    copies = {key: shutil.copy(file, tmp_path) for key, file in gpt2_files.items()}
    model = MegatronGPTModel(tiny_config("", tokenizer=section | copies))
    model.save_to(str(tmp_path / "m.nemo"))
    for file in copies.values():
        Path(file).unlink()
    restored = MegatronGPTModel.restore_from(tmp_path / "m.nemo")
    assert restored.tokenizer.text_to_ids(TEXT) == model.tokenizer.text_to_ids(TEXT)


def test_special_tokens_of_hugging_face(tiny_tokenizer_dir, tiny_tokenizer):
    common = {"library": "huggingface", "type": tiny_tokenizer_dir}
    ending = build(**common, special_tokens={"eos_token": "<|end|>"})
    assert ending.eos_id == 300 and ending.vocab_size == 301
    named = {"additional_special_tokens": ["<a>", "<b>"]}
    for key, more in (
        ("additional_special_tokens", ["<a>", "<b>"]),
        ("additional_special_tokens", named),
        ("special_tokens", named),
    ):
        tokenizer = build(**common, **{key: more})
        assert tokenizer.text_to_ids("<b>the<a>")[0] == 301
        assert tokenizer.vocab_size == tiny_tokenizer.vocab_size + 2
    with pytest.raises(ConfigError, match="special_tokens=.*'stop': 'x'.*unknown kind"):
        build(**common, special_tokens={"stop": "x"})
    for wrong in ({"stop": "x"}, {"additional_special_tokens": 5}, [5]):
        with pytest.raises(ConfigError, match="additional_special_tokens=.*cannot be added"):
            build(**common, additional_special_tokens=wrong)


def test_special_tokens_of_sentencepiece(tiny_sentencepiece_model):
    common = {"library": "sentencepiece", "model": tiny_sentencepiece_model}
    plain = build(**common)
    for key in ("special_tokens", "additional_special_tokens"):
        tokenizer = build(**common, **{key: ["<extra>"]})
        # In legacy mode NeMo's wrapper knows only the special tokens that it was given.
        assert (tokenizer.eos_id, tokenizer.bos_id) == (plain.eos_id, plain.bos_id)
        assert tokenizer.text_to_ids("the<extra>")[-1] == plain.vocab_size
        with pytest.raises(ConfigError, match="need model.tokenizer.sentencepiece_legacy=True"):
            build(**common, sentencepiece_legacy=False, **{key: ["<extra>"]})
        named = build(**common, **{key: {"sep_token": "<extra>"}})
        assert named.text_to_ids("the<extra>")[-1] == plain.vocab_size
        remedy = r"the list model.tokenizer.additional_special_tokens=\['<a>', '<b>'\]"
        with pytest.raises(ConfigError, match=f"{key}=.*NeMo 2.*{remedy}"):
            build(**common, **{key: {"additional_special_tokens": ["<a>", "<b>"]}})


@pytest.mark.skipif(importlib.util.find_spec("tiktoken") is None, reason="needs tiktoken")
def test_tiktoken_reads_nemos_vocabulary(tmp_path):
    """130,072 tokens in NeMo's form: the bytes, then pairs that no text has."""
    tokens = [bytes([i]) for i in range(256)]
    tokens += [b"\xff" + i.to_bytes(3, "big") for i in range(2**17 - 1000 - 256)]
    coded = [base64.b64encode(token).decode() for token in tokens]
    vocab = [{"rank": i, "token_bytes": each, "token_str": ""} for i, each in enumerate(coded)]
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    tokenizer = build(library="tiktoken", vocab_file=str(tmp_path / "vocab.json"))
    # 1,000 special tokens come first, then one token per byte
    assert tokenizer.text_to_ids("a\n") == [1000 + ord("a"), 1000 + ord("\n")]
    assert tokenizer.ids_to_text([2, 1000 + ord("a")]) == "a"
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, 2, 2**17)


def test_other_libraries(tiny_sentencepiece_model):
    model = {"model": tiny_sentencepiece_model}
    tokenizer = build(library="megatron", type="GPTSentencePieceTokenizer", **model)
    plain = build(library="sentencepiece", **model)
    assert tokenizer.text_to_ids(TEXT) == plain.text_to_ids(TEXT)
    tokenizer = build(library="byte-level", type=None)
    assert tokenizer.text_to_ids("aé") == list("aé".encode())
    assert tokenizer.ids_to_text(list("aé".encode())) == "aé" and tokenizer.eos_id == 0


@pytest.mark.parametrize(
    "section, message",
    [
        ({"library": "tabular"}, "library='tabular' is not supported; it is not a tokenizer of"),
        ({"library": "own"}, "library='own' is not supported; use one of sentencepiece"),
        ({"library": "megatron", "type": "BertWordPieceCase"}, "use GPT2BPETokenizer or GPTSent"),
        (
            {"library": "megatron", "type": "GPT2BPETokenizer"},
            "vocab_file=None does not exist; .*vocab.json, or use library=huggingface and type=g",
        ),
        ({"library": "huggingface", "type": "gpt2", "vocab_file": "v"}, "vocab_file=v is not"),
        (
            {"library": "byte-level", "additional_special_tokens": ["a"]},
            "additional_special_tokens=.*cannot be added with model.tokenizer.library=byte-level",
        ),
        ({"library": "tiktoken"}, "tokenizer.vocab_file=None does not exist"),
        ({"library": "tiktoken", "vocab_file": __file__}, "tiktoken"),
        (
            {"library": "megatron", "type": "GPT2BPETokenizer"}
            | dict.fromkeys(("vocab_file", "merge_file"), __file__),
            "cannot be read as GPT-2's BPE",
        ),
    ],
)
def test_what_cannot_be_built_is_refused(section, message):
    with pytest.raises(UserError, match=message):
        build(**section)
