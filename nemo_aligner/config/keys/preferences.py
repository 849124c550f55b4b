# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Keys of jobs that learn from preferences."""

from dataclasses import dataclass
from typing import Any

from nemo_aligner.config.data_rules import check_prompts_can_be_read
from nemo_aligner.config.fields import key
from nemo_aligner.config.keys.common import Alarms
from nemo_aligner.config.values import Values
from nemo_aligner.core.errors import ConfigError


@dataclass
class PreferenceAlarms(Alarms):
    """Alarms of preference learning.

    Attributes:
        likelihood_fall, first_rewards, margin: **new**: thresholds of alarms, see
            [metrics.md](metrics.md); null switches one off
    """

    likelihood_fall: float | None = key(10.0, above=0)
    first_rewards: Any = key(0.2)
    margin: float | None = key(0.0)


@dataclass
class PairAlarms(PreferenceAlarms):
    """Alarms of learning from pairs.

    Attributes:
        accuracy: **new**: thresholds of alarms, see [metrics.md](metrics.md); null switches one
            off
    """

    accuracy: float | None = key(0.4, at_least=0, at_most=1)


@dataclass
class Preferences:
    """What DPO, KTO and SPIN have in common.

    Attributes:
        ref_policy_kl_penalty: beta: how much a difference of log-probs counts, so how far the
            policy goes from the reference before the loss is satisfied
        preference_average_log_probs: the log-prob of a response is the mean over its tokens, not
            the sum; in the preference loss, in the likelihood of the chosen responses
        log_prob_forward_micro_batch_size: pairs of one forward pass of the reference policy
    """

    ref_policy_kl_penalty: float = key(0.2, above=0)
    preference_average_log_probs: bool = key(False)
    log_prob_forward_micro_batch_size: int = key("${model.micro_batch_size}", at_least=1)


@dataclass
class WeighedPreferences(Preferences):
    """What DPO and KTO have in common.

    Attributes:
        sft_average_log_probs: the log-prob of a response is the mean over its tokens, not the
            sum; in the preference loss, in the likelihood of the chosen responses
        preference_loss_weight, sft_loss_weight: weights of the preference loss and of the
            negative log-likelihood of the chosen responses
        ref_log_probs_dir: **new**: folder in which the log-probs of the reference policy are kept
            for all epochs and jobs, so that no copy of its weights is; null: they are computed
            for each batch ([dpo.md](dpo.md#log-probs-that-are-kept))
    """

    sft_average_log_probs: bool = key("${.preference_average_log_probs}")
    preference_loss_weight: float = key(1, at_least=0)
    sft_loss_weight: float = key(0, at_least=0)
    ref_log_probs_dir: Any = key(None)


def check_preferences(values: Values, kind: str) -> None:
    """What DPO and KTO, `kind`, have in common."""
    section = f"model.{kind}."
    folder = values.get(f"{section}ref_log_probs_dir")
    if folder is not None and not isinstance(folder, str):
        raise ConfigError(
            f"{section}ref_log_probs_dir={folder!r} must be a folder, or null: the log-probs of "
            "the reference policy are not kept."
        )
    check_prompts_can_be_read(str(values.get("model.data.data_impl")))
    check_not_both_0(values, [f"{section}preference_loss_weight", f"{section}sft_loss_weight"])


def check_not_both_0(values: Values, weights: list[str]) -> None:
    if not any(values.get(key) for key in weights):
        raise ConfigError(f"{' and '.join(weights)} are both 0: nothing would be learned.")
