# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that a model is read from: `open_source` looks once which form lies at a path."""

import contextlib
from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path

from omegaconf import DictConfig

from nemo_aligner.checkpoint import adapters, forms, nemo_archive
from nemo_aligner.checkpoint.file_references import mark_outside, refuse_resolvers
from nemo_aligner.checkpoint.stored_weights import TensorSource
from nemo_aligner.core.errors import UserError

_BASE = "base of the adapters"  # as messages call its path


class Source(PathLike[str]):
    """A checkpoint, as a path where it lies; `form`: as `forms.form_of_path` names it."""

    def __init__(self, path: Path, form: str):
        self._given, self.path, self.form = path, path.resolve(), form
        # Only readers of the form that is there are imported.
        if form == "peft":
            from nemo_aligner.checkpoint.hugging_face import peft

            self._readers: tuple[Callable, Callable] = peft.adapter_section, peft.PeftTensors
        elif form == "hugging_face":
            from nemo_aligner.checkpoint.hugging_face import reading

            self._readers = reading.model_section, reading.weights
        elif form == "nemo2":
            from nemo_aligner.checkpoint import megatron

            self._readers = megatron.read_nemo2_config, megatron.nemo2_weights
        elif form == "megatron":
            from nemo_aligner.checkpoint import megatron

            self._readers = megatron.read_config, megatron.weights

    def __fspath__(self) -> str:
        return str(self._given)

    __str__ = __fspath__

    def stored_config(self, model: DictConfig | None = None) -> DictConfig:
        """As `config`, with the sections `lora_base` and `peft` of adapters. `model`:
        configuration of the base of PEFT folders; None: of the one that they name.
        """
        if self.form == "nemo":
            return nemo_archive.read_archive(self.path)
        config = self._readers[0](self.path, *self._base_of_peft(model))
        refuse_resolvers(config, self.path)
        if self.form != "peft":  # whose tokenizer is that of the base
            mark_outside(config, self.path)
        return config

    def own_tensors(
        self, model: DictConfig | None = None
    ) -> contextlib.AbstractContextManager[TensorSource]:
        """As `tensors`, of adapters alone, in place where possible; `model`: `stored_config`'s."""
        if self.form == "nemo":
            return nemo_archive.archive_tensors(self.path)
        return contextlib.nullcontext(self._readers[1](self.path, *self._base_of_peft(model)))

    def _base_of_peft(self, given: DictConfig | None) -> list[DictConfig]:
        """What the readers of PEFT's folders need beside the path."""
        if self.form != "peft":
            return []
        from nemo_aligner.checkpoint.hugging_face.peft import base_path

        if given is None:
            given = open_source(base_path(self.path), key=_BASE).config()
        return [given]

    def config(self) -> DictConfig:
        """The configuration of the model; paths of files in the checkpoint are absolute, others
        have `file_references.OUTSIDE` in front. For adapters: of the model merged with their base.

        Raises:
            UserError: a reference leads out of the archive, a value calls a resolver, or the model
                is not supported.
        """
        config = self.stored_config()
        if adapters.base_in(config) is not None:
            for key in (adapters.BASE_SECTION, "peft"):
                config.pop(key, None)
        return config

    @contextlib.contextmanager
    def tensors(self) -> Iterator[TensorSource]:
        """The weights, adapters merged with the base that they name; all ranks enter it together.

        Raises:
            UserError: no weights that load, or the base is absent or another model.
        """
        with self.opened() as (_config, _named, _own, weights):
            yield weights

    @contextlib.contextmanager
    def opened(
        self, base: "Source | None" = None, is_merged: bool = True, option: str = ""
    ) -> Iterator[tuple[DictConfig, adapters.Base | None, TensorSource, TensorSource]]:
        """`stored_config`, the base of adapters (None: there are none), `own_tensors` and
        `tensors`; all ranks enter it together. `base`: to take for the one that adapters name.
        Without `is_merged` it is read, and the last are merged, if it is given. `option`: what of
        a command is for adapters alone.

        Raises:
            UserError: as `tensors`; or `base` or `option` is given, but there are no adapters.
        """
        model = None if base is None else base.config()
        config = self.stored_config(model)
        named = adapters.base_in(config)
        option = option or "--base" * (base is not None)
        if named is None and option:
            raise UserError(
                f"{option} is for adapters, but {self} holds a model with all its weights: there "
                "is nothing to merge."
            )
        if named is not None and is_merged:
            base = base or self._base(named)
        with self.own_tensors(model) as own:
            if named is None or base is None:
                yield config, named, own, own
                return
            with base.tensors() as tensors:
                found = adapters.checksum_of_source(tensors)
                adapters.check_base(named, found, str(self), f"{base}, as it is now,")
                merged = adapters.merged(tensors, own, adapters.settings_in(config), config)
                yield config, adapters.Base(str(base.path), found), own, merged

    def _base(self, named: adapters.Base) -> "Source":
        if named.path is None:
            raise UserError(
                f"{self} holds adapters of a model with random weights, which no checkpoint has."
            )
        if not Path(named.path).exists():
            raise UserError(
                f"{self} holds adapters, but their base {named.path} does not exist. Merge them "
                "with the base where it lies now (nemo-aligner convert merge-lora --base PATH), "
                "or start from the base with model.peft.restore_from_path naming the adapters."
            )
        return open_source(named.path, key=_BASE)


def open_source(
    path: str | PathLike[str] | None, key: str = "pretrained_checkpoint.restore_from_path"
) -> Source:
    """The checkpoint at `path`, the value of `key`; a `Source` is returned as it is. `UserError`:
    `path` is None, does not exist, or has a form that does not load.
    """
    if isinstance(path, Source):
        return path
    found = forms.check_restore_path(path, key)
    return Source(found, forms.form_of_path(found))


def read_config(path: str | PathLike[str]) -> DictConfig:
    """`Source.config` of what lies at `path`, for scripts."""
    return open_source(path, "path").config()
