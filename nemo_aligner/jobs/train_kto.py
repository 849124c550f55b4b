# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
r"""KTO: a policy learns from single responses, each of them desirable or not.

    nemo-aligner train kto pretrained_checkpoint.restore_from_path=sft.nemo \
        "model.data.data_prefix={train: [a.jsonl], validation: [b.jsonl]}"

Lines are `{"prompt": ..., "response": ..., "preference": "chosen" or "rejected"}`, texts or
conversations (docs/kto.md). The checkpoint is also the reference policy: a copy of its weights in
host memory, or with `model.peft.peft_scheme=lora` the model without its adapters. One process per
device: with `trainer.devices=N` the command starts them itself; torchrun and srun work as well.
The same command resumes from the last checkpoint in `exp_manager.explicit_log_dir`. Keys:
`nemo-aligner config kto`, docs/config.md.
"""

from omegaconf import DictConfig

from nemo_aligner.config.checks import check_config
from nemo_aligner.config.defaults import complete_config
from nemo_aligner.launch.endings import user_errors_end_the_job
from nemo_aligner.launch.start_up import long_imports, share_cores

CONFIG_NAME = "gpt_kto"


@user_errors_end_the_job
def main(cfg: DictConfig) -> None:
    cfg = complete_config(cfg, CONFIG_NAME)
    check_config(cfg, CONFIG_NAME)
    share_cores(cfg.trainer.devices)
    train(cfg)


def train(cfg: DictConfig) -> None:
    # Here, not at the top: they take seconds, and --help and a wrong key need none of them.
    with long_imports():
        from nemo_aligner.algorithms.kto import KTOTrainer
        from nemo_aligner.data.nlp.builders import build_train_valid_test_kto_datasets
        from nemo_aligner.launch.experiment import start_job
        from nemo_aligner.launch.model_loading import complete_model_config, load_from_nemo
        from nemo_aligner.launch.supervised_job import (
            build_preference_dataloaders,
            train_supervised,
        )
        from nemo_aligner.models.nlp.gpt.megatron_gpt_kto_model import MegatronGPTKTOModel

    base = cfg.pretrained_checkpoint.restore_from_path
    cfg.model = complete_model_config(base, cfg.model, CONFIG_NAME)
    job = start_job(cfg, "kto")

    model = load_from_nemo(MegatronGPTKTOModel, cfg.model, job.trainer, restore_path=base)
    model.init_peft(cfg.model.peft)
    # Before a checkpoint is resumed: the reference stays the model that the job started from.
    loaders = build_preference_dataloaders(cfg, "kto", build_train_valid_test_kto_datasets, model)
    train_supervised(cfg, job, model, loaders, KTOTrainer)
