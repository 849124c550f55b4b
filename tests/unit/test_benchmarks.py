# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks measure with: sides that take turns, chosen lengths, the page."""

import json
import sys
from xml.etree import ElementTree

import pytest
import torch


def build(name, file):
    """A side that notes its calls."""

    def call():
        with open(file, "a") as calls:
            calls.write(name)

    return {"case": call}


@pytest.mark.full
@pytest.mark.slow
def test_sides_take_turns(benchmark, tmp_path):
    measure, file = benchmark("measure"), tmp_path / "calls"
    with measure.Side(build, "a", file) as ours, measure.Side(build, "b", file) as peer:
        figures = measure.in_turns({"ours": ours, "peer": peer}, "case", 3)
    assert file.read_text() == "abababab"
    assert [len(f.cpu) for f in figures.values()] == [3, 3]  # the first round does not count
    assert all(0 <= share <= 1 for f in figures.values() for share in f.others)


def test_both_forms_of_the_model_count_down(benchmark):
    countdown = benchmark("countdown")
    lengths = torch.tensor([1, 5, 128])
    prompts = countdown.prompts(lengths, 8)
    with torch.no_grad():
        model = countdown.build_peer()
        following = model(prompts).logits[:, -1].argmax(-1)
    assert following.tolist() == [0, 4, 127]  # 0 is the end
    skewed = countdown.skewed_lengths(1000)
    assert 1 <= skewed.min() and skewed.max() == 128 and 28 < skewed.float().mean() < 34


def test_the_page_gets_the_tables_of_the_figures_that_are_there(benchmark, tmp_path, monkeypatch):
    run = benchmark("run")
    page, plot = tmp_path / "page.md", tmp_path / "plot.svg"
    parts = [f"<!-- {name} -->\nold {name}\n<!-- end of {name} -->\n" for name in run.BENCHMARKS]
    page.write_text("text\n" + "".join(parts))
    places = {"PAGE": page, "PLOT": plot, "RESULTS": tmp_path, "CURVES": tmp_path}
    for name, value in places.items():
        monkeypatch.setattr(run, name, value)
    machine = {"date": "2026-01-01", "cores": "2", "cpu": "C", "python": "3"}
    machine |= dict.fromkeys(benchmark("measure").LIBRARIES, "1")
    rows = [{"case": "a & b", "ratio": 0.5}, {"case": "c", "ratio": 2.0, "more": 7}]
    figures = {"benchmark": "updates", "machine": machine, "rows": rows}
    figures["tables"] = {"More": [{"other": 5}]}
    figures["curves"] = {"A & B": {"one": {"1": 1.0, "4": 2.0}, "two": {"1": 1.0, "4": 4.0}}}
    (tmp_path / "updates.json").write_text(json.dumps(figures))
    run.write_page()
    text = page.read_text()
    assert "| case | ratio | more |" in text and "| a & b | 0.5 |  |" in text
    assert "old updates" not in text and "old generate" in text and "2026-01-01" in text
    assert text.index("| c | 2.0 | 7 |") < text.index("More:\n\n| other |") < text.index("2026")
    assert "a &amp; b" in plot.read_text() and "2.00" in plot.read_text()
    curves = ElementTree.parse(tmp_path / "updates.svg").getroot()
    names = [element.tag.rpartition("}")[2] for element in curves.iter()]
    assert curves.tag == "{http://www.w3.org/2000/svg}svg"
    assert (names.count("polyline"), names.count("circle"), names.count("style")) == (2, 4, 1)
    run.write_page()
    assert page.read_text() == text


def test_every_benchmark_of_make_bench_has_its_place_on_the_page(benchmark):
    run = benchmark("run")
    text = run.PAGE.read_text()
    for name in run.BENCHMARKS:
        assert f"<!-- {name} -->" in text and f"<!-- end of {name} -->" in text
        assert (run.ROOT / "benchmarks" / f"{name}.py").is_file()


def test_a_gpu_check_keeps_what_each_part_found(benchmark, tmp_path, monkeypatch, capsys):
    """One part writes figures, one fails, one is cut off with what it has started."""
    gpu_check = benchmark("gpu_check")
    figures = {"benchmark": "x", "title": "Speed of x", "rows": [{"case": "x", "s": 1.5}]}
    write = f"import sys; open(sys.argv[2], 'w').write({json.dumps(figures)!r})"
    sleeps = "import subprocess; print('began', flush=True); subprocess.run(['sleep', '600'])"
    parts = {
        "speed": gpu_check.Part("Speed", ("-c", write), 60),
        "numbers": gpu_check.Part("Numbers", ("-c", "print('1 failed'); exit(3)"), 60, False),
        "profile": gpu_check.Part("Profile", ("-c", sleeps), 3),
    }
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(tmp_path / "out")])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main() == 0 and "speed, at most 60 s: python -c" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    assert gpu_check.main() == 1
    found = json.loads((tmp_path / "out/gpu_check.json").read_text())
    assert found["machine"]["gpu"] == "a GPU"
    codes = [part["exit_code"] for part in found["parts"].values()]
    assert codes == [0, 3, None]
    page = (tmp_path / "out/gpu_check.md").read_text()
    assert "| x | 1.5 |" in page and "1 failed" in page and "began" in page and "cut off" in page
