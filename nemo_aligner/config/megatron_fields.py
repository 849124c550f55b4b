# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Fields of Megatron Core's own configurations, which users give by name.

`model.mcore_customization_config` holds fields of its `TransformerConfig` (NeMo's key), and
`model.optim.mcore_customization_config` those of its `DistributedDataParallelConfig` and
`OptimizerConfig`. A field that would break a promise of this library is refused with it; the
others are passed on as they are, also those of later releases.
"""

import contextlib
import enum
import fnmatch
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from nemo_aligner.config.fields import Key, tree_of
from nemo_aligner.config.values import Values, entries
from nemo_aligner.core.errors import ConfigError

_COMPLETE = "it needs a part of Megatron-LM's own training loop, without which it fails or lies"
_DTYPES = "a model computes in float32 or bf16 and sums its gradients in float32"

OWN_KEYS = dict(
    pair.split("=")
    for pair in """add_bias_linear=model.bias bf16=trainer.precision params_dtype=trainer.precision
    recompute_granularity=model.activations_checkpoint_granularity
    recompute_method=model.activations_checkpoint_method
    recompute_num_layers=model.activations_checkpoint_num_layers
    overlap_grad_reduce=model.optim.overlap_grad_sync bucket_size=model.optim.bucket_cap_mb
    adam_beta1=model.optim.betas adam_beta2=model.optim.betas adam_eps=model.optim.eps
    sgd_momentum=model.optim.momentum min_lr=model.optim.sched.min_lr
    clip_grad=trainer.<algo>.gradient_clip_val""".split()
)

# promise -> patterns of the fields that would break it
MODEL_REFUSED: dict[str, str] = dict(
    entries(f"""
generation, LoRA and Hugging Face folders have the layers that the keys of model. describe |
    multi_latent_attention experimental_attention_variant* dsa_* linear_* mtp_* is_hybrid_model
    mamba_* use_mamba_* heterogeneous_* hetereogenous_* attention_output_gate softmax_type
    qk_l2_norm glu_linear_offset activation_func* moe_latent_size moe_apply_probs_on_input
    moe_router_score_function moe_router_topk_scaling_factor moe_router_num_groups
    moe_router_group_topk moe_router_enable_expert_bias moe_router_bias_update_rate
    moe_router_quantile_* moe_*glu_interleave_size moe_single_grouped_* use_grouped_gemm_*
    mrope_section mup_* use_mup transformer_impl quant_recipe use_kitchen* kitchen_* init_method*
    output_layer_init_method embedding_init_method add_bias_linear gated_linear_unit
a model gives the same numbers, and loads, at any split of its ranks | moe_expert_capacity_factor
    moe_expert_rank_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy
    moe_router_topk_limited_devices moe_router_force_* moe_extended_tp expert_tensor_parallel_*
    *gtp_* *weight_shards hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank
    hybrid_context_parallel pipeline_model_parallel_layout account_for_* moe_router_dtype
    moe_use_legacy_grouped_gemm
generation computes the log-probs of training, for any number of rows | fp8* fp4*
    first_last_layers_bf16 num_layers_at_* tp_only_amax_red
micro-batches are as wide as their longest sample, and a graph has one width | *cuda_graph*
{_COMPLETE} | tp_comm_* timers finalize_model_grads_func *grad_scale_func no_sync_func
    grad_sync_func param_sync_func delay_wgrad_compute overlap_moe_expert_parallel_comm
    overlap_dispatch_* ep_overlap_* qk_clip* log_max_attention_logit moe_enable_routing_replay
    moe_per_layer_logging moe_paged_stash* defer_embedding_wgrad_compute wgrad_deferral_limit
    calculate_per_token_loss init_model_with_meta_device variable_seq_lengths use_ring_exchange_p2p
    async_tensor_model_parallel_allreduce barrier_with_L1_time config_logger_dir
    _cpu_offloading_context test_mode cross_entropy_* pipeline_model_parallel_comm_backend
generation has its own step; see generation.cuda_graphs | flash_decode inference_* use_inference_*
    nccl_all_reduce_for_prefill mlp_chunks_for_*
{_DTYPES} | fp16 enable_autocast autocast_dtype
""")
)
OPTIM_REFUSED: dict[str, str] = dict(
    entries(f"""
weights are whole after an update, for generation, checks and checkpoints read them |
    overlap_param_gather* align_param_gather *param_gather reuse_grad_buf_* fp8_recipe keep_fp8_*
    delay_wgrad_compute optimizer_cuda_graph
a checkpoint has the same form whatever the ranks | use_distributed_optimizer
    num_distributed_optimizer_instances optimizer *fsdp* data_parallel_sharding_strategy
    outer_dp_sharding_strategy gradient_reduce_div_fusion suggested_communication_unit_size
    preserve_fp32_weights use_precision_aware_optimizer store_param_remainders main_*_dtype
    exp_avg*_dtype *cpu_offload* optimizer_offload_fraction *pin_cpu_* overlap_cpu_* muon_*
    *_muon_* lion_* soap_* use_layer_wise_*
{_DTYPES} | fp16 *loss_scale* hysteresis reduce_scatter_with_fp32_* param_name_patterns_*
every rank gets the same error; all gradients are checked (megatron_steps.py) | check_for_*
    grad_norm_skip_threshold log_num_zeros_in_grad
{_COMPLETE} | timers config_logger_dir barrier_with_L1_time
""")
)


def passed_fields(
    given: Mapping[str, Any],
    built: Any,
    settings: Container[str],
    own_keys: Container[str],
    refused: Mapping[str, str],
) -> dict[str, Any]:
    """The fields that are passed on to a configuration of Megatron Core.

    Args:
        given: dotted key -> value; the last part of a key is the field's name.
        built: the configuration without them. What it has anyway is not passed.
        settings: fields that this library derives from keys of its own.
        own_keys: dotted keys of the configuration, of which one may have a field's name.
        refused: `MODEL_REFUSED` or `OPTIM_REFUSED`.
    """
    passed = {}
    for key, value in given.items():
        section, _, name = key.rpartition(".")
        default = getattr(built, name, None)
        same = list(default) if isinstance(default, tuple) else default
        if value is None or value == same or not (value or default):
            continue
        same_name = f"{section.removesuffix('.mcore_customization_config')}.{name}"
        own_key = same_name if same_name in own_keys else OWN_KEYS.get(name)
        broken = [
            promise
            for promise, patterns in refused.items()
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns.split())
        ]
        else_null = "a model that needs it cannot be computed, else set it to null."
        if own_key not in (None, key):
            raise ConfigError(f"{key}={value!r} does not act there; set {own_key}.")
        if name in settings:
            raise ConfigError(f"{key}={value!r} is always {default!r} here; set it to null.")
        if not hasattr(built, name):
            raise ConfigError(
                f"{key}={value!r} is no field of Megatron Core's that is known; {else_null}"
            )
        if broken:
            raise ConfigError(
                f"{key}={value!r} is a field of Megatron Core that is not supported, for it would "
                f"break a promise: {broken[0]}; {else_null}"
            )
        passed[name] = _of_kind(key, value, default)
    return passed


@contextlib.contextmanager
def core_errors(passed: Iterable[str]) -> Iterator[None]:
    """Turn what Megatron Core raises about the fields `passed` into `ConfigError`."""
    try:
        yield
    except (AssertionError, ImportError, TypeError, ValueError) as error:
        raise ConfigError(
            f"mcore_customization_config gives {', '.join(passed)}, and Megatron Core refuses: "
            f"{error or type(error).__name__}. Set them to null, or what it asks for."
        ) from error


def _of_kind(key: str, value: Any, default: Any) -> Any:
    choices = tuple(type(default).__members__) if isinstance(default, enum.Enum) else ()
    kind = {bool: bool, int: float, float: float}.get(type(default), Any)
    Key(key, object, kind, True, choices, None).check(Values(tree_of({key: value})))
    return type(default)[value] if choices else value
