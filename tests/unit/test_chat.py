# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversations in chat templates: tokens and masks against the characters that each template
writes (`tests/chat_forms.py`), and what is wrong with a record, with file and line.
"""

import json
import pickle
import random

import pytest
from nemo.collections.common.tokenizers import AutoTokenizer, SentencePieceTokenizer

from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.data.nlp.chat_template import ChatTemplate
from nemo_aligner.data.nlp.datasets import (
    RegressionRewardModelDataset,
    RewardModelDataset,
    RLHFDataset,
)
from nemo_aligner.data.nlp.record_encoder import chat_end_strings, chat_form
from nemo_aligner.generation.interface import EndConditions, GenerationParams
from nemo_aligner.models.nlp.gpt.megatron_gpt_ppo_actor import MegatronGPTActorModel
from tests.chat_forms import FAMILIES, slow_encoding, write_tokenizer
from tests.data_sets import sft
from tests.tiny_models import PPO, tiny_config

WORDS = "the film was a joy, a dull plot; What is 2 + 2? It is 4. hello World! naïve 日本".split()
every_family = pytest.mark.parametrize("name", FAMILIES)
TEMPLATE = {"chat_template": "tokenizer"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: write_tokenizer(root / name, family) for name, family in FAMILIES.items()}


@pytest.fixture(scope="module")
def tokenizers(folders):
    return {name: AutoTokenizer(folder) for name, folder in folders.items()}


def conversations(seed, system, count=12):
    """Random conversations of one to three turns that end with the assistant."""
    rng = random.Random(seed)

    def text():
        return " ".join(rng.choices(WORDS, k=rng.randint(1, 7))) + rng.choice(["", "\n", " ."])

    for number in range(count):
        turns = [(role, text()) for _ in range(1 + number % 3) for role in ("user", "assistant")]
        yield [("system", text()), *turns] if system and number % 2 else turns


def messages_of(conversation):
    return [{"role": role, "content": content} for role, content in conversation]


# ----------------------------------------------------------------------------------------- masks


def form_of(folder, name="chatml", template=None, **options):
    """The form of a tokenizer of the family `name` with its chat template, or another one."""
    return ChatTemplate(
        AutoTokenizer(write_tokenizer(folder, FAMILIES[name], template, **options))
    )


@pytest.mark.parametrize(
    ("name", "metaspace"),
    [*((name, False) for name in FAMILIES), ("mistral", True), ("llama3", True), ("gemma", True)],
)
def test_masks_are_those_of_the_characters(name, metaspace, tmp_path):
    """Also with a tokenizer that marks spaces, which has no characters beyond ASCII. And a prompt
    of a rollout is what the supervised sample has before the response.
    """
    family = FAMILIES[name]
    folder = write_tokenizer(tmp_path, family, metaspace=metaspace)
    form = ChatTemplate(AutoTokenizer(folder))
    for conversation in conversations(1, family.takes_system):
        if metaspace:
            plain = lambda text: text.encode("ascii", "ignore").decode()
            conversation = [(role, plain(text)) for role, text in conversation]
        encoded = form.encode_messages(messages_of(conversation), {})
        assert tuple(encoded) == slow_encoding(folder, family.write(conversation))
        prompt = form.prompt_tokens(messages_of(conversation[:-1]))
        assert encoded.tokens[: len(prompt)] == prompt
        assert encoded.is_response.index(True, len(prompt) - 1) == len(prompt)
        assert all(encoded.is_response[len(prompt) :])


def test_text_that_joins_the_generation_prompt_is_tokenized_as_in_a_rollout(tokenizers):
    """ChatML: the newline before a response and the one that it begins with are one token."""
    tokenizer = tokenizers["chatml"]
    form = ChatTemplate(tokenizer)
    messages = messages_of([("user", "hello"), ("assistant", "\n\nthe film")])
    prompt = form.prompt_tokens(messages[:1])
    encoded = form.encode_messages(messages, {})
    whole = tokenizer.text_to_ids(form.render(messages, False))
    assert whole[: len(prompt)] != prompt
    assert encoded.tokens[: len(prompt)] == prompt
    assert encoded.tokens[len(prompt) :] == tokenizer.text_to_ids("\n\nthe film<|im_end|>")
    assert encoded.is_response == [place >= len(prompt) for place in range(len(encoded.tokens))]


def test_a_template_file_takes_the_place_of_the_tokenizers_own(tokenizers, tmp_path):
    file = tmp_path / "other.jinja"
    file.write_text(FAMILIES["chatml"].template.replace("im_start", "im_end"))
    form = chat_form({"chat_template": str(file)}, tokenizers["chatml"])
    text = tokenizers["chatml"].tokenizer.decode(form.prompt({"prompt": "hello"}))
    assert text == "<|im_end|>user\nhello<|im_end|>\n<|im_end|>assistant\n"
    with pytest.raises(ConfigError, match="nowhere.jinja does not exist; give tokenizer"):
        chat_form({"chat_template": str(tmp_path / "nowhere.jinja")}, tokenizers["chatml"])


def test_tools_and_their_messages(folders, tokenizers):
    """As far as the template takes them: Qwen's writes tools and calls, Llama's calls."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    messages.append({"role": "tool", "content": "4", "name": None})
    messages.append({"role": "assistant", "content": "It is 4."})
    record = {"messages": messages, "tools": [{"type": "function", "function": {"name": "add"}}]}
    expected = {
        "qwen2_5": [
            ("<|im_start|>system\nYou are a helpful model.<|im_end|>\n", False),
            ("<|im_start|>system\n# Tools\n\n<tools>\n", False),
            ('{"type": "function", "function": {"name": "add"}}', False),
            ("\n</tools><|im_end|>\n<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n", False),
            ("<|im_start|>assistant\n", False),
            ('<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>', True),
            ("\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n", False),
            ("<|im_start|>assistant\n", False),
            ("It is 4.<|im_end|>", True),
        ],
        "llama3": [
            ("<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n", False),
            ("What is 2 + 2?<|eot_id|>", False),
            ("<|start_header_id|>assistant<|end_header_id|>\n\n", False),
            ('{"name": "add", "parameters": {"a": 2}}<|eot_id|>', True),
            ("<|start_header_id|>ipython<|end_header_id|>\n\n4<|eot_id|>", False),
            ("<|start_header_id|>assistant<|end_header_id|>\n\n", False),
            ("It is 4.<|eot_id|>", True),
        ],
    }
    for name, pieces in expected.items():
        encoded = chat_form(TEMPLATE, tokenizers[name]).conversation(record)
        assert tuple(encoded) == slow_encoding(folders[name], pieces), name
    as_text = record | {"tools": json.dumps(record["tools"])}
    form = chat_form(TEMPLATE, tokenizers["qwen2_5"])
    assert form.conversation(as_text) == form.conversation(record)


def test_a_template_that_shows_no_turns_is_refused(tmp_path):
    """It keeps thoughts in the last turn only, so that an earlier turn is not what a rollout of
    that turn would be.
    """
    last_only = "(message['content'] if loop.last else message['content'].split('</think>')[-1])"
    template = FAMILIES["chatml"].template
    form = form_of(tmp_path, template=template.replace("message['content']", last_only))
    turns = [("user", "hello"), ("assistant", "<think>2 + 2</think>It is 4.")]
    assert any(form.encode_messages(messages_of(turns), {}).is_response)
    with pytest.raises(UserError, match="message 2 are.*2 \\+ 2.*Set model.data.one_turn_per_sam"):
        form.encode_messages(messages_of(turns * 2), {})
    other = template.replace("assistant\\n' }}{% endif", "bot\\n' }}{% endif")
    with pytest.raises(UserError, match="with its generation prompt, is not the beginning"):
        form_of(tmp_path, template=other).encode_messages(messages_of(turns), {})


def test_pieces_that_a_tokenizer_writes_otherwise_are_refused(tmp_path):
    """No special token or space stands between prompt and response, and pieces get a space."""
    end = "{% if m.role == 'assistant' %}</s>{% endif %}"
    template = "{% for m in messages %}{{ m.content }}" + end + "{% endfor %}"
    form = form_of(tmp_path, "mistral", template, metaspace=True)
    with pytest.raises(UserError, match="the tokenizer joins the text before and after a respons"):
        form.encode_messages(messages_of([("user", "the fi"), ("assistant", "lm")]), {})


def test_a_template_without_an_end_is_refused_for_training(tmp_path):
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    form = form_of(tmp_path, template=template)
    assert form.end_strings == ()
    with pytest.raises(UserError, match="writes no special token after a response.*eos_token"):
        form.encode_messages(messages_of([("user", "a"), ("assistant", "b")]), {})


# ------------------------------------------------------------------------------------------ ends


@every_family
def test_a_response_ends_with_the_templates_end_of_turn(name, tokenizers):
    tokenizer, family = tokenizers[name], FAMILIES[name]
    strings = chat_end_strings(TEMPLATE, tokenizer)
    assert strings == (family.end_of_turn,)
    ends = EndConditions(tokenizer, strings)
    end = tokenizer.tokenizer.convert_tokens_to_ids(family.end_of_turn)
    assert ends.strings == () and end in ends.token_ids
    form = ChatTemplate(tokenizer)
    encoded = form.encode_messages(messages_of([("user", "hello"), ("assistant", "the film")]), {})
    ended = [ends.at_end(encoded.tokens[: last + 1]) for last in range(len(encoded.tokens))]
    responses = [place for place, counts in enumerate(encoded.is_response) if counts]
    assert [place for place in responses if ended[place]] == [len(encoded.tokens) - 1]
    assert chat_end_strings({}, tokenizer) == chat_end_strings(None, tokenizer) == ()
    params = GenerationParams(max_length=4, end_strings=("x",)).with_end_strings(strings)
    assert params.end_strings == ("x", *strings) and params.with_end_strings(strings) == params


TALK = {"messages": [{"role": "user", "content": "hello"}]}
PLAIN = {"text": "hello"}


@pytest.mark.parametrize(
    ("lines", "ends"),
    [
        ([PLAIN, PLAIN], ()),
        ([{"prompt": "hello"}], ()),
        ([{**PLAIN, **TALK}], ()),
        ([TALK], ("<|im_end|>",)),
        ([{"prompt": TALK["messages"]}], ("<|im_end|>",)),
    ],
)
def test_the_default_form_ends_responses_to_conversations_alone(lines, ends, tokenizers, write):
    path, plain = write(*lines), write(PLAIN, name="plain.jsonl")
    for files in (path, [path], {"train": [plain, path]}, {"train": [0.5, path, 0.5, plain]}):
        assert chat_end_strings({"data_prefix": files}, tokenizers["chatml"]) == ends
    assert chat_end_strings({"data_prefix": path} | TEMPLATE, tokenizers["chatml"])
    renamed = {"data_prefix": write({"row": TALK}), "columns": {"prompt": "row.messages"}}
    assert chat_end_strings(renamed, tokenizers["chatml"])


def test_the_default_form_ends_responses_of_self_play(tokenizers, write):
    plain = {"input": "hello", "output": "a"}
    for record, ends in ((plain, ()), ({**plain, **TALK}, ()), (TALK, ("<|im_end|>",))):
        data = {"train_ds": {"label_key": "output", "file_path": [write(record)]}}
        assert chat_end_strings(data, tokenizers["chatml"]) == ends


def test_a_policy_of_plain_prompts_ends_them_as_without_a_template(folders, tmp_path, write):
    """Nor is a template asked that would refuse. With one its end-of-turn token ends responses,
    which is not the tokenizer's eos.
    """
    actor = MegatronGPTActorModel(tiny_config(folders["llama3"], ppo=PPO, data=TEMPLATE))
    assert actor.generation_params.end_strings == ("<|eot_id|>",)
    assert actor.tokenizer.text_to_ids("<|eot_id|>")[0] != actor.tokenizer.eos_id
    template = "{{ raise_exception('of no use') }}"
    folder = write_tokenizer(tmp_path / "refuses", FAMILIES["chatml"], template)
    data = {"chat_template": None, "data_prefix": {"train": [write(PLAIN)]}}
    actor = MegatronGPTActorModel(tiny_config(folder, ppo=PPO, data=data))
    assert actor.generation_params.end_strings == ()
    with pytest.raises(UserError, match="of no use"):
        chat_end_strings({"data_prefix": write(TALK)}, actor.tokenizer)


# -------------------------------------------------------------------------------------- datasets


SFT = [("user", "What is 2 + 2?"), ("assistant", "It is 4.")]
SFT += [("user", "the film"), ("assistant", "was a joy")]


@every_family
def test_masked_tokens_of_a_collated_batch_are_the_assistants_turns(name, tokenizers, write):
    tokenizer, end = tokenizers[name], FAMILIES[name].end_of_turn
    path = write({"messages": messages_of(SFT)}, {"messages": messages_of(SFT[:2])})
    dataset = chats(path, tokenizer)
    batch = dataset.collate_fn([dataset[0], dataset[1], dataset[-1]])
    assert batch["tokens"].shape == batch["labels"].shape == batch["loss_mask"].shape
    assert batch["tokens"].shape[1] % 16 == 0
    space = " " if name == "mistral" else ""
    expected = [f"{space}It is 4.{end}{space}was a joy{end}", f"{space}It is 4.{end}", ""]
    for row, text in enumerate(expected):
        trained = batch["labels"][row][batch["loss_mask"][row] == 1]
        assert tokenizer.tokenizer.decode(trained) == text
    assert batch["tokens"][:, 1:].equal(batch["labels"][:, :-1])
    copy = pickle.loads(pickle.dumps(dataset))  # as processes that load data get it
    assert copy[0] == dataset[0]
    everything = sft(path, tokenizer, answer_only_loss=False, **TEMPLATE)
    assert all(everything[0]["trained"])


def test_long_conversations_are_cut_at_their_end(tokenizers, write, warnings):
    path = write({"messages": messages_of(SFT)}, {"messages": messages_of(SFT[:2])})
    short = len(chat_form(TEMPLATE, tokenizers["chatml"]).sample(GOOD))

    def build(length):
        return sft(path, tokenizers["chatml"], {"max_seq_length": length}, **TEMPLATE)

    dataset = build(short - 1)  # the last token is predicted, but not read
    assert "1 of 2 conversations are longer than max_seq_length" in warnings[0]
    batch = dataset.collate_fn([dataset[0], dataset[1]])
    assert batch["tokens"].shape[1] == short - 1
    for row in range(2):
        trained = batch["labels"][row][batch["loss_mask"][row] == 1]
        assert tokenizers["chatml"].tokenizer.decode(trained) == "It is 4.<|im_end|>"
    with pytest.raises(UserError, match="in all 2 conversations the first response begins beyond"):
        build(6)


def test_share_gpt_and_messages_are_the_same(tokenizers):
    form = chat_form(TEMPLATE, tokenizers["chatml"])
    names = {"user": "human", "assistant": "gpt"}
    turns = [{"from": names[role], "value": content} for role, content in SFT]
    messages = [{"role": "system", "content": "Be kind."}, *messages_of(SFT)]
    expected = form.conversation({"messages": messages})
    assert form.conversation({"conversations": turns, "system": "Be kind."}) == expected
    assert form.conversation({"messages": messages_of(SFT), "system": "Be kind."}) == expected
    system = {"from": "system", "value": "Be kind."}
    assert form.conversation({"conversations": [system, *turns]}) == expected
    prompt = form.prompt({"messages": messages_of(SFT[:3])})
    assert form.prompt({"conversations": turns[:3]}) == prompt
    prompt = form.prompt({"prompt": messages_of([("user", "hello")])})
    assert form.prompt({"prompt": "hello"}) == prompt


@every_family
def test_prompts_of_rollouts(name, tokenizers, write):
    family, tokenizer = FAMILIES[name], tokenizers[name]
    three, one = messages_of(SFT[:3]), messages_of(SFT[:1])
    pair = {"prompt": "hello", "chosen": "x", "rejected": "y"}
    path = write({"messages": three}, pair, {"prompt": one, "messages": messages_of(SFT)})
    dataset = RLHFDataset([path], tokenizer, 100, TEMPLATE)
    for number, conversation in enumerate((SFT[:3], [("user", "hello")], SFT[:1])):
        text = "".join(piece for piece, _ in family.write(conversation))
        item = dataset[number]
        assert tokenizer.tokenizer.decode(item["text"]) == text + family.generation_prompt
        assert item["length"] == len(item["text"]) == dataset.lines.notes[number]
    longest = max(dataset.lines.notes)
    assert dataset.longest_prompt(enough=1) == longest
    shorter = RLHFDataset([path], tokenizer, int(longest) - 1, TEMPLATE)
    assert [shorter[n]["loss_multiplier"] for n in range(3)] == [0.0, 1.0, 1.0]


@every_family
def test_pairs_are_what_a_rollout_makes(name, folders, tokenizers, write):
    """The reward model is trained on samples of the form that it scores: prompt, response, and the
    end-of-turn token as the last one.
    """
    family, tokenizer = FAMILIES[name], tokenizers[name]
    prompt, (good, bad) = SFT[:3], ("It is 4.", "was a joy")
    whole = [messages_of([*prompt, ("assistant", text)]) for text in (good, bad)]
    replies = [text[-1:] for text in whole]
    records = [
        {"prompt": messages_of(prompt), "chosen": good, "rejected": bad},
        {"prompt": messages_of(prompt), "chosen": replies[0], "rejected": replies[1]},
        {"prompt": messages_of(prompt), "chosen": whole[0], "rejected": whole[1]},
        {"chosen": whole[0], "rejected": whole[1]},
    ]
    dataset = RewardModelDataset([write(*records)], tokenizer, 80, TEMPLATE)
    assert len(dataset) == 4
    path = write({"messages": whole[0]}, {"messages": whole[1]}, name="lines.jsonl")
    lines = RewardModelDataset([path], tokenizer, 80, TEMPLATE)
    form = ChatTemplate(tokenizer)
    rollout = form.prompt_tokens(messages_of(prompt))
    space = " " if name == "mistral" else ""
    for item in [dataset[number] for number in range(4)] + [lines[0]]:
        for side, text in (("chosen", good), ("rejected", bad)):
            tokens = item[side][: item[f"{side}_length"]].tolist()
            assert tokens == rollout + tokenizer.text_to_ids(f"{space}{text}{family.end_of_turn}")
            pieces = family.write([*prompt, ("assistant", text)])
            assert tokens == slow_encoding(folders[name], pieces)[0]


def test_labelled_conversations(folders, tokenizers, write):
    path = write({"messages": messages_of(SFT), "label": [1.0, 2.0]})
    item = RegressionRewardModelDataset([path], tokenizers["llama3"], 80, 2, data_cfg=TEMPLATE)[0]
    ids, _mask = slow_encoding(folders["llama3"], FAMILIES["llama3"].write(SFT))
    assert item["inputs"][: item["lengths"]].tolist() == ids
    assert item["labels"].tolist() == [1.0, 2.0]


# ------------------------------------------------------------------------------------- bad input

USER, RESPONSE = messages_of(SFT[:2])
GOOD = {"messages": [USER, RESPONSE]}


def chats(path, tokenizer):
    return sft(path, tokenizer, {"max_seq_length": 128}, **TEMPLATE)


def pairs(path, tokenizer):
    return RewardModelDataset([path], tokenizer, 128, TEMPLATE)


def prompts(path, tokenizer):
    return RLHFDataset([path], tokenizer, 128, TEMPLATE)


def replied(**message):
    return {"messages": [USER, message]}


PAIR = {"prompt": "hello", "chosen": "a", "rejected": "b"}
WHOLE = {"chosen": [USER, RESPONSE], "rejected": [USER | {"content": "x"}, RESPONSE]}
TWO = {"system": "a", "messages": [{"role": "system", "content": "b"}]}
SHARED = {"conversations": [{"from": "human"}]}
BAD_CHATS = [
    ({"messages": []}, "field 'messages' is an empty list"),
    ({"messages": [USER]}, "'messages' ends with a message of the role 'user'.*add it"),
    ({"turns": []}, r"field 'messages' .* is missing; the line has \['turns'\]"),
    ({"messages": "hello"}, "'messages' must be a list of messages, not str"),
    ({"messages": ["hello"]}, "message 1 of field 'messages' must be an object"),
    (replied(role="assistant"), r"message 2 .*\(assistant\) has no 'content'"),
    (replied(role="assistant", content=None), "has 'content': null"),
    (replied(role="assistant", content=["x"]), "a part of type 'str', but only parts of type 'te"),
    (replied(content="x"), "message 2 of field 'messages' has no 'role'"),
    (SHARED, "message 1 of field 'conversations'.*'value'"),
    ({"messages": [RESPONSE]}, "refuses the conversation: .*must alternate"),
    (GOOD | {"system": "Be kind."}, "the chat template refuses .*System role not supp"),
    ({"messages": [USER, USER, RESPONSE]}, "refuses the conversation: .*must alternate"),
    (GOOD | {"tools": "{"}, "field 'tools' is not valid JSON"),
    (GOOD | {"tools": 3}, "field 'tools' must be a list, not int"),
    (GOOD | {"system": 3}, "field 'system' must be text, not int"),
    (TWO, "two system"),
]
BAD_PAIRS = [
    ({"prompt": "a", "chosen": "b"}, "field 'rejected' is missing; the line has"),
    ({"chosen": "a", "rejected": "b"}, "field 'prompt' is missing: 'chosen' is a text"),
    (PAIR | {"rejected": "a"}, "'chosen' and 'rejected' are equal"),
    (PAIR | {"chosen": [USER]}, "field 'chosen' ends with a message of the role 'user'"),
    (PAIR | {"rejected": []}, "field 'rejected' is an empty list"),
    (PAIR | {"prompt": []}, "field 'prompt' is an empty list"),
    (PAIR | {"chosen": [USER, RESPONSE]}, "does not begin with that of 'prompt'"),
    (WHOLE, "differ in message 1, which is of the role 'user'"),
    (GOOD, "this line holds one text, the lines before it a pair each"),
]
BAD_PROMPTS = [
    ({"messages": []}, "field 'messages' is an empty list"),
    (GOOD, "message 2, the last, is the assistant's.*remove that message"),
    ({"x": 1}, r"field 'messages' .* is missing; the line has \['x'\]"),
    ({"text": "b"}, "has a text in field 'text', which stays as it is"),
    ({"prompt": 3}, "field 'prompt' must be a list of messages, not int"),
]


@pytest.mark.parametrize(
    ("make", "good", "cases"),
    [(chats, GOOD, BAD_CHATS), (pairs, PAIR, BAD_PAIRS), (prompts, {"prompt": "a"}, BAD_PROMPTS)],
)
def test_a_bad_record_is_named_with_file_and_line(make, good, cases, tokenizers, write):
    for bad, message in cases:
        path = write(good, bad, name="bad.jsonl")
        with pytest.raises(UserError, match=f"(?s)bad.jsonl, line 2: .*{message}"):
            make(path, tokenizers["gemma"])


def test_a_conversation_does_not_begin_with_the_assistant(tokenizers, write):
    path = write({"messages": [RESPONSE, USER, RESPONSE]})
    with pytest.raises(UserError, match="line 1: message 1 is the assistant's: there is no promp"):
        chats(path, tokenizers["chatml"])


def test_content_that_a_template_leaves_out_is_refused(tmp_path, write):
    loop = "{% for message in messages %}"
    no_system = loop.replace(" %}", " if message['role'] != 'system' %}")
    template = FAMILIES["chatml"].template.replace(loop, no_system)
    tokenizer = AutoTokenizer(write_tokenizer(tmp_path / "t", FAMILIES["chatml"], template))
    path = write(GOOD, GOOD | {"system": "Be kind."})
    with pytest.raises(UserError, match=r"line 2: .* leaves out what message 1 \(role 'system'\)"):
        chats(path, tokenizer)


def test_conversations_without_a_form_are_refused(tiny_tokenizer, write):
    remedy = "the tokenizer has no chat template: set model.data.chat_template to the file of one"
    with pytest.raises(UserError, match=f"1: fields 'input' and 'output' are missing.*{remedy}"):
        sft(write(GOOD), tiny_tokenizer)
    with pytest.raises(UserError, match=f"line 1: field 'text' is missing.*{remedy}"):
        RLHFDataset([write({"messages": [USER]})], tiny_tokenizer, 64)
    with pytest.raises(UserError, match=f"field 'prompt' holds a conversation.*{remedy}"):
        RLHFDataset([write({"prompt": [USER]})], tiny_tokenizer, 64)
    with pytest.raises(UserError, match=f"field 'chosen' holds a conversation.*{remedy}"):
        RewardModelDataset([write(PAIR | {"chosen": [RESPONSE]})], tiny_tokenizer, 64)


def test_a_template_needs_a_tokenizer_that_has_one(tiny_tokenizer, tiny_sentencepiece_model):
    with pytest.raises(ConfigError, match="the tokenizer has no chat template; give the file"):
        chat_form(TEMPLATE, tiny_tokenizer)
    with pytest.raises(ConfigError, match="needs a tokenizer of Hugging Face.*chat=True"):
        chat_form(TEMPLATE, SentencePieceTokenizer(tiny_sentencepiece_model))
