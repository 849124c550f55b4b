# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Where NeMo-Aligner's scripts import these names from; each lives in the module named below."""

from nemo_aligner.checkpoint.dist_ckpt import make_sharded_tensors_from_reference
from nemo_aligner.checkpoint.folders import extract_value_from_ckpt
from nemo_aligner.checkpoint.nemo_archive import CustomSaveRestoreConnector
from nemo_aligner.core.masks import masked_mean, masked_std
from nemo_aligner.core.retired import retired_names
from nemo_aligner.core.tensors import (
    apply_func_to_dict,
    batch_pad_to_fixed_len,
    calculate_response_lengths,
    cpu_dict,
    get_iterator_k_split_list,
    move_to_device_if_tensor,
    select_log_probs,
)
from nemo_aligner.data.nlp.prompts import collate_with_batch_max_sequence_length
from nemo_aligner.launch.model_loading import (
    load_2_0_checkpoint_model_config,
    load_and_override_model_config,
    load_checkpoint_model_config,
    load_from_nemo,
    remove_overwritten_fields,
)
from nemo_aligner.launch.script_steps import (
    configure_batch_sizes,
    custom_save_ckpt_func,
    deprecated_in_version,
    set_autocast_gpu_dtype,
    surpress_user_warnings,
)
from nemo_aligner.models.nlp.gpt.model_functions import (
    adapter_control,
    convert_to_amp_o2_format,
    copy_model_states_to_cpu,
    cpu_weight_swap,
    retrieve_model_state_dict_in_cpu,
    swap_dict,
)
from nemo_aligner.parallel.collectives import get_global_set
from nemo_aligner.parallel.device import clear_memory, cuda_dict, log_memory

__getattr__ = retired_names(__name__)
