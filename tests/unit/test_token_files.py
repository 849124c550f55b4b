# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Files of tokens in the place of jsonl (`data_impl`), and blends of several files."""

import json
import pickle
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from omegaconf import OmegaConf

from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.data.nlp.builders import blend, build_dataloader, build_train_valid_test_datasets
from tests.data_sets import (
    build,
    build_labelled,
    build_pairs,
    build_prompts,
    prompts_of,
    sample_of,
)
from tests.unit.test_config_checks import check

TEXTS = ["the film was a joy", "the is dull", "naïve? 日本", "n sad evening", "x" * 40, "x bad"]


def write_jsonl(path, texts):
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return str(path)


def write_mmap(path, tokens):
    builder = IndexedDatasetBuilder(f"{path}.bin", dtype=np.int32)
    for sample in tokens:
        builder.add_document(torch.tensor(sample), [len(sample)])
    builder.finalize(f"{path}.idx")
    return str(path)


def write_packed(path, tokens):
    array = np.empty(len(tokens), dtype=object)
    for number, sample in enumerate(tokens):
        array[number] = np.array(sample, dtype=np.int64)
    np.save(path, array, allow_pickle=True)
    return f"{path}.npy"


WRITERS = {"mmap": write_mmap, "packed_jsonl": write_packed}
BUILDERS = {"prompts": build_prompts, "pairs": build_pairs}


# --- files of tokens ---


@pytest.mark.parametrize("kind", sorted(BUILDERS))
@pytest.mark.parametrize("impl", sorted(WRITERS))
def test_tokens_give_the_items_of_their_texts(tmp_path, tiny_tokenizer, impl, kind):
    """Two files, one with a text that is too long, as a whole and divided."""
    parts = TEXTS[:2], TEXTS[2:]
    texts = [write_jsonl(tmp_path / f"{n}.jsonl", part) for n, part in enumerate(parts)]
    ids = [[tiny_tokenizer.text_to_ids(text) for text in part] for part in parts]
    tokens = [WRITERS[impl](tmp_path / f"t{n}", part) for n, part in enumerate(ids)]
    expected, *_ = BUILDERS[kind]({"train": texts}, tiny_tokenizer)
    found, *_ = BUILDERS[kind]({"train": tokens}, tiny_tokenizer, impl)
    assert len(found) == len(expected) == (6 if kind == "prompts" else 2)
    for index in (*range(len(expected)), -1):
        torch.testing.assert_close(dict(found[index]), dict(expected[index]), rtol=0, atol=0)
    halves = BUILDERS[kind](tokens, tiny_tokenizer, impl, splits="50,50,0")
    assert [half and len(half) for half in halves] == [len(expected) // 2] * 2 + [None]


def test_tokens_are_not_changed_by_append_eod(tmp_path, tiny_tokenizer, warnings):
    prefix = write_mmap(tmp_path / "tokens", [[1, 2, 3]])
    dataset, *_ = build_prompts({"train": [prefix]}, tiny_tokenizer, "mmap", append_eod=True)
    assert dataset[0]["text"].tolist() == [1, 2, 3]
    assert "append_eod=True has no effect with data_impl=mmap" in warnings[0]


def test_bad_files_of_tokens_are_refused(tmp_path, tiny_tokenizer):
    write_mmap(tmp_path / "other", [[1, 2], [299, 300]])
    write_mmap(tmp_path / "damaged", [[1, 2]])
    (tmp_path / "damaged.idx").write_bytes(b"no index at all")
    (tmp_path / "text.npy").write_text('{"text": "a"}')
    write_packed(tmp_path / "matrix", [[[1, 2]]])
    for impl, name, message in (
        ("mmap", "no", "no.idx does not exist. With .*data_impl=mmap a path names"),
        ("mmap", "other", "document 1: tokens from 299 to 300, but the tokenizer has"),
        ("mmap", "damaged", "damaged has an .idx that cannot be read"),
        ("packed_jsonl", "no.npy", "no.npy does not exist"),
        ("packed_jsonl", "text.npy", "text.npy is not a .npy file of tokens"),
        ("packed_jsonl", "matrix.npy", r"document 0: int64 of shape \(1, 2\), but the tokens of"),
    ):
        with pytest.raises(UserError, match=message):
            build_prompts({"train": [str(tmp_path / name)]}, tiny_tokenizer, impl)


@pytest.mark.parametrize(
    "impl, ending", [("mmap", ".idx"), ("mmap", ".bin"), ("packed_jsonl", "")]
)
def test_a_damaged_file_of_tokens_is_named(tmp_path, tiny_tokenizer, impl, ending):
    """Cut off, or with a byte changed, it is read or named: there is no error of another kind."""
    path = WRITERS[impl](tmp_path / "t", [[1, 2, 3], [4, 5]])
    damaged = Path(f"{path}{ending}")
    whole = damaged.read_bytes()
    steps = range(0, len(whole), max(1, len(whole) // 60))
    versions = [whole[:length] for length in steps]
    # A changed byte in a pickle may crash NumPy itself: only in its header.
    end = whole.index(b"\n") if impl == "packed_jsonl" else len(whole)
    changed = [n for n in steps if n < end]
    versions += [whole[:n] + bytes([whole[n] ^ 0xFF]) + whole[n + 1 :] for n in changed]
    refused = 0
    for version in versions:
        damaged.write_bytes(version)
        try:
            build_prompts({"train": [path]}, tiny_tokenizer, impl)
        except UserError as error:
            refused += 1
            assert str(tmp_path / "t") in str(error)
    assert refused > len(versions) // 3
    damaged.write_bytes(whole)
    build_prompts({"train": [path]}, tiny_tokenizer, impl)


def write_pickle(path, body):
    """A .npy file whose array of arrays is the pickle `body`."""
    write_packed(path, [[1]])
    file = path.with_suffix(".npy")
    header = file.read_bytes().partition(b"\n")[0] + b"\n"
    file.write_bytes(header + body)
    return str(file)


@pytest.mark.parametrize("module", [b"numpy.core.multiarray", b"numpy._core.multiarray"])
def test_arrays_of_another_version_of_numpy_are_read(tmp_path, tiny_tokenizer, module):
    array = np.empty(1, dtype=object)
    array[0] = np.array([1, 2, 3])
    body = pickle.dumps(array, protocol=3)
    own = np.empty(0).__reduce__()[0].__module__.encode()
    assert own in body
    path = write_pickle(tmp_path / "t", body.replace(own, module))
    dataset, *_ = build_prompts({"train": [path]}, tiny_tokenizer, "packed_jsonl")
    assert dataset[0]["text"].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "body",
    [b"cnumpy\nscalar\n.", b"cno_module\nx\n.", b"", b"g7\n.", b"cnumpy\nndarray\n(tR."],
    ids=["no such name", "no such module", "cut off", "no such object", "no arguments"],
)
def test_a_broken_pickle_is_refused(tmp_path, tiny_tokenizer, body):
    prefix = {"train": [write_pickle(tmp_path / "t", body)]}
    with pytest.raises(UserError, match="t.npy is not a .npy file of tokens .*damaged"):
        build_prompts(prefix, tiny_tokenizer, "packed_jsonl")


def test_a_pickle_that_runs_code_is_refused(tmp_path, tiny_tokenizer):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "run"), "w"))

    array = np.empty(1, dtype=object)
    array[0] = Evil()
    np.save(tmp_path / "evil.npy", array, allow_pickle=True)
    prefix = {"train": [str(tmp_path / "evil.npy")]}
    with pytest.raises(UserError, match=r"it holds (io|_io)\.open, but only arrays of numbers"):
        build_prompts(prefix, tiny_tokenizer, "packed_jsonl")
    assert not (tmp_path / "run").exists()
    assert pickle.dumps(array)  # it is a pickle that would otherwise load


def test_labels_need_texts(tmp_path):
    with pytest.raises(ConfigError, match="data_impl=mmap holds tokens only, but a regression"):
        build_labelled({"train": ["a"]}, None, "mmap")
    mmap = "model.data.data_impl=mmap"
    check("training_rm", tmp_path, mmap)
    for settings, message in (
        (["model.data.data_impl=lazy"], "data_impl=lazy is not supported"),
        ([mmap, "model.reward_model_type=regression"], "data_impl=mmap holds tokens only"),
    ):
        with pytest.raises(ConfigError, match=message):
            check("training_rm", tmp_path, *settings)


# --- blends ---


def test_a_blend_keeps_to_its_weights_at_every_position():
    files = [np.arange(100, 103), np.arange(200, 250)]
    order = blend(files, [3.0, 7.0], 40)
    for length in range(1, 41):
        share = (order[:length] < 200).sum()
        assert abs(share - 0.3 * length) < 1
    assert order[order < 200].tolist() == [100, 101, 102] * 4  # too small: it starts again
    assert order[order >= 200].tolist() == list(range(200, 228))  # in order, each once


def write_both(folder, *counts):
    """Two files, with the texts a0, a1, ..., and b0, b1, ..."""
    return [
        write_jsonl(folder / f"{name}.jsonl", [f"{name}{n}" for n in range(count)])
        for name, count in zip("ab", counts, strict=True)
    ]


def test_weights_in_data_prefix(tmp_path, tiny_tokenizer):
    a, b = write_both(tmp_path, 4, 8)
    prefix = {"train": [0.25, a, 0.75, b], "validation": ["1", b, "1", a], "test": [a, b]}
    train, validation, test = build_prompts(prefix, tiny_tokenizer)
    assert len(train) == len(validation) == len(test) == 12
    found = prompts_of(train, tiny_tokenizer)
    assert sorted(found) == sorted([f"a{n}" for n in range(3)] + [f"b{n % 8}" for n in range(9)])
    assert [name[0] for name in prompts_of(validation, tiny_tokenizer)].count("a") == 6
    whole = [*(f"a{n}" for n in range(4)), *(f"b{n}" for n in range(8))]
    assert prompts_of(test, tiny_tokenizer) == whole
    limited, *_ = build_prompts(prefix, tiny_tokenizer, samples=[4] * 3)
    assert sorted(name[0] for name in prompts_of(limited, tiny_tokenizer)) == ["a", "b", "b", "b"]


def test_a_blend_is_divided_file_by_file(tmp_path, tiny_tokenizer):
    """A part leaves out files too small for it."""
    a, b = write_both(tmp_path, 4, 8)
    train, validation, test = build_prompts([1, a, 2, b], tiny_tokenizer, splits="75,25,0")
    expected = {f"a{n}" for n in range(3)} | {f"b{n}" for n in range(6)}
    assert set(prompts_of(train, tiny_tokenizer)) == expected
    assert set(prompts_of(validation, tiny_tokenizer)) == {"a3", "b6", "b7"}
    assert test is None
    a, b = write_both(tmp_path, 20, 4)
    train, validation, _ = build_prompts([1, a, 1, b], tiny_tokenizer, splits="95,5,0")
    assert prompts_of(validation, tiny_tokenizer) == ["a19"]
    assert {name[0] for name in prompts_of(train, tiny_tokenizer)} == {"a", "b"}


class Own:
    """NeMo-Aligner's form: its class gets the records of all files in one."""

    def __init__(self, data, **_options):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


def test_a_class_of_ones_own_blends_nothing(tmp_path, tiny_tokenizer):
    a, b = write_both(tmp_path, 4, 4)
    function = partial(build_train_valid_test_datasets, Own)
    with pytest.raises(ConfigError, match="Own that is built by its class"):
        build(function, {"train": [1, a, 1, b]}, tiny_tokenizer)
    with pytest.raises(ConfigError, match="splits_string cannot divide a Own"):
        build(function, [a, b], tiny_tokenizer, splits="75,25,0")


def test_a_class_of_ones_own_is_told_of_broken_files(tmp_path, tiny_tokenizer):
    def build_own(path):
        return build(partial(build_train_valid_test_datasets, Own), {"train": [str(path)]}, None)

    good = write_jsonl(tmp_path / "good.jsonl", ["a", "b"])
    own, *_ = build_own(good)
    assert [own[n] for n in range(2)] == [{"text": "a"}, {"text": "b"}]
    for name, text, message in (
        ("none.jsonl", None, "data file .*none.jsonl does not exist"),
        ("empty.jsonl", "\n", "data file .*empty.jsonl is empty"),
        ("bad.jsonl", '{"text": "a"}\n{"text": ', "bad.jsonl, line 2: not valid JSON"),
    ):
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=message):
            build_own(tmp_path / name)


def test_pairs_of_a_blend_stay_pairs(tmp_path, tiny_tokenizer):
    a = write_jsonl(tmp_path / "a.jsonl", ["a0", "a1", "a2", "#" * 40, "a4", "a5"])
    b = write_jsonl(tmp_path / "b.jsonl", ["b0", "b1"])
    dataset, *_ = build_pairs({"train": [1, a, 1, b]}, tiny_tokenizer)
    sides = ("chosen", "rejected")
    items = [dataset[index] for index in range(len(dataset))]
    pairs = [tuple(sample_of(item, side, tiny_tokenizer) for side in sides) for item in items]
    both = [("a0", "a1"), ("b0", "b1")]
    assert sorted(pairs) in (sorted([*both, ("a4", "a5")]), sorted([*both, ("b0", "b1")]))


@pytest.mark.slow
def test_worker_processes_read_an_indexed_dataset(tmp_path, tiny_tokenizer):
    prefix = write_mmap(tmp_path / "tokens", [[n, n + 1] for n in range(6)])
    dataset, *_ = build_prompts({"train": [prefix]}, tiny_tokenizer, "mmap")
    cfg = OmegaConf.create({"model": {"seed": 1, "data": {"num_workers": 1}}})
    loader = build_dataloader(cfg, dataset, 0, 2, 2, use_random_sampler=False)
    assert [batch["text"].tolist() for batch in loader] == [
        [[n, n + 1], [n + 1, n + 2]] for n in (0, 2, 4)
    ]
