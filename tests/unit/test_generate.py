# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m nemo_aligner.generate` in this process, on one rank: against naive generation, and
with what users get wrong.
"""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from nemo.collections.common.tokenizers import AutoTokenizer, SentencePieceTokenizer
from nemo.collections.common.tokenizers.bytelevel_tokenizers import ByteLevelTokenizer
from omegaconf import OmegaConf, open_dict

from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.checkpoint.forms import check_restore_path
from nemo_aligner.config.data_rules import asked_form
from nemo_aligner.core.errors import UserError
from nemo_aligner.core.tokenizer import response_text
from nemo_aligner.data.nlp.chat_template import ChatTemplate
from nemo_aligner.data.nlp.prompts import RLHFDataset
from nemo_aligner.data.nlp.record_encoder import chat_form
from nemo_aligner.generate.__main__ import main
from nemo_aligner.generate.policy import ChatForm, Policy
from nemo_aligner.generate.responses import Response, read_responses, replaced, write_records
from nemo_aligner.generate.settings import compose_settings, is_setting
from nemo_aligner.generate.terminal import TextStream
from nemo_aligner.generation import GenerationParams
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
from nemo_aligner.models.nlp.gpt.tokenizers import build_tokenizer
from tests.naive_generation import naive_generate
from tests.tiny_models import tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("log_level")]

PROMPTS = ["the film", "a dull plot and a", "I loved the", "Review: the film was bad."]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m.role[0] }}>{{ m.content }};{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
ENDS = tuple("abcdefgh")  # letters that end a response, so that some do
SHORT = ("trainer.accelerator=cpu", "length_params.max_length=9")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("generate")


@pytest.fixture(scope="module")
def chat_tokenizer_dir(tiny_tokenizer_dir, folder) -> str:
    copy = folder / "chat_tokenizer"
    shutil.copytree(tiny_tokenizer_dir, copy)
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return str(copy)


@pytest.fixture(scope="module")
def model(chat_tokenizer_dir, folder) -> MegatronGPTModel:
    model = MegatronGPTModel(tiny_config(chat_tokenizer_dir, "llama", init_method_std=0.3))
    model.save_to(str(folder / "policy.nemo"))
    return model


@pytest.fixture(scope="module")
def nemo(model, folder) -> str:
    return str(folder / "policy.nemo")


@pytest.fixture(scope="module")
def prompts(folder) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in PROMPTS))
    return str(path)


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


# ---- a file of prompts


def test_a_file_of_prompts_is_generated_as_naively(model, nemo, prompts, tmp_path, capsys):
    out = tmp_path / "new" / "out.jsonl"
    settings = [*SHORT, "responses_per_prompt=2", "micro_batch_size=3", "model.seed=11"]
    settings += ["sampling_params.temperature=0.7", "sampling_params.top_k=40"]
    settings += [f"sampling_params.end_strings=[{','.join(ENDS)}]"]
    main([nemo, "--prompts", prompts, "--out", str(out), *settings])
    assert "8 responses" in capsys.readouterr().out
    records = lines(out)
    assert [record["prompt"] for record in records] == [text for text in PROMPTS for _ in "12"]
    params = {"temperature": 0.7, "top_k": 40, "end_strings": ENDS}
    params = GenerationParams(max_length=9, min_length=1, **params)
    tokenizer = model.tokenizer
    assert sum(record["is_end"] for record in records) not in (0, len(records))
    for number, record in enumerate(records):
        seed = _seed(11, number // 2, number % 2)
        ids, ended = naive_generate(model, record["prompt_tokens"], seed, params)
        response = ids[len(record["prompt_tokens"]) :]
        assert record["prompt_tokens"] == tokenizer.text_to_ids(record["prompt"])
        assert (record["response_tokens"], record["is_end"]) == (response, ended)
        assert record["length"] == len(response)
        text = response[:-1] if response[-1] == tokenizer.eos_id else response
        assert record["response"] == (tokenizer.ids_to_text(text) if text else "")
        assert record["logprob_sum"] < 0


def _seed(seed: int, prompt: int, number: int) -> int:
    """As a rollout at step 0 draws it."""
    from nemo_aligner.algorithms.rollouts import repeat_prompts

    passes = repeat_prompts([{"idx": torch.tensor([prompt])}], number + 1, seed, 0)
    return int(list(passes)[number]["sample_seeds"])


def test_micro_batches_and_more_responses_change_nothing(nemo, prompts, tmp_path):
    found = {}
    for size, each in ((1, 1), (3, 2), (8, 1)):
        out = tmp_path / f"{size}.jsonl"
        sizes = [f"micro_batch_size={size}", f"responses_per_prompt={each}"]
        main([nemo, "--prompts", prompts, "--out", str(out), *SHORT, *sizes])
        found[size] = [record["response_tokens"] for record in lines(out)[::each]]
    assert found[1] == found[3] == found[8]
    main([nemo, "--prompts", prompts, "--out", str(out), *SHORT, "model.seed=5"])
    assert [record["response_tokens"] for record in lines(out)] != found[1]


def test_chat_puts_prompts_into_the_template(model, nemo, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    main([nemo, "--prompts", prompts, "--out", str(out), "--system", "be", *SHORT])
    for record, text in zip(lines(out), PROMPTS, strict=True):
        wanted = f"<s>be;<u>{text};<a>"
        assert record["prompt"] == text
        assert model.tokenizer.ids_to_text(record["prompt_tokens"]) == wanted


CONVERSATIONS = [
    {"messages": [{"role": "user", "content": "the film"}], "answer": "bad"},
    {"prompt": [{"role": "user", "content": "a"}], "system": "be", "answer": "good"},
    {"conversations": [{"from": "human", "value": "a dull"}]},
]
TEXTS = [{"text": "the film"}, {"prompt": "a dull"}]


@pytest.mark.full
def test_prompts_are_read_as_ppo_reads_them(model, nemo, tmp_path, monkeypatch, error_of):
    """`RLHFDataset` is the oracle."""
    path, out, file = tmp_path / "p.jsonl", tmp_path / "out.jsonl", tmp_path / "t.jinja"
    file.write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    ends = []
    real = Policy.with_end_strings
    monkeypatch.setattr(Policy, "with_end_strings", lambda *a: ends.append(a[1]) or real(*a))
    eos = model.tokenizer.ids_to_tokens([model.tokenizer.eos_id])
    nemo_chat = {"chat": True, "chat_prompt_tokens": {"turn_start": "[", "end_of_turn": "]"}}
    for records, data, ended in (
        (CONVERSATIONS + TEXTS, {}, {()}),
        (TEXTS, {}, set()),
        (CONVERSATIONS + TEXTS[1:], {"chat_template": str(file)}, {tuple(eos)}),
        (CONVERSATIONS[:2], nemo_chat, {("[",)}),
    ):
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        flat = [f"model.data.{k}={v}" for k, v in data.items() if k != "chat_prompt_tokens"]
        tokens = data.get("chat_prompt_tokens", {})
        flat += [f"model.data.chat_prompt_tokens.{k}='{v}'" for k, v in tokens.items()]
        data = OmegaConf.merge(compose_settings("generate", []).model.data, data)
        wanted = [item["text"].tolist() for item in RLHFDataset([path], model.tokenizer, 48, data)]
        ends.clear()
        main([nemo, "--prompts", str(path), "--out", str(out), *SHORT, *flat])
        assert [line["prompt_tokens"] for line in lines(out)] == wanted
        assert set(ends) == ended
        decoded = list(map(model.tokenizer.ids_to_text, wanted))
        texts = [record.get("text", record.get("prompt")) for record in records]
        texts = [text if isinstance(text, str) else said for text, said in zip(texts, decoded)]
        assert [line["prompt"] for line in lines(out)] == texts
        if flat:  # a checkpoint that keeps the form needs no key for conversations
            with open_dict(model.cfg):
                model.cfg.tokenizer.conversations = asked_form(data)
            model.save_to(str(tmp_path / "kept.nemo"))
            with open_dict(model.cfg):
                del model.cfg.tokenizer.conversations
            path.write_text("".join(json.dumps(record) + "\n" for record in CONVERSATIONS[:2]))
            main([str(tmp_path / "kept.nemo"), "--prompts", str(path), "--out", str(out), *SHORT])
            assert [line["prompt_tokens"] for line in lines(out)] == wanted[:2]
            assert set(ends) == ended
    path.write_text(json.dumps({"messages": [{"role": "assistant", "content": "x"}]}))
    message = error_of(main, nemo, "--prompts", path, "--out", out, "trainer.devices=9")
    assert f"{path}, line 1: message 1, the last, is the assistant's" in message
    path.write_text(json.dumps({"messages": [{"role": "tool", "content": "x"}]}))
    message = error_of(main, nemo, "--prompts", path, "--out", out, *SHORT)
    assert f"{path}, prompt 1: the chat template refuses the conversation: no tools" in message


def test_a_job_generates_with_its_newest_checkpoint(
    tiny_tokenizer_dir, prompts, tmp_path, error_of
):
    cfg = tiny_config(tiny_tokenizer_dir, "llama")
    trained = MegatronGPTModel(cfg)
    callback = CheckpointCallback(
        tmp_path / "job", trained, *trained.setup_megatron_optimization(5), name="x"
    )
    callback.custom_save({"step": 2}, trainer_state={"step": 2})
    with torch.no_grad():
        for parameter in trained.model[0].parameters():
            parameter.mul_(1.5)
    newest = callback.custom_save({"step": 10}, trainer_state={"step": 10})
    trained.save_to(str(tmp_path / "same.nemo"))
    found = {}
    older = tmp_path / "job/checkpoints/checkpoint-step=2"
    places = {"nemo": tmp_path / "same.nemo", "job": tmp_path / "job", "newest": newest}
    places |= {"checkpoints": tmp_path / "job/checkpoints", "older": older}
    for name, path in places.items():
        out = tmp_path / f"{name}.jsonl"
        main([str(path), "--prompts", prompts, "--out", str(out), *SHORT])
        found[name] = [record["response_tokens"] for record in lines(out)]
    assert found["nemo"] == found["job"] == found["checkpoints"] == found["newest"]
    assert found["older"] != found["newest"]
    trained.save_to(str(tmp_path / "job/checkpoints/x.nemo"))
    for folder in (tmp_path / "job", tmp_path / "job/checkpoints"):  # of which jobs start from
        with pytest.raises(UserError, match="=.* is the folder of a job; name what") as refused:
            check_restore_path(folder)
        assert f": {newest.parent / 'x.nemo'} or {newest}." in str(refused.value)
    (older / "model_config.yaml").unlink()  # as older versions wrote them
    message = error_of(main, older, "--prompts", prompts, "--out", tmp_path / "x", *SHORT)
    assert "checkpoint of a training run without a model configuration" in message
    assert "name the .nemo that the run wrote" in message


# ---- streaming


@pytest.fixture
def tokenizers(tiny_tokenizer, tiny_sentencepiece_model):
    legacy = {"library": "sentencepiece", "model": tiny_sentencepiece_model}
    legacy["sentencepiece_legacy"] = True
    return {
        "huggingface": tiny_tokenizer,
        "sentencepiece": SentencePieceTokenizer(tiny_sentencepiece_model),
        "legacy": build_tokenizer(OmegaConf.create(legacy)),
        "bytes": ByteLevelTokenizer({"bos_token": "<bos>", "eos_token": "<eos>"}),
    }


@pytest.mark.parametrize("name", ["huggingface", "sentencepiece", "legacy", "bytes"])
def test_pieces_of_a_stream_join_to_the_text(name, tokenizers):
    tokenizer = tokenizers[name]
    text = "the film — a “joy” 日本語 🎬👩‍👩‍👧 naïve,  two spaces. the end"
    ids = tokenizer.text_to_ids(text)
    for tokens in (ids, [*ids, tokenizer.eos_id]):
        stream = TextStream(tokenizer)
        pieces = [stream.push(token) for token in tokens]
        assert sum(map(bool, pieces)) > 20  # it does not wait for the end
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces) + stream.finish() == response_text(tokenizer, tokens)
    assert "日本語 🎬" in response_text(tokenizer, ids)


def test_half_a_character_at_the_end_is_shown(tiny_tokenizer):
    stream = TextStream(tiny_tokenizer)
    ids = tiny_tokenizer.text_to_ids("a🎬")[:-1]
    assert "".join(stream.push(token) for token in ids) == "a"
    assert "a" + stream.finish() == tiny_tokenizer.ids_to_text(ids)


def test_a_text_that_changes_is_shown_to_its_end():
    class Cleaning:
        """Drops the space before a full stop, as some tokenizers of Hugging Face do."""

        eos_id = -1

        def ids_to_text(self, ids):
            return "".join(map(chr, ids)).replace(" .", ".")

    stream = TextStream(Cleaning())
    pieces = [stream.push(ord(character)) for character in "so ."]
    assert (pieces, stream.finish()) == (["s", "o", " ", ""], ".")


# ---- the terminal


def talk(monkeypatch, capsys, nemo, text, *words) -> tuple[str, str]:
    """What the command prints, and its messages."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    main([nemo, *words])
    ended = capsys.readouterr()
    return ended.out, ended.err


def reply(model, text: str, turn: int, **params) -> str:
    """What the policy says to a whole prompt at a turn of the conversation."""
    ids = model.tokenizer.text_to_ids(text)
    params = GenerationParams(max_length=9, min_length=1, **params)
    ids, _ = naive_generate(model, ids, _seed(1234, turn, 0), params, limit=48)
    return response_text(model.tokenizer, ids[len(model.tokenizer.text_to_ids(text)) :])


def test_a_conversation_grows_until_it_starts_anew(model, nemo, monkeypatch, capsys):
    printed, said = talk(
        monkeypatch, capsys, nemo, "hi\n\nso?\n/new\nhi\n/exit\nnever\n", "--chat", *SHORT
    )
    first = reply(model, "<u>hi;<a>", 0)
    second = reply(model, f"<u>hi;<a>{first};<u>so?;<a>", 1)
    third = reply(model, "<u>hi;<a>", 2)
    assert printed == f"{first}\n{second}\n{third}\n"
    assert "chat template" in said and "/new" in said
    assert first != third  # the same question, with another random stream


def test_plain_lines_are_prompts_of_their_own(model, nemo, monkeypatch, capsys):
    words = ("--plain", *SHORT, "sampling_params.use_greedy=True")
    printed, said = talk(monkeypatch, capsys, nemo, "the film\nthe film\n", *words)
    wanted = reply(model, "the film", 0, use_greedy=True)
    assert printed == f"{wanted}\n{wanted}\n"
    assert "each line is a prompt of its own" in said


def test_a_conversation_goes_on_after_a_prompt_that_is_too_long(nemo, monkeypatch, capsys):
    printed, said = talk(monkeypatch, capsys, nemo, f"{'x' * 60}\nhi\n", "--plain", *SHORT)
    assert "has 60 tokens: no room for a response within 48" in said
    assert printed


# ---- what users get wrong


@pytest.mark.full
def test_mistakes_are_one_message_each(nemo, prompts, tmp_path, error_of):
    out = tmp_path / "out.jsonl"
    both = ("--prompts", prompts, "--out", out)
    long, empty = tmp_path / "long.jsonl", tmp_path / "empty.jsonl"
    long.write_text('{"text": "a"}\n{"text": "' + "x" * 50 + '"}\n')
    empty.write_text("\n")
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "a"}\n{"response": "b"}\n')
    for words, message in (
        ((), "name the policy: nemo-aligner generate MODEL"),
        ((nemo, prompts), "one model is needed, not 2"),
        ((nemo, "--prompts", prompts), "--prompts and --out belong together"),
        ((nemo, "--plain", "--chat"), "not allowed with argument"),
        ((nemo, "--plain", "--system", "x"), "leave --plain out"),
        ((nemo, "--promts", prompts), "unrecognized arguments: --promts"),
        ((tmp_path / "no.nemo", *both), "no.nemo does not exist"),
        ((nemo, "--prompts", tmp_path / "no.jsonl", "--out", out), "no.jsonl does not exist"),
        ((nemo, "--prompts", empty, "--out", out), "empty.jsonl is empty"),
        ((nemo, "--prompts", broken, "--out", out), "broken.jsonl, line 2: field 'text' is miss"),
        ((nemo, *both, "sampling_params.temprature=1"), "did you mean sampling_params.temperatu"),
        ((nemo, *both, "sampling_params.top_p=2"), "sampling_params.top_p=2 must be above 0 and"),
        ((nemo, *both, "length_params.max_length=0"), "length_params.max_length=0 must be at"),
        ((nemo, *both, "length_params.max_length=48"), "leaves no room for a prompt"),
        ((nemo, *both, "micro_batch_size=0"), "micro_batch_size=0 must be at least 1"),
        ((nemo, *both, "trainer={"), "trainer={ trainer.accelerator=cpu cannot be read"),
        (
            (nemo, *both, "responses_per_prompt=2", "sampling_params.use_greedy=True"),
            "responses_per_prompt=2 responses to a prompt would be the same",
        ),
        ((nemo, *both, "sampling_params.add_BOS=True"), "the tokenizer has no bos token"),
        (
            (nemo, "--prompts", long, "--out", out),
            "1 of 2 prompts leave no room for a response within the 48 positions of the model; "
            "the first is prompt 2 with 50 tokens",
        ),
    ):
        assert message in error_of(main, *words, "trainer.accelerator=cpu"), words
    assert not out.exists()


def test_a_reward_model_cannot_generate(tiny_tokenizer_dir, prompts, tmp_path, error_of):
    path = tmp_path / "rm.nemo"
    MegatronGPTRewardModel(tiny_config(tiny_tokenizer_dir)).save_to(str(path))
    message = error_of(main, path, "--prompts", prompts, "--out", tmp_path / "out", *SHORT)
    assert "holds a MegatronGPTRewardModel, which gives rewards or values" in message


def test_a_folder_that_cannot_be_written(nemo, prompts, tmp_path, error_of):
    """It is found before the policy is loaded."""
    (tmp_path / "file").write_text("")
    for out, why in (
        (tmp_path / "file" / "new" / "out.jsonl", "file is no folder that can be written to"),
        (tmp_path, "it is a folder"),
    ):
        message = error_of(main, nemo, "--prompts", prompts, "--out", out, "trainer.devices=9")
        assert f"{out} cannot be written: {tmp_path / why if 'file' in why else why}" in message


def test_a_chat_needs_a_template(tiny_tokenizer, chat_tokenizer_dir):
    template = ChatTemplate(AutoTokenizer(chat_tokenizer_dir))
    assert chat_form({}, tiny_tokenizer) is None
    for form in (ChatForm(True), ChatForm(None, system="x")):
        assert form.resolve(template)
        with pytest.raises(UserError, match="the tokenizer has no chat template"):
            form.resolve(None)
    assert ChatForm(None).resolve(template) and not ChatForm(None).resolve(None)
    assert not ChatForm(False).resolve(template)
    with pytest.raises(UserError, match="chat template refuses the conversation: no tools"):
        template.prompt_tokens([{"role": "tool", "content": "x"}])


def test_words_of_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert all(map(is_setting, ("a=1", "a.b=", "++a=1", "+a.b_c=[1,2]", "a=b=c")))
    assert not any(map(is_setting, ("a.nemo", "./a=1", "/x/step=10", "--a=1", "")))
    (tmp_path / "step=10").mkdir()
    assert not is_setting("step=10")
    cfg = compose_settings("generate", ["+model.bias=False", "sampling_params.end_strings=[]"])
    assert cfg.model.bias is False and cfg.sampling_params.end_strings == []


# ---- files of responses


def test_files_of_responses_keep_everything(tmp_path):
    responses = [
        Response("p", "r 日本\n", 3, True, -1.25, [1, 2], [3, 4, 5], "300 tokens"),
        Response("p", "", columns={"answer": 4, "columns": ["x"]}),
    ]
    write_records(tmp_path / "r.jsonl", (response.line for response in responses))
    assert read_responses(tmp_path / "r.jsonl") == responses
    assert "日本" in (tmp_path / "r.jsonl").read_text()
    with (tmp_path / "r.jsonl").open("a") as file:
        file.write('{"prompt": "p", "response": "r", "length": "3"}\n')
    with pytest.raises(UserError, match="r.jsonl, line 3: field 'length' is '3'"):
        read_responses(tmp_path / "r.jsonl")


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("before")
    with pytest.raises(RuntimeError, match="stop"), replaced(path) as file:
        file.write("half")
        raise RuntimeError("stop")
    assert path.read_text() == "before"
    with replaced(path) as file:
        file.write("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode
