# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Datasets, builders and collate functions on real tokenizers, and every complaint about bad data
files.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from nemo.collections.common.tokenizers import AutoTokenizer, SentencePieceTokenizer
from omegaconf import OmegaConf

from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.data.nlp.builders import build_dataloader, collate_with_pad_to_max_batch
from nemo_aligner.data.nlp.datasets import (
    DPOModelDataset,
    KTOModelDataset,
    LabelledPairDataset,
    RegressionRewardModelDataset,
    ResponseDataset,
    RewardModelDataset,
    RLHFDataset,
    SFTDataset,
)
from nemo_aligner.data.nlp.prompts import check_pad_to_length, single_validation_set
from nemo_aligner.data.nlp.record_encoder import RecordEncoder
from nemo_aligner.evaluate.rewards import tokens_of
from nemo_aligner.generate.batch import tokenize
from nemo_aligner.generate.responses import Response
from nemo_aligner.generation.interface import tokenize_batch
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
from tests.chat_forms import FAMILIES, write_tokenizer
from tests.data_sets import (
    build_labelled,
    build_pairs,
    build_prompts,
    prompts_of,
    sample_of,
    sft,
    trained_of,
)


@pytest.fixture
def texts(write):
    return lambda items, name="data.jsonl": write(*({"text": item} for item in items), name=name)


# --------------------------------------------------------------------------------------- prompts


def test_prompts_are_the_raw_text(texts, tiny_tokenizer):
    prompts = ["the film", "a dull plot — naïve? 日本", " spaces  kept\n"]
    dataset = RLHFDataset([texts(prompts)], tiny_tokenizer, 40)
    assert len(dataset) == 3
    for index, prompt in enumerate(prompts):
        item = dataset[index]
        assert tiny_tokenizer.ids_to_text(item["text"].tolist()) == prompt
        assert item["length"] == len(item["text"]) == len(tiny_tokenizer.text_to_ids(prompt))
        assert (item["idx"], item["loss_multiplier"]) == (index, 1.0)
    assert (dataset[-1]["idx"], dataset[-1]["loss_multiplier"]) == (-1, 0.0)
    with_end = RLHFDataset([texts(prompts)], tiny_tokenizer, 40, data_cfg={"append_eod": True})
    assert with_end[0]["text"].tolist() == dataset[0]["text"].tolist() + [tiny_tokenizer.eos_id]


def test_files_follow_one_another_and_blank_lines_do_not_count(tmp_path, texts, tiny_tokenizer):
    second = tmp_path / "second.jsonl"
    second.write_bytes(b'\n{"text": "c\xc3\xa9"}\r\n   \n{"text": "d"}')  # no newline at the end
    files = [texts(["a", "b"]), second, texts(["e"], "third.jsonl")]
    dataset = RLHFDataset(files, tiny_tokenizer, 40)
    found = [tiny_tokenizer.ids_to_text(dataset[i]["text"].tolist()) for i in range(len(dataset))]
    assert found == ["a", "b", "cé", "d", "e"]


def test_a_column_of_the_records_is_the_weight_of_the_sample(write, tiny_tokenizer):
    def dataset(*weights):
        path = write(*({"text": "ab", "importance": weight} for weight in weights))
        return RLHFDataset([path], tiny_tokenizer, 20, {"sample_weight": "importance"})

    found = dataset(0.25, 3, 0)
    assert [found[i]["loss_multiplier"].item() for i in range(3)] == [0.25, 3, 0]
    for bad in (-1, "much", None, True, float("inf")):
        with pytest.raises(UserError, match="line 2: 'importance' is .* at least 0 in each"):
            dataset(1, bad)


def test_limit_is_sequence_length_less_answer_and_long_prompts_are_replaced(
    texts, tiny_tokenizer, warnings
):
    # The tokenizer has no merges of '#'.
    path = texts(["#" * tokens for tokens in (20, 21, 30, 5, 22)])
    train, validation, test = build_prompts({"train": [path]}, tiny_tokenizer)
    assert validation is None and test is None
    found = [[train[i][key].item() for i in range(5)] for key in ("length", "loss_multiplier")]
    assert found == [[20, 5, 5, 5, 20], [1, 0, 0, 1, 0]]  # the last is followed by the first
    assert [train[i]["idx"].item() for i in range(5)] == [0, 1, 2, 3, 4]
    (message,) = warnings
    assert "train data: 3 of 5 prompts are longer than 20 tokens" in message
    for part in ("longest has 30", "seq_length=32", "model.ppo.length_params.max_length=12"):
        assert part in message


def test_no_prompt_fits(texts, tiny_tokenizer):
    path = texts(["#" * 25, "#" * 99])
    with pytest.raises(UserError, match="all 2 prompts are longer than 20 t.*longest has 99 tok"):
        build_prompts({"train": [path]}, tiny_tokenizer)
    model = {"ppo": {"length_params": {"max_length": 32}}}
    with pytest.raises(ConfigError, match="no room for prompts: the limit is 0 .*max_length=32"):
        build_prompts({"train": [path]}, tiny_tokenizer, model=model)


def test_collate_prompts(texts, tiny_tokenizer):
    dataset = RLHFDataset([texts(["#" * 3, "#" * 5, "#" * 50])], tiny_tokenizer, 10)
    eos = tiny_tokenizer.eos_id
    batch = collate_with_pad_to_max_batch(4, eos, None, False)([dataset[1], dataset[0]])
    assert set(batch) == {"text", "length", "loss_multiplier", "idx"}
    assert batch["text"].shape == (2, 9) and batch["text"].dtype == torch.int64
    mark = tiny_tokenizer.text_to_ids("#")
    assert batch["text"].tolist() == [mark * 5 + [eos] * 4, mark * 3 + [eos] * 6]
    assert batch["length"].tolist() == [5, 3] and batch["idx"].tolist() == [1, 0]
    assert batch["loss_multiplier"].dtype == torch.float32
    batch = collate_with_pad_to_max_batch(4, eos, None)([dataset[0], dataset[2]])
    assert batch["loss_multiplier"].tolist() == [1.0, 0.0]
    assert batch["loss_mask"].sum(1).tolist() == [7.0, 0.0]
    assert batch["position_ids"].tolist() == [list(range(7))] * 2
    mask = [[[[column > row for column in range(7)] for row in range(7)]]]
    assert batch["attention_mask"].tolist() == mask


# ----------------------------------------------------------------------------------------- pairs


def test_pairs(texts, tiny_tokenizer, warnings):
    lengths = [3, 4, 9, 2, 2, 3, 1, 12, 8, 8]  # pairs 1 and 3 have a text of more than 8 tokens
    path = texts([str(i // 2) + chr(ord("A") + i) * (n - 1) for i, n in enumerate(lengths)])
    dataset = RewardModelDataset([path], tiny_tokenizer, 8)
    assert len(dataset) == 3
    assert "2 of 5 pairs are left out" in warnings[0] and "longest has 12" in warnings[0]
    for index, (chosen, rejected) in enumerate(
        [("0AA", "0BBB"), ("2E", "2FF"), ("4" + "I" * 7, "4" + "J" * 7)]
    ):
        item = dataset[index]
        for name, text in (("chosen", chosen), ("rejected", rejected)):
            ids = tiny_tokenizer.text_to_ids(text)
            assert item[f"{name}_length"] == len(ids)
            assert item[name].tolist() == ids + [tiny_tokenizer.eos_id] * (8 - len(ids))
        assert item["loss_mask"].sum() == max(len(chosen), len(rejected))
        assert item["position_ids"].tolist() == list(range(8)) and item["idx"] == index
    assert dataset[-1]["loss_mask"].sum() == 0
    assert dataset[-1]["chosen"].tolist() == dataset[0]["chosen"].tolist()


def test_bad_pairs(write, texts, tiny_tokenizer):
    odd = texts(["a", "b", "c"])
    with pytest.raises(UserError, match=r"data.jsonl has 3 lines, an odd number"):
        RewardModelDataset([odd], tiny_tokenizer, 8)
    # Two odd files do not make an even one.
    with pytest.raises(UserError, match="one.jsonl has 1 lines"):
        RewardModelDataset([texts(["a"], "one.jsonl"), odd], tiny_tokenizer, 8)
    with pytest.raises(UserError, match="all 1 pairs have a text longer than seq_length=8 .*s 9"):
        RewardModelDataset([texts(["#" * 9, "#"])], tiny_tokenizer, 8)
    labelled = write({"text": "a"}, {"text": "b", "label": [1.0]}, name="labelled.jsonl")
    with pytest.raises(UserError, match="line 2: field 'label'.* model.reward_model_type=regress"):
        build_pairs({"train": [labelled]}, tiny_tokenizer)


@pytest.mark.parametrize("limit", [4, 6, 7, 8, 9, 12])
def test_leaving_out_long_pairs_never_shifts_the_pairing(texts, tiny_tokenizer, warnings, limit):
    """Whatever combination of short and long texts stands in the file, wherever: pair k stays
    lines 2k and 2k + 1.
    """
    rng = torch.Generator().manual_seed(limit)
    # The last pair fits.
    lengths = torch.randint(1, 13, (40,), generator=rng).tolist() + [12, 12, 1, 1]
    names = [chr(ord("A") + i // 2 % 26) * n for i, n in enumerate(lengths)]
    names[1::2] = [name[0] + name[1:].lower() for name in names[1::2]]
    dataset = RewardModelDataset([texts(names)], tiny_tokenizer, limit)
    pairs = zip(names[::2], names[1::2], strict=True)
    expected = [pair for pair in pairs if max(map(len, pair)) <= limit]
    items = [dataset[i] for i in range(len(dataset))]
    sides = ("chosen", "rejected")
    assert [tuple(sample_of(item, side, tiny_tokenizer) for side in sides) for item in items] == (
        expected
    )
    left_out = 22 - len(expected)
    assert len(warnings) == (left_out > 0)
    assert all(f"{left_out} of 22 pairs" in message for message in warnings)


TALK = {"role": "user", "content": "hello"}


def told(text, *more, **fields):
    """A conversation about `TALK`."""
    return {"messages": [TALK, {"role": "assistant", "content": text}, *more], **fields}


def turn(speaker, value):
    return {"from": speaker, "value": value}


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory):
    return AutoTokenizer(write_tokenizer(tmp_path_factory.mktemp("chatml"), FAMILIES["chatml"]))


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (told("no"), None),
        (told("no", {"role": "user", "content": "x"}, told("y")["messages"][1]), None),
        ({"conversations": [turn("human", "hello"), turn("gpt", "no")]}, None),
        ({"messages": [TALK | {"content": "bye"}, told("no")["messages"][1]]}, "message 1, which"),
        (told("yes", TALK, told("no")["messages"][1]), "one is the beginning of the other"),
        (told("no", system="Be brief."), "they differ in 'system'"),
        (told("no", tools=[{"name": "f"}]), "they differ in 'tools'"),
        (told("yes"), "they are the same"),
        ({"text": "hello no"}, "one is a conversation, the other a text"),
    ],
)
@pytest.mark.parametrize("labelled", [False, True])
def test_neighbouring_conversations_are_pairs_of_one_prompt(
    write, chat_tokenizer, second, why, labelled
):
    """Fine-tuning data in the place of pairs are refused with both lines."""
    label = {"label": [-1]} if labelled else {}
    make = LabelledPairDataset if labelled else RewardModelDataset
    records = [told("yes"), told("no"), told("yes"), second]
    path = write(*([record | label for record in records]), name="chats.jsonl")
    if why is None:
        dataset = make([path], chat_tokenizer, 64)
        ids = chat_tokenizer.text_to_ids("yes<|im_end|>")
        assert dataset[1]["chosen"][: dataset[1]["chosen_length"]].tolist()[-len(ids) :] == ids
    else:
        where = "1 of 2 pairs have two prompts, .*chats.jsonl, line 3 and .*chats.jsonl, line 4"
        with pytest.raises(UserError, match=f"{where}: .*{why}"):
            make([path], chat_tokenizer, 64)


def test_texts_of_no_common_beginning_count(texts, tmp_path, write, tiny_tokenizer, warnings):
    pairs = ["Q a? yes", "Q a? no", "R b? yes", "R b? no", "S c?", "T d?"]
    assert len(RewardModelDataset([texts(pairs)], tiny_tokenizer, 32)) == 3
    assert "1 of 3 pairs share no beginning, so no prompt, the first in" in warnings.pop()
    unlike = texts(["a", "b", "c", "d", *pairs[:2]])
    with pytest.raises(UserError, match="2 of 3 pairs share no begin.* line 1. Two .*in one line"):
        RewardModelDataset([unlike], tiny_tokenizer, 32)
    same = [f"User: {text}" for text in pairs]
    RewardModelDataset([texts(same)], tiny_tokenizer, 32)
    assert "1 of 3 pairs share nothing but 'User: ', with which all begin" in warnings.pop()
    same = [f"User: {text}" for text in ("a", "b", "c", "d", *pairs[:2])]
    RewardModelDataset([texts(same)], tiny_tokenizer, 32)  # "User: " may be the prompt of all
    assert "2 of 3 pairs share nothing but 'User: '" in warnings.pop()
    # Pairs may lie across the files of a folder, and be read from an index of an earlier start.
    (tmp_path / "folder").mkdir()
    for name, part in {"a": pairs[:3], "b": pairs[3:4]}.items():
        texts(part, f"folder/{name}.jsonl")
    dataset = RewardModelDataset([tmp_path / "folder"], tiny_tokenizer, 32)
    assert len(dataset) == 2 and not warnings
    assert tiny_tokenizer.ids_to_text(dataset[1]["rejected"].tolist()).startswith("R b? no")
    in_line = [{"chosen": "yes", "rejected": "no", "question": "a?"}] * 2
    assert len(RewardModelDataset([write(*in_line, name="p.jsonl")], tiny_tokenizer, 32)) == 2
    assert "2 of 2 pairs share" in warnings[-1] and "'question' looks like the p" in warnings[-1]


@pytest.mark.parametrize("key", [r"\n\nA:", "\n\nA:"])
def test_a_key_says_where_the_prompt_of_whole_texts_ends(write, texts, tiny_tokenizer, key):
    """The last one that both share, in DPO, KTO, distillation, prompts and neighbouring lines."""
    data = {"prompt_end": key}
    whole = [f"Q: a\n\nA: b\n\nQ: c\n\nA:{end}" for end in (" d\n\nQ: e\n\nA: f", " d\n\nQ: g")]
    pair = {"chosen": whole[0], "rejected": whole[1]}
    path = write(pair, name="p.jsonl")

    def counted(tokens, mask):
        return tiny_tokenizer.ids_to_text(tokens[mask.bool()].tolist())

    item = DPOModelDataset([path], tiny_tokenizer, 64, data)[0]
    for name, text in pair.items():
        assert counted(item[name], item[f"{name}_mask"]) == text.removeprefix(whole[0][:20])
        assert item[f"{name}_length"] == len(tiny_tokenizer.text_to_ids(text))
    responses = [{"response": text, "preference": True} for text in whole]
    path = write(*responses, name="k.jsonl")
    kto = KTOModelDataset([path], tiny_tokenizer, 64, data)
    assert counted(kto[0]["samples"], kto[0]["sample_mask"]) == " f"
    assert counted(kto[1]["samples"], kto[1]["sample_mask"]) == " d\n\nQ: g"
    prompt = RLHFDataset([texts(whole)], tiny_tokenizer, 64, data)[1]["text"].tolist()
    assert tiny_tokenizer.ids_to_text(prompt) == whole[0][:20]
    assert len(RewardModelDataset([texts(whole)], tiny_tokenizer, 64, data)) == 1
    none = "have no beginning in common that ends with model.data.prompt_end="
    bad = {"chosen": "Q: a\n\nA: b", "rejected": "Q: b\n\nA: a"}
    bad_lines = {DPOModelDataset: [bad], RewardModelDataset: [{"text": x} for x in bad.values()]}
    bad_lines[KTOModelDataset] = [{"response": "Q", "preference": True}]
    for make, lines in bad_lines.items():
        with pytest.raises(UserError, match=f"bad.jsonl, line 1.*{none}"):
            make([write(*lines, name="bad.jsonl")], tiny_tokenizer, 64, data)
    for make, lines in {DPOModelDataset: [pair], KTOModelDataset: responses}.items():
        path = write(*lines, name="bad.jsonl")
        with pytest.raises(UserError, match=r"field 'prompt' is missing.* model.data.prompt_end"):
            make([path], tiny_tokenizer, 64)
    with pytest.raises(ConfigError, match="is for plain texts"):
        RLHFDataset([path], tiny_tokenizer, 64, data | {"chat": True})


# -------------------------------------------------------------------------------- labelled texts


def labelled(labels, texts="abcd"):
    return [{"text": text, "label": label} for text, label in zip(texts, labels)]


def test_labelled_texts(write, tiny_tokenizer, warnings):
    texts = ["AAA", "B" * 9, "CC", "D" * 30]
    labels = [[1, -0.5], [2, 2], [-100, 4.25], [0, 0]]
    path = write(*labelled(labels, texts))
    dataset = RegressionRewardModelDataset([path], tiny_tokenizer, 8, 2)
    assert len(dataset) == 2
    assert "2 of 4 texts are left out" in warnings[0] and "longest has 30" in warnings[0]
    for index, (text, label) in enumerate([("AAA", [1.0, -0.5]), ("CC", [-100.0, 4.25])]):
        item, ids = dataset[index], tiny_tokenizer.text_to_ids(text)
        assert item["inputs"].tolist() == ids + [tiny_tokenizer.eos_id] * (8 - len(ids))
        assert item["lengths"] == len(ids) == item["loss_mask"].sum()
        assert item["labels"].tolist() == label and item["labels"].dtype == torch.float32
        assert item["position_ids"].tolist() == list(range(8)) and item["idx"] == index
    assert dataset[-1]["loss_mask"].sum() == 0 and dataset[-1]["labels"].tolist() == [1.0, -0.5]
    with pytest.raises(UserError, match="all 4 texts are longer than seq_length=1 tok.* has 30"):
        RegressionRewardModelDataset([path], tiny_tokenizer, 1, 2)


def test_labels_of_one_attribute_and_their_configuration(write, tiny_tokenizer):
    prefix = {"train": [write(*labelled([3, [0.5], -7]))]}
    train, validation, test = build_labelled(prefix, tiny_tokenizer, append_eod=True)
    assert [train[i]["labels"].tolist() for i in range(3)] == [[3.0], [0.5], [-7.0]]
    assert (validation, test) == (None, None)
    assert train[0]["inputs"][train[0]["lengths"] - 1] == tiny_tokenizer.eos_id
    pairs = write(*labelled([[1, 2], [-7, -7]]))
    model = {"regression": {"num_attributes": 2, "loss_mask_val": -7}}
    parts = build_labelled(pairs, tiny_tokenizer, splits="50,50,0", model=model)
    assert [part and part[0]["labels"].tolist() for part in parts] == [[1, 2], [-7, -7], None]


def test_bad_labels_are_named_with_file_and_line(write, tiny_tokenizer):
    numbers = "must hold finite numbers"
    lines = {"[1]": "field 'label' has 1 number, but model.regression.num_attributes=2"}
    lines |= {"[1, 2, 3]": "field 'label' has 3 numbers", "[]": "field 'label' has 0 numbers"}
    lines |= {"1": "field 'label' has 1 number,"}
    lines |= {"[1, NaN]": rf"is \[1, NaN\]: it {numbers}.*-100"}
    lines |= {**dict.fromkeys(("[1, -Infinity]", "[1, 1e400]", "[1, null]"), numbers)}
    lines |= {**dict.fromkeys(('[1, "2"]', "[1, true]"), numbers)}
    lines |= {'"high"': f'is "high": it {numbers}'}
    cases = {f'{{"text": "a", "label": {label}}}': message for label, message in lines.items()}
    missing = r"field 'label' is missing; the line has \['score', 'text'\]"
    cases |= {'{"text": "a", "score": [1, 2]}': missing}
    for line, message in {**cases, '{"label": [1, 2]}': "field 'text' is missing"}.items():
        path = write('{"text": "a", "label": [1, 2]}', "", line, name="bad.jsonl")
        with pytest.raises(UserError, match=f"(?s)bad.jsonl, line 3: .*{message}"):
            RegressionRewardModelDataset([path], tiny_tokenizer, 20, 2)
    path = write(*labelled([[-100, -100]] * 2), name="none.jsonl")
    with pytest.raises(UserError, match="label is model.regression.loss_mask_val=-100.*none.json"):
        RegressionRewardModelDataset([path], tiny_tokenizer, 20, 2)


def test_bad_steps_and_responses_are_named(write, tiny_tokenizer, chat_tokenizer):
    good = {"prompt": "a", "text": ["b", "c"], "label": [1, [0]]}
    for bad, message in (
        ({"text": "b"}, "field 'text' must be a list of steps, as in the first record"),
        ({"label": [1]}, "field 'label' must be a list of 2 labels, one of each step"),
        ({"text": ["b", 3]}, "field 'text' must be a list of texts"),
    ):
        path = write(good, good | bad, name="bad.jsonl")
        with pytest.raises(UserError, match=f"bad.jsonl, line 2: {message}"):
            RegressionRewardModelDataset([path], tiny_tokenizer, 20, 1)
    path = write(good, {k: v for k, v in good.items() if k != "prompt"}, name="good.jsonl")
    data = {"chat_template": "tokenizer"}
    with pytest.raises(UserError, match="good.jsonl, line 2: field 'prompt' is missing"):
        RegressionRewardModelDataset([path], chat_tokenizer, 64, 1, data_cfg=data)
    plain = RegressionRewardModelDataset([path], tiny_tokenizer, 64, 1)
    items = [plain[i] for i in range(4)]
    said = [tiny_tokenizer.ids_to_text(x["inputs"][: x["lengths"]].tolist()) for x in items]
    assert said == ["a\nb", "a\nb\nc", "b", "b\nc"]
    pair = {"prompt": "a", "responses": [" b", " c"], "label": -1}
    for bad, message in (
        ({"responses": [" b"]}, "field 'responses' must be a list of two responses"),
        ({"chosen": " b"}, "a line with 'chosen' and 'rejected' says which is better"),
    ):
        path = write(pair, pair | bad, name="bad.jsonl")
        with pytest.raises(UserError, match=f"bad.jsonl, line 2: {message}"):
            LabelledPairDataset([path], tiny_tokenizer, 20)


# ------------------------------------------------------------------------------------------- SFT


def test_sft_learns_the_answer_and_the_end(write, tiny_tokenizer):
    path = write({"input": "Review: bad", "output": "sad"}, {"input": "I", "output": "a b"})
    dataset = sft(path, tiny_tokenizer)
    eos = tiny_tokenizer.eos_id
    batch = dataset.collate_fn([dataset[0], dataset[1]])
    assert set(batch) == {"tokens", "labels", "loss_mask", "position_ids"}
    assert {tuple(value.shape) for value in batch.values()} == {(2, 16)}
    for row, texts in enumerate([("Review: bad", " sad"), ("I", " a b")]):
        prompt, answer = map(tiny_tokenizer.text_to_ids, texts)
        answer = [*answer, eos]
        tokens = prompt + answer
        assert batch["tokens"][row].tolist() == tokens + [eos] * (16 - len(tokens))
        assert batch["labels"][row].tolist() == tokens[1:] + [eos] * (17 - len(tokens))
        assert batch["labels"][row][batch["loss_mask"][row].bool()].tolist() == answer
        assert batch["position_ids"][row].tolist() == list(range(16))
    everything = sft(path, tiny_tokenizer, answer_only_loss=False)
    mask = everything.collate_fn([everything[0]])["loss_mask"]
    assert mask.sum() == len(everything[0]["tokens"]) - 1
    empty_slot = dataset.collate_fn([dataset[-1], dataset[0]])
    assert empty_slot["loss_mask"][0].sum() == 0 and empty_slot["loss_mask"][1].sum() > 0
    plain = sft(path, tiny_tokenizer, {"add_eos": False, "pad_to_max_length": True})
    assert plain[0]["tokens"] == dataset[0]["tokens"][:-1]
    assert plain.collate_fn([plain[0]])["tokens"].shape == (1, 64)
    assert len(sft(path, tiny_tokenizer, num_samples=1)) == 1


def test_sft_template_with_more_fields(write, tiny_tokenizer):
    path = write({"who": "me", "q": "", "a": "yes"}, name="sft.jsonl")
    section = {"prompt_template": "User {who}: {q}\nAnswer:{a}", "label_key": "a"}
    item = sft(path, tiny_tokenizer, section | {"truncation_field": "q"})[0]
    assert tiny_tokenizer.ids_to_text(item["tokens"][:-1]) == "User me: \nAnswer:yes"
    assert tiny_tokenizer.ids_to_text(trained_of(item)[:-1]) == "yes"


def test_sft_truncation(write, tiny_tokenizer, warnings):
    texts = {"ABCDEFGH": "xy", "A": "#" * 30}
    records = [{"input": a, "output": b} for a, b in [*texts.items(), ("A", "x")]]
    path = write(*records, name="sft.jsonl")

    def text(index, **overrides):
        section = {"prompt_template": "{input}{output}", "max_seq_length": 8, **overrides}
        dataset = sft(path, tiny_tokenizer, section)
        return tiny_tokenizer.tokenizer.decode(dataset[index]["tokens"])  # shows the end token

    assert text(0) == "ABCDExy<|endoftext|>"
    assert text(0, truncation_method="left") == "DEFGHxy<|endoftext|>"
    assert text(1) == "#" * 8  # nothing is left of the prompt, and the response has lost its end
    assert text(0, truncation_field="") == "ABCDEFGH"
    assert "2 of 3 examples are longer than max_seq_length=8" in warnings[0]
    assert "0 of them keep nothing" in warnings[0]
    assert "1 of them keep nothing of a response" in warnings[-1]


ALPACA = {"instruction": "the film", "output": "a joy"}
ALPACA = [{**ALPACA, "input": given} for given in ("", "a plot", " ")]


def test_alpaca_without_columns_is_refused_with_the_remedy(write, tiny_tokenizer, warnings):
    path = write(*ALPACA, name="alpaca.jsonl")
    line = r"""columns="{input: '{instruction}{\n\n?input}'}" reads it"""
    with pytest.raises(UserError) as refused:
        sft(path, tiny_tokenizer)
    assert "2 of 3 prompts are empty, the first in" in str(refused.value)
    assert "alpaca.jsonl, line 1. There are columns that nothing reads, in" in str(refused.value)
    assert line in str(refused.value)
    assert warnings == []  # it is said once
    columns = {"input": r"{instruction}{\n\n?input}"}
    dataset = sft(path, tiny_tokenizer, {"columns": columns})
    read = [tiny_tokenizer.ids_to_text(dataset[n]["tokens"][:-1]) for n in range(3)]
    assert read == ["the film a joy", "the film\n\na plot a joy", "the film a joy"]
    assert warnings == []
    for others, hints in (
        ({"instruction": "the film"}, 1),  # none is empty, but the instruction would be lost
        ({"instruction": "plot"}, 0),
        ({"question": "the film"}, 0),  # few-shot prompts, for example
    ):
        path = write({"input": "a plot", "output": "a joy"} | others, name="said.jsonl")
        dataset = sft(path, tiny_tokenizer)
        assert len(warnings) == hints and len(dataset.unread_columns()) == 1
        warnings.clear()
    path = write({"text": "a plot", "question": "the film"}, name="said.jsonl")
    assert RLHFDataset([path], tiny_tokenizer, 9).unread_columns() == [f"{path}: question."]
    assert warnings == []


def test_behind_an_empty_prompt_bos_lets_the_first_token_be_trained(
    write, tiny_tokenizer, bos_tokenizer_dir, warnings
):
    """With the key; without bos nothing predicts that token, which a warning says."""
    path = write(*ALPACA[:1], name="alpaca.jsonl")
    with_bos = AutoTokenizer(pretrained_model_name=bos_tokenizer_dir)
    for tokenizer, missing in ((with_bos, 0), (tiny_tokenizer, 1)):
        dataset = sft(path, tokenizer, allow_empty_prompt=True)
        batch = dataset.collate_fn([dataset[0]])
        trained = batch["labels"][batch["loss_mask"].bool()].tolist()
        response = [*tokenizer.text_to_ids(" a joy"), tokenizer.eos_id]
        assert trained == response[missing:] and len(response) > 2
        said = "1 of 1 prompts are empty, as model.data.allow_empty_prompt=True allows"
        rest = "; the first token behind is not trained on (add_bos=True)." if missing else "."
        assert warnings.pop().endswith(said + rest)


@pytest.mark.parametrize("kind", ["chat", "prompts", "dpo", "kto", "responses", "chat prompts"])
def test_empty_prompts_in_every_job(kind, write, chat_tokenizer, bos_tokenizer_dir, warnings):
    """Refused with a count; with the key used, where needed behind a token."""
    tokenizer = AutoTokenizer(pretrained_model_name=bos_tokenizer_dir)
    said = {"prompt": "", "chosen": " a", "rejected": " b", "preference": True, "response": " c"}
    records = [said | {"prompt": "x"}, said]
    if "chat" in kind:
        tokenizer = chat_tokenizer
        lone = [TALK | {"content": " "}, told("a")["messages"][1]]
        records = [told("a"), {"messages": lone}]
        if kind == "chat prompts":
            records = [{"messages": each["messages"][:1]} for each in records]
    path = write(*records, name="data.jsonl")

    def make(**data):
        if kind == "chat":
            return sft(path, tokenizer, **data)
        makers = {"dpo": DPOModelDataset, "kto": KTOModelDataset, "responses": ResponseDataset}
        return makers.get(kind, RLHFDataset)([path], tokenizer, 48, data)

    with pytest.raises(UserError, match=r"1 of 2 prompts are empty, the first .* line 2\. .*=T"):
        make()
    assert len(make(allow_empty_prompt=True)) == 2
    assert "1 of 2 prompts are empty, as model.data.allow_empty_prompt=True" in warnings[0]
    if kind in ("dpo", "kto"):
        del said["prompt"]
        write(*records, name="data.jsonl")
        assert len(make(allow_empty_prompt=True)) == 2
        assert sum("1 of 2 prompts are empty, as" in said for said in warnings) == 2
    if kind in ("prompts", "responses"):
        with pytest.raises(UserError, match="needs a token to begin with: add_bos=True"):
            make(allow_empty_prompt=True, add_bos=False)


def test_sft_refusals(write, tiny_tokenizer):
    path = write({"input": "ABCDEFGH", "output": "xy"}, name="sft.jsonl")
    cases = [
        ({"prompt_template": "{output} {input}"}, "must end with the response, {output}"),
        ({"truncation_field": "context"}, "truncation_field='context' is not a field"),
        ({"truncation_method": "middle"}, "'middle'"),
        ({"max_seq_length": 5, "truncation_field": None}, "the prompt alone fills max_seq_leng"),
        ({"add_sep": True}, "add_sep=True is not supported yet"),
        ({"file_path": None}, "file_path .* is not set"),
        ({"label_key": "a", "prompt_template": "{input}{a}"}, "line 1: field 'a' is missing"),
    ]
    for overrides, message in cases:
        with pytest.raises(UserError, match=message):
            sft(path, tiny_tokenizer, overrides)
    with pytest.raises(UserError, match="line 1: field 'messages' .* is missing"):
        sft(path, tiny_tokenizer, is_chat=True)  # NeMo-Aligner's default is chat


# ------------------------------------------------------------------------------------- bad files


def test_bad_files_are_named_with_the_line(tmp_path, write, tiny_tokenizer):
    good = json.dumps({"text": "fine"})
    cases = [
        ([good, "", '{"text": "broken'], ", line 3: not valid JSON"),
        ([good, "[1, 2]"], ", line 2: a JSON object is needed, not list"),
        ([good, '{"txt": 1, "b": 1}'], r", line 2: field 'text' is .*the line has \['b', 'txt'\]"),
        (['{"text": 7}'], ", line 1: field 'text' must be text, not int"),
        (['{"text": " "}'], ", line 1(: field 'text' is empty|. Remove them)"),
        ([""], " is empty"),
    ]
    for lines, message in cases:
        path = write(*lines, name="bad.jsonl")
        for cls in (RLHFDataset, RewardModelDataset):
            with pytest.raises(UserError, match=f"bad.jsonl{message}"):
                cls([path], tiny_tokenizer, 20)
    (tmp_path / "bad.jsonl").write_bytes(good.encode() + b'\n{"text": "\xff"}\n')
    how = {"prompt_template": "{text}", "label_key": "text", "truncation_field": ""}
    with pytest.raises(UserError, match="bad.jsonl, line 2: not valid JSON .*utf-8"):
        SFTDataset([tmp_path / "bad.jsonl"], tiny_tokenizer, 20, **how)
    with pytest.raises(UserError, match="missing.jsonl does not exist"):
        RLHFDataset([tmp_path / "missing.jsonl"], tiny_tokenizer, 20)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="the folder .*empty holds no data"):
        RLHFDataset([tmp_path / "empty"], tiny_tokenizer, 20)


# -------------------------------------------------------------------------------------- builders


def test_one_file_is_split(texts, tiny_tokenizer):
    names = [f"prompt {i // 2} {i}" for i in range(10)]
    for prefix in (texts(names), [texts(names)]):
        parts = build_prompts(prefix, tiny_tokenizer, splits="8,1,1")
        found = [prompts_of(part, tiny_tokenizer) for part in parts]
        assert found == [names[:8], names[8:9], names[9:]]
    limits = {"splits": "50/50", "samples": (3, 99, -1)}
    train, validation, test = build_prompts(texts(names), tiny_tokenizer, **limits)
    assert prompts_of(train, tiny_tokenizer) == names[:3] and len(validation) == 5 and test is None
    pairs = build_pairs(texts(names), tiny_tokenizer, splits="60,40,0")
    assert [part and len(part) for part in pairs] == [3, 2, None]
    assert sample_of(pairs[1][0], "rejected", tiny_tokenizer) == names[7]
    with pytest.raises(ConfigError, match="model.data.splits_string="):
        build_prompts(texts(names), tiny_tokenizer)
    with pytest.raises(ConfigError, match="three weights are needed"):
        build_prompts(texts(names), tiny_tokenizer, splits="a,b")


def test_a_replaced_prompt_of_one_part_does_not_come_from_another(texts, tiny_tokenizer):
    path = texts(["short", "#" * 30, "also short", "other"])
    train, validation, _ = build_prompts(path, tiny_tokenizer, splits="50,50,0")
    assert prompts_of(train, tiny_tokenizer) == ["short", "short"]
    with pytest.raises(UserError, match="all 1 prompts"):
        build_prompts(path, tiny_tokenizer, splits="25,25,50")


def test_data_prefix_refusals(texts, tiny_tokenizer):
    path = texts(["a"])
    cases = [
        (None, {}, "data_prefix is not set"),
        ({"validation": [path]}, {}, "give train, and"),
        ({"train": [path], "valid": [path]}, {}, "keys train, valid"),
        ({"train": [0.5, path, path]}, {}, r"\[0.5, .*a blend is a list of weights above 0 and f"),
        ({"train": [0, path, 1, path]}, {}, "a blend is a list of weights above 0 and files"),
        ({"train": [path]}, {"impl": "lazy"}, "data_impl=lazy is not supported; use one of jsonl"),
        ({"train": [path]}, {"impl": "chunked_jsonl"}, "not supported; name the chunks as a list"),
    ]
    for prefix, options, message in cases:
        with pytest.raises(ConfigError, match=message):
            build_prompts(prefix, tiny_tokenizer, **options)


def test_several_validation_sets_and_that_rollouts_have_one_or_none(texts, tiny_tokenizer):
    path, two = texts(["a"]), texts(["c", "d"], "two.jsonl")
    for names in ((), ("validation",), ("validation", "validation_b")):
        files = {name: [two if name == "validation_b" else path] for name in ("train", *names)}
        train, built, test = build_prompts(files, tiny_tokenizer)
        assert len(train) == 1 and test is None
        if len(names) < 2:
            assert single_validation_set(built) is built and (built is None) == (not names)
        else:
            assert {key: len(part) for key, part in built.items()} == dict(zip(names, (1, 2)))
            with pytest.raises(ConfigError, match="several validation sets .validation, valid"):
                single_validation_set(built)


@pytest.mark.parametrize("section, remote", [("ppo", "remote_critic_rm"), ("rs", "remote_rm")])
def test_requests_too_narrow_for_the_longest_rollout_are_warned_of(
    texts, tiny_tokenizer, section, remote, warnings
):
    sentence = "the film is the film"  # whose characters are no bound of its tokens
    assert len(tiny_tokenizer.text_to_ids(sentence)) < 9
    model = {section: {"length_params": {"max_length": 12}}}
    # 36 tokens are the limit: the prompt of 40 is replaced and does not count
    prefix = {"train": texts(["#" * 9, "#" * 40, sentence], "train.jsonl")}
    prefix["validation"] = texts(["a", "é" * 8], "val.jsonl")
    train, validation, _ = build_prompts(prefix, tiny_tokenizer, seq_length=48, model=model)
    sets = train, validation
    longest = {each: max(int(each[i]["length"]) for i in range(len(each))) for each in sets}
    for datasets in ([train], [validation], [train, validation], [validation, train]):
        widest = max(datasets, key=longest.get)
        needed = longest[widest] + 12
        for pad_to_length in (needed, 48, None, needed - 1, 12):
            cfg = OmegaConf.create({"model": model, remote: {"pad_to_length": pad_to_length}})
            warnings.clear()
            check_pad_to_length(cfg, remote, section, datasets)
            assert len(warnings) == ((pad_to_length or 99) < needed)
            for said in warnings:
                assert f"of the {widest.name} data has {needed - 12} tokens" in said
                assert said.endswith(f"{remote}.pad_to_length={needed}.")


def test_dataloader_resumes_and_leaves_the_global_generator_alone(texts, tiny_tokenizer):
    dataset = RLHFDataset([texts([f"prompt {i}" for i in range(20)])], tiny_tokenizer, 20)
    cfg = OmegaConf.create({"model": {"seed": 1, "data": {"num_workers": 0}}})
    collate_fn = collate_with_pad_to_max_batch(2, tiny_tokenizer.eos_id, cfg, False)

    def batches(consumed, **options):
        loader = build_dataloader(cfg, dataset, consumed, 2, 8, collate_fn=collate_fn, **options)
        return [batch["idx"].tolist() for batch in loader]

    before = torch.get_rng_state()
    assert batches(8, load_gbs=False) == batches(0, load_gbs=False)[4:]
    assert [i for b in batches(0) for i in b] == [i for b in batches(0, load_gbs=False) for i in b]
    assert batches(0, use_random_sampler=False) == [list(range(8)), list(range(8, 16))]
    in_order = {"use_random_sampler": False, "pad_samples_to_global_batch_size": True}
    padded = batches(0, drop_last=False, **in_order)
    assert padded[-1] == [16, 17, 18, 19, -1, -1, -1, -1]
    assert torch.equal(torch.get_rng_state(), before)


# --- bos ----------------------------------------------------------------------------------------


def samples_of_every_kind(write, tokenizer, text, **data):
    """The tokens that each kind of data set and command makes of `text`, without padding."""
    head, tail = text[:-4], text[-4:]  # the tokenizer joins no characters across words
    pair = write({"prompt": head, "chosen": tail, "rejected": " no"}, name="p.jsonl")
    label = write({"text": text, "label": [1.0]}, name="l.jsonl")
    rated = {"prompt": head, "response": tail, "preference": "chosen"}
    rated_path = write(rated, rated | {"preference": "rejected"}, name="k.jsonl")
    examples = write({"input": head, "output": tail}, name="s.jsonl")
    dpo = DPOModelDataset([pair], tokenizer, 24, data)[0]
    kto = KTOModelDataset([rated_path], tokenizer, 24, data)[0]
    pairs = RewardModelDataset([pair], tokenizer, 24, data)[0]
    labelled = RegressionRewardModelDataset([label], tokenizer, 24, 1, data_cfg=data)[0]
    response = ResponseDataset([rated_path], tokenizer, 24, data)[0]
    of_sft = {"add_bos": data.get("add_bos"), "prompt_template": "{input}{output}"}
    yield SFTDataset([examples], tokenizer, 24, add_eos=False, **of_sft)[0]["tokens"]
    yield RLHFDataset([label], tokenizer, 24, data)[0]["text"].tolist()
    yield dpo["chosen"][: dpo["chosen_length"]].tolist()
    yield kto["samples"][: kto["sample_length"]].tolist()
    yield pairs["chosen"][: pairs["chosen_length"]].tolist()
    yield labelled["inputs"][: labelled["lengths"]].tolist()
    yield response["tokens"][: response["lengths"]].tolist()
    tokens, lengths = tokenize_batch([text], tokenizer, 24, data.get("add_bos"))
    yield tokens[0, : lengths[0]].tolist()
    model = SimpleNamespace(tokenizer=tokenizer, cfg=SimpleNamespace(encoder_seq_length=24))
    yield MegatronGPTRewardModel.tokenize(model, [text], data.get("add_bos"))[0][0].tolist()


@pytest.mark.parametrize("text", ["the film was", "<s>the film was"])
def test_bos_is_where_the_tokenizer_itself_puts_it(write, bos_tokenizer_dir, text):
    """A sample has the same tokens in every job and command; transformers' call is the oracle."""
    tokenizer = AutoTokenizer(pretrained_model_name=bos_tokenizer_dir)
    bos = tokenizer.bos_id
    own = tokenizer.tokenizer(text.removeprefix("<s>"))["input_ids"]
    assert own[0] == bos and bos not in own[1:]
    made = list(samples_of_every_kind(write, tokenizer, text))
    assert made == [own] * len(made)
    written = own if text.startswith("<s>") else own[1:]
    made = list(samples_of_every_kind(write, tokenizer, text, add_bos=False))
    assert made == [written] * len(made)
    cut = Response(text[:-4], text[-4:], is_end=False)
    assert tokens_of(cut, tokenizer) == own
    parts = {"tokenizer": tokenizer, "encoder": RecordEncoder(tokenizer)}
    parts["generator"] = SimpleNamespace(max_sequence_length=24)
    policy = SimpleNamespace(params=SimpleNamespace(max_length=4), **parts)
    assert tokenize(policy, [{"text": text}], "prompts") == [own]


def test_bos_is_put_where_it_is_asked_for(
    write, tiny_tokenizer, tiny_sentencepiece_model, bos_tokenizer_dir
):
    """SentencePiece leaves bos to its caller; NeMo's wrapper of GPT-2 knows one and puts none."""
    tokenizer = SentencePieceTokenizer(tiny_sentencepiece_model)
    plain = tokenizer.text_to_ids("the film was")
    assert list(samples_of_every_kind(write, tokenizer, "the film was"))[1] == plain
    made = list(samples_of_every_kind(write, tokenizer, "the film was", add_bos=True))
    assert made[1] == [tokenizer.bos_id, *plain] and all(ids[0] == made[1][0] for ids in made)
    for make in (
        lambda: RLHFDataset(["x"], tiny_tokenizer, 24, {"add_bos": True}),
        lambda: SFTDataset(["x"], tiny_tokenizer, 24, add_bos=True),
    ):
        with pytest.raises(UserError, match="add_bos=True, but the tokenizer has no bos token"):
            make()


def test_bos_survives_the_truncation_of_sft(write, bos_tokenizer_dir):
    tokenizer = AutoTokenizer(pretrained_model_name=bos_tokenizer_dir)
    path = write({"input": "a" * 50, "output": " b"}, name="s.jsonl")
    item = SFTDataset([path], tokenizer, 8, truncation_method="left")[0]
    assert len(item["tokens"]) == 8 and item["tokens"][0] == tokenizer.bos_id
    assert item["tokens"][-1] == tokenizer.eos_id and item["trained"].count(False) > 2
