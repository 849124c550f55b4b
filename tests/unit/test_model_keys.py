# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A key of NeMo's GPT model changes the model, is refused, or is known to have no effect; and the
constructor says so, whoever calls it. (That the lists keep every key: docs/migration.md and
docs/config.md, which are generated from them.)
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

from nemo_aligner.config.defaults import complete_model
from nemo_aligner.config.inert_keys import INERT, INERT_ARCHITECTURE, ONLY
from nemo_aligner.config.parallel_rules import check_architecture
from nemo_aligner.config.schema import LIVE
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


def settings(text):
    """Keys and values of dot-list words."""
    return OmegaConf.to_container(OmegaConf.from_dotlist(text.split()))


def cases(text):
    """{key: (architecture, other keys, value)} of lines `architecture, other keys -> its keys`."""
    found = {}
    for (architecture, *others), changes in ((a.split(), b) for a, b in rows(text)):
        others = settings(" ".join(others))
        found |= {key: (architecture, others, x) for key, x in settings(changes).items()}
    return found


MOE_KEYS = "num_moe_experts=4 moe_ffn_hidden_size=24"
MOE = settings(MOE_KEYS)
SLOW = "rotary_base=4000000000000 init_method_std=0.4"  # a wave of more than 8192 positions
LONG_YARN = """position_embedding_type=yarn yarn_rotary_scaling_factor=4.0 init_method_std=0.4
    yarn_original_max_position_embeddings=4096"""
YARN = LONG_YARN.replace("4096", "16")

# Keys that NeMo's MegatronGPTModel (1.10 to 2.2) read, or its YAML files set, and keys of its
# Megatron Core configuration that its converters set. Sorted by what they do here.
# The same weights give other logits:
CHANGES_LOGITS = cases(f"""
llama -> activation=geglu layernorm_zero_centered_gamma=true layernorm_epsilon=0.1
    position_embedding_type=none rotary_base=500000 rotary_percentage=0.5 rotary_interleaved=true
    seq_len_interpolation_factor=2.0 window_size=[3,0] no_rope_freq=2 apply_embedding_scaling=true
gpt2 -> openai_gelu=true bias_activation_fusion=true normalization=layernorm1p
llama {SLOW} -> scale_positional_embedding=true
llama {SLOW} scale_positional_embedding=true -> scale_factor=32
llama window_size=[3,0] -> window_attn_skip_freq=2
llama init_method_std=0.4 -> query_pre_attn_scalar=2
llama {YARN} -> yarn_rotary_scaling_factor=8.0 yarn_original_max_position_embeddings=64
    yarn_beta_slow=0.25
llama {LONG_YARN} -> yarn_beta_fast=128.0 yarn_correction_range_round_to_int=false
llama {YARN} yarn_mscale_all_dim=0.5 -> yarn_mscale=2.0
llama {YARN} yarn_mscale=2.0 -> yarn_mscale_all_dim=0.5
llama {MOE_KEYS} -> moe_router_topk=3 moe_router_pre_softmax=true
""")
# The weights have other names or shapes:
CHANGES_SHAPES = cases(f"""
llama -> num_layers=3 hidden_size=16 ffn_hidden_size=32 num_query_groups=4 kv_channels=16
    bias=true qk_layernorm=true qkv_bias=true add_qkv_bias=true num_moe_experts=4
    share_embeddings_and_output_weights=true make_vocab_size_divisible_by=512
    override_vocab_size=400
llama kv_channels=8 -> num_attention_heads=2
gpt2 -> max_position_embeddings=64
gpt2 max_position_embeddings=null -> encoder_seq_length=64
llama {MOE_KEYS} -> moe_ffn_hidden_size=32 moe_layer_freq=2 moe_shared_expert_intermediate_size=16
llama {MOE_KEYS} moe_shared_expert_intermediate_size=16 -> moe_shared_expert_gate=true
""")
# The initial weights differ:
CHANGES_INITIAL_WEIGHTS = cases("llama -> init_method_std=0.2 seed=8 use_scaled_init_method=false")
# The logits differ in training mode:
CHANGES_TRAINING = cases("llama -> hidden_dropout=0.5 attention_dropout=0.5")
# Megatron Core's own settings differ (tests/unit/test_experts.py has their numbers):
CHANGES_SETTINGS = cases(f"""
llama {MOE_KEYS} -> moe_aux_loss_coeff=0.1 moe_z_loss_coeff=0.1 moe_router_load_balancing_type=none
llama -> precision=bf16
""")
# A value of each key that is not supported: of keys without effect but for it, of keys that act,
# and of fields of Megatron Core's TransformerConfig, which NeMo set by name.
REFUSED = settings("""
    name=megatron_falcon_gpt hyena.filter=1 transformer_block_type=post_ln
    apply_residual_connection_post_layernorm=true attention_type=cross fp8=true
    fp32_residual_connection=true headscale=true normalize_attention_scores=false
    low_freq_factor=2 high_freq_factor=8 old_context_len=4096 drop_layers=[1]
    do_layer_norm_weight_decay=true moe_grouped_gemm=true moe_token_dropping=true
    moe_input_jitter_eps=0.1

    activation=approx-gelu normalization=low_precision_layernorm position_embedding_type=alibi
    window_size=[3,3] override_vocab_size=299 precision=16 openai_gelu=true

    qk_l2_norm=true softmax_type=learnable no_rope_freq=1 attention_bias=true mlp_bias=true
    lm_head_bias=true softmax_scale=0.1 rope_local_base_freq=10000.0 query_pre_attn_scalar=0
    rotary_base=[10000,1000000] yarn_rotary_scaling_factor=0 window_attn_skip_freq=2
    multi_latent_attention=true mcore_customization_config.parallel_attention=true
""")
# How the work is split, what is recomputed, which kernels run: the numbers stay.
SAME_NUMBERS = settings("""
    sequence_parallel=true activations_checkpoint_granularity=full answer_only_loss=false
    activations_checkpoint_method=uniform activations_checkpoint_num_layers=1
    use_cpu_initialization=true persist_layer_norm=false masked_softmax_fusion=false
    bias_dropout_add_fusion=false apply_rope_fusion=false gradient_accumulation_fusion=true
    megatron_amp_O2=false num_layers_in_first_pipeline_stage=1 micro_batch_size=2
    num_layers_in_last_pipeline_stage=1 global_batch_size=8 restore_from_path=x
""")
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
    others = settings(YARN) if key.startswith("yarn") else {}
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
    cfg.window_size = [-1, -1]  # Transformer Engine's form of none
    assert megatron_config._window(cfg) is None


CORE = "mcore_customization_config"
TOGETHER = rows(f"""
position_embedding_type=longrope -> 'longrope' must be one of rope, yarn
position_embedding_type=yarn -> =yarn needs .*yarn_rotary_scaling_factor is not set
{YARN} yarn_original_max_position_embeddings=null -> max_position_embeddings is not set
{YARN} rotary_percentage=0.5 -> rotary_percentage=0.5 .*yarn
{YARN} rotary_interleaved=true -> rotary_interleaved=True .*set it to False
{YARN} seq_len_interpolation_factor=2.0 -> factor=2.0 .*set it to null
{YARN} scale_positional_embedding=true -> scale_positional_embedding=True .*yarn
window_attn_skip_freq=2 -> window_attn_skip_freq=2 needs .*window_size
window_size=[3,0] window_attn_skip_freq=[1,0,1] -> list with 1 .window. or 0
window_size=[3,0] window_attn_skip_freq=1 -> whole number from 2 on
no_rope_freq=[2,0] -> no_rope_freq=.2, 0. must be
no_rope_freq=2 position_embedding_type=none -> no_rope_freq=2 with
transformer_block_type=normformer -> norms stand where model.norm_position says
qk_layernorm_all_heads=true -> qk_layernorm_all_heads=True needs
window_size=4096 -> model.window_size=.*give .n, 0.
window_size=[2,1] -> model.window_size=.*give .n, 0.
window_size=[1.5,0] -> model.window_size=.*give .n, 0.
activation=gelu bias_activation_fusion=true -> bias_activation_fusion=True .*model.bias=False
num_layers=4 pipeline_model_parallel_size=3 num_layers_in_first_pipeline_stage=3 -> leave 1 of
    model.num_layers=4 for the other 2
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
{CORE}.attention_backend=foo -> {CORE}.attention_backend='foo' must be one of flash, fused,
{CORE}.distribute_saved_activations='no' -> {CORE}.*='no' must be True or False
{CORE}.min_offloaded_tensor_size=x -> {CORE}.*='x' must be a finite number
""")


@pytest.mark.parametrize("keys, message", TOGETHER)
def test_what_does_not_go_together_is_refused(build, keys, message):
    with pytest.raises(ConfigError, match=message):
        build(**settings(keys))


def test_a_number_stands_for_a_pattern_of_layers(build):
    model = build(num_layers=4, window_size=[3, 0], window_attn_skip_freq=2, no_rope_freq=2)
    layers = model.unwrapped()[0].decoder.layers
    windows = [layer.self_attention.core_attention.window for layer in layers]
    assert windows == [3, None, 3, None]
    lists = {"window_attn_skip_freq": [1, 0, 1, 0], "no_rope_freq": [0, 1, 0, 1]}
    other = build(num_layers=4, window_size=[3, 0], **lists)
    assert torch.equal(logits_of(model), logits_of(other))


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


@pytest.mark.parametrize(
    "keys, kernel",
    [({}, True), ({"bias": True}, True), ({"bias_activation_fusion": True}, True), (MOE, False)],
)
def test_a_swiglu_is_computed_at_once_with_transformer_engine(
    tiny_tokenizer_dir, monkeypatch, keys, kernel
):
    cfg = complete_model(tiny_config(tiny_tokenizer_dir, **keys))
    assert not megatron_config.build_transformer_config(cfg).bias_activation_fusion
    monkeypatch.setattr(megatron_config, "use_transformer_engine", lambda: True)
    config = megatron_config.build_transformer_config(cfg)
    assert config.bias_activation_fusion == kernel and config.activation_func is F.silu


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
        check_architecture(UNEVEN | settings(keys))
