# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
r"""Supervised fine-tuning on prompts with responses, or on conversations.

Lines are `{"input": ..., "output": ...}`, or `{"messages": [...]}` with
`model.data.chat_template=tokenizer` (docs/data.md); the loss counts the responses only.

    nemo-aligner train sft model.restore_from_path=base.nemo \
        model.data.train_ds.file_path=train.jsonl model.data.validation_ds.file_path=val.jsonl

Without `model.restore_from_path` the model starts from random weights, and then the architecture
must be given. One process per device: with `trainer.devices=N` the command starts them itself;
torchrun and srun work as well. The same command resumes from the last checkpoint in
`exp_manager.explicit_log_dir`. Keys: `nemo-aligner config sft`, docs/config.md.
"""

from omegaconf import DictConfig

from nemo_aligner.config.checks import check_config
from nemo_aligner.config.defaults import complete_config
from nemo_aligner.launch.endings import user_errors_end_the_job
from nemo_aligner.launch.start_up import long_imports, share_cores

CONFIG_NAME = "gpt_sft"


@user_errors_end_the_job
def main(cfg: DictConfig) -> None:
    cfg = complete_config(cfg, CONFIG_NAME)
    check_config(cfg, CONFIG_NAME)
    share_cores(cfg.trainer.devices)
    train(cfg)


def train(cfg: DictConfig) -> None:
    # Here, not at the top: they take seconds, and --help and a wrong key need none of them.
    with long_imports():
        from nemo_aligner.launch.experiment import start_job
        from nemo_aligner.launch.model_loading import complete_model_config, load_from_nemo
        from nemo_aligner.launch.supervised_job import build_sft_dataloaders, train_supervised
        from nemo_aligner.models.nlp.gpt.gpt_sft_model import GPTSFTModel

    base = cfg.model.restore_from_path
    cfg.model = complete_model_config(base, cfg.model, CONFIG_NAME)
    job = start_job(cfg, "sft")

    if base is None:
        model = GPTSFTModel(cfg.model, job.trainer)
    else:
        model = load_from_nemo(GPTSFTModel, cfg.model, job.trainer, restore_path=base)
    model.init_peft(cfg.model.peft)

    loaders = build_sft_dataloaders(cfg, model.tokenizer, cfg.model.answer_only_loss)
    train_supervised(cfg, job, model, loaders)
