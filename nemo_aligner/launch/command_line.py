# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line of a script: Hydra composes the configuration and calls `main` with it."""

import functools
from collections.abc import Callable

from hydra._internal.utils import _run_hydra, get_args_parser
from omegaconf import DictConfig

# The script stays in its working directory, writes no .hydra folder and logs to stdout only;
# `exp_manager` makes the folder of a job.
HYDRA_OVERRIDES = ("hydra.output_subdir=null", "hydra/job_logging=stdout", "hydra.run.dir=.")


def hydra_runner(
    config_path: str = ".", config_name: str | None = None
) -> Callable[[Callable[[DictConfig], None]], Callable[..., None]]:
    """Decorator of a script's `main(cfg)`: NeMo's `hydra_runner` without its schemas.

    NeMo's own imports all of NeMo, which takes seconds; with this one, `--help` and a mistake in
    the configuration are answered at once. The command line is the same: `key=value`, `+key=`,
    `++key=`, `~key`, `--config-path`, `--config-name`, `--config-dir`, `--cfg job`, `--multirun`.

    Args:
        config_path: folder of the YAML files, relative to the script.
        config_name: YAML file without its ending.
    """

    def decorator(main: Callable[[DictConfig], None]) -> Callable[..., None]:
        @functools.wraps(main)
        def run(cfg: DictConfig | None = None) -> None:
            if cfg is not None:
                main(cfg)
                return
            parser = get_args_parser()
            args = parser.parse_args()
            args.overrides.extend(HYDRA_OVERRIDES)
            _run_hydra(
                args=args,
                args_parser=parser,
                task_function=main,
                config_path=config_path,
                config_name=config_name,
            )

        return run

    return decorator
