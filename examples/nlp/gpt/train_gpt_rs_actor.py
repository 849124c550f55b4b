# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Start `train_rs` of nemo_aligner/jobs/rollouts.py, which says what it does and takes."""

from omegaconf import DictConfig

from nemo_aligner.jobs.rollouts import train_rs
from nemo_aligner.launch.command_line import hydra_runner


@hydra_runner(config_path="conf", config_name="gpt_rs_actor")
def main(cfg: DictConfig) -> None:
    train_rs(cfg)


if __name__ == "__main__":
    main()
