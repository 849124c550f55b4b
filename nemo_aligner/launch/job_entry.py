# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The entry of every job of nemo_aligner/jobs. Imports nothing heavy."""

import functools
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig

from nemo_aligner.config.checks import check_config, check_sections
from nemo_aligner.config.defaults import complete_config
from nemo_aligner.config.inert_keys import to_plain
from nemo_aligner.config.parallel_rules import (
    check_accelerator,
    count_devices,
    cuda_devices,
    default_precision,
)
from nemo_aligner.config.rules import why_nothing_is_kept
from nemo_aligner.config.values import Values, plain_dict, resolved
from nemo_aligner.core.endings import ending_file
from nemo_aligner.core.estimators import ADVANTAGE_ESTIMATORS
from nemo_aligner.launch.endings import user_errors_end_the_job
from nemo_aligner.launch.inputs import check_inputs
from nemo_aligner.launch.start_up import share_cores
from nemo_aligner.training.stop_requests import stop_requests

Main = Callable[[DictConfig], None]


def job_main(
    config_name: str,
    jobs: int | Callable[[DictConfig], int] = 1,
    check: Main = lambda cfg: None,
) -> Callable[[Main], Any]:
    """Decorator of a job, which gets its configuration complete and checked, and ends the process
    as `user_errors_end_the_job` says. `jobs` is that of `share_cores`, or computes it; `check`
    raises `ConfigError` for what a checked configuration cannot have in this job.
    """

    def decorator(main: Any) -> Any:
        main.config_name, main.check = config_name, check

        @functools.partial(user_errors_end_the_job, is_job=True)
        @functools.wraps(main)
        def run(cfg: DictConfig) -> None:
            check_sections(plain_dict(cfg), config_name)
            cfg = complete_config(cfg, config_name)
            check_job(cfg, config_name)
            check(cfg)
            beside = jobs if isinstance(jobs, int) else jobs(cfg)
            share_cores(to_plain(cfg.trainer.devices), beside)
            if cfg.trainer.precision is None:
                cfg.trainer.precision = default_precision(cfg.trainer.accelerator)
            main(cfg)
            file = ending_file()
            if file is not None and stop_requests.has_trained:
                from nemo_aligner.report.ending import last_lines  # heavy

                nothing = why_nothing_is_kept(Values(resolved(cfg)), config_name)
                print(f"\n{last_lines(file.parent, config_name, nothing)}", flush=True)

        return run

    return decorator


def check_job(cfg: DictConfig, config_name: str) -> list[str]:
    """Check a complete configuration, then the files that it names; returns notes of
    `check_config`.
    """
    accelerator, devices = cfg.trainer.accelerator, to_plain(cfg.trainer.devices)
    on_cpu, counts_gpus = accelerator == "cpu", str(devices) in ("auto", "-1")
    gpus = None if on_cpu or counts_gpus else count_devices(devices)  # as if they were there
    notes = check_config(
        cfg, config_name, visible_devices=gpus, before_notes=lambda: check_inputs(cfg, config_name)
    )
    if gpus is not None:
        check_accelerator(accelerator, devices, cuda_devices())
    return notes


def reward_servers(cfg: DictConfig, kind: str) -> int:
    """How many servers give the rewards of the job `kind`: none if it has them by itself."""
    return 0 if _given(cfg, kind) or has_no_rewards(cfg, kind) else 1


def has_no_rewards(cfg: DictConfig, kind: str) -> bool:
    """Whether the job `kind` learns from a teacher alone."""
    estimator = ADVANTAGE_ESTIMATORS.get(cfg.trainer[kind].get("advantage_estimator"))
    if estimator is None or not estimator.of_teacher:
        return False
    return not (_given(cfg, kind) or cfg.remote_critic_rm.reward_models)


def _given(cfg: DictConfig, kind: str) -> bool:
    """Whether the job has its rewards by itself."""
    environment, own = cfg.model[kind].environment, cfg.trainer[kind]
    return any((environment.path, environment.port, own.reward_fn, own.judge.url))
