# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""From the configuration to datasets and data loaders; the samples themselves are in
`datasets.py`.
"""

from functools import partial

import numpy as np
import torch
from nemo.utils import logging

from nemo_aligner.core.errors import ConfigError
from nemo_aligner.data.nlp.datasets import (
    DEFAULT_MASK_VALUE,
    RegressionRewardModelDataset,
    RewardModelDataset,
    RLHFDataset,
    SFTDataset,
)
from nemo_aligner.data.nlp.samplers import (
    MegatronPretrainingBatchSampler,
    MegatronPretrainingRandomBatchSampler,
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
)
from nemo_aligner.parallel import parallel_state


def _make_rlhf_dataset(paths, cfg, tokenizer, seq_length: int, name: str) -> RLHFDataset:
    """Prompts of at most `seq_length - length_params.max_length` tokens, so that the longest
    answer still fits.
    """
    limit, reason = seq_length // 2, "half of it, as there is no length_params.max_length"
    for key, section in {
        "model.": cfg,
        "model.rs.": cfg.get("rs"),
        "model.ppo.": cfg.get("ppo"),
    }.items():
        max_length = ((section or {}).get("length_params") or {}).get("max_length")
        if max_length is not None:
            limit, reason = (
                seq_length - max_length,
                f"less {key}length_params.max_length={max_length}",
            )
    text = f"{limit} tokens (model.data.seq_length={seq_length}, {reason})"
    if limit <= 0:
        raise ConfigError(
            f"no room for prompts: the limit is {text}. Lower length_params.max_length."
        )
    return RLHFDataset(paths, tokenizer, limit, cfg.get("data"), name, limit_text=text)


def _make_rm_dataset(paths, cfg, tokenizer, seq_length: int, name: str) -> RewardModelDataset:
    return RewardModelDataset(paths, tokenizer, seq_length, cfg.get("data"), name)


def _make_regression_rm_dataset(
    paths, cfg, tokenizer, seq_length: int, name: str
) -> RegressionRewardModelDataset:
    regression = cfg.get("regression") or {}
    mask_value = regression.get("loss_mask_val")
    return RegressionRewardModelDataset(
        paths,
        tokenizer,
        seq_length,
        num_attributes=regression.get("num_attributes") or 1,
        mask_value=DEFAULT_MASK_VALUE if mask_value is None else mask_value,
        data_cfg=cfg.get("data"),
        name=name,
    )


def build_train_valid_test_datasets(
    cls,
    cfg,
    data_prefix,
    data_impl,
    splits_string,
    train_valid_test_num_samples,
    seq_length,
    seed,
    tokenizer,
    n_chunks=None,
    n_examples_per_chunk=None,
):
    """(train, validation, test) datasets.

    Args:
        cls: makes one dataset: `cls(paths=, cfg=, tokenizer=, seq_length=, name=)`.
        cfg: `model` section.
        data_prefix: mapping with the files (one path or a list) of `train`, `validation` and
            `test`, each optional; or one path or list that `splits_string` divides.
        data_impl: "jsonl" (or "json"); the binary formats of NeMo are refused.
        splits_string: weights of the three parts of one common file list, for example "98,1,1";
        parts are contiguous.
        train_valid_test_num_samples: at most so many samples of each; below 1 means all.
        seq_length: `model.data.seq_length`.
        tokenizer: NeMo tokenizer.
        seed, n_chunks, n_examples_per_chunk: accepted and not used (samplers shuffle; there are no
        chunks).

    Returns:
        One entry is None where there are no files. With further keys `validation_<name>`, the
        validation entry is a dict from key to dataset.
    """
    if not str(data_impl).startswith("json"):
        raise ConfigError(
            f"model.data.data_impl={data_impl}: only jsonl is supported. Convert the data to "
            "jsonl files."
        )
    if data_prefix is None or not len(data_prefix):
        raise ConfigError(
            "model.data.data_prefix is not set: give {train: [file.jsonl], validation: "
            "[file.jsonl]}."
        )
    limits = dict(zip(("train", "validation", "test"), train_valid_test_num_samples, strict=True))
    make = partial(cls, cfg=cfg, tokenizer=tokenizer, seq_length=seq_length)

    if not hasattr(data_prefix, "keys"):
        paths = _paths(data_prefix, "model.data.data_prefix")
        if splits_string is None:
            raise ConfigError(
                f"model.data.data_prefix={data_prefix} names files for all of training, "
                "validation and test: say how"
                " to"
                ' divide them with model.data.splits_string="98,1,1", or give separate files: '
                f"{{train: [...],"
                f" validation: [...]}}."
            )
        whole = make(paths=paths, name="all")
        bounds = _split(len(whole), str(splits_string))
        parts = [
            whole.documents[start:stop] for start, stop in zip(bounds, bounds[1:], strict=False)
        ]
        datasets = [whole.select(part) if len(part) else None for part in parts]
        for dataset, name in zip(datasets, limits, strict=True):
            if dataset is not None:
                dataset.name = name
        return tuple(
            _limit(dataset, limits[name]) for dataset, name in zip(datasets, limits, strict=True)
        )

    if splits_string is not None:
        logging.warning(
            "model.data.splits_string has no effect: model.data.data_prefix names the files of "
            "each part."
        )
    unknown = [
        key for key in data_prefix.keys() if key not in limits and not key.startswith("validation")
    ]
    if unknown or not data_prefix.get("train"):
        raise ConfigError(
            f"model.data.data_prefix has the keys {', '.join(data_prefix.keys())}: it needs "
            "train, and may have"
            f" validation, validation_<name> and test."
        )
    built = {}
    for key, paths in data_prefix.items():
        if paths is not None and len(paths):
            dataset = make(paths=_paths(paths, f"model.data.data_prefix.{key}"), name=key)
            built[key] = _limit(dataset, limits[key] if key in limits else limits["validation"])
    validation = {key: dataset for key, dataset in built.items() if key.startswith("validation")}
    if set(validation) <= {"validation"}:
        validation = validation.get("validation")
    return built["train"], validation, built.get("test")


build_train_valid_test_rlhf_datasets = partial(build_train_valid_test_datasets, _make_rlhf_dataset)
build_train_valid_test_rm_datasets = partial(build_train_valid_test_datasets, _make_rm_dataset)
build_train_valid_test_regression_rm_datasets = partial(
    build_train_valid_test_datasets, _make_regression_rm_dataset
)


def the_validation_prompts(validation):
    """The one validation set that a PPO or RS job uses, of what
    `build_train_valid_test_rlhf_datasets` returns.

    Raises:
        ConfigError: there is none, or there are several.
    """
    if validation is None or isinstance(validation, dict):
        have = (
            "no validation files"
            if validation is None
            else f"several validation sets ({', '.join(validation)})"
        )
        raise ConfigError(
            f"model.data.data_prefix has {have}, but rollouts are validated on one: give "
            f"{{train: [file.jsonl],"
            " validation: [file.jsonl]}."
        )
    return validation


def check_pad_to_length(cfg, remote: str, section: str, datasets) -> None:
    """Refuse requests to a server that are too narrow for the longest rollout, before the first
    one is generated.

    Args:
        cfg: whole configuration; `<remote>.pad_to_length` and
            `model.<section>.length_params.max_length` are read.
        remote: "remote_rm" or "remote_critic_rm".
        section: "ppo" or "rs".
        datasets: `RLHFDataset`s whose prompts are answered. Texts are read only where their
        lengths are in doubt.

    Raises:
        ConfigError: with the longest prompt and a value that would do.
    """
    pad_to_length, max_length = (
        cfg[remote].get("pad_to_length"),
        cfg.model[section].length_params.max_length,
    )
    if pad_to_length is None:
        return
    longest, name = max(
        (_longest_prompt(dataset, pad_to_length - max_length), dataset.name)
        for dataset in datasets
    )
    if longest + max_length > pad_to_length:
        raise ConfigError(
            f"{remote}.pad_to_length={pad_to_length} is too small: the longest prompt of the "
            f"{name} data has"
            f" {longest} tokens, and model.{section}.length_params.max_length={max_length} more "
            "may be generated. Set"
            f" {remote}.pad_to_length to {longest + max_length} or more (or to null), shorten the "
            "prompts, or lower"
            " max_length."
        )


def _longest_prompt(dataset: RLHFDataset, enough: int) -> int:
    """Tokens of the longest prompt that is answered; if no prompt has more than `enough`, perhaps
    less than that.
    """
    if dataset.max_prompt_length <= enough:
        return 0
    bounds = dataset.lines.notes[
        dataset.documents
    ]  # never below the length, see `_TextEncoder.length`
    in_doubt = dataset.documents[(bounds > enough) & (bounds <= dataset.max_prompt_length)]
    longest = 0
    for document in sorted(in_doubt, key=lambda document: -dataset.lines.notes[document]):
        if dataset.lines.notes[document] <= longest:
            break
        longest = max(longest, len(dataset.encode(dataset.lines[document]["text"])))
    return longest


def build_sft_dataset(
    data_cfg, tokenizer, num_samples=None, answer_only_loss=True, is_chat=True, special_tokens=None
):
    """The dataset of `model.data.train_ds` or `validation_ds`: prompt-response jsonl.

    Args:
        data_cfg: `file_path` (one or a list), `max_seq_length`, `prompt_template`, `label_key`,
            `truncation_field`, `truncation_method`, `add_bos`, `add_eos`, `pad_to_max_length`.
        tokenizer: NeMo tokenizer.
        num_samples: use at most so many samples; None or below 1 means all.
        answer_only_loss: train on the answer only, not on the prompt.
        is_chat, special_tokens: chat data (`model.data.chat=True`) is refused.
    """
    if is_chat:
        raise ConfigError(
            "model.data.chat=True: chat data is not supported. Write each conversation as a "
            "prompt and a response"
            ' ({"input": ..., "output": ...}) and set model.data.chat=False.'
        )
    for key in ("hf_dataset", "add_sep"):
        if data_cfg.get(key, False):
            raise ConfigError(
                f"{key}=True in the SFT data section is not supported. Set it to False."
            )
    dataset = SFTDataset(
        _paths(data_cfg.get("file_path"), "file_path in the SFT data section"),
        tokenizer,
        max_seq_length=data_cfg["max_seq_length"],
        prompt_template=data_cfg.get("prompt_template", "{input} {output}"),
        label_key=data_cfg.get("label_key", "output"),
        truncation_field=data_cfg.get("truncation_field", "input"),
        truncation_method=data_cfg.get("truncation_method", "right"),
        add_bos=bool(data_cfg.get("add_bos", False)),
        add_eos=bool(data_cfg.get("add_eos", True)),
        answer_only_loss=answer_only_loss,
        pad_to_max_length=bool(data_cfg.get("pad_to_max_length", False)),
    )
    return _limit(dataset, num_samples)


def _paths(value, key: str) -> list[str]:
    """File names from one name or a list of them; NeMo's blending weights among them are
    refused.
    """
    paths = [value] if isinstance(value, str) else list(value or [])
    if not paths:
        raise ConfigError(f"{key} is not set: give a jsonl file or a list of them.")
    for path in paths:
        try:
            float(path)
        except (TypeError, ValueError):
            continue
        raise ConfigError(
            f"{key} holds the number {path}: files are used one after the other, blending weights "
            "are not supported."
            f" Leave the weights out; name a file twice to give it twice the weight."
        )
    return [str(path) for path in paths]


def _split(size: int, splits_string: str) -> list[int]:
    """Four bounds that cut range(size) in three parts in proportion to "98,1,1" (or "98/1/1";
    missing parts are 0).
    """
    try:
        weights = [float(part) for part in splits_string.replace("/", ",").split(",")]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= 3 or min(weights) < 0 or sum(weights) <= 0:
        raise ConfigError(
            f"model.data.splits_string={splits_string!r}: three weights are needed, for example "
            '"98,1,1".'
        )
    weights += [0.0] * (3 - len(weights))
    return [round(size * total / sum(weights)) for total in np.cumsum([0.0, *weights])]


def _limit(dataset, num_samples):
    """The first `num_samples` of a dataset (None or below 1: all of it)."""
    if dataset is None or num_samples is None or num_samples < 1 or num_samples >= len(dataset):
        return dataset
    return dataset.select(dataset.documents[:num_samples])


def collate_with_batch_max_sequence_length(
    data_batch,
    response_token_length,
    eos_id,
    reset_position_ids=False,
    reset_attention_mask=False,
    eod_mask_loss=False,
    generate_masks_and_position_ids=True,
) -> dict:
    """Collate prompts: pad with eos on the right to the longest prompt plus room for the response.

    Args:
        data_batch: b items of `RLHFDataset`.
        response_token_length: columns added for the response.
        eos_id: padding.
        reset_position_ids, reset_attention_mask, eod_mask_loss: accepted and not used (a row holds
            one document).
        generate_masks_and_position_ids: also give `attention_mask` bool [1, 1, S, S] (True: must
            not see), `position_ids` [b, S] and `loss_mask` f32 [b, S].

    Returns:
        `text` int64 [b, S], `length`, `idx` int64 [b], `loss_multiplier` f32 [b].
    """
    texts = [item["text"] for item in data_batch]
    width = max(map(len, texts)) + response_token_length
    batch = {
        "text": torch.stack(
            [torch.nn.functional.pad(text, (0, width - len(text)), value=eos_id) for text in texts]
        ),
        **{
            key: torch.stack([item[key] for item in data_batch])
            for key in ("length", "loss_multiplier", "idx")
        },
    }
    if generate_masks_and_position_ids:
        batch["attention_mask"] = torch.ones(width, width, dtype=torch.bool).triu(1)[None, None]
        batch["position_ids"] = torch.arange(width).repeat(len(texts), 1)
        batch["loss_mask"] = batch["loss_multiplier"][:, None].repeat(1, width)
    return batch


def collate_with_pad_to_max_batch(
    max_seqlen, tokenizer_eos_id, cfg, generate_masks_and_position_ids=True
):
    """`collate_with_batch_max_sequence_length` with the settings of a whole configuration
    `cfg`.
    """
    data_cfg = cfg.model.data
    return partial(
        collate_with_batch_max_sequence_length,
        response_token_length=max_seqlen,
        eos_id=tokenizer_eos_id,
        reset_position_ids=data_cfg.get("reset_position_ids", False),
        reset_attention_mask=data_cfg.get("reset_attention_mask", False),
        eod_mask_loss=data_cfg.get("eod_mask_loss", False),
        generate_masks_and_position_ids=generate_masks_and_position_ids,
    )


def identity_collate(batch):
    """Leaves a list of items as it is."""
    return batch


def build_dataloader(
    cfg,
    dataset,
    consumed_samples,
    mbs,
    gbs,
    drop_last=True,
    pad_samples_to_global_batch_size=False,
    collate_fn=None,
    load_gbs=True,
    use_random_sampler=True,
):
    """A data loader for this data-parallel rank that goes on after `consumed_samples`.

    Args:
        cfg: whole configuration; `model.seed` and `model.data.num_workers` are read.
        mbs, gbs: micro-batch size, and global batch size over all ranks.
        load_gbs: batches are this rank's share of a global batch, else micro-batches.
        use_random_sampler: shuffle, a new permutation in each epoch.
        drop_last, pad_samples_to_global_batch_size: see `samplers.py`.
    """
    sampler_cls = {
        (True, True): MegatronPretrainingRandomBatchSampler,
        (True, False): MegatronPretrainingRandomSampler,
        (False, True): MegatronPretrainingBatchSampler,
        (False, False): MegatronPretrainingSampler,
    }[bool(use_random_sampler), bool(load_gbs)]
    batch_sampler = sampler_cls(
        total_samples=len(dataset),
        consumed_samples=consumed_samples,
        micro_batch_size=mbs,
        global_batch_size=gbs,
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        drop_last=drop_last,
        pad_samples_to_global_batch_size=pad_samples_to_global_batch_size,
        seed=cfg.model.get("seed", 1234),
    )
    return torch.utils.data.DataLoader(
        dataset,
        batch_sampler=batch_sampler,
        num_workers=cfg.model.data.get("num_workers", 0),
        pin_memory=torch.cuda.is_available(),
        collate_fn=collate_fn,
        # Each new iterator of a loader draws a seed: from here, and not from the generator that
        # the training depends on.
        generator=torch.Generator().manual_seed(cfg.model.get("seed", 1234)),
    )
