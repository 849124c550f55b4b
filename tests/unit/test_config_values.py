# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of values: switches, sections, values that must be given, and the keys of a model."""

import math
import re

import pytest
from omegaconf import OmegaConf

from nemo_aligner.algorithms.alarms import Alarms
from nemo_aligner.algorithms.ppo_data import make_kl_controller
from nemo_aligner.config import schema as config_schema
from nemo_aligner.config.defaults import complete_model
from nemo_aligner.config.jobs import JOBS
from nemo_aligner.config.parallel_rules import check_architecture, parallel_factor
from nemo_aligner.config.rollout_rules import check_shared_queue
from nemo_aligner.config.rules import check_keys_alone
from nemo_aligner.config.schema import CONFIG_NAMES
from nemo_aligner.config.server_rules import (
    check_one_reward_per_sample,
    check_reward_standardization,
)
from nemo_aligner.config.values import Values
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.kl import FixedKLController
from tests.cases import rows
from tests.tiny_models import tiny_config
from tests.unit.test_config_checks import (
    check,
    check_at_start,
    check_with_checkpoint,
    load,
    with_value,
)


@pytest.mark.parametrize("name", CONFIG_NAMES)
def test_a_switch_takes_no_text(name, tmp_path):
    """Every switch of every configuration: Hydra reads these as texts, and 0 as a number."""
    tree = OmegaConf.to_container(load(name, tmp_path), resolve=True)
    check_keys_alone(Values(tree), name)
    for key in config_schema.FLAGS & config_schema.LIVE[name]:
        for value in ("off", "no", "None", 0):
            with pytest.raises(ConfigError, match=rf"^{key}={value!r} must be True or False"):
                check_keys_alone(Values(with_value(tree, key, value)), name)


def refused_values(key):
    """Values that a key cannot have, by its type and bounds."""
    if key.choices:
        return ["odd"]
    if key.kind is int:
        below = [] if key.at_least == -math.inf else [int(key.at_least) - 1]
        return ["1", 1.5, True, *below] + [key.at_most + 1] * (key.at_most < math.inf)
    if key.kind is float:
        edges = [(key.at_least, -1), (key.above, 0), (key.at_most, 1)]
        beyond = [edge + step for edge, step in edges if edge is not None and abs(edge) < math.inf]
        return ["1", math.nan, True, *beyond]
    return []


@pytest.mark.parametrize("name", CONFIG_NAMES)
def test_a_key_is_refused_beyond_its_bounds(name, tmp_path):
    tree = OmegaConf.to_container(load(name, tmp_path), resolve=True)
    for key in JOBS[name].keys.values():
        for value in refused_values(key):
            with pytest.raises(ConfigError, match=rf"^{key.name}={re.escape(repr(value))} "):
                check_keys_alone(Values(with_value(tree, key.name, value)), name)


def test_a_switch_is_null_only_where_the_checkpoint_decides(tmp_path):
    with pytest.raises(ConfigError, match="trainer.ppo.whiten_rewards=null must be True or False"):
        check("gpt_ppo_actor", tmp_path, "trainer.ppo.whiten_rewards=null")
    given = "model.bias=null", "model.moe_router_pre_softmax=null"
    assert check("gpt_ppo_actor", tmp_path, *given) == []
    assert check("gpt_ppo_critic", tmp_path, "model.use_avg_pool=null") == []


@pytest.mark.parametrize("name", CONFIG_NAMES)
def test_null_is_refused_where_a_value_is_needed(name, tmp_path):
    tree = OmegaConf.to_container(load(name, tmp_path), resolve=True)
    check_keys_alone(Values(tree), name)
    if "peft" in tree["model"]:
        check_keys_alone(Values(with_value(tree, "model.peft.lora_tuning", None)), name)
        tree["model"]["peft"]["peft_scheme"] = "lora"
    for key in config_schema.REQUIRED[name]:
        with pytest.raises(ConfigError, match=f"^{key} is not set; give"):
            check_keys_alone(Values(with_value(tree, key, None)), name)
        section = key.rpartition(".")[0]
        with pytest.raises(ConfigError, match=rf"^{section}\..* is not set; give"):
            check_keys_alone(Values(with_value(tree, section, None)), name)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("trainer.ppo.adaptive_kl", 5, "5 is a section; set its keys, such as {}.enable"),
        ("trainer.ppo.alarms", "a", "'a' is a section; set its keys, such as {}.clip_fraction"),
        ("model.ppo.sampling_params", [1], r"\[1\] is a section; .* such as {}.end_strings"),
        ("exp_manager.name", ["a"], r"\['a'\] must be a text\."),
        ("exp_manager.name", True, r"True must be a text\."),
    ],
)
def test_a_value_of_another_kind_is_refused(key, value, says, tmp_path):
    cfg = load("gpt_ppo_actor", tmp_path)
    OmegaConf.update(cfg, key, value, merge=False)
    with pytest.raises(ConfigError, match=f"{key}={says.format(key)}"):
        check_at_start(cfg, "gpt_ppo_actor")


def test_null_switches_alarms_and_adaptive_kl_off(tmp_path):
    overrides = ["trainer.ppo.alarms=null", "trainer.ppo.adaptive_kl=null"]
    assert check("gpt_ppo_actor", tmp_path, *overrides) == []
    section = load("gpt_ppo_actor", tmp_path, *overrides).trainer.ppo
    assert isinstance(make_kl_controller(section), FixedKLController)
    assert not Alarms("trainer.ppo.alarms", section.alarms).thresholds


RECOMPUTE = "model.activations_checkpoint_"
SCRATCH = (
    "pretrained_checkpoint.restore_from_path=null",
    *(f"model.{size}" for size in ("num_layers=2", "hidden_size=32", "num_attention_heads=4")),
    "model.tokenizer.library=huggingface",
)


@pytest.mark.parametrize(
    ("overrides", "message"),
    rows("""
granularity=some -> granularity='some' must be one of selective, full
granularity=full -> granularity=full needs model.activations_checkpoint_method, .* uniform or block
granularity=full method=all num_layers=1 -> method='all' must be one of uniform, block
granularity=full method=block -> granularity=full needs model.activations_checkpoint_num_layers
granularity=full method=block num_layers=0 -> num_layers=0 must be at least 1
granularity=full method=block num_layers=3 -> num_layers=3 is more than the 2 layers
granularity=selective num_layers=1 -> num_layers=1 is only for granularity=full
"""),
)
def test_recomputation(overrides, message, tmp_path):
    works = ["granularity=full", "method=block", "num_layers=2"]
    assert check("training_rm", tmp_path, *SCRATCH, *(RECOMPUTE + part for part in works)) == []
    with pytest.raises(ConfigError, match=message):
        check("training_rm", tmp_path, *SCRATCH, *(RECOMPUTE + p for p in overrides.split()))


def test_recomputation_is_completed_by_the_checkpoint(tmp_path):
    overrides = [f"{RECOMPUTE}granularity=null", f"{RECOMPUTE}method=block"]
    cfg = load("gpt_sft", tmp_path, *overrides)  # trained with a method that is switched off now
    check_with_checkpoint(cfg, "gpt_sft")
    # The checkpoint may say "full".
    assert check("gpt_ppo_actor", tmp_path, f"{RECOMPUTE}num_layers=2") == []


def test_keys_of_experts_need_experts(tmp_path):
    topk = "model.moe_router_topk=2"
    with pytest.raises(ConfigError, match="model.moe_router_topk=2 is of a mixture of experts"):
        check("training_rm", tmp_path, *SCRATCH, topk)
    assert check("training_rm", tmp_path, *SCRATCH, topk, "model.num_moe_experts=2") == []
    # The configuration of a dense checkpoint may hold them.
    check_with_checkpoint(load("training_rm", tmp_path, topk), "training_rm")


def test_no_remedy_names_what_a_checkpoint_fixes():
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    sizes["tensor_model_parallel_size"] = 3
    with pytest.raises(ConfigError, match="use 3 or 6"):
        check_architecture(sizes)
    said = "so set model.tensor_model_parallel_size to a divisor of 4"
    with pytest.raises(ConfigError, match=said) as caught:
        check_architecture(sizes, fixed=True)
    assert "use 3 or 6" not in str(caught.value)


@pytest.mark.parametrize("sizes", [[], ["model.num_moe_experts=2"]])
def test_expert_parallelism_of_a_checkpoint_can_be_overridden(sizes, tmp_path):
    cfg = load("gpt_ppo_actor", tmp_path, "model.expert_model_parallel_size=2", *sizes)  # one rank
    said = r"unless it is overridden: model.expert_model_parallel_size=1"
    with pytest.raises(ConfigError, match=said):
        check_with_checkpoint(cfg, "gpt_ppo_actor")


def test_one_virtual_stage_means_no_virtual_stages(tiny_tokenizer_dir):
    from nemo_aligner.models.nlp.gpt.megatron_config import build_transformer_config

    cfg = tiny_config(tiny_tokenizer_dir, virtual_pipeline_model_parallel_size=1)
    config = build_transformer_config(complete_model(cfg))
    assert config.virtual_pipeline_model_parallel_size is None


def test_a_dense_checkpoint_cannot_become_a_mixture_of_experts(tiny_tokenizer_dir, tmp_path):
    """Only the weights can tell: `model.num_moe_experts` of the user wins over the checkpoint's
    configuration.
    """
    from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel

    dense, path = tiny_config(tiny_tokenizer_dir), str(tmp_path / "dense")
    # The first model of a process makes its groups: one virtual stage must not stop it.
    MegatronGPTModel(
        tiny_config(tiny_tokenizer_dir, virtual_pipeline_model_parallel_size=1)
    ).save_to(path)
    mixture = OmegaConf.merge(dense, {"num_moe_experts": 2, "moe_ffn_hidden_size": 48})
    said = r"lacks \d+ weight.* such as 'model.*(router|experts).*model_config.yaml"
    with pytest.raises(UserError, match=said):
        MegatronGPTModel.restore_from(path, override_config_path=mixture)


@pytest.mark.parametrize("name", CONFIG_NAMES)
def test_a_configuration_with_all_defaults_of_a_model_passes(name, tmp_path):
    """As after a checkpoint whose configuration was saved with them."""
    sizes = ("num_layers=2", "hidden_size=32", "num_attention_heads=4")
    cfg = load(name, tmp_path, *(f"model.{size}" for size in sizes))
    cfg.model.encoder_seq_length = 4096
    cfg.model = complete_model(cfg.model, name)
    check_with_checkpoint(cfg, name)


# ---- rules that constructors call too

TINY = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "encoder_seq_length": 32}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((None, 2, 2, 1), "this model has none"),
        ((3, 2, 2, 1), "model.num_moe_experts=3 must be a multiple of 2"),
        ((4, 4, 3, 2), "_size=4 does not divide the 6 data-parallel"),
    ],
)
def test_expert_parallel(sizes, message):
    def check(experts, size, dp, cp):
        model = {"num_moe_experts": experts, "expert_model_parallel_size": size}
        values = Values({"model": model | {"context_parallel_size": cp}})
        assert parallel_factor(values, dp * cp, complete=True) == {"data parallel size": dp}

    check(None, 1, 3, 1)
    check(4, 2, 1, 2)
    with pytest.raises(ConfigError, match=message):
        check(*sizes)


def test_what_a_constructor_may_be_given():
    for use_flask, experts in ((False, 4), (None, 4), (True, 1)):
        check_shared_queue("", use_flask, experts)
    check_reward_standardization({"reward_standardization": None})
    standardization = {"enable": False, "mean": None, "std": 0.0}
    check_reward_standardization({"reward_standardization": standardization})
    standardization |= {"enable": True, "mean": 0.0}
    with pytest.raises(ConfigError, match="std=0.0 must be above 0"):
        check_reward_standardization({"reward_standardization": standardization})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"regression": {"num_attributes": 2}}, "gives 2 attributes"),
        ({"regression": {"attribute_weights": [1.0]}}, "only when attributes are merged"),
        ({"output_sequence": True}, "a number per token"),
    ],
)
def test_one_reward_per_text(changes, message):
    check_one_reward_per_sample(complete_model(TINY, "inference_rm"))
    merged = {"regression": {"num_attributes": 2, "merge_attributes": True}}
    check_one_reward_per_sample(complete_model(TINY | merged, "inference_rm"))
    with pytest.raises(ConfigError, match=message):
        check_one_reward_per_sample(complete_model(TINY | changes, "inference_rm"))
