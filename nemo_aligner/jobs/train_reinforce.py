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
        from nemo_aligner.launch.experiment import start_with_model
        from nemo_aligner.launch.rollout_job import train_on_rollouts
        from nemo_aligner.models.nlp.gpt.megatron_gpt_reinforce_actor import (
            MegatronGPTReinforceActorModel,
        )

    job, model = start_with_model(cfg, CONFIG_NAME, "reinforce", MegatronGPTReinforceActorModel)
    settings = cfg.trainer.reinforce
    if settings.initial_policy_kl_penalty > 0:
        # Before a checkpoint is resumed: the reference stays the model that the job started from.
        model.set_reference_policy()
    train_on_rollouts(cfg, job, model, ReinforceTrainer, settings.num_rollouts_per_prompt)
