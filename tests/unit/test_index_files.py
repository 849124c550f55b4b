# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What is kept of a data file for the next start: never out of date, never half written, made
once.
"""

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from nemo.collections.common.tokenizers import AutoTokenizer
from nemo.collections.common.tokenizers.bytelevel_tokenizers import ByteLevelTokenizer
from omegaconf import OmegaConf

from nemo_aligner.core.errors import UserError
from nemo_aligner.data.nlp import index_files
from nemo_aligner.data.nlp import records as module
from nemo_aligner.data.nlp.datasets import (
    LabelledPairDataset,
    RegressionRewardModelDataset,
    RewardModelDataset,
)
from nemo_aligner.data.nlp.index_files import file_fingerprint, tokenizer_fingerprint
from nemo_aligner.data.nlp.prompts import RLHFDataset
from nemo_aligner.models.nlp.gpt.tokenizers import build_tokenizer
from tests.data_sets import records, sft

pytestmark = pytest.mark.usefixtures("no_small_files")


def write(path, texts, **more):
    path.write_text("".join(json.dumps({"text": text, **more}) + "\n" for text in texts))
    return path


def count_reads(monkeypatch):
    """How many times a whole source has been checked so far."""
    reads, read = [], module._read

    def counted(source, *others):
        reads.append(source.path)
        return read(source, *others)

    monkeypatch.setattr(module, "_read", counted)
    return reads


# --- never out of date ---


def test_a_changed_file_is_read_again(tmp_path, monkeypatch):
    reads = count_reads(monkeypatch)
    path = write(tmp_path / "a.jsonl", ["aa", "b"])
    assert records(path, settings=lambda: "s").notes.tolist() == [2, 1]
    stat = path.stat()
    write(path, ["c", "dd"])  # of the same size
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    again = path.stat()
    assert (again.st_size, again.st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    found = records(path, settings=lambda: "s")
    assert found.notes.tolist() == [1, 2] and found[1]["text"] == "dd"
    assert len(reads) == 2
    assert records(path, settings=lambda: "s").notes.tolist() == [1, 2] and len(reads) == 2


def test_samples_of_a_large_file_tell_its_changes_apart(tmp_path, monkeypatch):
    """Without the times, which change too: content at its ends and in between."""
    path = tmp_path / "a"

    def fingerprint(content):
        path.write_bytes(content)
        real = os.stat(path)

        class Frozen:
            st_size, st_mtime_ns, st_ctime_ns = real.st_size, 0, 0

        with monkeypatch.context() as patch:
            patch.setattr(type(path), "stat", lambda self: Frozen)
            return file_fingerprint(path)

    content = bytes(1000)
    found = {fingerprint(content), fingerprint(content)}
    assert len(found) == 1
    for place in (0, 506, 999):  # 506 is in the 33rd sample
        found.add(fingerprint(content[:place] + b"x" + content[place + 1 :]))
    found.add(fingerprint(content + b"\0"))
    assert len(found) == 5


def test_tokenizers_that_cut_otherwise_are_told_apart(
    tiny_tokenizer_dir, reversed_tokenizer_dir, tiny_sentencepiece_model
):
    def hugging_face(folder=tiny_tokenizer_dir, **options):
        return AutoTokenizer(pretrained_model_name=folder, **options)

    added = hugging_face()
    added.add_special_tokens({"additional_special_tokens": ["<turn>"]})

    def sentencepiece(**options):
        section = {"library": "sentencepiece", "model": tiny_sentencepiece_model, **options}
        return build_tokenizer(OmegaConf.create(section))

    tokenizers = [hugging_face(), hugging_face(reversed_tokenizer_dir), added]
    tokenizers += [hugging_face(include_special_tokens=True), sentencepiece()]
    tokenizers += [sentencepiece(sentencepiece_legacy=True)]
    tokenizers += [sentencepiece(additional_special_tokens=["<turn>"]), ByteLevelTokenizer({})]
    found = [tokenizer_fingerprint(tokenizer) for tokenizer in tokenizers]
    assert None not in found and len(set(found)) == len(tokenizers)
    assert tokenizer_fingerprint(hugging_face()) == found[0]
    used = hugging_face()
    used.text_to_ids("x"), used.ids_to_text([1, 2]), used.inv_vocab  # noqa: B018
    assert tokenizer_fingerprint(used) == found[0]

    class Unknown:
        eos_id = vocab_size = 1

    assert tokenizer_fingerprint(Unknown()) is None


def test_datasets_know_what_their_check_depends_on(
    tmp_path, tiny_tokenizer, reversed_tokenizer_dir, bos_tokenizer_dir, monkeypatch
):
    """Each dataset reads its file once for each setting, and gives what a first start gives."""
    other = AutoTokenizer(pretrained_model_name=reversed_tokenizer_dir)
    path = write(tmp_path / "a.jsonl", ["naïve 日本", "n b b", "cc", "c"])
    labelled = write(tmp_path / "l.jsonl", ["naïve", "n b b", "cc", "c"], label=[2.0])
    examples = tmp_path / "s.jsonl"
    lines = [json.dumps({"input": "é" * n, "output": "x"}) for n in (3, 9)]
    examples.write_text("\n".join(lines))
    own = tiny_tokenizer
    with_bos = AutoTokenizer(pretrained_model_name=bos_tokenizer_dir)

    def prompts(tokenizer=own, length=20, **data):
        return partial(RLHFDataset, [path], tokenizer, length, data)

    def sft_of(tokenizer=own, **options):
        return partial(sft, str(examples), tokenizer, {"max_seq_length": 16, **options})

    makers = [prompts(), prompts(length=19), prompts(append_eod=True), prompts(other)]
    makers += [prompts(columns={"text": "{text}!"}), prompts(with_bos)]
    makers += [prompts(with_bos, add_bos=False)]
    makers += [partial(RewardModelDataset, [path], own, length) for length in (20, 6)]
    makers += [partial(LabelledPairDataset, [labelled], own, 20)]
    for missing in ((), (-5.0,)):
        makers += [partial(RegressionRewardModelDataset, [labelled], own, 20, 1, *missing)]
    makers += [sft_of(), sft_of(other), sft_of(add_bos=False, add_eos=False)]
    makers += [sft_of(packed_sequence=True), sft_of(max_seq_length=8)]
    makers += [sft_of(truncation_field="", max_seq_length=8)]
    makers += [sft_of(prompt_template="{input}:{output}")]
    reads = count_reads(monkeypatch)
    for number, make in enumerate(makers):
        first = make()
        assert len(reads) == number + 1
        second = make()
        assert len(reads) == number + 1
        one, two = (getattr(each, "dataset", each).lines for each in (first, second))
        for name in ("notes", "numbers", "extra"):
            np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
        assert str(first[0]) == str(second[0])


def test_an_error_is_found_at_every_start(tmp_path):
    path = write(tmp_path / "a.jsonl", ["a", " "])
    for _ in range(2):
        with pytest.raises(UserError, match="line 2: field 'text' is empty"):
            records(path, settings=lambda: "s")


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", ["a", "b"])

    def inspect(record):
        with path.open("a") as file:
            file.write(" ")
        return 0

    with pytest.raises(UserError, match="a.jsonl has changed while it was read"):
        records(path, inspect, settings=lambda: "s")
    assert records(path, settings=lambda: "s").notes.tolist() == [1, 1]


# --- never half written, made once ---


def test_a_damaged_index_is_made_again(tmp_path, monkeypatch):
    reads = count_reads(monkeypatch)
    path = write(tmp_path / "a.jsonl", ["aa", "b"])
    records(path, settings=lambda: "s")
    (index,) = (tmp_path / index_files.FOLDER).glob("*.npy")
    whole = index.read_bytes()
    for damaged in (b"", whole[:50], whole[:-8], b"x" * 200):
        index.write_bytes(damaged)
        found = records(path, settings=lambda: "s")
        assert found.notes.tolist() == [2, 1] and found[1]["text"] == "b"
    assert len(reads) == 5


def test_many_that_start_at_once_make_one_index(tmp_path):
    path = write(tmp_path / "a.jsonl", ["aa", "b"])
    made = []

    def make():
        made.append(threading.get_ident())
        time.sleep(0.3)
        return np.arange(3)

    def start(_number):
        return index_files.keep_array(path, None, "a.npy", np.dtype(np.int64), make).tolist()

    with ThreadPoolExecutor(8) as starts:
        assert list(starts.map(start, range(8))) == [[0, 1, 2]] * 8
    assert len(made) == 1


def test_a_reader_never_sees_half_a_file(tmp_path):
    path = write(tmp_path / "a.jsonl", ["a"])
    target = tmp_path / index_files.FOLDER / "copy"

    def broken(temporary):
        temporary.write_text("half")
        assert not target.exists()
        raise UserError("row 7 is bad")

    with pytest.raises(UserError, match="row 7"):
        index_files.keep_file(path, None, "copy", broken)
    assert [each.name for each in target.parent.iterdir()] == ["copy.lock"]

    def full(temporary):
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="no room in .*model.data.index_mapping_dir"):
        index_files.keep_file(path, None, "copy", full)
    written = index_files.keep_file(path, None, "copy", lambda new: new.write_text("whole"))
    assert written == target and target.read_text() == "whole"
