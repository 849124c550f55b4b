# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to a byte of a checkpoint or a `.nemo` is noticed before the file is used."""

import io
import json
import shutil
import tarfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nemo_aligner.checkpoint import forms
from nemo_aligner.checkpoint.checksums import (
    MANIFEST,
    check_files_together,
    check_members,
    parse_manifest,
    write_manifest,
)
from nemo_aligner.checkpoint.folders import STATE_FILE, mark, read_state
from nemo_aligner.core.errors import DamagedFileError
from tests.properties import tried

STATE = {"save_number": 3, "trainer": {"step": 4}, "metrics": {"loss": 0.5}}
FILES = {"model_config.yaml": b"hidden_size: 8\n", "vocab.json": b'{"a": 0}', "empty": b""}
FILES["model_weights/metadata.json"] = b'{"sharded_backend": "torch_dist"}'
FILES["model_weights/__0_0.distcp"] = bytes(range(256))


# Of a file: where, as a share of its length, and what happens there
DAMAGE = st.tuples(
    st.floats(0, 1, exclude_max=True),
    st.sampled_from(["cut", "longer", "removed"]) | st.integers(1, 255),
)


def damaged(content, where, how):
    """`content` after the damage; None: removed, or there is nothing to damage."""
    position = int(where * len(content))
    if how == "longer":
        return content + b"\n"
    if how == "removed" or not content:
        return None
    if how == "cut":
        return content[:position]
    return content[:position] + bytes([content[position] ^ how]) + content[position + 1 :]


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


@pytest.fixture
def place(tmp_path):
    """An empty folder; the same one each time."""

    def empty():
        shutil.rmtree(tmp_path / "it", ignore_errors=True)
        (tmp_path / "it").mkdir()
        return tmp_path / "it"

    return empty


def check_checkpoint(folder):
    if read_state(folder) is None:
        raise DamagedFileError("not complete")
    check_files_together(folder)


@pytest.mark.full
@tried(60)
@given(name=st.sampled_from([*FILES, STATE_FILE, MANIFEST, forms.MARKER]), fault=DAMAGE)
def test_any_damage_to_a_checkpoint(place, name, fault):
    folder = place()
    write(folder, FILES | {STATE_FILE: json.dumps(STATE).encode()})
    mark(folder, write_manifest(folder, {}))
    check_checkpoint(folder)
    content = damaged((folder / name).read_bytes(), *fault)
    (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    with pytest.raises(DamagedFileError):
        check_checkpoint(folder)


def check_folder(place, files):
    folder = place()
    write(folder, files)
    check_files_together(folder)


def check_archive(place, files):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    stream.seek(0)
    check_members(tarfile.open(fileobj=stream), place(), lambda _name: True)


@pytest.mark.parametrize("check", [check_folder, check_archive])
@tried(60)
@given(name=st.sampled_from([*FILES, MANIFEST]), fault=DAMAGE)
def test_any_damage_to_a_nemo(place, check, name, fault):
    """A manifest that is gone is a warning, as for a file of NeMo."""
    folder = place()
    write(folder, FILES)
    write_manifest(folder, {})
    files = FILES | {MANIFEST: (folder / MANIFEST).read_bytes()}
    check(place, files)
    content = damaged(files.pop(name), *fault)
    if name == MANIFEST and (content is None or fault[1] == "longer"):
        return
    files |= {} if content is None else {name: content}
    with pytest.raises(DamagedFileError):
        check(place, files)


@tried(100)
@given(content=st.binary(max_size=200) | st.text("0aé /.\n\r\x85", max_size=80).map(str.encode))
def test_any_bytes_are_a_manifest_or_damaged(content):
    try:
        found = parse_manifest(content, Path("folder") / MANIFEST)
    except DamagedFileError as error:
        assert MANIFEST in str(error)
    else:
        assert found and all(len(checksum) == 32 for checksum in found.values())


NAMES = st.text(
    st.characters(exclude_characters="\n/\0", exclude_categories=["Cs"]), min_size=1, max_size=9
).filter(lambda name: name not in (".", "..", MANIFEST))


@tried(60)
@given(names=st.lists(NAMES, min_size=1, max_size=4))
@example(names=["vocab\udcff.json"])  # which is no UTF-8
def test_files_of_any_name_are_listed(place, names):
    folder = place()
    write(folder, dict.fromkeys(names, b"{}"))
    write_manifest(folder, {})
    assert set(parse_manifest((folder / MANIFEST).read_bytes(), folder)) == set(names)
    check_files_together(folder)
