# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The functions of `launch/` that users' scripts call take a configuration with keys missing."""

import json
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from nemo_aligner.checkpoint.folders import format_name, outdated, why_unranked
from nemo_aligner.core.errors import UserError
from nemo_aligner.launch.experiment import (
    build_checkpoint_callback,
    build_logger,
    load_trainer_state,
    overview,
    run_timer,
    setup_experiment,
)
from nemo_aligner.launch.processes import resolve_and_create_trainer
from nemo_aligner.training.loggers import PrometheusLogger

pytestmark = pytest.mark.slow


def test_the_overview_names_the_job_and_no_key_of_its_base():
    """`cfg.model` holds what the base was trained from, too."""
    base = {"restore_from_path": "hf", "data": {"train_ds": {"file_path": "c.jsonl"}}}
    ppo = {"advantage_estimator": "grpo", "reward_fn": "r.py:f"}
    cfg = {"trainer": {"ppo": ppo}, "pretrained_checkpoint": {"restore_from_path": "sft.nemo"}}
    base |= {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1}
    cfg = OmegaConf.create(cfg | {"model": base})
    assert overview(cfg, "gpt_ppo_actor") == (
        "gpt_ppo_actor: trainer.ppo.advantage_estimator=grpo, trainer.ppo.reward_fn=r.py:f, "
        "pretrained_checkpoint.restore_from_path=sft.nemo, model.tensor_model_parallel_size=2"
    )
    assert "model.restore_from_path=hf" in overview(cfg, "gpt_sft")


@pytest.mark.parametrize(
    ("given", "kept"), [({}, 1), ({"checkpoint_callback_params": {"save_top_k": 3}}, 3)]
)
def test_checkpoints_from_a_section_with_keys_missing(tmp_path, given, kept):
    cfg = OmegaConf.create({"exp_manager": {"name": "mine"} | given})
    callback = build_checkpoint_callback(cfg, tmp_path, None, None, None)
    assert callback.enabled and callback.name == "mine" and callback.save_top_k == kept


def test_without_validation_the_newest_checkpoints_stay(tmp_path):
    filename = "gpt--{val_loss:.3f}-{step}-{val_x}"
    params = {"monitor": "val_loss", "filename": filename, "mode": "min"}
    for has_validation in (True, False):
        given = {"exp_manager": {"checkpoint_callback_params": params}}
        callback = build_checkpoint_callback(
            OmegaConf.create(given), tmp_path, *[None] * 4, has_validation
        )
        name = format_name(callback.filename, {"step": 3})
        assert name == ("gpt--val_loss=nan-step=3-val_x=nan" if has_validation else "gpt--step=3")
        assert callback.monitor == ("val_loss" if has_validation else None)
        saved = [(Path(str(n)), {"metrics": {}, "save_number": n}) for n in range(4)]
        assert outdated(saved, callback.monitor, "min", 3) == [Path("0")]
        assert why_unranked({"step": 3.0}, callback.monitor, 3) is None


class NeverSaved:
    def save_to(self, save_path):
        raise AssertionError("written")


def test_without_experiment_manager_nothing_is_written_or_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints/old").mkdir(parents=True)
    (tmp_path / "checkpoints/old/COMPLETE").touch()
    (tmp_path / "checkpoints/old/state.json").write_text('{"save_number": 1, "trainer": {}}')
    before = sorted(tmp_path.rglob("*"))
    cfg = OmegaConf.create({"exp_manager": None})

    assert setup_experiment(None, cfg) is None
    logger = build_logger(SimpleNamespace(loggers=[]), None)
    callback = build_checkpoint_callback(cfg, None, NeverSaved(), None, None)

    logger.log_metrics({"loss": 1.0}, step=0)
    logger.finalize()
    assert callback.custom_save({"loss": 1.0}, is_train_end=True) is None
    assert callback.saved_at("step") == {}
    assert load_trainer_state(cfg, callback) is None
    assert run_timer(cfg).is_finished() is False
    assert sorted(tmp_path.rglob("*")) == before


def test_metrics_are_whole_after_any_number_of_resumes(tmp_path):
    """Each run is killed in the middle of a line; some end before their first step."""
    for step in (1, None, 2, None, None, 3):
        _trainer, logger = with_logger(tmp_path)
        if step is not None:
            logger.log_metrics({"a": step}, step=step)
            logger.log_samples("samples", [{"text": "x"}], step=step)
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.write('{"step": 99, "a"')
        logger.finalize()
    _trainer, logger = with_logger(tmp_path)
    logger.log_metrics({"a": 4}, step=4)
    logger.log_samples("samples", [{"text": "x"}], step=4)
    for name in ("metrics", "samples"):
        lines = (tmp_path / f"{name}.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]


def with_logger(folder, **options):
    """The trainer of a job with a logger, and what writes its metrics."""
    cfg = {"trainer": {"devices": 1, "accelerator": "cpu", "ppo": {}}, "exp_manager": options}
    cfg = OmegaConf.create(cfg | {"exp_manager": {"explicit_log_dir": str(folder), **options}})
    trainer = resolve_and_create_trainer(cfg, "ppo")
    return trainer, build_logger(trainer, setup_experiment(trainer, cfg))


@pytest.mark.parametrize("folder", [None, "own"])
def test_mlflow_writes_into_a_folder(tmp_path, monkeypatch, folder):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    given = {} if folder is None else {"save_dir": str(tmp_path / folder), "run_name": "mine"}
    options = {"create_mlflow_logger": True, "mlflow_logger_kwargs": given, "name": "policy"}
    _trainer, logger = with_logger(tmp_path / "job", **options)
    logger.log_hyperparams({"model": {"seed": 7}})
    for step in (1, 2):
        logger.log_metrics({"loss": 0.5 * step}, step=step, prefix="train/")
    logger.finalize()
    client = mlflow.MlflowClient(f"file:{tmp_path / (folder or 'job/mlruns')}")
    (run,) = client.search_runs([client.get_experiment_by_name("policy").experiment_id])
    assert run.info.run_name == ("mine" if folder else "job") and run.info.status == "FINISHED"
    assert run.data.params == {"model/seed": "7"}
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(entry.step, entry.value) for entry in history] == [(1, 0.5), (2, 1.0)]


def test_prometheus_reads_the_newest_metrics(tmp_path):
    trainer, logger = with_logger(tmp_path / "job", prometheus_address="127.0.0.1:0")
    address = f"127.0.0.1:{trainer.loggers[-1].port}"
    for step in (1, 2):
        logger.log_metrics({"loss": 0.5 * step, "a-b": float("nan")}, step, prefix="train/")
    page = urllib.request.urlopen(f"http://{address}/metrics", timeout=10).read().decode()
    lines = [line for line in page.splitlines() if not line.startswith("#")]
    names = "nemo_aligner_step 2.0", "nemo_aligner_train_a_b NaN"
    assert sorted(lines) == [*names, "nemo_aligner_train_loss 1.0"]
    with pytest.raises(UserError, match=f"prometheus_address={address} cannot be served"):
        PrometheusLogger(address)
    logger.finalize()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://{address}/metrics", timeout=10)
    with pytest.raises(UserError, match="prometheus_address=9400 is not HOST:PORT"):
        PrometheusLogger("9400")


def test_a_logger_that_cannot_work_is_refused_in_two_lines(tmp_path, monkeypatch):
    monkeypatch.setenv("NEPTUNE_API_TOKEN", "")
    options = {"create_neptune_logger": True, "neptune_logger_kwargs": {"name": "a"}}
    with pytest.raises(UserError) as error:
        with_logger(tmp_path, **options)
    first, second = str(error.value).split("\n")
    assert "ValueError: either api_key should be set" in first
    assert second.endswith("(exp_manager.create_neptune_logger).")


class NoCheckpoints:
    root = "folder"

    def load_latest(self, resume_from=None):
        return None


def test_resuming_from_a_section_with_one_key():
    resume = {"exp_manager": {"resume_if_exists": True, "resume_ignore_no_checkpoint": False}}
    with pytest.raises(UserError, match="folder holds no complete checkpoint"):
        load_trainer_state(OmegaConf.create(resume), NoCheckpoints())
    cfg = OmegaConf.create({"exp_manager": {"resume_if_exists": False}})
    assert load_trainer_state(cfg, NoCheckpoints()) is None


def test_a_monitor_that_no_checkpoint_has_is_warned_of():
    metrics = {"val_loss": 0.5, "step": 3.0}
    said = why_unranked(metrics, "validation_loss", 3)
    assert "monitor=validation_loss, so it ranks last. It has step, val_loss." in said
    assert why_unranked(metrics, "val_loss", 3) is None
    assert why_unranked(metrics, "validation_loss", 0) is None
