# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that a model is read from: `open_source` looks once which form lies at a path."""

import contextlib
import dataclasses
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
    """A checkpoint, as a path where it lies; without `read_config` and `weights`, which read what
    lies at a path, a `.nemo` or a job's.
    """

    def __init__(
        self,
        path: Path,
        read_config: Callable[[Path], DictConfig] = nemo_archive.read_archive,
        weights: Callable[
            [Path], contextlib.AbstractContextManager[TensorSource]
        ] = nemo_archive.archive_tensors,
    ) -> None:
        self._given, self.path = path, path.resolve()
        self._read_config, self._weights = read_config, weights

    def __fspath__(self) -> str:
        return str(self._given)

    __str__ = __fspath__

    def stored_config(self, model: DictConfig | None = None) -> DictConfig:
        """As `config`, with the sections `lora_base` and `peft` of adapters. `model`:
        configuration of the base of PEFT folders; None: of the one that they name.
        """
        return self._read_config(self.path)

    def own_tensors(
        self, model: DictConfig | None = None
    ) -> contextlib.AbstractContextManager[TensorSource]:
        """As `tensors`, of adapters alone, in place where possible; `model`: `stored_config`'s."""
        return self._weights(self.path)

    def config(self, base: "Source | None" = None) -> DictConfig:
        """The configuration of the model; paths of files in the checkpoint are absolute, others
        have `file_references.OUTSIDE` in front. For adapters: of the model merged with `base`
        (None: the one that they name).

        Raises:
            UserError: a reference leads out of the archive, a value calls a resolver, or the model
                is not supported.
        """
        config = self.stored_config(None if base is None else base.config())
        if adapters.base_in(config) is not None:
            for key in (adapters.BASE_SECTION, "peft"):
                config.pop(key, None)
        return config

    @contextlib.contextmanager
    def tensors(self, base: "Source | None" = None) -> Iterator[TensorSource]:
        """The weights; all ranks enter it together. Adapters are merged with `base` (None: the one
        that they name).

        Raises:
            UserError: no weights that load; the base is absent or another model; `base` is given,
                but the checkpoint holds no adapters.
        """
        model = None if base is None else base.config()
        config = self.stored_config(model)
        named = adapters.base_in(config)
        if named is None:
            if base is not None:
                raise UserError(f"{self} holds a model with all its weights, which has no base.")
            with self.own_tensors() as own:
                yield own
            return
        if base is None:
            base = self._base(named)
        else:
            named = dataclasses.replace(named, path=str(base))
        with self.own_tensors(model) as own, base.tensors() as tensors:
            found = adapters.checksum_of_source(tensors)
            where = f"{named.path}, as it is now,"
            adapters.check_base(named, found, what=str(self), where=where)
            yield adapters.merged(tensors, own, adapters.settings_in(config), config)

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


class PeftFolder(Source):
    def __init__(self, path: Path) -> None:
        from nemo_aligner.checkpoint.hugging_face import peft

        super().__init__(path)
        self._peft = peft

    def stored_config(self, model: DictConfig | None = None) -> DictConfig:
        config = self._peft.adapter_section(self.path, self._model(model))
        refuse_resolvers(config, self.path)
        return config  # the tokenizer is that of the base

    @contextlib.contextmanager
    def own_tensors(self, model: DictConfig | None = None) -> Iterator[TensorSource]:
        yield self._peft.PeftTensors(self.path, self._model(model))

    def _model(self, given: DictConfig | None) -> DictConfig:
        if given is not None:
            return given
        return open_source(self._peft.base_path(self.path), key=_BASE).config()


def of_others(
    path: Path, read_config: Callable[[Path], DictConfig], weights: Callable[[Path], TensorSource]
) -> Source:
    """A folder of others."""

    def checked(folder: Path) -> DictConfig:
        config = read_config(folder)
        refuse_resolvers(config, folder)
        mark_outside(config, folder)
        return config

    return Source(path, checked, lambda folder: contextlib.nullcontext(weights(folder)))


def open_source(
    path: str | PathLike[str] | None, key: str = "pretrained_checkpoint.restore_from_path"
) -> Source:
    """The checkpoint at `path`, the value of `key`; a `Source` is returned as it is. `UserError`:
    `path` is None, does not exist, or has a form that does not load.
    """
    if isinstance(path, Source):
        return path
    found = forms.check_restore_path(path, key)
    form = forms.form_of_path(found)
    # Only readers of the form that is there are imported.
    if form == "peft":
        return PeftFolder(found)
    if form == "hugging_face":
        from nemo_aligner.checkpoint.hugging_face import reading

        return of_others(found, reading.model_section, reading.weights)
    if form in ("nemo2", "megatron"):
        from nemo_aligner.checkpoint import megatron

        if form == "nemo2":
            return of_others(found, megatron.read_nemo2_config, megatron.nemo2_weights)
        return of_others(found, megatron.read_config, megatron.weights)
    return Source(found)


def read_config(path: str | PathLike[str]) -> DictConfig:
    """`Source.config` of what lies at `path`, for scripts."""
    return open_source(path, "path").config()
