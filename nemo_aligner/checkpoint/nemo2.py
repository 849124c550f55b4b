# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Folders of NeMo 2.0:

    context/model.yaml   the constructor arguments of the model, defaults included
    context/<files>      the tokenizer
    weights/             distributed checkpoint (torch_dist), in which `module.` precedes the names

The arguments become keys of the section `model` (docs/config.md). Only the text is read: no class
of NeMo is imported. The metadata of the weights may name nothing but the classes that it needs
(`checkpoint/data_only.py`).

`transformer_fields.py` and `MODELS` say what becomes of each argument.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_aligner.checkpoint import transformer_fields
from nemo_aligner.checkpoint.file_references import read_yaml
from nemo_aligner.checkpoint.forms import NEMO2_CONTEXT, NEMO2_WEIGHTS
from nemo_aligner.checkpoint.places import NEMO2_MODEL as MODEL_FILE
from nemo_aligner.checkpoint.places import is_nemo2
from nemo_aligner.checkpoint.torch_dist_stream import TorchDistTensors
from nemo_aligner.checkpoint.transformer_fields import last_name
from nemo_aligner.core.errors import UserError

WEIGHTS_PREFIX = "module."
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
# Llama 3.1's change of the rotary frequencies: `scale_factor` is a key, the others are constants.
ROPE_SCALING = {"low_freq_factor": 1, "high_freq_factor": 4, "old_context_len": 8192}
TOKEN_KINDS = ("mask", "bos", "eos", "pad", "sep", "cls", "unk")
is_folder = is_nemo2


def weights(path: Path) -> TorchDistTensors:
    """The weights in a folder of NeMo 2.0; `UserError` if there are none."""
    folder = path / NEMO2_WEIGHTS
    if not folder.is_dir():
        raise UserError(f"{path} has no folder {NEMO2_WEIGHTS}; copy it again.")
    return TorchDistTensors(folder, prefix=WEIGHTS_PREFIX)


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
    model_class = last_name(arguments.get("_target_"))
    if model_class not in MODELS:
        raise UserError(
            f"{file} describes a {model_class}; models that load from NeMo 2.0: "
            f"{', '.join(MODELS)}. {REMEDY.capitalize()}."
        )
    keys = _model_keys(arguments["config"], file) | MODELS[model_class]
    keys["tokenizer"] = _tokenizer_keys(arguments["tokenizer"], file)
    return OmegaConf.create(keys)


def _model_keys(arguments: Mapping[str, Any], file: Path) -> dict[str, Any]:
    def refusal(name: str, value: Any) -> UserError:
        return UserError(
            f"{file}: config.{name}={value!r} has no counterpart here and would change the model; "
            f"{REMEDY}."
        )

    given = dict(arguments)
    factor = given.pop("scale_factor", None)
    constants = {name: given.pop(name) for name in ROPE_SCALING.keys() & given.keys()}
    keys = transformer_fields.model_keys(given, refusal, experts=False)
    keys["max_position_embeddings"] = keys.get("encoder_seq_length")
    if factor is not None:
        for name, value in constants.items():
            if value != ROPE_SCALING[name]:
                raise refusal(name, value)
        keys |= {"scale_positional_embedding": True, "scale_factor": factor}
    return keys


def _tokenizer_keys(arguments: Mapping[str, Any], file: Path) -> dict[str, Any]:
    context = file.parent
    kind = last_name(arguments.get("_target_"))
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
