# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
r"""Train a policy with rejection sampling, against a server of rewards.

That is `serve reward`.

    nemo-aligner train rs pretrained_checkpoint.restore_from_path=sft.nemo \
        "model.data.data_prefix={train: [a.jsonl], validation: [b.jsonl], test: [b.jsonl]}" \
        model.rs.num_rollouts_per_prompt=4 model.rs.top_n_rollouts=1 \
        remote_rm.host=localhost remote_rm.port=5555
"""

from omegaconf import DictConfig

from nemo_aligner.launch.job_entry import job_main, reward_servers
from nemo_aligner.launch.start_up import long_imports

CONFIG_NAME = "gpt_rs_actor"


@job_main(CONFIG_NAME, jobs=lambda cfg: 1 + reward_servers(cfg, "rs"))
def main(cfg: DictConfig) -> None:
    with long_imports():
        from nemo_aligner.algorithms.rollout_trainer import compute_num_optimizer_steps
        from nemo_aligner.algorithms.rs import RSTrainer
        from nemo_aligner.launch.experiment import (
            load_trainer_state,
            run_timer,
            set_up_training,
            start_with_model,
        )
        from nemo_aligner.launch.prompts import build_prompt_loaders
        from nemo_aligner.launch.score_sources import start_score_source
        from nemo_aligner.models.nlp.gpt.megatron_gpt_rs_actor import MegatronGPTRSModel
        from nemo_aligner.servers.reward_client import RemoteGPTRMClient

    job, model = start_with_model(cfg, CONFIG_NAME, "rs", MegatronGPTRSModel)

    rs = cfg.model.rs
    prompts = build_prompt_loaders(cfg, "rs", "remote_rm", model.tokenizer)
    # 0: the trainer says where to go on
    start = {"consumed_samples": 0, "collate_fn": prompts.collate_fn}
    train_dataloader = prompts.train_dataloader_builder(**start)
    build_validation = prompts.val_dataloader_builder
    val_dataloader = None if build_validation is None else build_validation(**start)
    optimizer, scheduler, ckpt_callback = set_up_training(
        cfg,
        job,
        model,
        max_steps=compute_num_optimizer_steps(
            prompts.max_steps,
            rs.num_rollout_samples * rs.top_n_rollouts,
            cfg.model.global_batch_size,
        ),
        train=train_dataloader,
        has_validation=val_dataloader is not None,
    )

    rm = RemoteGPTRMClient(
        cfg.remote_rm,
        model.tokenizer,
        max_length=cfg.model.encoder_seq_length,
        score_source=start_score_source(cfg, "rs", "remote_rm", model, prompts.datasets),
    )
    try:
        rs_trainer = RSTrainer(
            cfg=cfg.trainer.rs,
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            train_dataloader=train_dataloader,
            val_dataloader=val_dataloader,
            logger=job.logger,
            ckpt_callback=ckpt_callback,
            run_timer=run_timer(cfg),
            num_rollouts_per_prompt=rs.num_rollouts_per_prompt,
            top_n_rollouts=rs.top_n_rollouts,
            rm=rm,
        )
        state = load_trainer_state(cfg, ckpt_callback)
        if state is not None:
            rs_trainer.load_state_dict(state)
        rs_trainer.fit()
    finally:
        rm.communicator.close()
