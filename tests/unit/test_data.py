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
from nemo.utils import logging
from omegaconf import OmegaConf

from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.data.nlp.builders import (
    build_dataloader,
    build_sft_dataset,
    build_train_valid_test_regression_rm_datasets,
    build_train_valid_test_rlhf_datasets,
    build_train_valid_test_rm_datasets,
    collate_with_pad_to_max_batch,
)
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
from nemo_aligner.generation.text import tokenize_batch
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
from tests.chat_forms import FAMILIES, write_tokenizer


def write(path, records):
    path.write_text(
        "\n".join(record if isinstance(record, str) else json.dumps(record) for record in records)
        + "\n"
    )
    return str(path)


@pytest.fixture
def texts(tmp_path):
    def make(items, name="data.jsonl"):
        return write(tmp_path / name, [{"text": item} for item in items])

    return make


@pytest.fixture
def warnings(monkeypatch):
    """Messages of the warnings so far."""
    messages = []
    monkeypatch.setattr(
        logging, "warning", lambda message, *_args, **_kwargs: messages.append(message)
    )
    return messages


def model_cfg(**overrides):
    cfg = {
        "seed": 1,
        "data": {"seq_length": 32, "num_workers": 0},
        "ppo": {"length_params": {"max_length": 12}},
    }
    return OmegaConf.merge(cfg, overrides)


def build(
    function,
    data_prefix,
    tokenizer,
    cfg=None,
    splits=None,
    samples=(-1, -1, -1),
    seq_length=32,
    impl="jsonl",
):
    cfg = model_cfg() if cfg is None else cfg
    prefix = OmegaConf.create(data_prefix) if isinstance(data_prefix, dict | list) else data_prefix
    return function(
        cfg=cfg,
        data_prefix=prefix,
        data_impl=impl,
        splits_string=splits,
        train_valid_test_num_samples=list(samples),
        seq_length=seq_length,
        seed=1,
        tokenizer=tokenizer,
    )


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
    dataset = RLHFDataset(
        [texts(["a", "b"]), second, texts(["e"], "third.jsonl")], tiny_tokenizer, 40
    )
    found = [tiny_tokenizer.ids_to_text(dataset[i]["text"].tolist()) for i in range(len(dataset))]
    assert found == ["a", "b", "cé", "d", "e"]


def test_a_column_of_the_records_is_the_weight_of_the_sample(tmp_path, tiny_tokenizer):
    def dataset(*weights):
        path = tmp_path / "weighted.jsonl"
        lines = [{"text": "ab", "importance": weight} for weight in weights]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return RLHFDataset([str(path)], tiny_tokenizer, 20, {"sample_weight": "importance"})

    found = dataset(0.25, 3, 0)
    assert [found[i]["loss_multiplier"].item() for i in range(3)] == [0.25, 3, 0]
    for bad in (-1, "much", None, True, float("inf")):
        with pytest.raises(UserError, match="line 2: 'importance' is .* at least 0 in each"):
            dataset(1, bad)


def test_limit_is_sequence_length_less_answer_and_long_prompts_are_replaced(
    texts, tiny_tokenizer, warnings
):
    def of_length(tokens):  # the tokenizer has no merges of '#'
        return "#" * tokens

    path = texts([of_length(20), of_length(21), of_length(30), of_length(5), of_length(22)])
    train, validation, test = build(
        build_train_valid_test_rlhf_datasets, {"train": [path]}, tiny_tokenizer
    )
    assert validation is None and test is None
    assert [train[i]["length"].item() for i in range(5)] == [
        20,
        5,
        5,
        5,
        20,
    ]  # the last is followed by the first
    assert [train[i]["loss_multiplier"].item() for i in range(5)] == [1, 0, 0, 1, 0]
    assert [train[i]["idx"].item() for i in range(5)] == [0, 1, 2, 3, 4]
    (message,) = warnings
    assert (
        "train data: 3 of 5 prompts are longer than 20 tokens" in message
        and "longest has 30" in message
    )
    assert "seq_length=32" in message and "model.ppo.length_params.max_length=12" in message


def test_no_prompt_fits(texts, tiny_tokenizer):
    path = texts(["#" * 25, "#" * 99])
    with pytest.raises(
        UserError, match=r"(?s)all 2 prompts are longer than 20 tokens.*longest has 99 tokens"
    ):
        build(build_train_valid_test_rlhf_datasets, {"train": [path]}, tiny_tokenizer)
    cfg = model_cfg(ppo={"length_params": {"max_length": 32}})
    with pytest.raises(ConfigError, match="no room for prompts: the limit is 0 .*max_length=32"):
        build(build_train_valid_test_rlhf_datasets, {"train": [path]}, tiny_tokenizer, cfg)


def test_collate_prompts(texts, tiny_tokenizer):
    dataset = RLHFDataset([texts(["#" * 3, "#" * 5, "#" * 50])], tiny_tokenizer, 10)
    cfg = OmegaConf.create({"model": model_cfg()})
    eos = tiny_tokenizer.eos_id
    batch = collate_with_pad_to_max_batch(4, eos, cfg, generate_masks_and_position_ids=False)(
        [dataset[1], dataset[0]]
    )
    assert set(batch) == {"text", "length", "loss_multiplier", "idx"}
    assert batch["text"].shape == (2, 9) and batch["text"].dtype == torch.int64
    mark = tiny_tokenizer.text_to_ids("#")
    assert batch["text"].tolist() == [mark * 5 + [eos] * 4, mark * 3 + [eos] * 6]
    assert batch["length"].tolist() == [5, 3] and batch["idx"].tolist() == [1, 0]
    assert batch["loss_multiplier"].dtype == torch.float32
    batch = collate_with_pad_to_max_batch(4, eos, cfg)([dataset[0], dataset[2]])
    assert batch["loss_multiplier"].tolist() == [1.0, 0.0] and batch["loss_mask"].sum(
        1
    ).tolist() == [7.0, 0.0]
    assert batch["position_ids"].tolist() == [list(range(7))] * 2
    mask = batch["attention_mask"]
    assert mask.shape == (1, 1, 7, 7) and all(
        mask[0, 0, i, j] == (j > i) for i in range(7) for j in range(7)
    )


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


def test_bad_pairs(tmp_path, texts, tiny_tokenizer):
    odd = texts(["a", "b", "c"])
    with pytest.raises(UserError, match=r"data.jsonl has 3 lines, an odd number"):
        RewardModelDataset([odd], tiny_tokenizer, 8)
    with pytest.raises(
        UserError, match="one.jsonl has 1 lines"
    ):  # two odd files do not make an even one
        RewardModelDataset([texts(["a"], "one.jsonl"), odd], tiny_tokenizer, 8)
    with pytest.raises(
        UserError,
        match="all 1 pairs have a text longer than seq_length=8 tokens; the longest has 9",
    ):
        RewardModelDataset([texts(["#" * 9, "#"])], tiny_tokenizer, 8)
    labelled = write(tmp_path / "labelled.jsonl", [{"text": "a"}, {"text": "b", "label": [1.0]}])
    with pytest.raises(
        UserError,
        match=r"labelled.jsonl, line 2: field 'label'.* model.reward_model_type=regression",
    ):
        build(build_train_valid_test_rm_datasets, {"train": [labelled]}, tiny_tokenizer)


@pytest.mark.parametrize("limit", [4, 6, 7, 8, 9, 12])
def test_leaving_out_long_pairs_never_shifts_the_pairing(texts, tiny_tokenizer, warnings, limit):
    """Whatever combination of short and long texts stands in the file, wherever: pair k stays
    lines 2k and 2k + 1.
    """
    rng = torch.Generator().manual_seed(limit)
    lengths = torch.randint(1, 13, (40,), generator=rng).tolist() + [
        12,
        12,
        1,
        1,
    ]  # the last pair fits
    names = [chr(ord("A") + i // 2 % 26) * n for i, n in enumerate(lengths)]
    names[1::2] = [name[0] + name[1:].lower() for name in names[1::2]]
    dataset = RewardModelDataset([texts(names)], tiny_tokenizer, limit)
    expected = [
        (good, bad)
        for good, bad in zip(names[::2], names[1::2], strict=True)
        if max(len(good), len(bad)) <= limit
    ]
    found = []
    for item in (dataset[i] for i in range(len(dataset))):
        pair = (
            item["chosen"][: item["chosen_length"]],
            item["rejected"][: item["rejected_length"]],
        )
        found.append(tuple(tiny_tokenizer.ids_to_text(tokens.tolist()) for tokens in pair))
    assert found == expected
    left_out = 22 - len(expected)
    assert [f"{left_out} of 22 pairs" in message for message in warnings] == [True] * (
        left_out > 0
    )


TALK = {"role": "user", "content": "hello"}


def told(text, *more, **fields):
    """A conversation about `TALK`."""
    return {"messages": [TALK, {"role": "assistant", "content": text}, *more], **fields}


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory):
    return AutoTokenizer(write_tokenizer(tmp_path_factory.mktemp("chatml"), FAMILIES["chatml"]))


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (told("no"), None),
        (told("no", {"role": "user", "content": "x"}, told("y")["messages"][1]), None),
        (
            {
                "conversations": [
                    {"from": "human", "value": "hello"},
                    {"from": "gpt", "value": "no"},
                ]
            },
            None,
        ),
        (
            {"messages": [TALK | {"content": "bye"}, *told("no")["messages"][1:]]},
            "message 1, which",
        ),
        (told("yes", TALK, told("no")["messages"][1]), "one is the beginning of the other"),
        (told("no", system="Be brief."), "they differ in 'system'"),
        (told("no", tools=[{"name": "f"}]), "they differ in 'tools'"),
        (told("yes"), "they are the same"),
        ({"text": "hello no"}, "one is a conversation, the other a text"),
    ],
)
@pytest.mark.parametrize("labelled", [False, True])
def test_neighbouring_conversations_are_pairs_of_one_prompt(
    tmp_path, chat_tokenizer, second, why, labelled
):
    """Fine-tuning data in the place of pairs are refused with both lines."""
    label = {"label": [-1]} if labelled else {}
    make = LabelledPairDataset if labelled else RewardModelDataset
    records = [told("yes"), told("no"), told("yes"), second]
    path = write(tmp_path / "chats.jsonl", [record | label for record in records])
    if why is None:
        dataset = make([path], chat_tokenizer, 64)
        ids = chat_tokenizer.text_to_ids("yes<|im_end|>")
        assert dataset[1]["chosen"][: dataset[1]["chosen_length"]].tolist()[-len(ids) :] == ids
    else:
        where = "1 of 2 pairs have two prompts, .*chats.jsonl, line 3 and .*chats.jsonl, line 4"
        with pytest.raises(UserError, match=f"{where}: .*{why}"):
            make([path], chat_tokenizer, 64)


def test_texts_that_share_no_beginning_are_counted(texts, tmp_path, tiny_tokenizer, warnings):
    pairs = ["Q a? yes", "Q a? no", "R b? yes", "R b? no", "S c?", "T d?"]
    assert len(RewardModelDataset([texts(pairs)], tiny_tokenizer, 32)) == 3
    assert "1 of 3 pairs share no beginning, so no prompt, the first in" in warnings.pop()
    with pytest.raises(
        UserError, match="2 of 3 pairs share no beginning.* line 1. Two .* in one line"
    ):
        RewardModelDataset([texts(["a", "b", "c", "d", *pairs[:2]])], tiny_tokenizer, 32)
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
    assert len(RewardModelDataset([write(tmp_path / "p.jsonl", in_line)], tiny_tokenizer, 32)) == 2
    assert "2 of 2 pairs share" in warnings[-1] and "'question' looks like the p" in warnings[-1]


@pytest.mark.parametrize("key", [r"\n\nA:", "\n\nA:"])
def test_a_key_says_where_the_prompt_of_whole_texts_ends(tmp_path, texts, tiny_tokenizer, key):
    """The last one that both share, in DPO, KTO, distillation, prompts and neighbouring lines."""
    data = {"prompt_end": key}
    whole = [f"Q: a\n\nA: b\n\nQ: c\n\nA:{end}" for end in (" d\n\nQ: e\n\nA: f", " d\n\nQ: g")]
    pair = {"chosen": whole[0], "rejected": whole[1]}
    path = write(tmp_path / "p.jsonl", [pair])

    def counted(tokens, mask):
        return tiny_tokenizer.ids_to_text(tokens[mask.bool()].tolist())

    item = DPOModelDataset([path], tiny_tokenizer, 64, data)[0]
    for name, text in pair.items():
        assert counted(item[name], item[f"{name}_mask"]) == text.removeprefix(whole[0][:20])
        assert item[f"{name}_length"] == len(tiny_tokenizer.text_to_ids(text))
    responses = [{"response": text, "preference": True} for text in whole]
    path = write(tmp_path / "k.jsonl", responses)
    kto = KTOModelDataset([path], tiny_tokenizer, 64, data)
    assert counted(kto[0]["samples"], kto[0]["sample_mask"]) == " f"
    assert counted(kto[1]["samples"], kto[1]["sample_mask"]) == " d\n\nQ: g"
    prompt = RLHFDataset([texts(whole)], tiny_tokenizer, 64, data)[1]["text"].tolist()
    assert tiny_tokenizer.ids_to_text(prompt) == whole[0][:20]
    assert len(RewardModelDataset([texts(whole)], tiny_tokenizer, 64, data)) == 1
    none = "have no beginning in common that ends with model.data.prompt_end="
    bad = {"chosen": "Q: a\n\nA: b", "rejected": "Q: b\n\nA: a"}
    for make, lines in {
        DPOModelDataset: [bad],
        RewardModelDataset: [{"text": text} for text in bad.values()],
        KTOModelDataset: [{"response": "Q", "preference": True}],
    }.items():
        with pytest.raises(UserError, match=f"bad.jsonl, line 1.*{none}"):
            make([write(tmp_path / "bad.jsonl", lines)], tiny_tokenizer, 64, data)
    for make, lines in {DPOModelDataset: [pair], KTOModelDataset: responses}.items():
        path = write(tmp_path / "bad.jsonl", lines)
        with pytest.raises(UserError, match=r"field 'prompt' is missing.* model.data.prompt_end"):
            make([path], tiny_tokenizer, 64)
    with pytest.raises(ConfigError, match="says where the prompt of a plain text ends"):
        RLHFDataset([path], tiny_tokenizer, 64, data | {"chat": True})


# -------------------------------------------------------------------------------- labelled texts


def labels_file(path, labels, texts=None):
    texts = texts or [f"text {i}" for i in range(len(labels))]
    return write(
        path, [{"text": text, "label": label} for text, label in zip(texts, labels, strict=True)]
    )


def test_labelled_texts(tmp_path, tiny_tokenizer, warnings):
    texts = ["AAA", "B" * 9, "CC", "D" * 30]
    labels = [[1, -0.5], [2, 2], [-100, 4.25], [0, 0]]
    path = labels_file(tmp_path / "labels.jsonl", labels, texts)
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
    with pytest.raises(
        UserError, match="train data: all 4 texts are longer than seq_length=1 tokens; .* has 30"
    ):
        RegressionRewardModelDataset([path], tiny_tokenizer, 1, 2)


def test_labels_of_one_attribute_and_their_configuration(tmp_path, tiny_tokenizer):
    path = labels_file(tmp_path / "labels.jsonl", [3, [0.5], -7])
    train, validation, test = build(
        build_train_valid_test_regression_rm_datasets,
        {"train": [path]},
        tiny_tokenizer,
        model_cfg(data={"append_eod": True}),
    )
    assert [train[i]["labels"].tolist() for i in range(3)] == [[3.0], [0.5], [-7.0]]
    assert (validation, test) == (None, None)
    assert train[0]["inputs"][train[0]["lengths"] - 1] == tiny_tokenizer.eos_id
    pairs = labels_file(tmp_path / "two.jsonl", [[1, 2], [-7, -7]])
    cfg = model_cfg(regression={"num_attributes": 2, "loss_mask_val": -7})
    parts = build(
        build_train_valid_test_regression_rm_datasets, pairs, tiny_tokenizer, cfg, splits="50,50,0"
    )
    assert [part and part[0]["labels"].tolist() for part in parts] == [
        [1.0, 2.0],
        [-7.0, -7.0],
        None,
    ]


def test_bad_labels_are_named_with_file_and_line(tmp_path, tiny_tokenizer):
    good = '{"text": "a", "label": [1, 2]}'
    cases = [
        (
            '{"text": "a", "label": [1]}',
            "field 'label' has 1 number, but model.regression.num_attributes=2",
        ),
        ('{"text": "a", "label": [1, 2, 3]}', "field 'label' has 3 numbers"),
        ('{"text": "a", "label": []}', "field 'label' has 0 numbers"),
        ('{"text": "a", "label": 1}', "field 'label' has 1 number,"),
        ('{"text": "a", "label": [1, NaN]}', r"is \[1, NaN\]: it must hold finite numbers.*-100"),
        ('{"text": "a", "label": [1, -Infinity]}', "must hold finite numbers"),
        ('{"text": "a", "label": [1, 1e400]}', "must hold finite numbers"),
        ('{"text": "a", "label": [1, null]}', "must hold finite numbers"),
        ('{"text": "a", "label": [1, "2"]}', "must hold finite numbers"),
        ('{"text": "a", "label": [1, true]}', "must hold finite numbers"),
        ('{"text": "a", "label": "high"}', 'is "high": it must hold finite numbers'),
        (
            '{"text": "a", "score": [1, 2]}',
            r"field 'label' is missing; the line has \['score', 'text'\]",
        ),
        ('{"label": [1, 2]}', "field 'text' is missing"),
    ]
    for line, message in cases:
        path = write(tmp_path / "bad.jsonl", [good, "", line])
        with pytest.raises(UserError, match=f"(?s)bad.jsonl, line 3: .*{message}"):
            RegressionRewardModelDataset([path], tiny_tokenizer, 20, 2)
    path = labels_file(tmp_path / "none.jsonl", [[-100, -100]] * 2)
    with pytest.raises(
        UserError, match=r"every label is model.regression.loss_mask_val=-100.*none.jsonl"
    ):
        RegressionRewardModelDataset([path], tiny_tokenizer, 20, 2)


def test_bad_steps_and_responses_are_named(tmp_path, tiny_tokenizer, chat_tokenizer):
    good = {"prompt": "a", "text": ["b", "c"], "label": [1, [0]]}
    for bad, message in (
        ({"text": "b"}, "field 'text' must be a list of steps, as in the first record"),
        ({"label": [1]}, "field 'label' must be a list of 2 labels, one of each step"),
        ({"text": ["b", 3]}, "field 'text' must be a list of texts"),
    ):
        path = write(tmp_path / "bad.jsonl", [good, good | bad])
        with pytest.raises(UserError, match=f"bad.jsonl, line 2: {message}"):
            RegressionRewardModelDataset([path], tiny_tokenizer, 20, 1)
    path = write(tmp_path / "good.jsonl", [good, {k: v for k, v in good.items() if k != "prompt"}])
    data = {"chat_template": "tokenizer"}
    with pytest.raises(UserError, match="good.jsonl, line 2: field 'prompt' is missing"):
        RegressionRewardModelDataset([path], chat_tokenizer, 64, 1, data_cfg=data)
    plain = RegressionRewardModelDataset([path], tiny_tokenizer, 64, 1)
    said = [
        tiny_tokenizer.ids_to_text(item["inputs"][: item["lengths"]].tolist())
        for item in map(plain.__getitem__, range(4))
    ]
    assert said == ["a\nb", "a\nb\nc", "b", "b\nc"]
    pair = {"prompt": "a", "responses": [" b", " c"], "label": -1}
    for bad, message in (
        ({"responses": [" b"]}, "field 'responses' must be a list of two responses"),
        ({"chosen": " b"}, "a line with 'chosen' and 'rejected' says which is better"),
    ):
        path = write(tmp_path / "bad.jsonl", [pair, pair | bad])
        with pytest.raises(UserError, match=f"bad.jsonl, line 2: {message}"):
            LabelledPairDataset([path], tiny_tokenizer, 20)


# ------------------------------------------------------------------------------------------- SFT


def sft_cfg(path, **overrides):
    return OmegaConf.merge({"file_path": path, "max_seq_length": 64}, overrides)


def test_sft_learns_the_answer_and_the_end(tmp_path, tiny_tokenizer):
    path = write(
        tmp_path / "sft.jsonl",
        [{"input": "Review: bad", "output": "sad"}, {"input": "I", "output": "a b"}],
    )
    dataset = build_sft_dataset(sft_cfg(path), tiny_tokenizer, is_chat=False)
    eos = tiny_tokenizer.eos_id
    batch = dataset.collate_fn([dataset[0], dataset[1]])
    assert {key: tuple(value.shape) for key, value in batch.items()} == dict.fromkeys(
        ("tokens", "labels", "loss_mask", "position_ids"), (2, 16)
    )
    for row, (prompt, answer) in enumerate([("Review: bad", " sad"), ("I", " a b")]):
        prompt, answer = (
            tiny_tokenizer.text_to_ids(prompt),
            tiny_tokenizer.text_to_ids(answer) + [eos],
        )
        tokens = prompt + answer
        assert batch["tokens"][row].tolist() == tokens + [eos] * (16 - len(tokens))
        assert batch["labels"][row].tolist() == tokens[1:] + [eos] * (17 - len(tokens))
        assert batch["labels"][row][batch["loss_mask"][row].bool()].tolist() == answer
        assert batch["position_ids"][row].tolist() == list(range(16))
    everything = build_sft_dataset(
        sft_cfg(path), tiny_tokenizer, is_chat=False, answer_only_loss=False
    )
    assert (
        everything.collate_fn([everything[0]])["loss_mask"].sum()
        == len(everything[0]["tokens"]) - 1
    )
    empty_slot = dataset.collate_fn([dataset[-1], dataset[0]])
    assert empty_slot["loss_mask"][0].sum() == 0 and empty_slot["loss_mask"][1].sum() > 0
    plain = build_sft_dataset(
        sft_cfg(path, add_eos=False, pad_to_max_length=True), tiny_tokenizer, is_chat=False
    )
    assert plain[0]["tokens"] == dataset[0]["tokens"][:-1]
    assert plain.collate_fn([plain[0]])["tokens"].shape == (1, 64)
    assert len(build_sft_dataset(sft_cfg(path), tiny_tokenizer, num_samples=1, is_chat=False)) == 1


def test_sft_template_with_more_fields(tmp_path, tiny_tokenizer):
    path = write(tmp_path / "sft.jsonl", [{"who": "me", "q": "", "a": "yes"}])
    cfg = sft_cfg(
        path, prompt_template="User {who}: {q}\nAnswer:{a}", label_key="a", truncation_field="q"
    )
    item = build_sft_dataset(cfg, tiny_tokenizer, is_chat=False)[0]
    assert tiny_tokenizer.ids_to_text(item["tokens"][:-1]) == "User me: \nAnswer:yes"
    assert tiny_tokenizer.ids_to_text(item["tokens"][item["trained"].count(False) : -1]) == "yes"


def test_sft_prompt_is_tokenized_as_ppo_does(tmp_path, tiny_tokenizer, tiny_sentencepiece_model):
    from nemo.collections.common.tokenizers import SentencePieceTokenizer

    for tokenizer in (tiny_tokenizer, SentencePieceTokenizer(tiny_sentencepiece_model)):
        path = write(tmp_path / "sft.jsonl", [{"input": "the film was", "output": "a joy"}])
        item = build_sft_dataset(sft_cfg(path), tokenizer, is_chat=False)[0]
        assert item["tokens"][: item["trained"].count(False)] == tokenizer.text_to_ids(
            "the film was"
        )
        assert tokenizer.ids_to_text(item["tokens"][:-1]) == "the film was a joy"


def test_sft_truncation(tmp_path, tiny_tokenizer, warnings):
    records = [
        {"input": "ABCDEFGH", "output": "xy"},
        {"input": "A", "output": "#" * 30},
        {"input": "A", "output": "x"},
    ]
    path = write(tmp_path / "sft.jsonl", records)

    def text(index, **overrides):
        cfg = sft_cfg(path, prompt_template="{input}{output}", max_seq_length=8, **overrides)
        dataset = build_sft_dataset(cfg, tiny_tokenizer, is_chat=False)
        return tiny_tokenizer.tokenizer.decode(dataset[index]["tokens"])  # shows the end token

    assert text(0) == "ABCDExy<|endoftext|>"
    assert text(0, truncation_method="left") == "DEFGHxy<|endoftext|>"
    assert text(1) == "#" * 8  # nothing is left of the prompt, and the response has lost its end
    assert text(0, truncation_field="") == "ABCDEFGH"
    assert (
        "2 of 3 examples are longer than max_seq_length=8" in warnings[0]
        and "0 of them keep nothing" in warnings[0]
    )
    assert "1 of them keep nothing of a response" in warnings[-1]


ALPACA = [
    {"instruction": "the film", "input": given, "output": "a joy"} for given in ("", "a plot", " ")
]


def test_alpaca_without_columns_is_refused_with_the_line_that_reads_it(
    tmp_path, tiny_tokenizer, warnings
):
    path = write(tmp_path / "alpaca.jsonl", ALPACA)
    line = r"""columns="{input: '{instruction}{\n\n?input}'}" reads it"""
    with pytest.raises(UserError) as refused:
        build_sft_dataset(sft_cfg(path), tiny_tokenizer, is_chat=False)
    assert "2 of 3 prompts are empty, the first in" in str(refused.value)
    assert "alpaca.jsonl, line 1. There are columns that nothing reads, in" in str(refused.value)
    assert line in str(refused.value)
    assert warnings == []  # it is said once
    columns = {"input": r"{instruction}{\n\n?input}"}
    dataset = build_sft_dataset(sft_cfg(path, columns=columns), tiny_tokenizer, is_chat=False)
    read = [tiny_tokenizer.ids_to_text(dataset[n]["tokens"][:-1]) for n in range(3)]
    assert read == ["the film a joy", "the film\n\na plot a joy", "the film a joy"]
    assert warnings == []
    for others, hints in (
        ({"instruction": "the film"}, 1),  # none is empty, but the instruction would be lost
        ({"instruction": "plot"}, 0),
        ({"question": "the film"}, 0),  # few-shot prompts, for example
    ):
        path = write(tmp_path / "said.jsonl", [{"input": "a plot", "output": "a joy"} | others])
        dataset = build_sft_dataset(sft_cfg(path), tiny_tokenizer, is_chat=False)
        assert len(warnings) == hints and len(dataset.unread_columns()) == 1
        warnings.clear()
    path = write(tmp_path / "said.jsonl", [{"text": "a plot", "question": "the film"}])
    assert RLHFDataset([path], tiny_tokenizer, 9).unread_columns() == [f"{path}: question."]
    assert warnings == []


def test_behind_an_empty_prompt_bos_lets_the_first_token_be_trained(
    tmp_path, tiny_tokenizer, bos_tokenizer_dir, warnings
):
    """With the key; without bos nothing predicts that token, which a warning says."""
    path = write(tmp_path / "alpaca.jsonl", ALPACA[:1])
    with_bos = AutoTokenizer(pretrained_model_name=bos_tokenizer_dir)
    for tokenizer, missing in ((with_bos, 0), (tiny_tokenizer, 1)):
        dataset = build_sft_dataset(
            sft_cfg(path), tokenizer, is_chat=False, allow_empty_prompt=True
        )
        batch = dataset.collate_fn([dataset[0]])
        trained = batch["labels"][batch["loss_mask"].bool()].tolist()
        response = [*tokenizer.text_to_ids(" a joy"), tokenizer.eos_id]
        assert trained == response[missing:] and len(response) > 2
        said = "1 of 1 prompts are empty, as model.data.allow_empty_prompt=True allows"
        rest = "; the first token behind is not trained on (add_bos=True)." if missing else "."
        assert warnings.pop().endswith(said + rest)


@pytest.mark.parametrize("kind", ["chat", "prompts", "dpo", "kto", "responses", "chat prompts"])
def test_empty_prompts_in_every_job(kind, tmp_path, chat_tokenizer, bos_tokenizer_dir, warnings):
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
    path = write(tmp_path / "data.jsonl", records)

    def make(**data):
        if kind == "chat":
            return build_sft_dataset(sft_cfg(path), tokenizer, is_chat=False, **data)
        makers = {"dpo": DPOModelDataset, "kto": KTOModelDataset, "responses": ResponseDataset}
        return makers.get(kind, RLHFDataset)([path], tokenizer, 48, data)

    with pytest.raises(
        UserError, match=r"1 of 2 prompts are empty, the first in .* line 2\. .*=T"
    ):
        make()
    assert len(make(allow_empty_prompt=True)) == 2
    assert "1 of 2 prompts are empty, as model.data.allow_empty_prompt=True" in warnings[0]
    if kind in ("dpo", "kto"):
        del said["prompt"]
        write(tmp_path / "data.jsonl", records)
        assert len(make(allow_empty_prompt=True)) == 2
        assert sum("1 of 2 prompts are empty, as" in said for said in warnings) == 2
    if kind in ("prompts", "responses"):
        with pytest.raises(UserError, match="needs a token to begin with: add_bos=True"):
            make(allow_empty_prompt=True, add_bos=False)


def test_sft_refusals(tmp_path, tiny_tokenizer):
    path = write(tmp_path / "sft.jsonl", [{"input": "ABCDEFGH", "output": "xy"}])
    cases = [
        ({"prompt_template": "{output} {input}"}, "must end with the response, {output}"),
        ({"truncation_field": "context"}, "truncation_field='context' is not a field"),
        ({"truncation_method": "middle"}, "'middle'"),
        (
            {"max_seq_length": 5, "truncation_field": None},
            "in all 1 examples the prompt alone fills max_seq_length=5",
        ),
        ({"add_sep": True}, "add_sep=True is not supported yet"),
        ({"file_path": None}, "file_path .* is not set"),
        (
            {"label_key": "answer", "prompt_template": "{input}{answer}"},
            "line 1: field 'answer' is missing",
        ),
    ]
    for overrides, message in cases:
        with pytest.raises(UserError, match=message):
            build_sft_dataset(sft_cfg(path, **overrides), tiny_tokenizer, is_chat=False)
    with pytest.raises(UserError, match="line 1: field 'messages' .* is missing"):
        build_sft_dataset(sft_cfg(path), tiny_tokenizer)  # NeMo-Aligner's default is chat


# ------------------------------------------------------------------------------------- bad files


def test_bad_files_are_named_with_the_line(tmp_path, tiny_tokenizer):
    good = json.dumps({"text": "fine"})
    cases = [
        ([good, "", '{"text": "broken'], "bad.jsonl, line 3: not valid JSON"),
        ([good, "[1, 2]"], "bad.jsonl, line 2: a JSON object is needed, not list"),
        (
            [good, '{"txt": "a", "b": 1}'],
            r"bad.jsonl, line 2: field 'text' is missing; the line has \['b', 'txt'\]",
        ),
        (['{"text": 7}'], "bad.jsonl, line 1: field 'text' must be text, not int"),
        (
            ['{"text": " "}'],
            "bad.jsonl, line 1(: field 'text' is empty|. Remove them)",
        ),
        ([""], "bad.jsonl is empty"),
    ]
    for lines, message in cases:
        path = write(tmp_path / "bad.jsonl", lines)
        for cls in (RLHFDataset, RewardModelDataset):
            with pytest.raises(UserError, match=message):
                cls([path], tiny_tokenizer, 20)
    (tmp_path / "bad.jsonl").write_bytes(good.encode() + b'\n{"text": "\xff"}\n')
    with pytest.raises(UserError, match="bad.jsonl, line 2: not valid JSON .*utf-8"):
        SFTDataset(
            [tmp_path / "bad.jsonl"], tiny_tokenizer, 20, "{text}", "text", truncation_field=""
        )
    with pytest.raises(UserError, match="missing.jsonl does not exist"):
        RLHFDataset([tmp_path / "missing.jsonl"], tiny_tokenizer, 20)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="the folder .*empty holds no data"):
        RLHFDataset([tmp_path / "empty"], tiny_tokenizer, 20)


# -------------------------------------------------------------------------------------- builders


def prompts_of(dataset, tokenizer):
    return [tokenizer.ids_to_text(dataset[i]["text"].tolist()) for i in range(len(dataset))]


def test_one_file_is_split(texts, tiny_tokenizer):
    names = [f"prompt {i // 2} {i}" for i in range(10)]
    for prefix in (texts(names), [texts(names)]):
        parts = build(build_train_valid_test_rlhf_datasets, prefix, tiny_tokenizer, splits="8,1,1")
        assert [prompts_of(part, tiny_tokenizer) for part in parts] == [
            names[:8],
            names[8:9],
            names[9:],
        ]
    train, validation, test = build(
        build_train_valid_test_rlhf_datasets,
        texts(names),
        tiny_tokenizer,
        splits="50/50",
        samples=(3, 99, -1),
    )
    assert prompts_of(train, tiny_tokenizer) == names[:3] and len(validation) == 5 and test is None
    pairs = build(
        build_train_valid_test_rm_datasets, texts(names), tiny_tokenizer, splits="60,40,0"
    )
    assert [part and len(part) for part in pairs] == [3, 2, None]
    assert (
        tiny_tokenizer.ids_to_text(
            pairs[1][0]["rejected"][: pairs[1][0]["rejected_length"]].tolist()
        )
        == names[7]
    )
    with pytest.raises(ConfigError, match="model.data.splits_string="):
        build(build_train_valid_test_rlhf_datasets, texts(names), tiny_tokenizer)
    with pytest.raises(ConfigError, match="three weights are needed"):
        build(build_train_valid_test_rlhf_datasets, texts(names), tiny_tokenizer, splits="a,b")


def test_a_replaced_prompt_of_one_part_does_not_come_from_another(texts, tiny_tokenizer):
    path = texts(["short", "#" * 30, "also short", "other"])
    train, validation, _ = build(
        build_train_valid_test_rlhf_datasets, path, tiny_tokenizer, splits="50,50,0"
    )
    assert prompts_of(train, tiny_tokenizer) == ["short", "short"]
    with pytest.raises(UserError, match="all 1 prompts"):
        build(build_train_valid_test_rlhf_datasets, path, tiny_tokenizer, splits="25,25,50")


def test_several_validation_sets(texts, tiny_tokenizer):
    prefix = {
        "train": texts(["a"]),
        "validation": [texts(["b"], "v")],
        "validation_hard": texts(["c", "d"], "h"),
    }
    train, validation, test = build(build_train_valid_test_rlhf_datasets, prefix, tiny_tokenizer)
    assert prompts_of(train, tiny_tokenizer) == ["a"] and test is None
    assert {key: len(part) for key, part in validation.items()} == {
        "validation": 1,
        "validation_hard": 2,
    }
    prefix.pop("validation_hard")
    assert len(build(build_train_valid_test_rlhf_datasets, prefix, tiny_tokenizer)[1]) == 1


def test_data_prefix_refusals(texts, tiny_tokenizer):
    path = texts(["a"])
    cases = [
        (None, {}, "data_prefix is not set"),
        ({"validation": [path]}, {}, "it needs train"),
        ({"train": [path], "valid": [path]}, {}, "keys train, valid"),
        ({"train": [0.5, path, path]}, {}, r"\[0.5, .*a blend is a list of weights above 0 and f"),
        ({"train": [0, path, 1, path]}, {}, "a blend is a list of weights above 0 and files"),
        ({"train": [path]}, {"impl": "lazy"}, "data_impl=lazy is not supported; use one of jsonl"),
        ({"train": [path]}, {"impl": "chunked_jsonl"}, "not supported; name the chunks as a list"),
    ]
    for prefix, options, message in cases:
        with pytest.raises(ConfigError, match=message):
            build(build_train_valid_test_rlhf_datasets, prefix, tiny_tokenizer, **options)


def test_rollouts_are_validated_on_one_set_or_on_none(texts, tiny_tokenizer):
    path = texts(["a"])
    for names in ((), ("validation",), ("validation", "validation_b")):
        files = {name: [path] for name in ("train", *names)}
        _, built, _ = build(build_train_valid_test_rlhf_datasets, files, tiny_tokenizer)
        if len(names) < 2:
            assert single_validation_set(built) is built and (built is None) == (not names)
        else:
            with pytest.raises(ConfigError, match="several validation sets .validation, valid"):
                single_validation_set(built)


@pytest.mark.parametrize("section, remote", [("ppo", "remote_critic_rm"), ("rs", "remote_rm")])
def test_requests_too_narrow_for_the_longest_rollout_are_warned_of(
    texts, tiny_tokenizer, section, remote, warnings
):
    sentence = "the film is the film"
    tokens = len(tiny_tokenizer.text_to_ids(sentence))
    assert tokens < len(sentence)  # so a bound from the number of characters is not the length
    model = {
        "seed": 1,
        "data": {"seq_length": 48, "num_workers": 0},
        section: {"length_params": {"max_length": 12}},
    }
    # 36 tokens are the limit: the prompt of 40 is replaced and does not count
    train_file, validation_file = (
        texts(["#" * 9, "#" * 40, sentence], "train.jsonl"),
        texts(["a", "é" * 8], "val.jsonl"),
    )
    train, validation, _ = build(
        build_train_valid_test_rlhf_datasets,
        {"train": [train_file], "validation": [validation_file]},
        tiny_tokenizer,
        OmegaConf.create(model),
        seq_length=48,
    )
    warnings.clear()  # of the prompt that is too long
    lengths = {
        dataset.name: max(int(dataset[i]["length"]) for i in range(len(dataset)))
        for dataset in (train, validation)
    }

    def check(pad_to_length, datasets):
        cfg = OmegaConf.create({"model": model, remote: {"pad_to_length": pad_to_length}})
        check_pad_to_length(cfg, remote, section, datasets)

    for datasets in ([train], [validation], [train, validation], [validation, train]):
        longest = max(lengths[dataset.name] for dataset in datasets)
        name = next(dataset.name for dataset in datasets if lengths[dataset.name] == longest)
        for enough in (longest + 12, 47, 48, 100, None):
            check(enough, datasets)
        for too_small in (longest + 11, 13, 12):
            check(too_small, datasets)
            said = warnings.pop()
            assert said.startswith(
                f"{remote}.pad_to_length={too_small} does not hold every sample: the longest "
                f"prompt of the {name} data has {longest} tokens, and "
                f"model.{section}.length_params.max_length=12 more"
            )
            assert said.endswith(f"{remote}.pad_to_length={longest + 12}.")
        assert warnings == []


def test_wide_requests_need_no_lengths(texts, tiny_tokenizer):
    train, _, _ = build(
        build_train_valid_test_rlhf_datasets, {"train": [texts(["a", "b" * 15])]}, tiny_tokenizer
    )
    train.encoder = None  # so that tokenizing would fail
    for pad_to_length in (32, 33, None):
        cfg = OmegaConf.create(
            {"model": model_cfg(), "remote_rm": {"pad_to_length": pad_to_length}}
        )
        check_pad_to_length(cfg, "remote_rm", "ppo", [train])


def test_dataloader_resumes_and_leaves_the_global_generator_alone(texts, tiny_tokenizer):
    dataset = RLHFDataset([texts([f"prompt {i}" for i in range(20)])], tiny_tokenizer, 20)
    cfg = OmegaConf.create({"model": model_cfg()})
    collate_fn = collate_with_pad_to_max_batch(2, tiny_tokenizer.eos_id, cfg, False)

    def batches(consumed, **options):
        loader = build_dataloader(cfg, dataset, consumed, 2, 8, collate_fn=collate_fn, **options)
        return [batch["idx"].tolist() for batch in loader]

    before = torch.get_rng_state()
    assert batches(8, load_gbs=False) == batches(0, load_gbs=False)[4:]
    assert [i for b in batches(0) for i in b] == [i for b in batches(0, load_gbs=False) for i in b]
    assert batches(0, use_random_sampler=False) == [list(range(8)), list(range(8, 16))]
    padded = batches(
        0, use_random_sampler=False, drop_last=False, pad_samples_to_global_batch_size=True
    )
    assert padded[-1] == [16, 17, 18, 19, -1, -1, -1, -1]
    assert torch.equal(torch.get_rng_state(), before)


# --- bos ----------------------------------------------------------------------------------------


def samples_of_every_kind(folder, tokenizer, text, **data):
    """The tokens that each kind of data set and command makes of `text`, without padding."""
    head, tail = text[:-4], text[-4:]  # the tokenizer joins no characters across words
    pair = write(folder / "p.jsonl", [{"prompt": head, "chosen": tail, "rejected": " no"}])
    label = write(folder / "l.jsonl", [{"text": text, "label": [1.0]}])
    rated = {"prompt": head, "response": tail, "preference": "chosen"}
    rated_path = write(folder / "k.jsonl", [rated, rated | {"preference": "rejected"}])
    sft = write(folder / "s.jsonl", [{"input": head, "output": tail}])
    dpo = DPOModelDataset([pair], tokenizer, 24, data)[0]
    kto = KTOModelDataset([rated_path], tokenizer, 24, data)[0]
    pairs = RewardModelDataset([pair], tokenizer, 24, data)[0]
    labelled = RegressionRewardModelDataset([label], tokenizer, 24, 1, data_cfg=data)[0]
    response = ResponseDataset([rated_path], tokenizer, 24, data)[0]
    of_sft = {
        "add_bos": data.get("add_bos"),
        "add_eos": False,
        "prompt_template": "{input}{output}",
    }
    yield SFTDataset([sft], tokenizer, 24, **of_sft)[0]["tokens"]
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
def test_bos_is_where_the_tokenizer_itself_puts_it(tmp_path, bos_tokenizer_dir, text):
    """A sample has the same tokens in every job and command; transformers' call is the oracle."""
    tokenizer = AutoTokenizer(pretrained_model_name=bos_tokenizer_dir)
    bos = tokenizer.bos_id
    own = tokenizer.tokenizer(text.removeprefix("<s>"))["input_ids"]
    assert own[0] == bos and bos not in own[1:]
    made = list(samples_of_every_kind(tmp_path, tokenizer, text))
    assert made == [own] * len(made)
    written = own if text.startswith("<s>") else own[1:]
    made = list(samples_of_every_kind(tmp_path, tokenizer, text, add_bos=False))
    assert made == [written] * len(made)
    cut = Response(text[:-4], text[-4:], is_end=False)
    assert tokens_of(cut, tokenizer) == own
    policy = SimpleNamespace(
        tokenizer=tokenizer,
        encoder=RecordEncoder(tokenizer),
        params=SimpleNamespace(max_length=4),
        generator=SimpleNamespace(max_sequence_length=24),
    )
    assert tokenize(policy, [{"text": text}], "prompts") == [own]


def test_bos_is_put_where_it_is_asked_for(
    tmp_path, tiny_tokenizer, tiny_sentencepiece_model, bos_tokenizer_dir
):
    """SentencePiece leaves bos to its caller; NeMo's wrapper of GPT-2 knows one and puts none."""
    tokenizer = SentencePieceTokenizer(tiny_sentencepiece_model)
    plain = tokenizer.text_to_ids("the film was")
    assert list(samples_of_every_kind(tmp_path, tokenizer, "the film was"))[1] == plain
    made = list(samples_of_every_kind(tmp_path, tokenizer, "the film was", add_bos=True))
    assert made[1] == [tokenizer.bos_id, *plain] and all(ids[0] == made[1][0] for ids in made)
    for make in (
        lambda: RLHFDataset(["x"], tiny_tokenizer, 24, {"add_bos": True}),
        lambda: SFTDataset(["x"], tiny_tokenizer, 24, add_bos=True),
    ):
        with pytest.raises(UserError, match="add_bos=True, but the tokenizer has no bos token"):
            make()


def test_bos_survives_the_truncation_of_sft(tmp_path, bos_tokenizer_dir):
    tokenizer = AutoTokenizer(pretrained_model_name=bos_tokenizer_dir)
    path = write(tmp_path / "s.jsonl", [{"input": "a" * 50, "output": " b"}])
    item = SFTDataset([path], tokenizer, 8, truncation_method="left")[0]
    assert len(item["tokens"]) == 8 and item["tokens"][0] == tokenizer.bos_id
    assert item["tokens"][-1] == tokenizer.eos_id and item["trained"].count(False) > 2
