# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
r"""KTO: a policy learns from single responses, each of them desirable or not.

    nemo-aligner train kto pretrained_checkpoint.restore_from_path=sft.nemo \
        "model.data.data_prefix={train: [a.jsonl], validation: [b.jsonl]}"

Lines are `{"prompt": ..., "response": ..., "preference": "chosen" or "rejected"}`, texts or
conversations (docs/kto.md). The checkpoint is also the reference policy: a copy of its weights in
host memory, or with `model.peft.peft_scheme=lora` the model without its adapters.
"""

from omegaconf import DictConfig

from nemo_aligner.launch.job_entry import job_main
from nemo_aligner.launch.start_up import long_imports

CONFIG_NAME = "gpt_kto"


@job_main(CONFIG_NAME)
def main(cfg: DictConfig) -> None:
    with long_imports():
        from nemo_aligner.algorithms.kto import KTOTrainer
        from nemo_aligner.launch.experiment import start_with_model
        from nemo_aligner.launch.supervised_job import (
            build_preference_dataloaders,
            train_supervised,
        )
        from nemo_aligner.models.nlp.gpt.megatron_gpt_kto_model import MegatronGPTKTOModel

    job, model = start_with_model(cfg, CONFIG_NAME, "kto", MegatronGPTKTOModel)
    # Before a checkpoint is resumed: the reference stays the model that the job started from.
    loaders = build_preference_dataloaders(cfg, CONFIG_NAME, model)
    train_supervised(cfg, job, model, loaders, KTOTrainer)
