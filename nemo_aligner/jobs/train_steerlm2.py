# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
r"""SteerLM 2.0: a policy learns from its own responses, by their attributes.

It responds to attributes (SteerLM); a weight is by what a reward model says of them.

    nemo-aligner train steerlm2 model.restore_from_path=steerlm.nemo model.data.chat=True \
        model.data.train_ds.file_path=train.jsonl model.data.validation_ds.file_path=val.jsonl

Lines hold a prompt, its attributes and several responses with three log-probs each
(docs/steerlm.md). One process per device: with `trainer.devices=N` the command starts them
itself; torchrun and srun work as well. The same command resumes from the last checkpoint in
`exp_manager.explicit_log_dir`. Keys: `nemo-aligner config steerlm2`, docs/config.md.
"""

from omegaconf import DictConfig

from nemo_aligner.config.checks import check_config
from nemo_aligner.config.defaults import complete_config
from nemo_aligner.config.rules import check_steerlm2
from nemo_aligner.launch.endings import user_errors_end_the_job
from nemo_aligner.launch.start_up import long_imports, share_cores

CONFIG_NAME = "gpt_sft"


@user_errors_end_the_job
def main(cfg: DictConfig) -> None:
    cfg = complete_config(cfg, CONFIG_NAME)
    check_config(cfg, CONFIG_NAME)
    check_steerlm2(cfg)
    share_cores(cfg.trainer.devices)
    train(cfg)


def train(cfg: DictConfig) -> None:
    # Here, not at the top: they take seconds, and --help and a wrong key need none of them.
    with long_imports():
        from nemo_aligner.data.nlp.builders import build_steerlm2_dataset
        from nemo_aligner.launch.experiment import start_job
        from nemo_aligner.launch.model_loading import complete_model_config, load_from_nemo
        from nemo_aligner.launch.supervised_job import build_sft_loaders, train_supervised
        from nemo_aligner.models.nlp.gpt.gpt_steerlm_model import GPTSteerLMModel

    base = cfg.model.restore_from_path
    cfg.model = complete_model_config(base, cfg.model, CONFIG_NAME)
    job = start_job(cfg, "sft")

    model = load_from_nemo(GPTSteerLMModel, cfg.model, job.trainer, restore_path=base)
    model.init_peft(cfg.model.peft)

    data = cfg.model.data
    train_ds, validation_ds = (
        build_steerlm2_dataset(section, model.tokenizer, special_tokens=data.chat_prompt_tokens)
        for section in (data.train_ds, data.validation_ds)
    )
    model.check_responses(train_ds.num_responses)
    train_supervised(cfg, job, model, build_sft_loaders(cfg, train_ds, validation_ds))
