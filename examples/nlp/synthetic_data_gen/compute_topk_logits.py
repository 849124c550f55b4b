# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Start `logits` of nemo_aligner/jobs/supervised.py, which says what it does and takes."""

from omegaconf import DictConfig

from nemo_aligner.jobs.supervised import logits
from nemo_aligner.launch.command_line import hydra_runner


@hydra_runner(config_path="conf", config_name="compute_topk_logits")
def main(cfg: DictConfig) -> None:
    logits(cfg)


if __name__ == "__main__":
    main()
