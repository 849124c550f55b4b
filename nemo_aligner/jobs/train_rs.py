# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
r"""Train a policy with rejection sampling, against a server of rewards.

That is `serve reward`.

    nemo-aligner train rs pretrained_checkpoint.restore_from_path=sft.nemo \
        "model.data.data_prefix={train: [a.jsonl], validation: [b.jsonl], test: [b.jsonl]}" \
        model.rs.num_rollouts_per_prompt=4 model.rs.top_n_rollouts=1 \
        remote_rm.host=localhost remote_rm.port=5555

One process per device: with `trainer.devices=N` the command starts them itself; torchrun and
srun work as well. The same command resumes from the last checkpoint in
`exp_manager.explicit_log_dir`. Keys: `nemo-aligner config rs`, docs/config.md.
"""

from functools import partial
from typing import Any

from omegaconf import DictConfig

from nemo_aligner.config.checks import check_config
from nemo_aligner.config.defaults import complete_config
from nemo_aligner.launch.endings import user_errors_end_the_job
from nemo_aligner.launch.start_up import long_imports, share_cores

CONFIG_NAME = "gpt_rs_actor"


@user_errors_end_the_job
def main(cfg: DictConfig) -> None:
    cfg = complete_config(cfg, CONFIG_NAME)
    check_config(cfg, CONFIG_NAME)
    in_job = cfg.model.rs.environment.path or cfg.trainer.rs.reward_fn
    share_cores(cfg.trainer.devices, 1 if in_job else 2)
    train(cfg)


def train(cfg: DictConfig) -> None:
    # Here, not at the top: they take seconds, and --help and a wrong key need none of them.
    with long_imports():
        from nemo_aligner.algorithms.rollout_trainer import compute_num_optimizer_steps
        from nemo_aligner.algorithms.rs import RSTrainer
        from nemo_aligner.data.nlp.builders import build_dataloader, collate_with_pad_to_max_batch
        from nemo_aligner.launch.experiment import (
            load_trainer_state,
            run_timer,
            set_up_training,
            start_job,
        )
        from nemo_aligner.launch.model_loading import complete_model_config, load_from_nemo
        from nemo_aligner.launch.prompts import build_prompt_datasets
        from nemo_aligner.launch.score_sources import start_score_source
        from nemo_aligner.models.nlp.gpt.megatron_gpt_rs_actor import MegatronGPTRSModel
        from nemo_aligner.servers.reward_client import RemoteGPTRMClient
        from nemo_aligner.training.schedule import compute_max_steps, compute_num_steps_per_epoch

    restore_path = cfg.pretrained_checkpoint.restore_from_path
    cfg.model = complete_model_config(restore_path, cfg.model, CONFIG_NAME)
    job = start_job(cfg, "rs")

    model = load_from_nemo(MegatronGPTRSModel, cfg.model, job.trainer, restore_path=restore_path)
    model.init_peft(cfg.model.peft)

    rs = cfg.model.rs
    train_ds, validation_ds = build_prompt_datasets(cfg, "rs", "remote_rm", model.tokenizer)
    prompts_dataloader = partial(
        build_dataloader,
        cfg,
        consumed_samples=0,  # the trainer says where to go on
        load_gbs=False,
        collate_fn=collate_with_pad_to_max_batch(
            rs.length_params.max_length,
            model.tokenizer.eos_id,
            cfg,
            generate_masks_and_position_ids=False,
        ),
    )
    train_dataloader: Any = prompts_dataloader(
        train_ds, mbs=rs.rollout_micro_batch_size, gbs=rs.num_rollout_samples
    )
    val_dataloader: Any = prompts_dataloader(
        validation_ds,
        mbs=rs.val_rollout_micro_batch_size,
        gbs=rs.num_val_samples,
        use_random_sampler=False,
    )

    steps_per_epoch = compute_num_steps_per_epoch(train_dataloader.batch_sampler)
    rs_steps = compute_max_steps(
        steps_per_epoch, cfg.trainer.rs.max_epochs, cfg.trainer.rs.max_steps
    )
    optimizer, scheduler, ckpt_callback = set_up_training(
        cfg,
        job,
        model,
        max_steps=compute_num_optimizer_steps(
            rs_steps, rs.num_rollout_samples * rs.top_n_rollouts, cfg.model.global_batch_size
        ),
        train=train_dataloader,
    )

    rm = RemoteGPTRMClient(
        cfg.remote_rm,
        model.tokenizer,
        max_length=cfg.model.encoder_seq_length,
        score_source=start_score_source(cfg, "rs", "remote_rm", model, (train_ds, validation_ds)),
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
