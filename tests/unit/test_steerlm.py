# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Data of SteerLM: labels, texts for a regression reward model, data sets in its form, and
annotations by a served model, here a socket that rates texts by their length.

The real server is in tests/functional/test_steerlm_scripts.py.
"""

import gzip
import json
import runpy
import sys
import threading
from functools import partial
from pathlib import Path

import annotation
import labels
import preprocess_openassistant_data
import process_to_regression_format
import pytest
from annotation import AttributeModel, annotate
from nemo.collections.common.tokenizers.bytelevel_tokenizers import ByteLevelTokenizer

from nemo_aligner.core.errors import ServerRequestError, UserError
from nemo_aligner.data.nlp import steerlm
from nemo_aligner.data.nlp.datasets import LabelledPairDataset, RegressionRewardModelDataset
from nemo_aligner.data.nlp.records import Records
from nemo_aligner.servers import schema
from nemo_aligner.servers.fleet import ServerUnreachableError
from nemo_aligner.servers.served_model import ServerMismatchError
from nemo_aligner.synthetic import check_conversation
from tests.data_sets import read
from tests.patience import patience
from tests.scripted_server import ScriptedServer, answer, http, triton_config

pytestmark = pytest.mark.timeout(120)

SCRIPTS = Path(__file__).parents[2] / "examples/nlp/data/steerlm"
HEAD = (
    "<extra_id_0>System\nA chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions.\n"
)


def turn(speaker, value, label=None):
    return {"from": speaker, "value": value, "label": label}


def conversation(number=0, **fields):
    """Two responses, of lengths that depend on the number."""
    first = turn("Assistant", "a" * (1 + number % 4), "quality:1")
    second = turn("Assistant", "b" * (2 + number % 3))
    turns = [turn("User", f"hello {number}"), first, turn("User", "more"), second]
    return {"conversations": turns, "mask": "User", **fields}


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def run(script, monkeypatch, capsys, *arguments, folder=SCRIPTS):
    """A script as a command; its output, or its error."""
    monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
    try:
        runpy.run_path(str(folder / f"{script}.py"), run_name="__main__")
    except SystemExit as error:
        assert error.code in (1, 2)  # 1: of a server
        message = capsys.readouterr().err
        assert message.count("ERROR: ") == 1
        return message
    return capsys.readouterr().out


# --- labels and texts ---------------------------------------------------------------------------


def test_labels_are_texts_and_numbers():
    assert labels.encode_label({"quality": 4, "humor": 0}) == "quality:4,humor:0"
    names = ("quality", "humor")
    read = process_to_regression_format.parse_label("humor:0, quality:3.5", names)
    assert read == {"humor": 0.0, "quality": 3.5}
    assert labels.rounded_label([4.6, -0.2], names) == "quality:4,humor:0"
    assert labels.rounded_label([1.49, 2.51], names) == "quality:1,humor:3"
    how = "is not one of attributes: write name:number"
    wrong = dict.fromkeys(("quality", "quality:high", "quality:nan", ""), how)
    wrong |= {"wit:3": "has the attribute 'wit', which is none of quality, humor"}
    for text, message in wrong.items():
        with pytest.raises(UserError, match=message):
            process_to_regression_format.parse_label(text, names)
    assert labels.read_attributes("a, b") == ("a", "b")
    for text in ("a,,b", "a,a", ""):
        with pytest.raises(UserError, match="different names"):
            labels.read_attributes(text)


def test_the_text_of_a_response_ends_where_its_label_would_begin():
    turns = [turn("Human", "hello", "quality:1"), turn("Bot", "first", "quality:2,humor:1")]
    turns += [turn("Human", "more"), turn("Bot", "second", "verbosity:4")]
    record = {"conversations": turns, "mask": "Human"}
    begin = "<extra_id_1>User\nhello\n<extra_id_1>Assistant\nfirst\n"
    whole = begin + "<extra_id_1>User\nmore\n<extra_id_1>Assistant\nsecond\n"
    expected = [(1, f"{HEAD}{begin}<extra_id_2>"), (3, f"{HEAD}{whole}<extra_id_2>")]
    assert steerlm.scored_turns(record) == expected
    for system in ("Be kind.", ""):
        text = steerlm.scored_turns({**record, "system": system})[0][1]
        assert text.startswith(f"<extra_id_0>System\n{system}\n<extra_id_1>User\n")
    found = process_to_regression_format.regression_records(record)
    assert [each["text"] for each in found] == [text for _, text in expected]
    none = -100.0
    assert found[0]["label"] == [2.0, none, 1.0, none, none, none, none, none, none]
    assert found[1]["label"] == [none] * 8 + [4.0]
    with pytest.raises(UserError, match="no response: all speakers behind the first turn are"):
        steerlm.scored_turns({"conversations": [turn("Bot", "x"), turn("User", "y")]})


# --- data sets ----------------------------------------------------------------------------------


def message(text, *replies, role="prompter", **labels):
    fields = {"labels": {name: {"value": value, "count": 3} for name, value in labels.items()}}
    return {"text": text, "role": role, "replies": list(replies), **(fields if labels else {})}


BYE = message("bye", quality=1.0)
HI = message("hi", BYE, role="assistant", quality=0.75, humor=0.1)
TREE = {"prompt": message("hello", HI, message("what", role="assistant"), quality=0.5)}


def test_conversations_of_open_assistant(tmp_path, monkeypatch, capsys):
    """Every path through a tree is a conversation; labels are those of responses."""
    user = turn("User", "hello")
    rated = turn("Assistant", "hi", "quality:3,humor:0")
    records = preprocess_openassistant_data.open_assistant_records(TREE)
    assert [record["conversations"] for record in records] == [
        [user, rated, turn("User", "bye")],
        [user, {"from": "Assistant", "value": "what"}],
    ]
    assert {record["type"] for record in records} == {"VALUE_TO_TEXT"}
    assert preprocess_openassistant_data.open_assistant_records({"prompt": message("alone")}) == []

    trees = [{"prompt": message(f"p{n}", message("r", role="assistant"))} for n in range(40)]
    folder = tmp_path / "oasst"
    folder.mkdir()
    with gzip.open(folder / "2023-04-12_oasst_all.trees.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(tree) + "\n" for tree in trees)
    script = "preprocess_openassistant_data"
    out = run(script, monkeypatch, capsys, "-dir", folder)
    assert "38 conversations" in out and "2 conversations" in out
    parts = [read(folder / f"{name}.jsonl") for name in ("train", "val")]
    prompts = [[each["conversations"][0]["value"] for each in part] for part in parts]
    assert sorted(prompts[0] + prompts[1]) == sorted(f"p{n}" for n in range(40))
    assert prompts[0] != sorted(prompts[0], key=lambda text: int(text[1:]))  # shuffled
    before = (folder / "train.jsonl").read_bytes()
    run(script, monkeypatch, capsys, f"--output_directory={folder}")
    assert (folder / "train.jsonl").read_bytes() == before

    with gzip.open(folder / "2023-04-12_oasst_all.trees.jsonl.gz", "at") as file:
        file.write(json.dumps({"prompt": message("x", role="system")}) + "\n")
    error = run(script, monkeypatch, capsys, "-dir", folder)
    assert "line 41" in error and "no message tree of OpenAssistant" in error


def test_conversations_of_help_steer(tmp_path, monkeypatch, capsys):
    names = steerlm.HELPSTEER_ATTRIBUTES
    rated = [{name: n % 5 for name in names} for n in range(4)]
    rows = [{"prompt": f"p{n}", "response": "r", **each} for n, each in enumerate(rated)]
    (tmp_path / "hs/preference").mkdir(parents=True)
    write(tmp_path / "hs/train.jsonl", rows)
    write(tmp_path / "hs/validation.jsonl", rows[:1])
    out = tmp_path / "out"
    given = ["-dir", out, "--dataset", tmp_path / "hs"]
    run("preprocess_helpsteer_data", monkeypatch, capsys, *given)
    found = read(out / "train.jsonl")
    label = "helpfulness:3,correctness:3,coherence:3,complexity:3,verbosity:3"
    assert found[3]["conversations"] == [turn("User", "p3"), turn("Assistant", "r", label)]
    assert len(found) == 4 and len(read(out / "val.jsonl")) == 1
    run("preprocess_helpsteer2_data", monkeypatch, capsys, *given, "--only_helpfulness")
    assert read(out / "train.jsonl")[2]["conversations"][1]["label"] == "helpfulness:2"

    same = {"prompt": "p", "response_1": "one", "response_2": "two"}
    strengths = ("train", -2), ("validation", 1), ("train", 3)
    pairs = [same | {"split": part, "preference_strength": much} for part, much in strengths]
    write(tmp_path / "hs/preference/train.jsonl", pairs)
    run("preprocess_helpsteer2_data", monkeypatch, capsys, *given, "-pref")
    found = read(out / "train.jsonl")
    assert [each["conversations"][1]["value"] for each in found] == ["one", "two"] * 2
    regression = tmp_path / "pairs.jsonl"
    files = ["--input-file", out / "train.jsonl", "--output-file", regression]
    run("process_to_regression_format", monkeypatch, capsys, *files)
    data = LabelledPairDataset([str(regression)], ByteLevelTokenizer({}), 400)
    assert len(data) == 2

    (tmp_path / "bad").mkdir()
    for name in ("train", "validation"):
        write(tmp_path / f"bad/{name}.jsonl", [{"prompt": "p", "response": "r", "wit": 1}])
    for folder, words in (
        ("bad", "train data, row 1: all of helpfulness"),
        ("nothing", "cannot be loaded"),
    ):
        given[-1] = tmp_path / folder
        error = run("preprocess_helpsteer_data", monkeypatch, capsys, *given)
        assert words in error
    assert "--dataset" in error


def test_labelled_texts_are_data_of_a_regression_reward_model(tmp_path, monkeypatch, capsys):
    path = write(tmp_path / "c.jsonl", [conversation(n) for n in range(3)])
    out = tmp_path / "reg.jsonl"
    files = ["--input-file", path, "--output-file", out]
    said = run("process_to_regression_format", monkeypatch, capsys, *files)
    assert "3 labelled texts of 3 conversations" in said
    tokenizer = ByteLevelTokenizer({})
    data = RegressionRewardModelDataset([str(out)], tokenizer, 400, 9)
    text = bytes(data[2]["inputs"][: data[2]["lengths"]].tolist()).decode()
    assert text.endswith("<extra_id_1>User\nhello 2\n<extra_id_1>Assistant\naaa\n<extra_id_2>")
    assert data[2]["labels"].tolist() == [1.0] + [-100.0] * 8
    for bad, words in [
        ({"conversations": [turn("User", "x"), turn("Assistant", "y", "wit:1")]}, "'wit'"),
        ({"messages": []}, "field 'conversations' is missing"),
    ]:
        write(tmp_path / "c.jsonl", [conversation(), bad])
        error = run("process_to_regression_format", monkeypatch, capsys, *files)
        assert "c.jsonl, line 2" in error and words in error
    write(tmp_path / "c.jsonl", [{"conversations": [turn("User", "x"), turn("Assistant", "y")]}])
    error = run("process_to_regression_format", monkeypatch, capsys, *files)
    assert "no response has a label" in error


# --- annotation ---------------------------------------------------------------------------------

ATTRIBUTES = ("length", "letters")


class RatingServer(ScriptedServer):
    """Rates a text by its characters behind the last turn's name: their number less 2, and 1.6
    times that of the letter b. `refuses`: part of the texts that it takes for no sample.
    """

    def __init__(self, refuses=None, outputs=2):
        super().__init__()
        self.config = triton_config(schema.reward_model_endpoint(attributes=outputs))
        self.refuses, self.outputs, self.texts = refuses, outputs, []
        self.lock = threading.Lock()

    def reply(self, index, body, start):
        (given,) = json.loads(body[:start])["inputs"]
        texts, data = [], body[start:]
        for _ in range(given["shape"][0]):
            length = int.from_bytes(data[:4], "little")
            texts.append(data[4 : 4 + length].decode())
            data = data[4 + length :]
        with self.lock:
            self.texts.append(texts)
        if self.refuses and any(self.refuses in text for text in texts):
            return http({"error": "UserError: sentence 0 is too long."}, 400)
        return answer([ratings(text)[: self.outputs] for text in texts])


def ratings(text):
    said = text.rpartition("Assistant\n")[2].removesuffix("\n<extra_id_2>")
    return len(said) - 2.0, 1.6 * said.count("b")


def client(server):
    return AttributeModel("127.0.0.1", server.port, "reward_model", patience(20), patience(20))


def annotated(path, out, server, turns_per_request=4):
    records = Records([path], [], check_conversation)
    return annotate(records, out, ATTRIBUTES, lambda: client(server), turns_per_request)


def check_labels(out, given):
    """Against labels by hand."""
    letters = [0, 2, 3, 4, 4]  # of so many times b
    for original, found in zip(given, read(out), strict=True):
        assert found.pop("type") == "VALUE_TO_TEXT"
        wanted = json.loads(json.dumps(original))
        for said in wanted["conversations"]:
            text, is_response = said["value"], said["from"] == "Assistant"
            label = f"length:{max(len(text) - 2, 0)},letters:{letters[text.count('b')]}"
            said["label"] = label if is_response else None
        assert found["conversations"] == wanted["conversations"]


def test_a_stopped_annotation_goes_on_where_it_ended(tmp_path):
    given = [conversation(n) for n in range(11)]
    path, out = write(tmp_path / "in.jsonl", given), tmp_path / "out.jsonl"
    with RatingServer() as server:
        assert annotated(path, out, server) == 11
        whole = out.read_bytes()
        check_labels(out, given)
        written = whole.splitlines(keepends=True)
        out.write_bytes(b"".join(written[:4]) + written[4][:30])  # killed while it wrote
        server.texts.clear()
        assert annotated(path, out, server) == 7
        assert out.read_bytes() == whole
        asked = [text for texts in server.texts for text in texts]  # in any order
        assert [any(f"hello {n}" in text for text in asked) for n in (3, 4)] == [False, True]
        assert annotated(path, out, server) == 0  # nothing is left to ask
        assert max(map(len, server.texts)) == 4

        # Another file than the input's, with changed text, or with more lines.
        for bad in (b'{"x": 1}\n', whole.replace(b"hello 0", b"hello 9"), whole + written[0]):
            out.write_bytes(bad)
            with pytest.raises(UserError, match="it is not conversation"):
                annotated(path, out, server)


def test_a_refused_conversation_is_named_and_those_before_it_are_kept(tmp_path):
    given = [conversation(n) for n in range(9)]
    path, out = write(tmp_path / "in.jsonl", given), tmp_path / "out.jsonl"
    with RatingServer(refuses="hello 5") as server:
        with pytest.raises(ServerRequestError, match=r"conversation 6 of .*in.jsonl.*too long"):
            annotated(path, out, server)
        check_labels(out, given[:5])
        server.refuses = None
        assert annotated(path, out, server) == 4
        check_labels(out, given)


def test_a_server_that_cannot_be_used_is_one_error(tmp_path, monkeypatch):
    path, out = write(tmp_path / "in.jsonl", [conversation()]), tmp_path / "out.jsonl"
    said = r"gives 1 number.*2 attributes \(length, letters\)"
    with RatingServer(outputs=1) as server, pytest.raises(UserError, match=said):
        annotated(path, out, server)
    assert not out.exists()
    with pytest.raises(ServerUnreachableError, match="attribute_annotate"):
        model = partial(AttributeModel, "127.0.0.1", server.port, "reward_model", 0.5, 1.0)
        annotate(Records([path], [], check_conversation), out, ATTRIBUTES, model, 4)


def test_a_client_of_rewards_refuses_a_server_of_attributes():
    from nemo_aligner.config.server_rules import RewardModelSpec
    from nemo_aligner.servers.fleet import Fleet

    with RatingServer() as server:
        spec = RewardModelSpec(None, "reward_model", (("127.0.0.1", server.port),), 1.0, "rm")
        fleet = Fleet(spec, schema.reward_model_endpoint(), patience(20), patience(20))
        with pytest.raises(ServerMismatchError, match="gives 2 attributes.*merge_attributes=True"):
            fleet.wait_until_ready(patience(20))
        fleet.close()


def test_the_command_takes_the_arguments_of_nemo_aligner(tmp_path, monkeypatch, capsys):
    given = [conversation(n) for n in range(3)]
    path, out = write(tmp_path / "in.jsonl", given), tmp_path / "out.jsonl"
    with RatingServer() as server:
        words = [f"--input-file={path}", f"--output-file={out}", f"--port={server.port}"]
        words += ["--host=127.0.0.1", "--model_name=reward_model", "--attributes=length,letters"]
        text = run("attribute_annotate", monkeypatch, capsys, *words)
    assert "3 of 3 conversations labelled" in text
    check_labels(out, given)
    assert annotation.REQUESTS_IN_FLIGHT > 1
