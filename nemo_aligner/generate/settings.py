# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The configuration of a command: its YAML file, and over it `key=value` words."""

import argparse
import os
import re
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_aligner.core.errors import UserError
from nemo_aligner.parallel.environment import hide_gpus

RESTORE_KEY = "pretrained_checkpoint.restore_from_path"


class CommandParser(argparse.ArgumentParser):
    """A parser of options, and of words and `key=value` in any order where it `takes_words`. A
    mistake ends the command like any other user's error.
    """

    def __init__(self, takes_words: bool = True, **options: Any) -> None:
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options
        )
        if takes_words:
            self.add_argument(
                "words", nargs="*", metavar="key=value", help="settings, as in the scripts"
            )

    def error(self, message: str) -> None:  # type: ignore[override]
        """Raise in place of an exit with the long usage."""
        raise UserError(f"{message}; {self.prog} --help says more.")

    def split(self, argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str], list[str]]:
        """The options, the words that are no settings, and the settings."""
        args = self.parse_intermixed_args(argv)
        settings = [word for word in args.words if is_setting(word)]
        return args, [word for word in args.words if not is_setting(word)], settings


def is_setting(word: str) -> bool:
    """Whether a word is `key=value`, in one of Hydra's forms, and not the name of a file."""
    return re.match(r"(~|\+{0,2})[A-Za-z_][\w.]*(=|$)", word) is not None and (
        "=" in word and not os.path.exists(word)
    )


def compose_settings(name: str, settings: list[str]) -> DictConfig:
    """`conf/<name>.yaml` with `settings` over it. `UserError`: a word that is no `key=value`."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException

    from nemo_aligner.config.defaults import CONF
    from nemo_aligner.launch.command_line import forced

    try:
        with initialize_config_dir(str(CONF.resolve()), version_base=None):
            cfg = compose(name, [forced(word) for word in settings])
    except HydraException as error:
        raise UserError(
            f"the settings {' '.join(settings)} cannot be read: {str(error).strip()}"
        ) from error
    if OmegaConf.select(cfg, "trainer.accelerator") == "cpu":
        hide_gpus()  # before anything asks PyTorch for them
    return cfg
