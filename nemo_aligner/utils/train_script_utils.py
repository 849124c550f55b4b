# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The former place of these names; what each import statement below names is the present one."""

from nemo_aligner.launch.endings import user_errors_end_the_job
from nemo_aligner.launch.experiment import (
    build_checkpoint_callback,
    build_logger,
    load_trainer_state,
    setup_experiment,
)
from nemo_aligner.launch.model_loading import load_and_override_model_config, load_from_nemo
from nemo_aligner.launch.processes import (
    init_distributed,
    launch_processes,
    resolve_and_create_trainer,
)
from nemo_aligner.launch.script_steps import (
    FakeCheckpointCallback,
    FakeScheduler,
    add_custom_checkpoint_callback,
    disable_data_callbacks,
    extract_optimizer_scheduler_from_ptl_model,
    init_peft,
    init_using_ptl,
    retrieve_custom_trainer_state_dict,
    temp_pop_from_config,
)
from nemo_aligner.training.loggers import CustomLoggerWrapper
from nemo_aligner.training.schedule import supervised_max_steps
