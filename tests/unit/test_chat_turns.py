# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Which turns of a conversation count, and that templates write them in full: thoughts, markers,
weights, calls of tools, arguments for the template, and a sample of its own for each turn.
"""

import datetime
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from nemo.collections.common.tokenizers import AutoTokenizer
from nemo.utils import logging
from omegaconf import OmegaConf

from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.data.nlp import index_files
from nemo_aligner.data.nlp import records as records_module
from nemo_aligner.data.nlp.chat_records import check_written
from nemo_aligner.data.nlp.chat_template import ChatTemplate
from nemo_aligner.data.nlp.datasets import (
    DPOModelDataset,
    KTOModelDataset,
    RegressionRewardModelDataset,
    ResponseDataset,
    RewardModelDataset,
    RLHFDataset,
)
from nemo_aligner.data.nlp.record_encoder import chat_form, say_default
from nemo_aligner.inspection.findings import place
from nemo_aligner.launch.experiment import CHAT_DATE, fix_chat_date
from tests import data_sets
from tests.chat_forms import FAMILIES, OTHERS, slow_encoding, write_tokenizer

THOUGHT = "<think>\n2 + 2\n</think>\n\nIt is 4."
TALK = [("user", "hello"), ("assistant", THOUGHT), ("user", "the film"), ("assistant", THOUGHT)]
TEMPLATE = {"chat_template": "tokenizer"}


@pytest.fixture
def process_group():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def chat(*turns):
    return [{"role": role, "content": content} for role, content in turns]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("turns")
    both = FAMILIES | OTHERS
    return {name: write_tokenizer(root / name, family) for name, family in both.items()}


@pytest.fixture(scope="module")
def tokenizers(folders):
    return {name: AutoTokenizer(pretrained_model_name=folder) for name, folder in folders.items()}


def sft(path, tokenizer, **options):
    return data_sets.sft(path, tokenizer, {"max_seq_length": 256}, **{**TEMPLATE, **options})


def trained(dataset, index=0):
    """The text that an item trains on."""
    return dataset.tokenizer.tokenizer.decode(data_sets.trained_of(dataset[index]))


# --------------------------------------------------------------------------- what is left out

PROMPT, REPLY = chat(*TALK[:2])
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
LEFT_OUT = [
    (sft, {"messages": [PROMPT, REPLY]}),
    (DPOModelDataset, {"prompt": [PROMPT], "chosen": [REPLY], "rejected": "no"}),
    (RewardModelDataset, {"prompt": [PROMPT], "chosen": "no", "rejected": THOUGHT}),
    (KTOModelDataset, {"prompt": "hello", "response": THOUGHT, "preference": True}),
    (ResponseDataset, {"prompt": "hello", "response": THOUGHT}),
    (RegressionRewardModelDataset, {"messages": [PROMPT, REPLY], "label": [1.0]}),
]


@pytest.mark.parametrize(("dataset", "record"), LEFT_OUT)
def test_a_response_that_the_template_cuts_is_refused(dataset, record, tokenizers, write):
    path, more = write(record), (1,) if dataset is RegressionRewardModelDataset else ()
    build = dataset
    if dataset is not sft:
        build = lambda path, tokenizer: dataset([path], tokenizer, 128, *more, data_cfg=TEMPLATE)  # noqa: E731
    with pytest.raises(UserError, match=r"line 1: .* leaves out '2 \+ 2' of message 2"):
        build(path, tokenizers["r1"])
    if "messages" in record:  # a turn that is only read may lose its thoughts
        record["messages"] = [PROMPT, REPLY | {"weight": 0}, PROMPT, {**REPLY, "content": "no"}]
        build(write(record), tokenizers["r1"])


@pytest.mark.parametrize(
    ("name", "more", "missing"),
    [
        ("chatml", {"reasoning_content": "because"}, "because"),
        ("chatml", {"tool_calls": [CALL]}, "add"),
        ("llama3", {"tool_calls": [CALL, {"function": {"name": "sub", "arguments": {}}}]}, "sub"),
        ("llama3", {"tool_calls": [CALL], "content": "I add"}, "I add"),
        ("qwen3", {"function_call": {"name": "add", "arguments": '{"a": 2}'}}, "add"),
    ],
)
def test_thoughts_and_calls_are_written_too(name, more, missing, tokenizers):
    reply = {"role": "assistant", "content": "", **more}
    with pytest.raises(UserError, match="leaves out '.+' of message 2"):
        chat_form({"chat": True}, tokenizers[name]).conversation({"messages": [PROMPT, reply]})
    with pytest.raises(UserError, match=f"leaves out '{missing}' of message 2"):
        chat_form(TEMPLATE, tokenizers[name]).conversation({"messages": [PROMPT, reply]})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"city": None, "n": 3}, '{"city": null, "n": 3}'),
        ({"city": None, "now": True}, "{'city': None, 'now': True}"),
        ({"lines": "a\n\n\nb"}, "lines: a\nb"),
    ],
)
def test_a_call_and_a_content_may_be_written_otherwise(arguments, text):
    call = {"function": {"name": "add", "arguments": arguments}}
    reply = {"role": "assistant", "content": "one\n\n\ntwo", "tool_calls": [call]}
    check_written(2, reply, f"one\n\ntwo add {text}<|im_end|>")
    for other in (f"onetwo add {text}", "one two add {}"):
        with pytest.raises(UserError, match="leaves out"):
            check_written(2, reply, other)


def test_a_prompt_is_written_in_full(tokenizers, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages[-1].content }}</s>")
    form = chat_form({"chat_template": str(tmp_path / "t.jinja")}, tokenizers["chatml"])
    assert form.prompt({"prompt": "hello"})
    with pytest.raises(UserError, match=r"leaves out what message 1 \(role 'system'\) says"):
        form.prompt({"prompt": "hello", "system": "Be kind."})


# -------------------------------------------------------------------------------------- markers


def test_the_end_of_a_marked_turn_is_trained(folders, tokenizers, write, tmp_path):
    """Whether it stands within the markers or behind them."""
    plain = [("user", "hello"), ("assistant", "a joy"), ("user", "a"), ("assistant", "dull")]
    record = {"messages": chat(*plain)}
    expected = slow_encoding(folders["marked"], OTHERS["marked"].write(plain))
    for dash in ("", "-"):
        text = OTHERS["marked"].template.replace("{% generation %}", f"{{%{dash} generation %}}")
        (tmp_path / "t.jinja").write_text(text)
        form = ChatTemplate(tokenizers["marked"], str(tmp_path / "t.jinja"))
        assert tuple(form.conversation(record)) == expected
    record["messages"][1]["weight"] = 0
    assert trained(sft(write(record), tokenizers["marked"])) == "dull<|im_end|>"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("'<|im_end|>\\n'", "'<|im_start|>'"), "'<|im_start|>' is behind them in place of"),
        (("message.content }}{% end", "message.content[1:] }}{% end"), "leaves out 'hello' of me"),
        (
            ("{% generation %}", "{% generation %}a{% endgeneration %}b{% generation %}"),
            "hold 2 parts of a conversation with 1 turns",
        ),
    ],
)
def test_markers_that_do_not_hold_the_turns_are_refused(change, message, tokenizers, tmp_path):
    text = OTHERS["marked"].template.replace(*change)
    (tmp_path / "t.jinja").write_text(text)
    form = ChatTemplate(tokenizers["marked"], str(tmp_path / "t.jinja"))
    form._turn_end = ChatTemplate(tokenizers["marked"])._turn_end
    with pytest.raises(UserError) as raised:
        form.conversation({"messages": chat(("user", "a"), ("assistant", "hello"))})
    assert message in str(raised.value)


# --------------------------------------------------------------------- arguments for the template


def test_arguments_of_records_and_of_the_job_reach_the_template(tokenizers, write):
    """In prompts, conversations, pairs and labelled samples; those of the record win."""
    tokenizer = tokenizers["qwen3"]
    own = {"chat_template_kwargs": {"enable_thinking": False}}
    job = {**TEMPLATE, **own}
    start, no_thoughts = "<|im_start|>assistant\n", "<think>\n\n</think>\n\n"

    def text(tokens):
        return tokenizer.tokenizer.decode(tokens).split("hello<|im_end|>\n")[1]

    conversation, pair = {"messages": chat(("user", "hello"), ("assistant", "a"))}, {"chosen": "a"}
    pair |= {"prompt": [PROMPT], "rejected": "b", "response": "a", "preference": True}
    off, on = start + no_thoughts, start
    back = {"chat_template_kwargs": json.dumps({"enable_thinking": True})}
    for data, record, expected in ((TEMPLATE, {}, on), (TEMPLATE, own, off), (job, back, on)):
        path = write({"prompt": "hello"} | record)
        assert text(RLHFDataset([path], tokenizer, 99, data)[0]["text"]) == expected
        form, place = chat_form(data, tokenizer), len(expected) - len(start)
        samples = [form.conversation(conversation | record), form.response(pair | record)]
        samples.append(form.pair(pair | record)[0])
        for tokens, mask in samples:
            assert text(tokens) == f"{start}{no_thoughts}a<|im_end|>"
            ids = [token for token, x in zip(tokens, mask, strict=True) if x]
            assert tokenizer.tokenizer.decode(ids) == f"{no_thoughts[place:]}a<|im_end|>"
        assert form.sample(conversation | record) == samples[0].tokens
    assert chat_form(job, tokenizer).state != chat_form(TEMPLATE, tokenizer).state


@pytest.mark.parametrize("name", ["messages", "tokenize", "add_generation_prompt"])
def test_arguments_that_the_template_has_are_refused(name, tokenizers, write):
    record = {"prompt": "hello", "chat_template_kwargs": {name: "x"}}
    with pytest.raises(UserError, match=f"line 1: the chat template refuses .*'{name}'"):
        RLHFDataset([write(record)], tokenizers["chatml"], 99, TEMPLATE)
    with pytest.raises(UserError, match="'chat_template_kwargs' is for chat templates, and NeMo"):
        RLHFDataset([write(record)], tokenizers["chatml"], 99, {"chat": True})


# ------------------------------------------------------------------------------- calls, weights


def test_calls_are_the_same_from_json_text_and_from_tables(tokenizers, tmp_path, write):
    """In a table all calls of a column have the same fields."""
    calls = [{"x": 1}, {"city": "Rome", "at": {"day": 2}}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"x": {"type": "int"}}}}]

    def record(arguments, as_text=False, **more):
        function = {"name": "f", "arguments": json.dumps(arguments) if as_text else arguments}
        call = {"type": "function", "function": function}
        reply = {"role": "assistant", "content": "", "tool_calls": [call]}
        return {"messages": [*chat(("user", "hello")), reply, *chat(("assistant", "a"))], **more}

    rows = [record(calls[0], tools=tools), record(calls[1])]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "calls.parquet")
    tables = [str(tmp_path / "calls.parquet"), write(*rows)]
    tables.append(write(*(record(call, as_text=True) for call in calls), name="text.jsonl"))
    for path in tables:
        dataset = sft(path, tokenizers["qwen3"])
        for number, arguments in enumerate(calls):
            assert f'"arguments": {json.dumps(arguments)}}}' in trained(dataset, number)
            assert "null" not in json.dumps(dataset.lines[number].get("tools") or [])
    for none in ("", " "):
        empty = sft(write(record(none, tools=none), name="empty.jsonl"), tokenizers["qwen3"])
        assert '"arguments": {}}' in trained(empty)
        assert chat_form(TEMPLATE, tokenizers["qwen3"])._inputs({"tools": none})["tools"] is None
    for bad in ([1], "[1]", "{"):
        path = write(rows[0], record(bad))
        with pytest.raises(UserError, match="(?s)line 2: 'arguments' of a call in 'tool_calls'"):
            sft(path, tokenizers["qwen3"])


def test_a_turn_of_weight_0_is_not_trained_on(tokenizers, write):
    turns = chat(("user", "a"), ("assistant", "hello"), ("user", "b"), ("assistant", "dull"))
    turns[1]["weight"], turns[3]["weight"] = 0.0, 1
    share = [{"from": m["role"], "value": m["content"], "weight": m.get("weight")} for m in turns]
    expected = "dull<|im_end|>"
    for record in ({"messages": turns}, {"conversations": share}):
        assert trained(sft(write(record), tokenizers["chatml"])) == expected
    marks = data_sets.MARKS | {"system_turn_start": "<s>", "turn_start": "</s>"}
    nemo = {"is_chat": True, "chat_template": None, "special_tokens": marks}
    share = [{"from": m["role"].capitalize(), "value": m["content"]} for m in turns]
    share[1]["weight"] = 0
    for record in ({"messages": turns}, {"conversations": share}):
        assert trained(sft(write(record), tokenizers["chatml"], **nemo)) == "dull\n</s>"
    with pytest.raises(UserError, match="'weight' 0, but model.answer_only_loss=False"):
        sft(write({"messages": turns}), tokenizers["chatml"], answer_only_loss=False)


@pytest.mark.parametrize("weight", [0.5, 2, True, "0", [0]])
def test_other_weights_are_refused(weight, tokenizers, write):
    good = {"messages": chat(("user", "a"), ("assistant", "b"))}
    bad = {"messages": [good["messages"][0], good["messages"][1] | {"weight": weight}]}
    with pytest.raises(UserError, match="line 2: 'weight' of message 2 .* use 0 .not trained on"):
        sft(write(good, bad), tokenizers["chatml"])
    user, reply = good["messages"]
    for messages, message in (
        ([user | {"weight": 1}, reply], "only the assistant's turns are"),
        ([user, reply | {"weight": 0}], "every respon"),
    ):
        bad["messages"] = messages
        with pytest.raises(UserError, match=f"line 2: .*{message}"):
            sft(write(good, bad), tokenizers["chatml"])


def test_parts_of_a_content_are_joined(tokenizers):
    form = chat_form(TEMPLATE, tokenizers["chatml"])
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "film"}]
    plain = {"messages": chat(("user", "the film"), ("assistant", "the film"))}
    record = {"messages": [message | {"content": parts} for message in plain["messages"]]}
    assert form.conversation(record) == form.conversation(plain)
    record["messages"][0]["content"] = [*parts, {"type": "image_url", "image_url": {}}]
    with pytest.raises(UserError, match="'content' of message 1 .* a part of type 'image_url'"):
        form.conversation(record)


# ------------------------------------------------------------------------- one turn per sample


@pytest.mark.parametrize("name", ["qwen3", "tulu"])
def test_each_turn_is_a_sample_as_it_is_seen_in_use(name, folders, tokenizers, write, monkeypatch):
    """And a second start, which finds the index of the file, gives the same ones."""
    plain = [(role, text.split("\n\n")[-1]) for role, text in TALK]
    talk = TALK if name == "qwen3" else plain
    records = [{"messages": chat(*talk[:2])}, {"messages": chat(*talk), "system": "Be kind."}]
    path = write(*records)
    with pytest.raises(UserError, match="(?s)line 2: .*message [23] .*one_turn_per_sample=True"):
        sft(path, tokenizers[name])
    monkeypatch.setattr(index_files, "SMALL", 64)
    system = ("system", "Be kind.")
    expected = [talk[:2], [system, *talk[:2]], [system, *talk]]
    for _start in range(2):
        dataset = sft(path, tokenizers[name], one_turn_per_sample=True)
        assert len(dataset) == 3
        for number, conversation in enumerate(expected):
            ids, mask = slow_encoding(folders[name], OTHERS[name].write(conversation))
            item = dataset[number]
            assert (item["tokens"], item["trained"]) == (ids, mask)
            assert dataset.lengths[number] == len(ids)
        places = [place(dataset, number) for number in range(3)]
        assert places == [f"{path}, line {row}" for row in (1, 2, 2)]
        monkeypatch.setattr(records_module, "_read", None)
    form = dataset.form
    prompt = form.prompt({"messages": chat(system, *talk[:3])})  # what a rollout starts from
    assert dataset[2]["tokens"][: len(prompt)] == prompt


def test_samples_of_turns_in_several_files_and_packs(tokenizers, write):
    first = write({"messages": chat(*TALK)}, {"messages": chat(*TALK[:2])}, name="a.jsonl")
    second = write({"messages": chat(*TALK)}, name="b.jsonl")
    dataset = sft([first, second], tokenizers["qwen3"], one_turn_per_sample=True)
    assert [place(dataset, n).split("/")[-1] for n in range(5)] == [
        f"{name}.jsonl, line {row}" for name, row in zip("aaabb", (1, 1, 2, 1, 1), strict=True)
    ]
    assert dataset[3]["tokens"] == dataset[0]["tokens"] == dataset[2]["tokens"]
    assert dataset.lines.first_of_file.tolist() == [0, 3]
    section = {"max_seq_length": 256, "packed_sequence": True}
    packed = data_sets.sft(first, tokenizers["qwen3"], section, one_turn_per_sample=True)
    assert sorted(number for pack in packed.packs for number in pack) == [0, 1, 2]
    with pytest.raises(ConfigError, match="one_turn_per_sample=True trains on one turn"):
        sft(first, tokenizers["qwen3"], one_turn_per_sample=True, answer_only_loss=False)
    with pytest.raises(ConfigError, match="one_turn_per_sample=True is not for"):
        chat_form({"chat": True, "one_turn_per_sample": True}, tokenizers["qwen3"])


# ------------------------------------------------------------------------- the default, the date


def test_conversations_get_the_tokenizers_template_and_texts_stay(tokenizers, write, monkeypatch):
    said = []
    monkeypatch.setattr(logging, "info", lambda text, *_a, **_k: said.append(text))
    say_default.cache_clear()
    tokenizer = tokenizers["chatml"]
    talk = {"messages": chat(("user", "hello"), ("assistant", "a"))}
    prompts = [{"prompt": "hello"}, {"text": "hello"}, {"messages": chat(("user", "hello"))}]
    dataset = RLHFDataset([write(*prompts)], tokenizer, 99)
    plain = tokenizer.text_to_ids("hello")
    written = ChatTemplate(tokenizer).prompt(prompts[2])
    assert [dataset[n]["text"].tolist() for n in range(3)] == [plain, plain, written]
    pairs = [{"prompt": "hello", "chosen": "a", "rejected": "b"}]
    pairs.append({**pairs[0], "chosen": chat(("assistant", "a"))})
    dataset = DPOModelDataset([write(*pairs)], tokenizer, 99)
    lengths = [len(tokenizer.text_to_ids("helloa")), len(ChatTemplate(tokenizer).sample(talk))]
    assert [int(dataset[n]["chosen_length"]) for n in range(2)] == lengths
    assert trained(sft(write(talk), tokenizer, chat_template=None)) == "a<|im_end|>"
    texts = sft(write({"input": "hello", "output": "a", **talk}), tokenizer, chat_template=None)
    assert texts.what == "examples"
    assert "columns that nothing reads, in" in said.pop() and said == [
        "conversations are written in the tokenizer's chat template, as model.data.chat_template "
        "is not set"
    ]
    with pytest.raises(UserError, match="line 2: field 'messages' .* is missing"):
        sft(write(talk, {"input": "a", "output": "b"}), tokenizer, chat_template=None)
    with pytest.raises(UserError, match="2: fields 'input' and 'output' are .*files of their own"):
        sft(write({"input": "a", "output": "b"}, talk), tokenizer, chat_template=None)


def test_a_run_keeps_its_date(process_group, tmp_path):
    """Also where `exp_manager` has moved the file of a former run."""
    data, today = OmegaConf.create({"chat_date": None}), str(datetime.date.today())
    fix_chat_date(data, tmp_path)
    assert data.chat_date == (tmp_path / CHAT_DATE).read_text() == today
    (tmp_path / "run_0").mkdir()
    (tmp_path / "run_0" / CHAT_DATE).write_text("2024-02-05")
    (tmp_path / CHAT_DATE).unlink()
    for given, expected in ((None, "2024-02-05"), ("2023-01-01", "2023-01-01")):
        data.chat_date = given
        fix_chat_date(data, tmp_path)
        assert data.chat_date == expected
    (tmp_path / "run_10").mkdir()
    (tmp_path / CHAT_DATE).rename(tmp_path / "run_10" / CHAT_DATE)
    data.chat_date = None
    fix_chat_date(data, tmp_path)
    assert data.chat_date == "2023-01-01"  # given last
    with pytest.raises(UserError, match="No such file"):
        fix_chat_date(data, tmp_path / "gone")
    data.chat_date = None
    fix_chat_date(data, None)
    assert data.chat_date == today


def test_a_template_gets_the_date_of_the_run(tokenizers, tmp_path):
    file = tmp_path / "dated.jinja"
    dated = "\n{% set now = '%-d.' %}{{ strftime_now(now) }}{{ strftime_now('%d %b %Y') }}"
    file.write_text(dated + FAMILIES["chatml"].template)
    data = {"chat_template": str(file), "chat_date": "2024-02-05"}
    form = chat_form(data, tokenizers["chatml"])
    text = tokenizers["chatml"].tokenizer.decode(form.prompt({"prompt": "hello"}))
    assert text.startswith("\n5.05 Feb 2024<|im_start|>user")
    for asked, written in (
        ("%%d %d%% %%%d", "%d 05% %05"),
        ("%A %a %B %b %p %x %c", "Monday Mon February Feb AM 02/05/24 Mon Feb  5 00:00:00 2024"),
    ):
        file.write_text(f"{{{{ strftime_now('{asked}') }}}}{{{{ messages[0].content }}}}")
        text = chat_form(data, tokenizers["chatml"]).render(chat(("user", "!")), True)
        assert text == f"{written}!"
    file.write_text("{{ strftime_now('%d %Q') }}{{ messages[0].content }}")
    with pytest.raises(UserError, match="strftime_now has no directive %Q"):
        chat_form(data, tokenizers["chatml"]).prompt({"prompt": "hello"})
    file.write_text(dated + FAMILIES["chatml"].template)
    today = chat_form({"chat_template": str(file)}, tokenizers["chatml"])
    assert today.date == str(datetime.date.today())
    assert today.state != form.state  # the index of a file is of one date
    dates = ({}, {"chat_date": "2024-02-05"})  # of a template that does not read them
    states = [chat_form(TEMPLATE | date, tokenizers["chatml"]).state for date in dates]
    assert states[0] == states[1]
    with pytest.raises(ConfigError, match="chat_date=May: give a date, YYYY-MM-DD"):
        chat_form(data | {"chat_date": "May"}, tokenizers["chatml"])
