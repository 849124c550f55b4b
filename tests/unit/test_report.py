# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The HTML report: read back with a parser, on whole, partial, broken and hostile runs."""

import html.parser
import json
import math
import os
import re
import shlex
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from nemo_aligner.config.defaults import complete_config
from nemo_aligner.core.errors import UserError
from nemo_aligner.report import elements, ending, page, reading
from nemo_aligner.report.__main__ import main
from nemo_aligner.training.loggers import CustomLoggerWrapper
from tests.patience import wait_until


def write_jsonl(path, records, tail=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records) + tail
    path.write_text(text, encoding="utf-8")


UPDATES = ("lr", "entropy", "ppo_ratio", "ppo_clip_fraction")


def write_job(folder, start=1000.0, alarms=()):
    """A PPO actor's files: ten steps, a validation before and one after."""
    records = [{"step": 0, "time": start, "val_rollouts/rewards": -1.0}]
    for step in range(10):
        rollout = {"rewards": step / 10, "epoch": 1, "init_policy_kl": step / 50}
        rollout |= {"generation_length": 30 - step, "alarms_active": int(step in alarms)}
        rollout |= {"explained_variance": 0.5 - step / 10}
        times = {"timers/generate": 0.5, "timers/train_time": 2.0}
        times["speed/generate_tokens_per_s"] = 100.0 + step
        updates = {f"train_optim/{key}": step / 7 for key in UPDATES}
        records.append({"step": 2 * step, "time": start + step} | updates)
        at = {"step": step, "time": start + step}
        records.append(at | {f"train_rollouts/{key}": value for key, value in rollout.items()})
        records.append(at | times)
    records.append({"step": 10, "time": start + 10, "val_rollouts/rewards": 1.0})
    write_jsonl(folder / "metrics.jsonl", records)


def write_supervised(folder, start, **metrics):
    metrics = {f"train/{key}": value for key, value in metrics.items()}
    records = [{"step": n, "time": start + n, "train/loss": 4.0 / n} | metrics for n in (1, 2)]
    records.append({"step": 2, "time": start + 2, "validation/loss": 2.5})
    write_jsonl(folder / "metrics.jsonl", records)


class Page(html.parser.HTMLParser):
    """Collects the tags and the texts of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.attributes = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.texts.append(data.strip())


def drawings(text):
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text)]


def rendered(*folders):
    return Page(page.render(*folders))


def after(page, heading, count):
    """The `count` texts of a page that follow `heading`, without empty ones."""
    texts = [text for text in page.texts if text]
    start = texts.index(heading) + 1
    return texts[start : start + count]


def test_page_opens_with_what_the_policy_learned(tmp_path):
    write_job(tmp_path / "ppo_actor")
    responses = (0, "It is dull.", -1.5), (5, "It is so.", 0.0), (10, "It is superb.", 2.25)
    write_jsonl(
        tmp_path / "ppo_actor" / "val_samples.jsonl",
        [{"step": n, "prompt": "A film:", "response": x, "reward": r} for n, x, r in responses],
    )
    text = page.write_report(tmp_path).read_text(encoding="utf-8")
    read = Page(text)
    for title, told in {
        "reward, validation": ["-1 (step 0)", "1 (step 10)", "+2"],
        "reward, rollouts": ["0 (step 0)", "0.9 (step 9)", "+0.9"],
        "KL to the reference, per token": ["0 (step 0)", "0.18 (step 9)", "+0.18"],
        "response length in tokens, rollouts": ["30 (step 0)", "21 (step 9)", "-9"],
        "train_time": ["10", "2.000", "2.000", "20.0"],  # 10 times 2 s
    }.items():
        assert after(read, title, len(told)) == told
    labels = [each.text for each in drawings(text)[0].iter("text") if "label" in each.get("class")]
    assert labels == ["val_rollouts", "train_rollouts"]
    assert "It is dull.\n(reward -1.5)" in read.texts
    assert "It is superb.\n(reward 2.25)" in read.texts
    assert not any("It is so." in text for text in read.texts)  # only the first and the last step
    order = ["Did it learn?", "It is superb.", "<h3>Alarms</h3>", "How was it trained?"]
    order += [f"train_optim/{key}<" for key in UPDATES] + ["More curves", "Time per phase"]
    places = [text.index(part) for part in order]
    assert 'aria-label="speed/generate_tokens_per_s"' in text
    assert places == sorted(places)


def test_page_needs_nothing_from_elsewhere_and_no_script(tmp_path):
    write_job(tmp_path)
    read = rendered(tmp_path)
    assert not {"script", "link", "img", "iframe"} & set(read.tags)
    assert all(value.startswith("#") for name, value in read.attributes if name in ("href", "src"))
    assert "url(" not in elements.STYLE and "@import" not in elements.STYLE
    assert "prefers-color-scheme: dark" in elements.STYLE


@pytest.mark.parametrize(
    ("active", "said"),
    [
        ((), "No warning in 10 logged steps."),
        ((3, 4), "Warnings in 2 of 10 logged steps (3, 4); the job's log says which."),
    ],
)
def test_alarms_are_told_with_the_worst_values(tmp_path, active, said):
    write_job(tmp_path, alarms=active)
    read = rendered(tmp_path)
    assert said in read.texts
    assert after(read, "explained variance of the critic", 2) == ["-0.4", "-0.4"]


def test_more_samples_than_a_glance_takes_unfold(tmp_path):
    write_job(tmp_path)
    samples = ((step, n) for step in (0, 10) for n in range(page.MAX_SAMPLES + 5))
    samples = [{"step": step, "prompt": f"prompt {n}", "response": f"r{n}"} for step, n in samples]
    write_jsonl(tmp_path / "val_samples.jsonl", samples)
    text = page.render(tmp_path)
    shown, folded = text.split("<summary>15 more</summary>")
    assert "<td>prompt 4</td>" in shown and "<td>prompt 5</td>" not in shown
    assert "<td>prompt 19</td>" in folded and "<td>prompt 20</td>" not in text


def test_a_job_of_self_play_shows_both_responses_and_what_its_alarms_watch(tmp_path):
    metrics = {"identical_fraction": 0.25, "alarms_active": 0, "margin": 1.5}
    write_supervised(tmp_path, 1000.0, avg_generated_lengths=12.5, **metrics)
    sample = {"step": 0, "prompt": "the film", "response": " is dull", "actual": " was a joy"}
    write_jsonl(tmp_path / "train_samples.jsonl", [sample])
    found = rendered(tmp_path)
    told = after(found, "samples of self-play (1)", 6)[3:]
    assert told == ["0", "the film", "is dull\n(data: was a joy)"]
    assert "own responses that equal the data's" in found.texts


def test_text_of_a_model_cannot_become_markup(tmp_path):
    evil = "</td><script>alert(1)</script>"
    record = {"step": 1, "time": 1.0, f"train/{evil}": 1.0, f"timers/{evil}": 1.0}
    write_jsonl(tmp_path / "metrics.jsonl", [record])
    sample = {"step": 0, "prompt": evil, "response": evil, "reward": 0}
    write_jsonl(tmp_path / "val_samples.jsonl", [sample])
    text = page.render(tmp_path)
    assert "<script" not in text
    assert evil in Page(text).texts


def test_partial_run_with_a_torn_line_and_missing_values(tmp_path):
    losses = {1: 3.0, 2: None}
    records = [{"step": n, "time": float(n), "train/loss": loss} for n, loss in losses.items()]
    write_jsonl(tmp_path / "metrics.jsonl", records, tail='{"step": 3, "tra')
    job = reading.read_run(tmp_path)[0]
    assert job.series == {"train/loss": {1: 3.0}}
    assert "1 unreadable line(s)" in page.render(tmp_path)


def test_a_resumed_job_overwrites_the_steps_it_repeats(tmp_path):
    values = [(1, 5.0), (2, 4.0), (2, 3.5), (3, 3.0)]
    records = [{"step": step, "time": 1.0, "train/loss": value} for step, value in values]
    write_jsonl(tmp_path / "metrics.jsonl", records)
    assert reading.read_run(tmp_path)[0].series["train/loss"] == {1: 5.0, 2: 3.5, 3: 3.0}


@pytest.mark.parametrize("make", ["missing", "file", "empty", "no_metrics"])
def test_nothing_to_report_is_one_clear_error(tmp_path, make, capsys):
    path = tmp_path / "run"
    if make == "file":
        path.write_text("x")
    elif make != "missing":
        path.mkdir()
    if make == "no_metrics":
        write_jsonl(path / "metrics.jsonl", [{"step": 1, "time": 2.0}])
    with pytest.raises(UserError, match=re.escape(str(path))):
        page.render(path)
    assert main([str(path)]) == 2
    error = capsys.readouterr().err
    assert str(path) in error and "explicit_log_dir" in error and "Traceback" not in error


def test_several_runs_are_laid_over_each_other(tmp_path, monkeypatch, capsys):
    """Jobs of one kind, in the same colors in each chart; one that has no such metric keeps its
    color.
    """
    monkeypatch.chdir(tmp_path)
    for name, at in (("ppo", 1000.0), ("grpo", 2000.0)):
        write_job(Path(name) / "actor", at)
    write_supervised(Path("ppo/critic"), 900.0, value_clip_fraction=0.1)
    lines = Path("grpo/actor/metrics.jsonl").read_text().replace("rollouts/rewards", "rollouts/r")
    Path("grpo/actor/metrics.jsonl").write_text(lines.replace("0.9", "0.75"))
    assert main(["ppo", "grpo", "--out", "deep/page.html"]) == 0
    assert capsys.readouterr().out.strip() == "deep/page.html"
    read = Page(text := Path("deep/page.html").read_text(encoding="utf-8"))
    assert after(read, "first, last", 2) == ["ppo/actor", "grpo/actor"]
    assert after(read, "KL to the reference, per token", 2) == ["0, 0.18"] * 2
    assert after(read, "reward, validation", 2) == ["-1, 1", "reward, rollouts"]
    assert re.findall(r"<h2>(.*?)</h2>", text)[:2] == ["Compared", "ppo/actor"]
    charts_of = {svg.get("aria-label"): svg for svg in drawings(text.partition("</section>")[0])}
    for title, names in (("train_optim/entropy", {"c1", "c2"}), ("train_rollouts/r", {"c2"})):
        circles = charts_of[title].findall("circle")
        assert {circle.get("class") for circle in circles} == names and len(circles) >= 10
    assert "timers/generate" not in charts_of and "speed/generate_tokens_per_s" in charts_of


def test_a_run_named_twice_counts_once_and_one_without_a_metric_waits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_job(Path("ppo"))
    assert page.write_report(tmp_path / "ppo", Path("ppo/")) == Path("ppo/report.html")
    assert "Compared" not in (text := Path("ppo/report.html").read_text(encoding="utf-8"))
    assert re.findall(r"<h2>(.*?)</h2>", text) == ["ppo"]
    Path("new").mkdir()
    read = rendered(Path(), Path("ppo"), Path("new"))
    assert read.tags.count("h2") == 1 and "new: no metric yet." in read.texts


def test_training_is_not_laid_over_validation_and_each_run_has_its_line(tmp_path):
    """Runs of which only some validate, more of them than there are colors."""
    key = "rollouts/fraction_of_samples_properly_ended"
    for run in range(9):
        record = {"step": 1, "time": float(run), f"train_{key}": run}
        record |= {f"val_{key}": 10 + run} if run % 2 else {}
        write_jsonl(tmp_path / f"r{run}" / "metrics.jsonl", [record])
    text = page.render(*sorted(tmp_path.iterdir()))
    rows = dict(re.findall(r"<tr><td>(responses[^<]*)</td>(.*?)</tr>", text.split("</table>")[0]))
    title = "responses that end by themselves, "
    assert {title: re.findall("<td>(.*?)</td>", cells) for title, cells in rows.items()} == {
        f"{title}rollouts": [str(run) for run in range(9)],
        f"{title}validation": [str(10 + run) if run % 2 else "" for run in range(9)],
    }
    kinds = re.findall('<th class="(.*?)">', text)
    assert len({*kinds}) == 9 and re.findall('<span class="(.*?)">', text) == kinds
    assert all(f".{word} " in elements.STYLE for kind in kinds for word in kind.split())


def test_the_page_says_how_a_job_was_started(tmp_path):
    write_supervised(tmp_path, 1000.0)
    default = complete_config({}, "gpt_ppo_actor")
    default.model.optim.lr, default.exp_manager.name = 0.5, "<b>"
    default.pretrained_checkpoint.restore_from_path = "b.nemo"
    of_base = {"num_layers": 2, "hidden_size": 8, "data": {"x": {"y": 1}}}
    of_base["tokenizer"] = {"type": "/tmp/nemo_0123456789abcdef/tokenizer"}
    default.merge_with({"model": of_base})
    OmegaConf.save(default, tmp_path / "config.yaml", resolve=True)
    command = "nemo-aligner train '++model.data={x: {y: 1}}' model.hidden_size=8"
    record = {"job": "gpt_ppo_actor", "command": command, "versions": {"torch": "2"}}
    (tmp_path / page.ABOUT_FILE).write_text(json.dumps(record))
    git = ["1a\ndiff --git a/old.py b/old.py", "2b\n+commit hash: 3c\ndiff --git a/x.py b/x.py"]
    (tmp_path / "git-info.log").write_text("".join(f"commit hash: {each}\n" for each in git))
    read = rendered(tmp_path)
    assert "How it was started, and 5 settings that are not the defaults" in read.texts
    git = "git commit 2b, changed files: x.py"
    assert after(read, record["command"], 2) == ["torch 2", git]
    assert after(read, "default", 20) == [
        *("exp_manager.name", "<b>", "megatron_gpt_ppo_actor"),
        *("pretrained_checkpoint.restore_from_path", "b.nemo", "None"),
        *("model.optim.lr", "0.5", "9e-07", "model.data.x.y", "1", "None"),
        *("model.hidden_size", "8", "None"),
        *("1 of the checkpoint, or that the defaults leave to it", "key", "value", "default"),
        "model.num_layers",
    ]
    (tmp_path / "git-info.log").unlink()
    assert "It was not started in a git checkout." in rendered(tmp_path).texts


def test_a_running_job_keeps_its_page_current(tmp_path, monkeypatch):
    monkeypatch.setattr(ending, "FIRST_S", 0.0)
    file, report = tmp_path / "report.html", ending.LiveReport(tmp_path)
    logger = CustomLoggerWrapper(metrics_file=tmp_path / "metrics.jsonl", report=report.update)

    def last_step():
        text = file.read_text() if file.exists() else ""
        return re.findall(r"\(step (\d+)\)</td>", text)[-1:]

    for step in range(20):
        logger.log_metrics({"loss": 1 / (step + 1)}, step=step, prefix="train/")
    wait_until(lambda: last_step() == ["19"], 20, last_step, 0.05)
    logger.log_metrics({"loss": 0.0}, step=20, prefix="train/")
    logger.finalize()
    assert last_step() == ["20"]

    def broken(*_args, **_options):
        raise RuntimeError("a fault")

    monkeypatch.setattr(ending, "write_report", broken)
    logger.finalize()


def test_the_last_lines_of_a_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_job(Path("run"), alarms=(3, 4))
    said = ending.last_lines(Path("run").resolve(), "gpt_ppo_actor")
    assert said.splitlines() == [
        "validation: reward -1 (step 0) -> 1 (step 10)",
        "    alarms: in 2 steps, last in 4",
        "   metrics: run/metrics.jsonl",
        "    report: run/report.html",
        "     model: none",
    ]
    model = Path("run/checkpoints/policy.nemo")
    model.parent.mkdir()
    model.touch()
    said = ending.last_lines(Path("run"), "training_rm").splitlines()
    command = f"serve critic pretrained_checkpoint.restore_from_path={model}"
    assert said[4:6] == [f"     model: {model}", f"      next: nemo-aligner {command}"]
    assert ending.last_lines(Path("run"), "gpt_sft", "k=0").endswith("\n     model: none (k=0)")


def test_the_next_commands_can_be_pasted(tmp_path, monkeypatch):
    """Also of the checkpoint of a run without a `.nemo`, beside one of a run before."""
    monkeypatch.chdir(tmp_path)
    write_job(Path("it's a run"))
    model = Path("it's a run/checkpoints/p--loss=5.5-step=2")
    model.mkdir(parents=True)
    nemo = model.with_name("p.nemo")
    nemo.touch()
    os.utime(nemo, (1, 1))
    (model / "state.json").touch()
    monkeypatch.setattr(ending, "complete_checkpoints", lambda _: [(model, {})])

    def words(job):
        lines = ending.last_lines(Path("it's a run"), job).splitlines()
        assert f"     model: {model}" in lines
        commands = [line.partition("next: ")[2] for line in lines if "next: " in line]
        return [shlex.split(command, comments=True)[1:] for command in commands]

    generate, convert, train = words("gpt_sft")
    assert generate == ["generate", str(model)]
    assert convert == ["convert", "nemo-to-hf", str(model), f"{model}-hf"]
    parser = OverridesParser.create()
    for command in (train, words("training_rm")[0]):
        assert parser.parse_overrides(command[2:])[0].value() == str(model)
    Path(f"{model}-hf").mkdir()
    assert [command[0] for command in words("gpt_dpo")] == ["generate"]
    os.utime(nemo)
    assert f"     model: {nemo}\n" in ending.last_lines(Path("it's a run"), "gpt_dpo")


CURVES = {"one point": {1: 2.0}, "flat at zero": {1: 0.0, 2: 0.0}}
CURVES |= {"flat but for rounding": {0: 1e9, 1: 1e9 + 1e-3}, "tiny": {0: -1e-12, 5: 1e-12}}
CURVES |= {"long": {step: math.sin(step) for step in range(5000)}}


@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
def test_chart_is_valid_svg_with_all_points_inside(curve):
    root = ElementTree.fromstring(elements.chart_svg("loss", {"train": curve}))
    width, height = map(float, root.get("viewBox").split()[2:])
    circles = root.findall("circle")
    assert 1 <= len(circles) <= min(len(curve), elements.MAX_POINTS)
    for circle in circles:
        assert 0 <= float(circle.get("cx")) <= width and 0 <= float(circle.get("cy")) <= height
    last_step = max(curve)
    assert f"step {elements.format_number(last_step)}:" in circles[-1].find("title").text


def test_chart_places_points_linearly():
    chart = elements.chart_svg("loss", {"train": {0: 10.0, 1: 20.0, 2: 30.0}})
    circles = ElementTree.fromstring(chart).findall("circle")
    (x0, x1, x2), (y0, y1, y2) = ([float(c.get(at)) for c in circles] for at in ("cx", "cy"))
    assert x0 < x1 < x2 and y0 > y1 > y2  # up is less in SVG
    assert x1 - x0 == pytest.approx(x2 - x1) and y0 - y1 == pytest.approx(y1 - y2)


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(0, 1, [0, 0.5, 1.0]), (3, 11, [4, 6, 8, 10])]
)
def test_ticks_are_round_numbers(low, high, expected):
    assert elements.ticks(low, high) == pytest.approx(expected)


def test_what_the_jobs_did_at_the_same_time(tmp_path):
    """Two lanes, of the last three steps; a phase that contains others is left out, and a job that
    has written none.
    """
    write_job(tmp_path / "actor")
    write_supervised(tmp_path / "sft", 900.0)
    write_supervised(tmp_path / "critic", 1000.0, value_clip_fraction=0.1)

    def lane(*phases):
        return [
            {"step": n, "phase": name, "start": 1000.0 + 10 * n + at, "seconds": seconds}
            for n in range(5)
            for name, at, seconds in phases
        ]

    actor = lane(("generate", 0, 4.0), ("critic_wait", 4, 1.0), ("rollout_time", 0, 5.0))
    actor += lane(("train_time", 5, 5.0))
    critic = lane(("score", 3, 2.0), ("train<i>", 5, 3.0))
    write_jsonl(tmp_path / "actor" / "timeline.jsonl", actor, tail='{"step": 1, "pha')
    write_jsonl(tmp_path / "critic" / "timeline.jsonl", critic)
    jobs = reading.read_run(tmp_path)
    svg = ElementTree.fromstring(elements.timeline_svg(jobs))
    title = lambda bar: bar.find("title").text
    bars = [(title(b), float(b.get("x")), float(b.get("width"))) for b in svg.iter("rect")]
    second = (elements.LANES_WIDTH - elements.LANES_LEFT - elements.RIGHT) / 30
    assert len(bars) == 3 * (3 + 2)
    width = pytest.approx(4 * second, 0.01)
    assert bars[0] == ("generate, step 2: 4.000 s", elements.LANES_LEFT, width)
    score = next(bar for bar in bars if bar[0] == "score, step 3: 2.000 s")
    assert score[1] == pytest.approx(elements.LANES_LEFT + 13 * second, 0.01)
    assert not any("rollout_time" in title for title, *_ in bars)
    assert [text.text for text in svg.iter("text")][0] == "actor"
    assert "What the jobs did at the same time" in page.render(tmp_path)
    (tmp_path / "actor" / "timeline.jsonl").unlink()
    assert elements.timeline_svg(reading.read_run(tmp_path)) == ""


def test_a_single_validation_has_no_change_and_no_alarms_no_section(tmp_path):
    write_supervised(tmp_path / "sft", start=1000.0)
    read = rendered(tmp_path)
    assert after(read, "loss, validation", 2) == ["2.5 (step 2)", "loss, training"]
    assert after(read, "loss, training", 3) == ["4 (step 1)", "2 (step 2)", "-2"]
    assert "Alarms" not in read.texts


def test_policies_come_first_whatever_started_first(tmp_path):
    write_supervised(tmp_path / "sft", start=1000.0)
    write_supervised(tmp_path / "rm", start=2000.0, acc=0.75)
    write_supervised(tmp_path / "critic", start=2900.0, value_clip_fraction=0.0)
    write_job(tmp_path / "ppo_actor", start=3000.0)
    text = page.write_report(tmp_path).read_text(encoding="utf-8")
    assert re.findall(r"<h2>(.*?)</h2>", text) == ["ppo_actor", "critic", "rm", "sft"]
    assert re.findall(r'<a href="#job\d">(.*?)</a>', text) == ["ppo_actor", "critic", "rm", "sft"]


def test_tables_are_used_where_there_are_no_validation_samples(tmp_path):
    write_job(tmp_path)
    rows = [{"prompt": "A film:", "response": "one response", "reward": 0.5}]
    table = {"key": "table/train_rollouts", "step": 3, "rows": rows}
    write_jsonl(tmp_path / "tables.jsonl", [table])
    assert "one response" in page.render(tmp_path)


def test_what_other_algorithms_show(tmp_path):
    titles = {
        "likelihood_fall": "what chosen and rejected responses have both lost",
        "rewards_margin": "margin of rewards",
        "kd_loss": "divergence from the teacher, training",
        "teacher_mass": "probability of the teacher's top-k tokens",
        "fraction_of_samples_properly_ended": "own responses that end by themselves",
        "distance": "divergence from the target, training",
        "effective_responses": "responses that share the weight of a prompt",
    }
    write_supervised(tmp_path, 1000.0, alarms_active=0, **dict.fromkeys(titles, 0.5))
    assert {*titles.values()} <= {*rendered(tmp_path).texts}
