# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Start `train_ppo` of nemo_aligner/jobs/rollouts.py, which says what it does and takes."""

from omegaconf import DictConfig

from nemo_aligner.jobs.rollouts import train_ppo
from nemo_aligner.launch.command_line import hydra_runner


@hydra_runner(config_path="conf", config_name="gpt_ppo_actor")
def main(cfg: DictConfig) -> None:
    train_ppo(cfg)


if __name__ == "__main__":
    main()
