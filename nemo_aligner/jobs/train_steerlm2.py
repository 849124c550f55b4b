# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
r"""SteerLM 2.0: a policy learns from its own responses, by their attributes.

It responds to attributes (SteerLM); a weight is by what a reward model says of them.

    nemo-aligner train steerlm2 model.restore_from_path=steerlm.nemo model.data.chat=True \
        model.data.train_ds.file_path=train.jsonl model.data.validation_ds.file_path=val.jsonl

Lines hold a prompt, its attributes and several responses with three log-probs each
(docs/steerlm.md).
"""

from functools import partial
from typing import Any

from omegaconf import DictConfig

from nemo_aligner.config.defaults import complete_config
from nemo_aligner.config.jobs.sft import check_steerlm2
from nemo_aligner.config.values import Values, resolved
from nemo_aligner.launch.job_entry import job_main
from nemo_aligner.launch.start_up import long_imports

CONFIG_NAME = "gpt_sft"


def check(cfg: DictConfig) -> None:
    """Raise `ConfigError` unless a checked configuration can train SteerLM 2.0."""
    check_steerlm2(Values(resolved(complete_config(cfg, CONFIG_NAME))))


@job_main(CONFIG_NAME)
def main(cfg: DictConfig) -> None:
    check(cfg)
    with long_imports():
        from nemo_aligner.data.nlp.builders import build_steerlm2_dataset
        from nemo_aligner.launch.experiment import start_with_model
        from nemo_aligner.launch.supervised_job import build_sft_loaders, train_supervised
        from nemo_aligner.models.nlp.gpt.gpt_steerlm_model import GPTSteerLMModel

    job, model = start_with_model(cfg, CONFIG_NAME, "sft", GPTSteerLMModel)

    build = partial(build_steerlm2_dataset, special_tokens=cfg.model.data.chat_prompt_tokens)
    loaders = build_sft_loaders(cfg, build, model.tokenizer)
    train: Any = loaders.train.dataset
    model.check_responses(train.num_responses)
    train_supervised(cfg, job, model, loaders)
