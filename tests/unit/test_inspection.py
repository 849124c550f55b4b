# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m nemo_aligner.data inspect` in this process, and every record and command of
docs/data.md through it.
"""

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from omegaconf import OmegaConf

from nemo_aligner.config.defaults import complete_config
from nemo_aligner.config.rules import PREFIX_DATA_JOBS
from nemo_aligner.data.nlp.file_dataset import Part
from nemo_aligner.data.nlp.prompts import PromptColumns
from nemo_aligner.data.nlp.topk_logits import TopKExample, to_line
from nemo_aligner.generate.settings import compose_settings, is_setting
from nemo_aligner.inspection import main
from nemo_aligner.inspection.findings import (
    ON_POLICY,
    histogram,
    look,
    open_job,
    pieces,
    read_samples,
)
from nemo_aligner.launch.job_entry import check_inputs
from nemo_aligner.models.nlp.gpt.tokenizers import build_tokenizer
from tests.cases import some_of
from tests.chat_forms import FAMILIES, write_tokenizer

pytestmark = pytest.mark.usefixtures("log_level")

PAGE = Path(__file__).parents[2] / "docs/data.md"
TEMPLATE = "model.data.chat_template=tokenizer"
WEIGHTS = {"log(P(a|x,y))": -1.0, "log(P(y|x))": -5.0, "log(Q(y|a,x))": -4.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """An unpacked .nemo without weights, which nothing here reads: its tokenizer is Qwen's."""
    folder = tmp_path_factory.mktemp("inspection") / "model.nemo"
    folder.mkdir()
    write_tokenizer(folder / "tokenizer", FAMILIES["qwen2_5"])
    cfg = {"tokenizer": {"library": "huggingface", "type": "nemo:tokenizer"}}
    cfg |= {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    OmegaConf.save(OmegaConf.create(cfg), folder / "model_config.yaml")
    return str(folder)


def trained_with(model: str, folder: Path, **keys) -> str:
    """A copy of `model` that was trained with these keys."""
    trained = shutil.copytree(model, folder / "trained.nemo")
    cfg = OmegaConf.load(trained / "model_config.yaml")
    OmegaConf.save(OmegaConf.merge(cfg, keys), trained / "model_config.yaml")
    return str(trained)


def tokenizer_of(model: str):
    cfg = {"library": "huggingface", "type": str(Path(model) / "tokenizer")}
    return build_tokenizer(OmegaConf.create(cfg))


def chat(*texts):
    roles = ("user", "assistant") * len(texts)
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def shown(capsys, *words) -> str:
    main(["inspect", *words])
    return capsys.readouterr().out


# ------------------------------------------------------------------------------------------ text


def test_conversations_for_sft(model, write, tmp_path, capsys):
    path = write(
        {"messages": chat("hello", "the film\nwas a joy")},
        {"messages": chat("hello", "the film\nwas a joy")},
        {"messages": chat("a plot", " ", "bye", "It is 4.")},
        {"messages": chat("the <|im_end|> film", "2 " * 200)},
        {"messages": chat("the film " * 60, "4")},
    )
    page = tmp_path / "out" / "page.html"
    settings = [TEMPLATE, "model.data.train_ds.max_seq_length=100"]
    out = shown(capsys, path, "--model", model, *settings, "--html", str(page))
    assert f"gpt_sft reads {path}" in out and "5 samples, of which it uses 5" in out
    sample = out.split("--- sample 1: ")[1].split("\n\n")[0]
    assert sample == (
        f"{path}, line 1\nexample (44 tokens, 13 trained on)\n"
        "<|im_start|>system⏎\nYou are a helpful model.<|im_end|>⏎\n<|im_start|>user⏎\nhello"
        "<|im_end|>⏎\n<|im_start|>assistant⏎\n[[the film⏎\nwas a joy]][[<|im_end|>]]"
    ).replace("44 tokens, 13", re.search(r"\d+ tokens, \d+", sample).group())
    assert "--- sample 3" in out and "--- sample 4" not in out
    longer = "longer than model.data.train_ds.max_seq_length=100 tokens"
    findings = {
        "with an empty response": "line 3",
        "there more than once, to the token": f"line 2 (as {path}, line 1)",
        "with a special token in what somebody wrote; the model cannot tell it apart": "line 4",
        f"{longer}: their ends are cut off": "line 4",
        f"{longer}, with nothing left of a response: no token is trained on": "line 5",
    }
    for text, where in findings.items():
        assert f"1 {text}:\n    {path}, {where}\n" in out
    text = page.read_text(encoding="utf-8")
    assert '<span class="marked">the film⏎\nwas a joy</span>' in text
    assert '<span class="marked special">&lt;|im_end|&gt;</span>' in text
    assert f"1 with an empty response:\n    {path}, line 3" in text and "█ 1" in text
    assert 'trained on: <span class="marked">so</span>' in text
    assert "<script" not in text and "http" not in text
    colored = shown(capsys, path, "--model", model, *settings, "--color", "always")
    assert "\033[32mthe film⏎\nwas a joy\033[0m\033[32m\033[7m<|im_end|>\033[0m" in colored


def test_counts_of_trained_tokens_are_those_of_the_batch(model, write):
    path = write(*({"messages": chat("hello", text)} for text in ("4", "a joy", "naïve 日本")))
    job = open_job([path], model, None, [TEMPLATE])
    batch = job.dataset.collate_fn([job.dataset[number] for number in range(3)])
    for row, sample in enumerate(read_samples(job, 3)):
        (part,) = sample.parts
        assert sum(part.marked) == int(batch["loss_mask"][row].sum())
        trained = batch["labels"][row][batch["loss_mask"][row] > 0].tolist()
        assert [token for token, marked in zip(part.tokens, part.marked) if marked] == trained
        assert "".join(piece.text for piece in pieces(job.tokenizer, part)).endswith("<|im_end|>")
    table = Path(path).with_suffix(".parquet")
    pq.write_table(pa.Table.from_pylist([job.dataset.lines[0]]), table)
    assert open_job([str(table)], model, None, [TEMPLATE]).name == "gpt_sft"


def test_prompts_and_what_replaces_them(model, write, capsys):
    path = write(*({"prompt": text} for text in ("hello", "the " * 300, "hello", "a")))
    settings = [TEMPLATE, "model.data.seq_length=200", "model.ppo.length_params.max_length=50"]
    out = shown(capsys, path, "--model", model, *settings, "--samples", "2")
    assert "gpt_ppo_actor reads" in out and "[[" not in out
    assert out.count("<|im_start|>assistant⏎\n\n") == 2
    assert re.search(r"1 longer than 150 tokens .*: replaced by the next prompt that fits", out)
    assert re.search(rf"{re.escape(path)}, line 2 \(\d\d\d tokens\)", out)
    assert f"1 there more than once:\n    {path}, line 3 (as {path}, line 1)" in out
    assert "lengths in tokens: shortest" in out and "a prompt may have 150 tokens" in out


def test_pairs(model, write, capsys):
    texts = ("a joy", " "), ("x " * 80, "y")
    path = write(*({"prompt": "hello", "chosen": a, "rejected": b} for a, b in texts))
    out = shown(capsys, path, "--model", model, TEMPLATE, "model.data.seq_length=60")
    assert "training_rm reads" in out and "2 samples, of which it uses 1" in out
    assert "assistant⏎\na joy[[<|im_end|>]]\nrejected (" in out
    said = r"1 longer than model.data.seq_length=60 tokens: left out:\n.*line 2 \("
    assert re.search(said, out)
    assert f"1 with an empty response:\n    {path}, line 1" in out
    lines = write(*({"text": text} for text in ("the film", "the plot", "x", "x y")), name="lines")
    out = shown(capsys, lines, "--model", model, "--job", "training_rm")
    said = "Texts begin without a bos token, as the tokenizer itself does"
    assert f"{said} (model.data.add_bos=null)." in out
    assert f"--- sample 2: {lines}, line 3 and {lines}, line 4" in out
    assert "Nothing to report." in out


def test_labels_and_texts_for_sft(model, write, capsys):
    path = write({"messages": chat("hello", "a joy"), "label": [1, 2]})
    out = shown(capsys, path, "--model", model, TEMPLATE, "model.regression.num_attributes=2")
    assert "training_rm reads" in out and "line 1; label [1.0, 2.0]" in out
    path = write({"input": "the film", "output": "was a joy"}, {"input": "x", "output": " "})
    out = shown(capsys, path, "--model", model)
    assert "the film[[ was a joy]][[<|im_end|>]]" in out
    assert f"1 with an empty response:\n    {path}, line 2" in out


def test_responses_for_on_policy_distillation(model, write, capsys):
    path = write({"prompt": "the film ", "response": "was a joy"})
    out = shown(capsys, path, "--model", model)
    assert "gpt_knowledge_distillation reads" in out and "3 trained on" in out
    assert "the film[[ was a joy]]" in out and "Nothing to report." in out
    prompt, response = ([message] for message in chat("hello", "a joy"))
    chats = write({"prompt": prompt, "response": response}, name="chats")
    settings = ["--job", "gpt_knowledge_distillation", TEMPLATE, f"{ON_POLICY}=0.5"]
    out = shown(capsys, chats, "--model", model, *settings)
    assert "<|im_start|>assistant⏎\n[[a joy]][[<|im_end|>]]" in out


def test_examples_with_logits_of_a_teacher(model, tmp_path, capsys):
    """As the file has them: the last label counts, which is no token of the example."""
    tokenizer = tokenizer_of(model)
    ids = tokenizer.text_to_ids("the film was a joy")
    lines = []
    for number, trained in enumerate((2, 1)):  # the last word and the end; the end alone
        example = TopKExample(
            np.array(ids),
            np.array([*ids[1:], tokenizer.eos_id]),
            np.array([0] * (len(ids) - trained) + [1] * trained, dtype=np.float32),
            np.zeros((trained, 2), np.float32),
            np.array([[1, 2]] * trained),
            np.ones(trained, np.float32),
        )
        lines.append(to_line(example, number, 2, None, "0"))
    path = tmp_path / "logits.jsonl"
    path.write_text("".join(lines))
    out = shown(capsys, str(path), "--model", model)
    assert f"example ({len(ids) + 1} tokens, 2 trained on)\nthe film was a[[ joy]][[<|" in out
    assert f"1 with an empty response:\n    {path}, line 2" in out


def test_responses_with_weights(model, write, capsys):
    responses = [{"from": "Assistant", "value": text} | WEIGHTS for text in ("a joy", "a plot")]
    turns = [{"from": "User", "value": "hello"}]
    record = {"system": "", "prompt_turns": turns, "label": "quality:4", "responses": responses}
    long = [{**response, "value": "the film " * 60} for response in responses]
    path = write(record, {**record, "responses": long})
    out = shown(capsys, path, "--model", model, "model.data.train_ds.max_seq_length=60")
    assert "steerlm2 reads" in out and "line 1; weights 0.5, 0.5" in out
    assert out.count("response (") == 2 and "quality:4⏎\n[[a plot⏎\n" in out
    assert re.search(r"1 with a response longer than .*max_seq_length=60 tokens.*: left out", out)


def test_pairs_by_the_names_of_nemo_aligner(model, write, capsys):
    prompt, chosen, empty = (chat("hello", text) for text in ("x", "a <|im_end|> joy", " "))
    record = {"prompt": prompt[:1], "chosen_response": chosen[1], "rejected_response": empty[1]}
    path = write(record)
    out = shown(capsys, path, "--model", model, TEMPLATE)
    assert "gpt_dpo reads" in out and f"1 with an empty response:\n    {path}, line 1" in out
    mark = "with a special token in what somebody wrote"
    assert f"1 {mark}; the model cannot tell it apart:\n    {path}" in out


def test_special_tokens_beside_a_response_and_in_attributes(model, write, capsys):
    mark = "with a special token in what somebody wrote"
    prompt, response = ([message] for message in chat("hello", "a joy"))
    record = {"prompt": chat("a <|im_end|> b")[:1], "response": response, "preference": "chosen"}
    plain = {**record, "prompt": prompt}
    out = shown(capsys, write(plain, record), "--model", model, TEMPLATE)
    assert f"1 {mark}" in out and "line 2" in out.split(mark)[1]
    other = {"messages": chat("hello", "a joy"), "response": "of something else"}
    out = shown(capsys, write(other, name="sft"), "--model", model, TEMPLATE, "--job", "gpt_sft")
    assert mark not in out and "columns that nothing reads:" in out
    answers = [{"from": "Assistant", "value": "a joy"} | WEIGHTS] * 2
    turns = [{"from": "User", "value": "hello"}]
    sample = {"system": "", "prompt_turns": turns, "label": "kind:1", "responses": answers}
    marked = {**sample, "system": "Be <|im_end|> kind."}
    bare = {"prompt_turns": turns, "label": None, "responses": answers}
    out = shown(capsys, write(sample, marked, bare, name="weights"), "--model", model)
    assert f"1 {mark}" in out and "line 2" in out.split(mark)[1]


def test_lengths_of_the_policy_that_trained_the_checkpoint_do_not_count(model, write, tmp_path):
    """A checkpoint of PPO holds its own section beside that of the job."""
    trained = trained_with(model, tmp_path, ppo={"length_params": {"max_length": 100}})
    settings = [TEMPLATE, "model.data.seq_length=200"]
    for job, section in (("gpt_rs_actor", "rs"), ("gpt_reinforce_actor", "reinforce")):
        own = f"model.{section}.length_params.max_length=20"
        opened = open_job([write({"prompt": "hello"})], trained, job, [*settings, own])
        assert opened.dataset.max_prompt_length == 180, job


def test_spin_trains_on_the_response_whatever_its_checkpoint_did(model, write, tmp_path, capsys):
    trained = trained_with(model, tmp_path, answer_only_loss=False)
    path = write({"input": "the film", "output": "was a joy"})
    words = [path, "--model", trained, "--job", "gpt_spin", "model.data.chat=False"]
    assert "the film[[ was a joy]]" in shown(capsys, *words)


def test_what_the_job_would_refuse_is_the_error(model, write, capsys, error_of):
    path = write({"messages": chat("hello", "a joy")}, {"messages": []})
    error = error_of(main, "inspect", path, "--model", model, TEMPLATE)
    assert f"{path}, line 2: field 'messages' is an empty list" in error
    main(["inspect", write({"messages": chat("a", "b")}), "--model", model])
    said = "written in the tokenizer's chat template, as model.data.chat_temp"
    assert said in capsys.readouterr()[0]
    alpaca = write({"instruction": "hello", "input": "", "output": "a" * 99})
    with pytest.raises(SystemExit):
        main(["inspect", alpaca, "--model", model])
    out, error = capsys.readouterr()
    fields = ("instruction: 'hello'", "input: ''", f"output: '{'a' * 79}")
    assert out == "".join(f"first record, {field}\n" for field in fields)
    assert "{input: '{instruction}{" in error
    text = write({"text": "hello"})
    assert "add --job gpt_sft" in error_of(main, "inspect", text, "--model", model)
    assert "--model is missing" in error_of(main, "inspect", text)
    assert "does not exist" in error_of(main, "inspect", "/nowhere.jsonl", "--model", model)
    error = error_of(main, "look", text, "--model", model)
    assert "the command is: nemo-aligner inspect" in error
    words = text, "--model", model, "--job", "training_rm", "model.data.chat_temp=x"
    error = error_of(main, "inspect", *words)
    assert "model.data.chat_temp (did you mean model.data.chat_template" in error
    assert "nowhere" in error_of(main, "inspect", text, "--model", "nowhere", "--job", "gpt_sft")


def test_limit_and_histogram(model, write):
    path = write(*({"prompt": "hello " * number} for number in (1, 1, 30)))
    job = open_job([path], model, "gpt_rs_actor", [TEMPLATE])
    lengths, findings = look(job, 2)
    assert (len(job.dataset.lines), len(job.dataset), len(lengths)) == (3, 3, 2)
    assert [len(places) for _text, places in findings] == [1]
    assert len(look(job, 0)[0]) == 3
    lengths = np.array([3, 3, 4, 9, 30])
    bins = histogram(lengths)
    assert sum(count for _, _, count in bins) == 5
    for first, last, count in bins:
        assert count == sum(first <= length <= last for length in lengths.tolist())


def test_pieces_join_to_the_text_of_all_tokens(model):
    job_tokenizer = tokenizer_of(model)
    text = "<|im_start|>user\na dull  plot<|im_end|> the film"
    tokens = job_tokenizer.text_to_ids(text)
    marked = [number % 5 < 2 for number in range(len(tokens))]
    found = list(pieces(job_tokenizer, Part("example", tokens, marked)))
    assert [piece.text for piece in found if piece.special] == ["<|im_start|>", "<|im_end|>"]
    assert "".join(piece.text for piece in found) == text
    flags = [flag for piece in found for flag in [piece.marked] for _ in piece.text]
    place = 0
    for token, flag in zip(tokens, marked, strict=True):
        width = len(job_tokenizer.tokenizer.decode([token]))
        assert set(flags[place : place + width]) == {flag}
        place += width


# --------------------------------------------------------------------------------------- layouts

HUMAN = "\n\nHuman: the film?\n\nAssistant: hello\n\nHuman: a plot?\n\nAssistant:"
ALPACA = {"instruction": "the film", "input": "", "output": "a joy", "text": "x"}
TASK = {"instruction": "a plot", "input": "hello", "output": "4", "text": "y"}
RATED = {"prompt": "hello", "response_1": "a joy", "response_2": "a plot", "split": "train"}
PROCESS = {"prompt": "the film?", "completions": ["a plot", "a joy"], "labels": [True, False]}
SIDES = {"chosen": chat("hello", "a joy"), "rejected": chat("hello", "a plot")}
ULTRA = {"prompt": "hello", "prompt_id": "7", **SIDES, "messages": chat("hello", "a joy")}
ULTRA |= {"score_chosen": 8.5, "score_rejected": 2.0}
LIKED = {"prompt": chat("hello")[:1], "completion": chat("", "a joy")[1:], "label": True}
VERL = {"data_source": "a", "ability": "math", "extra_info": {"index": 1, "split": "train"}}
VERL |= {"prompt": chat("2 + 2?")[:1], "reward_model": {"ground_truth": "4", "style": "rule"}}
REGRESSION = "model.reward_model_type=regression"
UNREAD = "1 with columns that nothing reads:\n    {path}: "
# (layout, job as the page names it), (job, settings, records), texts that are shown
LAYOUTS = [
    (
        ("Alpaca", "SFT"),
        ("gpt_sft", [], [ALPACA, TASK]),
        "(of N)\nthe film[[ a joy]][[<|im_end|>]]\n",
        "a plot⏎\n⏎\nhello[[ 4]][[<|im_end|>]]\n",
        f"{UNREAD}text.\n",
    ),
    (
        ("HH-RLHF", "DPO"),
        (
            "gpt_dpo",
            [r"model.data.prompt_end='\n\nAssistant:'"],
            [{"chosen": f"{HUMAN} a joy\n\nHuman: 4?\n\nAssistant: 4", "rejected": f"{HUMAN} 2"}],
        ),
        "a plot?⏎\n⏎\nAssistant:[[ a joy⏎\n⏎\nHuman: 4?⏎\n⏎\nAssistant: 4]]",
        "Assistant:[[ 2]]",
    ),
    (
        ("HelpSteer2-Preference", "reward model"),
        (
            "training_rm",
            [REGRESSION, "model.regression.loss_func=regular_bt"],
            [RATED | {"preference_strength": strength} for strength in (-2, 3)],
        ),
        "row 1; margin 2\nchosen (of N)\nhello⏎\na[[ joy]]\n"
        + "rejected (of N)\nhello⏎\na[[ plot]]",
        "row 2; margin 3\nchosen (of N)\nhello⏎\na[[ plot]]",
        f"{UNREAD}split.\n",
    ),
    (
        ("Math-Shepherd, PRM800K (trl)", "reward model"),
        ("training_rm", [REGRESSION, "model.data.seq_length=64"], [PROCESS]),
        "row 1; label [1.0]\ntext (of N)\nthe film?⏎\na[[ plot]]\n",
        "row 1; label [0.0]\ntext (of N)\nthe film?⏎\na plot⏎\na[[ joy]]\n",
        "2 samples, of which it uses 2",
    ),
    (
        ("UltraFeedback", "DPO"),
        ("gpt_dpo", [TEMPLATE], [ULTRA]),
        "<|im_start|>assistant⏎\n[[a joy]][[<|im_end|>]]\n",
        "assistant⏎\n[[a plot]][[<|im_end|>]]",
        f"{UNREAD}prompt_id.\n",
    ),
    (
        ("KTO (trl)", "KTO"),
        ("gpt_kto", [], [LIKED, {"prompt": "the film", "completion": " a plot", "label": False}]),
        "chosen (of N)\n<|im_start|>system",
        "assistant⏎\n[[a joy]][[<|im_end|>]]",
        "rejected (of N)\nthe film[[ a plot]]",
        "Nothing to report.",
    ),
    (
        ("verl", "prompts"),
        ("gpt_ppo_actor", [TEMPLATE], [VERL]),
        "user⏎\n2 + 2?<|im_end|>⏎\n<|im_start|>assistant⏎\n\n",
        "1 with columns that only a reward function can read:\n    {path}: ability, data",
    ),
]


def cell(layout, job):
    """The third cell of the row of a layout and a job in the table of the page."""
    rows = [line.split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    return next(r[2] for r in rows if r[0] == f"| {layout}" and r[1].startswith(job))


def check_early(job, path, settings):
    """What the job checks first refuses nothing that it can use."""
    key = "data_prefix" if job in PREFIX_DATA_JOBS else "train_ds.file_path"
    cfg = compose_settings(job, [*settings, f"model.data.{key}=[{path}]"])
    check_inputs(complete_config(cfg, job), job)


def test_a_pair_may_begin_in_one_file_and_end_in_the_next(tmp_path):
    texts = [f"{prompt} A: {response}" for prompt in "pqr" for response in "xy"]
    for name, lines in (("one", texts[:3]), ("two", texts[3:])):
        records = [json.dumps({"text": text}) + "\n" for text in lines]
        (tmp_path / f"{name}.jsonl").write_text("".join(records))
    files = f"{tmp_path}/one.jsonl,{tmp_path}/two.jsonl"
    check_early("training_rm", files, ["model.data.prompt_end=A:"])


@pytest.mark.parametrize("row", LAYOUTS, ids=lambda row: "-".join(row[0]))
def test_layouts_with_the_line_of_the_page(row, model, write, tmp_path, capsys):
    """From parquet where its columns have one type, as a hub's files do."""
    (layout, asked), (job, settings, records), *expected = row
    path = write(*records)
    if layout != "KTO (trl)":
        path = str(Path(path).with_suffix(".parquet"))
        pq.write_table(pa.Table.from_pylist(records), path)
    line = re.match(r"`(\{.*?\})`", cell(layout, asked))
    settings = [*settings, *([f"model.data.columns={line[1]}"] if line else [])]
    assert not line or settings[-1] != "model.data.columns={}"
    by_itself = () if layout == "KTO (trl)" else ("--job", job)
    out = shown(capsys, path, "--model", model, *by_itself, *settings)
    check_early(job, path, settings)
    out = re.sub(r"\(\d+ tokens(, \d trained on)?\)", "(of N)", out)
    for text in expected:
        assert text.replace("{path}", path) in out
    if layout == "verl":
        opened = open_job([path], model, job, settings)
        columns = PromptColumns([opened.dataset], ["ground_truth"])(torch.tensor([0]))
        assert columns == [{"ground_truth": "4"}]
    if layout == "UltraFeedback":
        item = open_job([path], model, job, settings).dataset[0]
        assert (item["chosen_reward"], item["rejected_reward"]) == (8.5, 2.0)


@some_of("job", ["gpt_sft", "gpt_dpo", "gpt_kto", "gpt_ppo_actor"])
def test_an_empty_prompt_that_is_allowed_is_counted(job, model, write, capsys, error_of):
    """No bos stands before it with this tokenizer: nothing can be sampled then."""
    record = {"prompt": "", "chosen": " a", "rejected": " b", "response": " a"}
    record |= {"preference": True, "input": "", "output": "a"}
    path = write(record | {"prompt": "hello", "input": "hello"}, record)
    settings = ["model.data.allow_empty_prompt=True"]
    check_early(job, path, settings)
    words = (path, "--model", model, "--job", job, *settings)
    if job == "gpt_ppo_actor":
        assert "needs a token to begin with: add_bos=True" in error_of(main, "inspect", *words)
    else:
        assert f"1 with an empty prompt:\n    {path}, line 2" in shown(capsys, *words)


# ------------------------------------------------------------------------------------------ page

JOBS = {"sft": "gpt_sft", "ppo": "gpt_ppo_actor", "rs": "gpt_rs_actor", "rm": "training_rm"}


def documented():
    """(records, job, settings) of each command of the page, after its records."""
    found, records = [], []
    text = PAGE.read_text(encoding="utf-8")
    for block in re.findall(r"(?m)```json\n(?s:.*?)```|(?:^ {4}.*\n)+", text):
        if block.startswith("```json"):
            records, rest = [], block.removeprefix("```json").removesuffix("```").strip()
            while rest:
                record, end = json.JSONDecoder().raw_decode(rest)
                records.append(record)
                rest = rest[end:].strip()
        else:
            for command in block.replace("\\\n", " ").splitlines():
                words = shlex.split(command)
                if words[:2] == ["nemo-aligner", "train"]:
                    settings = [word for word in words[3:] if is_setting(word)]
                    found.append((records, JOBS[words[2]], settings))
    return found


DOCUMENTED = documented()


def test_the_page_has_all_formats():
    assert len(DOCUMENTED) == 10
    assert {job for _, job, _ in DOCUMENTED} == set(JOBS.values())


@some_of("number", range(len(DOCUMENTED)), keep=3)
def test_records_and_settings_of_the_page_make_samples(number, model, write):
    records, job, settings = DOCUMENTED[number]
    path = write(*records)
    opened = open_job([path], model, job, settings)
    check_early(job, path, settings)
    expected = len(records) // opened.dataset.lines_per_document
    samples = read_samples(opened, 9)
    assert len(samples) == len(opened.dataset) == expected >= 1
    for sample in samples:
        assert all(part.tokens for part in sample.parts)
        assert job.startswith(("gpt_ppo", "gpt_rs")) or any(sample.parts[0].marked)
