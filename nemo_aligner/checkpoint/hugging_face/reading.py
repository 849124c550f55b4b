# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face folder as a checkpoint: its section `model` and its weights."""

from collections.abc import Callable, Mapping, Sequence
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
from nemo_aligner.checkpoint.hugging_face.folder import GENERATION_FILE, read_config, read_json
from nemo_aligner.checkpoint.hugging_face.weights import FolderWeights
from nemo_aligner.config.defaults import complete_model
from nemo_aligner.config.values import plain_dict
from nemo_aligner.core.errors import UserError

# Key of `model` with what `config.json` says, and under `GENERATION` what `generation_config.json`
# does; what the training does not change goes back into the folder that is written.
ORIGIN, GENERATION = "hugging_face", "generation_config"
_NOT_KEPT = ("auto_map", "num_labels")  # names code, which does not travel; follows from labels
FILES_OF_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)


def architecture_of(path: Path, config: dict[str, Any]) -> Architecture:
    """The architecture of a folder; `Unsupported` if it is not known here, or quantized."""
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
    origin = {name: value for name, value in found.given.items() if name not in _NOT_KEPT}
    if (path / GENERATION_FILE).is_file():
        origin[GENERATION] = read_json(path / GENERATION_FILE)
    ends = end_token_ids(origin)
    if ends:
        keys.setdefault("tokenizer", {})["end_token_ids"] = ends
    keys[ORIGIN] = origin
    return OmegaConf.create(keys)


def _head_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Keys of a reward model, whose head gives numbers per sample, or of a critic (per token)."""
    classes = " ".join(config.get("architectures") or ())
    if not classes.endswith((PER_SAMPLE, PER_TOKEN)):
        return {}
    numbers = len(config.get("id2label") or (0, 1))
    several = numbers > 1
    # transformers reads the reward of a sample at its last token other than this one.
    padding = {} if classes.endswith(PER_TOKEN) else {"pad_token_id": config.get("pad_token_id")}
    return padding | {
        "reward_model_type": "regression" if several else "binary_ranking",
        "regression": {"num_attributes": numbers},
        "output_sequence": classes.endswith(PER_TOKEN),
    }


def end_token_ids(origin: Mapping[str, Any]) -> list[int]:
    """The ids that end a response by `generation_config.json`, or where it names none by
    `config.json`, in the value of `ORIGIN`. Raises `UserError` where they are no ids.
    """
    found = (origin.get(GENERATION) or {}).get("eos_token_id")
    found = origin.get("eos_token_id") if found is None else found
    ids = [] if found is None else list(found) if isinstance(found, Sequence) else [found]
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in ids):
        raise UserError(
            f"eos_token_id={found!r} of {GENERATION_FILE} or config.json must be an id or a list "
            "of ids; correct the file."
        )
    return ids


def vocab_rows(section: DictConfig, ids: Callable[[], int]) -> int:
    """Rows of a model's tables without padding.

    Args:
        section: the section `model`; Megatron's noted in `ORIGIN` what its checkpoint says of it.
    """
    origin = section.get(ORIGIN) or {}
    rows = origin["vocab_size"] if "vocab_size" in origin else section.get("override_vocab_size")
    return int(rows or ids())


def weights(path: Path) -> FolderWeights:
    """The weights of a folder.

    Raises:
        UserError: a file is missing or damaged, or a weight has no place in the model.
    """
    section = model_section(path)
    architecture = ARCHITECTURES[section[ORIGIN]["model_type"]]
    keys = plain_dict(complete_model(section), resolve=True)
    return FolderWeights(path, architecture, keys, has_head="reward_model_type" in section)
