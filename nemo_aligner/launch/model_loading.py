# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Models from `.nemo` files, with the file's and the user's configuration; reward models."""

import os
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lightning.pytorch import Trainer
from nemo.utils import logging
from omegaconf import DictConfig, OmegaConf

from nemo_aligner.checkpoint.forms import form_of_path
from nemo_aligner.checkpoint.sources import open_source
from nemo_aligner.config.checks import check_loaded
from nemo_aligner.config.data_rules import KEPT_FORM, asked_form
from nemo_aligner.config.defaults import base_dropout, complete_model, drop_unset, model_fallback
from nemo_aligner.config.parallel_rules import default_precision
from nemo_aligner.config.rules import job_of_model
from nemo_aligner.config.values import laid_over, plain_dict, resolved
from nemo_aligner.core.errors import UserError
from nemo_aligner.launch.processes import launch_processes
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.environment import adopt_mpi_ranks, is_rank_zero

if TYPE_CHECKING:
    from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel

Model = TypeVar("Model", bound=MegatronGPTModel)

# Keys of a file that describe the file, not the model.
META_KEYS = ("target", "nemo_version", "overwrite_base_config")
TOKENIZER_FILES = ("library", "type", "model", "vocab_file")
# Sections of other jobs, which a checkpoint that such a job trained may hold.
OTHER_POLICIES = {"gpt_rs_actor": ("ppo",), "gpt_reinforce_actor": ("ppo", "rs")}


def load_and_override_model_config(
    restore_path: str | PathLike[str],
    model_cfg_to_overwrite: DictConfig,
    remove_meta_info: bool = True,
) -> DictConfig:
    """Configuration of the model in a `.nemo`, with `model_cfg_to_overwrite` over it; that of a
    whole job is checked (`check_loaded`). `UserError`: the path does not exist. `ConfigError`: the
    job's configuration cannot work.

    A null there means "as in the checkpoint" for keys that describe the network (`drop_unset`).
    `overwrite_base_config.<section>=True`, or `.<section>.<key>=True`, drops that part of the
    file's configuration before. Parallel sizes that neither has are the fallbacks of
    `config/keys/model.py`. In jobs `WITHOUT_DROPOUT` the file's dropout is off where its key is
    not given, and a line says so.
    """
    adopt_mpi_ranks(os.environ)  # the check counts ranks, and in other scripts nobody else does it
    base = open_source(restore_path).config()
    if remove_meta_info:
        for key in META_KEYS:
            base.pop(key, None)
    kept = _contents((base.get("tokenizer") or {}).get(KEPT_FORM))
    merged = _over(base, model_cfg_to_overwrite)
    asked = _contents(asked_form(model_cfg_to_overwrite.get("data") or {}))
    if None not in (kept, asked) and kept != asked and is_rank_zero():
        logging.warning(
            "the form of conversations that model.data asks for (chat_template, chat) is another "
            "than the checkpoint keeps; null and chat=False take that of the checkpoint"
        )
    OmegaConf.set_struct(merged, False)  # also as a part of a configuration that takes no new keys
    for key in parallel_state.SIZES:
        if key not in merged:
            merged[key] = model_fallback(key)
    job = job_of_model(model_cfg_to_overwrite) or ""
    stored = base_dropout(model_cfg_to_overwrite, merged, job)
    if stored and is_rank_zero():
        values = ", ".join(f"{key}={value}" for key, value in stored.items())
        logging.info(
            f"the dropout of the checkpoint's configuration ({values}) is off in this job; "
            f"model.{values.partition(',')[0]} would switch it on"
        )
    merged.update(dict.fromkeys(stored, 0.0))
    for key in base_dropout({}, base, job):  # what is given is written, too
        if model_cfg_to_overwrite.get(key) is not None:
            OmegaConf.update(merged, f"overwrite_base_config.{key}", True, force_add=True)
    for section in OTHER_POLICIES.get(job, ()):
        merged.pop(section, None)  # of the job that trained the checkpoint; it has other lengths
    check_loaded(model_cfg_to_overwrite, merged, restore_path)
    return merged


def complete_model_config(
    restore_path: str | PathLike[str] | None, model_cfg: DictConfig, job: str
) -> DictConfig:
    """Section `model` of a `job` with all its keys: the user's over those of the `.nemo` (None:
    random weights), the rest from `conf/<job>.yaml`. Raises as `load_and_override_model_config`.
    """
    if restore_path is None:
        cfg, form = drop_unset(model_cfg), asked_form(model_cfg.get("data") or {})
        if form:
            OmegaConf.update(cfg, f"tokenizer.{KEPT_FORM}", form, force_add=True)
        return complete_model(cfg, job)
    return complete_model(load_and_override_model_config(restore_path, model_cfg), job)


def _over(base: DictConfig, model_cfg: DictConfig) -> DictConfig:
    """`model_cfg` over a file's `base`, less what `model_cfg.overwrite_base_config` drops."""
    remove_overwritten_fields(base, model_cfg.get("overwrite_base_config") or {})
    own, given = base.get("tokenizer") or {}, drop_unset(model_cfg).get("tokenizer") or {}
    if any(own.get(key) not in (None, given.get(key)) for key in TOKENIZER_FILES if key in given):
        for key in ("end_token_ids", KEPT_FORM):  # of another tokenizer
            own.pop(key, None)
    over = plain_dict(drop_unset(model_cfg), resolve=True)
    if "precision" in over and over["precision"] is None:  # of a script that does not set it
        over["precision"] = default_precision()
    merged = laid_over(plain_dict(base), over)
    # The job's own form of conversations, or that of the checkpoint, but no mixture of them.
    data = base.get("data") or {}
    forms = [asked_form(model_cfg.get("data") or {}), given.get(KEPT_FORM), own.get(KEPT_FORM)]
    forms.append(asked_form(data) if data.get("chat") else None)  # of NeMo-Aligner's SFT
    form = next((form for form in forms if form is not None), None)
    if form is not None:
        merged["tokenizer"] = {**(merged.get("tokenizer") or {}), KEPT_FORM: resolved(form)}
    return OmegaConf.create(merged)


def _contents(form: DictConfig | dict[str, Any] | None) -> dict[str, Any] | None:
    """A form of conversations with the text of its template in place of the file."""
    if form is None:
        return None
    path = Path(form.get("chat_template") or os.devnull)
    return {**resolved(form), "chat_template": path.read_text("utf-8") if path.exists() else None}


def remove_overwritten_fields(
    base_config: DictConfig, overwrite_config: DictConfig | dict
) -> None:
    """Remove what the section `overwrite_base_config` marks as true, at any depth."""
    for key, value in overwrite_config.items():
        if not isinstance(value, DictConfig | dict):
            if value:
                base_config.pop(key, None)
        elif base_config.get(key) is not None:
            remove_overwritten_fields(base_config[key], value)


def load_checkpoint_model_config(restore_path: str | PathLike[str]) -> DictConfig:
    """The configuration in a `.nemo` file or folder, as it stands there."""
    return open_source(restore_path).config()


def load_2_0_checkpoint_model_config(restore_path: str | Path) -> DictConfig | None:
    """The configuration in a folder of NeMo 2.0; None for a `.nemo`."""
    is_2_0 = form_of_path(Path(restore_path)) == "nemo2"
    return load_checkpoint_model_config(restore_path) if is_2_0 else None


def load_from_nemo(
    cls: type[Model],
    model_cfg: DictConfig,
    trainer: Trainer | None,
    strict: bool = True,
    modify_config_fn: Callable[[DictConfig, DictConfig], DictConfig] | None = None,
    restore_path: str | PathLike[str] | None = None,
    load_base_model_only: bool = False,
    return_updated_cfg: bool = False,
) -> Any:
    """A model, `cls`, of `model_cfg` over the file's own configuration, with the weights of a
    `.nemo`; all ranks call it. `UserError`: the path does not exist or does not fit the model.

    Args:
        model_cfg: section `model`, or a whole configuration.
        modify_config_fn: `(file_cfg, model_cfg) -> cfg`, NeMo-Aligner's hook for the last word.
        load_base_model_only: keep initial values of `cls.fresh_weights()` (heads).
        return_updated_cfg: return `(model, cfg)`.
    """
    source = open_source(restore_path)
    if "model" in model_cfg:
        model_cfg = model_cfg.model
    file_cfg = source.config()
    cfg = (modify_config_fn or _over)(file_cfg, model_cfg)
    OmegaConf.set_struct(cfg, False)
    cfg.pop("target", None)
    launch_processes(trainer)
    model = cls(cfg, trainer=trainer)
    model.stored_dropout = base_dropout({}, file_cfg, cls.CONFIG_NAME)
    model.load_nemo_weights(
        source,
        strict=strict,
        missing_ok=cls.fresh_weights(),
        skip=cls.fresh_weights() if load_base_model_only else (),
    )
    logging.info(f"{cls.__name__} restored from {source}")
    return (model, cfg) if return_updated_cfg else model


def load_reward_model(
    model_cfg: DictConfig, trainer: Trainer | None, restore_path: str | PathLike[str], key: str
) -> "MegatronGPTRewardModel":
    """The reward model in `restore_path`, which `key` names; every rank calls it. `UserError`: its
    head was not trained to give rewards.
    """
    from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import reward_model_class

    model_class = reward_model_class(model_cfg.reward_model_type)
    model: MegatronGPTRewardModel = load_from_nemo(
        model_class, model_cfg, trainer, restore_path=restore_path
    )
    if not model.has_trained_head:
        raise UserError(
            f"{key}={restore_path} holds no head that was trained to give rewards. Train a "
            "reward model from it (train_reward_model.py) and name that one."
        )
    model.prepare_for_inference()
    return model
