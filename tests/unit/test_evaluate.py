# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m nemo_aligner.evaluate` in this process, on one rank."""

import html
import json
import re
from pathlib import Path

import pytest
import torch
from nemo.collections.common.tokenizers import AutoTokenizer
from omegaconf import OmegaConf

from nemo_aligner.config.defaults import complete_config
from nemo_aligner.core.tokenizer import tokenizer_fingerprint
from nemo_aligner.evaluate.__main__ import main
from nemo_aligner.evaluate.results import Scored, measure, render, shown, tables
from nemo_aligner.evaluate.rewards import tokens_of
from nemo_aligner.generate.__main__ import main as generate
from nemo_aligner.generate.responses import Response, read_responses, write_records
from nemo_aligner.generate.settings import compose_settings
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
from nemo_aligner.report.elements import columns
from tests.tiny_models import tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("log_level")]

ROOT = Path(__file__).parents[2]
PROMPTS = ["the film", "a dull plot and a", "I loved the", "Review: the film was bad."]
CPU = "trainer.accelerator=cpu"
FUNCTION = "def even(prompts, responses, lengths):\n    return [1 - n % 2 for n in lengths]\n"
FUNCTION += "def asked(prompts, responses, lengths, answer):\n    return answer\n"
SMALL = dict(resamples=200, confidence=0.95, seed=0)


@pytest.fixture(scope="module")
def folder(tiny_tokenizer_dir, tmp_path_factory) -> Path:
    """Two policies, a reward model, a function, prompts, and the responses of both policies."""
    folder = tmp_path_factory.mktemp("evaluate")
    for name, seed in (("a", 7), ("b", 8)):
        cfg = tiny_config(tiny_tokenizer_dir, seed=seed, init_method_std=0.3)
        MegatronGPTModel(cfg).save_to(str(folder / f"{name}.nemo"))
    reward = MegatronGPTRewardModel(tiny_config(tiny_tokenizer_dir, seed=3))
    reward.save_to(str(folder / "rm.nemo"))
    (folder / "function.py").write_text(FUNCTION)
    lines = [json.dumps({"text": t, "answer": n}) + "\n" for n, t in enumerate(PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(lines))
    for name in "ab":
        generate(
            [str(folder / f"{name}.nemo"), "--prompts", str(folder / "prompts.jsonl"), CPU]
            + ["--out", str(folder / f"{name}.jsonl"), "length_params.max_length=9"]
            + ["responses_per_prompt=2"]
        )
    return folder


def metrics(folder) -> dict:
    return json.loads((folder / "metrics.json").read_text())


# ---- whole evaluations


def test_win_rate_of_two_files_under_a_reward_model(folder, tmp_path, capsys):
    a, b = str(folder / "a.jsonl"), str(folder / "b.jsonl")
    settings = [CPU, "reward_model.forward_micro_batch_size=3", "bootstrap.resamples=50"]
    main([a, b, "--reward", str(folder / "rm.nemo"), "--out", str(tmp_path), *settings])
    model = MegatronGPTRewardModel.restore_from(str(folder / "rm.nemo"))
    model.set_eval()
    wanted = [[_reward(model, response) for response in read_responses(file)] for file in (a, b)]
    scores = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [s["reward"] for s in scores] == pytest.approx(wanted[0] + wanted[1], abs=1e-5)
    assert [s["source"] for s in scores] == [a] * 8 + [b] * 8
    found = metrics(tmp_path)
    assert found["policies"][a]["reward"]["value"] == pytest.approx(sum(wanted[0]) / 8, abs=1e-5)
    won = [1.0 if x > y else 0.0 for x, y in zip(*wanted, strict=True)]
    assert found["comparison"]["win_rate"]["value"] == sum(won) / 8
    low, high = found["comparison"]["win_rate"]["interval"]
    assert 0 <= low <= sum(won) / 8 <= high <= 1
    printed = capsys.readouterr().out
    assert "win rate, length-controlled" in printed and "reward, mean" in printed


def _reward(model, response: Response) -> float:
    """One forward pass of the whole sample, alone."""
    ids = torch.tensor([[*response.prompt_tokens, *response.response_tokens]])
    positions = torch.arange(ids.size(1))[None]
    with torch.no_grad():
        out = model.model[0](ids, positions, None, lengths=torch.tensor([ids.size(1)]))
    return float(out)


def test_policies_are_evaluated_as_their_files(folder, tmp_path):
    """Generation and scoring in one command, one model after the other."""
    names = [str(folder / "a.nemo"), str(folder / "b.nemo")]
    rm = ["--reward", str(folder / "rm.nemo")]
    settings = [CPU, "bootstrap.resamples=50"]
    together = ["--prompts", str(folder / "prompts.jsonl"), "length_params.max_length=9"]
    together += ["responses_per_prompt=2", "--out", str(tmp_path / "one")]
    main([*names, *rm, *settings, *together])
    files = [str(folder / "a.jsonl"), str(folder / "b.jsonl")]
    main([*files, *rm, *settings, "--out", str(tmp_path / "two")])
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert one["comparison"] == two["comparison"]
    assert list(one["policies"].values()) == list(two["policies"].values())
    assert list(one["policies"]) == names
    for number, name in ((1, "a"), (2, "b")):
        written = read_responses(tmp_path / "one" / f"responses_{number}.jsonl")
        assert [r.response_tokens for r in written] == [
            r.response_tokens for r in read_responses(folder / f"{name}.jsonl")
        ]


def test_exact_match_by_a_function(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reward = f"{folder / 'function.py'}:even"
    main([str(folder / "a.jsonl"), "--reward", reward, "inference.reward_fn_workers=1"])
    found = metrics(tmp_path / "results/evaluate")  # the default place
    lengths = [response.length for response in read_responses(folder / "a.jsonl")]
    (policy,) = found["policies"].values()
    assert policy["reward"]["value"] == sum(1 - n % 2 for n in lengths) / len(lengths)
    assert policy["tokens"]["value"] == sum(lengths) / len(lengths)
    assert policy["prompts"]["value"] == 4 and policy["responses"]["value"] == 8
    assert found["comparison"] == {}


@pytest.mark.parametrize("source", ["a.jsonl", "a.nemo"])
def test_a_function_gets_the_columns_of_the_prompts(folder, tmp_path, source):
    words = [str(folder / source), "--reward", f"{folder / 'function.py'}:asked", CPU]
    prompts = ["--prompts", str(folder / "prompts.jsonl"), "responses_per_prompt=2"]
    main([*words, "--out", str(tmp_path), *(prompts if source == "a.nemo" else [])])
    scores = list(map(json.loads, (tmp_path / "scores.jsonl").read_text().splitlines()))
    answers = [n for n, _prompt in enumerate(PROMPTS) for _ in range(2)]
    assert [score["reward"] for score in scores] == [s["answer"] for s in scores] == answers


@pytest.mark.full
def test_mistakes_are_one_message_each(folder, tmp_path, error_of):
    a, b, rm = (str(folder / name) for name in ("a.jsonl", "b.jsonl", "rm.nemo"))
    prompts = str(folder / "prompts.jsonl")
    function = f"{folder / 'function.py'}:even"
    responses = read_responses(a)
    short, other, empty = (str(tmp_path / f"{name}.jsonl") for name in ("short", "other", "empty"))
    lines = [response.line for response in responses[:-1]]
    write_records(short, lines)
    write_records(other, [*lines, Response("another prompt", "x").line])
    write_records(empty, [])
    long = str(tmp_path / "long.jsonl")
    write_records(long, [Response("a" * 30, "b" * 30).line])
    nemo, bare = str(folder / "a.nemo"), str(tmp_path / "bare.jsonl")
    Path(bare).write_text('{"text": "the film"}')
    raises = tmp_path / "raises.py"
    raises.write_text("def f(prompts, responses, lengths):\n    raise ValueError('no')\n")
    for words, message in (
        ((), "one source or two are needed, not 0"),
        ((a, b, a, "--reward", rm), "one source or two are needed, not 3"),
        ((a,), "--reward is missing"),
        ((a, "--reward", rm, "--system", "x"), "add --chat"),
        (("no.jsonl", "--reward", rm), "no.jsonl does not exist"),
        (("no.nemo", "--reward", rm, "--prompts", prompts), "no.nemo does not exist; name a pol"),
        ((str(folder / "a.nemo"), "--reward", rm), "--prompts FILE must give the prompts"),
        ((a, "--reward", rm, "--prompts", prompts), "is not used"),
        ((a, empty, "--reward", rm), "empty.jsonl is empty"),
        ((a, prompts, "--reward", rm), "prompts.jsonl, line 1: fields 'prompt' and 'response' a"),
        ((a, short, "--reward", rm), "has 8 responses and"),
        ((a, other, "--reward", rm), "other.jsonl to 'another prompt'; a win rate needs the same"),
        ((a, "--reward", "no_rm.nemo"), "--reward=no_rm.nemo does not exist"),
        ((a, "--reward", str(folder / "a.nemo"), CPU), "holds no head that was trained to give"),
        ((a, "--reward", "no.py:f"), "no.py does not exist"),
        ((a, "--reward", str(folder / "function.py")), "does not name a function"),
        ((a, "--reward", f"{folder / 'function.py'}:odd"), "odd"),
        ((long, "--reward", f"{folder / 'function.py'}:asked"), "there is no column 'answer'"),
        ((nemo, "--prompts", bare, "--reward", f"{folder / 'function.py'}:asked"), "but ['text']"),
        ((a, "--reward", f"{raises}:f"), "raises.py:f failed on sample"),
        ((long, "--reward", rm, CPU), "1 of 1 samples do not fit the reward model, which reads"),
        ((a, "--reward", function, "bootstrap.resample=5"), "did you mean bootstrap.resamples"),
        ((a, "--reward", function, "bootstrap.confidence=2"), "bootstrap.confidence=2 must be"),
        ((a, "--reward", function, "inference.reward_fn_workers=0"), "reward_fn_workers=0 must"),
        ((a, "--reward", rm, CPU, "reward_model.force_head_typ=x"), "did you mean model.force_h"),
    ):
        assert message in error_of(main, *words, "--out", tmp_path / "out"), words
    assert not (tmp_path / "out").exists()


# ---- the numbers


def scored(name, rewards, texts=None, **fields):
    texts = texts or ["x" * (1 + number % 3) for number in range(len(rewards))]
    make = lambda number, text: Response(f"prompt {number // 2}", text, **fields)
    responses = [make(number, text) for number, text in enumerate(texts)]
    return Scored(name, responses, rewards)


def test_numbers_by_hand():
    first = scored("one", [1.0, 2.0, 3.0, 4.0], ["a", "bb", "", "dddd"], length=3, is_end=True)
    second = scored("two", [1.0, 3.0, 1.0, 0.0], ["aa", "bb", "cc", "dd"])
    results = measure([first, second], **SMALL)
    one, two = (results["policies"][name] for name in ("one", "two"))
    assert one["reward"]["value"] == 2.5 and two["reward"]["value"] == 1.25
    assert one["reward_std"]["value"] == pytest.approx(1.25**0.5)
    assert one["characters"]["value"] == 1.75 and one["tokens"]["value"] == 3
    assert one["ended"]["value"] == 1.0 and "ended" not in two and "tokens" not in two
    assert one["prompts"]["value"] == 2 and one["responses"]["value"] == 4
    comparison = results["comparison"]
    assert comparison["win_rate"]["value"] == 0.625  # a tie, a loss, two wins
    assert comparison["ties"]["value"] == 0.25
    assert comparison["reward_difference"]["value"] == 1.25
    # Two prompts: each mean is that of the first, of the second, or of both.
    assert one["reward"]["interval"] == pytest.approx([1.5, 3.5])
    assert comparison["win_rate"]["interval"] == pytest.approx([0.25, 1.0])


def test_rows_of_the_table():
    results = measure([scored("one", [0.0, 1.0]), scored("two", [1.0, 0.5])], **SMALL)
    policies, comparison = tables(results)
    lines = columns(policies).splitlines()
    assert lines[0].split() == ["one", "two"]
    assert re.fullmatch(r"reward, mean +0\.5 \[0\.5, 0\.5\] +0\.75 \[0\.75, 0\.75\]", lines[3])
    assert comparison[0] == ("", "one against two")
    assert shown("win_rate", {"value": 0.5, "interval": [0.25, 1.0]}) == "50.0% [25.0%, 100.0%]"
    assert shown("reward", {"value": 1.25}) == "1.25"
    assert len(tables(measure([scored("one", [0.0, 1.0])], **SMALL))) == 1


def test_a_reward_model_reads_tokens_of_its_own(tiny_tokenizer_dir, reversed_tokenizer_dir):
    own, other = AutoTokenizer(tiny_tokenizer_dir), AutoTokenizer(reversed_tokenizer_dir)
    ids = own.text_to_ids("the film")
    split = [token for letter in " was bad" for token in own.text_to_ids(letter)]
    response = Response(
        "the film", " was bad", 9, True, -1.0, ids, [*split, 299], tokenizer_fingerprint(own)
    )
    assert tokens_of(response, own) == [*ids, *split, own.eos_id]
    text = other.text_to_ids("the film was bad")
    assert tokens_of(response, other) == [*text, other.eos_id] != tokens_of(response, own)
    assert tokens_of(Response("the film", " was bad", is_end=False), other) == text
    assert tokens_of(Response("the film", " was bad"), other) == [*text, other.eos_id]


def test_page_stands_alone_and_escapes_texts():
    evil = "<script>alert(1)</script>"
    sides = [
        scored("one", [float(n) for n in range(40)], [f"{evil} {n}" for n in range(40)]),
        scored("two & co", [20.0] * 39 + [0.0], ["y"] * 40),
    ]
    page = render(measure(sides, **SMALL), sides, [("reward", "rm.nemo")])
    assert not any(word in page for word in ("<script", "<link", "<img", "http"))
    text = html.unescape(page)
    assert "one against two & co: evaluation" in text and "win rate, length-controlled" in text
    assert "rm.nemo" in text and "share of responses with at most" in text
    assert "one, reward 39: 1" in text
    found = [int(n) for n in re.findall(r"<script>alert\(1\)</script> (\d+)", text)]
    # Samples, from the largest gain to the largest loss.
    assert len(found) == len(set(found)) == 24 and (found[0], found[5]) == (39, 0)


def test_sampling_has_the_defaults_of_ppo():
    ours = OmegaConf.to_container(compose_settings("evaluate", []).sampling_params)
    ppo = complete_config({}, "gpt_ppo_actor").model.ppo
    theirs = OmegaConf.to_container(ppo.sampling_params, resolve=False)
    assert ours == {key: theirs[key] for key in ours}
    assert set(theirs) - set(ours) == {"all_probs", "compute_logprob"}  # without effect
