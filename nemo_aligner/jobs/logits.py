# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
r"""Write a teacher's largest logits at each token of the responses of a data set.

`train distill` learns from them.

    nemo-aligner logits pretrained_checkpoint.restore_from_path=teacher.nemo \
        data.data.file_path=sft.jsonl top_k=100 output_path=with_logits.jsonl

The data are those of supervised fine-tuning, and so are the keys below `data` (docs/data.md).
Stopped, the same command goes on where it ended; `start_from_idx` and `end_at_idx` share the
examples out to several jobs, each with a file of its own. docs/distillation.md says more.
"""

from omegaconf import DictConfig

from nemo_aligner.config.rules import check_values
from nemo_aligner.launch.job_entry import job_main
from nemo_aligner.launch.start_up import long_imports

CONFIG_NAME = "compute_topk_logits"


@job_main(CONFIG_NAME)
def main(cfg: DictConfig) -> None:
    with long_imports():
        from pathlib import Path

        from nemo_aligner.algorithms.topk_logits import write_topk_logits
        from nemo_aligner.data.nlp.builders import build_sft_dataset
        from nemo_aligner.data.nlp.chat import sft_chat_options
        from nemo_aligner.launch.experiment import fix_chat_date, log_config
        from nemo_aligner.launch.model_loading import complete_model_config, load_from_nemo
        from nemo_aligner.launch.processes import launch_processes, resolve_and_create_trainer
        from nemo_aligner.models.nlp.gpt.megatron_gpt_knowledge_distillation import (
            TopKTeacherModel,
        )

    teacher = cfg.pretrained_checkpoint.restore_from_path
    cfg.model = complete_model_config(teacher, cfg.model, CONFIG_NAME)
    check_values(cfg, CONFIG_NAME, complete=True)
    trainer = resolve_and_create_trainer(cfg)
    log_config(cfg, CONFIG_NAME)
    launch_processes(trainer)
    fix_chat_date(cfg.data, None)
    model = load_from_nemo(TopKTeacherModel, cfg.model, trainer, restore_path=teacher)

    dataset = build_sft_dataset(
        cfg.data.data, model.tokenizer, answer_only_loss=True, **sft_chat_options(cfg.data)
    )
    write_topk_logits(
        model,
        dataset,
        Path(cfg.output_path),
        cfg.top_k,
        first=cfg.start_from_idx or 0,
        last=cfg.end_at_idx,
    )
