# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules for policies that generate."""

from collections.abc import Mapping
from typing import Any

from nemo_aligner.config import access
from nemo_aligner.config.fields import Configuration
from nemo_aligner.config.keys.common import PARALLEL
from nemo_aligner.config.keys.rollouts import Environment
from nemo_aligner.config.parallel_rules import EP_REMEDY
from nemo_aligner.config.server_rules import (
    check_kind_of_rewards,
    read_reward_models,
    read_web_rewards,
)
from nemo_aligner.config.values import Values, require_multiple
from nemo_aligner.core.errors import ConfigError

_ENVIRONMENT = Configuration("", {"": Environment}).tree


def check_policy(v: Values, kind: str, remote: str, dp: dict[str, int], per_prompt: str) -> None:
    """What the actors, of the `kind` "ppo", "rs" or "reinforce", have in common; `remote`: section
    of the servers that the job talks to, `per_prompt`: key of the number of responses to a prompt.
    """
    section, model = f"trainer.{kind}.", f"model.{kind}."
    v.same(section + "model_gbs", "model.global_batch_size")
    v.same(section + "model_mbs", "model.micro_batch_size")
    v.multiple(model + "num_rollout_samples", model + "rollout_micro_batch_size", times=dp)
    v.multiple(model + "num_val_samples", model + "val_rollout_micro_batch_size", times=dp)
    check_generation(v, model)
    check_reshard(v, section, model + "generation.reshard", dp)
    _check_own_rewards(v, kind, remote)
    queue, experts = f"{section}batch_iterator.use_flask", "model.expert_model_parallel_size"
    check_shared_queue(section, v.get(queue), v.get(experts, 1))
    check_remote(v, remote)
    read_reward_models(v.get(remote), remote)
    name, kept = model + "num_rollout_samples", v.size(per_prompt)
    samples, batch = v.size(name) * kept, v.size("model.global_batch_size")
    name += f" x {per_prompt}={kept}" if kept > 1 else ""
    require_multiple(name, samples, {"model.global_batch_size": batch})


def check_remote(v: Values, remote: str) -> None:
    access.read_token(v.get(f"{remote}.token_file"), remote)
    access.client_tls(v.get(f"{remote}.tls_ca_file"), remote)


def _check_own_rewards(v: Values, kind: str, remote: str) -> None:
    """Check what gives the rewards in the job, and that nothing beside it does."""
    section, environment = f"trainer.{kind}", f"model.{kind}.environment"
    path, port = f"{environment}.path", f"{environment}.port"
    check_kind_of_rewards(v, section)
    read_web_rewards(v.get(section), section)
    sources = (f"{section}.reward_fn", f"{section}.judge.url", path, port)
    given = [f"{key}={access.shown_url(str(v.get(key)))}" for key in sources if v.has(key)]
    v.refuse(
        """
        ENV.host!=DEFAULT or ENV.token_file & !ENV.port | has no effect: nothing listens for
            agents; set ENV.port, or ENV.host=DEFAULT and ENV.token_file=null
        JOB.overlong_buffer_len & ENV.path or ENV.port | is for single responses, but {} makes
            samples of several; set it to 0
        """,
        **{"ENV": environment, "JOB": section, "DEFAULT": _ENVIRONMENT["host"]},
    )
    if not given:
        return
    gives = f"{given[0]} gives the rewards"
    if len(given) > 1:
        raise ConfigError(f"{gives}, and so does {given[1]}; set one to null.")
    combined, models = f"{remote}.combine_rm_and_critic_server", f"{remote}.reward_models"
    if v.get(combined):
        raise ConfigError(f"{gives}, but {combined}=True; set that to False, in both jobs.")
    if v.get(models):
        raise ConfigError(f"{gives}, so {models} would not be asked; leave it null.")
    if v.has(port):
        access.server_token(
            v.get(f"{environment}.host"), v.get(f"{environment}.token_file"), environment
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
    """TP and PP of generation, by `asked_reshard` and training; "auto" ends the pipeline."""
    if isinstance(reshard, Mapping):
        return reshard["tp"], reshard["pp"]
    return (tp, 1) if reshard == "auto" else (tp, pp)


def check_reshard(v: Values, section: str, key: str, dp: dict[str, int]) -> None:
    if isinstance(v.get(key), Mapping):
        _check_sizes(v, section, key, dp)
    else:
        v.choice(key, ("none", "auto"))
    value = asked_reshard(v.get(key.removesuffix(".generation.reshard")))
    merge = "model.peft.merge_for_generation"
    with_adapters = v.get("model.peft.peft_scheme") not in (None, "none")
    if value not in (None, "none") and with_adapters and not v.get(merge, True):
        shown = str(value).replace("'", "")  # as a command writes it
        raise ConfigError(
            f"{key}={shown} moves weights that contain the adapters, but {merge}=False "
            f"keeps these apart; set {merge}=True, or {key}=none."
        )


def _check_sizes(v: Values, section: str, key: str, dp: dict[str, int]) -> None:
    """Check `generation.reshard={tp: ..., pp: ...}` against the model and its ranks."""
    given, remedy = v.get(key), f"or set {key}=auto"
    shown = f"{key}={given}".replace("'", "")  # as a command writes it
    if set(given) != {"tp", "pp"}:
        raise ConfigError(f"{shown} needs both sizes, such as {{tp: 1, pp: 1}}.")
    tp, pp = v.size(f"{key}.tp"), v.size(f"{key}.pp")
    trained_tp, trained_pp, cp, ep = (v.get(name, 1) for name in PARALLEL)
    trained = trained_tp * trained_pp
    if (tp, pp) == (trained_tp, trained_pp):
        return
    if trained % (tp * pp) and (tp * pp) % trained:
        raise ConfigError(
            f"{shown} and the {trained} ranks of TP x PP in training do not divide each other; "
            f"choose sizes whose product divides {trained} or is a multiple of it, {remedy}."
        )
    together = tp * pp // trained
    queue = f"{section}batch_iterator.use_flask"
    if together > 1:
        takes = f"{shown} takes the ranks of {together} data-parallel ranks"
        smaller = f"choose smaller sizes, {remedy}."
        for ranks in dp.values():
            if ranks % together:
                raise ConfigError(f"{takes}, of which there are {ranks}; {smaller}")
        if cp > 1:
            raise ConfigError(
                f"{takes}, which does not work with model.context_parallel_size={cp}; {smaller}"
            )
        if v.get(queue):
            raise ConfigError(
                f"{queue}=True does not work with {shown}: data-parallel ranks generate together, "
                "so none may draw more prompts than another; set it to False."
            )
    experts = v.get("model.num_moe_experts")
    if (ep > 1 or experts) and (tp, pp) != (trained_tp, 1):
        raise ConfigError(
            f"{shown} would divide experts anew; with model.num_moe_experts={experts} only the "
            f"pipeline can end: set {key}={{tp: {trained_tp}, pp: 1}}, {remedy}."
        )
    heads = v.get("model.num_query_groups") or v.get("model.num_attention_heads")
    parts = {"num_query_groups": (heads, tp)} | {
        name: (v.get(f"model.{name}"), size)
        for name, size in (("ffn_hidden_size", tp), ("num_layers", pp))
    }
    for name, (whole, size) in parts.items():
        if isinstance(whole, int) and whole % size:
            raise ConfigError(
                f"{shown} does not divide model.{name}={whole}; choose a size that does, {remedy}."
            )


def check_shared_queue(section: str, use_flask: bool | None, expert_parallel: int) -> None:
    """Refuse one queue for ranks that hold each other's experts; `section`: for the message."""
    if use_flask and expert_parallel > 1:
        raise ConfigError(
            f"{section}batch_iterator.use_flask=True does not work with "
            f"model.expert_model_parallel_size={expert_parallel}: no rank may generate more "
            f"often than another. Set it to False ({EP_REMEDY})."
        )


def check_generation(v: Values, model: str = "") -> None:
    """Check `length_params` in the section `model`: "model.ppo.", "model.rs." or ""."""
    longest, context = model + "length_params.max_length", "model.encoder_seq_length"
    v.refuse(f"{longest}>={context} | leaves no room for a prompt in {{{context}}}; lower it")
    v.at_most(model + "length_params.min_length", longest)


def check_responses_differ(v: Values, model: str, key: str | None = None) -> None:
    """Refuse several responses to a prompt, for which `key` asks, that would all be the same by
    the sampling parameters in the section `model`, with a dot at its end, or "".
    """
    v.refuse(
        """KEY>1 & SAMPLING.use_greedy or SAMPLING.top_k=1 | responses to a prompt would be the
        same with {}; sample, or draw one response""",
        **{"KEY": key or f"{model}num_rollouts_per_prompt", "SAMPLING": f"{model}sampling_params"},
    )


def check_compares_responses(name: str, key: str, responses: int) -> None:
    if responses < 2:
        raise ConfigError(
            f"{name} compares the responses to a prompt, but {key}={responses}; raise it."
        )
