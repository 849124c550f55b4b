# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face folder as a checkpoint: its section `model` and its weights."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_aligner.checkpoint.hugging_face.architecture import (
    PER_SAMPLE,
    PER_TOKEN,
    Architecture,
    Unsupported,
    model_keys,
)
from nemo_aligner.checkpoint.hugging_face.architectures import ARCHITECTURES
from nemo_aligner.checkpoint.hugging_face.folder import read_config
from nemo_aligner.checkpoint.hugging_face.weights import FolderWeights
from nemo_aligner.config.defaults import complete_model
from nemo_aligner.config.values import plain_dict

# Key of `model` with the keys of `config.json` that this package has no key for; they go back
# into the folder that is written.
ORIGIN = "hugging_face"
FILES_OF_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
_LABELS = ("id2label", "label2id")  # names of what a head gives


def architecture_of(path: Path, config: dict[str, Any]) -> Architecture:
    """The architecture of a folder.

    Raises:
        Unsupported: it is not known here, or quantized.
    """
    kind = config["model_type"]
    if kind not in ARCHITECTURES:
        raise Unsupported(
            f"{path}: the architecture {kind!r} is not supported; what is: "
            f"{', '.join(sorted(ARCHITECTURES))}."
        )
    if config.get("quantization_config"):
        raise Unsupported(
            f"{path} holds quantized weights (quantization_config), which are not supported; name "
            "a folder with float weights."
        )
    return ARCHITECTURES[kind]


def model_section(path: Path) -> DictConfig:
    """The section `model` for the model in a folder.

    Raises:
        UserError: the folder is damaged, or what it describes cannot be computed here.
    """
    found = read_config(path)
    config = found.whole
    architecture = architecture_of(path, config)
    try:
        keys = model_keys(architecture, config, found.defaults)
    except Unsupported as error:
        raise Unsupported(f"{path}: {error}") from error
    keys["encoder_seq_length"] = keys["max_position_embeddings"]
    keys |= _head_keys(config)
    if any((path / name).is_file() for name in FILES_OF_TOKENIZERS):
        keys["tokenizer"] = {"library": "huggingface", "type": str(path)}
    keys[ORIGIN] = _origin(architecture, found.given)
    if "regression" in keys:
        keys[ORIGIN] |= {name: found.given[name] for name in _LABELS if name in found.given}
    return OmegaConf.create(keys)


def _head_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Keys of a reward model, whose head gives numbers per sample, or of a critic (per token)."""
    classes = " ".join(config.get("architectures") or ())
    if not classes.endswith((PER_SAMPLE, PER_TOKEN)):
        return {}
    numbers = len(config.get("id2label") or (0, 1))
    several = numbers > 1
    return {
        "reward_model_type": "regression" if several else "binary_ranking",
        "regression": {"num_attributes": numbers},
        "output_sequence": classes.endswith(PER_TOKEN),
    }


def _origin(architecture: Architecture, given: dict[str, Any]) -> dict[str, Any]:
    """What of `config.json` no key of `model` stands for: token ids, names, ..."""
    read = {*architecture.same, *architecture.choices, "architectures", "transformers_version"}
    read |= {name for part in architecture.parts for name in part.reads}
    read |= {"dtype", "torch_dtype", *_LABELS, "num_labels", "_name_or_path"}
    read |= {"auto_map"}  # names code, which does not travel
    return {name: value for name, value in given.items() if name not in read and value is not None}


def weights(path: Path) -> FolderWeights:
    """The weights of a folder.

    Raises:
        UserError: a file is missing or damaged, or a weight has no place in the model.
    """
    section = model_section(path)
    architecture = ARCHITECTURES[section[ORIGIN]["model_type"]]
    keys = plain_dict(complete_model(section), resolve=True)
    return FolderWeights(path, architecture, keys, has_head="reward_model_type" in section)
