# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The environment of a job whose samples have several turns."""

import atexit
from typing import Any

from omegaconf import DictConfig

from nemo_aligner.checkpoint.dist_ckpt import gathered
from nemo_aligner.core.errors import UserError
from nemo_aligner.servers.environment import PythonEnvironment


def start_environment(cfg: DictConfig, section: str, policy: Any) -> PythonEnvironment | None:
    """Give `policy` the environment that `cfg` names; None if it names none. All ranks call it.

    The ranks that ask it start its workers, which end with the job.

    Args:
        cfg: `path`, `max_turns`, `workers`, `timeout_s`, `fallback`.
        section: name of `cfg`.
        policy: a `MegatronGPTPolicyModel`.

    Raises:
        ConfigError: a value that cannot work.
        UserError: the class cannot be used; on all ranks.
    """
    if cfg.path is None:
        return None
    environment, failure = None, None
    try:
        environment = PythonEnvironment(
            cfg.path,
            policy.tokenizer,
            max_turns=cfg.max_turns,
            workers=cfg.workers,
            timeout_s=cfg.timeout_s,
            fallback=cfg.fallback,
            section=section,
            starts_workers=policy.generator.asks_environment,
        )
        atexit.register(environment.close)
    except UserError as error:
        failure = str(error)
    messages = [message for message in gathered(failure) if message is not None]
    if messages:
        raise UserError(messages[0])
    policy.environment = environment
    return environment
