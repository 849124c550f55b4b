# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""NeMo's chat format: texts and masks by hand, on a tokenizer of bytes, on a byte-level BPE and on
SentencePiece; and what is wrong with a record.

In the texts, what is trained on stands between [ and ].
"""

import io
import itertools
import re

import pytest
import sentencepiece
from nemo.collections.common.tokenizers import AutoTokenizer, SentencePieceTokenizer
from nemo.collections.common.tokenizers.bytelevel_tokenizers import ByteLevelTokenizer
from omegaconf import OmegaConf

from nemo_aligner.compat.nemo_classes import get_prompt_template_example
from nemo_aligner.config.defaults import complete_config
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.data.nlp.datasets import RewardModelDataset, RLHFDataset
from nemo_aligner.data.nlp.record_encoder import chat_end_strings, chat_form
from tests.chat_forms import CORPUS, FAMILIES, write_tokenizer
from tests.data_sets import MARKS, sft

CHAT = {"chat": True, "chat_prompt_tokens": MARKS}


def turns(*values, labels=None):
    names = [name for name, _ in values]
    labels = labels or [None] * len(values)
    said = zip(names, (value for _, value in values), labels, strict=True)
    return [{"from": name, "value": value, "label": label} for name, value, label in said]


THREE = ("User", "hello"), ("Assistant", "the film"), ("User", "a plot")
THREE = turns(*THREE, ("Assistant", "a joy"))
LABELLED = turns(
    ("User", "hello"), ("Assistant", "the film"), ("User", "bye"), labels=[None, "joy:4", None]
)
TOOL = {"from": "Tool", "value": "4"}
RATED = turns(("User", "hello"), ("Assistant", "the film"), labels=["q:1", "joy:4"])
# record, and its text with what is trained on in brackets
CASES = {
    "two turns of the user": (
        {"system": "Be kind.", "conversations": THREE, "mask": "User"},
        "\x00System\nBe kind.\n\x11User\nhello\n\x11Assistant\n[the film\n\x11]User\na plot\n"
        "\x11Assistant\n[a joy\n\x11]",
    ),
    "it ends with the user": (
        {"system": "", "conversations": THREE[:3]},
        "\x00System\n\n\x11User\nhello\n\x11Assistant\n[the film\n\x11]User\na plot\n",
    ),
    "without a system turn in the record, and null": (
        {"conversations": THREE[:2], "mask": None, "type": None},
        "\x00System\n\n\x11User\nhello\n\x11Assistant\n[the film\n\x11]",
    ),
    "the first turn is never trained on": (
        {"conversations": [THREE[1], THREE[0], THREE[3]], "mask": "User"},
        "\x00System\n\n\x11Assistant\nthe film\n\x11User\nhello\n\x11Assistant\n[a joy\n\x11]",
    ),
    "somebody else is masked too": (
        {"conversations": [*THREE[:2], TOOL, THREE[3]], "mask": "User,Tool"},
        "\x00System\n\n\x11User\nhello\n\x11Assistant\n[the film\n\x11]Tool\n4\n"
        "\x11Assistant\n[a joy\n\x11]",
    ),
    "a masked turn behind another ends no response": (
        {"conversations": [*THREE[:2], TOOL, TOOL, THREE[3]], "mask": "User,Tool"},
        "\x00System\n\n\x11User\nhello\n\x11Assistant\n[the film\n\x11]Tool\n4\n"
        "\x11Tool\n4\n\x11Assistant\n[a joy\n\x11]",
    ),
    "labels without a type are left out": (
        {"conversations": LABELLED[:2]},
        "\x00System\n\n\x11User\nhello\n\x11Assistant\n[the film\n\x11]",
    ),
    "from a label to a text": (
        {"conversations": LABELLED, "type": "VALUE_TO_TEXT"},
        "\x00System\n\n\x11User\nhello\n\x11Assistant\n\x12joy:4\n[the film\n\x11]User\nbye\n",
    ),
    "from a text to its label": (
        {"conversations": LABELLED, "type": "TEXT_TO_VALUE"},
        "\x00System\n\n\x11User\nhello\n\x11Assistant\nthe film\n\x12[joy:4\n\x11]User\nbye\n",
    ),
    "the first label": (
        {"conversations": RATED, "type": "TEXT_TO_VALUE", "mask": "Assistant"},
        "\x00System\n\n\x11User\nhello\n\x12[q:1\n\x11]Assistant\nthe film\n\x12joy:4\n",
    ),
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = write_tokenizer(tmp_path_factory.mktemp("bpe"), FAMILIES["chatml"])
    return {
        "bytes": ByteLevelTokenizer({}),
        "bpe": AutoTokenizer(pretrained_model_name=folder),
        "sentencepiece": SentencePieceTokenizer(_sentencepiece(tmp_path_factory.mktemp("sp"))),
    }


def _sentencepiece(folder) -> str:
    """A model that keeps every character, as Llama's does."""
    model = io.BytesIO()
    parts = {"sentence_iterator": iter(CORPUS * 3), "model_writer": model, "vocab_size": 330}
    parts |= {"model_type": "bpe", "byte_fallback": True, "hard_vocab_limit": False}
    parts |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    parts |= {"minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(**parts)
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return str(folder / "tokenizer.model")


def runs(tokens, flags):
    """The runs of tokens whose flag is set."""
    grouped = itertools.groupby(zip(tokens, flags, strict=True), key=lambda pair: pair[1])
    return [[token for token, _ in run] for flag, run in grouped if flag]


@pytest.mark.parametrize("case", CASES)
def test_texts_and_masks_by_hand(case, tokenizers):
    record, marked = CASES[case]
    text, trained = re.sub(r"[\[\]]", "", marked), re.findall(r"(?s)\[(.*?)\]", marked)
    tokens, is_response = chat_form(CHAT, tokenizers["bytes"]).conversation(record)
    assert bytes(tokens).decode() == text
    parts = re.split(r"[\[\]]", marked)
    assert is_response == [bool(n % 2) for n, part in enumerate(parts) for _ in part]
    for name in ("bpe", "sentencepiece"):
        tokenizer = tokenizers[name]
        tokens, is_response = chat_form(CHAT, tokenizer).conversation(record)
        assert tokens == tokenizer.text_to_ids(text)
        spoken = [tokenizer.ids_to_text(run) for run in runs(tokens, is_response)]
        if name == "sentencepiece":  # it puts spaces at the ends of texts
            spoken, trained = ([part.split() for part in each] for each in (spoken, trained))
        assert spoken == trained


def test_a_label_whose_end_joins_what_follows_moves_no_other_mask(tokenizers):
    """Of such a turn nothing is trained on."""
    labels = [None, "joy:4", None, "joy:2"]
    names = ("User", "Assistant") * 2
    values = ("hello", "\nthe film", "bye", "a joy")
    record = {"conversations": turns(*zip(names, values), labels=labels), "type": "VALUE_TO_TEXT"}
    bpe = tokenizers["bpe"]
    tokens, is_response = chat_form(CHAT, bpe).conversation(record)
    assert "4\n\nthe" in bpe.ids_to_text(tokens) and bpe.text_to_ids("\n\n")[0] in tokens
    spoken = [bpe.ids_to_text(run) for run in runs(tokens, is_response)]
    assert spoken == ["\x11", "a joy\n\x11"]


def test_messages_have_the_same_form(tokenizers):
    form = chat_form(CHAT, tokenizers["bytes"])
    roles = {"User": "user", "Assistant": "assistant"}
    messages = [{"role": roles[t["from"]], "content": t["value"]} for t in THREE]
    system = {"role": "system", "content": "Be kind."}
    expected = form.conversation({"system": "Be kind.", "conversations": THREE})
    assert form.conversation({"messages": [system, *messages]}) == expected
    with pytest.raises(UserError, match="has one system message, the first"):
        form.conversation({"messages": [messages[0], system, messages[1]]})
    with pytest.raises(UserError, match="'messages' ends with a message of the role 'user'"):
        form.conversation({"messages": messages[:3]})


def test_prompts_and_pairs(tokenizers, write):
    """A sample that is scored is what a rollout makes: it ends with the token of the next turn."""
    tokenizer = tokenizers["bytes"]
    begin = "\x00System\n\n\x11User\nhello\n\x11Assistant\n"
    talk = lambda role, text: [{"role": role, "content": text}]
    sides = {"chosen": talk("assistant", "yes"), "rejected": talk("assistant", "no")}
    plain = {"prompt": "hello", "chosen": "yes", "rejected": "no"}
    path = write(plain, {"prompt": talk("user", "hello"), **sides})
    pairs = RewardModelDataset([path], tokenizer, 64, CHAT)
    for item in (pairs[0], pairs[1]):
        for side, text in (("chosen", "yes"), ("rejected", "no")):
            tokens = item[side][: item[f"{side}_length"]].tolist()
            assert bytes(tokens).decode() == f"{begin}{text}\n\x11"
    record = {"conversations": THREE[:1]}
    files = [path, write(record, {"text": "as it is"}, name="b")]
    prompts = RLHFDataset(files, tokenizer, 64, CHAT)
    texts = [bytes(prompts[number]["text"].tolist()).decode() for number in range(4)]
    assert texts == [begin, begin, begin, "as it is"]
    assert chat_end_strings(CHAT, tokenizer) == ("\x11",)
    with pytest.raises(UserError, match="line 1: the last turn is that of Assistant"):
        RLHFDataset([write({"conversations": THREE})], tokenizer, 64, CHAT)


def test_sft_dataset_with_the_tokens_of_the_configuration(tokenizers, write):
    """The defaults of conf/gpt_sft.yaml; without them, NeMo's."""
    cfg = complete_config(OmegaConf.create({"model": {}}), "gpt_sft").model.data
    path, wide = write(CASES["two turns of the user"][0]), {"max_seq_length": 96}
    marks = {"special_tokens": cfg.chat_prompt_tokens}
    dataset = sft(path, tokenizers["bytes"], wide, is_chat=True, **marks)
    batch = dataset.collate_fn([dataset[0], dataset[-1]])
    trained = [batch["labels"][row][batch["loss_mask"][row] == 1] for row in range(2)]
    assert bytes(trained[0].tolist()).decode() == "the film\n\x11a joy\n\x11"
    assert len(trained[1]) == 0
    text = bytes(sft(path, tokenizers["bytes"], wide, is_chat=True)[0]["tokens"]).decode()
    assert text.startswith("<extra_id_0>System\nBe kind.\n<extra_id_1>")


CALL = {"from": "Assistant", "tool_calls": [{"name": "f"}]}
BAD = [
    ({"conversations": [{"from": "User"}]}, "message 1 .* has no 'value'"),
    ({"conversations": [THREE[0] | {"label": 3}]}, "'label' of message 1 .* text"),
    ({"conversations": THREE, "mask": "Human"}, "nobody .* is called 'Human'.*User, Assistant"),
    ({"conversations": THREE, "type": "X"}, "field 'type' is 'X': use VALUE_TO_TEXT"),
    ({"conversations": THREE, "system": 3}, "field 'system' must be text, not int"),
    ({"conversations": THREE[:1]}, "no turn of the conversation is trained on"),
    ({"messages": [{"role": "system", "content": "x"}]}, "a message of the role 'system'"),
    ({"conversations": [THREE[0], CALL]}, "leaves out 'f' of message 2"),
]


@pytest.mark.parametrize(("record", "message"), BAD)
def test_a_bad_record_is_named_with_file_and_line(record, message, tokenizers, write):
    path = write({"conversations": THREE}, record)
    with pytest.raises(UserError, match=f"data.jsonl, line 2: .*{message}"):
        sft(path, tokenizers["bytes"], is_chat=True, special_tokens=MARKS)


def test_tokens_that_two_turns_share_are_refused(tmp_path, write):
    """The newline that ends a turn, and the newlines that a speaker begins with, are one token."""
    folder = write_tokenizer(tmp_path / "t", FAMILIES["chatml"])
    marks = MARKS | {"turn_start": "\n"}
    form = chat_form(CHAT | {"chat_prompt_tokens": marks}, AutoTokenizer(folder))
    with pytest.raises(UserError, match="joins characters of two turns.*chat_prompt_tokens"):
        form.conversation({"conversations": THREE})


def test_chat_tokens_must_be_texts(tokenizers):
    for value in (None, "", 3):
        marks = MARKS | {"end_of_name": value}
        with pytest.raises(ConfigError, match="chat_prompt_tokens.end_of_name="):
            chat_form({"chat": True, "chat_prompt_tokens": marks}, tokenizers["bytes"])


def test_the_example_that_nemo_aligners_script_stores():
    text = get_prompt_template_example(OmegaConf.create(MARKS))
    assert text == (
        "\0System\n{system message}\n\x11User\n{turn 1 user message}\n\x11Assistant\n"
        "\x12{turn 1 assistant label}\n{turn 1 assistant message}\n\x11User\n"
        "{turn 2 user message}\n\x11Assistant\n\x12{turn 2 assistant label}\n"
        "{turn 2 assistant message}\n\x11"
    )
