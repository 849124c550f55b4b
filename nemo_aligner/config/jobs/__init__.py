# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The configurations of jobs and commands: their sections, rules across keys, and of each a
`Configuration` that says which sections it has and which defaults of its own.

What several of these modules share is in `keys/`.
"""

from nemo_aligner.config.jobs import actors, distillation, generate, servers, supervised

JOBS = {
    job.name: job
    for job in (
        actors.PPO_JOB,
        servers.CRITIC_JOB,
        actors.RS_JOB,
        actors.REINFORCE_JOB,
        supervised.REWARD_MODEL_JOB,
        servers.REWARD_SERVER_JOB,
        supervised.SFT_JOB,
        supervised.DPO_JOB,
        distillation.STUDENT_JOB,
        supervised.KTO_JOB,
        supervised.SPIN_JOB,
        generate.GENERATE,
        generate.EVALUATE,
        distillation.TOP_K_LOGITS,
        distillation.TEACHER_SERVER,
    )
}
