# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Partial and older configurations are completed with the defaults of their keys."""

import subprocess
import sys

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from nemo_aligner.config.defaults import CONF, complete, complete_config, complete_model
from nemo_aligner.config.fields import ABSENT, fields_of, meaning_of, meanings
from nemo_aligner.config.jobs import JOBS
from nemo_aligner.config.schema import CONFIG_NAMES
from nemo_aligner.config.values import Values
from nemo_aligner.core.errors import ConfigError

TINY = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "encoder_seq_length": 32}


def load(name):
    return complete_config({}, name)


def test_a_missing_key_has_its_default():
    ppo = complete({"gae_lambda": 0.5}, "gpt_ppo_actor", "trainer.ppo")

    assert ppo.gae_lambda == 0.5
    assert ppo.ratio_eps == load("gpt_ppo_actor").trainer.ppo.ratio_eps
    assert (ppo.use_absolute_kl, ppo.kl_estimator) == (False, None)
    assert ppo.adaptive_kl.horizon == 10000


def test_a_default_that_is_a_reference_has_the_value_of_the_completed_section():
    rs = complete({"rollout_micro_batch_size": 3}, "gpt_rs_actor", "model.rs")

    assert rs.forward_micro_batch_size == 3
    assert rs.length_params.max_length == 2048  # half of model.encoder_seq_length in the YAML


def test_references_resolve_in_the_configuration_that_the_section_is_a_part_of():
    model = {"global_batch_size": 5, "x": 7}
    cfg = OmegaConf.create({"model": model, "trainer": {"ppo": {"ratio_eps": "${model.x}"}}})

    ppo = complete(cfg.trainer.ppo, "gpt_ppo_actor", "trainer.ppo")

    assert ppo.model_gbs == 5 and ppo.ratio_eps == 7
    assert "model_gbs" not in cfg.trainer.ppo


@pytest.mark.parametrize("key, value", [("alarms", None), ("gradient_clip_val", None)])
def test_a_null_with_a_meaning_is_kept(key, value):
    assert complete({key: value}, "gpt_ppo_actor", "trainer.ppo")[key] is value


def test_architecture_keys_that_are_null_get_their_fallback():
    model = complete_model(TINY | {"ffn_hidden_size": None, "bias": None}, "gpt_ppo_actor")

    assert (model.ffn_hidden_size, model.num_query_groups, model.bias) == (64, 4, True)
    assert (model.tensor_model_parallel_size, model.normalization) == (1, "layernorm")
    assert model.max_position_embeddings == 32 and model.ppo.num_rollouts_per_prompt == 1


def test_a_model_built_outside_a_job_computes_in_float32():
    assert complete_model(TINY, "gpt_ppo_actor").precision == 32
    assert complete_config({}, "gpt_ppo_actor").model.precision is None  # by the device


def test_an_optimizer_without_schedule_keeps_its_rate():
    cfg = {"model": {"optim": {"name": "adam", "lr": 0.1}}}

    assert "sched" not in complete_config(cfg, "gpt_ppo_actor").model.optim
    optim = complete(cfg["model"]["optim"], "gpt_ppo_actor", "model.optim")
    assert (optim.sched.name, optim.sched.constant_steps, optim.weight_decay) == ("constant", 0, 0)


def test_a_default_that_cannot_be_computed_names_its_key():
    with pytest.raises(ConfigError, match="model.ffn_hidden_size is not set"):
        complete_model({"num_attention_heads": 2})


@pytest.mark.parametrize("name", CONFIG_NAMES)
def test_a_complete_configuration_stays_as_it_is(name):
    cfg = load(name)
    assert complete_config(cfg, name) == OmegaConf.merge(cfg)


@pytest.mark.parametrize("name", JOBS)
def test_a_yaml_file_shows_a_page_of_the_defaults(name):
    """Composed by Hydra it has all of them."""
    assert len((CONF / f"{name}.yaml").read_text().splitlines()) <= 62
    shown = OmegaConf.load(CONF / f"{name}.yaml")
    del shown.defaults
    defaults = complete_config({}, name)
    assert OmegaConf.merge(defaults, shown) == defaults
    with initialize_config_dir(str(CONF.resolve()), version_base=None):
        assert compose(name) == defaults


def test_a_section_explains_its_keys():
    """Each key with a default has a meaning, and nothing is explained that is not there."""
    for job in JOBS.values():
        for key in job.keys.values():
            field = key.name.rpartition(".")[2]
            if key.acts and key.default is not ABSENT:
                assert meaning_of(key.section, field), key.name
            for each in key.section.__mro__:
                explained = {name for names in meanings(each) for name in names}
                fields = fields_of(key.section)
                assert explained <= fields.keys(), each


@pytest.mark.parametrize("value", ["text", 5, [1]])
def test_names_that_a_user_chooses_stand_in_a_mapping(value):
    key = JOBS["gpt_sft"].keys["model.mcore_customization_config"]
    with pytest.raises(ConfigError, match="model.mcore_customization_config=.* must be a mapping"):
        key.check(Values({"model": {"mcore_customization_config": value}}))


def test_loading_defaults_imports_neither_torch_nor_nemo():
    code = (
        "import sys; from nemo_aligner.config.defaults import complete; "
        "complete({}, 'gpt_ppo_actor', 'trainer.ppo'); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'nemo', 'lightning', 'megatron')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_actors_call_the_servers_where_they_listen():
    remote = load("gpt_ppo_actor").remote_critic_rm
    assert remote.critic.port == load("gpt_ppo_critic").trainer.ppo.port
    assert remote.reward_model.port == load("inference_rm").inference.port
    assert remote.reward_model.name == load("inference_rm").inference.model_name


def test_only_models_with_a_head_get_the_keys_of_a_head():
    assert "force_head_dtype" not in complete_model(TINY, "gpt_sft")
    assert complete_model(TINY, "inference_rm").force_head_dtype == "float32"
    assert complete_model(TINY).output_sequence is False
