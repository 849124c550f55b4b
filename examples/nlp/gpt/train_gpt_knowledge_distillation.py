# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Start `train_distill` of nemo_aligner/jobs/supervised.py, which says what it does and takes."""

from omegaconf import DictConfig

from nemo_aligner.jobs.supervised import train_distill
from nemo_aligner.launch.command_line import hydra_runner


@hydra_runner(config_path="conf", config_name="gpt_knowledge_distillation")
def main(cfg: DictConfig) -> None:
    train_distill(cfg)


if __name__ == "__main__":
    main()
