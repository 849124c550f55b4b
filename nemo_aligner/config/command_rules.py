# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules for the commands that use a trained policy: generate, evaluate and compute_topk_logits."""

from nemo_aligner.config.data_rules import check_chat, plain_columns
from nemo_aligner.config.rollout_rules import check_generation, check_responses_differ
from nemo_aligner.config.server_rules import check_workers
from nemo_aligner.config.values import Values
from nemo_aligner.core.errors import ConfigError


def check_generation_command(v: Values) -> None:
    """Check how a policy generates (`conf/generate.yaml`)."""
    v.whole("micro_batch_size", 1)
    v.whole("responses_per_prompt", 1)
    check_chat(v.get("model.data", {}))
    check_generation(v)
    check_responses_differ(v, "", v.size("responses_per_prompt"), key="responses_per_prompt")


def check_evaluation(v: Values) -> None:
    """Check how rewards are computed and compared (`conf/evaluate.yaml`)."""
    v.whole("bootstrap.resamples", 1)
    v.whole("bootstrap.seed", 0)
    v.number("bootstrap.confidence", 0, 1, above=True)
    check_workers(v, "inference.reward_fn_")


def check_topk_logits(v: Values, times: dict[str, int]) -> None:
    """Check which logits of which examples a teacher writes (`conf/compute_topk_logits.yaml`).

    Args:
        times: sizes whose product with the micro-batch size divides the global one.
    """
    v.whole("top_k", 1)
    v.whole("start_from_idx", 0)
    v.whole("end_at_idx", 0)
    v.multiple("model.global_batch_size", "model.micro_batch_size", times=times)
    limit = v.whole("data.data.max_seq_length", 2)
    length = v.whole("model.encoder_seq_length", 2)
    if limit and length and limit > length:
        raise ConfigError(
            f"data.data.max_seq_length={limit} is above model.encoder_seq_length={length}; lower "
            "it."
        )
    v.choice("data.data.truncation_method", ("left", "right"))
    plain_columns(v.get("data.data.columns"), "data.data.columns")
    check_chat(v.get("data", {}))
