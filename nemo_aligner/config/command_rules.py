# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules for the commands that use a trained policy: generate, evaluate and compute_topk_logits."""

from nemo_aligner.config.data_rules import check_chat, plain_columns
from nemo_aligner.config.rollout_rules import check_generation, check_responses_differ
from nemo_aligner.config.values import Values
from nemo_aligner.core.errors import ConfigError


def check_generation_command(v: Values) -> None:
    """Check how a policy generates (`conf/generate.yaml`)."""
    check_chat(v.get("model.data", {}))
    check_generation(v)
    check_responses_differ(v, "", v.size("responses_per_prompt"), key="responses_per_prompt")


def check_topk_logits(v: Values, times: dict[str, int]) -> None:
    """Check which logits of which examples a teacher writes (`conf/compute_topk_logits.yaml`).

    Args:
        times: sizes whose product with the micro-batch size divides the global one.
    """
    v.multiple("model.global_batch_size", "model.micro_batch_size", times=times)
    limit, length = v.get("data.data.max_seq_length"), v.get("model.encoder_seq_length")
    if limit and length and limit > length:
        raise ConfigError(
            f"data.data.max_seq_length={limit} is above model.encoder_seq_length={length}; lower "
            "it."
        )
    plain_columns(v.get("data.data.columns"), "data.data.columns")
    check_chat(v.get("data", {}))
