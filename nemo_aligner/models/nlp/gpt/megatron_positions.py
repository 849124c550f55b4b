# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Positions: arguments of Megatron Core's `GPTModel`, and what YaRN adds to its configuration."""

from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from omegaconf import DictConfig

from nemo_aligner.core.errors import ConfigError

POSITION_EMBEDDINGS = ("rope", "yarn", "learned_absolute", "none")
YARN_KEYS = (
    "yarn_rotary_scaling_factor",
    "yarn_original_max_position_embeddings",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_mscale",
    "yarn_mscale_all_dim",
    "yarn_correction_range_round_to_int",
)
# Of `rope`, which Megatron Core's YaRN ignores: the value that changes nothing.
NOT_WITH_YARN = {
    "rotary_percentage": 1.0,
    "rotary_interleaved": False,
    "seq_len_interpolation_factor": None,
}


@dataclass
class YarnTransformerConfig(TransformerConfig):
    """`TransformerConfig` with what Megatron Core reads for YaRN (arXiv 2309.00071) beside it."""

    yarn_rotary_scaling_factor: float = 1.0  # how many times longer sequences become
    yarn_original_max_position_embeddings: int = 4096  # the longest sequence before
    # a wave that turns at least so often in that length keeps its frequency
    yarn_beta_fast: float = 32.0
    # of one that turns at most so often the frequency is divided by the factor
    yarn_beta_slow: float = 1.0
    # queries and keys are multiplied by a function of it, of `yarn_mscale_all_dim` and of the
    # factor; with None for one of them, of the factor alone
    yarn_mscale: float | None = None
    yarn_mscale_all_dim: float | None = None  # see there
    yarn_correction_range_round_to_int: bool = True  # the two bounds are rounded to whole waves


def yarn_settings(cfg: DictConfig) -> dict[str, Any]:
    """Fields of `YarnTransformerConfig` alone; none for other positions.

    Raises:
        ConfigError: YaRN lacks a value, or is combined with what Megatron Core leaves out of it.
    """
    if cfg.position_embedding_type != "yarn":
        return {}
    for key in YARN_KEYS[:2]:
        if cfg[key] is None or cfg[key] <= 0:
            raise ConfigError(
                f"model.position_embedding_type=yarn needs model.{key}, which is {cfg[key]}; give "
                "a positive number."
            )
    for key, neutral in NOT_WITH_YARN.items():
        if cfg[key] != neutral:
            raise ConfigError(
                f"model.{key}={cfg[key]} with model.position_embedding_type=yarn is not supported "
                f"by Megatron Core; set it to {'null' if neutral is None else neutral}."
            )
    return {key: cfg[key] for key in YARN_KEYS}


def position_arguments(cfg: DictConfig) -> dict[str, Any]:
    """Arguments of `GPTModel` that say how it knows positions.

    Raises:
        ConfigError: an unsupported kind of positions, or a setting of another kind.
    """
    kind, base = cfg.position_embedding_type, cfg.rotary_base
    if kind not in POSITION_EMBEDDINGS:
        raise ConfigError(
            f"model.position_embedding_type={kind!r} is not supported: Megatron Core has "
            f"{', '.join(POSITION_EMBEDDINGS)}."
        )
    if isinstance(base, bool) or not isinstance(base, int | float) or base <= 0:
        raise ConfigError(
            f"model.rotary_base={base!r} must be a positive number: all layers share it in "
            "Megatron Core (Gemma 3 has two)."
        )
    if cfg.scale_positional_embedding and kind != "rope":
        raise ConfigError(
            "model.scale_positional_embedding=True scales rotary embeddings, but "
            f"model.position_embedding_type={kind}; set it to False."
        )
    return dict(
        max_sequence_length=cfg.max_position_embeddings,
        position_embedding_type=kind,
        rotary_percent=cfg.rotary_percentage,
        rotary_base=base,
        seq_len_interpolation_factor=cfg.seq_len_interpolation_factor,
        rope_scaling=cfg.scale_positional_embedding,
        rope_scaling_factor=cfg.scale_factor,
    )
