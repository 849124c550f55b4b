# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
r"""Train a policy with rejection sampling, against a server of rewards.

That is `serve reward`.

    nemo-aligner train rs pretrained_checkpoint.restore_from_path=sft.nemo \
        "model.data.data_prefix={train: [a.jsonl], validation: [b.jsonl], test: [b.jsonl]}" \
        model.rs.num_rollouts_per_prompt=4 model.rs.top_n_rollouts=1 \
        remote_rm.host=localhost remote_rm.port=5555
"""

from typing import Any

from omegaconf import DictConfig

from nemo_aligner.launch.job_entry import job_main, reward_servers
from nemo_aligner.launch.start_up import long_imports

CONFIG_NAME = "gpt_rs_actor"


@job_main(CONFIG_NAME, jobs=lambda cfg: 1 + reward_servers(cfg, "rs"))
def main(cfg: DictConfig) -> None:
    with long_imports():
        from nemo_aligner.algorithms.rs import RSTrainer
        from nemo_aligner.launch.experiment import start_with_model
        from nemo_aligner.launch.rollout_job import train_on_rollouts
        from nemo_aligner.models.nlp.gpt.megatron_gpt_rs_actor import MegatronGPTRSModel

    job, model = start_with_model(cfg, CONFIG_NAME, "rs", MegatronGPTRSModel)
    rs = cfg.model.rs

    def build_trainer(
        train_dataloader_builder: Any,
        val_dataloader_builder: Any,
        collate_fn: Any,
        batch_iterator_cls: Any,
        **common: Any,
    ) -> RSTrainer:
        # 0: the trainer says where to go on
        start = {"consumed_samples": 0, "collate_fn": collate_fn}
        return RSTrainer(
            train_dataloader=train_dataloader_builder(**start),
            val_dataloader=val_dataloader_builder and val_dataloader_builder(**start),
            num_rollouts_per_prompt=rs.num_rollouts_per_prompt,
            top_n_rollouts=rs.top_n_rollouts,
            **common,
        )

    train_on_rollouts(cfg, job, model, build_trainer, rs.top_n_rollouts)
