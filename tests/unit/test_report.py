# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The HTML report: read back with a parser, on whole, partial, broken and hostile runs."""

import html.parser
import json
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from nemo_aligner import report
from nemo_aligner.core.errors import UserError


def write_jsonl(path, records, tail=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(json.dumps(record) + "\n" for record in records) + tail, encoding="utf-8"
    )


def write_job(folder, start=1000.0):
    records = [{"step": 0, "time": start, "val_rollouts/rewards": -1.0}]
    for step in range(10):
        records.append(
            {
                "step": step,
                "time": start + step,
                "train_rollouts/rewards": step / 10,
                "train_rollouts/epoch": 1,
            }
        )
        records.append(
            {"step": step, "time": start + step, "timers/generate": 0.5, "timers/train_time": 2.0}
        )
    records.append({"step": 10, "time": start + 10, "val_rollouts/rewards": 1.0})
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


def test_page_shows_curves_timers_and_samples_of_every_job(tmp_path):
    write_job(tmp_path / "sft", start=1000.0)
    write_job(tmp_path / "ppo_actor", start=2000.0)
    write_jsonl(
        tmp_path / "ppo_actor" / "val_samples.jsonl",
        [{"step": step, "prompt": "A film:", "response": text, "reward": reward, "is_end": True}
         for step, text, reward in ((0, "It is dull.", -1.5), (5, "It is so.", 0.0), (10, "It is superb.", 2.25))],
    )  # fmt: skip
    page = Page(report.write_report(tmp_path).read_text(encoding="utf-8"))
    assert [text for text in page.texts if text in ("sft", "ppo_actor")] == [
        "sft",
        "ppo_actor",
    ] * 2  # links, headings
    assert page.texts.count("rewards") == 2  # training and validation share a chart
    assert {"train_rollouts", "val_rollouts", "generate", "20.0"} <= set(
        page.texts
    )  # 10 times 2 s of training
    assert (
        "It is dull.\n(reward -1.5)" in page.texts and "It is superb.\n(reward 2.25)" in page.texts
    )
    assert not any("It is so." in text for text in page.texts)  # only the first and the last step
    # Self-contained: nothing is fetched, nothing is executed.
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert all(value.startswith("#") for name, value in page.attributes if name in ("href", "src"))
    assert "prefers-color-scheme: dark" in report.STYLE


def test_tables_are_used_where_there_are_no_validation_samples(tmp_path):
    write_job(tmp_path)
    rows = [{"prompt": "A film:", "response": "one answer", "reward": 0.5}]
    write_jsonl(
        tmp_path / "tables.jsonl", [{"key": "table/train_rollouts", "step": 3, "rows": rows}]
    )
    assert "one answer" in report.render(tmp_path)


def test_text_of_a_model_cannot_become_markup(tmp_path):
    evil = "</td><script>alert(1)</script>"
    write_jsonl(
        tmp_path / "metrics.jsonl",
        [{"step": 1, "time": 1.0, f"train/{evil}": 1.0, f"timers/{evil}": 1.0}],
    )
    write_jsonl(
        tmp_path / "val_samples.jsonl",
        [{"step": 0, "prompt": evil, "response": evil, "reward": 0}],
    )
    text = report.render(tmp_path)
    assert "<script" not in text
    assert evil in Page(text).texts


def test_partial_run_with_a_torn_line_and_missing_values(tmp_path):
    write_jsonl(
        tmp_path / "metrics.jsonl",
        [
            {"step": 1, "time": 1.0, "train/loss": 3.0},
            {"step": 2, "time": 2.0, "train/loss": None},
        ],
        tail='{"step": 3, "tra',
    )
    job = report.read_run(tmp_path)[0]
    assert job.series == {"train/loss": {1: 3.0}}
    assert "1 unreadable line(s)" in report.render(tmp_path)


def test_a_resumed_job_overwrites_the_steps_it_repeats(tmp_path):
    values = [(1, 5.0), (2, 4.0), (2, 3.5), (3, 3.0)]
    write_jsonl(
        tmp_path / "metrics.jsonl", [{"step": s, "time": 1.0, "train/loss": v} for s, v in values]
    )
    assert report.read_run(tmp_path)[0].series["train/loss"] == {1: 5.0, 2: 3.5, 3: 3.0}


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
        report.read_run(path)
    assert report.main([str(path)]) == 2
    error = capsys.readouterr().err
    assert str(path) in error and "explicit_log_dir" in error and "Traceback" not in error


def test_command_line_writes_where_it_is_told(tmp_path, capsys):
    write_job(tmp_path / "run")
    out = tmp_path / "deep" / "page.html"
    assert report.main([str(tmp_path / "run"), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out) and out.read_text().startswith(
        "<!DOCTYPE html>"
    )


CURVES = {
    "one point": {1: 2.0},
    "flat at zero": {1: 0.0, 2: 0.0},
    "flat but for rounding": {0: 1e9, 1: 1e9 + 1e-3},
    "tiny": {0: -1e-12, 5: 1e-12},
    "long": {step: math.sin(step) for step in range(5000)},
}


@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
def test_chart_is_valid_svg_with_all_points_inside(curve):
    root = ElementTree.fromstring(report.chart_svg("loss", {"train": curve}))
    width, height = map(float, root.get("viewBox").split()[2:])
    circles = root.findall("circle")
    assert 1 <= len(circles) <= report.MAX_POINTS and len(circles) == min(len(curve), len(circles))
    for circle in circles:
        assert 0 <= float(circle.get("cx")) <= width and 0 <= float(circle.get("cy")) <= height
    last_step = max(curve)
    assert f"step {report.format_number(last_step)}:" in circles[-1].find("title").text


def test_chart_places_points_linearly():
    root = ElementTree.fromstring(report.chart_svg("loss", {"train": {0: 10.0, 1: 20.0, 2: 30.0}}))
    (x0, y0), (x1, y1), (x2, y2) = (
        (float(c.get("cx")), float(c.get("cy"))) for c in root.findall("circle")
    )
    assert x0 < x1 < x2 and y0 > y1 > y2  # up is less in SVG
    assert x1 - x0 == pytest.approx(x2 - x1) and y0 - y1 == pytest.approx(y1 - y2)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.5, 1.0]),
        (0, 100, [0, 50, 100]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
        (3, 11, [4, 6, 8, 10]),
    ],
)
def test_ticks_are_round_numbers(low, high, expected):
    assert report.ticks(low, high) == pytest.approx(expected)
