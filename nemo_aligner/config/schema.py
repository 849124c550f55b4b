# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Which configuration keys exist: the ones that act, and the ones of NeMo and NeMo-Aligner that no
longer do.

Defaults are not here: they stand once, in `conf/*.yaml`. The checks that use these tables are in
`config_utils.py`, `config_rules.py`, `parallel_rules.py` and `ppo_rules.py`.

Three tables per configuration name:

* `LIVE[name]`: dotted keys that have an effect.
* `FREE`: prefixes below which any key goes (names that the user chooses, arguments of a
  third-party logger).
* `INERT[name]`: dotted key -> `Inert(reason, neutral)`. Accepted, without effect; a value other
  than a neutral one is worth a warning. An inert key covers everything below it.
"""

from dataclasses import dataclass

CONFIG_NAMES = (
    "gpt_ppo_actor",
    "gpt_ppo_critic",
    "gpt_rs_actor",
    "training_rm",
    "inference_rm",
    "gpt_sft",
)


@dataclass(frozen=True)
class Inert:
    """A key that is accepted and does nothing: why, and the values for which nobody needs to be
    told.
    """

    reason: str
    neutral: tuple = ()  # (...,) means every value

    def is_neutral(self, value) -> bool:
        return ... in self.neutral or any(
            value == n and type(value) is type(n) for n in self.neutral
        )


def _keys(prefix: str, names: str) -> set[str]:
    """`_keys("a.b", "c d.e")` is `{"a.b.c", "a.b.d.e"}`."""
    return {f"{prefix}.{name}" for name in names.split()}


def _inert(prefix: str, names: str, reason: str, *neutral) -> dict[str, Inert]:
    return {key: Inert(reason, neutral) for key in _keys(prefix, names)}


# ---- keys that act -------------------------------------------------------------------------------

_TRAINER = _keys(
    "trainer",
    """num_nodes devices accelerator precision logger enable_checkpointing use_distributed_sampler
    max_time max_epochs max_steps""",
)
_EXP_MANAGER = (
    _keys(  # the fields of nemo.utils.exp_manager.ExpManagerConfig and its CallbackParams
        "exp_manager",
        """explicit_log_dir exp_dir name version use_datetime_version resume_if_exists
        resume_past_end
    resume_ignore_no_checkpoint resume_from_checkpoint create_tensorboard_logger
    summary_writer_kwargs create_wandb_logger wandb_logger_kwargs create_mlflow_logger
    mlflow_logger_kwargs create_dllogger_logger dllogger_logger_kwargs create_clearml_logger
    clearml_logger_kwargs create_neptune_logger neptune_logger_kwargs create_checkpoint_callback
    files_to_copy max_time_per_run seconds_to_sleep""",
    )
    | _keys(
        "exp_manager.checkpoint_callback_params",
        "filename monitor save_top_k mode always_save_nemo save_nemo_on_train_end",
    )
)
_ARCHITECTURE = _keys(
    "model",
    """num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels
    normalization layernorm_epsilon layernorm_zero_centered_gamma activation
    position_embedding_type rotary_base rotary_percentage rotary_interleaved
    seq_len_interpolation_factor bias add_qkv_bias share_embeddings_and_output_weights
    make_vocab_size_divisible_by init_method_std hidden_dropout attention_dropout qkv_bias
    apply_query_key_layer_scaling attention_softmax_in_fp32 num_moe_experts moe_router_topk
    moe_ffn_hidden_size moe_router_pre_softmax moe_router_load_balancing_type""",
) | _keys(
    "model.tokenizer",
    """library type model vocab_file merge_file use_fast delimiter sentencepiece_legacy
    additional_special_tokens special_tokens trust_remote_code chat_template""",
)
_PARALLEL = _keys(
    "model",
    """tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
    context_parallel_size expert_model_parallel_size sequence_parallel
    activations_checkpoint_granularity activations_checkpoint_method
    activations_checkpoint_num_layers""",
)
_MODEL = _keys(
    "model",
    """micro_batch_size global_batch_size megatron_amp_O2 encoder_seq_length
    max_position_embeddings seed precision overwrite_base_config target nemo_version
    use_cpu_initialization persist_layer_norm masked_softmax_fusion bias_dropout_add_fusion
    apply_rope_fusion gradient_accumulation_fusion moe_aux_loss_coeff moe_z_loss_coeff
    moe_token_dispatcher_type""",
)
_OPTIM = _keys(
    "model.optim",
    """name lr weight_decay betas eps overlap_grad_sync bucket_cap_mb sched.name sched.warmup_steps
    sched.constant_steps sched.min_lr""",
)
_PEFT = _keys(
    "model.peft",
    """peft_scheme restore_from_path restore_from_ckpt.checkpoint_dir
    restore_from_ckpt.checkpoint_name lora_tuning.target_modules lora_tuning.adapter_dim
    lora_tuning.alpha lora_tuning.adapter_dropout lora_tuning.dropout_position
    lora_tuning.column_init_method lora_tuning.row_init_method lora_tuning.layer_selection
    lora_tuning.weight_tying lora_tuning.position_embedding_strategy""",
)
_SAMPLING = "sampling_params." + " sampling_params.".join(
    "use_greedy temperature top_k top_p repetition_penalty end_strings".split()
)
_DATA = _keys(
    "model.data",
    """data_impl splits_string seq_length num_workers data_prefix validation_drop_last
    apply_ftfy append_eod""",
)
_REWARD_MODEL = _keys(
    "model",
    """reward_model_type output_sequence use_avg_pool force_head_dtype forward_micro_batch_size
    reward_standardization.enable reward_standardization.mean reward_standardization.std""",
) | _keys(
    "model.regression",
    """num_attributes merge_attributes attribute_weights loss_mask_val loss_func
    load_rm_head_weights""",
)
_COMMON = _TRAINER | _EXP_MANAGER | _ARCHITECTURE | _PARALLEL | _MODEL | _OPTIM
_CHECKPOINT = {"pretrained_checkpoint.restore_from_path"}

_REWARD_ADDRESS = "name ip port"
_POLICY = f"""rollout_micro_batch_size num_rollout_samples forward_micro_batch_size val_rollout_micro_batch_size
    num_val_samples offload_adam_states loss_reduction {_SAMPLING} length_params.max_length length_params.min_length"""
_ACTOR = (
    _keys(
        "trainer.ppo",
        """critic_warmup_steps max_epochs max_steps ppo_epochs run_init_validation
        val_check_interval save_interval gradient_clip_val initial_policy_kl_penalty
        use_absolute_kl discount_factor gae_lambda normalize_advantages ratio_eps entropy_bonus
        rollout_batch_seq_length model_gbs model_mbs trt_llm.enable trt_llm.reshard
        batch_iterator.use_flask advantage_estimator kl_estimator adaptive_kl.enable
        adaptive_kl.target adaptive_kl.horizon target_kl critic_gae_lambda advantage_clip
        reward_clip whiten_rewards overlong_buffer_len overlong_penalty_factor
        alarms.sampling_mismatch alarms.clip_fraction alarms.explained_variance
        alarms.truncated_fraction alarms.replica_check_interval""",
    )
    | _keys(
        "remote_critic_rm",
        "pad_to_length combine_rm_and_critic_server init_timeout_s inference_timeout_s "
        "reward_models",
    )
    | _keys("remote_critic_rm.reward_model", _REWARD_ADDRESS)
    | _keys("remote_critic_rm.critic", "name.train name.infer name.save name.status ip port")
    | _keys(
        "model.ppo",
        f"""{_POLICY} entropy_bonus ratio_eps dual_clip kl_loss_coef kl_loss_estimator train_on_truncated
        num_rollouts_per_prompt trt_llm.enable trt_llm.reshard""",
    )
)
_RS = (
    _keys(
        "trainer.rs",
        """max_epochs max_steps run_init_validation val_check_interval save_interval
        gradient_clip_val rollout_batch_seq_length model_gbs model_mbs alarms.truncated_fraction
        alarms.replica_check_interval""",
    )
    | _keys(
        "remote_rm", "pad_to_length init_timeout_s inference_timeout_s host port reward_models"
    )
    | _keys("remote_rm.reward_model", _REWARD_ADDRESS)
    | _keys("model.rs", f"{_POLICY} num_rollouts_per_prompt top_n_rollouts")
)
_REWARD_SERVER = {"rm_model_file"} | _keys(
    "inference",
    """host port model_name max_queue_delay_microseconds inference_micro_batch_size
    strip_sequence_length_to_multiple reward_fn reward_fn_workers reward_fn_timeout_s
    reward_fn_fallback""",
)
_CRITIC = _keys(
    "trainer.ppo",
    """host port combine_rm_and_critic_server max_steps gradient_clip_val
    max_queue_delay_microseconds strip_sequence_length_to_multiple inference_micro_batch_size
    alarms.replica_check_interval""",
) | _keys("model", "loss_clip_val loss_reduction offload_adam_states")
_RM = _keys(
    "trainer.rm",
    """max_epochs max_steps val_check_interval save_interval train_random_sampler
    val_random_sampler limit_train_batches limit_val_batches gradient_clip_val
    alarms.replica_check_interval""",
)
_SFT_SET = """file_path global_batch_size micro_batch_size shuffle max_seq_length drop_last label_key
    add_eos add_sep add_bos truncation_field truncation_method prompt_template hf_dataset pad_to_max_length"""
_SFT = (
    {"name"}
    | _keys(
        "trainer.sft",
        """max_epochs max_steps val_check_interval save_interval limit_train_batches
        limit_val_batches gradient_clip_val alarms.replica_check_interval""",
    )
    | _keys("model", "restore_from_path answer_only_loss loss_reduction")
    | _keys("model.data", "chat num_workers sample")
    | _keys(
        "model.data.chat_prompt_tokens",
        "system_turn_start turn_start label_start end_of_turn end_of_name",
    )
    | set().union(
        *(
            _keys(f"model.data.{split}", _SFT_SET)
            for split in ("train_ds", "validation_ds", "test_ds")
        )
    )
)

LIVE = {
    "gpt_ppo_actor": _COMMON | _CHECKPOINT | _DATA | _PEFT | _ACTOR,
    # A critic serves until it is stopped: it has neither a time limit nor an end of training.
    "gpt_ppo_critic": (_COMMON | _CHECKPOINT | _REWARD_MODEL | _CRITIC)
    - {
        "trainer.max_time",
        "exp_manager.max_time_per_run",
        "exp_manager.checkpoint_callback_params.save_nemo_on_train_end",
    },
    "gpt_rs_actor": _COMMON | _CHECKPOINT | _DATA | _PEFT | _RS,
    "training_rm": _COMMON | _CHECKPOINT | _DATA | _REWARD_MODEL | _RM,
    "inference_rm": _TRAINER
    | _ARCHITECTURE
    | _PARALLEL
    | (_MODEL - {"model.global_batch_size"})
    | _REWARD_MODEL
    | _REWARD_SERVER,
    "gpt_sft": _COMMON | _PEFT | _SFT,
}

FREE = (
    "model.data.data_prefix",
    "model.overwrite_base_config",
    "model.tokenizer.special_tokens",
    "exp_manager.summary_writer_kwargs",
    "exp_manager.wandb_logger_kwargs",
    "exp_manager.mlflow_logger_kwargs",
    "exp_manager.dllogger_logger_kwargs",
    "exp_manager.clearml_logger_kwargs",
    "exp_manager.neptune_logger_kwargs",
    "remote_rm.reward_models",
    "remote_critic_rm.reward_models",
)

# Keys that say how the weights look. A null here means "as in the checkpoint" (see
# config_utils.drop_unset).
ARCHITECTURE_KEYS = tuple(sorted(key.removeprefix("model.") for key in _ARCHITECTURE)) + (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "reward_model_type",
    "use_avg_pool",
    "regression.num_attributes",
    "regression.attribute_weights",
)

# ---- kinds of values (config_rules.py checks them) ----

# Keys of ours and of a checkpoint that hold True or False. Where they are live, nothing else is
# accepted: Hydra reads `off`, `no` and `None` as texts, which Python takes for true.
FLAGS = (
    _keys("trainer", "logger enable_checkpointing use_distributed_sampler")
    | _keys(
        "trainer.ppo",
        """run_init_validation use_absolute_kl normalize_advantages whiten_rewards
        adaptive_kl.enable batch_iterator.use_flask trt_llm.enable trt_llm.reshard
        combine_rm_and_critic_server""",
    )
    | _keys("trainer", "rs.run_init_validation rm.train_random_sampler rm.val_random_sampler")
    | {"remote_critic_rm.combine_rm_and_critic_server"}
    | _keys(
        "exp_manager",
        """use_datetime_version resume_if_exists resume_past_end resume_ignore_no_checkpoint
        create_tensorboard_logger create_wandb_logger create_mlflow_logger create_dllogger_logger
        create_clearml_logger create_neptune_logger create_checkpoint_callback
        checkpoint_callback_params.always_save_nemo
        checkpoint_callback_params.save_nemo_on_train_end""",
    )
    | _keys(
        "model",
        """layernorm_zero_centered_gamma rotary_interleaved bias add_qkv_bias qkv_bias
        share_embeddings_and_output_weights apply_query_key_layer_scaling attention_softmax_in_fp32
        moe_router_pre_softmax tokenizer.use_fast tokenizer.sentencepiece_legacy
        tokenizer.trust_remote_code sequence_parallel megatron_amp_O2 use_cpu_initialization
        persist_layer_norm masked_softmax_fusion bias_dropout_add_fusion apply_rope_fusion
        gradient_accumulation_fusion optim.overlap_grad_sync output_sequence use_avg_pool
        reward_standardization.enable regression.merge_attributes regression.load_rm_head_weights
        offload_adam_states answer_only_loss peft.lora_tuning.weight_tying ppo.offload_adam_states
        ppo.train_on_truncated ppo.sampling_params.use_greedy ppo.trt_llm.enable
        ppo.trt_llm.reshard rs.offload_adam_states rs.sampling_params.use_greedy""",
    )
    | _keys("model.data", "validation_drop_last apply_ftfy append_eod chat sample")
    | {
        f"model.data.{split}.{key}"
        for split in ("train_ds", "validation_ds", "test_ds")
        for key in "shuffle drop_last add_eos add_sep add_bos hf_dataset pad_to_max_length".split()
    }
)

# Keys that must not be null: null would not mean "off" or "as in the checkpoint" there. Flags need
# no line here.
_REQUIRED_TRAINING = _keys("trainer", "num_nodes devices accelerator") | _keys(
    "model",
    """micro_batch_size global_batch_size encoder_seq_length seed optim.name optim.lr
    optim.weight_decay optim.betas optim.eps""",
)
_REQUIRED_POLICY = """rollout_micro_batch_size num_rollout_samples num_rollouts_per_prompt forward_micro_batch_size
    val_rollout_micro_batch_size num_val_samples loss_reduction sampling_params.use_greedy
    sampling_params.temperature sampling_params.top_k sampling_params.top_p sampling_params.repetition_penalty
    length_params.max_length length_params.min_length"""
_REQUIRED_LOOP = "max_epochs max_steps val_check_interval save_interval model_gbs"
REQUIRED = {
    "gpt_ppo_actor": _REQUIRED_TRAINING
    | _keys(
        "trainer.ppo",
        f"""{_REQUIRED_LOOP} ppo_epochs advantage_estimator discount_factor gae_lambda initial_policy_kl_penalty
        overlong_buffer_len overlong_penalty_factor critic_warmup_steps""",
    )
    | _keys("model", "data.num_workers data.seq_length")
    | _keys(
        "model.ppo", f"{_REQUIRED_POLICY} kl_loss_coef kl_loss_estimator ratio_eps entropy_bonus"
    ),
    "gpt_ppo_critic": _REQUIRED_TRAINING
    | _keys(
        "trainer.ppo",
        "host port max_steps max_queue_delay_microseconds inference_micro_batch_size",
    ),
    "gpt_rs_actor": _REQUIRED_TRAINING
    | _keys("trainer.rs", _REQUIRED_LOOP)
    | _keys("model", "data.num_workers data.seq_length")
    | _keys("model.rs", f"{_REQUIRED_POLICY} top_n_rollouts"),
    "training_rm": _REQUIRED_TRAINING
    | _keys("trainer.rm", "max_steps val_check_interval save_interval")
    | _keys("model", "data.num_workers data.seq_length"),
    "inference_rm": _keys("trainer", "num_nodes devices accelerator")
    | _keys(
        "inference",
        """host port model_name max_queue_delay_microseconds inference_micro_batch_size
        reward_fn_workers reward_fn_timeout_s""",
    ),
    "gpt_sft": _REQUIRED_TRAINING
    | _keys("trainer.sft", "max_steps val_check_interval save_interval")
    | _keys(
        "model", "data.num_workers data.train_ds.max_seq_length data.validation_ds.max_seq_length"
    )
    | _keys("model.data.validation_ds", "micro_batch_size global_batch_size"),
}

# ---- keys that no longer act ---------------------------------------------------------------------

_TRT = "TensorRT-LLM is gone; the built-in engine generates"
_FLASK = "there is no Flask server: the shared work queue is a counter in the job's own store"
_LIGHTNING = (
    "Lightning only launches the job: the loops are this project's own; see trainer.<algorithm>"
)
_TE = "the layer implementation is chosen by what is installed (Transformer Engine on a GPU, else local)"
_APEX = "apex's own optimizer and kernels are not used; Megatron Core's are"
_NEMO = "a key of NeMo's model that Megatron Core has no use for here"
_DATASET = "the data sets read jsonl directly"
_DEAD = "an old flag of NeMo-Aligner's scripts that had no effect there either"

_INERT_COMMON = (
    _inert(
        "trainer",
        """replace_sampler_ddp strategy callbacks fast_dev_run min_epochs min_steps
        limit_train_batches limit_val_batches limit_test_batches limit_predict_batches
        overfit_batches val_check_interval check_val_every_n_epoch num_sanity_val_steps
        log_every_n_steps enable_progress_bar enable_model_summary accumulate_grad_batches
        gradient_clip_val gradient_clip_algorithm deterministic benchmark inference_mode profiler
        detect_anomaly barebones plugins sync_batchnorm reload_dataloaders_every_n_epochs
        default_root_dir""",
        _LIGHTNING,
    )
    | _inert(
        "exp_manager",
        """create_early_stopping_callback early_stopping_callback_params
        create_ipl_epoch_stopper_callback ipl_epoch_stopper_callback_params
        create_preemption_callback log_step_timing log_delta_step_timing step_timing_kwargs
        disable_validation_on_resume ema create_straggler_detection_callback
        straggler_detection_params create_fault_tolerance_callback fault_tolerance
        log_tflops_per_sec_per_gpu""",
        _LIGHTNING,
    )
    | _inert(
        "exp_manager.checkpoint_callback_params",
        """dirpath verbose save_last prefix postfix save_best_model async_save
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
    | _inert("model", "mcore_gpt", "every model here is a Megatron Core model", True)
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
        use_te_rng_tracker inference_rng_tracker name mcore_customization_config attention_backend
        cp_comm_type""",
        _TE,
    )
    | _inert(
        "model",
        """apex_transformer_log_level apex_transformer_log_level_o2 gradient_as_bucket_view
        grad_allreduce_chunk_size_mb grad_div_ar_fusion bias_activation_fusion bias_dropout_fusion
        cross_entropy_loss_fusion get_attention_mask_from_fusion batch_p2p_comm overlap_p2p_comm
        deallocate_pipeline_outputs native_amp_init_scale native_amp_growth_interval hysteresis
        fp16_lm_cross_entropy async_grad_allreduce sync_batch_comm
        no_async_tensor_model_parallel_allreduce
        num_micro_batches_with_partial_activation_checkpoints
        activations_checkpoint_layers_per_pipeline sharp use_tp_pp_dp_mapping cpu_offloading
        cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights
        defer_embedding_wgrad_compute wgrad_deferral_limit""",
        _APEX,
    )
    | _inert(
        "model",
        """pre_process post_process onnx_safe nsys_profile memory_profile gc_interval
        rampup_batch_size resume_from_checkpoint resume_from_path save_nemo_on_validation_end
        enable_nge tokens_to_generate inference scale_positional_embedding fp32_residual_connection
        ffn_dropout use_scaled_init_method init_method hidden_steps num_trainable_params
        log_token_counts dist_ckpt_format dist_ckpt_load_strictness dist_ckpt_torch_dist_multiproc
        dist_ckpt_assume_constant_structure dist_ckpt_parallel_save
        dist_ckpt_parallel_save_within_dp dist_ckpt_parallel_load dist_ckpt_parallel_dist_opt
        tp_comm_bootstrap_backend nccl_communicator_config_path distributed_timeout_minutes steerlm
        steerable_attributes chunk_size fsdp fsdp_sharding_strategy fsdp_grad_reduce_dtype
        fsdp_sharded_checkpoint fsdp_use_orig_params share_embeddings data_prefix chat_template
        use_loss_mask""",
        _NEMO,
    )
    | _inert("model.optim", "contiguous_grad_buffer", _APEX, True)
    | _inert(
        "model.optim",
        """contiguous_param_buffer grad_sync_on_finish average_in_collective overlap_param_sync
        grad_sync_dtype store_params store_param_remainders with_scaled_states param_sync_dtype
        dtype process_group capturable master_weights foreach fused amsgrad d_coef
        delay_param_gather delay_grad_reduce align_param_gather ddp_bucket_size""",
        _APEX,
    )
    | _inert(
        "model.optim.sched",
        "max_steps last_epoch monitor reduce_on_plateau warmup_ratio hold_steps",
        _NEMO,
    )
    | _inert("model.data", "skip_warmup", _DATASET, True)
    | _inert("model.data", "dataloader_type", _DATASET, "single", None)
    | _inert("model.data", "index_mapping_dir", _DATASET, None)
    | _inert(
        "model.data",
        "reset_position_ids reset_attention_mask eod_mask_loss",
        "samples are never packed",
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

INERT = {
    "gpt_ppo_actor": _INERT_COMMON
    | _DATASET_INERT
    | _inert("trainer.ppo", "trt_model_dir", _TRT, "/tmp/trt_llm_model")
    | {
        f"{section}.trt_llm.{key}": Inert(_TRT, neutral if section == "trainer.ppo" else (...,))
        for section in ("trainer.ppo", "model.ppo")  # the second refers to the first
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
    | _inert(
        "model.ppo.sampling_params",
        "add_BOS",
        "prompts are tokenized as they stand, by the data set",
        False,
    )
    | _inert(
        "model.ppo.sampling_params",
        "all_probs compute_logprob",
        "log-probabilities come from their own pass",
        False,
    )
    | _inert(
        "remote_critic_rm",
        "pad_sequence_length_to_multiple",
        _DEAD + "; use remote_critic_rm.pad_to_length",
    ),
    "gpt_ppo_critic": _INERT_COMMON
    | _inert(
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
    "gpt_rs_actor": _INERT_COMMON
    | _DATASET_INERT
    | _inert(
        "model.rs.sampling_params",
        "add_BOS",
        "prompts are tokenized as they stand, by the data set",
        False,
    )
    | _inert(
        "model.rs.sampling_params",
        "all_probs compute_logprob",
        "log-probabilities come from their own pass",
        False,
    )
    | _inert("model.rs", "forward_mbs share_dir", _DEAD)
    | _inert("model", "forward_mbs", _DEAD + "; use model.rs.forward_micro_batch_size")
    | _inert("model", "offload_adam_states", _DEAD + "; use model.rs.offload_adam_states")
    | _inert(
        "remote_rm", "pad_sequence_length_to_multiple", _DEAD + "; use remote_rm.pad_to_length"
    ),
    "inference_rm": _INERT_COMMON
    | _inert("model", "global_batch_size optim data", "a server trains nothing", ...)
    | _inert("exp_manager", "explicit_log_dir exp_dir name", "a reward server writes no files")
    | _inert("pretrained_checkpoint", "restore_from_path", "use rm_model_file"),
    "training_rm": _INERT_COMMON
    | _DATASET_INERT
    | _inert("model", "forward_mbs", _DEAD + "; use model.forward_micro_batch_size"),
    "gpt_sft": _INERT_COMMON
    | {
        f"model.data.{split}.{key}": Inert(_DATASET, neutral)
        for split in ("train_ds", "validation_ds", "test_ds")
        for key, neutral in {
            "memmap_workers": (None,),
            "min_seq_length": (1, None),
            "index_mapping_dir": (None,),
            "output_original_text": (True,),
            "file_names": (),
            "concat_sampling_probabilities": (None,),
            "num_workers": (),
            "pin_memory": (),
            "names": (None,),
            "metric": (),
            "write_predictions_to_file": (False,),
            "output_file_path_prefix": (),
            "packed_sequence": (False,),
            "packed_sequence_return_cu_seqlen": (),
            "tokens_to_generate": (),
            "virtual_tokens": (),
        }.items()
    },
}
for _table in INERT.values():  # top-level leftovers of NeMo's launchers
    for _key in ("restore_from_path", "cluster_type", "run", "mode", "inference", "name"):
        _table.setdefault(_key, Inert(_NEMO, ("megatron_gpt",) if _key == "name" else ()))
INERT["gpt_sft"].pop("name")  # there it names the experiment
INERT["inference_rm"].pop("inference")  # there it is the server

# ---- values that would change the mathematics if they were ignored -------------------------------

# key -> (accepted values, what to do instead). None (not set) is always accepted.
ONLY = {
    "model.transformer_block_type": (("pre_ln",), "only pre-LayerNorm models exist here"),
    "model.peft.peft_scheme": (("none",), "set it to none; every weight is trained"),
    "model.fp8": ((False,), "fp8 is not supported: train in bf16"),
    "model.headscale": ((False,), "such a model cannot be built on Megatron Core"),
    "model.openai_gelu": ((False,), "set model.activation=gelu: only the exact gelu is built"),
    "model.onnx_safe": ((False,), "set it to False"),
    "model.normalize_attention_scores": (
        (True,),
        "attention scores are always scaled by 1/sqrt(head size)",
    ),
    "model.window_size": ((), "sliding-window attention is not supported"),
    "model.moe_grouped_gemm": (
        (False,),
        "the experts are computed one after the other; set it to False",
    ),
    "model.qk_layernorm": ((False,), "normalised queries and keys are not supported"),
    "model.apply_residual_connection_post_layernorm": (
        (False,),
        "only pre-LayerNorm models exist here",
    ),
}
