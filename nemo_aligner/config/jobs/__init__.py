# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The configurations of jobs and commands, one module each: its own sections, its rules across
keys, and a `Job` that says which sections it has and which defaults of its own.

What several jobs share is in `keys/` and `shared.py`.
"""

from nemo_aligner.config.fields import Job
from nemo_aligner.config.jobs import (
    critic,
    distillation,
    dpo,
    generate,
    kto,
    ppo,
    reinforce,
    reward_model,
    reward_server,
    rs,
    sft,
    spin,
    teacher,
)

_MODULES = [ppo, critic, rs, reinforce, reward_model, reward_server, sft, dpo, distillation]
_MODULES += [kto, spin, generate, teacher]
_VALUES = [value for module in _MODULES for value in vars(module).values()]
JOBS = {job.name: job for job in _VALUES if isinstance(job, Job)}
