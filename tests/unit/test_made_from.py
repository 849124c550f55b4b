# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint was made from, and names that are tried out before training."""

import contextlib
import json
import re
import shutil
import tarfile
from functools import partial
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from nemo_aligner.checkpoint import made_from as module
from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.checkpoint.checksums import MANIFEST
from nemo_aligner.checkpoint.made_from import compare, content_hash, made_from
from nemo_aligner.config.defaults import complete_config
from nemo_aligner.config.schema import LIVE
from nemo_aligner.core import content
from nemo_aligner.core.errors import SaveError, UserError
from nemo_aligner.data.nlp.builders import build_sft_dataset


def test_content_does_not_depend_on_the_place(tmp_path, monkeypatch):
    monkeypatch.setattr(content, "SMALL", 1000)
    folder = tmp_path / "base"
    (folder / ".git").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 4000)
    (folder / "config.json").write_text("{}")
    shutil.copytree(folder, tmp_path / "moved")
    before = content_hash(folder)
    assert content_hash(tmp_path / "moved") == before
    (folder / "README.md").write_text("a page")
    (folder / ".git/index").write_text("x")
    (folder / "train.log").write_text("a log")
    (folder / "checkpoint-5").mkdir()
    (folder / "checkpoint-5/config.json").write_text("{}")
    assert content_hash(folder) == before
    (folder / "model.safetensors").write_bytes(bytes(range(1, 256)) * 4000 + bytes(4000))
    assert content_hash(folder) != before
    (folder / MANIFEST).write_text("checksums")
    with tarfile.open(tmp_path / "base.nemo", "w") as tar:
        tar.add(folder, ".")
    assert content_hash(tmp_path / "base.nemo") == content_hash(folder) != before
    with tarfile.open(tmp_path / "zip.nemo", "w:gz") as tar:
        tar.add(folder, ".")
    unpack = lambda *_arguments: pytest.fail("unpacked")
    monkeypatch.setattr(tarfile.TarFile, "extractfile", unpack)
    assert content_hash(tmp_path / "zip.nemo") != content_hash(folder)


def test_of_a_megatron_root_the_newest_checkpoint_counts(tmp_path):
    for name in ("iter_0000001", "iter_0000002"):
        (tmp_path / name / "mp_rank_00").mkdir(parents=True)
        (tmp_path / name / "mp_rank_00/model_optim_rng.pt").write_text(name)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    before = content_hash(tmp_path)
    shutil.rmtree(tmp_path / "iter_0000001")
    assert content_hash(tmp_path) == content_hash(tmp_path / "iter_0000002") == before


def job(kind, base, **changes):
    """The configuration of a job of `conf/` that starts from `base`, with other values."""
    cfg = complete_config({"pretrained_checkpoint": {"restore_from_path": str(base)}}, kind)
    for key, value in changes.items():
        OmegaConf.update(cfg, key.replace("__", "."), value, force_add=True)
    return cfg


dpo = partial(job, "gpt_dpo")


def test_what_differs_is_shown_and_refused_or_not(tmp_path, warnings, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    base = tmp_path / "a.nemo"
    base.write_bytes(b"a")
    first = made_from(dpo("~/a.nemo"), "dpo")  # of a word key=~/a.nemo the shell expands nothing
    stored = {"made_from": json.loads(json.dumps(first))}
    (tmp_path / "moved").mkdir()
    again = made_from(dpo(shutil.copy(base, tmp_path / "moved")), "dpo")
    compare(again, stored, "run")
    assert warnings == []
    made_from(dpo(base, model__restore_from_path="moved_away"), "dpo")  # of the base's training
    compare(made_from(dpo(base, model__optim__lr=0.5), "dpo"), stored, "run")
    assert "other settings:\n" in warnings[0]
    assert warnings[0].split()[-3:] == ["model.optim.lr", "9e-06", "0.5"]
    compare(made_from(dpo(base, model__precision="bf16"), "dpo"), stored, "run")
    assert warnings[1].split()[-1] == "bf16"
    base.write_bytes(b"b")
    other = dpo(base, model__dpo__preference_loss="ipo", model__dpo__ref_policy_kl_penalty=0.5)
    with pytest.raises(UserError) as refusal:
        compare(made_from(other, "dpo"), stored, "run")
    lines = [line.split() for line in str(refusal.value).splitlines()[2:5]]
    keys = [f"model.dpo.{key}" for key in ("preference_loss", "ref_policy_kl_penalty")]
    assert [line[0] for line in lines] == ["base", *keys]
    assert lines[2][1:] == ["0.2", "0.5"]
    for words in ("explicit_log_dir", "resume_if_exists=False"):
        assert words in str(refusal.value)
    with pytest.raises(UserError, match="No such file.*gone.nemo"):
        made_from(dpo(tmp_path / "gone.nemo"), "dpo")
    with pytest.raises(UserError, match="job +dpo +kto"):
        compare({"objective": {"job": "kto"}}, stored, "run")
    compare(first, {"trainer": {}}, "run")
    assert len(warnings) == 3 and "does not say what it was made from" in warnings[2]


def test_each_key_that_is_compared_is_one_of_a_job():
    keys = set()
    for found in LIVE.values():
        keys |= {*found, *(re.sub(r"^(trainer|model)\.\w+\.", r"\1.*.", key) for key in found)}
    assert keys >= module.OBJECTIVE | module.COUNTS_WITH.keys() | {*module.COUNTS_WITH.values()}


PPO = "trainer.ppo."
JUDGE = {PPO + "judge.url": "http://a", PPO + "judge.model": "m"}
NO_KL = {PPO + "initial_policy_kl_penalty": 0.0}


@pytest.mark.parametrize(
    ("before", "now", "refused"),
    [
        ({}, {PPO + "trt_llm.enable": True, PPO + "initial_policy_kl_penalty": 0.5}, None),
        ({PPO + "use_absolute_kl": True}, {PPO + "kl_estimator": "abs"}, None),
        ({}, {PPO + "kl_estimator": "k3"}, "ppo.kl_estimator +k1 +k3"),
        (NO_KL, NO_KL | {PPO + "kl_estimator": "k3"}, None),
        ({}, {PPO + "rewards_per": "token"}, None),
        ({}, {PPO + "advantage_clip": 2.0, "model.ppo.entropy_bonus": 0.1}, None),
        ({}, {PPO + "reward_fn": "r.py:f"}, "reward +servers of this package"),
        ({PPO + "reward_fn": "r.py:f"}, {PPO + "reward_fn": "moved/r.py:f"}, None),
        ({PPO + "reward_fn": "r.py:f"}, {PPO + "reward_fn": "r.py:g"}, "reward +r.py:f"),
        ({PPO + "reward_fn": "http://a/x"}, {PPO + "reward_fn": ["http://b", "http://c"]}, None),
        (JUDGE, JUDGE | {PPO + "judge.url": ["http://b"], PPO + "judge.prompt": "{x}"}, None),
        (JUDGE, JUDGE | {PPO + "judge.model": "n"}, "reward +the judge m .* +the judge n "),
        ({}, {"model.ppo.environment.port": 1}, "reward +servers"),
        ({"model.ppo.environment.port": 1}, {"model.ppo.environment.port": 2}, None),
        ({}, {"model.data.chat_template": "t.jinja"}, "chat template +tokenizer"),
        ({}, {"model.data.chat_template": "tokenizer"}, None),
    ],
)
def test_what_decides_the_objective_is_compared_as_it_counts(
    before, now, refused, warnings, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.jinja").touch()

    objective = lambda changes: made_from(job("gpt_ppo_actor", "", **changes), "ppo")
    stored = {"made_from": objective(before)}
    with pytest.raises(UserError, match=refused) if refused else contextlib.nullcontext():
        compare(objective(now), stored, "run")
    for key in ("trainer.ppo.advantage_clip", "model.data.chat_template"):
        if key in now and not refused:
            rows = [line.split() for line in warnings[0].splitlines()[2:]]
            assert [key, "None", str(now[key])] in rows
    if refused and "k3" in refused:  # of the version before
        older = {"trainer": {"objective": {PPO + "kl_estimator": "abs"}}}
        with pytest.raises(UserError, match="kl_estimator +abs +k3"):
            compare(objective(now), older, "run")
        compare(objective(now), {"trainer": {}}, "run")
        assert "use_absolute_kl, True by default then" in warnings[-1]


def test_data_are_known_by_content_order_and_choice(tmp_path, tiny_tokenizer):
    files = []
    for name in "ab":
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text(
            "".join(json.dumps({"input": f"{name} {i}", "output": "x"}) + "\n" for i in range(3))
        )

    def data(*paths, shuffle=True, num_samples=None):
        section = {"file_path": [str(path) for path in paths], "max_seq_length": 32}
        section = OmegaConf.create(section)
        dataset = build_sft_dataset(section, tiny_tokenizer, num_samples, is_chat=False)
        sampler = SimpleNamespace(is_random=shuffle)
        return module._data(SimpleNamespace(dataset=dataset, batch_sampler=sampler))

    first = data(*files)
    assert first["training data"]["shown"] == "6 samples of a.jsonl, b.jsonl"
    (tmp_path / "moved").mkdir()
    moved = [shutil.copy(file, tmp_path / "moved") for file in files]
    assert data(*moved) == first
    others = [data(*files[::-1]), data(files[0]), data(*files, num_samples=5)]
    others.append(data(*files, shuffle=False))
    files[1].write_text(files[1].read_text().replace("b 2", "b 7"))
    others.append(data(*files))
    assert all(other != first for other in others)


LONG = "n" * 300


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "n" * 245}, "File name too long"),
        ({"name": "a/b"}, "'a/b.nemo' contains /"),
        ({"name": LONG, "save_nemo_on_train_end": False}, None),
        ({"filename": LONG}, "File name too long"),
        ({"filename": "{epoch}/{step}"}, "contains /"),
        ({"filename": "{step:05d}-{val_loss:.2f}-{val_loss:d}"}, None),
        ({"filename": "{val_loss:q}"}, "Unknown format code 'q'"),
        ({"log_dir": "file"}, "Not a directory"),
        ({"log_dir": "/proc/1/job", "enabled": False}, None),
    ],
)
def test_names_and_folders_are_tried_out_before_training(options, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    settings = {"log_dir": tmp_path / "job", "name": "run"} | options
    refused = pytest.raises(SaveError, match=f"{said}.*Nothing was trained")
    with refused if said else contextlib.nullcontext():
        CheckpointCallback(settings.pop("log_dir"), None, None, None, **settings)
    assert not list(tmp_path.glob("job/checkpoints/*"))
