# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line of a script: Hydra composes the configuration and calls `main` with it."""

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from hydra._internal.utils import _run_hydra, get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from nemo_aligner.config.access import shown_word
from nemo_aligner.config.defaults import CONF
from nemo_aligner.core.endings import ExitCode, interruptible
from nemo_aligner.parallel.environment import hide_gpus

# The script stays in its working directory, writes no .hydra folder and logs to stdout only.
HYDRA_OVERRIDES = (
    "hydra.output_subdir=null",
    "hydra/job_logging=stdout",
    "hydra.run.dir=.",
    "hydra.job.chdir=False",
)


def hydra_runner(
    config_path: str = ".", config_name: str | None = None
) -> Callable[[Callable[[DictConfig], None]], Callable[..., None]]:
    """Decorator of a script's `main(cfg)`: NeMo's `hydra_runner` without its schemas and slow
    imports. `key=value`, `+key=` and `++key=` mean the same. A command line that Hydra cannot use
    ends the process with `ExitCode.USER_ERROR`.

    Args:
        config_path: folder of the YAML files, relative to the script; if missing, that of this
            package.
        config_name: YAML file without its ending.

    The decorated function may also be called with a configuration, or with the `arguments` of
    another command line; a `--config-path` there is relative to the working directory.
    """

    def decorator(main: Callable[[DictConfig], None]) -> Callable[..., None]:
        @functools.wraps(main)
        @interruptible()
        def run(cfg: DictConfig | None = None, arguments: list[str] | None = None) -> None:
            if cfg is not None:
                main(cfg)
                return
            is_composed = False

            @functools.wraps(main)
            def task(cfg: DictConfig) -> None:
                nonlocal is_composed
                is_composed = True
                if OmegaConf.select(cfg, "trainer.accelerator") == "cpu":
                    hide_gpus()  # before anything asks PyTorch for them
                main(cfg)

            folder = config_path
            beside = Path(inspect.getfile(main)).parent / config_path
            if not beside.is_dir() and (CONF / f"{config_name}.yaml").exists():
                folder = str(CONF)
            parser = get_args_parser()
            args = parser.parse_args(arguments)
            if arguments is not None and args.config_path:
                args.config_path = os.path.abspath(args.config_path)
            _check_words(args.overrides)
            has_own_files = bool(args.config_dir or args.config_path)
            words = [forced(word, has_own_files) for word in args.overrides]
            args.overrides = [*words, *HYDRA_OVERRIDES]
            try:
                _run_hydra(
                    args=args,
                    args_parser=parser,
                    task_function=task,
                    config_path=folder,
                    config_name=config_name,
                )
            except SystemExit as end:
                if end.code and not is_composed:  # Hydra has said why, and ends with 1
                    raise SystemExit(ExitCode.USER_ERROR) from None
                raise

        return run

    return decorator


def forced(word: str, may_be_group: bool = False) -> str:
    """A word with which Hydra sets a key even if the YAML file lacks it. One without a dot may be
    a group of files.
    """
    found = re.match(r"\+{0,2}(?!hydra\.)([A-Za-z_][\w.]*)=", word)
    is_key = found is not None and not (may_be_group and "." not in found[1])
    return f"++{word.lstrip('+')}" if is_key else word


def _check_words(words: Sequence[str]) -> None:
    """End the process at a word that Hydra cannot read: it would not say which one."""
    parser = OverridesParser.create()
    for word in words:
        try:
            parser.parse_override(word)
        except HydraException:
            key, sign, _ = shown_word(word).partition("=")
            remedy = f"put its value in quotes: \"{key}='...'\"" if sign else "write KEY=VALUE"
            print(f"ERROR: {shown_word(word)} cannot be read; {remedy}", file=sys.stderr)
            raise SystemExit(ExitCode.USER_ERROR) from None
