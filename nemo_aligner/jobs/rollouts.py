# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The jobs whose policy learns from its own responses."""

from functools import partial
from typing import Any

from omegaconf import DictConfig

from nemo_aligner.config.server_rules import read_reward_models, read_teachers
from nemo_aligner.core.estimators import ADVANTAGE_ESTIMATORS
from nemo_aligner.launch.job_entry import job_main, reward_servers
from nemo_aligner.launch.start_up import long_imports

# Keys of `trainer.ppo` that name a user's function, and what it is called with.
OWN_FUNCTIONS = {
    "loss": ("logprobs", "prev_logprobs", "advantages", "mask"),
    "advantages": ("rewards", "mask", "prompts", "values"),
}


def jobs_of_ppo(cfg: DictConfig) -> int:
    """This one, and the servers of rewards, critic and teachers, if these are on this machine."""
    others = len(read_teachers(cfg.remote_teacher)) if cfg.trainer.ppo.teacher_kl_coef else 0
    if cfg.remote_critic_rm.combine_rm_and_critic_server:
        return 2 + others
    needs_critic = ADVANTAGE_ESTIMATORS[cfg.trainer.ppo.advantage_estimator].needs_critic
    return 1 + int(needs_critic) + reward_servers(cfg, "ppo") + others


@job_main("gpt_ppo_actor", jobs=jobs_of_ppo)
def train_ppo(cfg: DictConfig) -> None:
    r"""Train a policy with PPO or GRPO, against a server of its critic or its rewards.

        nemo-aligner train ppo pretrained_checkpoint.restore_from_path=sft.nemo \
            "model.data.data_prefix={train: [a.jsonl], validation: [b.jsonl], test: [b.jsonl]}" \
            remote_critic_rm.critic.ip=localhost remote_critic_rm.critic.port=5556

    With `trainer.ppo.advantage_estimator` grpo, rloo or reinforce_plus_plus there is no critic
    (docs/ppo.md); the rewards come from a Python function in processes of this job, or from
    servers (docs/rewards.md):

        nemo-aligner train ppo ... trainer.ppo.advantage_estimator=grpo \
            model.ppo.num_rollouts_per_prompt=8 trainer.ppo.reward_fn=path/to/file.py:function

    With `trainer.ppo.teacher_kl_coef` a served teacher (`serve teacher`) gives advantages too, or
    alone (docs/ppo.md).

    With `model.ppo.environment.path=file.py:Class` samples have several turns, and the rewards
    come from a Python class in processes of this job; with `model.ppo.environment.port` from
    agents that talk to the policy over HTTP (docs/rewards.md).
    """
    with long_imports():
        from nemo_aligner.algorithms.ppo import PPOTrainer
        from nemo_aligner.launch import experiment, rollout_job
        from nemo_aligner.models.nlp.gpt.megatron_gpt_policy import MegatronGPTActorModel
        from nemo_aligner.servers.critic_client import RemoteGPTRMCriticClient
        from nemo_aligner.servers.scoring_clients import RewardsInPlaceOfCritic

    settings = cfg.trainer.ppo
    own_loss, own_advantages = (
        rollout_job.own_function(settings[key], f"trainer.ppo.{key}", parameters)
        for key, parameters in OWN_FUNCTIONS.items()
    )
    job, model = experiment.start_with_model(cfg, MegatronGPTActorModel)
    model.surrogate_of = own_loss
    ppo = cfg.model.ppo  # complete now
    if settings.initial_policy_kl_penalty > 0 or ppo.kl_loss_coef > 0:
        # Before a checkpoint is resumed: the reference stays the model that the job started from.
        model.set_reference_policy()
    has_critic = ADVANTAGE_ESTIMATORS[settings.advantage_estimator].needs_critic
    remote, ensemble = cfg.remote_critic_rm, []
    if remote.reward_models is not None:
        ensemble = read_reward_models(remote, "remote_critic_rm")
    trainer_class = partial(
        PPOTrainer,
        num_rollouts_per_prompt=ppo.num_rollouts_per_prompt,
        max_response_length=ppo.length_params.max_length,
        kl_loss_coef=ppo.kl_loss_coef,
        rollout_logprobs=ppo.rollout_logprobs,
        advantages_of=own_advantages,
        reward_weights=[spec.weight for spec in sorted(ensemble, key=lambda spec: str(spec.name))],
    )
    rollout_job.train_on_rollouts(
        cfg,
        job,
        model,
        trainer_class,
        remote="remote_critic_rm",
        client_class=RemoteGPTRMCriticClient if has_critic else RewardsInPlaceOfCritic,
        client_argument="rm_critic",
        load_state=rollout_job.load_state_of_pair,
    )


@job_main("gpt_reinforce_actor", jobs=lambda cfg: 1 + reward_servers(cfg, "reinforce"))
def train_reinforce(cfg: DictConfig) -> None:
    r"""Train a policy with REINFORCE, against a server of rewards.

    That is `serve reward`.

        nemo-aligner train reinforce pretrained_checkpoint.restore_from_path=sft.nemo \
            "model.data.data_prefix={train: [a.jsonl], validation: [b.jsonl], test: [b.jsonl]}" \
            trainer.reinforce.num_rollouts_per_prompt=4 \
            remote_rm.host=localhost remote_rm.port=5555
    """
    with long_imports():
        from nemo_aligner.algorithms.reinforce import ReinforceTrainer
        from nemo_aligner.launch import experiment, rollout_job
        from nemo_aligner.models.nlp.gpt.megatron_gpt_policy import MegatronGPTReinforceActorModel

    job, model = experiment.start_with_model(cfg, MegatronGPTReinforceActorModel)
    if cfg.trainer.reinforce.initial_policy_kl_penalty > 0:
        # Before a checkpoint is resumed: the reference stays the model that the job started from.
        model.set_reference_policy()
    rollout_job.train_on_rollouts(cfg, job, model, ReinforceTrainer)


@job_main("gpt_rs_actor", jobs=lambda cfg: 1 + reward_servers(cfg, "rs"))
def train_rs(cfg: DictConfig) -> None:
    r"""Train a policy with rejection sampling, against a server of rewards.

    That is `serve reward`.

        nemo-aligner train rs pretrained_checkpoint.restore_from_path=sft.nemo \
            "model.data.data_prefix={train: [a.jsonl], validation: [b.jsonl], test: [b.jsonl]}" \
            model.rs.num_rollouts_per_prompt=4 model.rs.top_n_rollouts=1 \
            remote_rm.host=localhost remote_rm.port=5555
    """
    with long_imports():
        from nemo_aligner.algorithms.rs import RSTrainer
        from nemo_aligner.launch import experiment, rollout_job
        from nemo_aligner.models.nlp.gpt.megatron_gpt_policy import MegatronGPTRSModel

    job, model = experiment.start_with_model(cfg, MegatronGPTRSModel)

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
            num_rollouts_per_prompt=cfg.model.rs.num_rollouts_per_prompt,
            top_n_rollouts=cfg.model.rs.top_n_rollouts,
            **common,
        )

    rollout_job.train_on_rollouts(cfg, job, model, build_trainer)
