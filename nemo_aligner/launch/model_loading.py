# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Models from `.nemo` files, with the configuration of the file and that of the user."""

from lightning.pytorch import Trainer
from nemo.utils import logging
from omegaconf import DictConfig, OmegaConf, open_dict

from nemo_aligner.checkpoint import nemo_archive
from nemo_aligner.config.defaults import drop_unset
from nemo_aligner.launch.processes import launch_processes


def load_and_override_model_config(
    restore_path, model_cfg_to_overwrite: DictConfig, remove_meta_info: bool = True
):
    """Configuration of the model in a `.nemo`, with the values of `model_cfg_to_overwrite` over
    it.

    `overwrite_base_config.<key>=True` drops the base's section `<key>` before, instead of merging
    into it. Where the tokenizer is not given, the file's own is used.
    """
    base = nemo_archive.read_config(nemo_archive.check_restore_path(restore_path))
    overwrite = model_cfg_to_overwrite
    with open_dict(base):
        for section, keys in (overwrite.get("overwrite_base_config") or {}).items():
            for key, drop in (
                keys.items() if isinstance(keys, DictConfig | dict) else [(None, keys)]
            ):
                if drop and key is None:
                    base.pop(section, None)
                elif drop and section in base and base[section] is not None:
                    base[section].pop(key, None)
        if remove_meta_info:
            base.pop("target", None)
            base.pop("nemo_version", None)
    OmegaConf.set_struct(base, False)
    # A null in the script's configuration means "as in the checkpoint" for what describes the
    # network.
    given = OmegaConf.to_container(drop_unset(overwrite), resolve=True)
    return OmegaConf.merge(base, given)


def load_from_nemo(
    cls,
    model_cfg: DictConfig,
    trainer: Trainer,
    strict: bool = True,
    modify_config_fn=None,
    restore_path=None,
    load_base_model_only: bool = False,
    return_updated_cfg: bool = False,
):
    """Build `cls` from `model_cfg` (merged over the file's own by the caller) with the weights of
    a `.nemo`; all ranks call it.

    Args:
        modify_config_fn: `(file_cfg, model_cfg) -> cfg`, NeMo-Aligner's hook for the last word on
            the configuration.
        load_base_model_only: leave weights that `cls.fresh_weights()` names (heads) at their
            initial values even if the file has them.
        return_updated_cfg: return `(model, cfg)`.

    Raises:
        UserError: the path does not exist or does not fit the model.
    """
    restore_path = nemo_archive.check_restore_path(restore_path)
    file_cfg = nemo_archive.read_config(restore_path)
    if modify_config_fn is not None:
        cfg = modify_config_fn(file_cfg, model_cfg)
    else:
        cfg = OmegaConf.merge(OmegaConf.create(OmegaConf.to_container(file_cfg)), model_cfg)
    OmegaConf.set_struct(cfg, False)
    cfg.pop("target", None)
    launch_processes(trainer)
    model = cls(cfg, trainer=trainer)
    model.load_nemo_weights(
        restore_path,
        strict=strict,
        missing_ok=cls.fresh_weights(),
        skip=cls.fresh_weights() if load_base_model_only else (),
    )
    logging.info(f"{cls.__name__} restored from {restore_path}")
    return (model, cfg) if return_updated_cfg else model
