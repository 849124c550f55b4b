# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Kinds of data files, their columns, blends and errors, against the lists that the files were
made from.
"""

import gzip
import json
import pickle
import random

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from nemo_aligner.config.data_rules import plain_columns
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.data.nlp import index_files
from nemo_aligner.data.nlp.datasets import DPOModelDataset, RewardModelDataset
from nemo_aligner.data.nlp.fields import Columns
from nemo_aligner.data.nlp.prompts import RLHFDataset
from nemo_aligner.data.nlp.records import DataFile, Records
from tests.data_sets import (
    build_labelled,
    build_pairs,
    build_prompts,
    prompts_of,
    records,
    sample_of,
    sft,
)

ROWS = [{"text": f"text {n} naïve 日本", "tags": [{"n": n}, {"n": -n}]} for n in range(700)]


def write_jsonl(path, rows):
    path.write_bytes(lines_of(rows))
    return path


def lines_of(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def write_gz(path, rows):
    path.write_bytes(gzip.compress(lines_of(rows)))
    return path


def write_zst(path, rows):
    with pa.OSFile(str(path), "wb") as file, pa.CompressedOutputStream(file, "zstd") as stream:
        stream.write(lines_of(rows))
    return path


def write_parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=300)
    return path


def write_saved(path, rows):
    datasets.Dataset.from_list(rows).save_to_disk(path, num_shards=2)
    return path


def write_arrow(path, rows):
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=200)
    return path


def write_folder(path, rows):
    path.mkdir()
    (path / "README.md").write_text("not data")
    write_parquet(path / "a.parquet", rows[:100])
    write_gz(path / "b.jsonl.gz", rows[100:300])
    write_jsonl(path / "c.jsonl", rows[300:])
    return path


def write_splits(path, rows):
    (path / "data").mkdir(parents=True)
    write_parquet(path / "data" / "train_prefs-00000-of-00002.parquet", rows[:400])
    write_parquet(path / "data" / "train_prefs-00001-of-00002.parquet", rows[400:])
    write_parquet(path / "data" / "test-00000-of-00001.parquet", rows[:1])
    return path / "train_prefs"


def write_saved_splits(path, rows):
    both = {"train": datasets.Dataset.from_list(rows), "test": datasets.Dataset.from_list(rows)}
    datasets.DatasetDict(both).save_to_disk(path)
    return path / "train"


def write_pattern(path, rows):
    path.mkdir()
    write_parquet(path / "x-1.parquet", rows[:400])
    write_parquet(path / "x-2.parquet", rows[400:])
    write_parquet(path / "y-1.parquet", rows)
    return path / "x-*.parquet"


KINDS = {
    "data.jsonl": write_jsonl,
    "data.jsonl.gz": write_gz,
    "data.jsonl.zst": write_zst,
    "data.parquet": write_parquet,
    "data.arrow": write_arrow,
    "saved": write_saved,
    "folder": write_folder,
    "splits": write_splits,
    "saved-splits": write_saved_splits,
    "pattern": write_pattern,
}


# --- kinds of files ---


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_rows_that_were_written(kind, tmp_path):
    path = KINDS[kind](tmp_path / kind, ROWS)
    before = sorted(tmp_path.rglob("*"))
    found = records(path)
    assert [found[n] for n in range(len(found))] == ROWS
    assert found.notes.tolist() == [len(row["text"]) for row in ROWS]
    assert found.counts == [700] and found.first_of_file.tolist() == [0]
    copy = pickle.loads(pickle.dumps(found))
    assert all(copy[n] == ROWS[n] for n in (0, 399, 699))
    assert sorted(tmp_path.rglob("*")) == before  # nothing is kept of small files


@pytest.mark.parametrize("kind", KINDS)
def test_large_files_of_every_kind_are_read_from_their_index(kind, tmp_path, no_small_files):
    path = KINDS[kind](tmp_path / kind, ROWS)
    calls = []

    def inspect(record):
        calls.append(record["text"])
        return len(record["text"]), record["tags"][0]["n"] / 2

    starts = [records(path, inspect, settings=lambda: "tokens of A") for _ in range(2)]
    assert calls == [row["text"] for row in ROWS]  # once, not twice
    for found in starts:
        assert [found[n] for n in range(len(found))] == ROWS
        assert found.notes.tolist() == [len(row["text"]) for row in ROWS]
        assert found.numbers.tolist() == [n / 2 for n in range(700)]
    del calls[:]
    records(path, inspect, settings=lambda: "tokens of B")
    records(path, inspect, ("text",), allow_blank=True, settings=lambda: "tokens of A")
    records(path, inspect, columns={"x": "text"}, settings=lambda: "tokens of A")
    records(path, inspect)
    records(path, inspect, settings=lambda: None)  # a tokenizer whose state is not known
    assert len(calls) == 5 * 700


def test_files_are_recognized_without_their_endings(tmp_path):
    parquet = write_parquet(tmp_path / "a", ROWS)
    packed = write_gz(tmp_path / "b", ROWS)
    found = Records([parquet, packed], ["text"], lambda record: 0)
    assert found.counts == [700, 700] and found[699] == found[1399] == ROWS[699]


def test_what_is_kept_lies_in_index_mapping_dir(tmp_path, no_small_files):
    (tmp_path / "data").mkdir()
    path = write_parquet(tmp_path / "data" / "a.parquet", ROWS)
    found = records(path, index_mapping_dir=str(tmp_path / "index"), settings=lambda: "A")
    assert found[5] == ROWS[5]
    assert [each.name for each in (tmp_path / "data").iterdir()] == ["a.parquet"]
    names = {each.suffix for each in (tmp_path / "index").iterdir()}
    assert names == {".npy", ".arrow", ".lock"}


def test_a_folder_without_write_access_is_read(tmp_path, no_small_files, monkeypatch, warnings):
    """A file stands where the folder of the index would be."""
    (tmp_path / index_files.FOLDER).write_text("")
    path = write_parquet(tmp_path / "a.parquet", ROWS)
    packed = write_gz(tmp_path / "b.jsonl.gz", ROWS)
    for _ in range(2):
        for file in (path, packed):
            assert records(file, settings=lambda: "A")[5] == ROWS[5]
    assert len(list((tmp_path / "home" / "nemo_aligner").glob("*.npy"))) == 2
    assert not warnings
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / index_files.FOLDER))  # nor there
    for file in (path, packed):
        found = records(file, settings=lambda: "A")
        assert [found[n] for n in range(700)] == ROWS
    assert len(warnings) == 2 and "Set model.data.index_mapping_dir" in warnings[0]


# --- columns ---


def test_columns_by_hand():
    row = {"a": "x", "b": {"c": ["y", "z"]}, "d.e": "w", "n": 3, "text": "old"}
    columns = {"text": "{a}: {b.c.1}!", "first": "b.c.0", "dotted": "d.e", "a": "d.e"}
    columns["label"] = ["n", "b.c.0"]
    made = {"text": "x: z!", "first": "y", "dotted": "w", "a": "w", "label": [3, "y"]}
    assert Columns(columns)(row) == row | made
    assert Columns(None)(row) is row
    assert Columns(OmegaConf.create({"label": ["n", "a"]}))(row)["label"] == [3, "x"]
    for form, message in {
        "q": r"there is no column 'q' \(columns.text\); there are \['a', 'b', ",
        "b.c.2": "no column 'b.c.2'",
        "{n}": "column 'n' .columns.text. must be text, not int",
    }.items():
        with pytest.raises(UserError, match=message):
            Columns({"text": form})(row)
    for bad in ({"text": 3}, {"text": []}, {"text": [1]}, {"text": None}, "text", {"text": ""}):
        with pytest.raises(ConfigError, match="model.data.columns"):
            plain_columns(bad)


def test_layouts_of_tldr_and_helpsteer2(tmp_path, tiny_tokenizer):
    said = [[{"text": " a"}, {"text": f" {n}"}] for n in range(4)]
    posts = [{"info": {"post": f"p{n}\nTL;DR:"}, "summaries": each} for n, each in enumerate(said)]
    prefix = {"train": [str(write_parquet(tmp_path / "comparisons.parquet", posts))]}
    columns = {"prompt": "info.post", "chosen": "summaries.0.text", "rejected": "summaries.1.text"}
    pairs, _, _ = build_pairs(prefix, tiny_tokenizer, columns=columns)
    for name, text in {"chosen": " a", "rejected": " 2"}.items():
        assert sample_of(pairs[2], name, tiny_tokenizer) == f"p2\nTL;DR:{text}"
    prompts, _, _ = build_prompts(prefix, tiny_tokenizer, columns={"text": "info.post"})
    assert prompts_of(prompts, tiny_tokenizer)[3] == "p3\nTL;DR:"

    names = ["helpfulness", "correctness", "coherence", "complexity", "verbosity"]
    rated = [{"prompt": "p", "response": "r"} | dict(zip(names, range(n, n + 5))) for n in (0, 1)]
    prefix = {"train": [str(write_saved(tmp_path / "helpsteer2", rated))]}
    how = {"columns": {"text": "{prompt}\n{response}", "label": names}}
    how["model"] = {"regression": {"num_attributes": 5}}
    item = build_labelled(prefix, tiny_tokenizer, **how)[0][1]
    assert item["labels"].tolist() == [1, 2, 3, 4, 5]
    assert tiny_tokenizer.ids_to_text(item["inputs"][: item["lengths"]].tolist()) == "p\nr"


def test_pairs_in_rows_and_in_lines_do_not_mix(tmp_path, tiny_tokenizer):
    pair = {"chosen": "a", "rejected": "b"}
    for second, message in {
        '{"text": "c"}': "line 2: this line holds one text, the lines before it a pair",
        '{"chosen": "c"}': "line 2: field 'rejected' is missing",
        '{"chosen": "c", "rejected": null}': "line 2: field 'rejected' must be text, not null",
        '{"chosen": "c", "rejected": " "}': "line 2: field 'rejected' is empty",
        '{"chosen": "c", "rejected": "d", "prompt": 1}': "field 'prompt' must be text, not int",
    }.items():
        (tmp_path / "p.jsonl").write_text(json.dumps(pair) + "\n" + second)
        with pytest.raises(UserError, match=f"p.jsonl, .*{message}"):
            RewardModelDataset([tmp_path / "p.jsonl"], tiny_tokenizer, 8)


def test_equal_pairs_are_counted_before_they_are_refused(tmp_path, tiny_tokenizer):
    pairs = [{"prompt": "p", "chosen": "a", "rejected": "b" if n % 7 else "a"} for n in range(70)]
    path = write_parquet(tmp_path / "p.parquet", pairs)
    for dataset in (RewardModelDataset, DPOModelDataset):
        with pytest.raises(UserError, match=r"row 1, 8, 15, .* 57 \(10 in all\): 'chosen' and"):
            dataset([path], tiny_tokenizer, 8)


# --- blends ---


def test_a_blend_of_different_kinds_and_columns(tmp_path, tiny_tokenizer):
    rows = [{"q": f"q{n}", "a": f"a{n}"} for n in range(40)]
    plain = [{"input": f"Q{n}", "output": f"A{n}"} for n in range(40)]
    parquet = write_parquet(tmp_path / "a.parquet", rows)
    packed = write_gz(tmp_path / "b.jsonl.gz", plain)
    entry = {"path": str(parquet), "columns": {"input": "q", "output": "a"}}
    for share, files in (
        (0.75, [0.75, entry, 0.25, str(packed)]),
        (0.25, [1, entry, 3, str(packed)]),
    ):
        dataset = sft(files, tiny_tokenizer)
        texts = [tiny_tokenizer.ids_to_text(dataset[n]["tokens"]) for n in range(len(dataset))]
        assert len(texts) == 80
        lower = [text for text in texts if text.startswith("q")]
        assert abs(len(lower) - 80 * share) <= 1
        first = [text.removesuffix("<|endoftext|>") for text in lower[:20]]
        assert first == [f"q{n} a{n}" for n in range(20)]
    with pytest.raises(ConfigError, match="give a path, or a mapping with path and columns"):
        DataFile.of({"file": "a"}, "x")


# --- bad input ---


@pytest.mark.parametrize("function", [write_parquet, write_saved])
@pytest.mark.parametrize(
    ("more", "columns", "message"),
    [
        ({"text": None}, {}, "row 301: field 'text' must be text, not "),
        ({}, {"text": "q"}, r"row 1: there is no column 'q' \(columns.text\); there a"),
        ({}, {"text": "n"}, "row 1: field 'text' must be text, not int"),
        (None, {}, r"row 1: field 'text' is missing; the line has \['n'\]"),
        ({"text": " "}, {}, r"row 301\. Remove them, or set model.data.allow_empty"),
        (
            {"o": "y"},
            {"text": "{text}{o}"},
            "row 1: column 'o' .* must be text, not null|there is no column 'o'",
        ),
    ],
    ids=["null", "column", "type", "missing", "blank", "null in a template"],
)
def test_bad_rows_are_named_with_file_and_row(
    more, columns, message, function, tmp_path, tiny_tokenizer
):
    """Of 301 rows the last has `more`; None: none has a text."""
    rows = [{"text": f"t{n}", "n": 1} for n in range(301)]
    rows = [{"n": 1}] * 2 if more is None else [*rows[:-1], rows[-1] | more]
    path = function(tmp_path / "rows", rows)
    with pytest.raises(UserError, match=f"rows, {message}"):
        RLHFDataset([path], tiny_tokenizer, 30, {"columns": columns})


@pytest.mark.parametrize("name", ["trian", "absent.jsonl"])
def test_a_path_that_does_not_exist_is_refused_at_once(name, tmp_path, monkeypatch):
    """Without reading the folders beside it, which may be many."""
    monkeypatch.setattr(datasets.data_files, "get_data_patterns", lambda _base: pytest.fail())
    write_splits(tmp_path / "splits", [{"text": "a"}] * 2)
    with pytest.raises(UserError, match=f"data file .*splits/{name} does not exist"):
        records(tmp_path / "splits" / name)


def test_damaged_and_empty_files_are_named(tmp_path, no_small_files):
    rng = random.Random(0)
    rows = [{"text": "".join(rng.choices("abcdefgh", k=200))} for _ in range(2000)]
    whole = write_parquet(tmp_path / "whole.parquet", rows).read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    middle = bytearray(whole)
    middle[len(whole) // 2 : len(whole) // 2 + 4000] = bytes(4000)
    (tmp_path / "middle.parquet").write_bytes(middle)
    (tmp_path / "empty.parquet").write_bytes(b"")
    write_parquet(tmp_path / "no_rows.parquet", rows[:1])
    pq.write_table(pa.Table.from_pylist(rows).slice(0, 0), tmp_path / "no_rows.parquet")
    (tmp_path / "other.parquet").write_text("text")
    for write_packed, ending in ((write_gz, "gz"), (write_zst, "zst")):
        packed = write_packed(tmp_path / f"p.jsonl.{ending}", rows).read_bytes()
        (tmp_path / f"cut.jsonl.{ending}").write_bytes(packed[: len(packed) // 2])
    arrow = write_arrow(tmp_path / "a.arrow", rows).read_bytes()
    (tmp_path / "cut.arrow").write_bytes(arrow[:5000])
    write_saved(tmp_path / "saved", rows)
    next((tmp_path / "saved").glob("*.arrow")).unlink()
    for folder, name in (("nothing", "README.md"), ("csv", "train.csv")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text("a,b")
    write_splits(tmp_path / "splits", rows)
    write_saved_splits(tmp_path / "two", rows)
    for name, message in {
        "cut.parquet": "cut.parquet is not a parquet file .*cut short",
        "middle.parquet": "middle.parquet cannot be read after row [0-9]+ .*damaged",
        "other.parquet": "other.parquet is not a parquet file",
        "empty.parquet": "data file .*empty.parquet is empty",
        "no_rows.parquet": "data file .*no_rows.parquet is empty",
        "cut.jsonl.gz": "cut.jsonl.gz cannot be unpacked .*cut short",
        "cut.jsonl.zst": "cut.jsonl.zst cannot be unpacked .*cut short",
        "cut.arrow": "cut.arrow",
        "saved": "saved cannot be read as a dataset",
        "nothing": "the folder .*nothing holds no data",
        "csv": "the folder .*csv holds no data",
        "splits": "splits, test, train_prefs: name one of them, for example .*splits/test",
        "two": "several splits, test, train: name one of them, for example .*two/test",
        "z*.jsonl": "no data file matches",
    }.items():
        with pytest.raises(UserError, match=message):
            records(tmp_path / name)
        assert not list(tmp_path.rglob("*.tmp"))
