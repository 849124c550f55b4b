# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules for policies that generate: those that the actors of PPO and of rejection sampling share,
and those of rejection sampling alone.
"""

from nemo_aligner.config.access import client_tls, read_token
from nemo_aligner.config.parallel_rules import EP_REMEDY
from nemo_aligner.config.reward_models import read_reward_models
from nemo_aligner.config.values import Values
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.core.estimators import LOSS_REDUCTIONS

RESHARD = ("none", "auto")


def check_policy(values: Values, kind: str, remote: str, dp: dict[str, int]) -> None:
    """Check what the actors of PPO and rejection sampling have in common.

    Args:
        kind: "ppo" or "rs".
        remote: section of the servers that the job talks to.
        dp: `{"data parallel size": DP}`; empty while it is not known.
    """
    v, section, model = values, f"trainer.{kind}.", f"model.{kind}."
    v.same(section + "model_gbs", "model.global_batch_size")
    v.same(section + "model_mbs", "model.micro_batch_size")
    v.whole(model + "forward_micro_batch_size", 1)
    for key, minimum in (("max_epochs", 1), ("max_steps", -1), ("val_check_interval", 0)):
        v.whole(section + key, minimum)
    v.multiple(model + "num_rollout_samples", model + "rollout_micro_batch_size", times=dp)
    v.multiple(model + "num_val_samples", model + "val_rollout_micro_batch_size", times=dp)
    v.whole(section + "rollout_batch_seq_length", 2)
    v.number(section + "alarms.truncated_fraction", 0, 1)
    v.choice(model + "loss_reduction", LOSS_REDUCTIONS)
    check_generation(v, model)
    _check_reshard(v, model + "generation.reshard")
    v.number(model + "generation.kv_cache_gb", 0, above=True)
    v.whole(f"{remote}.pad_to_length", 1)
    check_shared_queue(
        section,
        v.get(f"{section}batch_iterator.use_flask"),
        v.whole("model.expert_model_parallel_size", 1) or 1,
    )
    v.number(f"{remote}.init_timeout_s", 0, above=True)
    v.number(f"{remote}.inference_timeout_s", 0, above=True)
    read_token(v.get(f"{remote}.token_file"), remote)
    client_tls(v.get(f"{remote}.tls_ca_file"), remote)
    read_reward_models(v.get(remote), remote)


def _check_reshard(v: Values, key: str) -> None:
    v.choice(key, RESHARD)
    merge = "model.peft.merge_for_generation"
    with_adapters = v.get("model.peft.peft_scheme") not in (None, "none")
    if v.get(key) == "auto" and with_adapters and not v.get(merge, True):
        raise ConfigError(
            f"{key}=auto gathers weights that contain the adapters, but {merge}=False keeps these "
            f"apart; set {merge}=True, or {key}=none."
        )


def check_shared_queue(section: str, use_flask: bool | None, expert_parallel: int) -> None:
    """Raise `ConfigError` if ranks that hold each other's experts would draw prompts from one
    queue.

    Args:
        section: "trainer.ppo." or "", for the message.
    """
    if use_flask and expert_parallel > 1:
        raise ConfigError(
            f"{section}batch_iterator.use_flask=True does not work with "
            f"model.expert_model_parallel_size={expert_parallel}: these ranks hold each other's "
            "experts, so none may generate more often than another. Set it to False "
            f"({EP_REMEDY})."
        )


def check_generation(v: Values, model: str = "") -> None:
    """Check `length_params` and `sampling_params`.

    Args:
        model: "model.ppo.", "model.rs." or "".
    """
    longest = v.whole(model + "length_params.max_length", 1)
    shortest = v.whole(model + "length_params.min_length", 0)
    context = v.whole("model.encoder_seq_length", 2)
    if longest and context and longest >= context:
        raise ConfigError(
            f"{model}length_params.max_length={longest} leaves no room for a prompt in "
            f"model.encoder_seq_length={context}; set max_length below {context}."
        )
    if longest and shortest and shortest > longest:
        raise ConfigError(
            f"{model}length_params.min_length={shortest} is above max_length={longest}; lower "
            "min_length."
        )
    sampling = model + "sampling_params."
    v.number(sampling + "temperature", 0, above=True)
    v.number(sampling + "top_p", 0, 1, above=True)
    v.number(sampling + "repetition_penalty", 0, above=True)
    v.whole(sampling + "top_k", 0)


def check_responses_differ(
    v: Values, model: str, responses: int, key: str = "num_rollouts_per_prompt"
) -> None:
    """Raise `ConfigError` if several `responses` to a prompt would all be the same.

    Args:
        model: "model.ppo.", "model.rs." or "".
        key: that asks for them.
    """
    sampling = model + "sampling_params."
    greedy = v.get(sampling + "use_greedy") or v.get(sampling + "top_k") == 1
    if responses > 1 and greedy:
        raise ConfigError(
            f"{model}{key}={responses} responses to a prompt would be the same "
            "with sampling_params.use_greedy=True or top_k=1; sample, or draw one response."
        )


def check_top_n(top_n_rollouts: int, num_rollouts_per_prompt: int) -> None:
    """Raise `ConfigError` unless rejection sampling keeps at least one response to a prompt and no
    more than it draws.
    """
    if top_n_rollouts < 1:
        raise ConfigError(f"model.rs.top_n_rollouts={top_n_rollouts} must be at least 1.")
    if top_n_rollouts > num_rollouts_per_prompt:
        raise ConfigError(
            f"model.rs.top_n_rollouts={top_n_rollouts} is above "
            f"model.rs.num_rollouts_per_prompt={num_rollouts_per_prompt}: no more responses can "
            "be kept than were drawn; lower the first or raise the second."
        )


def check_rs_actor(values: Values, dp: dict[str, int]) -> None:
    """Check the configuration of a rejection-sampling actor; `dp` as in `check_policy`."""
    v = values
    check_policy(v, "rs", "remote_rm", dp)
    prompts = v.size("model.rs.num_rollout_samples")
    drawn = v.size("model.rs.num_rollouts_per_prompt")
    kept = v.size("model.rs.top_n_rollouts")
    check_top_n(kept, drawn)
    check_responses_differ(v, "model.rs.", drawn)
    batch = v.size("model.global_batch_size")
    if prompts * kept % batch:
        raise ConfigError(
            f"model.rs.num_rollout_samples={prompts} x model.rs.top_n_rollouts={kept} = "
            f"{prompts * kept} kept responses are not a multiple of "
            f"model.global_batch_size={batch}; change one of them."
        )
