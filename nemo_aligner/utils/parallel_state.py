# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The former place of these names; what each import statement below names is the present one."""

from nemo_aligner.core.retired import retired_names
from nemo_aligner.parallel.parallel_state import (
    destroy,
    disable_trt_llm_reshard_calls,
    get_context_parallel_group,
    get_context_parallel_rank,
    get_context_parallel_world_size,
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_src_rank,
    get_data_parallel_world_size,
    get_expert_data_parallel_group,
    get_expert_model_parallel_group,
    get_expert_model_parallel_rank,
    get_expert_model_parallel_world_size,
    get_model_parallel_group,
    get_model_parallel_src_rank,
    get_pipeline_model_parallel_first_rank,
    get_pipeline_model_parallel_group,
    get_pipeline_model_parallel_last_rank,
    get_pipeline_model_parallel_rank,
    get_pipeline_model_parallel_world_size,
    get_rank,
    get_tensor_and_pipeline_parallel_group,
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_src_rank,
    get_tensor_model_parallel_world_size,
    get_world_size,
    initialize,
    is_initialized,
    is_pipeline_first_stage,
    is_pipeline_last_stage,
    is_trt_llm_reshard,
    seed_generators,
)

__getattr__ = retired_names(__name__)
