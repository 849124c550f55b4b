# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters (LoRA) merged with their base, and converted between `.nemo` and folders of PEFT."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from nemo_aligner.checkpoint import adapters, nemo_archive
from nemo_aligner.checkpoint.hugging_face import peft_writing
from nemo_aligner.checkpoint.places import is_peft
from nemo_aligner.checkpoint.stored_weights import TensorSource
from nemo_aligner.convert.hugging_face import Options, check_target, write_chunks
from nemo_aligner.core.errors import UserError


def is_peft_folder(source: Path) -> bool:
    return is_peft(source.expanduser())


def are_adapters(source: Path, key: str = "ADAPTERS") -> bool:
    """Whether the checkpoint `source`, called `key`, holds adapters; `UserError`: no such one."""
    source = nemo_archive.check_restore_path(source, key=key)
    if is_peft(source):
        return True
    return adapters.base_in(nemo_archive.read_stored_config(source)) is not None


def merge(
    source: Path, target: Path, options: Options | None = None, base: Path | None = None
) -> None:
    """Write adapters merged with their base as a `.nemo`, one tensor in memory at a time.

    Args:
        target: a file that ends in `.nemo`, or a folder, which appears when it is complete.
        base: where the base lies; None: where the adapters say.

    Raises:
        UserError: the source holds no adapters, their base is absent or another one, or the
            target exists.
    """
    options = options or Options()
    target = check_target(source, target, options)
    if not are_adapters(source):
        raise UserError(f"{source} holds a model with all its weights; there is nothing to merge.")
    base = _checked_base(base)
    section = nemo_archive.read_config(source, base)
    with nemo_archive.stored_tensors(source, base) as weights:
        write_chunks(target, section, weights, options)


def to_nemo(
    source: Path, target: Path, options: Options | None = None, base: Path | None = None
) -> None:
    """Write a folder of PEFT as a `.nemo` of adapters; arguments and errors as for `merge`."""
    options = options or Options()
    target = check_target(source, target, options)
    with _opened(source, base) as (section, weights):
        found = adapters.base_in(section)
        assert found is not None
        path = base or found.path
        if path is None or not Path(path).exists():
            raise UserError(
                f"{source} names {found.path!r} as its base, which is not on this machine; give "
                "it with --base."
            )
        where = str(Path(path).resolve())
        with nemo_archive.stored_tensors(path) as tensors:
            checksum = adapters.checksum_of_source(tensors)
            adapters.check_base(found, checksum, str(source), where)
            # Checks that the base has what the adapters belong to.
            adapters.MergedTensors(tensors, weights, adapters.settings_in(section), section)
        section[adapters.BASE_SECTION] = adapters.Base(where, checksum).to_config()
        write_chunks(target, section, weights, options)


def to_peft(
    source: Path,
    target: Path,
    options: Options | None = None,
    *,
    drop_head_bias: bool = False,
    base: Path | None = None,
) -> None:
    """Write adapters as a folder of PEFT; in one process.

    Args:
        target: the folder, which appears when it is complete.
        base: the base that the folder names; None: the one that the adapters name.

    Raises:
        UserError: Hugging Face cannot express the model, the base is another one, or the target
            exists.
    """
    options = options or Options()
    target = check_target(source, target, options)
    with _opened(source, base) as (section, weights):
        found = adapters.base_in(section)
        assert found is not None
        if base is not None:
            with nemo_archive.stored_tensors(base) as tensors:
                checksum = adapters.checksum_of_source(tensors)
            adapters.check_base(found, checksum, str(source), str(base))
            found = replace(found, path=str(base.resolve()), checksum=checksum)
        peft_writing.write_folder(
            target,
            weights,
            section,
            adapters.settings_in(section),
            found,
            dtype=options.torch_dtype(),
            drop_head_bias=drop_head_bias,
        )


def _checked_base(base: Path | None) -> Path | None:
    return None if base is None else nemo_archive.check_restore_path(base, key="--base")


@contextlib.contextmanager
def _opened(source: Path, base: Path | None) -> Iterator[tuple[DictConfig, TensorSource]]:
    source = nemo_archive.check_restore_path(source, key="ADAPTERS")
    base = _checked_base(base)
    model = None if base is None else nemo_archive.read_config(base)
    section = nemo_archive.read_stored_config(source, model)
    with nemo_archive.own_tensors(source, model) as weights:
        yield section, weights
