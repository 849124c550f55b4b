# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
r"""SPIN: a policy learns to prefer the responses of the data to its own.

Its own are those that it gave at the beginning of the iteration.

    nemo-aligner train spin pretrained_checkpoint.restore_from_path=sft.nemo \
        model.data.train_ds.file_path=train.jsonl model.data.validation_ds.file_path=val.jsonl

The data are those of supervised fine-tuning (docs/spin.md): conversations in NeMo's chat format,
with `model.data.chat_template=tokenizer` and `model.data.chat=False` in that template, or with
`model.data.chat=False` alone lines `{"input": ..., "output": ...}`.
"""

from functools import partial

from omegaconf import DictConfig

from nemo_aligner.launch.job_entry import job_main
from nemo_aligner.launch.start_up import long_imports

CONFIG_NAME = "gpt_spin"


@job_main(CONFIG_NAME)
def main(cfg: DictConfig) -> None:
    with long_imports():
        from nemo_aligner.algorithms.spin import SPINTrainer, spin_custom_collate
        from nemo_aligner.launch.experiment import start_with_model
        from nemo_aligner.launch.supervised_job import build_sft_dataloaders, train_supervised
        from nemo_aligner.models.nlp.gpt.megatron_gpt_spin_model import MegatronGPTSPINModel

    job, model = start_with_model(cfg, CONFIG_NAME, "spin", MegatronGPTSPINModel)

    collate_fn = partial(spin_custom_collate, eos_id=model.tokenizer.eos_id)
    loaders = build_sft_dataloaders(cfg, model.tokenizer, collate_fn=collate_fn)
    train_supervised(cfg, job, model, loaders, SPINTrainer)
