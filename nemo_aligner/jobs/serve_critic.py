# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
r"""Serve the critic of a PPO job, and its reward model too.

The latter with `trainer.ppo.combine_rm_and_critic_server=True`.

    nemo-aligner serve critic pretrained_checkpoint.restore_from_path=reward_model.nemo \
        trainer.ppo.port=5556

Both start from the reward model: one of pairs, or a regression reward model, whose attributes are
merged. With `combine_rm_and_critic_server=False` the critic may also start from a language model,
with a new head, or from a critic; rewards then come from elsewhere (`serve reward`). The
server runs until SIGTERM or SIGINT; the actor (`train ppo`) has it trained and saved.
"""

from omegaconf import DictConfig

from nemo_aligner.launch.job_entry import job_main
from nemo_aligner.launch.start_up import long_imports

CONFIG_NAME = "gpt_ppo_critic"


@job_main(CONFIG_NAME, jobs=lambda cfg: 2 if cfg.trainer.ppo.combine_rm_and_critic_server else 3)
def main(cfg: DictConfig) -> None:
    with long_imports():
        from nemo_aligner.algorithms.critic_server_trainer import CriticServerTrainer
        from nemo_aligner.launch.experiment import load_trainer_state, set_up_training, start_job
        from nemo_aligner.launch.model_loading import complete_model_config, load_from_nemo
        from nemo_aligner.models.nlp.gpt.megatron_gpt_critic import MegatronGPTCriticModel
        from nemo_aligner.models.nlp.gpt.reward_model_classes import reward_model_type

    restore_path = cfg.pretrained_checkpoint.restore_from_path
    cfg.model = complete_model_config(restore_path, cfg.model, CONFIG_NAME)
    reward_model_type(cfg.model.reward_model_type)  # refuses a kind that does not exist
    job = start_job(cfg, "ppo")

    model = load_from_nemo(
        MegatronGPTCriticModel, cfg.model, job.trainer, restore_path=restore_path
    )
    model.init_peft(cfg.model.peft)
    if cfg.trainer.ppo.combine_rm_and_critic_server:
        # Before a checkpoint is resumed: rewards come from the model that the job started from.
        model.set_reward_model()

    optimizer, scheduler, ckpt_callback = set_up_training(
        cfg, job, model, max_steps=cfg.trainer.ppo.max_steps
    )
    critic_trainer = CriticServerTrainer(
        cfg=cfg.trainer.ppo,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        logger=job.logger,
        ckpt_callback=ckpt_callback,
        tokenize_func=model.tokenize,
        gbs=cfg.model.global_batch_size,
        model_forward_micro_batch_size=cfg.model.forward_micro_batch_size,
        server=cfg.server,
    )
    state = load_trainer_state(cfg, ckpt_callback)
    if state is not None:
        critic_trainer.load_state_dict(state)
    critic_trainer.keep_first_weights()
    critic_trainer.run_server()
