# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
r"""Train a policy with REINFORCE, against a server of rewards.

That is `serve reward`.

    nemo-aligner train reinforce pretrained_checkpoint.restore_from_path=sft.nemo \
        "model.data.data_prefix={train: [a.jsonl], validation: [b.jsonl], test: [b.jsonl]}" \
        trainer.reinforce.num_rollouts_per_prompt=4 \
        remote_rm.host=localhost remote_rm.port=5555
"""

from omegaconf import DictConfig

from nemo_aligner.launch.job_entry import job_main, reward_servers
from nemo_aligner.launch.start_up import long_imports

CONFIG_NAME = "gpt_reinforce_actor"


@job_main(CONFIG_NAME, jobs=lambda cfg: 1 + reward_servers(cfg, "reinforce"))
def main(cfg: DictConfig) -> None:
    with long_imports():
        from nemo_aligner.algorithms.reinforce import ReinforceTrainer
        from nemo_aligner.algorithms.rollout_trainer import compute_num_optimizer_steps
        from nemo_aligner.data.nlp.batch_iterators import get_batch_iterator_cls
        from nemo_aligner.launch.experiment import (
            load_trainer_state,
            run_timer,
            set_up_training,
            start_with_model,
        )
        from nemo_aligner.launch.prompts import build_prompt_loaders
        from nemo_aligner.launch.score_sources import start_score_source
        from nemo_aligner.models.nlp.gpt.megatron_gpt_reinforce_actor import (
            MegatronGPTReinforceActorModel,
        )
        from nemo_aligner.servers.reward_client import RemoteGPTRMClient

    job, model = start_with_model(cfg, CONFIG_NAME, "reinforce", MegatronGPTReinforceActorModel)
    settings, reinforce = cfg.trainer.reinforce, cfg.model.reinforce
    if settings.initial_policy_kl_penalty > 0:
        # Before a checkpoint is resumed: the reference stays the model that the job started from.
        model.set_reference_policy()

    prompts = build_prompt_loaders(cfg, "reinforce", "remote_rm", model.tokenizer)
    optimizer, scheduler, ckpt_callback = set_up_training(
        cfg,
        job,
        model,
        max_steps=compute_num_optimizer_steps(
            prompts.max_steps,
            reinforce.num_rollout_samples * settings.num_rollouts_per_prompt,
            cfg.model.global_batch_size,
        ),
        train=prompts.train_dataloader_builder(consumed_samples=0),
        has_validation=prompts.val_dataloader_builder is not None,
    )

    rm = RemoteGPTRMClient(
        cfg.remote_rm,
        model.tokenizer,
        max_length=cfg.model.encoder_seq_length,
        score_source=start_score_source(cfg, "reinforce", "remote_rm", model, prompts.datasets),
    )
    try:
        reinforce_trainer = ReinforceTrainer(
            cfg=settings,
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            train_dataloader_builder=prompts.train_dataloader_builder,
            val_dataloader_builder=prompts.val_dataloader_builder,
            collate_fn=prompts.collate_fn,
            rm=rm,
            batch_iterator_cls=get_batch_iterator_cls(settings.batch_iterator),
            logger=job.logger,
            ckpt_callback=ckpt_callback,
            run_timer=run_timer(cfg),
        )
        state = load_trainer_state(cfg, ckpt_callback)
        if state is not None:
            reinforce_trainer.load_state_dict(state)
        reinforce_trainer.fit()
    finally:
        rm.communicator.close()
