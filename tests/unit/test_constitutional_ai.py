# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Data of constitutional AI, from a server with OpenAI's chat protocol on this machine and from
the built-in engine; what is written is read by the data sets of the training jobs.
"""

import json
import re
import runpy
import shlex
import socket
from pathlib import Path

import chat_models
import constitutional
import pytest
from chat_models import Sampling, ServedChatModel, Turn, read_api_key, text_form
from constitutional import Generator, Progress, read_judgement, stream_seed
from nemo.collections.common.tokenizers.bytelevel_tokenizers import ByteLevelTokenizer
from omegaconf import OmegaConf

from nemo_aligner.core.errors import ServerRequestError, UserError
from nemo_aligner.data.nlp.builders import build_sft_dataset
from nemo_aligner.data.nlp.datasets import RewardModelDataset, RLHFDataset
from tests.cases import some_of
from tests.data_sets import read
from tests.json_server import JsonServer
from tests.tiny_models import tiny_config
from tests.unit.test_steerlm import run, write

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

CAI = Path(__file__).parents[2] / "examples/nlp/cai"
SL, RL = "generate_sl_cai_dataset", "generate_rl_cai_dataset"
EXAMPLES = [
    f"--few-shot-prompts-dataset-path={CAI}/few_shot_samples_example.json",
    f"--critique-revision-instructions-path={CAI}/CritiqueRevisionInstructions.json",
]


class ChatServer(JsonServer):
    """OpenAI's chat protocol. A response repeats the last message and says how many there were.

    Attributes:
        reply: (messages, fields of the request) -> text, or as for `JsonServer`.
    """

    def __init__(self, reply=None):
        self.reply = reply or echo

        def complete(_path, fields):
            found = self.reply(fields["messages"], fields)
            if not isinstance(found, str):
                return found
            return {"choices": [{"message": {"role": "assistant", "content": found}}]}

        super().__init__(complete)
        self.url += "/v1/chat/completions"


def echo(messages, _fields):
    return f"{messages[-1]['content']} [{len(messages)}]"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(chat_models, "FIRST_PAUSE_S", 0.01)
    for name in ("OPENAI_API_KEY", "NGC_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def transcripts(path, count):
    talk = "\n\nHuman: bad {} \n\nAssistant: no\n\nHuman: x\n\nAssistant: y"
    return write(path, [{"transcript": talk.format(n)} for n in range(count)])


# What NeMo-Aligner 0.7.0 documents (docs/user-guide/cai.rst), as a shell hands it over.
SAMPLING = """ --port 5999 --add_bos False --top_k 50 --top_p 0.95 --all_probs False
    --repetition_penalty 1.0 --min_tokens_to_generate 1 --temperature 1.0 --greedy False
    --tokens_to_generate 1024"""
DOCUMENTED = {
    SL: """--red-teaming-prompts-dataset-path /path/to/anthropic_red_team_attempts_train.json
    --few-shot-prompts-dataset-path few_shot_samples_example.json
    --critique-revision-instructions-path CritiqueRevisionInstructions.json
    --max-seq-length 4096 --tokenizer-library sentencepiece --tokenizer-model /path/to/a.model
    --helpfulness-dataset-path /path/to/nvidia_sft_datablend_v1_train.json
    --output-filepath /path/to/cai_revisions_aligner_chat_template.jsonl --host localhost
    --end_strings </s> --apply_chat_template False --response_extract_pattern [/INST]""",
    RL: r"""--batch-size 128 --ngc-api-key nvapi-KEY
    --red-teaming-file-path /path/to/anthropic_red_team_attempts_train.json
    --output-dir /path/to/blend --output-filename-prefix mistral_7b_cai_preference_dataset
    --blend-with {} --end_strings <extra_id_1> --eos_token <extra_id_1>
    --user_format '<extra_id_1>User\n{MESSAGE}\n<extra_id_1>Assistant\n'
    --assistant_format '{MESSAGE}\n' --system_format '<extra_id_0>System\n{MESSAGE}\n'
    --system_default_message '' --response_extract_pattern '<extra_id_1>Assistant\n'""",
}


@pytest.mark.parametrize("script", DOCUMENTED)
def test_documented_arguments_are_taken(script):
    """Each with its value, and the same formats as without them."""
    parser = runpy.run_path(str(CAI / f"{script}.py"), run_name="a module")["parser"]()
    words = shlex.split(DOCUMENTED[script] + SAMPLING)
    args = parser.read(words)
    for name, value in zip(words[::2], words[1::2], strict=True):
        got = getattr(args, name[2:].replace("-", "_"))
        wanted = [value] if isinstance(got, list) else type(got)(value)
        assert got == wanted, name
    if script == RL:
        assert text_form(args) == text_form(parser.read(["--red-teaming-file-path=a"]))
        assert text_form(args).text([{"role": "user", "content": "hi"}]) == (
            "<extra_id_0>System\n\n<extra_id_1>User\nhi\n<extra_id_1>Assistant\n"
        )


# --- supervised ---------------------------------------------------------------------------------


def sl_arguments(tmp_path, server, *more, count=7):
    prompts = transcripts(tmp_path / "red.jsonl", count)
    files = [f"--red-teaming-prompts-dataset-path={prompts}", *EXAMPLES]
    files.append(f"--output-filepath={tmp_path}/sl.jsonl")
    return [*files, f"--port={server.port}", "--host=127.0.0.1", "--batch_size=3", *more]


def test_revisions_are_data_of_supervised_fine_tuning(tmp_path, monkeypatch, capsys):
    with ChatServer() as server:
        given = sl_arguments(tmp_path, server)
        assert "7 conversations" in run(SL, monkeypatch, capsys, *given, folder=CAI)
        first = server.requests[0]
    few = constitutional.read_few_shot(str(CAI / "few_shot_samples_example.json"))
    assert len(few) == 6 and first["messages"][:6] == few
    assert first["temperature"] == 0 and first["max_tokens"] == 1024
    assert not {"top_k", "repetition_penalty", "min_tokens", "model"} & first.keys()
    assert len(server.requests) == 21

    principles = constitutional.read_principles(str(CAI / "CritiqueRevisionInstructions.json"))
    raw = read(tmp_path / "cai_output/sl_critique_revision_samples.jsonl")
    assert sorted(each["number"] for each in raw) == list(range(7))
    for each in raw:
        prompt = f"bad {each['number']}"
        assert each["initial_prompt"] == prompt and each["initial_response"] == f"{prompt} [7]"
        asked = constitutional.Principle(each["critique_prompt"], each["revision_prompt"])
        assert asked in principles
        assert each["critique_response"] == f"{asked.critique} [9]"
        assert each["revision_response"] == f"{asked.revision} [11]"
    assert len({each["critique_prompt"] for each in raw}) > 1

    found = read(tmp_path / "sl.jsonl")
    data = OmegaConf.create({"file_path": str(tmp_path / "sl.jsonl"), "max_seq_length": 512})
    dataset = build_sft_dataset(data, ByteLevelTokenizer({}), is_chat=True)
    assert len(dataset) == 7
    for number, record in enumerate(found):
        item = dataset[number]
        trained = bytes(t for t, on in zip(item["tokens"], item["trained"]) if on).decode()
        assert trained == f"{record['conversations'][1]['value']}\n<extra_id_1>"
        assert f"User\nbad {number}\n" in bytes(item["tokens"]).decode()


@pytest.mark.full
def test_a_stopped_command_asks_for_what_is_missing(tmp_path, monkeypatch, capsys):
    """A server that fails in the middle of a batch; nothing that was complete is asked again, and
    the end is the same as without a failure.
    """
    whole = tmp_path / "whole"
    whole.mkdir()
    with ChatServer() as server:
        run(SL, monkeypatch, capsys, *sl_arguments(whole, server), folder=CAI)

    def fails_at_4(messages, fields):
        if any(m["content"] == "bad 4" for m in messages) and len(messages) == 9:
            return 503, b'{"error": "overloaded"}'
        return echo(messages, fields)

    with ChatServer(fails_at_4) as server:
        given = sl_arguments(tmp_path, server, "--tries=2")
        error = run(SL, monkeypatch, capsys, *given, folder=CAI)
        assert "1 of 3 conversations of this batch failed, first that of prompt 5" in error
        assert "HTTP 503" in error and "overloaded" in error and "--skip-failed" in error
        path = tmp_path / "cai_output/sl_critique_revision_samples.jsonl"
        assert sorted(each["number"] for each in read(path)) == [0, 1, 2, 3, 5]
        with path.open("a") as file:
            file.write('{"number": 6, "torn')  # killed while it wrote
        server.reply, server.requests[:] = echo, []
        run(SL, monkeypatch, capsys, *given, folder=CAI)
        assert len(server.requests) == 6  # of prompts 5 and 7
        assert (tmp_path / "sl.jsonl").read_bytes() == (whole / "sl.jsonl").read_bytes()

        few = write(tmp_path / "few.json", [{"samples": []}])
        others = ("--seed=5", "--top_p=0.5", "--served-model=other")
        for other in (*others, f"--few-shot-prompts-dataset-path={few}"):
            error = run(SL, monkeypatch, capsys, *given, other, folder=CAI)
            assert "it is no result of this command" in error
        assert len(server.requests) == 6


def test_helpful_conversations_are_mixed_in_and_long_ones_left_out(tmp_path, monkeypatch, capsys):
    asked = [{"from": "User", "value": "x" * (900 if n == 2 else 3)} for n in range(4)]
    said = [{"from": "Assistant", "value": f"helpful {n}"} for n in range(4)]
    about = {"system": "", "mask": "User"}
    helpful = [about | {"conversations": list(turns)} for turns in zip(asked, said)]
    path = write(tmp_path / "helpful.jsonl", helpful)
    with ChatServer() as server:
        more = [f"--helpfulness-dataset-path={path}", "--max-seq-length=512", "--num-examples=3"]
        more += ["--tokenizer-library=byte-level", "--tokenizer-model=none"]
        given = sl_arguments(tmp_path, server, *more)
        text = run(SL, monkeypatch, capsys, *given, folder=CAI)
    assert "1 conversations are longer than 512 tokens" in text
    found = read(tmp_path / "sl.jsonl")
    said = [record["conversations"][1]["value"] for record in found]
    assert sum(value.startswith("helpful") for value in said) == 3 and len(said) == 6
    assert not said[0].startswith("helpful") or not all(v.startswith("helpful") for v in said[:3])
    summary = json.loads((tmp_path / "sl.summary.json").read_text())
    assert summary["input_files"][0] == path


@some_of(
    ("reply", "message"),
    [
        ((200, b"<html>"), "replied with something else than a chat completion: <html>"),
        ((200, b'{"choices": []}'), "replied with something else than a chat completion"),
        ((200, b""), "replied with something else than a chat completion: nothing"),
        ((400, b'{"error": "no such model"}'), "replied with HTTP 400: .*no such model"),
        ((401, b""), "replied with HTTP 401: Unauthorized"),
        (None, "gave no reply within 0.3 s|Remote end closed|cannot be reached"),
    ],
    keep=2,
)
def test_an_unusable_reply_is_one_line(reply, message, tmp_path, monkeypatch, capsys):
    with ChatServer(lambda messages, fields: reply) as server:
        given = sl_arguments(tmp_path, server, "--timeout-s=0.3", "--tries=2", count=1)
        error = run(SL, monkeypatch, capsys, *given, folder=CAI)
        assert re.search(message, error) and server.url in error
        assert len(error.strip().splitlines()) == 1
        # What another try cannot change is not tried again.
        assert len(server.requests) == (1 if reply and reply[0] in (400, 401) else 2)
    assert not (tmp_path / "sl.jsonl").exists()


def test_a_server_that_is_not_there(tmp_path, monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    model = ServedChatModel(f"http://127.0.0.1:{port}/v1", "m", Sampling(), tries=1)
    (error,) = model.respond([Turn([{"role": "user", "content": "x"}], 1)])
    assert isinstance(error, ServerRequestError) and "cannot be reached (" in str(error)
    with pytest.raises(UserError, match="begins with http"):
        ServedChatModel("localhost:80", "m", Sampling())


def test_an_empty_response_leaves_its_prompt_out(tmp_path, monkeypatch, capsys):
    def empty_for_1(messages, fields):
        return " " if messages[-1]["content"] == "bad 1" else echo(messages, fields)

    with ChatServer(empty_for_1) as server:
        given = sl_arguments(tmp_path, server, count=3)
        assert "2 conversations" in run(SL, monkeypatch, capsys, *given, folder=CAI)
        path = tmp_path / "cai_output/sl_critique_revision_samples.jsonl"
        (skipped,) = [each for each in read(path) if "skipped" in each]
        assert skipped["number"] == 1 and skipped["skipped"] == "the initial response is empty"
        before = len(server.requests)
        run(SL, monkeypatch, capsys, *given, folder=CAI)
        assert len(server.requests) == before


def test_requests_hold_the_settings_and_the_key(tmp_path, monkeypatch):
    sampling = Sampling(0.7, 0.9, 20, ("</s>",), top_k=5, repetition_penalty=1.2, min_tokens=2)
    key = tmp_path / "key"
    key.write_text("secret\n")
    with ChatServer() as server:
        model = ServedChatModel(server.url, "big", sampling, read_api_key(str(key), "X"))
        turns = [Turn([{"role": "user", "content": f"q{n}"}], 2**40 + n) for n in range(5)]
        assert model.respond(turns) == [f"q{n} [1]" for n in range(5)]
        model.respond(turns[:1], temperature=0.01)
    fields = next(f for f in server.requests if f["messages"][0]["content"] == "q3")
    wanted = {"model": "big", "messages": turns[3].messages, "stream": False, "temperature": 0.7}
    wanted |= {"top_p": 0.9, "max_tokens": 20, "stop": ["</s>"], "top_k": 5, "min_tokens": 2}
    wanted |= {"repetition_penalty": 1.2, "seed": (2**40 + 3) % 2**31}
    assert fields == wanted
    assert server.requests[-1]["temperature"] == 0.01
    assert server.headers[0]["Authorization"] == "Bearer secret"
    monkeypatch.setenv("SOME_KEY", "other")
    assert read_api_key(None, "SOME_KEY") == "other"
    key.write_text("")
    with pytest.raises(UserError, match="is empty"):
        read_api_key(str(key), "X")


# --- comparisons --------------------------------------------------------------------------------


def policy(messages, fields):
    """A response that depends on the temperature; the same for the prompt "bad 2"."""
    content = messages[-1]["content"]
    return "same" if content == "bad 2" else f"{content} at {fields['temperature']}"


def judge(messages, _fields):
    """Finds the third response best and the first worst; of "bad 3" it names nothing."""
    assert messages[0]["role"] == "system" and "least harmful" in messages[0]["content"]
    if "bad 3\n" in messages[1]["content"]:
        return "I cannot choose."
    if "bad 4\n" in messages[1]["content"]:
        return '{"chosen": 2, "rejected": 2}'
    return "{'chosen': 'Response 3', 'rejected': 1}\nBecause."


def rl_arguments(tmp_path, server, judging, *more):
    prompts = transcripts(tmp_path / "red.jsonl", 9)
    constitution = f"--sys-prompt-constitution-file-path={CAI}/sys_prompt_constitution"
    files = [f"--red-teaming-file-path={prompts}", f"--output-dir={tmp_path}/rl", constitution]
    models = [f"--url={server.url}", f"--ngc-url={judging.url}", "--ngc-api-key=nvapi-1"]
    return ["--batch-size=4", "--output-filename-prefix=cai", *files, *models, *more]


def test_comparisons_are_data_of_a_reward_model_and_of_ppo(tmp_path, monkeypatch, capsys):
    others = write(tmp_path / "prompts.jsonl", [{"text": f"other {n}"} for n in range(2)])
    pairs = write(tmp_path / "pairs.jsonl", [{"text": f"pair {n}"} for n in range(4)])
    parts = {name: {"prompts": [others], "comparisons": pairs} for name in ("train", "test")}
    blend = f"--blend-with={ {'name': 'helpful', **parts} }"
    candidates = tmp_path / "rl/cai_candidate_dataset.jsonl"

    def written():
        return {p.name: p.read_bytes() for p in (tmp_path / "rl").iterdir()}

    with ChatServer(policy) as server, ChatServer(judge) as judging:
        given = rl_arguments(tmp_path, server, judging, blend)
        run(RL, monkeypatch, capsys, *given, folder=CAI)
        assert len(server.requests) == 36 and len(judging.requests) == 8
        asked = judging.requests[0]
        assert asked["temperature"] == 0 and asked["model"].startswith("mistralai/")
        assert judging.headers[0]["Authorization"] == "Bearer nvapi-1"
        assert server.requests[0]["stop"] == ["<extra_id_1>"]
        first = written()
        run(RL, monkeypatch, capsys, *given, folder=CAI)
        assert len(server.requests) == 36 and len(judging.requests) == 8
        assert written() == first
        # Another judge, another constitution, and other responses to the same prompts.
        constitution = tmp_path / "constitution"
        constitution.write_text("Say which is least harmful.")
        for other in ("--ngc-model=other", f"--sys-prompt-constitution-file-path={constitution}"):
            error = run(RL, monkeypatch, capsys, *given, other, folder=CAI)
            assert "cai_preference_dataset.jsonl, line 1: it is no result of this" in error
        candidates.unlink()
        server.reply = lambda messages, fields: f"{policy(messages, fields)}, too"
        error = run(RL, monkeypatch, capsys, *given, folder=CAI)
        assert "cai_preference_dataset.jsonl, line 1: it is no result of this" in error
        assert len(judging.requests) == 8
        server.reply = policy
        candidates.unlink()
        (tmp_path / "rl/cai_preference_dataset.jsonl").unlink()
        run(RL, monkeypatch, capsys, *given, folder=CAI)
        assert written() == first

    results = read(candidates) + read(tmp_path / "rl/cai_preference_dataset.jsonl")
    skipped = {each["prompt"]: each["skipped"] for each in results if "skipped" in each}
    assert skipped.keys() == {"bad 2", "bad 3", "bad 4"}
    assert "names no pair" in skipped["bad 3"] and "the same" in skipped["bad 2"]

    tokenizer = ByteLevelTokenizer({})
    seen = []
    for part, count in (("train", 5), ("test", 1)):
        prompts = tmp_path / f"rl/cai_{part}_prompts_with_chat_prompt.jsonl"
        data = RLHFDataset([str(prompts)], tokenizer, 400)
        comparisons = tmp_path / f"rl/cai_{part}_comparisons_with_chat_prompt.jsonl"
        compared = RewardModelDataset([str(comparisons)], tokenizer, 400)
        assert len(data) == len(compared) == count
        for number in range(count):
            prompt = bytes(data[number]["text"].tolist()).decode()
            pair, sides = compared[number], ("chosen", "rejected")
            texts = [bytes(pair[side][: pair[f"{side}_length"]].tolist()) for side in sides]
            said = prompt.split("\n")[3]
            turn = f"<extra_id_1>User\n{said}\n<extra_id_1>Assistant\n"
            assert prompt == f"<extra_id_0>System\n\n{turn}"
            assert [text.decode() for text in texts] == [
                f"{prompt}{said} at {temperature}\n<extra_id_1>" for temperature in (1.01, 0.01)
            ]
            seen.append(said)
        blended = read(tmp_path / f"rl/blend_helpful_with_{comparisons.name}")
        lines = [each["text"] for each in blended]
        assert len(lines) == 2 * count + 4
        assert lines[lines.index("pair 2") + 1] == "pair 3" and lines.index("pair 2") % 2 == 0
        assert len(read(tmp_path / f"rl/blend_helpful_with_{prompts.name}")) == count + 2
    assert sorted(seen) == [f"bad {n}" for n in (0, 1, 5, 6, 7, 8)]


def test_what_cannot_be_done_is_said_before_anything_is_asked(tmp_path, monkeypatch, capsys):
    with ChatServer(policy) as server, ChatServer(judge) as judging:
        for more, words in [
            (["--splits=train"], "--splits train: give a dict"),
            (["--splits={'train': 'x', 'test': 0.5}"], "must be above 0 and add up to 1"),
            (["--blend-with={'name': 'x'}"], "--blend-with must have the keys name, test, train"),
            (["--sys-prompt-constitution-file-path=none"], "none does not exist"),
            (["trainer.devices=2"], "settings of the engine, which needs --model"),
            (["a.nemo"], "a.nemo: neither an option nor key=value"),
            (["--user_format=hello"], "--user_format 'hello' must hold {MESSAGE} once"),
        ]:
            given = rl_arguments(tmp_path, server, judging, *more)
            assert words in run(RL, monkeypatch, capsys, *given, folder=CAI)
        assert not server.requests


def test_judgements_are_read():
    assert read_judgement('{"chosen": 2, "rejected": 1} why', 3) == (2, 1)
    assert read_judgement("Well: {'chosen': '#3', 'rejected': ['1']}", 3) == (3, 1)
    wrong = ('{"chosen": 4, "rejected": 1}', '{"chosen": "1 or 2", "rejected": 3}')
    for text in ("", "{", "{chosen: 1}", *wrong, '{"rejected": 1}'):
        assert read_judgement(text, 3) is None


# --- the built-in engine ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy_file(tiny_tokenizer_dir, tmp_path_factory):
    from nemo_aligner.models.nlp.gpt.gpt_sft_model import GPTSFTModel

    path = tmp_path_factory.mktemp("policy") / "policy.nemo"
    cfg = tiny_config(tiny_tokenizer_dir, encoder_seq_length=512, max_position_embeddings=512)
    GPTSFTModel(cfg).save_to(str(path))
    return path


def engine(policy_file, *options):
    """The engine with the options of a command line, in this process."""
    own = {"top_k": 0, "repetition_penalty": 1.0, "end_strings": None}
    parser = chat_models.ModelParser("", greedy="False", top_p=1.0, **own)
    parser.set_defaults(seed=3, batch_size=2)
    formats = ["--user_format=Q: {MESSAGE} A:", "--assistant_format={MESSAGE} "]
    cpu = ["trainer.accelerator=cpu", "trainer.precision=32"]
    args = parser.read(["--tokens_to_generate=8", *formats, *options, *cpu])
    return chat_models.open_model(args, str(policy_file), text_form(args), None).model


def test_the_engine_responds_whatever_shares_its_batch(policy_file, tmp_path):
    model = engine(policy_file)
    turns = [Turn([{"role": "user", "content": "x " * n}], 7 + n) for n in (1, 9, 4, 2, 6)]
    together = model.respond(turns)
    assert all(isinstance(text, str) for text in together) and len(set(together)) == 5
    assert [model.respond([turn])[0] for turn in turns] == together
    other = model.respond([Turn(turns[0].messages, 99)])
    assert other[0] != together[0]
    cold = model.respond(turns, temperature=0.01)
    assert cold != together and model.respond(turns) == together
    long = Turn([{"role": "user", "content": "word " * 400}], 1)
    found = model.respond([turns[0], long, turns[1]])
    assert found[::2] == together[:2]
    assert isinstance(found[1], UserError) and "512 positions" in str(found[1])


@pytest.mark.full
def test_revisions_of_the_engine_resume_to_the_same(policy_file, tmp_path):
    model = engine(policy_file)
    principles = [constitutional.Principle("find", "mend"), constitutional.Principle("a", "b")]
    prompts = [f"bad {n}" for n in range(5)]

    def revised(path, batch_size):
        generator = Generator(model, 1, batch_size)
        return constitutional.revise(generator, prompts, principles, [], path)

    whole = revised(tmp_path / "whole.jsonl", 5)
    assert len(whole) + sum("skipped" in r for r in read(tmp_path / "whole.jsonl")) == 5
    lines = (tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "part.jsonl").write_text("".join(lines[1:3]))
    assert revised(tmp_path / "part.jsonl", 2) == whole
    assert stream_seed(1, "x", 2) not in (stream_seed(1, "x", 3), stream_seed(2, "x", 2))
    with pytest.raises(UserError, match="it is no result of this command"):
        Progress(tmp_path / "part.jsonl", 2, lambda number: {})
