# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The files of a Hugging Face folder, for reading: configuration and safetensors.

No code and no pickle of a folder is run.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from nemo_aligner.checkpoint.places import HF_CONFIG as CONFIG_FILE
from nemo_aligner.checkpoint.places import HF_WEIGHTS
from nemo_aligner.checkpoint.stored_weights import checked
from nemo_aligner.core.errors import UserError

GENERATION_FILE = "generation_config.json"
WEIGHTS_FILE, INDEX_FILE = HF_WEIGHTS
DTYPES = ("F32", "BF16", "F16", "F64")
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; `UserError` if it holds none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}); copy it again.") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} is not a JSON object; copy it again.")
    return content


@dataclass(frozen=True)
class FolderConfig:
    given: dict[str, Any]  # what `config.json` says
    # the same as its class of transformers reads it, with the defaults of the class
    whole: dict[str, Any]
    defaults: dict[str, Any]  # of the class


def read_config(path: Path) -> FolderConfig:
    """The configuration in a folder; `UserError`: damaged, or of no class of transformers."""
    from transformers import AutoConfig, PretrainedConfig  # takes a second to import

    given = read_json(path / CONFIG_FILE)
    kind = given.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise UserError(f"{path / CONFIG_FILE} has no model_type; it is not a model's.")
    try:
        config = AutoConfig.for_model(kind)
    except ValueError as error:
        raise UserError(
            f"{path / CONFIG_FILE}: transformers has no model_type {kind!r}."
        ) from error
    try:
        whole = type(config).from_dict(copy.deepcopy(given)).to_dict()
    except Exception as error:  # whatever the checks of that class raise
        raise UserError(f"{path / CONFIG_FILE} is not valid for {kind}: {error}") from error
    assert isinstance(config, PretrainedConfig)
    # What the file has and the class does not know stays: `quantization_config`, ...
    return FolderConfig(given, {**given, **whole}, config.to_dict())


class Tensors:
    """The tensors in the safetensors of a folder, read in parts.

    Args:
        files: the file that holds each tensor; None: those of a model.

    Raises:
        UserError: a file is missing or damaged, or the weights are pickled.
    """

    def __init__(self, path: Path, files: Mapping[str, str] | None = None):
        self.path = path
        self.files = _files(path) if files is None else files
        self._open: tuple[str, Any] | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in dict.fromkeys(self.files.values()):
            opened = self._opened(file)
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                tensor = opened.get_slice(name)
                if tensor.get_dtype() not in DTYPES:
                    raise UserError(
                        f"{path / file} holds {name} of the type {tensor.get_dtype()}; what is "
                        f"read: {', '.join(DTYPES)}. Name a folder that is not quantized."
                    )
                if self.files.get(name) == file:
                    self._shapes[name] = tuple(tensor.get_shape())
        absent = sorted(self.files.keys() - self._shapes.keys())
        if absent:
            raise UserError(
                f"{path} lacks {absent[0]!r}, which its {INDEX_FILE} lists in "
                f"{self.files[absent[0]]}; copy the folder again."
            )

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def part(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """A part of the tensor `name`, in its own dtype, `checked`."""
        file = self.files[name]
        try:
            return checked(self._opened(file).get_slice(name)[index], name, self.path / file)
        except SafetensorError as error:
            raise self._damaged(file, error) from error

    def _opened(self, file: str) -> Any:
        # One at a time: what was read of a file stays in memory as long as it is open. The tensors
        # of a layer lie in one or two files.
        if self._open is None or self._open[0] != file:
            self._open = None
            try:
                self._open = file, safe_open(self.path / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise self._damaged(file, error) from error
        return self._open[1]

    def _damaged(self, file: str, error: Exception) -> UserError:
        return UserError(f"{self.path / file} is damaged or incomplete ({error}); copy it again.")


def names_in(file: Path) -> list[str]:
    """Names of the tensors in a safetensors file; `UserError` if it is damaged."""
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is damaged or incomplete ({error}); copy it again.") from error


def _files(path: Path) -> dict[str, str]:
    if (path / INDEX_FILE).is_file():
        files = read_json(path / INDEX_FILE).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
            raise UserError(f"{path / INDEX_FILE} has no weight_map; copy it again.")
        for file in sorted(set(files.values())):
            if Path(file).name != file:
                raise UserError(
                    f"{path / INDEX_FILE} names {file!r}, which is not in the folder; do not use "
                    "this folder."
                )
            if not (path / file).is_file():
                raise UserError(
                    f"{path} lacks the file {file} of its {INDEX_FILE}; copy it again."
                )
        return files
    if (path / WEIGHTS_FILE).is_file():
        return dict.fromkeys(names_in(path / WEIGHTS_FILE), WEIGHTS_FILE)
    if any((path / name).is_file() for name in _PICKLED):
        raise UserError(
            f"{path} holds pickled weights only, which can run code and are not read. Write "
            "safetensors where you trust it: AutoModelForCausalLM.from_pretrained(FOLDER)"
            ".save_pretrained(NEW_FOLDER)."
        )
    raise UserError(f"{path} holds no {WEIGHTS_FILE} and no {INDEX_FILE}; copy it again.")
