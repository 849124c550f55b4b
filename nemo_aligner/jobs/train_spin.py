# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
r"""SPIN: a policy learns to prefer the responses of the data to its own.

Its own are those that it gave at the beginning of the iteration.

    nemo-aligner train spin pretrained_checkpoint.restore_from_path=sft.nemo \
        model.data.train_ds.file_path=train.jsonl model.data.validation_ds.file_path=val.jsonl

The data are those of supervised fine-tuning (docs/spin.md): conversations in NeMo's chat format,
with `model.data.chat_template=tokenizer` and `model.data.chat=False` in that template, or with
`model.data.chat=False` alone lines `{"input": ..., "output": ...}`. One process per device: with
`trainer.devices=N` the command starts them itself; torchrun and srun work as well. The same
command resumes from the last checkpoint in `exp_manager.explicit_log_dir`. Keys:
`nemo-aligner config spin`, docs/config.md.
"""

from functools import partial

from omegaconf import DictConfig

from nemo_aligner.config.checks import check_config
from nemo_aligner.config.defaults import complete_config
from nemo_aligner.launch.endings import user_errors_end_the_job
from nemo_aligner.launch.start_up import long_imports, share_cores

CONFIG_NAME = "gpt_spin"


@user_errors_end_the_job
def main(cfg: DictConfig) -> None:
    cfg = complete_config(cfg, CONFIG_NAME)
    check_config(cfg, CONFIG_NAME)
    share_cores(cfg.trainer.devices)
    train(cfg)


def train(cfg: DictConfig) -> None:
    # Here, not at the top: they take seconds, and --help and a wrong key need none of them.
    with long_imports():
        from nemo_aligner.algorithms.spin import SPINTrainer, spin_custom_collate
        from nemo_aligner.launch.experiment import start_job
        from nemo_aligner.launch.model_loading import complete_model_config, load_from_nemo
        from nemo_aligner.launch.supervised_job import build_sft_dataloaders, train_supervised
        from nemo_aligner.models.nlp.gpt.megatron_gpt_spin_model import MegatronGPTSPINModel

    base = cfg.pretrained_checkpoint.restore_from_path
    cfg.model = complete_model_config(base, cfg.model, CONFIG_NAME)
    job = start_job(cfg, "spin")

    model = load_from_nemo(MegatronGPTSPINModel, cfg.model, job.trainer, restore_path=base)
    model.init_peft(cfg.model.peft)

    collate_fn = partial(spin_custom_collate, eos_id=model.tokenizer.eos_id)
    loaders = build_sft_dataloaders(cfg, model.tokenizer, collate_fn=collate_fn)
    train_supervised(cfg, job, model, loaders, SPINTrainer)
