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
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_aligner.checkpoint import forms
from nemo_aligner.checkpoint.file_references import OUTSIDE, read_yaml
from nemo_aligner.checkpoint.hugging_face.reading import ORIGIN, end_token_ids
from nemo_aligner.checkpoint.megatron_keys import Refusal, argument_keys, last_name, model_keys
from nemo_aligner.checkpoint.old_weights import RankTensors, files_of_ranks
from nemo_aligner.checkpoint.stored_weights import EitherName, TensorSource, unnumbered
from nemo_aligner.checkpoint.torch_dist_stream import TorchDistTensors, read_objects
from nemo_aligner.config.parallel_rules import pad_vocab_size
from nemo_aligner.core.errors import UserError

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
