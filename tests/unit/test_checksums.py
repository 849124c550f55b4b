# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Damage to a file of a checkpoint or a `.nemo` is found before the file is used: one flipped bit
in each member, files that are missing or cut, and older ones that have no checksums.
"""

import errno
import io
import json
import logging
import os
import pkgutil
import re
import shutil
import tarfile
from types import SimpleNamespace

import pytest

from nemo_aligner.checkpoint import checksums, folders
from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.checkpoint.checksums import file_checksum, warn_once
from nemo_aligner.core.errors import DamagedFileError, SaveError, UserError
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
from tests.cases import some_of
from tests.nemo_files import convert, restore
from tests.tiny_models import tiny_config

pytestmark = pytest.mark.slow


def test_the_checksum_is_the_standard_one():
    """Values of the reference implementation (`xxh128sum`), in its byte order."""
    assert file_checksum(io.BytesIO(b"")) == "99aa06d3014798d86001c324468d497f"
    assert file_checksum(io.BytesIO(b"a")) == "a96faf705af16834e6c632b61e964e1f"


def flip(path, position, bit=3):
    content = bytearray(path.read_bytes())
    content[position % len(content)] ^= 1 << bit
    path.write_bytes(content)


def middle(path):
    return path.stat().st_size // 2


@pytest.fixture(scope="module")
def nemo(tiny_tokenizer_dir, tmp_path_factory):
    """A `.nemo` as a file and as a folder."""
    folder = tmp_path_factory.mktemp("nemo")
    model = MegatronGPTModel(tiny_config(tiny_tokenizer_dir))
    model.save_to(str(folder / "model.nemo"))
    model.save_to(str(folder / "folder") + "/")
    return folder


def files_of(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize("read", [restore, convert])
def test_a_flipped_bit_in_any_file_of_a_nemo_folder_is_found(nemo, tmp_path, read):
    names = files_of(nemo / "folder")
    assert "CHECKSUMS.xxh128" in names and "model_weights/__0_0.distcp" in names
    for number, name in enumerate(names):
        folder = shutil.copytree(nemo / "folder", tmp_path / str(number))
        flip(folder / name, middle(folder / name))
        with pytest.raises(DamagedFileError, match=re.escape(name)):
            read(folder)
    read(shutil.copytree(nemo / "folder", tmp_path / "whole"))


@pytest.mark.parametrize("read", [restore, convert])
def test_a_flipped_bit_in_any_member_of_a_nemo_file_is_found(nemo, tmp_path, read):
    """In its contents, in its name and in its size, which stand before it in the file."""
    with tarfile.open(nemo / "model.nemo") as tar:
        members = [member for member in tar if member.isreg()]
    assert len(members) == len(files_of(nemo / "folder"))
    for member in members:
        head = member.offset_data - tarfile.BLOCKSIZE
        for position in (member.offset_data + member.size // 2, head + 3, head + 130):
            path = tmp_path / f"{position}.nemo"
            path.write_bytes((nemo / "model.nemo").read_bytes())
            flip(path, position)
            with pytest.raises(UserError, match=f"{path.name}.* (damaged|holds no)"):
                read(path)
    read(nemo / "model.nemo")


def test_files_without_checksums_load_with_a_warning(nemo, tmp_path, warnings):
    folder = shutil.copytree(nemo / "folder", tmp_path / "nemo")
    (folder / "CHECKSUMS.xxh128").unlink()
    with tarfile.open(tmp_path / "old.nemo", "w") as tar:
        tar.add(folder, arcname=".")
    for path in (folder, tmp_path / "old.nemo"):
        warn_once.cache_clear()
        warnings.clear()
        restore(path)
        (said,) = [text for text in warnings if "has no CHECKSUMS" in text]
        assert str(path) in said


# --- checkpoints of a job ---


def job(tokenizer_dir):
    model = MegatronGPTRewardModel(tiny_config(tokenizer_dir, num_layers=1))
    return model, *model.setup_megatron_optimization(10)


@pytest.fixture(scope="module")
def saved(tiny_tokenizer_dir, tmp_path_factory):
    """Folder of a job with the checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("job")
    callback = CheckpointCallback(folder, *job(tiny_tokenizer_dir), name="rm")
    for step in (1, 2):
        callback.custom_save({"step": step}, trainer_state={"step": step})
    return folder


@pytest.fixture(scope="module")
def other_job(tiny_tokenizer_dir):
    return job(tiny_tokenizer_dir)


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of `saved`."""
    return shutil.copytree(saved, tmp_path / "job")


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_taken(
    saved, other_job, tmp_path, caplog
):
    newest = "checkpoints/checkpoint-step=2"
    names = files_of(saved / newest)
    assert {"COMPLETE", "state.json", "rng/rank_00000.pt", "weights/.metadata"} <= set(names)
    for number, name in enumerate(names):
        folder = shutil.copytree(saved, tmp_path / str(number))
        flip(folder / newest / name, middle(folder / newest / name) if name != "COMPLETE" else 0)
        caplog.clear()
        with caplog.at_level(logging.ERROR, logger="nemo_logger"):
            callback = CheckpointCallback(folder, *other_job, name="rm")
            assert callback.newest_sound().name == "checkpoint-step=1", name
        (said,) = [r.getMessage() for r in caplog.records if "set aside" not in r.getMessage()]
        assert f"{folder}/{newest}" in said and "checkpoint-step=2.damaged" in said
        assert (name in said) or name == "CHECKSUMS.xxh128", said
        aside = folder / f"{newest}.damaged"
        assert aside.is_dir() and not (aside / "COMPLETE").exists()
        assert not (folder / newest).exists()
        assert callback.saved_at("step") == {1: f"{folder}/checkpoints/checkpoint-step=1"}
    assert callback.load_latest() == {"step": 1}
    callback.custom_save({"step": 2}, trainer_state={"step": 2})  # the job goes on
    assert callback.load_latest() == {"step": 2} and aside.is_dir()


def test_a_checkpoint_that_the_user_names_is_not_set_aside(folder, other_job):
    named = folder / "checkpoints/checkpoint-step=2"
    flip(named / "weights/__0_0.distcp", 5000)
    with pytest.raises(DamagedFileError, match=r"weights/__0_0.distcp .* use another checkpoint"):
        CheckpointCallback(folder, *other_job, name="rm").load_latest(named)
    assert named.is_dir()
    with pytest.raises(DamagedFileError, match="__0_0"):  # nor is it read as a model
        MegatronGPTRewardModel.restore_from(named)


def test_an_older_checkpoint_loads_with_a_warning(folder, other_job, warnings):
    newest = folder / "checkpoints/checkpoint-step=2"
    (newest / "CHECKSUMS.xxh128").unlink()
    (newest / "COMPLETE").write_bytes(b"")
    assert CheckpointCallback(folder, *other_job, name="rm").load_latest() == {"step": 2}
    assert any("has no CHECKSUMS.xxh128" in text for text in warnings)
    # A torn one of that time: one message.
    (newest / "weights/__0_0.distcp").write_bytes(b"cut")
    with pytest.raises(UserError, match=f"{newest}.* damaged or incomplete"):
        CheckpointCallback(folder, *other_job, name="rm").load_latest()


# --- what is left when a job dies ---


class Death(BaseException):
    pass


def folders_in(root):
    return sorted(path.name for path in root.iterdir())


def die_at(monkeypatch, target, count):
    """Raise `Death` in place of the call number `count` (from 1; 0: of none) of `target`; returns
    what was called.
    """
    original, calls = pkgutil.resolve_name(target), []

    def call(*arguments, **named):
        calls.append(arguments)
        if len(calls) == count:
            raise Death
        return original(*arguments, **named)

    monkeypatch.setattr(target, call)
    return calls


@some_of(
    "target",
    [
        "nemo_aligner.checkpoint.dist_ckpt.Save",
        "nemo_aligner.checkpoint.checksums.write_durably",
        "nemo_aligner.checkpoint.checkpointing.write_manifest",
        "nemo_aligner.checkpoint.folders.sync_folder",
        "nemo_aligner.checkpoint.folders.mark",
        "nemo_aligner.checkpoint.folders.remove_checkpoint",
        "shutil.rmtree",
    ],
    keep=["nemo_aligner.checkpoint.folders.mark", "shutil.rmtree"],
)
@pytest.mark.parametrize("step", [2, 3], ids=["same name", "new name"])
def test_death_at_any_point_of_a_save_leaves_a_whole_checkpoint(
    folder, other_job, monkeypatch, target, step
):
    """Death while step 2 is saved again, and while step 3 is and step 1 goes."""
    callback = CheckpointCallback(folder, *other_job, name="rm", save_top_k=0)
    with monkeypatch.context() as patch:
        die_at(patch, target, 1)
        with pytest.raises(Death):
            callback.custom_save({"step": step}, trainer_state={"step": step})
    resumed = CheckpointCallback(folder, *other_job, name="rm", save_top_k=0)
    before_the_mark = not target.endswith(("remove_checkpoint", "rmtree"))
    assert resumed.load_latest() == {"step": 2 if before_the_mark else step}
    resumed.custom_save({"step": 4}, trainer_state={"step": 4})
    names = folders_in(folder / "checkpoints")
    assert len(names) == 2 and "checkpoint-step=4" in names, names
    for name in names:
        assert resumed.is_sound(folder / "checkpoints" / name)


def test_a_checkpoint_that_does_not_fit_is_refused(folder, other_job, monkeypatch):
    """There is room for three quarters of the weights, more than is ever written of them here."""
    weights = (folder / "checkpoints/checkpoint-step=2/weights/__0_0.distcp").stat().st_size
    real = os.statvfs

    def statvfs(path):
        return SimpleNamespace(f_blocks=10**9, f_bfree=0, f_bavail=weights * 3 // 4, f_frsize=1)

    begun = die_at(monkeypatch, "nemo_aligner.checkpoint.dist_ckpt._Writer", 0)
    callback = CheckpointCallback(folder, *other_job, name="rm")
    messages = []
    for statvfs_of_now in (statvfs, real):
        monkeypatch.setattr(checksums.os, "statvfs", statvfs_of_now)
        try:
            callback.custom_save({"step": 3}, trainer_state={"step": 3})
        except SaveError as error:
            messages.append(str(error))
            assert folders_in(folder / "checkpoints") == ["checkpoint-step=1", "checkpoint-step=2"]
    assert len(begun) == len(messages) == 1
    assert re.search(r"no space left .* MB are needed, .* MB are free", messages[0])


@pytest.mark.parametrize("async_save", [False, True])
def test_a_save_that_cannot_write_is_named(folder, other_job, monkeypatch, async_save):
    def write_durably(*_arguments):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(checksums, "write_durably", write_durably)
    callback = CheckpointCallback(folder, *other_job, name="rm", async_save=async_save)
    with pytest.raises(SaveError, match="cannot be written: .*Read-only"):
        callback.custom_save({"step": 3}, trainer_state={"step": 3})
        callback.finish_save()
    assert folders_in(folder / "checkpoints") == ["checkpoint-step=1", "checkpoint-step=2"]


def test_a_full_disk_is_named_though_another_rank_removed_the_folder(tmp_path):
    gone = tmp_path / "checkpoint-step=2.writing" / "weights"
    error = checksums.save_error(gone, OSError(errno.ENOSPC, "No space left on device"))
    assert re.search(rf"^no space left .* for {re.escape(str(gone))}: .* MB are free", str(error))


def test_the_nemo_of_a_job_that_died_before_it_is_written_at_the_next_start(
    tiny_tokenizer_dir, other_job, tmp_path, monkeypatch
):
    """The last checkpoint is whole, the `.nemo` is that of an earlier end or none."""

    def callback():
        return CheckpointCallback(tmp_path, *other_job, name="rm")

    nemo_file = tmp_path / "checkpoints/rm.nemo"
    for step in (1, 2):
        with monkeypatch.context() as patch:
            die_at(patch, "nemo_aligner.checkpoint.checksums.write_manifest", 1)
            with pytest.raises(Death):
                own = {"is_train_end": True, "trainer_state": {"step": step}}
                callback().custom_save({"step": step}, **own)
        before = nemo_file.stat().st_mtime_ns if nemo_file.exists() else None
        resumed = callback()
        assert resumed.load_latest() == {"step": step}
        resumed.finish_export()
        written = nemo_file.stat().st_mtime_ns
        assert written != before
        resumed.finish_export()
        again = callback()
        again.finish_export()  # nothing was loaded
        again.load_latest()
        again.finish_export()
        assert nemo_file.stat().st_mtime_ns == written
    MegatronGPTRewardModel.restore_from(nemo_file)


def test_the_mark_goes_first(folder, monkeypatch):
    """A checkpoint is no longer listed when the first of its files is removed."""
    seen = []

    def rmtree(path):
        seen.append([each.name for each, _ in folders.complete_checkpoints(folder)])
        raise Death

    folder /= "checkpoints"
    monkeypatch.setattr(folders.shutil, "rmtree", rmtree)
    with pytest.raises(Death):
        folders.remove_checkpoint(folder / "checkpoint-step=2")
    assert seen == [["checkpoint-step=1"]]
    (left,) = [p for p in folder.iterdir() if folders.is_leftover(p)]
    assert json.loads((left / "state.json").read_text())["trainer"] == {"step": 2}
