# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The dataset of a job, built by the functions that the job's script calls, on data files and the
tokenizer of a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_aligner.config.checks import check_keys
from nemo_aligner.config.defaults import complete_config, complete_model
from nemo_aligner.config.jobs import JOBS
from nemo_aligner.config.values import plain_dict, resolved
from nemo_aligner.core.errors import UserError
from nemo_aligner.core.tokenizer import Tokenizer
from nemo_aligner.data.nlp import builders
from nemo_aligner.data.nlp.chat import sft_chat_options
from nemo_aligner.data.nlp.chat_records import ASSISTANT, holds_pair
from nemo_aligner.data.nlp.file_dataset import FileDataset
from nemo_aligner.data.nlp.packing import PackedDataset
from nemo_aligner.data.nlp.records import first_record
from nemo_aligner.generate.policy import newest_weights
from nemo_aligner.generate.settings import compose_settings
from nemo_aligner.launch.model_loading import OTHER_POLICIES, load_and_override_model_config
from nemo_aligner.models.nlp.gpt.tokenizers import build_tokenizer

SFT, PPO, RM, DPO, KTO = "gpt_sft", "gpt_ppo_actor", "training_rm", "gpt_dpo", "gpt_kto"
SPIN, DISTILLATION = "gpt_spin", "gpt_knowledge_distillation"
STEERLM2 = "steerlm2"  # train_steerlm2.py, whose configuration is that of SFT
ON_POLICY = "model.knowledge_distillation.on_policy.fraction"
REWARD_MODEL_TYPE = "model.reward_model_type"


@dataclass(frozen=True)
class InspectedJob:
    """Data files as a job reads them."""

    name: str  # of the job's configuration, "gpt_sft" for example, or "steerlm2"
    files: tuple[str, ...]  # the data files
    model: Path  # whose tokenizer is used
    cfg: DictConfig  # section `model` of the job
    tokenizer: Tokenizer  # of the model
    dataset: FileDataset  # of the job


def open_job(
    files: Sequence[str], model: str, job: str | None, settings: Sequence[str]
) -> InspectedJob:
    """Build the dataset of a job on the tokenizer of a model, with `key=value` words as settings;
    `UserError`: whatever the job would raise on these files, or the job cannot be told.
    """
    settings = list(settings)
    if job is None:
        job, more = _guess(files[0])
        given = {word.partition("=")[0].lstrip("+") for word in settings}
        settings += [word for word in more if word.partition("=")[0] not in given]
    path = newest_weights(model, "--model")
    config_name = SFT if job == STEERLM2 else job
    cfg = compose_settings(config_name, settings)
    check_keys(plain_dict(cfg), config_name)
    if JOBS[config_name].records == "example":
        for part in ("train_ds", "validation_ds"):
            OmegaConf.update(cfg, f"model.data.{part}.file_path", list(files))
    else:
        OmegaConf.update(cfg, "model.data.data_prefix", {"train": list(files)}, force_add=True)
    section = resolved(complete_config(cfg, config_name))["model"]
    model_cfg = load_and_override_model_config(path, OmegaConf.create(section))
    for other in OTHER_POLICIES.get(config_name, ()):  # a section alone does not name its job
        model_cfg.pop(other, None)
    model_cfg = complete_model(model_cfg, config_name)
    tokenizer = build_tokenizer(model_cfg.tokenizer)
    dataset = _build(job, model_cfg, tokenizer)
    return InspectedJob(job, tuple(map(str, files)), path, model_cfg, tokenizer, dataset)


def _build(job: str, cfg: DictConfig, tokenizer: Any) -> FileDataset:
    """The training set of a job; see its script."""
    data, records = cfg.data, JOBS[SFT if job == STEERLM2 else job].records
    if job == STEERLM2:
        return builders.build_steerlm2_dataset(
            data.train_ds, tokenizer, special_tokens=data.chat_prompt_tokens
        )
    if records == "example":
        dataset = builders.build_sft_dataset(
            data.train_ds,
            tokenizer,
            # Of another job it may be the checkpoint's.
            answer_only_loss="model.answer_only_loss" not in JOBS[job].keys
            or cfg.answer_only_loss,
            **sft_chat_options(data),
        )
        if isinstance(dataset, PackedDataset):  # shown as the samples that the packs are made of
            return dataset.dataset
        return dataset
    build = builders.datasets_of_job(job, cfg)
    dataset, *_others = builders.build_configured_datasets(
        OmegaConf.create({"model": cfg}), build, tokenizer
    )
    return dataset


def _guess(file: str) -> tuple[str, list[str]]:
    """The job that a file's first record is for, and its settings; `UserError`: not just one."""
    record = first_record(file)
    if not record:  # none can be read: the check of all records, the same in each job, says why
        return SFT, []
    if "prompt_turns" in record and "responses" in record:
        return STEERLM2, []
    if "preference" in record or isinstance(record.get("label"), bool):
        return KTO, []
    if "label" in record:
        return RM, [f"{REWARD_MODEL_TYPE}=regression"]
    if "topk_logits" in record:
        return DISTILLATION, []
    if "prompt" in record and "response" in record:
        # Whatever the share is: the data are the same.
        return DISTILLATION, [f"{ON_POLICY}=1.0"]
    if "chosen_response" in record:  # NeMo-Aligner's name, in data of DPO alone
        return DPO, []
    if holds_pair(record):
        return RM, []
    if "output" in record:
        return SFT, []
    messages = record.get("messages") or record.get("conversations")
    if isinstance(messages, list) and isinstance(messages[-1], dict):
        role = str(messages[-1].get("role") or messages[-1].get("from")).lower()
        return (SFT if role in (ASSISTANT, "gpt") else PPO), []
    if "prompt" in record:
        return PPO, []
    raise UserError(
        f"the first record of {file} does not show which job it is for (a text may be a prompt, "
        f"or one of a pair): add --job {SFT}, {PPO}, gpt_rs_actor, "
        f"gpt_reinforce_actor, {DPO}, {KTO}, {SPIN}, {DISTILLATION}, {STEERLM2} or {RM}."
    )
