# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A critic server with the calls of NeMo-Aligner's script in their order; see ppo_actor.py."""

from functools import partial

from nemo.core.config import hydra_runner
from nemo.utils.exp_manager import exp_manager
from omegaconf.omegaconf import OmegaConf

from nemo_aligner.algorithms.critic_server_trainer import CriticServerTrainer
from nemo_aligner.models.nlp.gpt.megatron_gpt_critic import MegatronGPTCriticModel
from nemo_aligner.utils import text_generation_utils, train_script_utils, utils


@hydra_runner(config_path="../../../conf", config_name="gpt_ppo_critic")
def main(cfg) -> None:
    reward_file = cfg.pretrained_checkpoint.restore_from_path
    cfg.model = utils.load_and_override_model_config(reward_file, cfg.model)
    lightning = train_script_utils.resolve_and_create_trainer(cfg, "ppo")
    exp_manager(lightning, cfg.exp_manager)
    logger = train_script_utils.CustomLoggerWrapper(lightning.loggers)
    utils.set_autocast_gpu_dtype(cfg.trainer.precision)

    critic = utils.load_from_nemo(
        MegatronGPTCriticModel, cfg.model, lightning, strict=True, restore_path=reward_file
    )
    if cfg.trainer.ppo.combine_rm_and_critic_server:
        critic.rm_state_dict_cpu = utils.copy_model_states_to_cpu(
            critic, cpu_dict=None, megatron_amp_O2=cfg.model.get("megatron_amp_O2"), sync=True
        )
    state = None
    if lightning.ckpt_path is not None:
        state = train_script_utils.retrieve_custom_trainer_state_dict(lightning)
    train_script_utils.init_distributed(lightning, critic, False)
    train_script_utils.init_using_ptl(lightning, critic, None, None)
    optimizer, scheduler = train_script_utils.extract_optimizer_scheduler_from_ptl_model(critic)
    checkpoints = train_script_utils.add_custom_checkpoint_callback(lightning, critic)
    logger.log_hyperparams(OmegaConf.to_container(cfg))

    server = CriticServerTrainer(
        cfg=cfg.trainer.ppo,
        model=critic,
        optimizer=optimizer,
        scheduler=scheduler,
        logger=logger,
        ckpt_callback=checkpoints,
        tokenize_func=partial(
            text_generation_utils.tokenize_batch,
            tokenizer=critic.tokenizer,
            max_len=critic.cfg.encoder_seq_length,
            add_BOS=False,
            add_EOS=False,
        ),
        gbs=cfg.model.global_batch_size,
        model_forward_micro_batch_size=cfg.model.forward_micro_batch_size,
    )
    if state is not None:
        server.load_state_dict(state)
    server.run_server()


if __name__ == "__main__":
    main()
