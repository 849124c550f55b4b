# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
r"""Supervised fine-tuning on prompts with responses, or on conversations.

Lines are `{"input": ..., "output": ...}`, or `{"messages": [...]}` with
`model.data.chat_template=tokenizer` (docs/data.md); the loss counts the responses only.

    nemo-aligner train sft model.restore_from_path=base.nemo \
        model.data.train_ds.file_path=train.jsonl model.data.validation_ds.file_path=val.jsonl

Without `model.restore_from_path` the model starts from random weights, and then the architecture
must be given.
"""

from omegaconf import DictConfig

from nemo_aligner.launch.job_entry import job_main
from nemo_aligner.launch.start_up import long_imports

CONFIG_NAME = "gpt_sft"


@job_main(CONFIG_NAME)
def main(cfg: DictConfig) -> None:
    with long_imports():
        from nemo_aligner.launch.experiment import start_with_model
        from nemo_aligner.launch.supervised_job import build_sft_dataloaders, train_supervised
        from nemo_aligner.models.nlp.gpt.gpt_sft_model import GPTSFTModel

    job, model = start_with_model(cfg, CONFIG_NAME, "sft", GPTSFTModel)
    loaders = build_sft_dataloaders(cfg, model.tokenizer, cfg.model.answer_only_loss)
    train_supervised(cfg, job, model, loaders)
