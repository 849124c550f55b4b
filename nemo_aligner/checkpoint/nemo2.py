# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Folders of NeMo 2.0:

    context/model.yaml   the constructor arguments of the model, defaults included
    context/<files>      the tokenizer
    weights/             distributed checkpoint (torch_dist), in which `module.` precedes the names

The arguments become keys of the section `model` (docs/config.md). Only the text is read: no class
of NeMo is imported. The metadata of the weights may name nothing but the classes that it needs
(`checkpoint/data_only.py`).

`SAME`, `RENAMED`, `ACTIVATIONS`, `IGNORED` and `MODELS` say what becomes of each argument; one
that is in none of them must have its default, since it would change the model.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from omegaconf import DictConfig, OmegaConf

from nemo_aligner.checkpoint.file_references import read_yaml
from nemo_aligner.checkpoint.forms import NEMO2_CONTEXT, NEMO2_WEIGHTS
from nemo_aligner.core.errors import UserError

WEIGHTS_PREFIX = "module."
MODEL_FILE = "model.yaml"
JSON_FILE = "io.json"
REMEDY = (
    "convert it to a .nemo with scripts/checkpoint_converters of NeMo 2.0 to 2.4, or use another "
    "checkpoint"
)

# Model classes that are Megatron Core's GPT with these arguments, and keys that the class itself
# stands for.
MODELS: dict[str, dict[str, Any]] = {
    "GPTModel": {},
    "LlamaModel": {},
    "MistralModel": {},
    "NemotronModel": {},
    "Qwen2Model": {},
    "Qwen3Model": {},
    "StarcoderModel": {},
    "Starcoder2Model": {},
    "Phi3Model": {},
    "GemmaModel": {"apply_embedding_scaling": True},
}
SAME = frozenset(
    """num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels
    hidden_dropout attention_dropout layernorm_epsilon layernorm_zero_centered_gamma qk_layernorm
    add_qkv_bias
    init_method_std rotary_base rotary_interleaved seq_len_interpolation_factor
    position_embedding_type share_embeddings_and_output_weights make_vocab_size_divisible_by
    window_size bias_activation_fusion""".split()
)
RENAMED = {
    "seq_length": "encoder_seq_length",
    "add_bias_linear": "bias",
    "rotary_percent": "rotary_percentage",
}
NORMALIZATIONS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
# (function, gated_linear_unit) -> keys
ACTIVATIONS: dict[tuple[str, bool], dict[str, Any]] = {
    ("silu", True): {"activation": "fast-swiglu"},
    ("silu", False): {"activation": "silu"},
    ("gelu", False): {"activation": "gelu"},
    ("gelu", True): {"activation": "geglu"},
    ("openai_gelu", False): {"activation": "gelu", "openai_gelu": True},
    ("openai_gelu", True): {"activation": "geglu", "openai_gelu": True},
    ("relu", False): {"activation": "relu"},
    ("relu", True): {"activation": "reglu"},
    ("squared_relu", False): {"activation": "squared-relu"},
}
# Llama 3.1's change of the rotary frequencies: `scale_factor` is a key, the others are constants.
ROPE_SCALING = {"low_freq_factor": 1, "high_freq_factor": 4, "old_context_len": 8192}
# How the job was split, how it computed in memory and time, and how it was initialized.
IGNORED = frozenset(
    """_target_ tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
    virtual_pipeline_model_parallel_size expert_model_parallel_size expert_tensor_parallel_size
    sequence_parallel num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
    first_pipeline_num_layers last_pipeline_num_layers
    num_layers_per_virtual_pipeline_stage account_for_embedding_in_pipeline_split
    account_for_loss_in_pipeline_split pipeline_model_parallel_comm_backend
    pipeline_model_parallel_split_rank hierarchical_context_parallel_sizes
    encoder_tensor_model_parallel_size encoder_pipeline_model_parallel_size
    perform_initialization use_cpu_initialization init_method output_layer_init_method
    embedding_init_method embedding_init_method_std init_model_with_meta_device
    fp16 bf16 params_dtype pipeline_dtype autocast_dtype enable_autocast fp16_lm_cross_entropy
    fp32_residual_connection attention_softmax_in_fp32 attention_backend deterministic_mode
    apply_query_key_layer_scaling disable_parameter_transpose_cache memory_efficient_layer_norm
    timers finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func
    num_microbatches_with_partial_activation_checkpoints gradient_accumulation_fusion
    async_tensor_model_parallel_allreduce use_te_rng_tracker inference_rng_tracker
    tp_only_amax_red cross_entropy_loss_fusion cross_entropy_fusion_impl variable_seq_lengths
    overlap_p2p_comm batch_p2p_comm batch_p2p_sync use_ring_exchange_p2p
    deallocate_pipeline_outputs defer_embedding_wgrad_compute wgrad_deferral_limit
    overlap_p2p_comm_warmup_flush microbatch_group_size_per_vp_stage barrier_with_L1_time
    masked_softmax_fusion persist_layer_norm bias_dropout_fusion bias_dropout_add_fusion
    apply_rope_fusion distribute_saved_activations clone_scatter_output_in_embedding
    scatter_embedding_sequence_parallel parallel_output enable_cuda_graph external_cuda_graph
    cuda_graph_use_single_mempool cuda_graph_retain_backward_graph cuda_graph_warmup_steps
    cuda_graph_scope cuda_graph_impl config_logger_dir flash_decode vocab_size
    forward_step_fn data_step_fn transformer_impl use_transformer_engine_full_layer_spec
    calculate_per_token_loss""".split()
)
IGNORED_PREFIXES = tuple("tp_comm_ cp_comm_ recompute_ cpu_offloading _cpu_offloading fp8".split())
LAYER_SPECS = ("default_layer_spec", "local_layer_spec", "transformer_engine_layer_spec")
# The other settings of experts mean nothing without experts.
EXPERTS = "num_moe_experts"

TOKEN_KINDS = ("mask", "bos", "eos", "pad", "sep", "cls", "unk")


def is_folder(path: Path) -> bool:
    """Whether `path` is a folder of NeMo 2.0."""
    context = path / NEMO2_CONTEXT
    return context.is_dir() and any((context / name).is_file() for name in (MODEL_FILE, JSON_FILE))


def weights_folder(path: Path) -> Path:
    """The distributed checkpoint in a folder of NeMo 2.0.

    Raises:
        UserError: there is none.
    """
    folder = path / NEMO2_WEIGHTS
    if not folder.is_dir():
        raise UserError(f"{path} has no folder {NEMO2_WEIGHTS}; copy it again.")
    return folder


def read_config(path: Path) -> DictConfig:
    """The section `model` for the model in a folder of NeMo 2.0.

    Raises:
        UserError: an argument or a class has no counterpart here; the message names it.
    """
    file = path / NEMO2_CONTEXT / MODEL_FILE
    if not file.is_file():
        raise UserError(
            f"{path}/{NEMO2_CONTEXT} has no {MODEL_FILE}: an early NeMo 2.0 wrote it, without the "
            "values of the model's defaults, or it is incomplete. Copy it again, or load and save "
            "it with NeMo 2.1 or later."
        )
    arguments: Any = OmegaConf.to_container(read_yaml(file, path), resolve=False)
    for section in ("config", "tokenizer"):
        if not isinstance(arguments, Mapping) or not isinstance(arguments.get(section), Mapping):
            raise UserError(f"{file} has no section {section}; it is not NeMo 2.0's.")
    model_class = _last_name(arguments.get("_target_"))
    if model_class not in MODELS:
        raise UserError(
            f"{file} describes a {model_class}; models that load from NeMo 2.0: "
            f"{', '.join(MODELS)}. {REMEDY.capitalize()}."
        )
    keys = _model_keys(arguments["config"], file) | MODELS[model_class]
    keys["tokenizer"] = _tokenizer_keys(arguments["tokenizer"], file)
    return OmegaConf.create(keys)


def _model_keys(arguments: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Keys of `model` for the arguments of the model's configuration class."""
    given = dict(arguments)
    keys = {name: given.pop(name) for name in SAME & given.keys()}
    keys |= {RENAMED[name]: given.pop(name) for name in RENAMED.keys() & given.keys()}
    keys["max_position_embeddings"] = keys.get("encoder_seq_length")
    keys |= _activation(given, file)
    norm = given.pop("normalization", "LayerNorm")
    if norm not in NORMALIZATIONS:
        raise _unknown("normalization", norm, file)
    keys["normalization"] = NORMALIZATIONS[norm]
    spec = _last_name(given.pop("transformer_layer_spec", {"_target_": LAYER_SPECS[0]}))
    if spec not in LAYER_SPECS:
        raise _unknown("transformer_layer_spec", spec, file)
    factor = given.pop("scale_factor", None)
    constants = {name: given.pop(name) for name in ROPE_SCALING.keys() & given.keys()}
    if factor is not None:
        for name, value in constants.items():
            if value != ROPE_SCALING[name]:
                raise _unknown(name, value, file)
        keys |= {"scale_positional_embedding": True, "scale_factor": factor}
    for name, value in sorted(given.items(), key=lambda item: item[0] != EXPERTS):
        if not _has_no_effect(name, value, given):
            raise _unknown(name, value, file)
    return keys


def _activation(given: dict[str, Any], file: Path) -> dict[str, Any]:
    """Keys for the activation, whose arguments are taken out of `given`."""
    function = _last_name(given.pop("activation_func", {"_target_": "gelu"}))
    gated = bool(given.pop("gated_linear_unit", False))
    if (function, gated) not in ACTIVATIONS:
        raise _unknown("activation_func", f"{function} with gated_linear_unit={gated}", file)
    return ACTIVATIONS[function, gated]


def _has_no_effect(name: str, value: Any, given: Mapping[str, Any]) -> bool:
    """Whether the argument does not change what the model computes."""
    if name in IGNORED or name.startswith(IGNORED_PREFIXES) or value in (None, False):
        return True
    if name.startswith("moe_") and given.get(EXPERTS) is None:
        return True
    return name in _defaults() and value == _defaults()[name]


def _defaults() -> dict[str, Any]:
    """Megatron Core's defaults."""
    return {field.name: field.default for field in dataclasses.fields(TransformerConfig)}


def _unknown(name: str, value: Any, file: Path) -> UserError:
    return UserError(
        f"{file}: config.{name}={value!r} has no counterpart here and would change the model; "
        f"{REMEDY}."
    )


def _tokenizer_keys(arguments: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Section `model.tokenizer` for the arguments of a tokenizer of NeMo."""
    context = file.parent
    kind = _last_name(arguments.get("_target_"))
    if kind == "AutoTokenizer":
        special = {
            f"{name}_token": arguments[f"{name}_token"]
            for name in TOKEN_KINDS
            if arguments.get(f"{name}_token") is not None
        }
        more = arguments.get("additional_special_tokens")
        # NeMo writes names such as megatron-gpt-345m_vocab where it was given none.
        files = {
            key: path
            for key, name in (("vocab_file", "vocab_file"), ("merge_file", "merges_file"))
            if (path := _in_context(arguments.get(name), context)) and Path(path).is_file()
        }
        given = {"library": "huggingface"}
        if len(files) == 2:
            given = {"library": "megatron", "type": "GPT2BPETokenizer"}
        return {
            "type": _in_context(arguments.get("pretrained_model_name"), context),
            **given,
            **files,
            "use_fast": bool(arguments.get("use_fast", True)),
            "special_tokens": special | ({"additional_special_tokens": more} if more else {}),
            "chat_template": arguments.get("chat_template"),
        }
    if kind == "SentencePieceTokenizer":
        return {
            "library": "sentencepiece",
            "model": _in_context(arguments.get("model_path"), context),
            "sentencepiece_legacy": bool(arguments.get("legacy", False)),
            "special_tokens": arguments.get("special_tokens"),
            "chat_template": arguments.get("chat_template"),
        }
    if kind == "TiktokenTokenizer":
        return {
            "library": "tiktoken",
            "vocab_file": _in_context(arguments.get("vocab_file"), context),
        }
    raise UserError(
        f"{file} has a tokenizer {kind}; those that load from NeMo 2.0: AutoTokenizer, "
        f"SentencePieceTokenizer, TiktokenTokenizer. {REMEDY.capitalize()}."
    )


def _in_context(value: Any, context: Path) -> str | None:
    """A file argument: its absolute path if it lies in the context, else the name as it stands.
    NeMo writes a name that is no path as `{attr: <name>, skip: true}`.
    """
    if isinstance(value, Mapping):
        value = value.get("attr")
    if value is None:
        return None
    inside = Path(os.path.normpath(context / str(value)))
    return str(inside) if inside.is_relative_to(context) and inside.exists() else str(value)


def _last_name(target: Any) -> str:
    """Name of a class or function, from `{_target_: <dotted path>}` or the path itself."""
    if isinstance(target, Mapping):
        target = target.get("_target_")
    return str(target).rsplit(".", 1)[-1]
