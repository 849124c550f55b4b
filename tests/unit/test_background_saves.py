# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are written in the background hold the state of the moment at which they were
begun, and are checkpoints only when they are whole. (Full disks: test_full_disk.py and
tests/distributed/test_checkpoint_damage.py; whole jobs: tests/functional/.)
"""

import threading

import pytest
import torch

from nemo_aligner.checkpoint import checksums
from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.checkpoint.checksums import MANIFEST, parse_manifest
from nemo_aligner.core.errors import ConfigError
from tests.patience import patience
from tests.unit.test_checkpoint_forms import step, training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def held_back(monkeypatch):
    """No thread but the main one writes before this event."""
    event, write = threading.Event(), checksums._Stream.write

    def write_later(stream, data):
        if threading.current_thread() is not threading.main_thread():
            assert event.wait(patience(60))
        return write(stream, data)

    monkeypatch.setattr(checksums._Stream, "write", write_later)
    yield event
    event.set()


def complete(folder):
    return sorted(path.parent.name for path in (folder / "checkpoints").glob("*/COMPLETE"))


@pytest.mark.parametrize(
    "optimizer, precision", [("distributed_fused_adam", "bf16"), ("adamw", 32)]
)
def test_a_save_holds_the_state_of_its_moment(
    tiny_tokenizer_dir, tmp_path, held_back, optimizer, precision
):
    """Updates that come while it is written change nothing of it, to the bit."""
    job = training(tiny_tokenizer_dir, precision, optimizer)
    step(*job)
    for name in ("sync", "async"):
        (tmp_path / name).mkdir()
    torch.manual_seed(7)
    kept = {"name": "rm", "save_nemo_on_train_end": False}
    CheckpointCallback(tmp_path / "sync", *job, **kept).custom_save({}, trainer_state={"step": 1})
    callback = CheckpointCallback(tmp_path / "async", *job, async_save=True, **kept)
    callback.custom_save({}, trainer_state={"step": 1})
    uninterrupted = [step(*job), step(*job)]
    torch.rand(3)
    callback.check_save()
    assert callback.is_saving and not complete(tmp_path / "async")
    held_back.set()
    callback.finish_save()
    assert not callback.is_saving
    (folder,) = complete(tmp_path / "async")
    # The same files, but for the moment at which the state of training was noted.
    files = [tmp_path / name / "checkpoints" / folder / MANIFEST for name in ("sync", "async")]
    manifests = [parse_manifest(file.read_bytes(), file) for file in files]
    weights = "weights/.metadata"
    names = [{path: found[path] for path in found if path != weights} for found in manifests]
    assert names[0] == names[1] and "weights/.metadata" in manifests[1]
    resumed = training(tiny_tokenizer_dir, precision, optimizer)
    again = CheckpointCallback(tmp_path / "async", *resumed, **kept)
    assert again.load_latest() == {"step": 1}
    for expected in uninterrupted:
        found = step(*resumed)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_one_save_at_a_time_and_the_last_one_is_waited_for(
    tiny_tokenizer_dir, tmp_path, held_back
):
    job = training(tiny_tokenizer_dir, 32, "adamw")
    callback = CheckpointCallback(tmp_path, *job, name="rm", async_save=True, save_top_k=0)
    callback.custom_save({"step": 1}, trainer_state={"step": 1})
    assert complete(tmp_path) == []
    release = threading.Timer(0.3, held_back.set)
    release.start()
    callback.custom_save({"step": 2}, trainer_state={"step": 2})  # waits
    assert complete(tmp_path) == ["checkpoint-step=1"]
    callback.finish_save()
    callback.custom_save({"step": 3}, is_train_end=True, trainer_state={"step": 3})
    assert not callback.is_saving and (tmp_path / "checkpoints/rm.nemo").exists()
    assert complete(tmp_path) == ["checkpoint-step=2", "checkpoint-step=3"]
    assert not list((tmp_path / "checkpoints").glob("*.writing"))
    callback.finish_save()  # nothing is being written


def test_what_is_written_beside_every_checkpoint_is_refused(tmp_path):
    for beside in ({"always_save_nemo": True}, {"save_hf": "every_checkpoint"}):
        with pytest.raises(ConfigError, match="async_save=True writes"):
            CheckpointCallback(tmp_path, None, None, None, name="x", async_save=True, **beside)
