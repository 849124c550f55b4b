# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A PPO actor that makes the calls of NeMo-Aligner's script in their order, from the modules that
it imports them from; for test_other_scripts.py. Users' scripts look like this one.
"""

from functools import partial

import torch.multiprocessing
from megatron.core.utils import divide
from nemo.core.config import hydra_runner
from nemo.utils.exp_manager import exp_manager
from omegaconf.omegaconf import OmegaConf
from torch.utils.data import DataLoader

from nemo_aligner.algorithms.ppo import PPOTrainer
from nemo_aligner.data.nlp import builders
from nemo_aligner.models.nlp.gpt.megatron_gpt_ppo_actor import MegatronGPTActorModel
from nemo_aligner.models.nlp.gpt.reward_critic_clients import RemoteGPTRMCriticClient
from nemo_aligner.utils import (
    batch_iterators,
    distributed,
    parallel_state,
    train_script_utils,
    utils,
)

torch.multiprocessing.set_start_method("spawn", force=True)


@hydra_runner(config_path="../../../conf", config_name="gpt_ppo_actor")
def main(cfg) -> None:
    policy_file = cfg.pretrained_checkpoint.restore_from_path
    cfg.model = utils.load_and_override_model_config(policy_file, cfg.model)
    lightning = train_script_utils.resolve_and_create_trainer(cfg, "ppo")
    exp_manager(lightning, cfg.exp_manager)
    logger = train_script_utils.CustomLoggerWrapper(lightning.loggers)

    policy = utils.load_from_nemo(
        MegatronGPTActorModel, cfg.model, lightning, strict=True, restore_path=policy_file
    )
    train_script_utils.init_peft(policy, cfg.model)
    if cfg.trainer.ppo.initial_policy_kl_penalty > 0:
        policy.init_policy_state_dict = utils.retrieve_model_state_dict_in_cpu(
            policy, megatron_amp_O2=cfg.model.get("megatron_amp_O2", False)
        )
    state = None
    if lightning.ckpt_path is not None:
        state = train_script_utils.retrieve_custom_trainer_state_dict(lightning)
    train_script_utils.init_distributed(lightning, policy, False)

    train_prompts, validation_prompts, _ = builders.build_train_valid_test_rlhf_datasets(
        cfg=cfg.model,
        data_prefix=cfg.model.data.data_prefix,
        data_impl=cfg.model.data.data_impl,
        splits_string=cfg.model.data.splits_string,
        train_valid_test_num_samples=[-1, -1, -1],
        seq_length=cfg.model.data.seq_length,
        seed=cfg.model.seed,
        tokenizer=policy.tokenizer,
    )
    ppo = cfg.model.ppo
    sizes = ppo.length_params.max_length, policy.tokenizer.eos_id
    options = {"generate_masks_and_position_ids": False}
    collate = builders.collate_with_pad_to_max_batch(*sizes, cfg, **options)
    loader = partial(builders.build_dataloader, cfg=cfg, collate_fn=collate, load_gbs=False)

    ranks = parallel_state.get_data_parallel_world_size()
    counted = DataLoader(train_prompts, batch_size=divide(cfg.model.global_batch_size, ranks))
    train_script_utils.init_using_ptl(lightning, policy, counted, train_prompts)
    del policy._train_dl
    optimizer, scheduler = train_script_utils.extract_optimizer_scheduler_from_ptl_model(policy)
    checkpoints = train_script_utils.add_custom_checkpoint_callback(lightning, policy)
    logger.log_hyperparams(OmegaConf.to_container(cfg))

    critic = RemoteGPTRMCriticClient(cfg.remote_critic_rm)
    trainer = PPOTrainer(
        cfg=cfg.trainer.ppo,
        model=policy,
        optimizer=optimizer,
        scheduler=scheduler,
        train_dataloader_builder=partial(
            loader,
            dataset=train_prompts,
            mbs=ppo.rollout_micro_batch_size,
            gbs=ppo.num_rollout_samples,
        ),
        val_dataloader_builder=partial(
            loader,
            dataset=validation_prompts,
            mbs=ppo.val_rollout_micro_batch_size,
            gbs=ppo.num_val_samples,
            use_random_sampler=False,
        ),
        collate_fn=collate,
        rm_critic=critic,
        batch_iterator_cls=batch_iterators.get_batch_iterator_cls(
            cfg.trainer.ppo.get("batch_iterator", {})
        ),
        logger=logger,
        ckpt_callback=checkpoints,
        run_timer=distributed.Timer(
            cfg.exp_manager.get("max_time_per_run") if cfg.exp_manager else None
        ),
    )
    if state is not None:
        trainer.load_state_dict(state)
    trainer.fit()
    critic.communicator.close()


if __name__ == "__main__":
    main()
