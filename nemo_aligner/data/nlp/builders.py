# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The data sets of each job, at NeMo-Aligner's module path."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from omegaconf import DictConfig

from nemo_aligner.config.defaults import complete
from nemo_aligner.config.inert_keys import check_later
from nemo_aligner.config.jobs import JOBS
from nemo_aligner.config.jobs.reward_model import (
    RewardModelType,
    learns_labelled_pairs,
    reward_model_type,
)
from nemo_aligner.config.values import Values
from nemo_aligner.core.retired import retired_names
from nemo_aligner.core.tokenizer import Tokenizer
from nemo_aligner.data.nlp import loading, prompts
from nemo_aligner.data.nlp.chat import begins_with_conversation, chat_form, say_default
from nemo_aligner.data.nlp.data_files import data_paths
from nemo_aligner.data.nlp.datasets import (
    DPOModelDataset,
    KTOModelDataset,
    LabelledPairDataset,
    RegressionRewardModelDataset,
    ResponseDataset,
    RewardModelDataset,
)
from nemo_aligner.data.nlp.file_dataset import FileDataset
from nemo_aligner.data.nlp.loading import Datasets, blended, build_train_valid_test_datasets
from nemo_aligner.data.nlp.packing import PackedDataset
from nemo_aligner.data.nlp.prompts import RLHFDataset
from nemo_aligner.data.nlp.sft import SFTChatDataset, SFTDataset
from nemo_aligner.data.nlp.steerlm import SteerLM2Dataset
from nemo_aligner.data.nlp.topk_logits import KnowledgeDistillationDataset

build_dataloader = loading.build_dataloader
build_dataset_generic = loading.build_dataset_generic
collate_with_batch_max_sequence_length = prompts.collate_with_batch_max_sequence_length
collate_with_pad_to_max_batch = prompts.collate_with_pad_to_max_batch
identity_collate = prompts.identity_collate

build_train_valid_test_rlhf_datasets = partial(build_train_valid_test_datasets, RLHFDataset)
build_train_valid_test_rm_datasets = partial(build_train_valid_test_datasets, RewardModelDataset)
build_train_valid_test_dpo_datasets = partial(build_train_valid_test_datasets, DPOModelDataset)
build_train_valid_test_kto_datasets = partial(build_train_valid_test_datasets, KTOModelDataset)
build_train_valid_test_regression_rm_datasets = partial(
    build_train_valid_test_datasets, RegressionRewardModelDataset
)
build_train_valid_test_knowledge_distillation_datasets = partial(
    build_train_valid_test_datasets, KnowledgeDistillationDataset
)


def datasets_of_job(config_name: str, model: DictConfig) -> Callable[..., Datasets]:
    """What builds the datasets of a job that reads `model.data.data_prefix`."""
    records = JOBS[config_name].records
    cls: type[FileDataset] = RewardModelDataset
    if records == "logits":
        on_policy = model.knowledge_distillation.on_policy.fraction is not None
        cls = ResponseDataset if on_policy else KnowledgeDistillationDataset
        return partial(build_train_valid_test_datasets, cls, n_chunks=model.data.n_chunks)
    if records != "scored":
        kinds: dict[str, type[FileDataset]] = {
            "prompt": RLHFDataset,
            "pair": DPOModelDataset,
            "labelled": KTOModelDataset,
        }
        cls = kinds[records]
    elif learns_labelled_pairs(model):
        cls = LabelledPairDataset
    elif reward_model_type(model.reward_model_type) is RewardModelType.REGRESSION:
        cls = RegressionRewardModelDataset
    return partial(build_train_valid_test_datasets, cls)


def build_sft_dataset(
    data_cfg: DictConfig,
    tokenizer: Tokenizer,
    num_samples: int | None = None,
    answer_only_loss: bool = True,
    is_chat: bool = True,
    special_tokens: Mapping[str, str] | None = None,
    model_cfg: DictConfig | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    one_turn_per_sample: bool = False,
    chat_date: str | None = None,
    allow_empty_prompt: bool | None = False,
) -> SFTDataset | SFTChatDataset | PackedDataset:
    """Build the dataset of `model.data.train_ds` or `validation_ds`: prompts with their responses,
    or conversations. `ConfigError`: no files, or something that is not supported. Arguments that
    are not listed are keys of `model.data`; `model_cfg` is not needed.

    Args:
        data_cfg: `file_path` (one, a list, or weights and files in turn: a blend),
            `max_seq_length`, and optionally the other keys of that section.
        num_samples: use at most so many samples; None or below 1 means all.
        is_chat, special_tokens: `model.data.chat` and `chat_prompt_tokens` (None: NeMo's).
    """
    section = {key: data_cfg.get(key) for key in data_cfg}
    check_later(Values({"model": {"data": {"train_ds": section}}}), "gpt_sft")
    paths, weights = data_paths(data_cfg.get("file_path"), "file_path in the SFT data section")
    data_cfg = complete(data_cfg, "gpt_sft", "model.data.train_ds")
    chat = {
        "chat": is_chat,
        "chat_prompt_tokens": special_tokens,
        "chat_template": chat_template,
        "chat_template_kwargs": chat_template_kwargs,
        "chat_date": chat_date,
        "one_turn_per_sample": one_turn_per_sample,
    }
    form = chat_form(chat, tokenizer)
    if form is not None and form.default:
        if begins_with_conversation(paths[0], data_cfg):
            say_default(form.default)
        else:
            form = None
    options: dict[str, Any] = {
        "max_seq_length": data_cfg.max_seq_length,
        "answer_only_loss": answer_only_loss,
        "pad_to_max_length": bool(data_cfg.get("pad_to_max_length")),
        "data_cfg": data_cfg,
        "allow_empty_prompt": bool(allow_empty_prompt),
    }
    if form is not None:
        options["one_turn_per_sample"] = one_turn_per_sample
        dataset: Any = SFTChatDataset(paths, tokenizer, form, **options)
    else:
        names = "prompt_template label_key truncation_field truncation_method add_bos add_eos"
        options |= {name: data_cfg[name] for name in names.split()}
        keep_lengths = bool(data_cfg.packed_sequence)
        dataset = SFTDataset(paths, tokenizer, keep_lengths=keep_lengths, **options)
    dataset = blended(dataset, weights, num_samples)
    return PackedDataset(dataset) if data_cfg.packed_sequence else dataset


def build_steerlm2_dataset(
    data_cfg: DictConfig,
    tokenizer: Tokenizer,
    num_samples: int | None = None,
    special_tokens: Mapping[str, str] | None = None,
) -> SteerLM2Dataset:
    """Build the dataset of a section of SteerLM 2.0; arguments as for `build_sft_dataset`."""
    paths, weights = data_paths(data_cfg.get("file_path"), "file_path in the SFT data section")
    data_cfg = complete(data_cfg, "gpt_sft", "model.data.train_ds")
    length, is_padded = data_cfg.max_seq_length, bool(data_cfg.get("pad_to_max_length"))
    dataset = SteerLM2Dataset(
        paths, tokenizer, length, special_tokens, is_padded, data_cfg=data_cfg
    )
    return blended(dataset, weights, num_samples)


__getattr__ = retired_names(__name__)
