# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What docs/migration.md says of YAML keys: each key without effect is accepted with its warning
and has none, each refused value is refused with its remedy, each old form gives its note.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core import tensor_parallel
from omegaconf import OmegaConf

from nemo_aligner.algorithms.critic_server_trainer import CriticServerTrainer
from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.config.data_rules import DATA_IMPLS, OTHER_DATA_IMPLS, check_data_impl
from nemo_aligner.config.defaults import complete_config
from nemo_aligner.config.inert_keys import INERT, LATER, OLD_FORMS
from nemo_aligner.config.optim_rules import SCHEDULE_KEYS, SCHEDULES
from nemo_aligner.config.schema import CONFIG_NAMES
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.data.nlp import builders
from nemo_aligner.generation import GenerationParams
from nemo_aligner.launch.experiment import build_checkpoint_callback, setup_experiment
from nemo_aligner.launch.processes import resolve_and_create_trainer
from nemo_aligner.models.nlp.gpt.gpt_sft_model import GPTSFTModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.models.nlp.gpt.tokenizers import LIBRARIES, build_tokenizer
from tests import ppo_fakes
from tests.cases import some_of
from tests.data_sets import build_pairs, sft
from tests.tiny_models import tiny_config
from tests.unit import test_optim_recipes
from tests.unit.test_config_checks import check, check_at_start, load, with_value

ROOT = Path(__file__).parents[2]
ODD = "odd"  # what nobody who reads a key could use
SPLITS = "train", "validation", "test"


def with_keys(name, tmp_path, keys):
    tree = OmegaConf.to_container(load(name, tmp_path))
    for key, value in keys.items():
        tree = with_value(tree, key, value)
    return OmegaConf.create(tree)


def odd(section, config_name):
    """A section of nothing but its keys without effect, each with a value of no sense."""
    tree = {}
    for key in INERT[config_name]:
        if key.startswith(f"{section}."):
            tree = with_value(tree, key.removeprefix(f"{section}."), ODD)
    return tree


def unchanged(make, section, config_name):
    """What `make(keys)` gives without keys and with those without effect, which is the same."""
    plain, given = make({}), make(odd(section, config_name))
    assert plain == given
    return plain


# --- keys without effect: accepted, with a warning


@some_of("name", CONFIG_NAMES, keep=3)
def test_every_key_without_effect_is_accepted_with_its_warning(name, tmp_path):
    def below_another(key):
        return any(key.startswith(f"{other}.") for other in INERT[name])

    inert = {key: each for key, each in INERT[name].items() if not below_another(key)}
    cfg = with_keys(name, tmp_path, dict.fromkeys(inert, ODD))
    notes = check_at_start(cfg, name)
    warned = {key for key in inert if not inert[key].is_neutral(ODD)}
    forms = {f"{old.form}: {old.happens}" for old in OLD_FORMS}
    expected = {f"{key}={ODD}: {inert[key].reason}" for key in warned}
    assert set(notes) - forms == expected
    assert len(warned) > 100

    cfg = with_keys(name, tmp_path, dict.fromkeys(inert))
    assert check_at_start(cfg, name) == []


# --- keys without effect: nothing changes. Those of a model: test_model_keys.py


def attributes(trainer):
    """What Lightning's own loops would act on."""
    names = """accumulate_grad_batches check_val_every_n_epoch gradient_clip_algorithm
        limit_predict_batches limit_test_batches limit_train_batches limit_val_batches
        log_every_n_steps max_epochs max_steps min_epochs min_steps num_sanity_val_steps
        overfit_batches val_check_batch val_check_interval fast_dev_run barebones
        _detect_anomaly gradient_clip_val default_root_dir"""
    found = {name: getattr(trainer, name, None) for name in names.split()}
    kinds = [*trainer.callbacks, trainer.profiler, trainer.strategy, *trainer.loggers]
    return found, [type(each).__name__ for each in kinds]


def test_keys_of_lightning_have_no_effect():
    def trainer(more):
        plain = {"devices": 1, "accelerator": "cpu", "precision": 32, "sft": {"max_steps": 3}}
        cfg = OmegaConf.create({"trainer": {**plain, **more}})
        return attributes(resolve_and_create_trainer(cfg, "sft"))

    unchanged(trainer, "trainer", "gpt_sft")


def test_keys_of_the_experiment_have_no_effect(tmp_path):
    def experiment(more):
        plain = {"explicit_log_dir": str(tmp_path / str(len(more))), "name": "x"}
        cfg = {"trainer": {"devices": 1, "accelerator": "cpu", "precision": 32}}
        cfg = OmegaConf.create({**cfg, "exp_manager": {**plain, **more}})
        trainer = resolve_and_create_trainer(cfg, "ppo")
        folder = setup_experiment(trainer, cfg)
        callback = vars(build_checkpoint_callback(cfg, folder, None, None, None))
        options = {key: value for key, value in callback.items() if key not in ("root", "log_dir")}
        assert trainer.default_root_dir == str(folder)
        values, kinds = attributes(trainer)
        del values["default_root_dir"]
        return values, kinds, options, callback["root"].relative_to(folder)

    unchanged(experiment, "exp_manager", "gpt_ppo_actor")


def test_keys_of_the_optimizer_have_no_effect(tiny_tokenizer_dir):
    def optimization(more):
        model = MegatronGPTModel(tiny_config(tiny_tokenizer_dir, num_layers=1, optim=more))
        optimizer, scheduler = model.setup_megatron_optimization(10)
        rates = []
        for _ in range(10):
            rates.append(optimizer.param_groups[0]["lr"])
            scheduler.step(increment=1)
        return optimizer.config, model.model[0].ddp_config, rates

    *_, rates = unchanged(optimization, "model.optim", "training_rm")
    assert len(set(rates)) > 3


def test_keys_of_the_data_have_no_effect(write, tiny_tokenizer):
    texts = [f"the film {n}" for n in range(8)]
    path = write(*({"text": text, "input": text, "output": "was bad"} for text in texts))

    def shuffled(more):
        cfg = OmegaConf.create({"model": {"data": {"num_workers": 0, **more}, "seed": 1}})
        sizes = {"mbs": 1, "gbs": 2, "use_random_sampler": True, "collate_fn": None}
        datasets = build_pairs({split: [path] for split in SPLITS}, tiny_tokenizer, **more)
        return [
            [str(batch) for batch in builders.build_dataloader(cfg, dataset, 0, **sizes)]
            for dataset in datasets
        ]

    def encoded(more):
        dataset = sft(path, tiny_tokenizer, more)
        return [str(dataset[i]) for i in range(len(dataset))]

    assert len(unchanged(shuffled, "model.data", "training_rm")[0]) == 2
    assert len(unchanged(encoded, "model.data.train_ds", "gpt_sft")) == 8


def test_keys_of_sampling_have_no_effect():
    for name in ("ppo", "rs"):
        more = odd(f"model.{name}.sampling_params", f"gpt_{name}_actor")
        assert set(more) == {"add_BOS", "all_probs", "compute_logprob"}
        plain = {"use_greedy": False, "temperature": 0.5, "end_strings": ["x"]}
        params = [GenerationParams.from_config({"max_length": 4}, plain | m) for m in ({}, more)]
        assert params[0] == params[1]


def test_keys_of_the_trainers_have_no_effect():
    """A job of each actor, and the settings of the critic's server."""

    def job(more):
        trainer = ppo_fakes.make_trainer(**more)
        trainer.fit()
        return trainer.events, trainer.state_dict(), trainer.model.weight

    def server(more):
        model = SimpleNamespace(cfg=OmegaConf.create({"encoder_seq_length": 8}), tokenizer=None)
        cfg = OmegaConf.create({"combine_rm_and_critic_server": False, **more})
        parts = (None, None, ppo_fakes.FakeLogger(), None, None)
        server = CriticServerTrainer(cfg, model, *parts, 4, 2)
        plain = {k: v for k, v in vars(server).items() if isinstance(v, (int, float, str))}
        return plain, server._make_front(())._batcher

    keys = {"flask_server", "trt_llm", "batch_iterator", "wandb_table"}
    assert keys <= set(odd("trainer.ppo", "gpt_ppo_actor"))
    assert len(unchanged(job, "trainer.ppo", "gpt_ppo_actor")[0]) > 20
    keys = {"max_epochs", "val_check_interval", "save_interval"}
    assert keys <= set(odd("trainer.ppo", "gpt_ppo_critic"))
    assert len(unchanged(server, "trainer.ppo", "gpt_ppo_critic")[0]) > 5


# --- values that are refused; those of `ONLY`: test_model_keys.py


@pytest.mark.parametrize(("job", "key"), LATER)
def test_what_is_refused_so_far_is_refused_with_its_remedy(job, key, tmp_path):
    accepted, remedy = LATER[job, key]
    for value in (True, {"a": {"_target_": "b.C"}}):
        with pytest.raises(ConfigError) as caught:
            cfg = with_keys(job, tmp_path, {key: value})
            check_at_start(cfg, job)
        assert key in str(caught.value)
        if value is True:
            assert f"{key}=True is not supported yet: {remedy}." == str(caught.value)
    for value in accepted:
        cfg = with_keys(job, tmp_path, {key: value})
        assert check_at_start(cfg, job) == []


# --- forms with another meaning

RECOMPUTE = "model.activations_checkpoint_"
# What a user would write, in the order of the list.
WRITTEN = ({RECOMPUTE + "granularity": "selective", RECOMPUTE + "method": "uniform"},)
WRITTEN += ({RECOMPUTE + "granularity": None, RECOMPUTE + "num_layers": 2},)
WRITTEN += ({"trainer.gradient_clip_val": 0.123}, {"trainer.max_steps": 123})
WRITTEN += ({"exp_manager": None}, {"model.optim": {"name": "adamw"}})
WRITTEN += ({"trainer.ppo.trt_llm.enable": True}, {"trainer.reinforce.trt_llm.enable": True})
WRITTEN += ({"model.answer_only_loss": False}, {"inference.micro_batch_size": 7})


@some_of("number", range(len(OLD_FORMS)), keep=2)
def test_a_form_gives_its_note_in_its_jobs_alone(number, tmp_path):
    form, written = OLD_FORMS[number], WRITTEN[number]
    assert len(WRITTEN) == len(OLD_FORMS)
    note = f"{form.form}: {form.happens}"
    for name in CONFIG_NAMES:
        try:
            notes = check_at_start(with_keys(name, tmp_path, written), name)
        except ConfigError as error:  # the job has no such key
            assert name not in form.jobs and "Unknown configuration key" in str(error)
        else:
            assert (note in notes) == (name in form.jobs)


@pytest.mark.parametrize(
    ("keys", "checkpoints"),
    [
        ({"granularity": "selective"}, 2),  # the attention of each of two layers
        ({"granularity": "selective", "method": "uniform"}, 2),
        ({"granularity": None, "method": "uniform", "num_layers": 1}, 0),
        ({"granularity": "full", "method": "uniform", "num_layers": 2}, 1),
    ],
)
def test_recomputation_is_what_the_forms_say(keys, checkpoints, tiny_tokenizer_dir, monkeypatch):
    calls, own = [], tensor_parallel.checkpoint

    def checkpoint(*arguments, **named):
        calls.append(1)
        return own(*arguments, **named)

    monkeypatch.setattr(tensor_parallel, "checkpoint", checkpoint)
    keys = {f"activations_checkpoint_{key}": value for key, value in keys.items()}
    model = GPTSFTModel(tiny_config(tiny_tokenizer_dir, **keys))
    model.setup_megatron_optimization(1)
    model.prepare_for_training_step()
    tokens = torch.arange(8)[None]
    model.get_loss_and_metrics({"tokens": tokens, "labels": tokens, "loss_mask": tokens > 3})
    assert len(calls) == checkpoints


def test_the_older_name_of_a_key_counts_where_the_newer_is_not_given():
    older = complete_config({"inference": {"micro_batch_size": 7}}, "inference_rm").inference
    both = {"micro_batch_size": 7, "inference_micro_batch_size": 3}
    assert older.inference_micro_batch_size == 7
    both = complete_config({"inference": both}, "inference_rm").inference
    assert both.inference_micro_batch_size == 3


# --- schedules, tokenizers, data; optimizers: test_config_checks.py


def rates(name, **keys):
    base = {"d_model": 4} if name == "NoamAnnealing" else {}
    base |= {"constant_steps": 3} if name == "T5InverseSquareRootAnnealing" else {}
    base |= {"step_size": 3} if name == "StepLR" else {}
    base |= {"warmup_steps": 1} if "Hold" in name else {}
    keys = {"name": name, **base, **keys}
    for key in set(keys) & set(SCHEDULES[name].keys):
        if key.endswith("_ratio"):  # instead of the updates
            keys[key.replace("_ratio", "_steps")] = None
    return test_optim_recipes.rates(24, max_steps=20, **keys)


SCHEDULE_VALUES = {"warmup_steps": 5, "warmup_ratio": 0.3, "hold_steps": 7, "hold_ratio": 0.4}
SCHEDULE_VALUES |= {"constant_steps": 6, "constant_ratio": 0.4, "min_lr": 0.2, "power": 3.0}
SCHEDULE_VALUES |= {"cycle": True, "d_model": 9, "decay_rate": 0.9, "step_size": 5, "gamma": 0.7}
# Read, and without consequence: a rate that never falls is held anyway, and NeMo's class starts
# the next cycle after the last update.
SAME_RATES = {("WarmupHoldPolicy", key) for key in ("hold_steps", "hold_ratio")}
SAME_RATES.add(("PolynomialDecayAnnealing", "cycle"))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_reads_its_keys_and_no_others(name):
    assert set(SCHEDULE_VALUES) == set(SCHEDULE_KEYS)
    base = rates(name)
    for key, value in SCHEDULE_VALUES.items():
        reads = key in SCHEDULES[name].keys and (name, key) not in SAME_RATES
        assert (rates(name, **{key: value}) != base) == reads, key


@pytest.mark.parametrize("name", [name for name, each in LIBRARIES.items() if not each.reads])
def test_libraries_of_other_tokenizers_are_refused(name):
    with pytest.raises(ConfigError) as caught:
        build_tokenizer(OmegaConf.create({"library": name}))
    assert f"'{name}' is not supported; {LIBRARIES[name].note}" in str(caught.value)


@pytest.mark.parametrize("name", [*OTHER_DATA_IMPLS, "memmap"])
def test_other_forms_of_data_are_refused(name, tmp_path):
    for form in DATA_IMPLS:
        check_data_impl(form)
    with pytest.raises(ConfigError, match=f"data_impl={name} is not supported; "):
        check("gpt_rs_actor", tmp_path, f"model.data.data_impl={name}")


# --- checkpoints of a training run of NeMo-Aligner


@pytest.mark.parametrize(
    "file",
    [
        "gpt-step=3-last/metadata.json",
        "gpt-step=3-last/common.pt",
        "gpt-step=3-last/mp_rank_00/model.ckpt",
        "gpt-step=3-last/tp_rank_00_pp_rank_001/model.ckpt",
        "gpt-step=3-last.ckpt",
    ],
)
def test_training_checkpoints_of_nemo_aligner_are_refused(file, tmp_path):
    callback = CheckpointCallback(tmp_path, None, None, None, name="x")
    (tmp_path / "checkpoints/gpt.nemo").mkdir(parents=True)
    (tmp_path / "checkpoints/gpt.nemo/model_config.yaml").touch()
    (tmp_path / "checkpoints/gpt.nemo/mp_rank_00").mkdir()
    (tmp_path / "checkpoints/gpt-step=4.writing").mkdir()
    (tmp_path / "checkpoints/gpt-step=4.writing/common.pt").touch()
    assert callback.load_latest() is None  # nothing of another
    path = tmp_path / "checkpoints" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    said = "such as gpt-step=3-last.*start from the .nemo .* another"
    with pytest.raises(UserError, match=said):
        callback.load_latest()
    if path.parent.name != "checkpoints":
        with pytest.raises(UserError, match="start from its .nemo file in another folder"):
            callback.load_latest(tmp_path / "checkpoints/gpt-step=3-last")
