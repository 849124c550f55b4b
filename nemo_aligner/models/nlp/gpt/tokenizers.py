# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokenizers from the configuration section `model.tokenizer`, as NeMo built them from it. The
messages and the page on migration are made from `LIBRARIES`.
"""

import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo.collections.common.tokenizers.bytelevel_tokenizers import ByteLevelTokenizer
from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer
from nemo.collections.common.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from nemo.collections.common.tokenizers.tokenizer_spec import TokenizerSpec
from nemo.utils import logging
from omegaconf import DictConfig
from transformers import GPT2Tokenizer

from nemo_aligner.checkpoint.file_references import check_not_outside, unmarked
from nemo_aligner.config.data_rules import KEPT_FORM
from nemo_aligner.config.defaults import complete
from nemo_aligner.config.inert_keys import to_plain
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.leftovers import temporary_folder
from nemo_aligner.core.tokenizer import set_end_ids

# What `type` may be with the library megatron.
GPT2_BPE = ("GPT2BPETokenizer", "megatron-gpt-345m")
SENTENCEPIECE = "GPTSentencePieceTokenizer"


@dataclass(frozen=True)
class Library:
    """One value of `model.tokenizer.library`: `reads`, the keys of `model.tokenizer` that it is
    built from (none if it is refused), and `note`, more to know, or the reason and the remedy.
    """

    reads: str
    note: str = ""


# Of special tokens, by transformers.
KINDS = (
    "bos_token, eos_token, pad_token, unk_token, sep_token, cls_token, mask_token and "
    "additional_special_tokens (a list)"
)
_NOT_TEXT = "it is not a tokenizer of text for GPT models; use another checkpoint"
LIBRARIES = {
    "sentencepiece": Library("model, sentencepiece_legacy, special_tokens, chat_template"),
    "huggingface": Library(
        "type, use_fast, special_tokens, trust_remote_code, chat_template",
        "vocab_file and merge_file are refused: transformers 5 does not read them",
    ),
    "megatron": Library(
        "type, vocab_file, merge_file, model, special_tokens",
        f"type is {GPT2_BPE[0]} (GPT-2's BPE from vocab_file and merge_file, which are not "
        f"downloaded) or {SENTENCEPIECE} (model)",
    ),
    "tiktoken": Library("vocab_file", "needs the package tiktoken"),
    "byte-level": Library("special_tokens", "one id per byte"),
    **dict.fromkeys(("regex", "tabular", "null", "word", "char"), Library("", _NOT_TEXT)),
}


def build_tokenizer(cfg: DictConfig) -> TokenizerSpec:
    """NeMo tokenizer from the section `model.tokenizer`. `ConfigError`: a library or a combination
    of keys is not supported; `UserError`: a file or a package is missing or broken.
    """
    legacy = cfg.get("sentencepiece_legacy")
    cfg = complete(cfg, None, "model.tokenizer")
    if cfg.library not in BUILDERS:
        known = LIBRARIES.get(str(cfg.library))
        reason = "" if known is None else f"{known.note}, or "
        raise ConfigError(
            f"model.tokenizer.library={cfg.library!r} is not supported; {reason}use one of "
            f"{', '.join(BUILDERS)}."
        )
    if legacy is None and (cfg.get("special_tokens") or cfg.get("additional_special_tokens")):
        cfg.sentencepiece_legacy = True  # NeMo's default, which alone lets tokens be added
    tokenizer = BUILDERS[cfg.library](cfg)
    more = to_plain(cfg.get("additional_special_tokens"))
    if more:
        _add_tokens(tokenizer, more, cfg.library)
    set_end_ids(tokenizer, to_plain(cfg.get("end_token_ids")) or ())
    setattr(tokenizer, KEPT_FORM, to_plain(cfg.get(KEPT_FORM)))
    return tokenizer


def _sentencepiece(cfg: DictConfig) -> SentencePieceTokenizer:
    _check_file(cfg, "model", "a SentencePiece .model file")
    special_tokens = to_plain(cfg.get("special_tokens"))
    if not cfg.sentencepiece_legacy and (special_tokens or cfg.get("additional_special_tokens")):
        raise ConfigError(
            "model.tokenizer.special_tokens and additional_special_tokens need "
            "model.tokenizer.sentencepiece_legacy=True."
        )
    for key in ("special_tokens", "additional_special_tokens"):
        tokens = to_plain(cfg.get(key))
        for kind, text in tokens.items() if isinstance(tokens, dict) else ():
            if not isinstance(text, str):  # several, as Hugging Face has it
                texts = text if isinstance(text, list) else []
                raise ConfigError(
                    f"model.tokenizer.{key}={tokens}: {kind} must be one text. Remove {kind} if "
                    "the checkpoint was trained without (NeMo 2), or give the texts as the list "
                    f"model.tokenizer.additional_special_tokens={texts}."
                )
    if special_tokens:
        logging.warning(
            "model.tokenizer.special_tokens adds its tokens to the SentencePiece model. NeMo "
            "before 2.0 ignored this key: leave it out if the checkpoint is of such a version."
        )
    tokenizer = SentencePieceTokenizer(
        cfg.model,
        special_tokens=special_tokens or None,
        legacy=cfg.sentencepiece_legacy,
        chat_template=to_plain(cfg.get("chat_template")),
    )
    if tokenizer.legacy:  # in which NeMo's wrapper knows only the tokens that it was given
        model = tokenizer.tokenizer
        for kind in ("bos", "eos", "pad"):
            number = getattr(model, f"{kind}_id")()
            if not hasattr(tokenizer, f"{kind}_token") and number >= 0:
                setattr(tokenizer, f"{kind}_token", model.id_to_piece(number))
    return tokenizer


def _hugging_face(cfg: DictConfig) -> AutoTokenizer:
    for key in ("vocab_file", "merge_file"):
        if cfg.get(key):
            raise ConfigError(
                f"model.tokenizer.{key}={unmarked(cfg[key])} is not read with "
                "model.tokenizer.library=huggingface; leave it out (a checkpoint's with "
                "model.overwrite_base_config.tokenizer=True) and give a folder as type. For "
                f"GPT-2's BPE use library=megatron and type={GPT2_BPE[0]}."
            )
    name = cfg.type
    check_not_outside("model.tokenizer.type", name)
    if not name or (str(name).startswith(("/", ".")) and not Path(name).is_dir()):
        remedy = "give the folder of a Hugging Face tokenizer."
        raise UserError(f"model.tokenizer.type={name} does not exist; {remedy}")
    return _auto_tokenizer(cfg, name, name)


def _auto_tokenizer(cfg: DictConfig, name: str, shown: object) -> AutoTokenizer:
    special_tokens = to_plain(cfg.get("special_tokens")) or {}
    if not isinstance(special_tokens, dict):
        special_tokens = {"additional_special_tokens": special_tokens}
    try:
        tokenizer = AutoTokenizer(
            name,
            use_fast=cfg.use_fast,
            trust_remote_code=bool(cfg.get("trust_remote_code")),
            chat_template=to_plain(cfg.get("chat_template")),
            **special_tokens,
        )
    except TypeError as error:
        raise ConfigError(
            f"model.tokenizer.special_tokens={special_tokens} has an unknown kind of token "
            f"({error}); known are {KINDS}."
        ) from error
    except (ValueError, OSError) as error:
        raise UserError(
            f"model.tokenizer.type={shown} cannot be loaded as a Hugging Face tokenizer: {error}"
        ) from error
    if tokenizer.tokenizer.eos_token_id is None:
        remedy = "add one to its tokenizer_config.json."
        raise UserError(f"the tokenizer in {shown} has no eos token; {remedy}")
    return tokenizer


def _megatron(cfg: DictConfig) -> TokenizerSpec:
    if cfg.type == SENTENCEPIECE:
        return _sentencepiece(cfg)
    if cfg.type not in GPT2_BPE:
        raise ConfigError(
            f"model.tokenizer.type={cfg.type!r} is not supported with "
            f"model.tokenizer.library=megatron; use {GPT2_BPE[0]} or {SENTENCEPIECE}."
        )
    what = "GPT-2's {}, or use library=huggingface and type=gpt2, which is the same tokenizer"
    _check_file(cfg, "vocab_file", what.format("vocab.json"))
    _check_file(cfg, "merge_file", what.format("merges.txt"))
    # NeMo's wrapper loads by name: it gets the folder of a tokenizer that was made from the files.
    folder = str(temporary_folder("tokenizer_"))
    try:
        try:
            GPT2Tokenizer(vocab=cfg.vocab_file, merges=cfg.merge_file).save_pretrained(folder)
        except Exception as error:  # the tokenizers package raises no other class
            raise UserError(
                f"model.tokenizer.vocab_file={cfg.vocab_file} and merge_file={cfg.merge_file} "
                f"cannot be read as GPT-2's BPE: {error}"
            ) from error
        return _auto_tokenizer(cfg, folder, cfg.type)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _tiktoken(cfg: DictConfig) -> TokenizerSpec:
    _check_file(cfg, "vocab_file", "a vocabulary of tiktoken in NeMo's JSON form")
    if importlib.util.find_spec("tiktoken") is None:
        raise UserError("model.tokenizer.library=tiktoken needs: pip install tiktoken")
    from nemo.collections.common.tokenizers.tiktoken_tokenizer import TiktokenTokenizer

    try:
        return TiktokenTokenizer(vocab_file=cfg.vocab_file)
    except (ValueError, KeyError, AssertionError) as error:
        raise UserError(
            f"model.tokenizer.vocab_file={cfg.vocab_file} is not a vocabulary of tiktoken in "
            f"NeMo's JSON form: {error!r}"
        ) from error


BUILDERS: dict[str, Callable[[DictConfig], TokenizerSpec]] = {
    "sentencepiece": _sentencepiece,
    "huggingface": _hugging_face,
    "megatron": _megatron,
    "tiktoken": _tiktoken,
    "byte-level": lambda cfg: ByteLevelTokenizer(to_plain(cfg.get("special_tokens")) or {}),
}


def _add_tokens(tokenizer: TokenizerSpec, tokens: Any, library: str) -> None:
    """Add `additional_special_tokens`: a list, or for Hugging Face also a dict of kinds."""
    if isinstance(tokenizer, AutoTokenizer):
        if not isinstance(tokens, dict):
            tokens = {"additional_special_tokens": tokens}
        try:
            tokenizer.add_special_tokens(tokens)
        except (ValueError, TypeError, AttributeError, AssertionError) as error:
            raise ConfigError(
                f"model.tokenizer.additional_special_tokens={tokens} cannot be added: {error}; "
                f"give a list of texts, or a dict of {KINDS}."
            ) from error
    elif isinstance(tokenizer, SentencePieceTokenizer):
        tokenizer.add_special_tokens(tokens)
    else:
        raise ConfigError(
            f"model.tokenizer.additional_special_tokens={tokens} cannot be added with "
            f"model.tokenizer.library={library}; set it to null."
        )


def _check_file(cfg: DictConfig, key: str, what: str) -> None:
    path = cfg.get(key)
    check_not_outside(f"model.tokenizer.{key}", path)
    if not path or not Path(path).is_file():
        raise UserError(f"model.tokenizer.{key}={path} does not exist; give the path of {what}.")
