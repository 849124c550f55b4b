# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A PPO actor as NeMo-Aligner's script; for test_other_scripts.py."""

from functools import partial

import steps
from megatron.core.utils import divide
from nemo.core.config import hydra_runner
from torch.utils.data import DataLoader

from nemo_aligner.algorithms.ppo import PPOTrainer
from nemo_aligner.data.nlp import builders
from nemo_aligner.models.nlp.gpt.megatron_gpt_ppo_actor import MegatronGPTActorModel
from nemo_aligner.models.nlp.gpt.reward_critic_clients import RemoteGPTRMCriticClient
from nemo_aligner.utils import batch_iterators, distributed, parallel_state, train_script_utils


@hydra_runner(config_path="../../../conf", config_name="gpt_ppo_actor")
def main(cfg) -> None:
    lightning, logger, policy = steps.begin(cfg, "ppo", MegatronGPTActorModel)
    train_script_utils.init_peft(policy, cfg.model)
    if cfg.trainer.ppo.initial_policy_kl_penalty > 0:
        policy.init_policy_state_dict = steps.weights_of(policy, cfg)
    state = steps.saved_state(lightning, policy)

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
    parts = steps.prepare(cfg, lightning, logger, policy, counted, train_prompts)
    del policy._train_dl

    critic = RemoteGPTRMCriticClient(cfg.remote_critic_rm)
    trainer = PPOTrainer(
        cfg=cfg.trainer.ppo,
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
        run_timer=distributed.Timer(
            cfg.exp_manager.get("max_time_per_run") if cfg.exp_manager else None
        ),
        **parts,
    )
    if state is not None:
        trainer.load_state_dict(state)
    trainer.fit()
    critic.communicator.close()


if __name__ == "__main__":
    main()
