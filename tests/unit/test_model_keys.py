# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Every key of NeMo's GPT model changes the model, is refused, or is known to have no effect; and
the constructor says so, whoever calls it.
"""

import dataclasses
import math
import re

import pytest
import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_geglu import bias_geglu_impl
from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from nemo.utils import logging
from omegaconf import OmegaConf

from nemo_aligner.config.defaults import CONF, complete_model
from nemo_aligner.config.inert_keys import INERT, INERT_ARCHITECTURE, ONLY, check_model_keys
from nemo_aligner.config.parallel_rules import check_architecture
from nemo_aligner.config.schema import CONFIG_NAMES, LIVE
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.launch.model_loading import load_from_nemo
from nemo_aligner.models.nlp.gpt import megatron_config, megatron_layers
from nemo_aligner.models.nlp.gpt.megatron_config import KERNELS, TRANSFORMER_ENGINE_KERNELS
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
from nemo_aligner.training.megatron_steps import forward_collect
from tests.cases import rows, some_of
from tests.tiny_models import tiny_config

pytestmark = pytest.mark.slow

TOKENS = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(1))
MOE = dict(num_moe_experts=4, moe_ffn_hidden_size=24)
SLOW = dict(rotary_base=4 * 10**12, init_method_std=0.4)  # a wave of more than 8192 positions
LEARNED = dict(max_position_embeddings=None)
YARN = dict(position_embedding_type="yarn", yarn_rotary_scaling_factor=4.0, init_method_std=0.4)
YARN["yarn_original_max_position_embeddings"] = 16
LONG_YARN = YARN | {"yarn_original_max_position_embeddings": 4096}

# Keys that NeMo's MegatronGPTModel (1.10 to 2.2) read, or its YAML files set, and keys of its
# Megatron Core configuration that its converters set. Sorted by what they do here.
# key: (architecture, the other keys, its value). The same weights give other logits:
CHANGES_LOGITS = {"activation": ("llama", {}, "geglu"), "openai_gelu": ("gpt2", {}, True)}
CHANGES_LOGITS |= {"bias_activation_fusion": ("gpt2", {}, True)}
CHANGES_LOGITS |= {"normalization": ("gpt2", {}, "layernorm1p")}
CHANGES_LOGITS |= {"layernorm_zero_centered_gamma": ("llama", {}, True)}
CHANGES_LOGITS |= {"layernorm_epsilon": ("llama", {}, 0.1)}
CHANGES_LOGITS |= {"position_embedding_type": ("llama", {}, "none")}
CHANGES_LOGITS |= {"rotary_base": ("llama", {}, 500000), "rotary_percentage": ("llama", {}, 0.5)}
CHANGES_LOGITS |= {"rotary_interleaved": ("llama", {}, True)}
CHANGES_LOGITS |= {"seq_len_interpolation_factor": ("llama", {}, 2.0)}
CHANGES_LOGITS |= {"scale_positional_embedding": ("llama", SLOW, True)}
CHANGES_LOGITS |= {"scale_factor": ("llama", SLOW | {"scale_positional_embedding": True}, 32)}
CHANGES_LOGITS |= {"window_size": ("llama", {}, [3, 0])}
CHANGES_LOGITS |= {"window_attn_skip_freq": ("llama", {"window_size": [3, 0]}, 2)}
CHANGES_LOGITS |= {"query_pre_attn_scalar": ("llama", {"init_method_std": 0.4}, 2)}
CHANGES_LOGITS |= {"no_rope_freq": ("llama", {}, 2)}
CHANGES_LOGITS |= {"yarn_rotary_scaling_factor": ("llama", YARN, 8.0)}
CHANGES_LOGITS |= {"yarn_original_max_position_embeddings": ("llama", YARN, 64)}
CHANGES_LOGITS |= {"yarn_beta_fast": ("llama", LONG_YARN, 128.0)}
CHANGES_LOGITS |= {"yarn_beta_slow": ("llama", YARN, 0.25)}
CHANGES_LOGITS |= {"yarn_mscale": ("llama", YARN | {"yarn_mscale_all_dim": 0.5}, 2.0)}
CHANGES_LOGITS |= {"yarn_mscale_all_dim": ("llama", YARN | {"yarn_mscale": 2.0}, 0.5)}
CHANGES_LOGITS |= {"yarn_correction_range_round_to_int": ("llama", LONG_YARN, False)}
CHANGES_LOGITS |= {"apply_embedding_scaling": ("llama", {}, True)}
CHANGES_LOGITS |= {"moe_router_topk": ("llama", MOE, 3)}
CHANGES_LOGITS |= {"moe_router_pre_softmax": ("llama", MOE, True)}
# The weights have other names or shapes:
CHANGES_SHAPES = {
    "num_layers": ("llama", {}, 3),
    "hidden_size": ("llama", {}, 16),
    "ffn_hidden_size": ("llama", {}, 32),
    "num_attention_heads": ("llama", {"kv_channels": 8}, 2),
    "num_query_groups": ("llama", {}, 4),
    "kv_channels": ("llama", {}, 16),
    "bias": ("llama", {}, True),
    "qk_layernorm": ("llama", {}, True),
    "qkv_bias": ("llama", {}, True),
    "add_qkv_bias": ("llama", {}, True),
    "share_embeddings_and_output_weights": ("llama", {}, True),
    "make_vocab_size_divisible_by": ("llama", {}, 512),
    "override_vocab_size": ("llama", {}, 400),
    "encoder_seq_length": ("gpt2", LEARNED, 64),
    "max_position_embeddings": ("gpt2", {}, 64),
    "num_moe_experts": ("llama", {}, 4),
    "moe_ffn_hidden_size": ("llama", MOE, 32),
    "moe_layer_freq": ("llama", MOE, 2),
    "moe_shared_expert_intermediate_size": ("llama", MOE, 16),
    "moe_shared_expert_gate": ("llama", MOE | {"moe_shared_expert_intermediate_size": 16}, True),
}
# The initial weights differ:
CHANGES_INITIAL_WEIGHTS = {"init_method_std": ("llama", {}, 0.2), "seed": ("llama", {}, 8)}
CHANGES_INITIAL_WEIGHTS["use_scaled_init_method"] = "llama", {}, False
# The logits differ in training mode:
CHANGES_TRAINING = {"hidden_dropout": ("llama", {}, 0.5), "attention_dropout": ("llama", {}, 0.5)}
# Megatron Core's own settings differ (tests/unit/test_experts.py has their numbers):
CHANGES_SETTINGS = {f"moe_{loss}_coeff": ("llama", MOE, 0.1) for loss in ("aux_loss", "z_loss")}
CHANGES_SETTINGS["moe_router_load_balancing_type"] = "llama", MOE, "none"
CHANGES_SETTINGS["precision"] = "llama", {}, "bf16"
CHANGES = (
    CHANGES_LOGITS | CHANGES_SHAPES | CHANGES_INITIAL_WEIGHTS | CHANGES_TRAINING | CHANGES_SETTINGS
)
# A value of each key that is not supported.
REFUSED = {
    "name": "megatron_falcon_gpt",
    "hyena": {"filter": 1},
    "transformer_block_type": "post_ln",
    "apply_residual_connection_post_layernorm": True,
    "attention_type": "cross",
    "fp8": True,
    "fp32_residual_connection": True,
    "headscale": True,
    "normalize_attention_scores": False,
    "low_freq_factor": 2,
    "high_freq_factor": 8,
    "old_context_len": 4096,
    "drop_layers": [1],
    "do_layer_norm_weight_decay": True,
    "moe_grouped_gemm": True,
    "moe_token_dropping": True,
    "moe_input_jitter_eps": 0.1,
    # keys that act, with values that nothing here computes
    "activation": "approx-gelu",
    "normalization": "low_precision_layernorm",
    "position_embedding_type": "alibi",
    "window_size": [3, 3],
    "openai_gelu": True,  # in place of another activation
    "override_vocab_size": 299,
    "precision": 16,
    # fields of Megatron Core's TransformerConfig, which NeMo set by name
    "qk_l2_norm": True,
    "softmax_type": "learnable",
    "no_rope_freq": 1,
    "attention_bias": True,
    "mlp_bias": True,
    "lm_head_bias": True,
    "softmax_scale": 0.1,
    "rope_local_base_freq": 10000.0,
    "query_pre_attn_scalar": 0,
    "rotary_base": [10000, 1000000],
    "yarn_rotary_scaling_factor": 0,
    "window_attn_skip_freq": 2,
    "multi_latent_attention": True,
    "mcore_customization_config": {"parallel_attention": True},
}
# How the work is split, what is recomputed, which kernels run: the numbers stay.
SAME_NUMBERS = {"sequence_parallel": True, "activations_checkpoint_granularity": "full"}
SAME_NUMBERS |= {"activations_checkpoint_method": "uniform"}
SAME_NUMBERS |= {"activations_checkpoint_num_layers": 1, "use_cpu_initialization": True}
SAME_NUMBERS |= {"persist_layer_norm": False, "masked_softmax_fusion": False}
SAME_NUMBERS |= {"bias_dropout_add_fusion": False, "apply_rope_fusion": False}
SAME_NUMBERS |= {"gradient_accumulation_fusion": True, "megatron_amp_O2": False}
SAME_NUMBERS |= {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 1}
SAME_NUMBERS |= {"micro_batch_size": 2, "global_batch_size": 8, "restore_from_path": "x"}
SAME_NUMBERS |= {"answer_only_loss": False}
# tests/distributed/matrix.py compares these sizes.
SIZES = set(
    """tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
    virtual_pipeline_model_parallel_size expert_model_parallel_size""".split()
)
SECTIONS = {"data", "optim", "tokenizer"}  # of the job, with tests of their own

READ_BY_NEMO = """
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split activation
    activations_checkpoint_granularity activations_checkpoint_layers_per_pipeline
    activations_checkpoint_method activations_checkpoint_num_layers add_qkv_bias answer_only_loss
    apex_transformer_log_level apply_embedding_scaling apply_query_key_layer_scaling
    apply_residual_connection_post_layernorm apply_rope_fusion async_grad_allreduce
    attention_backend attention_dropout attention_softmax_in_fp32 attention_type batch_p2p_comm
    bias bias_activation_fusion bias_dropout_add_fusion context_parallel_size cpu_offloading
    cpu_offloading_activations cpu_offloading_num_layers cpu_offloading_weights data
    defer_embedding_wgrad_compute dist_ckpt_assume_constant_structure dist_ckpt_format
    dist_ckpt_load_on_device dist_ckpt_load_strictness dist_ckpt_parallel_dist_opt
    dist_ckpt_parallel_load dist_ckpt_parallel_save dist_ckpt_parallel_save_within_dp
    dist_ckpt_torch_dist_multiproc distributed_adam_bucket_merge_size do_layer_norm_weight_decay
    drop_last drop_layers enable_cuda_graph enable_megatron_timers encoder_seq_length
    expert_model_parallel_size ffn_dropout ffn_hidden_size fp16_lm_cross_entropy
    fp32_residual_connection fp8 fp8_amax_compute_algo fp8_amax_history_len fp8_e4m3 fp8_hybrid
    fp8_interval fp8_margin fp8_params fsdp fsdp_grad_reduce_dtype fsdp_sharded_checkpoint
    fsdp_sharding_strategy gc_interval get_attention_mask_from_fusion global_batch_size
    grad_allreduce_chunk_size_mb grad_div_ar_fusion gradient_accumulation_fusion
    gradient_as_bucket_view headscale hidden_dropout hidden_size high_freq_factor hyena hysteresis
    init_method_std kv_channels layernorm_epsilon layernorm_zero_centered_gamma log_token_counts
    low_freq_factor make_vocab_size_divisible_by masked_softmax_fusion max_position_embeddings
    mcore_customization_config mcore_gpt megatron_amp_O2 megatron_legacy megatron_timer_kwargs
    memory_profile micro_batch_size moe_aux_loss_coeff moe_ffn_hidden_size moe_grouped_gemm
    moe_input_jitter_eps moe_router_load_balancing_type moe_router_pre_softmax moe_router_topk
    moe_token_dropping moe_z_loss_coeff name native_amp_growth_interval native_amp_init_scale
    nccl_communicator_config_path normalization normalize_attention_scores nsys_profile
    num_attention_heads num_layers num_layers_in_first_pipeline_stage
    num_layers_in_last_pipeline_stage num_micro_batches_with_partial_activation_checkpoints
    num_moe_experts num_query_groups old_context_len onnx_safe openai_gelu optim overlap_p2p_comm
    override_vocab_size persist_layer_norm pipeline_model_parallel_size
    pipeline_model_parallel_split_rank position_embedding_type post_process pre_process precision
    qk_layernorm qkv_bias rampup_batch_size reduce_amax reset_lr reset_lr_steps restore_from_ckpt
    restore_from_path resume_from_checkpoint rotary_base rotary_interleaved rotary_percentage
    scale_factor scale_positional_embedding seed sep_id seq_len_interpolation_factor
    sequence_parallel share_embeddings_and_output_weights sharp skip_fp8_attention_checkpoint_load
    skip_train sync_batch_comm tensor_model_parallel_size tensor_model_parallel_world_size
    tokenizer tp_only_amax_red transformer_block_type transformer_engine
    ub_tp_comm_bootstrap_backend ub_tp_comm_overlap ub_tp_comm_overlap_cfg use_cpu_initialization
    use_emha use_flash_attention use_loss_mask use_scaled_init_method use_te_rng_tracker
    use_tp_pp_dp_mapping validation_param_sync_overlap virtual_pipeline_model_parallel_size
    window_size with_fp32_embedding_grads
""".split()
WITHOUT_EFFECT = sorted(
    {
        key.split(".")[1]
        for table in INERT.values()
        for key in table
        if key.startswith("model.") and key.count(".") == 1
    }
    # of single jobs, with a live meaning in others
    - {key.split(".")[1] for table in LIVE.values() for key in table if key.startswith("model.")}
)


def logits_of(model, tokens=TOKENS):
    return forward_collect(
        model.model, {"tokens": tokens}, micro_batch_size=2, output_fn=lambda output, _: output
    )


def weights_of(model):
    state = model.unwrapped()[0].state_dict()
    return {name: x.clone() for name, x in state.items() if isinstance(x, torch.Tensor)}


@pytest.fixture(scope="module")
def build(tiny_tokenizer_dir):
    """`build(architecture, **keys)`: a tiny model in evaluation mode."""

    def build(architecture="llama", **keys):
        model = MegatronGPTModel(tiny_config(tiny_tokenizer_dir, architecture, **keys))
        model.set_eval()
        return model

    return build


def pair(build, case, key):
    """Two models of a case of a table above, without and with its value; the first with norms and
    biases that are not their initial ones.
    """
    architecture, others, value = case
    base = build(architecture, **others)
    generator = torch.Generator().manual_seed(3)
    for parameter in base.unwrapped()[0].parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return base, build(architecture, **others | {key: value})


def test_every_key_of_nemo_has_one_place():
    places = [set(CHANGES), set(SAME_NUMBERS), SIZES, SECTIONS, set(WITHOUT_EFFECT)]
    places.append({key.split(".")[1] for key in ONLY})
    places.append({"mcore_customization_config"})  # each of its keys has a place
    counts = {key: sum(key in place for place in places) for key in READ_BY_NEMO}
    assert {key: count for key, count in counts.items() if count != 1} == {}


@some_of("key", CHANGES_LOGITS, keep=[*CHANGES_LOGITS][::2])
def test_key_changes_the_logits(build, key):
    base, changed = pair(build, CHANGES_LOGITS[key], key)
    changed.unwrapped()[0].load_state_dict(weights_of(base), strict=False)
    assert (logits_of(base) - logits_of(changed)).abs().max() > 1e-4


@some_of("key", CHANGES_SHAPES, keep=[*CHANGES_SHAPES][::2])
def test_key_changes_the_shapes(build, key):
    base, changed = (weights_of(model) for model in pair(build, CHANGES_SHAPES[key], key))
    assert {n: x.shape for n, x in base.items()} != {n: x.shape for n, x in changed.items()}


@pytest.mark.parametrize("key", CHANGES_INITIAL_WEIGHTS)
def test_key_changes_the_initial_weights(build, key):
    architecture, others, value = CHANGES_INITIAL_WEIGHTS[key]
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    first, again, changed = (
        weights_of(build(architecture, **keys))[name] for keys in ({}, {}, {key: value})
    )
    assert torch.equal(first, again) and not torch.allclose(first, changed)
    if key == "use_scaled_init_method":  # the scale is 1 / sqrt(2 * layers)
        torch.testing.assert_close(first * math.sqrt(4), changed)


@pytest.mark.parametrize("key", CHANGES_TRAINING)
def test_key_changes_training(build, key):
    base, changed = pair(build, CHANGES_TRAINING[key], key)
    changed.unwrapped()[0].load_state_dict(weights_of(base))
    assert torch.equal(logits_of(base), logits_of(changed))
    base.set_train()
    changed.set_train()
    assert not torch.allclose(logits_of(base), logits_of(changed), atol=1e-2)


@pytest.mark.parametrize("key", CHANGES_SETTINGS)
def test_key_reaches_megatron_core(build, key):
    base, changed = pair(build, CHANGES_SETTINGS[key], key)
    field = "params_dtype" if key == "precision" else key
    assert getattr(base.transformer_config, field) != getattr(changed.transformer_config, field)


@pytest.mark.parametrize("key", REFUSED)
def test_a_value_that_is_not_supported_is_refused_by_the_constructor(build, key):
    others = YARN if key.startswith("yarn") else {}
    with pytest.raises(ConfigError, match=rf"(model|trainer)\.{key}"):
        build(**others | {key: REFUSED[key]})


def test_every_refused_key_is_tested_and_its_accepted_values_build(build):
    assert {key.split(".")[1] for key in ONLY} <= set(REFUSED)
    accepted = {key: values[0] for key, (values, _) in ONLY.items() if values}
    accepted = {key.removeprefix("model."): value for key, value in accepted.items()}
    accepted["mcore_customization_config"] = {
        "rotary_interleaved": False,  # as it is built
        "parallel": None,
        "moe_permute_fusion": True,  # a key without effect
    }
    expected = logits_of(build())
    assert torch.equal(logits_of(build(**accepted)), expected)
    unset = dict.fromkeys([*accepted, "moe_layer_freq"])  # null: not set
    assert torch.equal(logits_of(build(**unset)), expected)


def test_every_key_without_effect_has_none(build):
    """All at once, with a value that would do something if anybody read it; in evaluation and in
    training mode.
    """
    odd = {key: True for key in WITHOUT_EFFECT} | {"ffn_dropout": 0.9, "mcore_gpt": False}
    odd |= {"pre_process": False, "post_process": False, "attention_softmax_in_fp32": False}
    odd |= dict.fromkeys(("nsys_profile", "memory_profile"), {"enabled": False, "ranks": [0]})
    assert set(odd) == set(WITHOUT_EFFECT) and len(odd) > 100
    base, changed = build(hidden_dropout=0.0), build(hidden_dropout=0.0, **odd)
    assert torch.equal(logits_of(base), logits_of(changed))
    for model in (base, changed):
        model.set_train()
    assert torch.equal(logits_of(base), logits_of(changed))
    assert {vars(m.transformer_config)["ffn_hidden_size"] for m in (base, changed)} == {48}


# Fields that Megatron Core refuses alone, or without Transformer Engine or a GPU.
NEED_OTHERS = set(
    """overlap_p2p_comm_warmup_flush moe_router_padding_for_quantization moe_router_padding_for_fp8
    moe_enable_deepep batch_invariant_mode symmetric_ar_type cpu_offloading
    fine_grained_activation_offloading flash_attention_version""".split()
)


def test_every_field_of_megatron_core_is_passed_or_refused_with_a_reason(tiny_tokenizer_dir):
    selective = {"activations_checkpoint_granularity": "selective"}
    cfg = complete_model(tiny_config(tiny_tokenizer_dir, "llama", **selective), None)
    plain = megatron_config.build_transformer_config(cfg)
    ignored = {*KERNELS, *TRANSFORMER_ENGINE_KERNELS, "bias_activation_fusion"}
    ignored |= {key.split(".")[1] for key in INERT_ARCHITECTURE}
    passed, refused = set(), set()
    for field in dataclasses.fields(TransformerConfig):
        default = getattr(plain, field.name)
        number = default + 1 if type(default) in (int, float) else 1
        odd = {bool: not default, str: "odd", list: ["mlp"], AttnBackend: "flash"}
        value = odd.get(type(default), number)
        cfg.mcore_customization_config = {field.name: value}
        try:
            built = getattr(megatron_config.build_transformer_config(cfg), field.name)
        except ConfigError as error:
            reasons = "break a promise: |does not act there; set |is always |Megatron Core refuses"
            assert re.search(reasons, str(error)), error
            if "Megatron Core refuses" in str(error):
                refused.add(field.name)
        else:
            if built in (value, AttnBackend.flash):
                passed.add(field.name)
            else:
                assert field.name in ignored, field.name
    assert refused <= NEED_OTHERS
    assert len(passed) >= 30 and "recompute_modules" in passed


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"attention_backend": "foo"}, "'foo' must be one of flash, fused, "),
        ({"distribute_saved_activations": "no"}, "'no' must be True or False"),
        ({"min_offloaded_tensor_size": "x"}, "'x' must be a finite number"),
    ],
)
def test_a_field_of_megatron_core_has_its_type(tiny_tokenizer_dir, fields, message):
    cfg = complete_model(tiny_config(tiny_tokenizer_dir, "llama"), None)
    cfg.mcore_customization_config = fields
    with pytest.raises(ConfigError, match=rf"mcore_customization_config\..*={message}"):
        megatron_config.build_transformer_config(cfg)


def test_keys_of_splits_and_kernels_keep_the_numbers(build):
    base, changed = build(), build(**SAME_NUMBERS)
    assert torch.equal(logits_of(base), logits_of(changed))


def test_the_constructor_warns_of_what_has_no_effect(build, monkeypatch):
    notes = []
    monkeypatch.setattr(logging, "warning", notes.append)
    build(normalisation="rmsnorm", apply_query_key_layer_scaling=True, ffn_dropout=0.1)
    [note] = notes
    assert "model.normalisation: unknown here" in note
    assert "model.apply_query_key_layer_scaling=True: it is for fp16 only" in note
    assert "model.ffn_dropout=0.1" in note
    notes.clear()
    build(**{key.removeprefix("model."): None for key in INERT_ARCHITECTURE})
    build(apply_query_key_layer_scaling=False, attention_softmax_in_fp32=False, mcore_gpt=True)
    assert notes == []


@pytest.mark.parametrize("window", [4096, [2, 1], [1.5, 0]])
def test_a_window_is_two_whole_numbers(build, window):
    with pytest.raises(ConfigError, match="model.window_size=.*give .n, 0."):
        build(window_size=window)


def test_no_window():
    """Transformer Engine's form of it."""
    cfg = OmegaConf.create({"window_size": [-1, -1]})
    assert megatron_config._window(cfg) is None


def test_a_window_needs_one_context_rank_under_transformer_engine(monkeypatch):
    monkeypatch.setattr(megatron_config, "use_transformer_engine", lambda: True)
    sizes = {"encoder_seq_length": 48, "context_parallel_size": 2}
    cfg = OmegaConf.create({"window_size": [47, 0], **sizes})
    assert megatron_config._window(cfg) is None  # longer than every sequence
    cfg.encoder_seq_length = 49
    said = "window_size=.47, 0. needs model.context_parallel_size=1"
    with pytest.raises(ConfigError, match=said):
        megatron_config._window(cfg)
    cfg.context_parallel_size = 1
    assert megatron_config._window(cfg) == (47, 0)


YARN_KEYS = " ".join(f"{key}={value}" for key, value in YARN.items())
CORE = "mcore_customization_config"
TOGETHER = rows(f"""
position_embedding_type=longrope -> 'longrope' must be one of rope, yarn
position_embedding_type=yarn -> =yarn needs .*yarn_rotary_scaling_factor is not set
{YARN_KEYS} yarn_original_max_position_embeddings=null -> max_position_embeddings is not set
{YARN_KEYS} rotary_percentage=0.5 -> rotary_percentage=0.5 .*yarn
{YARN_KEYS} rotary_interleaved=true -> rotary_interleaved=True .*set it to False
{YARN_KEYS} seq_len_interpolation_factor=2.0 -> factor=2.0 .*set it to null
{YARN_KEYS} scale_positional_embedding=true -> scale_positional_embedding=True .*yarn
window_attn_skip_freq=2 -> window_attn_skip_freq=2 needs .*window_size
window_size=[3,0] window_attn_skip_freq=[1,0,1] -> list with 1 .window. or 0
window_size=[3,0] window_attn_skip_freq=1 -> whole number from 2 on
no_rope_freq=[2,0] -> no_rope_freq=.2, 0. must be
no_rope_freq=2 position_embedding_type=none -> no_rope_freq=2 with
transformer_block_type=normformer -> norms stand where model.norm_position says
qk_layernorm_all_heads=true -> qk_layernorm_all_heads=True needs
rotary_base_local=100.0 -> rotary_base_local=100.0 needs model.window_size
parallel_attention=true norm_position=both -> norm_position=both .*parallel_attention=True; set
    it to before
{CORE}.moe_expert_capacity_factor=1.0 -> moe_expert_capacity_factor=1.0 .*break a promise: .* the
    same numbers.* at any split
{CORE}.fp32_residual_connection=true -> does not act there; set model.fp32_residual_connection
{CORE}.recompute_modules=[mlp] -> recompute_modules=.* needs
    model.activations_checkpoint_granularity=selective
{CORE}.recompute_modules=[attention] activations_checkpoint_granularity=selective -> gives
    recompute_modules, and Megatron Core refuses: Invalid choices
{CORE}.query_pre_attn_scalar=224 -> query_pre_attn_scalar=224 does not act there; set
    model.query_pre_attn_scalar
""")


@pytest.mark.parametrize("keys, message", TOGETHER)
def test_what_does_not_go_together_is_refused(build, keys, message):
    with pytest.raises(ConfigError, match=message):
        build(**OmegaConf.to_container(OmegaConf.from_dotlist(keys.split())))


def test_a_number_stands_for_a_pattern_of_layers(build):
    model = build(num_layers=4, window_size=[3, 0], window_attn_skip_freq=2, no_rope_freq=2)
    layers = model.unwrapped()[0].decoder.layers
    windows = [layer.self_attention.core_attention.window for layer in layers]
    assert windows == [3, None, 3, None]
    lists = {"window_attn_skip_freq": [1, 0, 1, 0], "no_rope_freq": [0, 1, 0, 1]}
    other = build(num_layers=4, window_size=[3, 0], **lists)
    assert torch.equal(logits_of(model), logits_of(other))


@pytest.mark.parametrize("name", CONFIG_NAMES)
def test_the_yaml_files_of_the_jobs_give_no_note(name):
    cfg = OmegaConf.load(CONF / f"{name}.yaml")
    assert check_model_keys(cfg.model) == []


def test_a_checkpoint_is_checked_like_a_configuration(build, tmp_path):
    """Restored as it is, and over a job's configuration."""
    model = build()
    path = str(tmp_path / "m.nemo")
    OmegaConf.set_struct(model.cfg, False)
    model.cfg.headscale = True
    model.save_to(path)
    with pytest.raises(ConfigError, match="model.headscale=True"):
        MegatronGPTModel.restore_from(path)
    with pytest.raises(ConfigError, match="model.headscale=True"):
        load_from_nemo(MegatronGPTModel, OmegaConf.create({}), None, restore_path=path)


# --- GELU


def test_fused_kernels_compute_the_tanh_form():
    x, bias = torch.linspace(-6, 6, 1000).view(10, 100), torch.linspace(-1, 1, 100)
    tanh = megatron_config.tanh_gelu(x + bias)
    gate, value = (x + bias).chunk(2, dim=1)
    with torch.compiler.set_stance("force_eager"):  # compiling them here would take minutes
        torch.testing.assert_close(bias_gelu_impl(x, bias), tanh, atol=1e-6, rtol=1e-6)
        expected = megatron_config.tanh_gelu(gate) * value
        torch.testing.assert_close(bias_geglu_impl(x, bias), expected, atol=1e-6, rtol=1e-6)
    assert (tanh - F.gelu(x + bias)).abs().max() > 1e-4


@pytest.mark.parametrize(
    "keys, tanh, kernel",
    [
        ({"activation": "gelu"}, False, False),
        ({"activation": "gelu", "openai_gelu": True}, True, False),
        ({"activation": "gelu_new"}, True, False),
        ({"activation": "gelu_new", "openai_gelu": True}, True, False),
        ({"activation": "gelu_pytorch_tanh"}, True, False),
        ({"activation": "gelu", "bias_activation_fusion": True}, True, True),
        ({"activation": "gelu", "bias_activation_fusion": True, **MOE}, True, False),
        ({"activation": "fast-geglu"}, False, False),
        ({"activation": "geglu", "openai_gelu": True}, True, False),
        ({"activation": "geglu", "bias_activation_fusion": True, "bias": False}, True, True),
    ],
)
def test_gelu_has_one_form_on_every_machine(tiny_tokenizer_dir, monkeypatch, keys, tanh, kernel):
    """Megatron Core's kernels compute the tanh form, so they run where that form is wanted."""
    cfg = complete_model(tiny_config(tiny_tokenizer_dir, **{"bias": True} | keys))
    x = torch.linspace(-3, 3, 50)
    expected = F.gelu(x, approximate="tanh" if tanh else "none")
    for accelerated in (False, True):
        monkeypatch.setattr(megatron_config, "use_transformer_engine", lambda a=accelerated: a)
        config = megatron_config.build_transformer_config(cfg)
        assert config.bias_activation_fusion == (accelerated and kernel)
        if config.bias_activation_fusion:
            assert config.activation_func is F.gelu  # by which Megatron Core knows its kernel
        else:
            assert torch.equal(config.activation_func(x), expected)


@pytest.mark.parametrize("keys, kernel", [({}, True), ({"bias": True}, True), (MOE, False)])
def test_a_swiglu_is_computed_at_once_with_transformer_engine(
    tiny_tokenizer_dir, monkeypatch, keys, kernel
):
    cfg = complete_model(tiny_config(tiny_tokenizer_dir, **keys))
    assert not megatron_config.build_transformer_config(cfg).bias_activation_fusion
    monkeypatch.setattr(megatron_config, "use_transformer_engine", lambda: True)
    config = megatron_config.build_transformer_config(cfg)
    assert config.bias_activation_fusion == kernel and config.activation_func is F.silu


def test_a_gelu_without_bias_cannot_be_fused(build):
    with pytest.raises(ConfigError, match="bias_activation_fusion=True .*model.bias=False"):
        build("gpt2", bias_activation_fusion=True, bias=False)
    assert build("llama", bias_activation_fusion=True)  # a SwiGLU is the same function


# --- norms, windows, embeddings


@pytest.mark.parametrize("normalization", ["layernorm", "rmsnorm"])
def test_zero_centered_norms_keep_the_last_bits_in_bf16(normalization):
    cfg = OmegaConf.create({"normalization": normalization, "layernorm_zero_centered_gamma": True})
    kind = megatron_config.NORMALIZATIONS[cfg.normalization]
    names = "layernorm_zero_centered_gamma", "sequence_parallel", "layernorm_bias"
    config = type("Config", (), {"normalization": kind, **dict.fromkeys(names, True)})
    norm = megatron_layers.LocalNorm(config, 64, eps=1e-5)
    assert torch.equal(norm.weight, torch.zeros(64)) and norm.weight.sequence_parallel
    norm = norm.bfloat16()
    torch.nn.init.normal_(norm.weight, std=1e-3)  # bf16 has no number between 1 and 1.0078
    x = torch.randn(5, 64).bfloat16()
    expected = x.double()
    if normalization == "layernorm":
        expected = expected - expected.mean(1, keepdim=True)
    expected = expected / (expected.square().mean(1, keepdim=True) + 1e-5).sqrt()
    expected = expected * (1 + norm.weight.double())
    assert norm(x).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x), expected.bfloat16(), atol=0, rtol=1e-2)
    rounded = (x.float().square().mean(1, keepdim=True) + 1e-5).rsqrt() * x.float()
    if normalization == "rmsnorm":
        assert not torch.equal(norm(x), rounded.bfloat16())  # as if the weight were 0


@pytest.mark.parametrize("normalization", ["layernorm", "rmsnorm"])
def test_queries_and_keys_are_normalized_per_head(build, normalization):
    """By the formula, with the weight's two forms."""
    seen = {}
    for zero_centered in (False, True):
        keys = {"layernorm_zero_centered_gamma": zero_centered, "layernorm_epsilon": 0.5}
        model = build(qk_layernorm=True, normalization=normalization, **keys)
        attention = model.unwrapped()[0].decoder.layers[1].self_attention
        assert attention.k_layernorm.weight.shape == (8,)
        norm = attention.q_layernorm
        with torch.no_grad():
            norm.weight.uniform_(-1, 1, generator=torch.Generator().manual_seed(5))
        norm.register_forward_hook(lambda _, x, y: seen.update(x=x[0].detach(), y=y.detach()))
        logits_of(model)
        x = seen["x"]
        assert x.shape == (24, 2, 4, 8)  # [s, b, heads, head size]
        if normalization == "layernorm":
            x = x - x.mean(-1, keepdim=True)
        scale = norm.weight.detach() + (1 if zero_centered else 0)
        expected = x / (x.square().mean(-1, keepdim=True) + 0.5).sqrt() * scale
        torch.testing.assert_close(seen["y"], expected)


def test_a_window_by_hand(build):
    """One layer with window [2, 0]: a position depends on itself and the two before it."""
    model = build(num_layers=1, window_size=[2, 0], position_embedding_type="none")
    before = logits_of(model, TOKENS[:1])
    changed = TOKENS[:1].clone()
    changed[0, 10] = (changed[0, 10] + 1) % 300
    differs = (logits_of(model, changed) - before).abs().amax(dim=(0, 2)) > 1e-6
    assert differs.nonzero().flatten().tolist() == [10, 11, 12]


def test_embeddings_are_scaled_in_every_role(tiny_tokenizer_dir):
    rewards = []
    for scale in (False, True):
        own = {"apply_embedding_scaling": scale, "share_embeddings_and_output_weights": False}
        cfg = tiny_config(tiny_tokenizer_dir, **own)
        model = MegatronGPTRewardModel(cfg)
        embedding = model.unwrapped()[0].embedding
        positions = torch.arange(4).expand(2, 4)
        rewards.append(embedding(TOKENS[:, :4], positions))
    torch.testing.assert_close(rewards[0] * 32**0.5, rewards[1])


# --- pipeline stages of different sizes


UNEVEN = {"num_layers": 7, "pipeline_model_parallel_size": 3, "num_attention_heads": 4}


@pytest.mark.parametrize(
    "keys, message",
    rows("""
num_layers=7 -> model.num_layers=7 must be a multiple of 3
num_layers_in_first_pipeline_stage=2 -> leave 5 of model.num_layers=7
num_layers_in_last_pipeline_stage=0 -> last_pipeline_stage=0 must be at least 1
pipeline_model_parallel_size=2 num_layers_in_first_pipeline_stage=3
    num_layers_in_last_pipeline_stage=3 -> leave 1 of model.num_layers=7 for the other 0
num_layers_in_first_pipeline_stage=3 virtual_pipeline_model_parallel_size=2 -> stage 0 has 3
    layers, which model.virtual_pipeline_model_parallel_size=2
num_layers_in_first_pipeline_stage=5 activations_checkpoint_granularity=full
    activations_checkpoint_num_layers=3 -> more than the 1 layers of a stage
"""),
)
def test_stages_that_cannot_be_built_are_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        check_architecture(UNEVEN | dict(OmegaConf.from_dotlist(keys.split())))


def test_the_constructor_checks_the_stages(build):
    with pytest.raises(ConfigError, match="leave 1 of model.num_layers=4 for the other 2"):
        build(num_layers=4, pipeline_model_parallel_size=3, num_layers_in_first_pipeline_stage=3)
