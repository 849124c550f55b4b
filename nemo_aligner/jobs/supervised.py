# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The jobs that learn from data, and the one that writes such data."""

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from nemo_aligner.config.jobs import supervised
from nemo_aligner.config.values import Values, resolved
from nemo_aligner.core.errors import UserError
from nemo_aligner.launch.job_entry import job_main
from nemo_aligner.launch.start_up import long_imports

if TYPE_CHECKING:
    from nemo.collections.common.tokenizers.tokenizer_spec import TokenizerSpec

    from nemo_aligner.launch.supervised_job import Loaders


@job_main("gpt_sft")
def train_sft(cfg: DictConfig) -> None:
    r"""Supervised fine-tuning on prompts with responses, or on conversations.

    Lines are `{"input": ..., "output": ...}`, or `{"messages": [...]}` with
    `model.data.chat_template=tokenizer` (docs/data.md); the loss counts the responses only.

        nemo-aligner train sft model.restore_from_path=base.nemo \
            model.data.train_ds.file_path=train.jsonl model.data.validation_ds.file_path=val.jsonl

    Without `model.restore_from_path` the model starts from random weights, and then the
    architecture must be given.
    """
    with long_imports():
        from nemo_aligner.launch import experiment, supervised_job
        from nemo_aligner.models.nlp.gpt.gpt_sft_model import GPTSFTModel

    job, model = experiment.start_with_model(cfg, GPTSFTModel)
    loaders = supervised_job.build_sft_dataloaders(
        cfg, model.tokenizer, answer_only_loss=cfg.model.answer_only_loss
    )
    supervised_job.train_supervised(cfg, job, model, loaders)


@job_main("gpt_sft", check=lambda cfg: supervised.check_steerlm2(Values(resolved(cfg))))
def train_steerlm2(cfg: DictConfig) -> None:
    r"""SteerLM 2.0: a policy learns from its own responses, by their attributes.

    It responds to attributes (SteerLM); a weight is by what a reward model says of them.

        nemo-aligner train steerlm2 model.restore_from_path=steerlm.nemo model.data.chat=True \
            model.data.train_ds.file_path=train.jsonl model.data.validation_ds.file_path=val.jsonl

    Lines hold a prompt, its attributes and several responses with three log-probs each
    (docs/algorithms.md).
    """
    with long_imports():
        from nemo_aligner.data.nlp.steerlm import build_steerlm2_dataset
        from nemo_aligner.launch import experiment, supervised_job
        from nemo_aligner.models.nlp.gpt.gpt_sft_model import GPTSteerLMModel

    job, model = experiment.start_with_model(cfg, GPTSteerLMModel)
    build = partial(build_steerlm2_dataset, special_tokens=cfg.model.data.chat_prompt_tokens)
    loaders = supervised_job.build_sft_dataloaders(cfg, model.tokenizer, build)
    train: Any = loaders.train.dataset
    model.check_responses(train.num_responses)
    supervised_job.train_supervised(cfg, job, model, loaders)


@job_main("gpt_spin")
def train_spin(cfg: DictConfig) -> None:
    r"""SPIN: a policy learns to prefer the responses of the data to its own.

    Its own are those that it gave at the beginning of the iteration.

        nemo-aligner train spin pretrained_checkpoint.restore_from_path=sft.nemo \
            model.data.train_ds.file_path=train.jsonl model.data.validation_ds.file_path=val.jsonl

    The data are those of supervised fine-tuning (docs/preferences.md): conversations in NeMo's
    chat format, with `model.data.chat_template=tokenizer` and `model.data.chat=False` in that
    template, or with `model.data.chat=False` alone lines `{"input": ..., "output": ...}`.
    """
    with long_imports():
        from nemo_aligner.algorithms.spin import SPINTrainer, spin_custom_collate
        from nemo_aligner.launch import experiment, supervised_job
        from nemo_aligner.models.nlp.gpt.megatron_gpt_dpo_model import MegatronGPTSPINModel

    job, model = experiment.start_with_model(cfg, MegatronGPTSPINModel)
    collate_fn = partial(spin_custom_collate, eos_id=model.tokenizer.eos_id)
    loaders = supervised_job.build_sft_dataloaders(cfg, model.tokenizer, collate_fn=collate_fn)
    supervised_job.train_supervised(cfg, job, model, loaders, SPINTrainer)


@job_main("gpt_dpo")
def train_dpo(cfg: DictConfig) -> None:
    r"""DPO, IPO, RPO: a policy learns from pairs of responses, without a reward model.

        nemo-aligner train dpo pretrained_checkpoint.restore_from_path=sft.nemo \
            "model.data.data_prefix={train: [a.jsonl], validation: [b.jsonl]}"

    Lines are `{"prompt": ..., "chosen": ..., "rejected": ...}`, texts or conversations
    (docs/preferences.md). The checkpoint is also the reference policy: a copy of its weights in
    host memory, or with `model.peft.peft_scheme=lora` the model without its adapters.
    """
    with long_imports():
        from nemo_aligner.algorithms.dpo import DPOTrainer
        from nemo_aligner.launch.supervised_job import train_on_preferences
        from nemo_aligner.models.nlp.gpt.megatron_gpt_dpo_model import MegatronGPTDPOModel

    train_on_preferences(cfg, MegatronGPTDPOModel, DPOTrainer)


@job_main("gpt_kto")
def train_kto(cfg: DictConfig) -> None:
    r"""KTO: a policy learns from single responses, each of them desirable or not.

        nemo-aligner train kto pretrained_checkpoint.restore_from_path=sft.nemo \
            "model.data.data_prefix={train: [a.jsonl], validation: [b.jsonl]}"

    Lines are `{"prompt": ..., "response": ..., "preference": "chosen" or "rejected"}`, texts or
    conversations (docs/preferences.md). The checkpoint is also the reference policy: a copy of its
    weights in host memory, or with `model.peft.peft_scheme=lora` the model without its adapters.
    """
    with long_imports():
        from nemo_aligner.algorithms.dpo import KTOTrainer
        from nemo_aligner.launch.supervised_job import train_on_preferences
        from nemo_aligner.models.nlp.gpt.megatron_gpt_dpo_model import MegatronGPTKTOModel

    train_on_preferences(cfg, MegatronGPTKTOModel, KTOTrainer)


@job_main("gpt_knowledge_distillation")
def train_distill(cfg: DictConfig) -> None:
    r"""Knowledge distillation: a student learns from a teacher's largest logits.

        nemo-aligner logits top_k=100 output_path=train.jsonl \
            pretrained_checkpoint.restore_from_path=teacher.nemo data.data.file_path=sft.jsonl
        nemo-aligner train distill \
            pretrained_checkpoint.restore_from_path=student.nemo \
            "model.data.data_prefix={train: [train.jsonl], validation: [validation.jsonl]}"

    The first command writes the logits (docs/algorithms.md). With
    `model.knowledge_distillation.on_policy.fraction` they come from a served teacher
    (`serve teacher`) instead, also for responses that the student gives itself.
    """
    with long_imports():
        from nemo_aligner.algorithms.distillation import OnPolicyDistillationTrainer
        from nemo_aligner.launch import experiment, supervised_job
        from nemo_aligner.models.nlp.gpt import megatron_gpt_knowledge_distillation as models
        from nemo_aligner.servers.teachers import RemoteTeacherClient

    job, model = experiment.start_with_model(cfg, models.GPTKnowledgeDistillationModel)
    fraction = cfg.model.knowledge_distillation.on_policy.fraction
    build_datasets = supervised_job.datasets_of_job("gpt_knowledge_distillation", cfg.model)
    loaders = supervised_job.build_dataloaders(cfg, build_datasets, model.tokenizer)
    if fraction is None:
        supervised_job.train_supervised(cfg, job, model, loaders)
        return
    length = cfg.model.encoder_seq_length
    with closing(RemoteTeacherClient(cfg.remote_teacher, model.tokenizer, length)) as teacher:
        trainer_class = partial(OnPolicyDistillationTrainer, teacher=teacher, fraction=fraction)
        supervised_job.train_supervised(cfg, job, model, loaders, trainer_class)


@job_main("compute_topk_logits")
def logits(cfg: DictConfig) -> None:
    r"""Write a teacher's largest logits at each token of the responses of a data set.

    `train distill` learns from them.

        nemo-aligner logits pretrained_checkpoint.restore_from_path=teacher.nemo \
            data.data.file_path=sft.jsonl top_k=100 output_path=with_logits.jsonl

    The data are those of supervised fine-tuning, and so are the keys below `data` (docs/data.md).
    Stopped, the same command goes on where it ended; `start_from_idx` and `end_at_idx` share the
    examples out to several jobs, each with a file of its own. docs/algorithms.md says more.
    """
    with long_imports():
        from nemo_aligner.algorithms.distillation import write_topk_logits
        from nemo_aligner.data.nlp.sft import build_sft_dataset
        from nemo_aligner.launch.experiment import fix_chat_date, start_with_teacher
        from nemo_aligner.models.nlp.gpt import megatron_gpt_knowledge_distillation as models

    model = start_with_teacher(cfg, "compute_topk_logits", models.TopKTeacherModel)
    fix_chat_date(cfg.data, None)
    dataset = build_sft_dataset(
        cfg.data.data, model.tokenizer, answer_only_loss=True, data=cfg.data
    )
    write_topk_logits(
        model,
        dataset,
        Path(cfg.output_path),
        cfg.top_k,
        first=cfg.start_from_idx or 0,
        last=cfg.end_at_idx,
    )


@job_main("training_rm")
def train_rm(cfg: DictConfig) -> None:
    r"""Train a reward model: on pairs of texts, or on texts with labels.

        nemo-aligner train rm pretrained_checkpoint.restore_from_path=sft.nemo \
            "model.data.data_prefix={train: [a.jsonl], validation: [b.jsonl], test: [c.jsonl]}"

    `model.reward_model_type=binary_ranking`, the default, reads neighbouring lines
    `{"text": ...}`, the better one first. `regression` reads lines
    `{"text": ..., "label": [number, ...]}` with `model.regression.num_attributes` numbers;
    `model.regression.loss_mask_val` stands for a number that is not known. With
    `model.regression.loss_func=scaled_bt` (or `regular_bt`, `margin_bt`) two neighbouring lines
    are a pair and the first number of their labels says which is better, and how much: below 0 the
    first.

    The model starts from a language model with a new head, whose weights follow from `model.seed`;
    with `model.regression.load_rm_head_weights=True` from a reward model with its own head;
    without `pretrained_checkpoint.restore_from_path` from random weights, and then the
    architecture must be given. The job ends with the accuracy, or the correlation with the labels,
    on data that it was not trained on.
    """
    with long_imports():
        from nemo.utils import logging

        from nemo_aligner.launch import experiment, supervised_job
        from nemo_aligner.models.nlp.gpt import megatron_gpt_reward_model as models

    base = experiment.open_base(cfg)
    model_class = models.reward_model_class(cfg.model.reward_model_type)
    model_class.check_training_config(cfg.model)
    keeps_head = cfg.model.regression.load_rm_head_weights
    job, model = experiment.start_from(base, cfg, model_class, with_new_head=not keeps_head)
    if base is not None and keeps_head and not model.has_trained_head:
        raise UserError(
            f"model.regression.load_rm_head_weights=True, but {base} is no reward model, so that "
            "it has no head to load; name a reward model in "
            "pretrained_checkpoint.restore_from_path, or set it to False for a new head."
        )
    loaders = reward_model_loaders(cfg, model.tokenizer)
    rm_trainer = supervised_job.train_supervised(cfg, job, model, loaders)
    kind = supervised.reward_model_type(cfg.model.reward_model_type)
    attributes = model.cfg.regression.num_attributes
    for name, (metrics, samples) in rm_trainer.held_out.items():
        logging.info(f"{name}: {models.held_out_text(kind, metrics, samples, attributes)}")


def reward_model_loaders(cfg: DictConfig, tokenizer: "TokenizerSpec") -> "Loaders":
    """Loaders of the data for the kind of reward model."""
    from nemo_aligner.launch.supervised_job import build_dataloaders, datasets_of_job

    return build_dataloaders(
        cfg,
        datasets_of_job("training_rm", cfg.model),
        tokenizer,
        train_random=cfg.trainer.rm.train_random_sampler,
        validation_random=cfg.trainer.rm.val_random_sampler,
        # The sizes of batches count samples, an item of such a data set is a pair of them.
        samples_per_item=2 if supervised.learns_labelled_pairs(cfg.model) else 1,
    )
