# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules that servers share, and those of reward models."""

import importlib.util
import ssl
from collections.abc import Mapping

from nemo_aligner.config.access import server_tls, server_token
from nemo_aligner.config.values import Values
from nemo_aligner.core.errors import ConfigError

FRONTENDS = ("triton", "asgi")
SERVER_KEYS = ("frontend", "tls_certificate", "tls_key")  # of the section `server`


def read_frontend(
    frontend: str, certificate: str | None, key: str | None
) -> ssl.SSLContext | None:
    """Check the section `server`; returns how a server encrypts, None if it does not."""
    if frontend not in FRONTENDS:
        raise ConfigError(f"server.frontend={frontend!r} must be one of {', '.join(FRONTENDS)}.")
    if frontend == "asgi" and importlib.util.find_spec("uvicorn") is None:
        raise ConfigError(
            "server.frontend=asgi needs uvicorn, which is not installed: pip install "
            "'nemo-aligner-mcore[asgi]'"
        )
    if frontend == "triton" and importlib.util.find_spec("pytriton") is None:
        raise ConfigError(
            "server.frontend=triton needs PyTriton, which is not installed: pip install "
            "nvidia-pytriton, or set server.frontend=asgi, which does without."
        )
    if frontend == "triton" and (certificate is not None or key is not None):
        raise ConfigError(
            f"server.tls_certificate={certificate} and server.tls_key={key} have an effect only "
            "with server.frontend=asgi; set it, or leave them null."
        )
    return server_tls(certificate, key)


def check_kind_of_rewards(v: Values, section: str) -> None:
    """Check whether rewards are given per response, step or token."""
    per, step_end = v.get(f"{section}.rewards_per"), v.get(f"{section}.step_end")
    if (per == "step") != bool(step_end):
        raise ConfigError(
            f"{section}.rewards_per={per} and {section}.step_end={step_end!r} do not go together: "
            "the text that ends a step is needed with rewards_per=step, and only there."
        )


def check_source_of_rewards(remote: Mapping) -> None:
    """Raise `ConfigError` if, by the section `remote_critic_rm`, rewards are to come from the
    critic server and from others too.
    """
    if remote["reward_models"] and remote["combine_rm_and_critic_server"]:
        raise ConfigError(
            "remote_critic_rm.reward_models names servers of their own, but "
            "remote_critic_rm.combine_rm_and_critic_server=True has the critic server score "
            "rewards; set it to False."
        )


def check_reward_standardization(model: Mapping) -> None:
    """Raise `ConfigError` if rewards are to be standardized without a mean and a positive standard
    deviation. `model` is the completed section, here and below.
    """
    standardization = model["reward_standardization"]
    if not standardization or not standardization["enable"]:
        return
    for key in ("mean", "std"):
        if standardization[key] is None:
            raise ConfigError(
                "model.reward_standardization.enable=True needs "
                f"model.reward_standardization.{key}; set it."
            )
    v = Values({"model": {"reward_standardization": dict(standardization)}})
    v.number("model.reward_standardization.mean")
    v.number("model.reward_standardization.std", 0, above=True)


def check_attributes_are_merged(regression: Mapping) -> None:
    """Raise `ConfigError` if a reward model gives several attributes for a sample, not their sum,
    by its section `model.regression`.
    """
    attributes = regression["num_attributes"]
    if attributes > 1 and not regression["merge_attributes"]:
        raise ConfigError(
            f"this reward model gives {attributes} attributes (model.regression.num_attributes), "
            "but a reward is one number per sample; set model.regression.merge_attributes=True, "
            f"and model.regression.attribute_weights to {attributes} numbers unless they all "
            "count the same."
        )


def check_one_reward_per_sample(model: Mapping) -> None:
    """Raise `ConfigError` unless a reward model gives one number per sample."""
    check_attributes_are_merged(model["regression"])
    served_attributes(model)


def served_attributes(model: Mapping) -> int:
    """How many numbers a reward model gives for each sample: its attributes, unless it merges
    them.

    Raises:
        ConfigError: it has weights that it does not use, or gives a number per token.
    """
    regression = model["regression"]
    weights = regression["attribute_weights"]
    if weights is not None and not regression["merge_attributes"]:
        raise ConfigError(
            f"model.regression.attribute_weights={list(weights)} has an effect only when "
            "attributes are merged; set model.regression.merge_attributes=True, as a critic from "
            "the same checkpoint does."
        )
    if model["output_sequence"]:
        raise ConfigError(
            "model.output_sequence=True gives a number per token, as a critic does, but a reward "
            "is one number per sample; serve the reward model that the critic started from, or "
            "set it to False. inference.rewards_per gives rewards of steps and tokens."
        )
    return 1 if regression["merge_attributes"] else int(regression["num_attributes"])


def check_scores_of_tokens(model: Mapping) -> None:
    """Raise `ConfigError` unless a reward model can score single tokens."""
    if model["use_avg_pool"]:
        raise ConfigError(
            "model.use_avg_pool=True: this reward model scores the mean over all tokens, not "
            "single ones; set inference.rewards_per=response."
        )


def check_serving(values: Values, section: str) -> None:
    """What the servers have in common; `section` holds their port."""
    server_token(values.get(f"{section}.host"), values.get(f"{section}.token_file"), section)
    read_frontend(*(values.get(f"server.{key}") for key in SERVER_KEYS))
    sizes = values.get(f"{section}.inference_micro_batch_size")
    for size in sizes if isinstance(sizes, (list, tuple)) else [sizes]:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(
                f"{section}.inference_micro_batch_size={sizes!r} must be a positive whole number "
                "or a list of them."
            )
