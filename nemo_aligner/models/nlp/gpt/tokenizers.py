# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokenizers from the configuration section `model.tokenizer`."""

from pathlib import Path

from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer
from nemo.collections.common.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from nemo.collections.common.tokenizers.tokenizer_spec import TokenizerSpec
from omegaconf import DictConfig

from nemo_aligner.config.defaults import complete
from nemo_aligner.core.errors import ConfigError, UserError


def build_tokenizer(cfg: DictConfig) -> TokenizerSpec:
    """NeMo tokenizer from the section `model.tokenizer`.

    The library `sentencepiece` reads `model`, a file; `huggingface` reads `type`, a folder or a
    name.

    Raises:
        ConfigError: unknown library.
        UserError: the named file or folder does not exist or cannot be read.
    """
    cfg = complete(cfg, None, "model.tokenizer")
    if cfg.library == "sentencepiece":
        return _sentencepiece(cfg.model, cfg.sentencepiece_legacy)
    if cfg.library == "huggingface":
        return _hugging_face(cfg.type, cfg.use_fast)
    raise ConfigError(
        f"model.tokenizer.library={cfg.library!r} is not supported; use sentencepiece or "
        "huggingface."
    )


def _sentencepiece(path: str | None, legacy: bool) -> SentencePieceTokenizer:
    if not path or not Path(path).is_file():
        raise UserError(
            f"model.tokenizer.model={path} does not exist; give the path of a SentencePiece "
            ".model file."
        )
    return SentencePieceTokenizer(path, legacy=legacy)


def _hugging_face(name: str | None, use_fast: bool) -> AutoTokenizer:
    if not name or (str(name).startswith(("/", ".")) and not Path(name).is_dir()):
        raise UserError(
            f"model.tokenizer.type={name} does not exist; give the folder of a Hugging Face "
            "tokenizer."
        )
    try:
        tokenizer = AutoTokenizer(name, use_fast=use_fast)
    except (ValueError, OSError) as error:
        raise UserError(
            f"model.tokenizer.type={name} cannot be loaded as a Hugging Face tokenizer: {error}"
        ) from error
    if tokenizer.tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer in {name} has no eos token; add one to its tokenizer_config.json."
        )
    return tokenizer
