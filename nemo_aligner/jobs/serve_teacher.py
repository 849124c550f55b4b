# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
r"""Serve a teacher to a student that learns from it while it responds itself.

The student is `train distill` with `model.knowledge_distillation.on_policy.fraction`.

    nemo-aligner serve teacher pretrained_checkpoint.restore_from_path=teacher.nemo \
        inference.port=5556 inference.top_k=100

The server gives its largest logits behind each token of the samples that it is sent, until SIGTERM
or SIGINT. docs/distillation.md says more.
"""

from typing import Any

from omegaconf import DictConfig

from nemo_aligner.launch.job_entry import job_main
from nemo_aligner.launch.start_up import long_imports

CONFIG_NAME = "inference_teacher"


@job_main(CONFIG_NAME, jobs=2)
def main(cfg: DictConfig) -> None:
    with long_imports():
        from nemo_aligner.algorithms.reward_server import TeacherServer, no_sentences
        from nemo_aligner.core.errors import UserError
        from nemo_aligner.launch.experiment import log_config
        from nemo_aligner.launch.model_loading import complete_model_config, load_from_nemo
        from nemo_aligner.launch.processes import init_distributed, resolve_and_create_trainer
        from nemo_aligner.models.nlp.gpt.megatron_gpt_knowledge_distillation import (
            TopKTeacherModel,
        )
        from nemo_aligner.servers.scoring import model_limits

    base = cfg.pretrained_checkpoint.restore_from_path
    cfg.model = complete_model_config(base, cfg.model, CONFIG_NAME)
    trainer = resolve_and_create_trainer(cfg)
    log_config(cfg, CONFIG_NAME)
    init_distributed(trainer)

    model = load_from_nemo(TopKTeacherModel, cfg.model, trainer, restore_path=base)
    model.set_eval()
    vocab_size, max_length = model_limits(model)
    options = dict(cfg.inference)
    top_k = options.pop("top_k")
    if vocab_size is not None and top_k > vocab_size:
        raise UserError(
            f"inference.top_k={top_k} is above the {vocab_size} tokens of the vocabulary; lower "
            "it."
        )

    def top_logits(samples: Any) -> Any:
        return model.top_logits(*samples, top_k)

    TeacherServer(
        infer_fn=top_logits,
        tokenize_func=no_sentences,
        model_forward_micro_batch_size=cfg.model.micro_batch_size,
        vocab_size=vocab_size,
        max_length=max_length,
        tokenizer=model.tokenizer,
        **options,
        **cfg.server,
    ).run_server()
