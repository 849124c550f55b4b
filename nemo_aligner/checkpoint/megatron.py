# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Megatron-LM, Megatron-Bridge and NeMo 2.0, read where they lie.

    latest_checkpointed_iteration.txt   a number, or `release`
    iter_0000010/ or release/
        .metadata, *.distcp, ...        distributed checkpoint (torch_dist), names without a prefix
        mp_rank_01_002/model_optim_rng.pt   or one file per rank (torch)
        common.pt                       Megatron-LM's `args`: here, in each file per rank, or, by a
                                        newer one, in an object `common_state`
        run_config.yaml, tokenizer/     Megatron-Bridge's
    context/                            NeMo 2.0's: model.yaml, with all arguments, and tokenizer
    weights/                            NeMo 2.0's (torch_dist); `module.` precedes the names

Optimizer states are not read. Nothing of a folder is run (`torch_dist_stream.py`): a `_target_` in
the YAML is a text.
"""

import argparse
import dataclasses
import os
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from omegaconf import DictConfig, OmegaConf

from nemo_aligner.checkpoint import forms
from nemo_aligner.checkpoint.file_references import OUTSIDE, read_yaml
from nemo_aligner.checkpoint.hugging_face.architecture import Unsupported, computed, expert_layers
from nemo_aligner.checkpoint.hugging_face.reading import ORIGIN, end_token_ids
from nemo_aligner.checkpoint.old_weights import RankTensors, files_of_ranks
from nemo_aligner.checkpoint.stored_weights import EitherName, TensorSource, unnumbered
from nemo_aligner.checkpoint.torch_dist_stream import TorchDistTensors, read_objects
from nemo_aligner.config.defaults import complete_model
from nemo_aligner.config.parallel_rules import pad_vocab_size
from nemo_aligner.config.values import plain_dict
from nemo_aligner.core.errors import UserError

# --- fields of Megatron Core's `TransformerConfig` and arguments of its `GPTModel`, and the keys
# of `model` that they become ---
#
# Fields in none of `SAME`, `RENAMED`, `EXPERTS`, `ACTIVATIONS` and `IGNORED` must have their
# default. Of the some 700 `args` of Megatron-LM those count that say what the model computes:
# these fields, `ARGUMENTS`, `NEUTRAL` and what `argument_keys` reads.

SAME = frozenset(
    """num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels
    hidden_dropout attention_dropout layernorm_epsilon layernorm_zero_centered_gamma qk_layernorm
    add_qkv_bias init_method_std rotary_base rotary_interleaved seq_len_interpolation_factor
    position_embedding_type share_embeddings_and_output_weights make_vocab_size_divisible_by
    window_size window_attn_skip_freq no_rope_freq bias_activation_fusion
    yarn_rotary_scaling_factor yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow
    yarn_mscale yarn_mscale_all_dim yarn_correction_range_round_to_int""".split()
)
RENAMED = {
    "seq_length": "encoder_seq_length",
    "add_bias_linear": "bias",
    "rotary_percent": "rotary_percentage",
}
NORMALIZATIONS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
# Function -> `activation` without and with a gate; the others compute GELU's tanh form.
ACTIVATIONS: dict[str, tuple[str, str | None]] = {
    "silu": ("silu", "fast-swiglu"),
    "gelu": ("gelu", "geglu"),
    "relu": ("relu", "reglu"),
    "squared_relu": ("squared-relu", None),
}
_TANH_GELU = ("openai_gelu", "fast_gelu")
# How a job was split, computed and initialized, also of other releases.
IGNORED = frozenset(
    [field.name for field in dataclasses.fields(ModelParallelConfig)]
    + """_target_ num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
    first_pipeline_num_layers last_pipeline_num_layers num_layers_per_virtual_pipeline_stage
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
    pipeline_model_parallel_split_rank encoder_tensor_model_parallel_size
    encoder_pipeline_model_parallel_size init_method output_layer_init_method
    embedding_init_method embedding_init_method_std init_model_with_meta_device
    fp16_lm_cross_entropy fp32_residual_connection attention_softmax_in_fp32 attention_backend
    apply_query_key_layer_scaling disable_parameter_transpose_cache memory_efficient_layer_norm
    async_tensor_model_parallel_allreduce inference_rng_tracker tp_only_amax_red
    masked_softmax_fusion persist_layer_norm bias_dropout_fusion bias_dropout_add_fusion
    apply_rope_fusion distribute_saved_activations clone_scatter_output_in_embedding
    scatter_embedding_sequence_parallel parallel_output enable_cuda_graph external_cuda_graph
    config_logger_dir flash_decode vocab_size forward_step_fn data_step_fn transformer_impl
    use_transformer_engine_full_layer_spec calculate_per_token_loss
    pipeline_model_parallel_layout hf_model_id generation_config
    use_transformer_engine_op_fuser _pg_collection qk_clip fused_single_qkv_rope
    fine_grained_activation_offloading min_offloaded_tensor_size use_te_activation_func
    log_max_attention_logit""".split()
)
# Of settings that are ignored, or that a switch of another name turns on.
IGNORED_PREFIXES = tuple(
    """tp_comm_ cp_comm_ recompute_ cpu_offloading _cpu_offloading fp8 fp4 inference_
    offload_ activation_offload_ cuda_graph_ batch_invariant_ dsa_ mhc_ mup_ gdp_ gtp_ expert_gtp_
    """.split()
)
LAYER_SPECS = tuple(
    """default_layer_spec local_layer_spec transformer_engine_layer_spec get_gpt_layer_local_spec
    get_gpt_layer_with_transformer_engine_spec get_gpt_decoder_block_spec""".split()
)
# Without experts they mean nothing.
EXPERTS = frozenset(
    """num_moe_experts moe_router_topk moe_ffn_hidden_size moe_layer_freq moe_router_pre_softmax
    moe_shared_expert_intermediate_size moe_shared_expert_gate""".split()
)
NUMBER_OF_EXPERTS = "num_moe_experts"
# How experts were balanced and computed, and what other routers would need.
_EXPERTS_IGNORED = frozenset(
    """moe_aux_loss_coeff moe_z_loss_coeff moe_token_dispatcher_type moe_grouped_gemm
    moe_use_legacy_grouped_gemm moe_router_dtype moe_permute_fusion moe_router_fusion
    moe_enable_deepep moe_flex_dispatcher_backend moe_shared_expert_overlap moe_per_layer_logging
    moe_layer_recompute moe_deepep_num_sms moe_hybridep_num_sms moe_extended_tp
    moe_router_bias_update_rate moe_token_drop_policy moe_enable_routing_replay
    moe_router_padding_for_quantization moe_router_padding_for_fp8""".split()
)
BALANCING = "moe_router_load_balancing_type"
_BALANCED_IN_TRAINING = {"aux_loss", "seq_aux_loss", "global_aux_loss", "none"}

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}

Refusal = Callable[[str, Any], UserError]  # of the field of this name with this value


def model_keys(fields: Mapping[str, Any], refusal: Refusal, experts: bool) -> dict[str, Any]:
    """Keys of `model` for fields by name; classes and functions are `{_target_: <dotted path>}`.
    Raises `refusal` of a field without a counterpart.
    """
    given = dict(fields)
    keys = {name: given.pop(name) for name in SAME & given.keys()}
    keys |= {RENAMED[name]: given.pop(name) for name in RENAMED.keys() & given.keys()}
    function = last_name(given.pop("activation_func", {"_target_": "gelu"}))
    gated = bool(given.pop("gated_linear_unit", False))
    is_tanh = function in _TANH_GELU
    activation = ACTIVATIONS.get("gelu" if is_tanh else function, (None, None))[gated]
    if activation is None:
        raise refusal("activation_func", f"{function} with gated_linear_unit={gated}")
    keys |= {"activation": activation} | ({"openai_gelu": True} if is_tanh else {})
    norm = given.pop("normalization", "LayerNorm")
    if norm not in NORMALIZATIONS:
        raise refusal("normalization", norm)
    keys["normalization"] = NORMALIZATIONS[norm]
    spec = last_name(given.pop("transformer_layer_spec", None) or LAYER_SPECS[0])
    if spec not in LAYER_SPECS:
        raise refusal("transformer_layer_spec", spec)
    if experts and given.get(NUMBER_OF_EXPERTS) is not None:
        keys |= {name: given.pop(name) for name in EXPERTS & given.keys()}
        given = {name: value for name, value in given.items() if name not in _EXPERTS_IGNORED}
    check_neutral(given, refusal, experts=NUMBER_OF_EXPERTS in keys)
    return keys


def check_neutral(fields: Mapping[str, Any], refusal: Refusal, experts: bool) -> None:
    """Raise `refusal` of a field that changes what a model computes."""
    experts = experts or fields.get(NUMBER_OF_EXPERTS) is not None

    def has_no_effect(name: str, value: Any) -> bool:
        if name in IGNORED or name.startswith(IGNORED_PREFIXES):
            return True
        if name.startswith("moe_") and (not experts or name in _EXPERTS_IGNORED):
            return True
        if name == BALANCING and value:
            return set(value if isinstance(value, list) else [value]) <= _BALANCED_IN_TRAINING
        return value in (None, False, [], {}, "") or value == _DEFAULTS.get(name, ...)

    for name, value in sorted(fields.items(), key=lambda item: item[0] != NUMBER_OF_EXPERTS):
        if not has_no_effect(name, value):
            raise refusal(name, value)


def last_name(target: Any) -> str:
    """Name of a class or function, from `{_target_: <dotted path>}` or the path itself."""
    if isinstance(target, Mapping):
        target = target.get("_target_")
    return str(target).rsplit(".", 1)[-1]


# Read from arguments of other names.
_NOT_READ = frozenset(
    """num_query_groups normalization activation_func gated_linear_unit bias_activation_fusion
    num_moe_experts seq_len_interpolation_factor share_embeddings_and_output_weights
    yarn_rotary_scaling_factor yarn_mscale yarn_mscale_all_dim""".split()
)
# Argument -> key of `model`. Of two names for one key the second is the newer.
ARGUMENTS = {
    "norm_epsilon": "layernorm_epsilon",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    **{name: name for name in sorted((SAME | EXPERTS) - _NOT_READ)},
    "max_position_embeddings": "max_position_embeddings",
    **RENAMED,
    "num_experts": "num_moe_experts",
    "rotary_seq_len_interpolation_factor": "seq_len_interpolation_factor",
    "use_rope_scaling": "scale_positional_embedding",
    "rope_scaling_factor": "scale_factor",
    "rotary_scaling_factor": "yarn_rotary_scaling_factor",
    "mscale": "yarn_mscale",
    "mscale_all_dim": "yarn_mscale_all_dim",
}
# Other arguments, which with a value make another model.
NEUTRAL = tuple(
    """quick_geglu use_legacy_models multi_latent_attention hybrid_layer_pattern
    hybrid_override_pattern heterogeneous_layers_config_path
    heterogeneous_layers_config_encoded_json te_precision_config_file retro_add_retriever use_mup
    enable_mhc_connections moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size
    moe_expert_rank_capacity_factor""".split()
)
# What `--use-checkpoint-args` does not take from a checkpoint -> Megatron-LM's own default.
_NOT_TAKEN: dict[str, Any] = {
    "norm_epsilon": 1e-5,
    "bias_gelu_fusion": True,
    "rope_scaling_factor": 8.0,
    **dict.fromkeys(
        """apply_layernorm_1p qk_layernorm use_rope_scaling moe_shared_expert_gate window_size
        rotary_seq_len_interpolation_factor window_attn_skip_freq no_rope_freq
        yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow
        yarn_correction_range_round_to_int rotary_scaling_factor mscale mscale_all_dim""".split()
    ),
}


def argument_keys(args: Mapping[str, Any], refusal: Refusal) -> dict[str, Any]:
    """Keys of `model` for the arguments; raises `refusal` of one that has no counterpart."""
    experts = args.get("num_experts") is not None
    idle = _idle(experts, args.get("position_embedding_type"))
    keys = {
        key: args[name]
        for name, key in ARGUMENTS.items()
        if args.get(name) is not None and not key.startswith(idle)
    }
    norm = args.get("normalization", "LayerNorm")
    if norm not in NORMALIZATIONS:
        raise refusal("normalization", norm)
    keys["normalization"] = NORMALIZATIONS[norm]
    kind = "fast-swiglu" if args.get("swiglu") else "squared-relu"
    keys["activation"] = kind if args.get("swiglu") or args.get("squared_relu") else "gelu"
    # The fused kernel computes GELU's tanh form, and needs a bias.
    fused = args.get("bias_gelu_fusion") and args.get("add_bias_linear", True)
    keys["bias_activation_fusion"] = bool(fused and keys["activation"] == "gelu")
    # Without the switch Megatron-LM passes over the number, which is 1 then.
    if args.get("group_query_attention", "num_query_groups" in args):
        keys["num_query_groups"] = args.get("num_query_groups")
    if args.get("use_rotary_position_embeddings"):
        keys["position_embedding_type"] = "rope"
    if args.get("disable_bias_linear"):
        keys["bias"] = False
    untied = args.get("untie_embeddings_and_output_weights", False)
    keys["share_embeddings_and_output_weights"] = not untied
    for name in NEUTRAL:
        if args.get(name) not in (None, False):
            raise refusal(name, args[name])
    spec = args.get("spec")
    if spec and str(spec[-1]) not in LAYER_SPECS:
        raise refusal("spec", spec)
    fields = _DEFAULTS.keys() - ARGUMENTS.keys() - _NOT_READ
    rest = {name: args[name] for name in fields & args.keys()}
    check_neutral(rest, refusal, experts)
    return keys


def _idle(experts: bool, positions: Any) -> tuple[str, ...]:
    return ("moe_",) * (not experts) + ("yarn_",) * (positions != "yarn")


def arguments(model: Mapping[str, Any]) -> dict[str, Any]:
    """A model's arguments in Megatron-LM's old and new names; `Unsupported` names missing ones."""
    keys = plain_dict(complete_model(dict(model)), resolve=True)
    wanted = computed(keys)
    idle = _idle(bool(keys["num_moe_experts"]), keys["position_embedding_type"])
    args = {n: keys[key] for n, key in ARGUMENTS.items() if not key.startswith(idle)}
    activation, groups = wanted["activation"], int(keys["num_query_groups"])
    gamma = bool(wanted["layernorm_zero_centered_gamma"])
    args |= {
        "kv_channels": int(wanted["kv_channels"]),
        "group_query_attention": groups != keys["num_attention_heads"],
        "num_query_groups": groups,
        "add_qkv_bias": wanted["add_qkv_bias"],
        "normalization": "RMSNorm" if wanted["normalization"] == "rmsnorm" else "LayerNorm",
        "layernorm_zero_centered_gamma": gamma,
        "apply_layernorm_1p": gamma,
        "swiglu": activation == "swiglu",
        "squared_relu": activation == "squared-relu",
        "bias_gelu_fusion": activation != "gelu" or not keys["bias"],
        "untie_embeddings_and_output_weights": not keys["share_embeddings_and_output_weights"],
    }
    if keys["num_moe_experts"]:  # a list of ones would give the weights other names
        pattern = expert_layers(keys)
        args["moe_layer_freq"] = 1 if all(pattern) else pattern

    def refusal(name: str, value: Any) -> Unsupported:
        return Unsupported(f"Megatron-LM has no value of {name} for {value!r}.")

    again = computed(argument_keys(args, refusal))
    changed = sorted(key for key in wanted if wanted[key] != again[key])
    if changed:
        raise Unsupported(
            "Megatron-LM has no arguments for "
            + ", ".join(f"model.{key}={wanted[key]!r}" for key in changed)
            + "."
        )
    return args | {"add_position_embedding": True}


def command_line(args: Mapping[str, Any]) -> str:
    """What Megatron-LM needs beside `--use-checkpoint-args` to build the model."""
    options = []
    for name, default in _NOT_TAKEN.items():
        value, option = args.get(name), name.replace("_", "-")
        if value is None or value == default or (value is False and default is None):
            continue
        if isinstance(value, bool):
            options.append(f"--{option}" if value else f"--no-{option}")
        else:
            whole = isinstance(value, float) and value.is_integer()  # some take ints alone
            text = str(int(value) if whole else value).replace(" ", "")
            text = text.strip("[]") if name == "window_size" else text
            options.append(f"--{option} {shlex.quote(text)}")
    return " ".join(options)


# --- a folder ---

TOKENIZER = "tokenizer"
ARGS = "args"
# Providers of Megatron-Bridge that are Megatron Core's GPT by their fields; `scaled`: embeddings.
_PROVIDERS = re.compile(
    r"(GPT(Model)?|(Code)?Llama(2|3|31|32)?(Model)?|Llama31Nemotron(Nano8B|70B)|"
    r"Mistral(Small3)?Model|Qwen(2|25|3|3MoE)Model|Nemotron[34]?Model|(?P<scaled>(Code)?GemmaModel)"
    r")Provider\w*"
)
# Fields of a provider that are read here, and one that its GPTModel does not get.
_OF_PROVIDER = tuple(
    "rope_scaling rope_scaling_factor vocab_size should_pad_vocab max_position_embeddings".split()
)
_SENTENCEPIECE = ("GPTSentencePieceTokenizer", "SentencePieceTokenizer", "Llama2Tokenizer")
_OPTIMIZER = re.compile(r"model\.((chained_\d+\.)?optimizer\b|rng_state|rerun_state_machine)")
_PLACES = re.compile(
    r"model\.(embedding\.(word|position)_embeddings\.|output_layer\.|decoder\.final_layernorm\.|"
    r"decoder\.layers\.(self_attention\.(linear_qkv\.(layer_norm_)?|linear_proj\.|[qk]_layernorm\.)"
    r"|pre_mlp_layernorm\.|mlp\.(linear_fc1\.(layer_norm_)?|linear_fc2\.|router\.|"
    r"experts\.experts\.linear_fc[12]\.|shared_experts\.(linear_fc[12]\.|gate_))))(weight|bias)"
)


def read_config(path: Path) -> DictConfig:
    """The section `model`; `UserError`: damaged, incomplete, or a value has no counterpart."""
    folder = forms.locate(path)
    if (folder / forms.BRIDGE_FILE).is_file():
        return OmegaConf.create(_bridge_keys(folder))
    args = _args(folder)
    keys = argument_keys(args, _refusal(f"{folder}: args"))
    keys["override_vocab_size"] = args.get("padded_vocab_size")
    keys[ORIGIN] = {**(args.get(ORIGIN) or {}), "vocab_size": args.get("vocab_size")}
    keys["tokenizer"] = _tokenizer_keys(folder, args)
    if ends := end_token_ids(keys[ORIGIN]):
        keys["tokenizer"]["end_token_ids"] = ends
    return OmegaConf.create(keys)


def _refusal(where: str, remedy: str = "use another checkpoint") -> Refusal:
    return lambda name, value: UserError(
        f"{where}.{name}={value!r} has no counterpart here and would change the model; {remedy}."
    )


def _args(folder: Path) -> dict[str, Any]:
    ranks = forms.rank_folders(folder)
    if ranks:
        found = read_objects(ranks[0] / forms.RANK_FILE, ranks[0] / forms.RANK_FILE, mmap=True)
    elif (folder / forms.COMMON_FILE).is_file():
        found = read_objects(folder / forms.COMMON_FILE, folder / forms.COMMON_FILE)
    else:
        stored = TorchDistTensors(folder, prefix="").object(f"{forms.COMMON_OBJECT}/shard_0_1")
        found = read_objects(stored, folder / forms.COMMON_OBJECT)[0]
    args = found.get(ARGS) if isinstance(found, Mapping) else None
    if not isinstance(args, argparse.Namespace):
        raise forms.refusal("training", folder, f"without {ARGS} of Megatron-LM")
    return vars(args)


def _bridge_keys(folder: Path) -> dict[str, Any]:
    file = folder / forms.BRIDGE_FILE
    config: Any = OmegaConf.to_container(read_yaml(file, folder), resolve=False)
    model = config.get("model")
    if not isinstance(model, Mapping):
        raise UserError(f"{file} has no section model; it is not Megatron-Bridge's.")
    if config.get("peft"):
        raise UserError(
            f"{file} has a section peft: the checkpoint holds adapters alone. Merge them with "
            "their base in Megatron-Bridge, and name that checkpoint."
        )
    provider = last_name(model)
    known = _PROVIDERS.fullmatch(provider)
    if known is None:
        raise UserError(
            f"{file} describes a {provider}, which is not read; what is: providers of Megatron "
            "Core's GPT, Llama, Mistral, Qwen 2 and 3, Nemotron and Gemma."
        )
    fields = {name: value for name, value in model.items() if name not in _OF_PROVIDER}
    keys = model_keys(fields, _refusal(f"{file}: model"), experts=True)
    rows = ids = model.get("vocab_size")
    if rows and model.get("should_pad_vocab"):
        multiple = model.get("make_vocab_size_divisible_by") or 128
        rows = pad_vocab_size(rows, multiple * (model.get("tensor_model_parallel_size") or 1), 1)
    return keys | {
        "max_position_embeddings": keys.get("encoder_seq_length"),
        "scale_positional_embedding": bool(model.get("rope_scaling")),
        "scale_factor": model.get("rope_scaling_factor") or 1.0,
        "apply_embedding_scaling": known["scaled"] is not None,
        "override_vocab_size": rows,
        ORIGIN: {"vocab_size": ids},
        "tokenizer": _tokenizer_keys(folder, config.get("tokenizer") or {}),
    }


def _tokenizer_keys(folder: Path, named: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer in the folder, else the named one, which is read only if the user gives it."""
    kind, own = str(named.get("tokenizer_type")), folder / TOKENIZER
    if any((own / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json")):
        return {"library": "huggingface", "type": str(own)}
    files = {"model": "tokenizer.model", "vocab_file": "vocab.json", "merge_file": "merges.txt"}
    inside = {key: str(own / name) for key, name in files.items() if (own / name).is_file()}
    paths: dict[str, Any] = {**named, "model": named.get("tokenizer_model"), **inside}
    if kind in _SENTENCEPIECE:
        return {"library": "sentencepiece", "model": paths["model"]}
    if kind == "GPT2BPETokenizer" and paths.get("vocab_file"):
        both = {key: paths.get(key) for key in ("vocab_file", "merge_file")}
        return {"library": "megatron", "type": kind, **both}
    return {"library": "huggingface", "type": f"{OUTSIDE}{paths['model'] or kind}"}


# --- weights ---


def weights(path: Path) -> TensorSource:
    """The weights; `UserError`: a file is missing or damaged, or a weight is not one of a GPT."""
    folder = forms.locate(path)
    if forms.rank_folders(folder):
        source = EitherName(_rank_tensors(folder))
    else:
        tensors = TorchDistTensors(folder, prefix="")
        for key in [key for key in tensors.stored if _OPTIMIZER.match(key)]:
            del tensors.stored[key]
        source = EitherName(tensors)
    keys = read_config(folder)
    bias = keys.get("bias", True)
    without = {
        "output_layer.weight": keys.share_embeddings_and_output_weights,
        "linear_proj.bias": not bias,
        "linear_qkv.bias": not (bias or keys.get("add_qkv_bias")),
        "q_layernorm.weight": not keys.get("qk_layernorm"),
    }
    unused = tuple(name for name, is_absent in without.items() if is_absent)
    for key in source.shapes():
        check_place(key, folder)
        if key.endswith(unused):
            raise UserError(
                f"{folder} holds {key.removeprefix('model.')!r}, but its configuration describes "
                "a model without it; they do not belong together."
            )
    if not source.shapes():
        raise UserError(f"{folder} holds no weights; copy it again.")
    return source


def check_place(key: str, path: Path) -> None:
    """Check that a weight of the checkpoint at `path` is one of a GPT; else `UserError`."""
    if not _PLACES.fullmatch(unnumbered(key)[0]):
        raise UserError(
            f"{path} holds {key.removeprefix('model.')!r}, which has no place in a GPT as both "
            "Megatron Core and this library build it; the model would compute something else."
        )


def _rank_tensors(folder: Path) -> RankTensors:
    args = _args(folder)
    if args.get("num_experts"):
        raise UserError(
            f"{folder} has experts in files of each rank, which are not read; save it with "
            "--ckpt-format torch_dist."
        )
    pp, tp = (int(args.get(f"{name}_model_parallel_size") or 1) for name in ("pipeline", "tensor"))
    files = files_of_ranks(folder, forms.RANK_FILE, folder, (pp, tp))
    stages = [[read_objects(file, file, mmap=True) for file in ranks] for ranks in files]
    # Each pipeline stage has a first virtual stage, then each a second, ...
    chunks = [key for key in stages[0][0] if re.fullmatch(r"model\d*", key)]
    shards = [[rank[chunk] for rank in ranks] for chunk in chunks for ranks in stages]
    tensors = RankTensors(shards, folder, gated=bool(args.get("swiglu")))
    if not args.get("untie_embeddings_and_output_weights"):
        tensors.tensors.pop("model.output_layer.weight", None)  # the last stage's copy
    return tensors


_NEMO2_REMEDY = f"convert it to a .nemo with {forms.CONVERTERS}, or use another checkpoint"
# Model classes that are Megatron Core's GPT with these arguments; the last scales its embeddings.
NEMO2_MODELS = """GPTModel LlamaModel MistralModel NemotronModel Qwen2Model Qwen3Model
StarcoderModel Starcoder2Model Phi3Model GemmaModel""".split()
# Llama 3.1's change of the rotary frequencies: `scale_factor` is a key, the others are constants.
ROPE_SCALING = {"low_freq_factor": 1, "high_freq_factor": 4, "old_context_len": 8192}
_SPECIAL_TOKENS = """mask_token bos_token eos_token pad_token sep_token cls_token unk_token
additional_special_tokens""".split()


def nemo2_weights(path: Path) -> TorchDistTensors:
    """The weights in a folder of NeMo 2.0; `UserError` if there are none."""
    folder = path / forms.NEMO2_WEIGHTS
    if not folder.is_dir():
        raise UserError(f"{path} has no folder {forms.NEMO2_WEIGHTS}; copy it again.")
    return TorchDistTensors(folder, prefix="module.")


def read_nemo2_config(path: Path) -> DictConfig:
    """The section `model` for the model in a folder of NeMo 2.0; errors as of `read_config`."""
    file = path / forms.NEMO2_CONTEXT / forms.NEMO2_MODEL
    if not file.is_file():
        raise UserError(
            f"{path}/{forms.NEMO2_CONTEXT} has no {forms.NEMO2_MODEL}: an early NeMo 2.0 wrote "
            "it, without the values of the model's defaults, or it is incomplete. Copy it again, "
            "or load and save it with NeMo 2.1 or later."
        )
    arguments: Any = OmegaConf.to_container(read_yaml(file, path), resolve=False)
    for section in ("config", "tokenizer"):
        if not isinstance(arguments, Mapping) or not isinstance(arguments.get(section), Mapping):
            raise UserError(f"{file} has no section {section}; it is not NeMo 2.0's.")
    model_class = last_name(arguments.get("_target_"))
    if model_class not in NEMO2_MODELS:
        raise UserError(
            f"{file} describes a {model_class}; models that load from NeMo 2.0: "
            f"{', '.join(NEMO2_MODELS)}. {_NEMO2_REMEDY.capitalize()}."
        )
    keys = _nemo2_keys(arguments["config"], file)
    if model_class == "GemmaModel":
        keys["apply_embedding_scaling"] = True
    keys["tokenizer"] = _nemo2_tokenizer_keys(arguments["tokenizer"], file)
    return OmegaConf.create(keys)


def _nemo2_keys(arguments: Mapping[str, Any], file: Path) -> dict[str, Any]:
    refusal = _refusal(f"{file}: config", _NEMO2_REMEDY)
    given = dict(arguments)
    factor = given.pop("scale_factor", None)
    constants = {name: given.pop(name) for name in ROPE_SCALING.keys() & given.keys()}
    keys = model_keys(given, refusal, experts=False)
    keys["max_position_embeddings"] = keys.get("encoder_seq_length")
    if factor is not None:
        for name, value in constants.items():
            if value != ROPE_SCALING[name]:
                raise refusal(name, value)
        keys |= {"scale_positional_embedding": True, "scale_factor": factor}
    return keys


def _nemo2_tokenizer_keys(arguments: Mapping[str, Any], file: Path) -> dict[str, Any]:
    kind = last_name(arguments.get("_target_"))

    def path(name: str) -> str | None:
        """The absolute path of a file in the context, else the name."""
        value = arguments.get(name)
        if isinstance(value, Mapping):  # as NeMo may wrap it
            value = value.get("attr")
        if value is None:
            return None
        inside = Path(os.path.normpath(file.parent / str(value)))
        in_context = inside.is_relative_to(file.parent) and inside.exists()
        return str(inside) if in_context else str(value)

    if kind == "TiktokenTokenizer":
        return {"library": "tiktoken", "vocab_file": path("vocab_file")}
    keys = {"chat_template": arguments.get("chat_template")}
    if kind == "SentencePieceTokenizer":
        return keys | {
            "library": "sentencepiece",
            "model": path("model_path"),
            "sentencepiece_legacy": bool(arguments.get("legacy", False)),
            "special_tokens": arguments.get("special_tokens"),
        }
    if kind != "AutoTokenizer":
        raise UserError(
            f"{file} has a tokenizer {kind}; those that load from NeMo 2.0: AutoTokenizer, "
            f"SentencePieceTokenizer, TiktokenTokenizer. {_NEMO2_REMEDY.capitalize()}."
        )
    keys |= {
        "library": "huggingface",
        "type": path("pretrained_model_name"),
        "use_fast": bool(arguments.get("use_fast", True)),
        "special_tokens": {
            name: arguments[name]
            for name in _SPECIAL_TOKENS
            if arguments.get(name) not in (None, [])
        },
    }
    files = {"vocab_file": path("vocab_file"), "merge_file": path("merges_file")}
    # NeMo writes names such as megatron-gpt-345m_vocab where it was given none.
    files = {key: name for key, name in files.items() if name and Path(name).is_file()}
    if len(files) == 2:
        keys |= {"library": "megatron", "type": "GPT2BPETokenizer"}
    return keys | files
