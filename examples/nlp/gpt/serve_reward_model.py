# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Start `serve_reward` of nemo_aligner/jobs/servers.py, which says what it does and takes."""

from omegaconf import DictConfig

from nemo_aligner.jobs.servers import serve_reward
from nemo_aligner.launch.command_line import hydra_runner


@hydra_runner(config_path="conf", config_name="inference_rm")
def main(cfg: DictConfig) -> None:
    serve_reward(cfg)


if __name__ == "__main__":
    main()
