# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules for policies that generate: those that all of their actors share, and those of rejection
sampling and of REINFORCE alone.
"""

import math
from collections.abc import Mapping
from typing import Any

from nemo_aligner.config.access import client_tls, read_token, shown_url
from nemo_aligner.config.parallel_rules import EP_REMEDY
from nemo_aligner.config.reward_models import read_reward_models, read_reward_servers, read_teacher
from nemo_aligner.config.server_rules import check_kind_of_rewards
from nemo_aligner.config.values import Values, require_multiple
from nemo_aligner.core.errors import ConfigError

RESHARD = ("none", "auto")


def check_policy(values: Values, kind: str, remote: str, dp: dict[str, int]) -> None:
    """Check what the actors of PPO, rejection sampling and REINFORCE have in common.

    Args:
        kind: "ppo", "rs" or "reinforce".
        remote: section of the servers that the job talks to.
        dp: `{"data parallel size": DP}`; empty while it is not known.
    """
    v, section, model = values, f"trainer.{kind}.", f"model.{kind}."
    v.same(section + "model_gbs", "model.global_batch_size")
    v.same(section + "model_mbs", "model.micro_batch_size")
    v.multiple(model + "num_rollout_samples", model + "rollout_micro_batch_size", times=dp)
    v.multiple(model + "num_val_samples", model + "val_rollout_micro_batch_size", times=dp)
    check_generation(v, model)
    _check_reshard(v, section, model + "generation.reshard", dp)
    _check_environment(v, kind, remote)
    _check_reward_fn(v, kind, remote)
    check_shared_queue(
        section,
        v.get(f"{section}batch_iterator.use_flask"),
        v.whole("model.expert_model_parallel_size", 1) or 1,
    )
    _check_remote(v, remote)
    read_reward_models(v.get(remote), remote)


def check_on_policy(v: Values) -> None:
    """Check how a student responds itself (`model.knowledge_distillation.on_policy`), if it does,
    and its served teacher.
    """
    section, remote = "model.knowledge_distillation.on_policy.", "remote_teacher"
    check_generation(v, section)
    if v.get(section + "fraction") is None:
        return
    _check_remote(v, remote)
    read_teacher(v.get(remote), remote)
    if v.get("model.data.top_k") is not None:
        raise ConfigError(
            f"model.data.top_k={v.get('model.data.top_k')} chooses among the logits of data "
            f"files, but with {section}fraction={v.get(section + 'fraction')} a served teacher "
            "gives them; set inference.top_k of its server, and leave it null."
        )
    if v.get(section + "fraction") > 0:
        _check_loss_of_own_responses(v, "model.knowledge_distillation.", section)


def _check_loss_of_own_responses(v: Values, loss: str, section: str) -> None:
    """Check that a student can unlearn what it does by itself."""
    own = f"with {section}fraction={v.get(section + 'fraction')} a student"
    outside, weight = v.get(loss + "outside_top_k"), v.get(loss + "sft_loss_weight")
    if outside != "bucket":
        raise ConfigError(
            f"{own} goes wrong by tokens outside the teacher's top k, and "
            f"{loss}outside_top_k={outside} leaves them out of the loss; set it to bucket."
        )
    if weight:
        raise ConfigError(
            f"{own} would make its own responses more likely, whatever they are, by "
            f"{loss}sft_loss_weight={weight}; set it to 0."
        )


def _check_remote(v: Values, remote: str) -> None:
    """Check what all sections of servers that a job talks to have."""
    read_token(v.get(f"{remote}.token_file"), remote)
    client_tls(v.get(f"{remote}.tls_ca_file"), remote)


def _check_environment(v: Values, kind: str, remote: str) -> None:
    """Check `model.<kind>.environment`, if there is one."""
    section = f"model.{kind}.environment"
    path = v.get(f"{section}.path")
    if path is None:
        return
    _check_alone(v, remote, f"{section}.path={path} gives the rewards")
    if v.get(f"trainer.{kind}.overlong_buffer_len", 0):
        raise ConfigError(
            f"trainer.{kind}.overlong_buffer_len={v.get(f'trainer.{kind}.overlong_buffer_len')} "
            f"is for single responses, but {section}.path={path} makes samples of "
            "several; set it to 0, and let the environment judge lengths."
        )


def _check_alone(v: Values, remote: str, gives: str) -> None:
    """Refuse servers of rewards beside what `gives` them in the job itself."""
    if v.get(f"{remote}.combine_rm_and_critic_server", False):
        raise ConfigError(
            f"{gives}, so the critic's server cannot ({remote}.combine_rm_and_critic_server=True);"
            " set that to False, in both jobs."
        )
    if v.get(f"{remote}.reward_models"):
        raise ConfigError(f"{gives}, so {remote}.reward_models would not be asked; leave it null.")


def _check_reward_fn(v: Values, kind: str, remote: str) -> None:
    """Check `trainer.<kind>.reward_fn` and what belongs to it."""
    section = f"trainer.{kind}"
    check_kind_of_rewards(v, section)
    reward_fn = v.get(f"{section}.reward_fn")
    read_reward_servers(v.get(section), section)
    if reward_fn is None:
        return
    gives = f"{section}.reward_fn={shown_url(str(reward_fn))} gives the rewards"
    _check_alone(v, remote, gives)
    environment = v.get(f"model.{kind}.environment.path")
    if environment is not None:
        raise ConfigError(
            f"{gives}, and so does model.{kind}.environment.path={environment}; set one to null."
        )


def asked_reshard(settings: Any) -> Any:
    """`generation.reshard` of `settings`, the section `model.<algorithm>`. Where it is none,
    NeMo-Aligner's `trt_llm.reshard`, with `trt_llm.enable`, reads as "auto".
    """
    reshard, trt_llm = settings["generation"]["reshard"], settings.get("trt_llm") or {}
    if reshard == "none" and trt_llm.get("enable") and trt_llm.get("reshard"):
        return "auto"
    return reshard


def generation_sizes(reshard: str | Mapping[str, int] | None, tp: int, pp: int) -> tuple[int, int]:
    """Tensor- and pipeline-parallel size of generation.

    Args:
        reshard: that of `asked_reshard`. "auto" ends the pipeline: one of its ranks at a time
            would work.
        tp, pp: of training.
    """
    if isinstance(reshard, Mapping):
        return reshard["tp"], reshard["pp"]
    return (tp, 1) if reshard == "auto" else (tp, pp)


def _check_reshard(v: Values, section: str, key: str, dp: dict[str, int]) -> None:
    if isinstance(v.get(key), Mapping):
        _check_sizes(v, section, key, dp)
    else:
        v.choice(key, RESHARD)
    value = asked_reshard(v.get(key.removesuffix(".generation.reshard")))
    merge = "model.peft.merge_for_generation"
    with_adapters = v.get("model.peft.peft_scheme") not in (None, "none")
    if value not in (None, "none") and with_adapters and not v.get(merge, True):
        raise ConfigError(
            f"{key}={_shown(value)} moves weights that contain the adapters, but {merge}=False "
            f"keeps these apart; set {merge}=True, or {key}=none."
        )


def _shown(reshard: Any) -> str:
    """`generation.reshard` as a command writes it."""
    if isinstance(reshard, str):
        return reshard
    return "{" + ", ".join(f"{key}: {size}" for key, size in reshard.items()) + "}"


def _check_sizes(v: Values, section: str, key: str, dp: dict[str, int]) -> None:
    """Check `generation.reshard={tp: ..., pp: ...}` against the model and its ranks."""
    given = v.get(key)
    if set(given) != {"tp", "pp"}:
        raise ConfigError(f"{key}={_shown(given)} needs both sizes, such as {{tp: 1, pp: 1}}.")
    tp, pp = v.size(f"{key}.tp"), v.size(f"{key}.pp")
    shown, remedy = f"{key}={_shown(given)}", f"or set {key}=auto"
    trained_tp, trained_pp, cp, ep = (
        v.whole(f"model.{name}_parallel_size", 1) or 1
        for name in ("tensor_model", "pipeline_model", "context", "expert_model")
    )
    trained = trained_tp * trained_pp
    if (tp, pp) == (trained_tp, trained_pp):
        return
    if trained % (tp * pp) and (tp * pp) % trained:
        raise ConfigError(
            f"{shown} and the {trained} ranks of TP x PP in training do not divide each other; "
            f"choose sizes whose product divides {trained} or is a multiple of it, {remedy}."
        )
    together = tp * pp // trained
    if together > 1:
        _check_wider(v, section, shown, remedy, together, cp, dp)
    experts = v.get("model.num_moe_experts")
    if (ep > 1 or experts) and (tp, pp) != (trained_tp, 1):
        raise ConfigError(
            f"{shown} would divide experts anew; with model.num_moe_experts={experts} only the "
            f"pipeline can end: set {key}={{tp: {trained_tp}, pp: 1}}, {remedy}."
        )
    heads = v.get("model.num_attention_heads")
    parts = {
        "num_query_groups": (v.get("model.num_query_groups") or heads, tp),
        "ffn_hidden_size": (v.get("model.ffn_hidden_size"), tp),
        "num_layers": (v.get("model.num_layers"), pp),
    }
    for name, (whole, size) in parts.items():
        if isinstance(whole, int) and whole % size:
            raise ConfigError(
                f"{shown} does not divide model.{name}={whole}; choose a size that does, {remedy}."
            )


def _check_wider(
    v: Values, section: str, shown: str, remedy: str, together: int, cp: int, dp: dict[str, int]
) -> None:
    """Check a split of generation that takes the ranks of `together` data-parallel ranks."""
    for ranks in dp.values():
        if ranks % together:
            raise ConfigError(
                f"{shown} takes the ranks of {together} data-parallel ranks, of which there are "
                f"{ranks}; choose smaller sizes, {remedy}."
            )
    if cp > 1:
        raise ConfigError(
            f"{shown} takes the ranks of {together} data-parallel ranks, which does not work with "
            f"model.context_parallel_size={cp}; choose smaller sizes, {remedy}."
        )
    queue = f"{section}batch_iterator.use_flask"
    if v.get(queue):
        raise ConfigError(
            f"{queue}=True does not work with {shown}: data-parallel ranks generate together, so "
            "none may draw more prompts than another; set it to False."
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


def check_spin(v: Values, dp: dict[str, int]) -> None:
    """Check the settings of SPIN; `dp` as for `check_policy`."""
    section, model = "trainer.spin.", "model.spin."
    iterations = v.size(section + "max_iterations")
    _check_penalties(v.get(model + "ref_policy_kl_penalty"), iterations)
    check_generation(v, model)
    _check_reshard(v, section, model + "generation.reshard", dp)


def _check_penalties(given: Any, iterations: int) -> None:
    """Check `model.spin.ref_policy_kl_penalty`, a number or one for each of `iterations`."""
    penalties = given if isinstance(given, list) else [given]
    for penalty in penalties:
        is_number = isinstance(penalty, int | float) and not isinstance(penalty, bool)
        if not is_number or not 0 < penalty < math.inf:
            raise ConfigError(
                f"model.spin.ref_policy_kl_penalty={given} must be a number above 0, or a list of "
                "such numbers."
            )
    if isinstance(given, list) and len(given) < iterations:
        raise ConfigError(
            f"model.spin.ref_policy_kl_penalty={given} has {len(given)} value(s) for "
            f"trainer.spin.max_iterations={iterations}; give one number, or one for each."
        )


def check_generation(v: Values, model: str = "") -> None:
    """Check `length_params` and `sampling_params`.

    Args:
        model: "model.ppo.", "model.rs." or "".
    """
    longest = v.get(model + "length_params.max_length")
    shortest = v.get(model + "length_params.min_length")
    context = v.get("model.encoder_seq_length")
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


def check_responses_differ(v: Values, model: str, responses: int, key: str | None = None) -> None:
    """Raise `ConfigError` if several `responses` to a prompt would all be the same.

    Args:
        model: section of the sampling parameters, with a dot at its end; or "".
        key: that asks for them; None: `num_rollouts_per_prompt` in that section.
    """
    sampling = model + "sampling_params."
    greedy = v.get(sampling + "use_greedy") or v.get(sampling + "top_k") == 1
    if responses > 1 and greedy:
        key = key or model + "num_rollouts_per_prompt"
        raise ConfigError(
            f"{key}={responses} responses to a prompt would be the same "
            "with sampling_params.use_greedy=True or top_k=1; sample, or draw one response."
        )


def check_compares_responses(name: str, key: str, responses: int) -> None:
    """Raise `ConfigError` unless there are several responses to compare.

    Args:
        name: what compares them.
        key: of their number.
    """
    if responses < 2:
        raise ConfigError(
            f"{name} compares the responses to a prompt, but {key}={responses}; set it to 2 or "
            "more (4 to 16 are common)."
        )


def check_reinforce_actor(values: Values, dp: dict[str, int]) -> None:
    """Check the configuration of a REINFORCE actor; `dp` as in `check_policy`."""
    v, key = values, "trainer.reinforce.num_rollouts_per_prompt"
    check_policy(v, "reinforce", "remote_rm", dp)
    responses = v.size(key)
    check_compares_responses("REINFORCE", key, responses)
    check_responses_differ(v, "model.reinforce.", responses, key)
    prompts, batch = v.size("model.reinforce.num_rollout_samples"), "model.global_batch_size"
    name = f"model.reinforce.num_rollout_samples x {key}={responses}"
    require_multiple(name, prompts * responses, {batch: v.size(batch)})


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
