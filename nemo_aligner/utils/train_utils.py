# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The former place of these names; what each import statement below names is the present one."""

from nemo_aligner.models.nlp.gpt.model_functions import (
    clip_gradients,
    finish_validation_step,
    grad_reductions,
    prepare_for_training_step,
    prepare_for_validation_step,
    set_eval,
    set_sync_funcs,
    set_train,
)
from nemo_aligner.training.optim import learning_rate, optimizer_step
