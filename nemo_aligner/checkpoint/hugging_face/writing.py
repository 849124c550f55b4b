# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A model written as a Hugging Face folder: configuration, tokenizer, and tensor by tensor."""

import collections
import functools
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import split_state_dict_into_shards_factory
from nemo.utils import logging
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from nemo_aligner.checkpoint import stored_weights
from nemo_aligner.checkpoint.folders import WRITING_SUFFIX, replaced_folder
from nemo_aligner.checkpoint.forms import HF_CONFIG, PEFT_CONFIG
from nemo_aligner.checkpoint.hugging_face import architecture as hf
from nemo_aligner.checkpoint.hugging_face import reading
from nemo_aligner.checkpoint.hugging_face.architectures import ARCHITECTURES, expressing
from nemo_aligner.checkpoint.stored_weights import Slice, TensorSource
from nemo_aligner.config.data_rules import KEPT_FORM
from nemo_aligner.config.defaults import complete_model
from nemo_aligner.config.values import plain_dict
from nemo_aligner.core.errors import UserError
from nemo_aligner.core.tokenizer import PADDING

SHARD_BYTES = 5_000_000_000  # of a file, as in transformers


@dataclass(frozen=True)
class Written:
    """Tensors of Hugging Face that come from `part` of Megatron Core's tensor `key`."""

    key: str
    part: Slice
    runs: Sequence[hf.Run]
    transposed: bool
    shapes: Mapping[str, tuple[int, ...]]  # of the tensors of Hugging Face, by their names
    dtype: torch.dtype  # of all of them

    def sizes(self) -> dict[str, int]:
        return {
            name: torch.Size(shape).numel() * self.dtype.itemsize
            for name, shape in self.shapes.items()
        }

    def size(self) -> int:
        return sum(self.sizes().values())

    def read(self, source: TensorSource) -> Iterator[Tensor]:
        stored = source.read(self.key, self.part)
        result = {
            name: torch.zeros(shape[::-1] if self.transposed else shape, dtype=self.dtype)
            for name, shape in self.shapes.items()
        }
        hf.spread(self.runs, stored, result)
        return (t.T.contiguous() if self.transposed else t for t in result.values())


def plan(
    source: TensorSource,
    layout: hf.Layout,
    vocab_rows: int,
    dtype: torch.dtype | None,
    leave_out: Sequence[str],
) -> list[Written]:
    """What a folder will hold: the embedding, the layers, the rest; `Unsupported`: a weight has no
    name there.

    Args:
        vocab_rows: rows of the tables without padding; those not in the source are zeros.
        dtype: to convert to; None: as stored.
        leave_out: names of weights after `model.` that are not written.
    """
    result, shapes = [], source.shapes()
    dtype_of = functools.cache(lambda key: dtype or stored_weights.stored_dtype(source, key))
    for key, index in sorted(stored_weights.pieces(source), key=_order):
        name, shape = key.removeprefix(hf.PREFIX), shapes[key][len(index) :]
        if name in leave_out:
            continue
        rule = layout.rule(key, index)
        if rule is None:
            raise hf.Unsupported(
                f"{layout.architecture.model_type} has no weight for {name}; the model would "
                "compute something else."
            )
        rest = shape
        if key in hf.TABLES:
            rest = (vocab_rows, *rest[1:])
        part: Slice = (*index, *map(functools.partial(slice, 0), map(min, rest, shape)))
        runs, theirs = rule.runs(rest[0], layout.heads), rule.shapes(rest, layout.heads)
        transposed = rule.transposed and len(rest) > 1
        result.append(Written(key, part, runs, transposed, theirs, dtype_of(key)))
    return result


def _order(piece: tuple[str, tuple[int, ...]]) -> tuple[int, int, tuple[int, ...], str]:
    key, index = piece
    stacked, (name, layer) = stored_weights.is_stacked(key), stored_weights.unnumbered(key)
    if stacked:
        (layer, *_), index = index, index[1:]
    place = 0 if key.startswith(hf.PREFIX + "embedding") else 2
    return (place, 0, (), key) if layer is None else (1, layer, index, name)


def write_tensors(
    folder: Path,
    source: TensorSource,
    items: Sequence[Written],
    shard_bytes: int,
    progress: Callable[[int], None],
) -> None:
    """Write `model.safetensors`, or numbered files of at most `shard_bytes` (a larger tensor has
    its own) and their index; `progress` gets the number of bytes just written.
    """
    split = split_state_dict_into_shards_factory(
        {str(number): item for number, item in enumerate(items)},
        get_storage_size=Written.size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    weight_map: dict[str, str] = {}
    for name, numbers in split.filename_to_tensors.items():
        shard = [items[int(number)] for number in numbers]
        weight_map |= {tensor: name for item in shard for tensor in item.shapes}
        # The library's writer needs all tensors at once; a file is a length, JSON and the bytes.
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for item in shard:
            for tensor, size in item.sizes().items():
                header[tensor] = {
                    "dtype": reading.DTYPES[item.dtype],
                    "shape": list(item.shapes[tensor]),
                    "data_offsets": [end, end + size],
                }
                end += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # aligned, as the format asks for
        with open(folder / name, "wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            for item in shard:
                for values in item.read(source):
                    stream.write(values.view(-1).view(torch.uint8).numpy().data)
                    progress(values.nbytes)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": weight_map}
        (folder / reading.INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


# transformers 5 writes the one and reads both; 4 knows the other.
_DTYPE_KEYS = ("dtype", "torch_dtype")


def describe(
    section: DictConfig, model_type: str | None = None
) -> tuple[hf.Architecture, dict[str, Any], dict[str, Any]]:
    """The architecture that a model is written as (`model_type`; None: the one that the model came
    from, else the first that can express it), the keys of `config.json` that say what it computes,
    and the complete keys of the model; `UserError`: it is not known, or cannot express the model.
    """
    keys = plain_dict(complete_model(section), resolve=True)
    origin = keys.get(reading.ORIGIN) or {}
    model_type = model_type or origin.get("model_type")
    if keys["position_embedding_type"] != "learned_absolute":
        # Of a job it is `encoder_seq_length`, on which no weight depends.
        positions = origin.get("max_position_embeddings")
        keys["max_position_embeddings"] = positions or keys["max_position_embeddings"]
    if model_type is None:
        return *next(expressing(keys)), keys
    if model_type not in ARCHITECTURES:
        raise UserError(
            f"the architecture {model_type!r} is not known; what is: "
            f"{', '.join(sorted(ARCHITECTURES))}."
        )
    architecture = ARCHITECTURES[model_type]
    return architecture, hf.hugging_face_config(architecture, keys), keys


def check(section: DictConfig, has_head: bool) -> None:
    """`UserError`, with the keys, if a model cannot be written; called before it is trained."""
    architecture, _config, keys = describe(section)
    _check_head(keys)
    if has_head:
        architecture.class_for(hf.PER_TOKEN if keys["output_sequence"] else hf.PER_SAMPLE)


def write_folder(
    target: Path,
    source: TensorSource,
    section: DictConfig,
    vocab_rows: int,
    *,
    model_type: str | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    drop_head_bias: bool = False,
    progress: Callable[[int, int], None] = lambda _written, _total: None,
) -> None:
    """Write a Hugging Face folder, which is there when complete, or not at all; in one process.

    Args:
        vocab_rows: rows of the tables without padding.
        shard_bytes: largest size of a file of weights.
        drop_head_bias: leave out the bias of a reward model's head, which has no place there.
        progress: called with the bytes just written and those of all.

    Raises:
        UserError: Hugging Face cannot express the model, or the source is damaged.
    """
    architecture, config, keys = describe(section, model_type)
    role, skipped = role_of(keys, source, drop_head_bias)
    config = _as_it_came(architecture, config, keys) | _head_config(role, keys)
    config["architectures"] = [architecture.class_for(role)]
    generation = config.pop(reading.GENERATION, None)
    with replaced_folder(target) as folder:
        copy_tokenizer(section, folder)
        write_json(folder / HF_CONFIG, config)  # the class of a tokenizer may stand there
        if role == hf.PER_SAMPLE:
            config["pad_token_id"] = _set_padding(folder, config, keys)
            vocab_rows = max(vocab_rows, (config["pad_token_id"] or 0) + 1)
        layout = hf.Layout(architecture, keys)
        items = plan(source, layout, vocab_rows, dtype, skipped)
        bytes_of: collections.Counter[torch.dtype] = collections.Counter()
        for item in items:
            bytes_of[item.dtype] += item.size()
        total = bytes_of.total()
        write_tensors(folder, source, items, shard_bytes, lambda size: progress(size, total))
        # A head may be float32 in a bfloat16 model.
        main_dtype = str(bytes_of.most_common(1)[0][0]).removeprefix("torch.")
        config |= {"vocab_size": vocab_rows, **dict.fromkeys(_DTYPE_KEYS, main_dtype)}
        write_json(folder / HF_CONFIG, config)
        if generation is not None:
            write_json(folder / reading.GENERATION_FILE, generation)
        if role == hf.CAUSAL_LM:
            _write_end_tokens(folder, config, keys["tokenizer"].get("end_token_ids"))


def _check_head(keys: Mapping[str, Any]) -> None:
    """`Unsupported` where a head computes what Hugging Face's does not."""
    regression = keys["regression"]
    weights = list(regression["attribute_weights"] or ())
    # The weighted sum of one number is the number.
    sums = regression["num_attributes"] > 1 or weights not in ([], [1])
    for key, is_used in (
        ("use_avg_pool", keys["use_avg_pool"]),
        ("reward_standardization.enable", keys["reward_standardization"]["enable"]),
        ("regression.merge_attributes", regression["merge_attributes"] and sums),
    ):
        if is_used:
            raise hf.Unsupported(
                f"Hugging Face's reward models cannot express model.{key}=True; the rewards would "
                "change."
            )


def role_of(
    keys: Mapping[str, Any], weights: TensorSource, drop_head_bias: bool
) -> tuple[str, Sequence[str]]:
    """What the model is for, and weights without a place there; `Unsupported`: it would change."""
    if hf.HEAD_KEY + "weight" not in weights.shapes():
        return hf.CAUSAL_LM, ()
    _check_head(keys)
    if keys["output_sequence"]:
        return hf.PER_TOKEN, ()
    bias = head_bias(weights)
    if any(bias or ()) and not drop_head_bias:
        raise hf.Unsupported(
            f"the head of the reward model has the bias {bias}, for which Hugging Face's "
            "has no place: all rewards would shift by it. Leave it out with --drop-head-bias."
        )
    return hf.PER_SAMPLE, (hf.HEAD + "bias",)


def head_bias(source: TensorSource) -> list[float] | None:
    """The bias of a reward model's or critic's head; None: there is none."""
    key = hf.HEAD_KEY + "bias"
    return stored_weights.whole_tensor(source, key).tolist() if key in source.shapes() else None


def _head_config(role: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    if role == hf.CAUSAL_LM:
        return {}
    count = keys["regression"]["num_attributes"]
    if len((keys.get(reading.ORIGIN) or {}).get("id2label") or ()) == count:
        return {}  # the names that the model came with
    names = [f"LABEL_{label}" for label in range(count)]
    return {
        "id2label": {str(label): name for label, name in enumerate(names)},
        "label2id": {name: label for label, name in enumerate(names)},
    }


def _as_it_came(
    architecture: hf.Architecture, config: dict[str, Any], keys: Mapping[str, Any]
) -> dict[str, Any]:
    """`config` with all that stays as it was in the folder that the model came from."""
    origin: dict[str, Any] = dict(keys.get(reading.ORIGIN) or {})
    came_as = ARCHITECTURES.get(origin.get("model_type", ""), architecture)
    read = hf.keys_read(came_as)
    whole = "model_type" in origin and read & origin.keys()
    if came_as is not architecture or not whole:
        return {name: value for name, value in origin.items() if name not in read} | config
    before = complete_model(hf.model_keys(architecture, hf.as_class_reads(origin), {}))
    written = hf.hugging_face_config(architecture, plain_dict(before, resolve=True))
    changed = {name: value for name, value in config.items() if written.get(name, ...) != value}
    kept = {name: origin[name] for name in origin if name in config or name not in written}
    return config | kept | changed


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _set_padding(folder: Path, config: Mapping[str, Any], keys: Mapping[str, Any]) -> int | None:
    """The token with which transformers may pad samples of the reward model in `folder`, and its
    tokenizer then does; None and a warning without a tokenizer.

    transformers takes the reward at the last token that is not this one: so it is
    `model.pad_token_id`, or one that ends no sample: the tokenizer's, one named so, or a new one.
    """
    own, tokenizer = keys.get("pad_token_id"), _tokenizer_in(folder)
    if tokenizer is None:
        logging.warning(
            f"{folder.name.removesuffix(WRITING_SUFFIX)} has pad_token_id={own}, for lack of a "
            "tokenizer. With None transformers scores one sample at a time; name one there."
        )
        return own
    added = tokenizer.get_added_vocab()
    ends = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id, None}
    ends |= {*(keys["tokenizer"].get("end_token_ids") or ()), config.get("bos_token_id")}
    # A template may end turns with it.
    ends |= {added[token] for token in added if token in str(tokenizer.chat_template)}
    named = sorted(added[token] for token in added if "pad" in token.lower())
    given = {config.get("pad_token_id")} & {*added.values()}
    choice = [number for number in [tokenizer.pad_token_id, *given, *named] if number not in ends]
    wanted = own if own is not None else next(iter(choice), None)
    if wanted is None or (wanted != tokenizer.pad_token_id and 0 <= wanted < len(tokenizer)):
        token = PADDING if wanted is None else tokenizer.convert_ids_to_tokens(wanted)
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            settings = reading.read_json(folder / name) if (folder / name).is_file() else {}
            if settings or name == "tokenizer_config.json":
                write_json(folder / name, settings | {"pad_token": token})
    return _tokenizer_in(folder).pad_token_id if wanted is None else wanted


def _write_end_tokens(folder: Path, config: Mapping[str, Any], ends: Sequence[int] | None) -> None:
    """Name the tokens that end a response, the model's or else the tokenizer's, if need be."""
    target = folder / reading.GENERATION_FILE
    settings = reading.read_json(target) if target.is_file() else {}
    # Beside a generation_config.json transformers does not read those of config.json.
    stated = reading.end_token_ids({reading.GENERATION: settings} if target.is_file() else config)
    ends = list(ends or stated or reading.end_token_ids(config))
    tokenizer = None if ends else _tokenizer_in(folder)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ends = [tokenizer.eos_token_id]
    if ends and ends != stated:
        found = ends if len(ends) > 1 else ends[0]
        write_json(target, settings | {"eos_token_id": found})


def _tokenizer_in(folder: Path) -> Any:
    """The tokenizer in `folder`; None: there is none that transformers reads."""
    if not any((folder / name).is_file() for name in reading.FILES_OF_TOKENIZERS):
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (ImportError, OSError, ValueError) as error:  # such as one that needs code of its own
        logging.warning(f"The tokens for ends and padding are not written: {error}")
        return None


def copy_tokenizer(section: DictConfig, folder: Path) -> None:
    """Copy the tokenizer, with its chat template, and the generation settings beside it."""
    tokenizer = section.get("tokenizer") or OmegaConf.create({})
    source = Path(str(tokenizer.get("type")))
    if tokenizer.get("library") == "huggingface" and source.is_dir():
        for pattern in ("*.json", "*.model", "*.jinja", "*.txt"):
            for file in source.glob(pattern):
                is_config = file.name in (HF_CONFIG, PEFT_CONFIG)
                if not is_config and not file.name.endswith(".index.json"):
                    shutil.copyfile(file, folder / file.name)
        template = OmegaConf.select(tokenizer, f"{KEPT_FORM}.chat_template")
        if template and os.path.isfile(template):
            shutil.copyfile(template, folder / "chat_template.jinja")
        elif tokenizer.get("chat_template"):
            (folder / "chat_template.jinja").write_text(str(tokenizer.chat_template), "utf-8")
    else:
        logging.warning(
            f"{folder.name.removesuffix(WRITING_SUFFIX)} gets no tokenizer: that of the model "
            f"(model.tokenizer.library={tokenizer.get('library')}) is no folder of Hugging Face."
        )
