# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Keys of data sets."""

from typing import Any, Literal

from nemo_aligner.config.fields import ABSENT, Section, inert, key, section


class ChatPromptTokens(Section):
    """Special tokens of NeMo's chat format.

    system_turn_start, turn_start, label_start, end_of_turn, end_of_name: special tokens of NeMo's
        chat format
    """

    system_turn_start: str | None = key("\u0000")
    turn_start: str | None = key("\u0011")
    label_start: str | None = key("\u0012")
    end_of_turn: str | None = key("\n")
    end_of_name: str | None = key("\n")


class Chat(Section):
    """How conversations become text.

    chat_template, chat_template_kwargs, chat_date: **new**: conversations in the tokenizer's chat
        template (`tokenizer`; null: if it has one) or in that of a file, what else the template
        gets, and its date ([data](data.md))
    chat: **new** here: conversations in NeMo's chat format, and its special tokens
        (`system_turn_start`, `turn_start`, `label_start`, `end_of_turn`, `end_of_name`)
    """

    chat_template: str | None = key(None)
    chat_template_kwargs: dict | None = key(None, free=True)
    chat_date: Any = key(None)
    chat: bool = key(False)
    chat_prompt_tokens: ChatPromptTokens = section()


class Lines(Chat):
    """The data of a job that reads prompts or pairs.

    data_prefix: `{train: [files], validation: [files], test: [files]}`, of which only `train` must
        be there, or one list of files that `splits_string` divides. Files are jsonl, parquet,
        folders and more ([data](data.md)). A list of weights and files in turn, `[0.3, a.jsonl,
        0.7, b.parquet]`, blends them: an epoch has as many samples as the files together, and a
        file that is too small for its share is repeated
    columns: **new**: which columns of a file hold the fields that the job reads, `{text: prompt}`
        ([data](data.md))
    prompt_end: **new**: what the prompts of whole texts end with, `"\\n\\nAssistant:"`
        ([data](data.md#preference-pairs))
    allow_empty_prompt: **new**, not of reward models: True: an empty prompt is not refused
        ([data](data.md#checks-memory-and-the-second-start))
    index_mapping_dir: folder for what is kept of large data files for the next start; null: beside
        the data
    data_impl: or files of tokens for prompts and pairs, used as they are: `mmap` (Megatron's
        indexed datasets, a path without `.bin` and `.idx`), `packed_jsonl` (`.npy`, an array of
        arrays of tokens; NeMo-Aligner: DPO's)
    add_bos: **new**: plain texts begin with the bos token; null: as the tokenizer itself does it
        ([data](data.md))
    append_eod: **new**: of `on_policy`, whose data are tokenized: as for DPO
    splits_string: weights of training, validation and test, "98,1,1"
    seq_length: longer samples are refused or skipped
    num_workers: processes that load data
    validation_drop_last: reward model, DPO, KTO and distillation: False scores the last,
        incomplete batch too
    """

    data_prefix: Any = key(None, free=True)
    columns: Any = key(None, free=True)
    prompt_end: str | None = key(None)
    allow_empty_prompt: bool = key(False)
    index_mapping_dir: str | None = key(None)
    data_impl: str | None = key("jsonl")
    add_bos: bool | None = key(None)
    append_eod: bool = key(ABSENT)
    apply_ftfy: bool = key(ABSENT)
    splits_string: Any = key(None)
    seq_length: int = key("${model.encoder_seq_length}", at_least=2)
    num_workers: Any = key(0, required=True)
    validation_drop_last: bool = key(True)
    skip_warmup: Any = inert(True)
    dataloader_type: Any = inert(ABSENT)
    reset_position_ids: Any = inert(False)
    reset_attention_mask: Any = inert(False)
    eod_mask_loss: Any = inert(False)


class ExampleSet(Section):
    """Files of examples.

    file_path: files of `{"input": ..., "output": ...}`, or of conversations: one, a list, or a
        blend `[0.3, a.jsonl, 0.7, b.parquet]` ([data](data.md))
    columns, index_mapping_dir: as for the actors; `{input: question, output: answer}`
    max_seq_length: longer examples are truncated
    label_key, prompt_template, truncation_field, truncation_method: column of the responses; how
        the columns make the text; which column is cut, and on which side
    add_bos, add_eos, add_sep, pad_to_max_length: as in NeMo; `add_bos` is null, as for the actors
    """

    file_path: Any = key("???")
    max_seq_length: int = key("${model.encoder_seq_length}", at_least=2)
    label_key: str | None = key("output")
    add_eos: bool = key(True)
    add_sep: bool = key(False)
    add_bos: bool | None = key(None)
    truncation_field: str | None = key("input")
    truncation_method: Literal["left", "right"] | None = key("right")
    prompt_template: str | None = key("{input} {output}")
    pad_to_max_length: bool = key(ABSENT)
    columns: Any = key("${model.data.columns}", free=True)
    index_mapping_dir: str | None = key(None)
    hf_dataset: Any = inert(False)
    memmap_workers: Any = inert(None)
    min_seq_length: Any = inert(1)


class ShuffledSet(ExampleSet):
    """Files that a job trains on.

    shuffle, drop_last: shuffle the examples; leave out the last, incomplete batch
    """

    shuffle: bool = key(True)
    drop_last: bool = key(True)
    output_original_text: Any = inert(ABSENT)


class SizedSet(ShuffledSet):
    """Files with batch sizes of their own.

    global_batch_size, micro_batch_size: they are the model's batch sizes
    """

    global_batch_size: int | None = key(128, at_least=1)
    micro_batch_size: int | None = key(1, at_least=1)


class PackedSet(SizedSet):
    """Files of SFT.

    packed_sequence: True: several examples in one sequence ([data](data.md)). NeMo-Aligner: files
        that were packed beforehand
    """

    packed_sequence: bool = key(False)


class ExampleChat(Chat):
    """Conversations that end with a response.

    one_turn_per_sample: conversations: a chat template (**new**), also of SPIN with a sample for
        each turn, or NeMo's chat format ([data](data.md))
    allow_empty_prompt: as for the actors
    """

    one_turn_per_sample: bool = key(False)
    allow_empty_prompt: bool = key(False)
    sample: Any = inert(False)
    dataloader_type: Any = inert("single")


class Examples(ExampleChat):
    """What the data of SFT and SPIN have in common.

    num_workers: processes that load data
    columns: as for the actors; `{input: question, output: answer}`
    """

    num_workers: Any = key(0, required=True)
    columns: Any = key(None, free=True)
    reset_position_ids: Any = inert(ABSENT)
    reset_attention_mask: Any = inert(ABSENT)
    eod_mask_loss: Any = inert(ABSENT)
