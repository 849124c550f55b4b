# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Start `train_rm` of nemo_aligner/jobs/supervised.py, which says what it does and takes."""

from omegaconf import DictConfig

from nemo_aligner.jobs.supervised import train_rm
from nemo_aligner.launch.command_line import hydra_runner


@hydra_runner(config_path="conf", config_name="training_rm")
def main(cfg: DictConfig) -> None:
    train_rm(cfg)


if __name__ == "__main__":
    main()
