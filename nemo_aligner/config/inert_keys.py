# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Keys, values and forms of NeMo and NeMo-Aligner that no longer act, that mean something else, or
that are refused.

* `INERT[name]`: dotted key -> `Inert(reason, neutral)`. Accepted without effect; a value that is
  not neutral is worth a warning. An inert key covers everything below it.
* `INERT_ARCHITECTURE`: those of them that speak of the network.
* `INERT_EXPERIMENT`: those of them that NeMo's `exp_manager` would act on.
* `ONLY`: dotted key -> (accepted values, remedy). Any other value would change the mathematics
  if it were ignored.
* `OLD_FORMS`: values and combinations of keys, each accepted with a warning.
* `LATER`: what NeMo-Aligner has and this package refuses so far.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_aligner.config.fields import Job
from nemo_aligner.config.jobs import JOBS
from nemo_aligner.config.schema import COMMAND_NAMES, CONFIG_NAMES, LIVE, dotted
from nemo_aligner.config.values import Values
from nemo_aligner.core.errors import ConfigError


@dataclass(frozen=True)
class Inert:
    """A key that is accepted and does nothing."""

    reason: str  # why, for the warning
    neutral: tuple = ()  # values that need no warning; `(...,)` means every value

    def is_neutral(self, value: object) -> bool:
        return ... in self.neutral or any(
            value == n and type(value) is type(n) for n in self.neutral
        )


def _inert(prefix: str, names: str, reason: str, *neutral: object) -> dict[str, Inert]:
    return {key: Inert(reason, neutral) for key in dotted(prefix, names)}


_TRT = "TensorRT-LLM is gone; the built-in engine generates"
_FLASK = "there is no Flask server: the shared work queue is a counter in the job's own store"
_LIGHTNING = (
    "Lightning only launches the job: the loops are this project's own; see trainer.<algorithm>"
)
_CLIPPING = "trainer.<algorithm>.gradient_clip_val counts"  # `OLD_FORMS` has a warning
_TE = "the layers depend on what is installed (Transformer Engine on a GPU, else local ones)"
_APEX = "apex's own optimizer and kernels are not used; Megatron Core's are"
_NEMO = "a key of NeMo's model that Megatron Core has no use for here"
_DATASET = "the data sets read the files directly, and recognize their form"
_DEAD = "an old flag of NeMo-Aligner's scripts that had no effect there either"
_TOP_PRECISION = {"precision": Inert(_DEAD + "; model.precision counts", (...,))}

# Keys that speak of the network and change nothing in it; their other values are worth a warning
# even if they stand in a checkpoint.
INERT_ARCHITECTURE = (
    _inert("model", "mcore_gpt", "every model here is a Megatron Core model", True)
    | _inert(
        "model",
        "apply_query_key_layer_scaling",
        "it is for fp16 only; NeMo switched it off in other precisions too",
        False,
    )
    | _inert(
        "model",
        "attention_softmax_in_fp32",
        "the softmax of the attention is computed in float32 in any case",
        ...,
    )
    | _inert(
        "model", "ffn_dropout", "Megatron Core has no such dropout; NeMo ignored it too", 0, 0.0
    )
    | _inert("model", "onnx_safe", "it is for the export of a model; NeMo ignored it too", False)
    | _inert("model", "pre_process post_process", "the pipeline stage decides it", True)
)

# Keys of NeMo's `exp_manager`, which does not get to see them: its callbacks are for Lightning's
# loops, and some need packages.
INERT_EXPERIMENT = _inert(
    "exp_manager",
    """create_early_stopping_callback early_stopping_callback_params
    create_ipl_epoch_stopper_callback ipl_epoch_stopper_callback_params
    create_preemption_callback log_step_timing log_delta_step_timing step_timing_kwargs
    disable_validation_on_resume ema create_straggler_detection_callback
    straggler_detection_params create_fault_tolerance_callback fault_tolerance
    log_tflops_per_sec_per_gpu""",
    _LIGHTNING,
)

_INERT_COMMON = (
    _inert(
        "trainer",
        """replace_sampler_ddp strategy callbacks fast_dev_run min_epochs min_steps
        limit_train_batches limit_val_batches limit_test_batches limit_predict_batches
        overfit_batches val_check_interval check_val_every_n_epoch num_sanity_val_steps
        log_every_n_steps enable_progress_bar enable_model_summary accumulate_grad_batches
        gradient_clip_algorithm deterministic benchmark inference_mode profiler
        detect_anomaly barebones plugins sync_batchnorm reload_dataloaders_every_n_epochs
        default_root_dir""",
        _LIGHTNING,
    )
    | _inert("trainer", "gradient_clip_val", _CLIPPING, ...)
    | INERT_EXPERIMENT
    | _inert(
        "exp_manager.checkpoint_callback_params",
        """dirpath verbose save_last prefix postfix save_best_model
        filepath save_weights_only auto_insert_metric_name every_n_epochs every_n_train_steps
        train_time_interval save_on_train_epoch_end save_last_n_optim_states""",
        _LIGHTNING,
    )
    | _inert(
        "exp_manager.checkpoint_callback_params",
        "model_parallel_size",
        "a checkpoint is one folder for all ranks",
        ...,
    )
    | _inert(
        "model.peft",
        "adapter_tuning p_tuning ia3_tuning selective_tuning",
        "LoRA is the only method here; the settings of others are not used",
        ...,
    )
    | _inert(
        "model",
        "ub_tp_comm_overlap ub_tp_comm_overlap_cfg ub_tp_comm_overlap_disable_qkv",
        _TE,
        None,
        False,
    )
    | _inert(
        "model",
        """transformer_engine use_flash_attention fp8_e4m3 fp8_hybrid fp8_margin fp8_interval
        fp8_amax_history_len fp8_amax_compute_algo fp8_params reduce_amax use_emha te_rng_tracker
        use_te_rng_tracker inference_rng_tracker attention_backend cp_comm_type tp_only_amax_red
        skip_fp8_attention_checkpoint_load ub_tp_comm_bootstrap_backend""",
        _TE,
    )
    | _inert(
        "model",
        """apex_transformer_log_level apex_transformer_log_level_o2 gradient_as_bucket_view
        grad_allreduce_chunk_size_mb grad_div_ar_fusion bias_dropout_fusion
        cross_entropy_loss_fusion get_attention_mask_from_fusion batch_p2p_comm overlap_p2p_comm
        deallocate_pipeline_outputs native_amp_init_scale native_amp_growth_interval hysteresis
        fp16_lm_cross_entropy async_grad_allreduce sync_batch_comm
        no_async_tensor_model_parallel_allreduce
        num_micro_batches_with_partial_activation_checkpoints
        activations_checkpoint_layers_per_pipeline sharp use_tp_pp_dp_mapping cpu_offloading
        cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights
        defer_embedding_wgrad_compute wgrad_deferral_limit distributed_adam_bucket_merge_size
        with_fp32_embedding_grads enable_cuda_graph megatron_legacy batch_p2p_sync
        variable_seq_lengths memory_efficient_layer_norm moe_permute_fusion moe_layer_recompute
        distribute_saved_activations""",
        _APEX,
    )
    | _inert(
        "model",
        """nsys_profile memory_profile gc_interval
        rampup_batch_size resume_from_checkpoint resume_from_path save_nemo_on_validation_end
        enable_nge tokens_to_generate inference init_method hidden_steps num_trainable_params
        log_token_counts dist_ckpt_format dist_ckpt_load_strictness dist_ckpt_torch_dist_multiproc
        dist_ckpt_assume_constant_structure dist_ckpt_parallel_save
        dist_ckpt_parallel_save_within_dp dist_ckpt_parallel_load dist_ckpt_parallel_dist_opt
        tp_comm_bootstrap_backend nccl_communicator_config_path distributed_timeout_minutes steerlm
        steerable_attributes chunk_size fsdp fsdp_sharding_strategy fsdp_grad_reduce_dtype
        fsdp_sharded_checkpoint fsdp_use_orig_params share_embeddings data_prefix chat_template
        use_loss_mask dist_ckpt_load_on_device drop_last enable_megatron_timers
        megatron_timer_kwargs pipeline_model_parallel_split_rank reset_lr reset_lr_steps
        restore_from_ckpt sep_id skip_train tensor_model_parallel_world_size
        validation_param_sync_overlap calculate_per_token_loss perform_initialization test_mode
        deterministic_mode""",
        _NEMO,
    )
    | _inert(
        "model",
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
        "use num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage",
        False,
    )
    | INERT_ARCHITECTURE
    | _inert("model.optim", "contiguous_grad_buffer", _APEX, True)
    | _inert("model.optim", "overlap_param_sync", _APEX, False)
    | _inert(
        "model.optim",
        """contiguous_param_buffer grad_sync_on_finish average_in_collective
        grad_sync_dtype store_params store_param_remainders with_scaled_states param_sync_dtype
        dtype process_group capturable master_weights foreach fused amsgrad d_coef
        delay_param_gather delay_grad_reduce align_param_gather align_grad_reduce
        ddp_bucket_size""",
        _APEX,
    )
    | _inert("model.optim.sched", "max_steps last_epoch monitor reduce_on_plateau", _NEMO)
    | _inert("model.data", "skip_warmup", _DATASET, True)
    | _inert("model.data", "dataloader_type", _DATASET, "single", None)
    | _inert(
        "model.data",
        "reset_position_ids reset_attention_mask eod_mask_loss",
        "only SFT packs samples: model.data.train_ds.packed_sequence, which resets both",
        False,
    )
    | _inert(
        "model.data",
        """no_seqlen_plus_one_input_tokens pad_samples_to_global_batch_size shuffle_documents
        exchange_indices_distributed mock_dataset legacy_dataset validation_drop_last_batch
        pin_memory delay_data_init delay_data_mmap delay_data_init data_cache_generation_only
        num_dataset_builder_threads ceil_to_power_2 get_attention_mask_from_fusion""",
        _DATASET,
    )
)

_DATASET_INERT = _inert(
    "model.data", "train_ds validation_ds test_ds", "name the files under model.data.data_prefix"
)


def _of_trt_llm(kind: str) -> dict[str, Inert]:
    """TensorRT-LLM's keys of an actor."""
    return {
        f"{section}.trt_llm.{key}": Inert(
            _TRT, neutral if section == f"trainer.{kind}" else (...,)
        )
        for section in (f"trainer.{kind}", f"model.{kind}")  # the second refers to the first
        for key, neutral in {
            "model_type": ("llama", "gptj", "gptnext", "gemma", "falcon"),
            "unload_engine_train": (False,),
            "max_input_len": (...,),  # derived from other keys: never worth a warning
            "seed": (...,),
            "max_input_tokens": (),
            "generation_batch_size": (),
            "engine_path": (),
        }.items()
    }


def _of_sampling(kind: str) -> dict[str, Inert]:
    """Keys of sampling in an actor that have no part in it."""
    data = "model.data.train_ds" if kind == "spin" else "model.data"
    prompts = f"the data set tokenizes prompts; use {data}.add_bos"
    passes = "log-probabilities come from their own pass"
    section = f"model.{kind}.sampling_params"
    return _inert(section, "add_BOS", prompts, False, None) | _inert(
        section, "all_probs compute_logprob", passes, False
    )


def _of_reward_client(kind: str) -> dict[str, Inert]:
    """Other keys of an actor whose rewards come from `remote_rm`."""
    own = f"model.{kind}"
    return (
        _inert(own, "forward_mbs share_dir", _DEAD)
        | _inert("model", "forward_mbs", f"{_DEAD}; use {own}.forward_micro_batch_size")
        | _inert("model", "offload_adam_states", f"{_DEAD}; use {own}.offload_adam_states")
        | _inert(
            "remote_rm", "pad_sequence_length_to_multiple", _DEAD + "; use remote_rm.pad_to_length"
        )
    )


def _of_sft_data(kind: str) -> dict[str, Inert]:
    """Keys of the data of supervised fine-tuning, in the job `trainer.<kind>`."""
    more = f"an epoch is one pass over the data; for more steps raise trainer.{kind}.max_epochs"
    return _inert("model.data", "sample", more, False) | {
        f"model.data.{split}.{key}": Inert(_DATASET, neutral)
        for split in ("train_ds", "validation_ds", "test_ds")
        for key, neutral in {
            "memmap_workers": (None,),
            "hf_dataset": (False,) if kind == "sft" else (False, True),
            "min_seq_length": (1, None),
            "output_original_text": (True,),
            "file_names": (),
            "concat_sampling_probabilities": (None,),
            "num_workers": (),
            "pin_memory": (),
            "names": (None,),
            "metric": (),
            "write_predictions_to_file": (False,),
            "output_file_path_prefix": (),
            "packed_sequence_return_cu_seqlen": (),
            "tokens_to_generate": (),
            "virtual_tokens": (),
        }.items()
    }


_OWN: dict[str, dict[str, Inert]] = {  # what a job has beside what follows from its keys
    "gpt_ppo_actor": _inert("trainer.ppo", "trt_model_dir", _TRT, "/tmp/trt_llm_model")
    | _of_trt_llm("ppo")
    | _inert("trainer", "trt_llm", _TRT)
    | _inert("trainer.ppo.batch_iterator", "port", _FLASK, 5557)
    | _inert("trainer.ppo", "flask_server", _FLASK)
    | _inert("trainer", "flask_server", _FLASK)
    | _inert("trainer.ppo", "wandb_table", _DEAD)
    | _inert("trainer.ppo", "combine_rm_and_critic_server", "it belongs to remote_critic_rm")
    | _inert(
        "model.ppo", "combine_rm_and_critic_server", _DEAD + "; it belongs to remote_critic_rm"
    )
    | _inert("model.ppo", "trt_model_dir", _TRT)
    | _inert("model.ppo", "forward_mbs", _DEAD + "; use model.ppo.forward_micro_batch_size")
    | _inert("model", "forward_mbs", _DEAD + "; use model.ppo.forward_micro_batch_size")
    | _inert("model", "offload_adam_states", _DEAD + "; use model.ppo.offload_adam_states")
    | _inert("model.ppo", "share_dir", _DEAD)
    | _of_sampling("ppo")
    | _inert(
        "remote_critic_rm",
        "pad_sequence_length_to_multiple",
        _DEAD + "; use remote_critic_rm.pad_to_length",
    ),
    "gpt_ppo_critic": _inert(
        "trainer.ppo",
        "pad_sequence_length_to_multiple",
        _DEAD + "; use strip_sequence_length_to_multiple",
    )
    | _inert("trainer.ppo", "flask_server", _FLASK)
    | _inert("exp_manager", "max_time_per_run", "the critic serves until it is stopped")
    | _inert("trainer", "max_time", "the critic serves until it is stopped")
    | _inert(
        "exp_manager.checkpoint_callback_params",
        "save_nemo_on_train_end",
        "the critic serves until it is stopped; use always_save_nemo",
        False,
    )
    | _inert(
        "trainer.ppo",
        "max_epochs val_check_interval save_interval",
        "the actor decides when to save and to stop",
    )
    | _inert("model", "forward_mbs", _DEAD + "; use model.forward_micro_batch_size")
    | _inert(
        "model",
        "ppo data",
        "the critic has no data of its own; batch sizes are those of the actor's requests",
    ),
    "gpt_rs_actor": _of_sampling("rs") | _of_reward_client("rs"),
    "gpt_reinforce_actor": _of_trt_llm("reinforce")
    | _of_sampling("reinforce")
    | _of_reward_client("reinforce")
    | _inert("trainer.reinforce.batch_iterator", "port", _FLASK, 5557)
    | _inert("trainer.reinforce", "flask_server", _FLASK)
    | _inert("model.reinforce", "entropy_bonus ratio_eps", "its loss has no such term", ...),
    "inference_rm": _inert("model", "global_batch_size optim data", "a server trains nothing", ...)
    | _inert("exp_manager", "explicit_log_dir exp_dir name", "a reward server writes no files")
    | _inert("pretrained_checkpoint", "restore_from_path", "use rm_model_file"),
    "training_rm": _inert("model", "forward_mbs", _DEAD + "; use model.forward_micro_batch_size"),
    "gpt_dpo": _inert(
        "model.data",
        "pad_length_to_multiple_of",
        "micro-batches are padded as sequence and context parallelism need it",
        ...,
    )
    | _inert(
        "model.dpo",
        "average_log_probs",
        "NeMo-Aligner 0.7 does not read it either; use model.dpo.preference_average_log_probs",
        False,
    )
    | _TOP_PRECISION,
    "gpt_knowledge_distillation": _inert(
        "model.data", "n_examples_per_chunk", "the files say how many they hold", ...
    )
    | _inert(
        "exp_manager.checkpoint_callback_params",
        "save_best_model",
        "checkpoints are ranked by monitor, mode and save_top_k; the best are never copied",
        False,
    ),
    "gpt_kto": _TOP_PRECISION,
    "gpt_spin": _TOP_PRECISION | _of_sampling("spin") | _of_sft_data("spin"),
    "gpt_sft": _inert(
        "model",
        "inference",
        "training generates no responses; GPTSFTModel.infer, called from Python, reads it",
    )
    | _inert(
        "model",
        "resume_from_checkpoint",
        "NeMo-Aligner's SFT never read it; use exp_manager.resume_from_checkpoint",
    )
    | _inert(
        "model",
        "save_nemo_on_validation_end",
        "NeMo-Aligner's SFT never read it; use "
        "exp_manager.checkpoint_callback_params.always_save_nemo",
        False,
    )
    | _inert("model", "sync_batch_comm gradient_as_bucket_view", _APEX, False)
    | _inert("model", "ffn_dropout", _NEMO, 0.0)
    | _inert(
        "exp_manager.checkpoint_callback_params",
        "save_best_model",
        "checkpoints are ranked by monitor, mode and save_top_k; the best are never copied",
        False,
    )
    | _of_sft_data("sft"),
    "inference_teacher": _inert(
        "model", "global_batch_size optim data", "a server trains nothing", ...
    ),
    "compute_topk_logits": {"name": Inert("nothing reads it", (...,))}
    | _inert("model", "restore_from_path", "use pretrained_checkpoint.restore_from_path", "???")
    | _inert("model", "answer_only_loss", _DEAD + ": the responses count alone", False)
    | _inert("model", "sync_batch_comm gradient_as_bucket_view", _APEX, False)
    | _inert("data", "sample num_workers dataloader_type", "examples keep their order", ...)
    | _inert(
        "data.data",
        "shuffle memmap_workers min_seq_length drop_last hf_dataset",
        "examples keep their order, and the data sets recognize the form of the files",
        ...,
    ),
}


def _table(job: Job) -> dict[str, Inert]:
    if job.name in ("generate", "evaluate"):  # NeMo-Aligner has no such command
        return {}
    table = dict(_INERT_COMMON)
    if "model.data.data_prefix" in job.keys:
        table |= _DATASET_INERT
    if job.name not in COMMAND_NAMES:  # top-level leftovers of NeMo's launchers
        names = ("restore_from_path", "cluster_type", "run", "mode", "inference", "name")
        own = {key.split(".")[0] for key in job.keys}
        for name in {*names} - own:
            table[name] = Inert(_NEMO, ("megatron_gpt",) if name == "name" else ())
    return table | _OWN.get(job.name, {})


INERT = {job.name: _table(job) for job in JOBS.values()}

# --- values that would change the mathematics if they were ignored ---

_PRE_LN = (
    "Megatron Core has one order of a layer: norm, attention, norm, feed-forward layer. Others "
    "cannot be built: norms behind the attention and the feed-forward layer (Gemma 2 and 3), or "
    "both computed side by side (GPT-J, GPT-NeoX, Falcon, Phi)"
)
_BIASES = (
    "Megatron Core has biases in all linear layers of a layer (model.bias), or in queries, keys "
    "and values alone (model.qkv_bias)"
)
_LLAMA_3 = "only Llama 3's value is supported; set it to null"

# key -> (accepted values, what to do instead). None (not set) is always accepted.
ONLY: dict[str, tuple[tuple, str]] = {
    "model.name": (
        ("", "te_gpt", "megatron_gpt_full_te_layer_autocast", "modelopt", "megatron_gpt"),
        "its layers differ from a GPT's, and cannot be built here",
    ),
    "model.hyena": ((), "Hyena layers cannot be built here"),
    "model.transformer_block_type": (("pre_ln",), _PRE_LN),
    "model.apply_residual_connection_post_layernorm": ((False,), _PRE_LN),
    "model.parallel_attention": ((False,), _PRE_LN),
    "model.attention_bias": ((False,), _BIASES),
    "model.mlp_bias": ((False,), _BIASES),
    "model.lm_head_bias": ((False,), "Megatron Core's output layer has no bias"),
    "model.attn_logit_softcapping": (
        (),
        "Megatron Core and Transformer Engine have no cap of attention scores (Gemma 2)",
    ),
    "model.final_logit_softcapping": ((), "Megatron Core has no cap of the logits (Gemma 2)"),
    "model.softmax_scale": ((), "use model.query_pre_attn_scalar, which is 1 / softmax_scale**2"),
    "model.rope_local_base_freq": (
        (),
        "all layers share model.rotary_base in Megatron Core (Gemma 3 has two)",
    ),
    "model.attention_type": (("multihead",), "only self-attention with a causal mask exists here"),
    "model.fp8": ((False,), "fp8 is not supported: train in bf16"),
    "model.fp32_residual_connection": (
        (False,),
        "hidden states have the precision of the model; set it to False",
    ),
    "model.headscale": ((False,), "such a model cannot be built on Megatron Core"),
    "model.normalize_attention_scores": (
        (True,),
        "attention scores are always scaled by 1/sqrt(head size)",
    ),
    "model.low_freq_factor": ((1,), _LLAMA_3),
    "model.high_freq_factor": ((4,), _LLAMA_3),
    "model.old_context_len": ((8192,), _LLAMA_3),
    "model.drop_layers": (([],), "every layer is computed; set it to null"),
    "model.do_layer_norm_weight_decay": (
        (False,),
        "norms and biases have no weight decay; set it to False",
    ),
    "model.moe_grouped_gemm": (
        (False,),
        "the experts are computed one after the other; set it to False",
    ),
    "model.moe_token_dropping": ((False,), "no token is ever dropped; set it to False"),
    "model.moe_input_jitter_eps": ((0,), "the router computes without noise; set it to null"),
}


@functools.cache
def known_model_keys() -> frozenset[str]:
    """First names of all keys below `model.` that act, have no effect, or are refused."""
    keys = {key for table in (*LIVE.values(), *INERT.values(), ONLY) for key in table}
    return frozenset(key.split(".")[1] for key in keys if key.startswith("model."))


def has_no_effect(name: str) -> bool:
    """Whether `model.<name>` is a key without effect, in any job."""
    return any(f"model.{name}" in table for table in INERT.values())


def refuse_model_values(values: Values) -> None:
    """Raise `ConfigError` where a key of `ONLY` has a value that is not accepted."""
    for key, (accepted, remedy) in ONLY.items():
        value = values.get(key)
        if value is not None and value not in accepted:
            raise ConfigError(f"{key}={value!r} is not supported here: {remedy}.")


def check_model_keys(cfg: DictConfig | Mapping[str, Any]) -> list[str]:
    """Check the keys of the `model` section that a model is built from.

    Args:
        cfg: the section, with what the checkpoint's own configuration says. References in other
            keys than those of the tables are not resolved.

    Returns:
        Notes worth a warning: keys of the network that have no effect, and unknown keys.

    Raises:
        ConfigError: a key has a value that would change the model and is not supported.
    """
    read = {key.split(".")[1] for key in (*ONLY, *INERT_ARCHITECTURE)}
    section = {name: to_plain(cfg[name]) for name in cfg if name in read}
    values = Values({"model": section})
    refuse_model_values(values)
    notes = []
    for key, inert in INERT_ARCHITECTURE.items():
        value = values.get(key)
        if value is not None and not inert.is_neutral(value):
            notes.append(f"{key}={value}: {inert.reason}")
    unknown = sorted(str(name) for name in cfg if name not in known_model_keys())
    if unknown:
        notes.append(f"{', '.join(f'model.{name}' for name in unknown)}: unknown here")
    return notes


def to_plain(value: Any) -> Any:
    """`value` of a `DictConfig` as plain dicts and lists."""
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


RECOMPUTE = "model.activations_checkpoint_"
TRAINING_JOBS = tuple(name for name in CONFIG_NAMES if name != "inference_rm")


@dataclass(frozen=True)
class OldForm:
    """A form of NeMo-Aligner that does something else here, or nothing."""

    form: str  # as a command or a YAML file writes it
    happens: str  # what becomes of it, and what to write instead
    # whether a configuration, without its checkpoint's values, holds the form
    is_used: Callable[[Values], bool]
    # the configurations in which it is a form of NeMo-Aligner
    jobs: tuple[str, ...] = CONFIG_NAMES


def _counts_elsewhere(v: Values, name: str) -> bool:
    value = v.get(f"trainer.{name}")
    own = [v.get(f"trainer.{job.algo}.{name}") for job in JOBS.values() if job.algo]
    return value not in (None, -1, *own)


def _recomputes_attention(v: Values) -> bool:
    return v.get(RECOMPUTE + "granularity") == "selective"


def _recomputes_nothing(v: Values) -> bool:
    return v.is_null(RECOMPUTE + "granularity")


def _is_set(v: Values, key: str) -> bool:
    return v.get(key) is not None


def _is_true(v: Values, key: str) -> bool:
    return bool(v.get(key))


OLD_FORMS = (
    OldForm(
        form=f"{RECOMPUTE}granularity=selective with {RECOMPUTE}method=uniform",
        happens=f"{RECOMPUTE}method has no effect, here and in NeMo-Aligner: selective recomputes "
        "the attention of every layer; set it to null",
        is_used=lambda v: _recomputes_attention(v) and _is_set(v, RECOMPUTE + "method"),
    ),
    OldForm(
        form=f"{RECOMPUTE}granularity=null with {RECOMPUTE}method or {RECOMPUTE}num_layers",
        happens="nothing is recomputed, here and in NeMo-Aligner; for less memory set "
        f"{RECOMPUTE}granularity=full",
        is_used=lambda v: (
            _recomputes_nothing(v)
            and (_is_set(v, RECOMPUTE + "method") or _is_set(v, RECOMPUTE + "num_layers"))
        ),
    ),
    OldForm(
        form="trainer.gradient_clip_val other than trainer.<algorithm>.gradient_clip_val",
        happens="the latter counts; NeMo-Aligner's mcore_distributed_optim read the former",
        is_used=partial(_counts_elsewhere, name="gradient_clip_val"),
        jobs=TRAINING_JOBS,
    ),
    OldForm(
        form="trainer.max_steps other than trainer.<algorithm>.max_steps",
        happens="the latter counts",
        is_used=partial(_counts_elsewhere, name="max_steps"),
        jobs=TRAINING_JOBS,
    ),
    OldForm(
        form="exp_manager=null",
        happens="the job writes no logs, no metrics and no checkpoints, and resumes from none",
        is_used=lambda v: v.is_null("exp_manager"),
        jobs=TRAINING_JOBS,
    ),
    OldForm(
        form="model.optim without lr",
        happens="the learning rate is PyTorch's default; set model.optim.lr",
        is_used=lambda v: _is_set(v, "model.optim") and v.get("model.optim.lr") is None,
        jobs=TRAINING_JOBS,
    ),
    *(
        OldForm(
            form=f"trainer.{kind}.trt_llm.enable=True",
            happens="TensorRT-LLM is gone; the built-in engine serves instead. "
            f"trt_llm.reshard=True acts as model.{kind}.generation.reshard=auto",
            is_used=partial(_is_true, key=f"trainer.{kind}.trt_llm.enable"),
            jobs=(f"gpt_{kind}_actor",),
        )
        for kind in ("ppo", "reinforce")
    ),
    OldForm(
        form="model.answer_only_loss=False",
        happens="the loss counts the prompts too. NeMo-Aligner never read this key (False in its "
        "gpt_sft.yaml) and trained on the responses only: set it to True for that",
        is_used=lambda v: v.get("model.answer_only_loss") is False,
        jobs=("gpt_sft",),
    ),
    OldForm(
        form="inference.micro_batch_size",
        happens="the name of inference.inference_micro_batch_size until NeMo-Aligner 0.3; it "
        "counts where the latter is not given",
        is_used=lambda v: (
            v.get("inference.micro_batch_size") != v.get("model.forward_micro_batch_size")
        ),
        jobs=("inference_rm",),
    ),
)

# What NeMo-Aligner has and this package refuses so far. (config name, key) -> (values that are
# accepted, what to do instead). Checked for the job that reads the key: a checkpoint's own
# configuration may well hold it.
LATER = {
    **{
        (job, f"model.data.{split}.{key}"): ((False,), remedy)
        for job in ("gpt_sft", "gpt_spin")
        for split in ("train_ds", "validation_ds", "test_ds")
        for key, remedy in {
            "add_sep": "no separator is put between prompt and response; write it into "
            "prompt_template, and set it to False",
        }.items()
    },
    ("gpt_knowledge_distillation", "model.knowledge_distillation.cross_tokenizer"): (
        (False,),
        "logits of another vocabulary would be compared by their rank alone; distil from the "
        "teacher's texts (SFT), or from a teacher with the student's tokenizer, and set it to "
        "False",
    ),
    ("gpt_sft", "trainer.sft.inference_metrics"): (
        (),
        "metrics of generated responses are not computed yet; compute them from the .nemo with "
        "GPTSFTModel.infer and nemo_aligner.metrics.InferenceMetricsHandler, and remove the key",
    ),
}


def old_form_notes(values: Values, config_name: str) -> list[str]:
    """One line for each of `OLD_FORMS` that a job's configuration holds."""
    return [
        f"{old.form}: {old.happens}"
        for old in OLD_FORMS
        if config_name in old.jobs and old.is_used(values)
    ]


def check_later(values: Values, config_name: str) -> None:
    """Raise `ConfigError` where a job asks for what NeMo-Aligner has and this package has not yet
    (`LATER`).
    """
    for (job, key), (accepted, remedy) in LATER.items():
        value = values.get(key)
        if job == config_name and value is not None and value not in accepted:
            raise ConfigError(f"{key}={value!r} is not supported yet: {remedy}.")
