# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What gives the rewards in the job that trains: an environment, a Python function, or web
servers.
"""

import atexit
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from nemo.utils import logging
from omegaconf import DictConfig

from nemo_aligner.checkpoint.dist_ckpt import failing_together
from nemo_aligner.config.reward_models import read_reward_servers
from nemo_aligner.core.errors import UserError
from nemo_aligner.data.nlp.prompts import PromptColumns, RLHFDataset
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import gathered
from nemo_aligner.servers.environment import PythonEnvironment
from nemo_aligner.servers.reward_client import RewardsInJob, ScoreSource
from nemo_aligner.servers.reward_function import RewardFunction
from nemo_aligner.servers.reward_url import TAKEN, RewardServers


def start_score_source(
    cfg: DictConfig, kind: str, remote: str, policy: Any, prompts: Sequence[RLHFDataset]
) -> ScoreSource | None:
    """What `model.<kind>.environment` or `trainer.<kind>.reward_fn` names; None: servers of this
    package give the rewards. All ranks call it. Its processes end with the job.

    Args:
        cfg: the whole configuration.
        kind: "ppo", "rs" or "reinforce".
        remote: section of the servers, which says how long one may take to come up.
        policy: a `MegatronGPTPolicyModel`; it gets the environment.
        prompts: data sets whose records have columns that the reward may ask for.

    Raises:
        UserError: the code cannot be used; on all ranks.
    """
    options, section = cfg.model[kind].environment, f"model.{kind}.environment"
    if options.path is not None:
        with failing_together():
            policy.environment = _environment(options, section, policy)
            atexit.register(policy.environment.close)
        return policy.environment
    options, section = cfg.trainer[kind], f"trainer.{kind}"
    if options.reward_fn is None:
        return None
    function = None
    with failing_together():
        if parallel_state.get_rank() == parallel_state.get_model_parallel_src_rank():
            function = _function(options, section, policy, cfg[remote].init_timeout_s)
            atexit.register(function.close)
            check_names(function, prompts[0].lines[int(prompts[0].documents[0])])
    asked = next(filter(None, gathered(function and function.columns)), None)
    if asked is None:
        return RewardsInJob(function, None)
    with failing_together():  # each rank checks its share of the records
        share = torch.distributed.get_rank(), torch.distributed.get_world_size()
        columns = PromptColumns(prompts, asked, share)
    return RewardsInJob(function, columns)


def check_names(function: RewardFunction, record: Mapping[str, Any]) -> None:
    """Refuse or warn of columns of a record that the reward does not get, as another has the name.

    Raises:
        UserError: the parameter that gets the lengths is called like a column.
    """
    name = function.third
    if name in record and not name.startswith("len"):
        raise UserError(
            f"{function.title} has '{name}', a column of the records, as its third parameter, "
            f"which gets the lengths: write (prompts, responses, lengths, {name})."
        )
    taken = [name for name in TAKEN if name in record]
    if function.is_served and taken:
        logging.warning(
            f"{function.title} does not get these columns of the records, as its own fields have "
            f"the names: {', '.join(taken)}. Rename them in the data if it needs them."
        )


def _environment(options: DictConfig, section: str, policy: Any) -> PythonEnvironment:
    return PythonEnvironment(
        options.path,
        policy.tokenizer,
        max_turns=options.max_turns,
        workers=options.workers,
        timeout_s=options.timeout_s,
        fallback=options.fallback,
        section=section,
        starts_workers=policy.generator.asks_environment,
    )


def _function(
    options: DictConfig, section: str, policy: Any, init_timeout_s: float
) -> RewardFunction:
    servers = read_reward_servers(options, section)
    return RewardFunction(
        RewardServers(servers, init_timeout_s) if servers else options.reward_fn,
        policy.tokenizer,
        workers=options.reward_fn_workers * (len(servers.urls) if servers else 1),
        timeout_s=options.reward_fn_timeout_s,
        fallback=options.reward_fn_fallback,
        per=options.rewards_per,
        step_end=options.step_end,
        section=section,
        gives_columns=True,
    )
