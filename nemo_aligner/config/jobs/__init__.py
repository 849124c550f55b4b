# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The configurations of jobs and commands, one module each: its own sections, its rules across
keys, and a `Job` that says which sections it has and which defaults of its own.

What several jobs share is in `keys/` and `shared.py`.
"""

from nemo_aligner.config.jobs.critic import PPO_CRITIC
from nemo_aligner.config.jobs.distillation import KNOWLEDGE_DISTILLATION
from nemo_aligner.config.jobs.dpo import DPO_JOB
from nemo_aligner.config.jobs.generate import EVALUATE, GENERATE
from nemo_aligner.config.jobs.kto import KTO_JOB
from nemo_aligner.config.jobs.ppo import PPO_ACTOR
from nemo_aligner.config.jobs.reinforce import REINFORCE_ACTOR
from nemo_aligner.config.jobs.reward_model import REWARD_MODEL
from nemo_aligner.config.jobs.reward_server import REWARD_SERVER
from nemo_aligner.config.jobs.rs import RS_ACTOR
from nemo_aligner.config.jobs.sft import SFT
from nemo_aligner.config.jobs.spin import SPIN_JOB
from nemo_aligner.config.jobs.teacher import TEACHER_SERVER, TOP_K_LOGITS

JOBS = {
    job.name: job
    for job in (
        PPO_ACTOR,
        PPO_CRITIC,
        RS_ACTOR,
        REINFORCE_ACTOR,
        REWARD_MODEL,
        REWARD_SERVER,
        SFT,
        DPO_JOB,
        KNOWLEDGE_DISTILLATION,
        KTO_JOB,
        SPIN_JOB,
        GENERATE,
        EVALUATE,
        TOP_K_LOGITS,
        TEACHER_SERVER,
    )
}
