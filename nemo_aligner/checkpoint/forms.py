# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The forms in which NeMo and others write checkpoints, and what happens to each here.

`FORMS` is the list: messages of this package and the page on migration are made from it.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_aligner.core.errors import UserError

CONFIG_FILE = "model_config.yaml"
WEIGHTS_FOLDER = "model_weights"
WEIGHTS_FILE = "model_weights.ckpt"
BACKEND_FILE = "metadata.json"  # names the format of a distributed checkpoint
# A checkpoint of a job
MARKER = "COMPLETE"  # written last; a folder without it is ignored
CHECKPOINT_WEIGHTS = "weights"
RNG_FOLDER = "rng"
REFERENCE = "reference_policy"  # prefix of the keys of a reference policy among the weights
NEMO2_CONTEXT = "context"
NEMO2_WEIGHTS = "weights"
# Folder of one rank: with one pipeline stage, and with several.
RANK_FOLDER = re.compile(r"mp_rank_(?P<mp>\d+)|tp_rank_(?P<tp>\d+)_pp_rank_(?P<pp>\d+)")

CONVERTERS = "scripts/checkpoint_converters of NeMo 2.0 to 2.4"


@dataclass(frozen=True)
class Form:
    """One form of a checkpoint."""

    name: str  # of the form, as messages say it
    holds: str  # the files that it is recognised by
    loads: bool  # whether `restore_from_path` may name it
    remedy: str = ""  # what to do with one that does not load; empty for one that does


FORMS = {
    "torch_dist": Form(
        ".nemo file or folder with a distributed checkpoint (torch_dist)",
        f"{CONFIG_FILE}, {WEIGHTS_FOLDER}/{BACKEND_FILE}",
        loads=True,
    ),
    "zarr": Form(
        ".nemo file or folder with a distributed checkpoint (zarr, uncompressed)",
        f"{CONFIG_FILE}, {WEIGHTS_FOLDER}/{BACKEND_FILE} that says zarr",
        loads=True,
    ),
    "ranks": Form(
        ".nemo file or folder with the weights of each rank, for any sizes",
        f"{CONFIG_FILE}, mp_rank_XX/{WEIGHTS_FILE} or tp_rank_XX_pp_rank_XXX/{WEIGHTS_FILE}",
        loads=True,
    ),
    "one_file": Form(
        ".nemo file or folder with the weights of one rank",
        f"{CONFIG_FILE}, {WEIGHTS_FILE}",
        loads=True,
    ),
    "nemo2": Form(
        "NeMo 2.0 folder",
        f"{NEMO2_CONTEXT}/model.yaml or {NEMO2_CONTEXT}/io.json, {NEMO2_WEIGHTS}/",
        loads=True,
    ),
    "checkpoint": Form(
        "checkpoint folder of a job", f"{CONFIG_FILE}, {CHECKPOINT_WEIGHTS}/, {MARKER}", loads=True
    ),
    "legacy_layers": Form(
        ".nemo file or folder with NeMo's own layers (mcore_gpt=False)",
        "weights that start with model.language_model",
        loads=False,
        remedy=f"convert it with convert_gpt_nemo_to_mcore.py in {CONVERTERS}",
    ),
    "rank_experts": Form(
        ".nemo file or folder with the weights of each rank and a mixture of experts",
        f"mp_rank_XX/{WEIGHTS_FILE} with mlp.experts",
        loads=False,
        remedy="load and save it with NeMo 2.0 to 2.4, which writes a distributed checkpoint",
    ),
    "compressed_zarr": Form(
        ".nemo file or folder with a distributed checkpoint (zarr, compressed)",
        "a compressor or filters in a .zarray file",
        loads=False,
        remedy=f"convert it with convert_zarr_to_torch_dist.py in {CONVERTERS}",
    ),
    "hugging_face": Form(
        "Hugging Face folder",
        "config.json, model.safetensors or model.safetensors.index.json",
        loads=True,
    ),
    "megatron": Form(
        "checkpoint of Megatron-LM or Megatron-Bridge, or the root of several",
        "latest_checkpointed_iteration.txt, or .metadata and common.pt, or run_config.yaml, or "
        "mp_rank_XX/model_optim_rng.pt",
        loads=True,
    ),
    "training": Form(
        "checkpoint of a training run without a model configuration",
        f"{BACKEND_FILE} or checkpoint files, no {CONFIG_FILE}",
        loads=False,
        remedy="name the .nemo that the run wrote, or write one from it "
        "(exp_manager.checkpoint_callback_params.save_nemo_on_train_end=True)",
    ),
}


def refusal(form: str, path: object, detail: str = "") -> UserError:
    """The error about a checkpoint at `path` whose form does not load."""
    entry = FORMS[form]
    found = f" ({detail})" if detail else ""
    return UserError(f"{path} is a {entry.name}{found}, which is not read; {entry.remedy}.")


def loadable_forms() -> str:
    return "; ".join(form.name for form in FORMS.values() if form.loads)


def top_name(member: str) -> str:
    """First part of the path of a file in a `.nemo`."""
    return member.removeprefix("./").split("/", 1)[0]


def is_weight(member: str) -> bool:
    """Whether the path `member` in a `.nemo` belongs to the weights."""
    top = top_name(member)
    return top in (WEIGHTS_FOLDER, WEIGHTS_FILE) or RANK_FOLDER.fullmatch(top) is not None


def is_weight_of_any(member: str) -> bool:
    """Whether `member` of a `.nemo` or checkpoint is read for weights or a resume alone."""
    return is_weight(member) or top_name(member) in (CHECKPOINT_WEIGHTS, RNG_FOLDER)


def form_of_weights(
    names: Iterable[str],
    backend: bytes | None,
    path: Path,
    formats: Sequence[str] = ("torch_dist", "zarr"),
) -> str | None:
    """The key in `FORMS` of the weights in a `.nemo`.

    Args:
        names: of the files and folders at its top.
        backend: content of the distributed checkpoint's `BACKEND_FILE`, if there is one.
        formats: of a distributed checkpoint that load.

    Raises:
        UserError: a distributed checkpoint of an unknown format, or without `BACKEND_FILE`.
    """
    names = set(names)
    if backend is not None:
        try:
            found = json.loads(backend)["sharded_backend"]
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{path} is damaged: its {BACKEND_FILE} names no format ({error}); copy it again."
            ) from error
        if found not in formats:
            raise UserError(
                f"{path}: {BACKEND_FILE} names the format {found!r}; formats that load: "
                f"{', '.join(formats)}."
            )
        return found
    if WEIGHTS_FOLDER in names:
        raise UserError(
            f"{path} is incomplete: it lacks {WEIGHTS_FOLDER}/{BACKEND_FILE}; copy it again."
        )
    if any(RANK_FOLDER.fullmatch(name) for name in names):
        return "ranks"
    return "one_file" if WEIGHTS_FILE in names else None
