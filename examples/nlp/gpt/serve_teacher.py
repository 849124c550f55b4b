# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Start `serve_teacher` of nemo_aligner/jobs/servers.py, which says what it does and takes."""

from omegaconf import DictConfig

from nemo_aligner.jobs.servers import serve_teacher
from nemo_aligner.launch.command_line import hydra_runner


@hydra_runner(config_path="conf", config_name="inference_teacher")
def main(cfg: DictConfig) -> None:
    serve_teacher(cfg)


if __name__ == "__main__":
    main()
