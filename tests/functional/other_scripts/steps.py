# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What NeMo-Aligner's scripts have in common: their calls in their order, from the modules that
they import them from. Users' scripts look like the ones in this folder.
"""

import torch.multiprocessing
from nemo.utils.exp_manager import exp_manager
from omegaconf.omegaconf import OmegaConf

from nemo_aligner.utils import train_script_utils, utils

torch.multiprocessing.set_start_method("spawn", force=True)


def begin(cfg, kind, model_class):
    """(trainer of Lightning, logger, model)."""
    file = cfg.pretrained_checkpoint.restore_from_path
    cfg.model = utils.load_and_override_model_config(file, cfg.model)
    lightning = train_script_utils.resolve_and_create_trainer(cfg, kind)
    exp_manager(lightning, cfg.exp_manager)
    logger = train_script_utils.CustomLoggerWrapper(lightning.loggers)
    own = {"strict": True, "restore_path": file}
    return lightning, logger, utils.load_from_nemo(model_class, cfg.model, lightning, **own)


def weights_of(model, cfg):
    precise = cfg.model.get("megatron_amp_O2", False)
    return utils.retrieve_model_state_dict_in_cpu(model, megatron_amp_O2=precise)


def saved_state(lightning, model):
    """That of the trainer, or None."""
    state = None
    if lightning.ckpt_path is not None:
        state = train_script_utils.retrieve_custom_trainer_state_dict(lightning)
    train_script_utils.init_distributed(lightning, model, False)
    return state


def prepare(cfg, lightning, logger, model, loader=None, dataset=None):
    """Parts of a trainer, by their names."""
    train_script_utils.init_using_ptl(lightning, model, loader, dataset)
    optimizer, scheduler = train_script_utils.extract_optimizer_scheduler_from_ptl_model(model)
    saving = train_script_utils.add_custom_checkpoint_callback(lightning, model)
    logger.log_hyperparams(OmegaConf.to_container(cfg))
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return parts | {"logger": logger, "ckpt_callback": saving}
