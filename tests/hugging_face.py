# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of Hugging Face, as an oracle, and the keys with which NeMo's converters
describe each of them.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

VOCAB, HIDDEN, FFN, LAYERS, HEADS, GROUPS, POSITIONS = 384, 32, 48, 2, 4, 2, 1300
HEAD = 8
SIZES = dict(vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS)
SIZES |= dict(num_attention_heads=HEADS, num_key_value_heads=GROUPS, initializer_range=0.15)
SIZES |= dict(max_position_embeddings=POSITIONS, tie_word_embeddings=False)
LLAMA_3 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0)
LLAMA_3 |= dict(high_freq_factor=4.0, original_max_position_embeddings=8192)
EXPERTS, EXPERT_FFN, SHARED_FFN = 4, 24, 40
# Keys that all of NeMo's converters set, and those of its Llama configuration.
NEMO = dict(num_layers=LAYERS, hidden_size=HIDDEN, ffn_hidden_size=FFN, num_query_groups=GROUPS)
NEMO |= dict(num_attention_heads=HEADS, encoder_seq_length=POSITIONS, layernorm_epsilon=1e-6)
NEMO["max_position_embeddings"] = POSITIONS
NEMO_LLAMA = NEMO | dict(
    normalization="rmsnorm",
    activation="fast-swiglu",
    bias=False,
    position_embedding_type="rope",
    rotary_base=10000.0,
    rotary_percentage=1.0,
    share_embeddings_and_output_weights=False,
    apply_query_key_layer_scaling=True,
    bias_activation_fusion=False,
)


@dataclass(frozen=True)
class Model:
    """One kind of model: how Hugging Face builds it, and NeMo's keys for it."""

    build: Callable[[], torch.nn.Module]
    keys: dict


def causal_lm(kind: str, **settings) -> Callable[[], torch.nn.Module]:
    """How to build the model of the classes `<kind>Config` and `<kind>ForCausalLM` (without
    "Text").
    """

    def build() -> torch.nn.Module:
        config = getattr(transformers, f"{kind}Config")(**SIZES | settings)
        config._attn_implementation = config._experts_implementation = "eager"
        return getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)

    return build


def rms(kind: str, **settings) -> Callable[[], torch.nn.Module]:
    """As `causal_lm`, with the epsilon of `NEMO`."""
    return causal_lm(kind, rms_norm_eps=1e-6, **settings)


def llama(**keys) -> dict:
    """NeMo's keys of a model of Llama's form."""
    return NEMO_LLAMA | keys


def rope(kind: str, theta: float = 10000.0, **more) -> dict:
    return dict(rope_type=kind, rope_theta=theta, **more)


def partial_rope(share: float) -> dict:
    return rope("default", partial_rotary_factor=share)


def yarn(factor: float, positions: int, **more) -> dict:
    return rope("yarn", factor=factor, original_max_position_embeddings=positions, **more)


def nemo_yarn(factor: float, positions: int, **more) -> dict:
    """NeMo's keys of `yarn`."""
    more |= dict(rotary_scaling_factor=factor, original_max_position_embeddings=positions)
    return dict(position_embedding_type="yarn") | {f"yarn_{key}": more[key] for key in more}


def _gpt2() -> torch.nn.Module:
    sizes = dict(vocab_size=VOCAB, n_positions=POSITIONS, n_embd=HIDDEN, n_layer=LAYERS)
    sizes |= dict(n_head=HEADS, n_inner=FFN, initializer_range=0.15, layer_norm_epsilon=1e-6)
    config = transformers.GPT2Config(**sizes, attn_implementation="eager")
    return transformers.GPT2LMHeadModel(config)


_GELU = dict(normalization="layernorm", activation="gelu", bias=True, bias_activation_fusion=True)
_EXPERTS = dict(num_experts=EXPERTS, num_experts_per_tok=3, moe_intermediate_size=EXPERT_FFN)
_NEMO_EXPERTS = dict(num_moe_experts=EXPERTS, moe_router_topk=3, moe_ffn_hidden_size=EXPERT_FFN)
# Hugging Face counts a position's own in its window, Megatron Core and NeMo do not. In the second
# pair the first of two layers has it.
_WINDOW, _NEMO_WINDOW = dict(sliding_window=100), dict(window_size=[99, 0])
_ONE_WINDOW = _WINDOW | dict(layer_types=["sliding_attention", "full_attention"])
_NEMO_ONE_WINDOW = _NEMO_WINDOW | dict(window_attn_skip_freq=2)
_NEMO_LLAMA_3 = dict(rotary_base=500000.0, scale_positional_embedding=True)
_YARN = dict(beta_fast=16.0, beta_slow=2.0, mscale=0.9, mscale_all_dim=0.4)
_GRANITE = dict(embedding_multiplier=3.0, residual_multiplier=0.3, logits_scaling=0.5)
_CAPS = dict(attn_logit_softcapping=3.0, final_logit_softcapping=2.0)
_GEMMA = dict(head_dim=16, tie_word_embeddings=True)
_NEMO_GEMMA = llama(kv_channels=16, activation="geglu", openai_gelu=True)
_NEMO_GEMMA |= dict(apply_embedding_scaling=True, layernorm_zero_centered_gamma=True)
_NEMO_GEMMA["share_embeddings_and_output_weights"] = True
_NEMO_OLMO = llama(qk_layernorm=True, qk_layernorm_all_heads=True, norm_position="after")
_GLM = dict(pad_token_id=0, head_dim=HEAD, attention_bias=True)
_NEMO_GLM = llama(qkv_bias=True, rotary_interleaved=True, rotary_percentage=0.5)
MODELS = {
    "Llama 2": Model(rms("Llama"), NEMO_LLAMA),
    "Llama 2, positions interpolated": Model(
        rms("Llama", rope_parameters=rope("linear", factor=4.0)),
        llama(seq_len_interpolation_factor=4.0),
    ),
    "Llama 3.1": Model(rms("Llama", rope_parameters=LLAMA_3), llama(**_NEMO_LLAMA_3)),
    "Llama 3.2": Model(
        rms("Llama", rope_parameters=LLAMA_3 | dict(factor=32.0), tie_word_embeddings=True),
        llama(**_NEMO_LLAMA_3, scale_factor=32, share_embeddings_and_output_weights=True),
    ),
    "Mistral": Model(rms("Mistral", **_WINDOW), llama(**_NEMO_WINDOW)),
    "Qwen 2": Model(rms("Qwen2"), llama(qkv_bias=True)),
    "Qwen 2, windows in the later layers": Model(
        rms("Qwen2", use_sliding_window=True, max_window_layers=1, **_WINDOW),
        llama(qkv_bias=True, window_attn_skip_freq=[0, 1], **_NEMO_WINDOW),
    ),
    "Qwen 2, YaRN": Model(
        rms("Qwen2", rope_parameters=yarn(4.0, 300)), llama(qkv_bias=True, **nemo_yarn(4.0, 300))
    ),
    "Llama 2, YaRN with all its settings": Model(
        rms("Llama", rope_parameters=yarn(8.0, 150, theta=5e5, truncate=False, **_YARN)),
        llama(
            rotary_base=5e5, **nemo_yarn(8.0, 150, **_YARN, correction_range_round_to_int=False)
        ),
    ),
    "Granite": Model(
        rms("Granite", attention_multiplier=0.2, **_GRANITE),
        llama(query_pre_attn_scalar=25, **_GRANITE),
    ),
    "SmolLM 3": Model(
        rms("SmolLM3", no_rope_layer_interval=2, pad_token_id=0, rope_parameters=rope("default")),
        llama(no_rope_freq=2),
    ),
    "Qwen 3": Model(rms("Qwen3", head_dim=16), llama(kv_channels=16, qk_layernorm=True)),
    # It stores queries, keys and values as one matrix, and the two halves of a SwiGLU.
    "Phi 3": Model(
        rms("Phi3", pad_token_id=0, rope_parameters=partial_rope(0.75), **_WINDOW),
        llama(rotary_percentage=0.75, **_NEMO_WINDOW),
    ),
    "Mixtral": Model(
        rms("Mixtral", num_local_experts=EXPERTS, initializer_range=0.1),
        llama(rotary_base=1000000.0, num_moe_experts=EXPERTS, moe_router_topk=2),
    ),
    # With larger weights rounding would decide between two experts at one position.
    "Qwen 3 MoE": Model(
        rms("Qwen3Moe", initializer_range=0.1, head_dim=HEAD, norm_topk_prob=True, **_EXPERTS),
        llama(qk_layernorm=True, **_NEMO_EXPERTS),
    ),
    # The first layer has no experts, and the weights of those of the second do not sum to 1.
    "Qwen 2 MoE": Model(
        rms(
            "Qwen2Moe",
            decoder_sparse_step=2,
            shared_expert_intermediate_size=SHARED_FFN,
            norm_topk_prob=False,
            **_EXPERTS,
        ),
        llama(
            qkv_bias=True,
            moe_layer_freq=[0, 1],
            moe_router_pre_softmax=True,
            moe_shared_expert_intermediate_size=SHARED_FFN,
            moe_shared_expert_gate=True,
            **_NEMO_EXPERTS,
        ),
    ),
    "Gemma": Model(rms("Gemma", **_GEMMA), _NEMO_GEMMA),
    "Gemma 2": Model(
        rms("Gemma2", query_pre_attn_scalar=20, **_GEMMA, **_WINDOW, **_CAPS),
        _NEMO_GEMMA
        | dict(norm_position="both", query_pre_attn_scalar=20, **_NEMO_ONE_WINDOW, **_CAPS),
    ),
    "Gemma 3": Model(
        rms(
            "Gemma3Text",
            query_pre_attn_scalar=20,
            rope_parameters=dict(
                sliding_attention=rope("default"),
                full_attention=rope("linear", theta=1000000.0, factor=8.0),
            ),
            **_GEMMA,
            **_ONE_WINDOW,
        ),
        _NEMO_GEMMA
        | dict(
            norm_position="both",
            qk_layernorm=True,
            query_pre_attn_scalar=20,
            rotary_base=1000000.0,
            rotary_base_local=10000.0,
            seq_len_interpolation_factor=8.0,
            **_NEMO_ONE_WINDOW,
        ),
    ),
    "OLMo 2": Model(rms("Olmo2", pad_token_id=0, rope_parameters=rope("default")), _NEMO_OLMO),
    "OLMo 3": Model(
        rms(
            "Olmo3",
            pad_token_id=0,
            rope_parameters=dict(
                sliding_attention=rope("default"),
                full_attention=yarn(8.0, 150, attention_factor=1.2079),
            ),
            **_ONE_WINDOW,
        ),
        _NEMO_OLMO
        | nemo_yarn(8.0, 150, mscale=0.2079 / (0.1 * math.log(8.0)), mscale_all_dim=0.0)
        | dict(rotary_base_local=10000.0, **_NEMO_ONE_WINDOW),
    ),
    "Cohere 2": Model(
        causal_lm("Cohere2", layer_norm_eps=1e-6, pad_token_id=0, logit_scale=0.25, **_ONE_WINDOW),
        llama(
            normalization="layernorm",
            layernorm_bias=False,
            parallel_attention=True,
            rotary_interleaved=True,
            logits_scaling=4.0,
            no_rope_freq=2,
            **_NEMO_ONE_WINDOW,
        ),
    ),
    "GLM": Model(rms("Glm", **_GLM), _NEMO_GLM),
    "GLM 4": Model(rms("Glm4", **_GLM), _NEMO_GLM | dict(norm_position="both")),
    "GPT-2": Model(
        _gpt2,
        NEMO
        | _GELU
        | dict(
            num_query_groups=None,
            position_embedding_type="learned_absolute",
            share_embeddings_and_output_weights=True,
        ),
    ),
    "StarCoder 2": Model(
        causal_lm("Starcoder2", norm_epsilon=1e-6, sliding_window=None, use_bias=True),
        llama(**_GELU),
    ),
    "Nemotron": Model(
        causal_lm(
            "Nemotron",
            norm_eps=1e-6,
            initializer_range=0.08,  # its logits would be of other sizes than those of the others
            hidden_act="relu2",
            head_dim=HEAD,
            rope_parameters=partial_rope(0.5),
        ),
        llama(normalization="layernorm1p", activation="squared-relu", rotary_percentage=0.5),
    ),
}


# Sizes that divide into nothing: 301 ids, groups of three query heads, heads of another size than
# hidden_size / heads.
ODD = dict(vocab_size=301, hidden_size=36, num_attention_heads=6, num_key_value_heads=2)
ODD |= dict(head_dim=10, num_hidden_layers=3)
# Each unlike the others in its rows, norms, positions or experts
FEW = ("Llama 3.1", "Gemma", "GPT-2", "Phi 3", "Mixtral", "Qwen 3")
# Models of the architectures that are read as folders of Hugging Face. The first words are the
# architecture's.
FOLDERS: dict[str, Callable[[], torch.nn.Module]] = {
    **{name: model.build for name, model in MODELS.items()},
    "Llama, odd sizes": causal_lm("Llama", **ODD),
    "Qwen 2, odd sizes, tied": causal_lm("Qwen2", **ODD, tie_word_embeddings=True),
    "Llama 2, YaRN with a given scale": causal_lm(
        "Llama", rope_parameters=yarn(4.0, 300, attention_factor=1.25)
    ),
    "Qwen 3 MoE, experts in one layer": causal_lm(
        "Qwen3Moe",
        mlp_only_layers=[0],
        norm_topk_prob=False,
        initializer_range=0.1,
        head_dim=HEAD,
        **_EXPERTS,
    ),
}


def with_head(kind: str, name: str, labels: int = 1) -> torch.nn.Module:
    """The model `name` of `FOLDERS` with another head: `kind` is the ending of an `AutoModelFor`
    class of transformers.
    """
    config = FOLDERS[name]().config
    config.num_labels, config.pad_token_id = labels, 0
    auto = getattr(transformers, f"AutoModelFor{kind}")
    return randomized(lambda: auto.from_config(config, attn_implementation="eager"))


def randomized(build: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """A model in evaluation mode whose norms and biases are random too, so that a wrong form of
    them shows.
    """
    torch.manual_seed(5)
    model = build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def edit_json(file: Path, **keys) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def change_tensors(file: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Call `change` with the tensors in a safetensors file, and write them again."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
