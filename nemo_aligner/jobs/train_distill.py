# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
r"""Knowledge distillation: a student learns from a teacher's largest logits.

    nemo-aligner logits top_k=100 output_path=train.jsonl \
        pretrained_checkpoint.restore_from_path=teacher.nemo data.data.file_path=sft.jsonl
    nemo-aligner train distill \
        pretrained_checkpoint.restore_from_path=student.nemo \
        "model.data.data_prefix={train: [train.jsonl], validation: [validation.jsonl]}"

The first command writes the logits (docs/distillation.md). With
`model.knowledge_distillation.on_policy.fraction` they come from a served teacher
(`serve teacher`) instead, also for responses that the student gives itself.
"""

from functools import partial

from omegaconf import DictConfig

from nemo_aligner.launch.job_entry import job_main
from nemo_aligner.launch.start_up import long_imports

CONFIG_NAME = "gpt_knowledge_distillation"


@job_main(CONFIG_NAME)
def main(cfg: DictConfig) -> None:
    with long_imports():
        from nemo_aligner.data.nlp.builders import datasets_of_job
        from nemo_aligner.launch.experiment import start_with_model
        from nemo_aligner.launch.supervised_job import build_dataloaders, train_supervised
        from nemo_aligner.models.nlp.gpt.megatron_gpt_knowledge_distillation import (
            GPTKnowledgeDistillationModel,
        )

    job, model = start_with_model(
        cfg, CONFIG_NAME, "knowledge_distillation", GPTKnowledgeDistillationModel
    )

    fraction = cfg.model.knowledge_distillation.on_policy.fraction
    build_datasets = datasets_of_job(CONFIG_NAME, cfg.model)
    loaders = build_dataloaders(cfg, build_datasets, model.tokenizer)
    if fraction is None:
        train_supervised(cfg, job, model, loaders)
        return

    from nemo_aligner.algorithms.on_policy_distillation import OnPolicyDistillationTrainer
    from nemo_aligner.servers.teacher_client import RemoteTeacherClient

    teacher = RemoteTeacherClient(
        cfg.remote_teacher, model.tokenizer, cfg.model.encoder_seq_length
    )
    try:
        trainer_class = partial(OnPolicyDistillationTrainer, teacher=teacher, fraction=fraction)
        train_supervised(cfg, job, model, loaders, trainer_class)
    finally:
        teacher.close()
