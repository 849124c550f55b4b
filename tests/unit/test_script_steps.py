# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The steps of NeMo-Aligner's scripts, called in the order in which its scripts call them."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from nemo.utils.exp_manager import exp_manager
from omegaconf import OmegaConf

from nemo_aligner.config import checks
from nemo_aligner.config.schema import CONFIG_NAMES
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.launch import script_steps
from nemo_aligner.launch.processes import JobTrainer
from nemo_aligner.models.nlp.gpt.gpt_sft_model import GPTSFTModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.utils import train_script_utils as script_utils
from nemo_aligner.utils import utils
from tests.cases import some_of
from tests.tiny_models import tiny_config
from tests.unit import test_config_checks

pytestmark = pytest.mark.slow

TOKENS = torch.arange(12).reshape(2, 6)


@pytest.fixture(scope="module")
def nemo_file(tiny_tokenizer_dir, tmp_path_factory):
    path = tmp_path_factory.mktemp("base") / "base.nemo"
    MegatronGPTModel(tiny_config(tiny_tokenizer_dir)).save_to(str(path))
    return path


def configuration(folder, **exp_options):
    """What NeMo-Aligner's YAML file of a reward model has, as far as the steps read it."""
    cfg = OmegaConf.create(
        """
        trainer:
          {devices: 1, num_nodes: 1, accelerator: cpu, precision: 32, logger: false,
           gradient_clip_val: "${trainer.rm.gradient_clip_val}", enable_checkpointing: false,
           use_distributed_sampler: false, max_epochs: "${.rm.max_epochs}",
           max_steps: "${.rm.max_steps}",
           rm: {max_epochs: 2, max_steps: -1, val_check_interval: 1, save_interval: 1,
                limit_val_batches: 1.0, gradient_clip_val: 1.0}}
        exp_manager:
          {name: tiny, resume_if_exists: true, resume_ignore_no_checkpoint: true,
           create_checkpoint_callback: true,
           checkpoint_callback_params:
             {monitor: val_loss, mode: min, save_top_k: 3, save_nemo_on_train_end: false,
              filename: "tiny-{step}-{consumed_samples}"}}
        """
    )
    cfg.exp_manager.update({"explicit_log_dir": str(folder), **exp_options})
    return cfg


class SamplerOf12:
    """Six global batches of two."""

    total_samples, global_batch_size, drop_last = 12, 2, True


def start(nemo_file, folder, **exp_options):
    """The steps of a script up to its trainer: (trainer, model, optimizer, schedule, callback)."""
    cfg = configuration(folder, **exp_options)
    cfg.model = utils.load_and_override_model_config(
        nemo_file, OmegaConf.create({"peft": {"peft_scheme": "none"}})
    )
    trainer = script_utils.resolve_and_create_trainer(cfg, "rm")
    exp_manager(trainer, cfg.exp_manager)
    script_utils.CustomLoggerWrapper(trainer.loggers)
    utils.set_autocast_gpu_dtype(cfg.trainer.precision)
    # The whole configuration, as its SFT script passes it.
    model = utils.load_from_nemo(GPTSFTModel, cfg, trainer, strict=True, restore_path=nemo_file)
    script_utils.init_peft(model, cfg.model)
    state = None
    if trainer.ckpt_path is not None:
        state = script_utils.retrieve_custom_trainer_state_dict(trainer)
    script_utils.init_distributed(trainer, model, False)
    loader = SimpleNamespace(batch_sampler=SamplerOf12())
    script_utils.init_using_ptl(trainer, model, loader, "the data set")
    assert (model._train_dl, model._train_ds) == (loader, "the data set")
    optimizer, scheduler = script_utils.extract_optimizer_scheduler_from_ptl_model(model)
    callback = script_utils.add_custom_checkpoint_callback(trainer, model)
    parts = {"optimizer": optimizer, "scheduler": scheduler, "callback": callback, "state": state}
    return SimpleNamespace(trainer=trainer, model=model, **parts)


def test_a_job_starts_saves_and_resumes(nemo_file, tmp_path):
    first = start(nemo_file, tmp_path)
    assert first.state is None
    assert first.scheduler.lr_decay_steps == 2 * 6  # two epochs of six global batches
    with torch.no_grad():
        for parameter in first.model.model[0].parameters():
            parameter.add_(1.0)
    first.optimizer.reload_model_params()
    first.scheduler.step(increment=3)
    first.callback.custom_save(
        {"val_loss": torch.tensor(0.5)}, trainer_state={"step": 3, "consumed_samples": 6}
    )
    assert (tmp_path / "checkpoints" / "tiny-step=3-consumed_samples=6" / "COMPLETE").is_file()

    second = start(nemo_file, tmp_path)
    assert second.trainer.ckpt_path.endswith("tiny-step=3-consumed_samples=6")
    assert second.state["step"] == 3 and second.state["consumed_samples"] == 6
    assert second.state["ppo_optimization_step"] == 0
    assert second.scheduler.num_steps == 3
    ours, theirs = (utils.retrieve_model_state_dict_in_cpu(job.model) for job in (second, first))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert utils.extract_value_from_ckpt("consumed_samples", second.trainer.ckpt_path) == 6

    fresh = start(nemo_file, tmp_path, resume_if_exists=False)
    assert fresh.trainer.ckpt_path is None and fresh.scheduler.num_steps == 0


def test_a_job_that_must_resume_does_so_or_is_refused(nemo_file, tmp_path, monkeypatch):
    """NeMo itself knows no checkpoint of this package."""
    warnings = []
    monkeypatch.setattr("nemo.utils.logging.warning", warnings.append)
    must = {"resume_ignore_no_checkpoint": False}
    with pytest.raises(UserError, match="checkpoints holds no complete checkpoint; set exp_man"):
        start(nemo_file, tmp_path, **must)
    first = start(nemo_file, tmp_path)
    first.callback.custom_save({"val_loss": 0.5}, trainer_state={"step": 2, "consumed_samples": 4})
    second = start(nemo_file, tmp_path, **must)
    assert second.state["step"] == 2
    assert not [line for line in warnings if "Training from scratch" in str(line)]
    given = tmp_path / "elsewhere"
    shutil.copytree(second.trainer.ckpt_path, given)
    third = start(nemo_file, tmp_path, resume_from_checkpoint=str(given), **must)
    assert third.trainer.ckpt_path == str(given) and third.state["step"] == 2


def test_nemos_callback_leaves_checkpoints_alone(nemo_file, tmp_path):
    """It would keep the best by the metric in a name, and fail at one without a number."""
    params = configuration(tmp_path).exp_manager.checkpoint_callback_params
    params = {**params, "filename": "tiny-{val_loss:.3f}-{step}-{consumed_samples}"}
    options = {"checkpoint_callback_params": params | {"save_top_k": 1}}
    job = start(nemo_file, tmp_path, **options)
    for step, loss in ((1, 0.5), (2, 0.6), (3, float("nan"))):
        job.callback.custom_save(
            {"val_loss": torch.tensor(loss)}, trainer_state={"step": step, "consumed_samples": 2}
        )
    before = sorted((tmp_path / "checkpoints").iterdir())
    again = start(nemo_file, tmp_path, **options)
    assert sorted((tmp_path / "checkpoints").iterdir()) == before and len(before) > 1
    assert again.state["step"] == 3


@pytest.mark.parametrize("in_slurm", [False, True])
def test_ranks_of_mpirun_are_those_of_the_job(monkeypatch, tmp_path, in_slurm):
    """Also in an allocation of SLURM, whose variables are those of one task here."""
    slurm = {"NTASKS": 1, "PROCID": 0, "LOCALID": 0, "JOB_ID": 7, "JOB_NAME": "ppo"}
    mpi = {"RANK": 1, "SIZE": 2, "LOCAL_RANK": 1, "LOCAL_SIZE": 2}
    variables = {f"SLURM_{name}": value for name, value in slurm.items() if in_slurm}
    variables |= {f"OMPI_COMM_WORLD_{name}": value for name, value in mpi.items()}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "")  # so that the test puts back what adopting them sets
        monkeypatch.delenv(name)
    trainer = script_utils.resolve_and_create_trainer(configuration(tmp_path), "rm")
    assert (trainer.world_size, trainer.global_rank) == (2, 1)
    assert trainer.strategy.cluster_environment.creates_processes_externally


def test_without_a_checkpoint_callback_nothing_is_written(nemo_file, tmp_path):
    job = start(nemo_file, tmp_path, create_checkpoint_callback=False)
    assert isinstance(job.callback, script_utils.FakeCheckpointCallback)
    job.callback.custom_save({"val_loss": 1.0}, is_train_end=True)
    assert not (tmp_path / "checkpoints").exists()


def test_weights_are_copied_and_swapped(nemo_file):
    model = GPTSFTModel.restore_from(nemo_file)
    own = utils.retrieve_model_state_dict_in_cpu(model, megatron_amp_O2=True)
    other = {name: weight + 1 for name, weight in own.items()}
    with utils.cpu_weight_swap(model, other):
        inside = utils.copy_model_states_to_cpu(model)
        assert all(torch.equal(inside[name], other[name]) for name in own)
    left = utils.swap_dict(model, other)
    assert all(torch.equal(left[name], own[name]) for name in own)
    assert utils.swap_dict(model, own, offload_onto_cpu=False) == {}
    after = utils.copy_model_states_to_cpu(model, cpu_dict=inside)
    assert after is inside and all(torch.equal(after[name], own[name]) for name in own)


def test_what_is_missing_is_named(nemo_file, tmp_path):
    model = GPTSFTModel.restore_from(nemo_file)
    with pytest.raises(UserError, match="call init_using_ptl"):
        script_utils.extract_optimizer_scheduler_from_ptl_model(model)
    with pytest.raises(UserError, match="not a complete checkpoint"):
        script_utils.retrieve_custom_trainer_state_dict(SimpleNamespace(ckpt_path=tmp_path))
    assert script_utils.retrieve_custom_trainer_state_dict(SimpleNamespace(ckpt_path=None)) is None
    with pytest.raises(ConfigError, match="peft_scheme='ptuning'"):
        script_utils.init_peft(model, OmegaConf.create({"peft": {"peft_scheme": "ptuning"}}))


def updates(trainer, model=None, loader=None, data=None):
    return script_steps._updates(trainer, model, loader, data)


def updates_of(section, settings, model_section, prompts=range(50)):
    """Those of a job of 6 rollouts of 8 prompts in an epoch, with 2 global batches each."""
    cfg = OmegaConf.create({"trainer": {section: settings}})
    trainer = SimpleNamespace(section=section, job_cfg=cfg)
    model = SimpleNamespace(cfg=OmegaConf.create({section: model_section, "global_batch_size": 4}))
    return updates(trainer, model, data=prompts)


def test_horizon_of_the_learning_rate():
    ppo = {"num_rollout_samples": 8, "num_rollouts_per_prompt": 1, "kl_loss_coef": 0.0}
    settings = {"max_epochs": 2, "max_steps": -1, "ppo_epochs": 3}
    assert updates_of("ppo", settings, ppo) == 6 * 2 * 2 * 3
    assert updates_of("ppo", settings | {"max_steps": 5}, ppo) == 5 * 2 * 3
    with pytest.raises(ConfigError, match="trainer.ppo.advantage_estimator does not work in a"):
        updates_of("ppo", settings | {"advantage_estimator": "grpo"}, ppo)
    for key, value in (("num_rollouts_per_prompt", 2), ("kl_loss_coef", 0.1)):
        with pytest.raises(ConfigError, match=f"model.ppo.{key} does not work in a script"):
            updates_of("ppo", settings, ppo | {key: value})
    assert updates_of("ppo", {"max_steps": 77}, {}, None) == 77  # a critic
    once = {"max_epochs": 1, "max_steps": -1}
    rs = {"num_rollout_samples": 8, "num_rollouts_per_prompt": 4, "top_n_rollouts": 1}
    assert updates_of("rs", once, rs) == 6 * 2
    four = once | {"num_rollouts_per_prompt": 4}
    assert updates_of("reinforce", four, {"num_rollout_samples": 8}) == 6 * 2 * 4
    loader = SimpleNamespace(batch_sampler=SamplerOf12())
    assert updates(SimpleNamespace(max_steps=-1, max_epochs=3), loader=loader, data="data") == 18
    built = JobTrainer(OmegaConf.create({"trainer": {"max_steps": 7}}), None, accelerator="cpu")
    assert updates(built) == 7
    assert updates(SimpleNamespace(max_steps=9)) == 9
    with pytest.raises(UserError, match="max_steps"):
        updates(SimpleNamespace(max_steps=-1, max_epochs=None))


def job_configuration(name, nemo_file, **changes):
    """The YAML file of a job as its script gets it, for the checkpoint `nemo_file`."""
    device = {"trainer.accelerator": "cpu", "trainer.precision": 32}
    changes = {**device, "model.encoder_seq_length": 48, **changes}
    return test_config_checks.job_configuration(name, nemo_file, **changes)


@pytest.fixture
def calls(monkeypatch):
    """Names of the checks that ran, in order, each with `complete`."""
    seen = []

    def recorded(name, check):
        return lambda *args, **options: (
            seen.append((name, options.get("complete"))) or check(*args, **options)
        )

    for name in ("check_config", "check_values"):
        monkeypatch.setattr(checks, name, recorded(name, getattr(checks, name)))
    return seen


EVERY_CHECK = [("check_config", None), ("check_values", False), ("check_values", True)]


@pytest.mark.parametrize("name", CONFIG_NAMES)
@some_of("is_checked", [False, True])
def test_every_job_is_checked_where_it_reads_its_checkpoint(name, is_checked, nemo_file, calls):
    """Scripts of NeMo-Aligner have no other check; those of this package check at their start."""
    cfg = job_configuration(name, nemo_file)
    if is_checked:
        checks.check_config(cfg, name)
        assert calls == EVERY_CHECK[:2]
    cfg.model = utils.load_and_override_model_config(nemo_file, cfg.model)
    assert calls == EVERY_CHECK
    assert cfg.model.num_layers == 2 and "nemo_aligner_checked" not in str(cfg)


def test_a_script_without_checks_is_told_of_old_forms_and_unknown_keys(nemo_file, monkeypatch):
    warnings = []
    monkeypatch.setattr("nemo.utils.logging.warning", warnings.append)
    changes = {
        "exp_manager": None,
        "my_own.setting": 1,
        "model.ppo.ratio_epz": 0.3,
        "trainer.strategy": "ddp",
        "pretrained_checkpoint.restore_from_path": None,  # a script may have another key for it
    }
    cfg = job_configuration("gpt_ppo_actor", nemo_file, **changes)
    utils.load_and_override_model_config(nemo_file, cfg.model)
    unknown, inert, old = warnings
    assert "my_own" in unknown and "ratio_epz (did you mean model.ppo.ratio_eps?)" in unknown
    assert "trainer.strategy=ddp: Lightning only launches" in inert
    assert "exp_manager=null: the job writes no logs" in old


def test_a_script_without_checks_is_refused_what_cannot_work(nemo_file):
    key = "model.ppo.length_params.max_length"
    cfg = job_configuration("gpt_ppo_actor", nemo_file, **{key: 0})
    with pytest.raises(ConfigError, match=key):
        utils.load_and_override_model_config(nemo_file, cfg.model)
    # Only the checkpoint knows that the model has two layers.
    sizes = {"trainer.devices": 4, "model.pipeline_model_parallel_size": 4}
    cfg = job_configuration("gpt_ppo_actor", nemo_file, **sizes)
    with pytest.raises(ConfigError, match="num_layers=2"):
        utils.load_and_override_model_config(nemo_file, cfg.model)


def test_rejection_sampling_leaves_out_what_ppo_put_into_a_checkpoint(nemo_file, tmp_path):
    trained_by_ppo = tmp_path / "ppo.nemo"
    trained_by_ppo.mkdir()
    cfg = utils.load_checkpoint_model_config(nemo_file)
    cfg.ppo = {"length_params": {"max_length": 5}}
    OmegaConf.save(cfg, trained_by_ppo / "model_config.yaml")
    for name, has_it in (("gpt_rs_actor", False), ("gpt_ppo_actor", True)):
        job = job_configuration(name, trained_by_ppo)
        loaded = utils.load_and_override_model_config(trained_by_ppo, job.model)
        assert ("ppo" in loaded) == has_it
    assert loaded.ppo.length_params.max_length == 24  # half of the job's length


def test_remove_overwritten_fields_at_any_depth():
    base = OmegaConf.create({"a": {"b": {"c": 1, "d": 2}, "e": 3}, "f": 4})
    given = {"a": {"b": {"c": True, "d": False}}, "f": True, "x": True}
    utils.remove_overwritten_fields(base, given)
    assert base == {"a": {"b": {"d": 2}, "e": 3}}
