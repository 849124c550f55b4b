# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Which configuration keys act, and what kind of value each takes.

Keys of NeMo and NeMo-Aligner that no longer act are in `inert_keys.py`; defaults are in
`conf/*.yaml`.

* `LIVE[name]`: dotted keys that have an effect in the jobs of configuration `name`.
* `FREE`: prefixes below which any key goes (names that the user chooses, arguments of a
  third-party logger).
* `ARCHITECTURE_KEYS`, `FLAGS`, `REQUIRED`: keys whose null means "as in the checkpoint", whose
  value is True or False, and which must have a value.

A new key needs a line in a `LIVE` table here, one in the job's YAML file and one in
docs/config.md; `checks.py` and `rules.py` do the checking.
"""

from nemo_aligner.config.optim_rules import SCHEDULE_KEYS

CONFIG_NAMES = (
    "gpt_ppo_actor",
    "gpt_ppo_critic",
    "gpt_rs_actor",
    "gpt_reinforce_actor",
    "training_rm",
    "inference_rm",
    "gpt_sft",
    "gpt_dpo",
    "gpt_knowledge_distillation",
    "gpt_kto",
    "gpt_spin",
)
# Of the commands that use a trained policy, with the page of docs/ that explains their keys.
COMMAND_PAGES = {
    "generate": "generate_evaluate",
    "evaluate": "generate_evaluate",
    "compute_topk_logits": "distillation",
    "inference_teacher": "distillation",
}
COMMAND_NAMES = tuple(COMMAND_PAGES)


def dotted(prefix: str, names: str) -> set[str]:
    """Dotted keys: `dotted("a.b", "c d.e")` is `{"a.b.c", "a.b.d.e"}`."""
    return {f"{prefix}.{name}" for name in names.split()}


# --- keys that act ---

_TRAINER = dotted(
    "trainer",
    """num_nodes devices accelerator precision logger enable_checkpointing use_distributed_sampler
    max_time max_epochs max_steps hang_timeout_s""",
)
_EXP_MANAGER = (
    dotted(  # the fields of nemo.utils.exp_manager.ExpManagerConfig and its CallbackParams
        "exp_manager",
        """explicit_log_dir exp_dir name version use_datetime_version resume_if_exists
        resume_past_end
    resume_ignore_no_checkpoint resume_from_checkpoint create_tensorboard_logger
    summary_writer_kwargs create_wandb_logger wandb_logger_kwargs create_mlflow_logger
    mlflow_logger_kwargs create_dllogger_logger dllogger_logger_kwargs create_clearml_logger
    clearml_logger_kwargs create_neptune_logger neptune_logger_kwargs create_checkpoint_callback
    files_to_copy max_time_per_run seconds_to_sleep""",
    )
    | dotted(
        "exp_manager.checkpoint_callback_params",
        "filename monitor save_top_k mode always_save_nemo save_nemo_on_train_end async_save",
    )
)
_ARCHITECTURE = dotted(
    "model",
    """num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels
    normalization layernorm_epsilon layernorm_zero_centered_gamma qk_layernorm activation
    position_embedding_type rotary_base rotary_percentage rotary_interleaved
    seq_len_interpolation_factor scale_positional_embedding scale_factor window_size
    window_attn_skip_freq query_pre_attn_scalar no_rope_freq yarn_rotary_scaling_factor
    yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow yarn_mscale
    yarn_mscale_all_dim yarn_correction_range_round_to_int
    apply_embedding_scaling openai_gelu bias_activation_fusion bias add_qkv_bias qkv_bias
    share_embeddings_and_output_weights make_vocab_size_divisible_by override_vocab_size
    init_method_std use_scaled_init_method hidden_dropout attention_dropout num_moe_experts
    moe_router_topk moe_ffn_hidden_size moe_router_pre_softmax moe_router_load_balancing_type
    moe_layer_freq moe_shared_expert_intermediate_size moe_shared_expert_gate""",
) | dotted(
    "model.tokenizer",
    """library type model vocab_file merge_file use_fast delimiter sentencepiece_legacy
    additional_special_tokens special_tokens trust_remote_code chat_template end_token_ids""",
)
_PARALLEL = dotted(
    "model",
    """tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
    num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
    context_parallel_size expert_model_parallel_size sequence_parallel
    activations_checkpoint_granularity activations_checkpoint_method
    activations_checkpoint_num_layers""",
)
_MODEL = dotted(
    "model",
    """micro_batch_size global_batch_size dynamic_micro_batch_tokens megatron_amp_O2
    encoder_seq_length max_position_embeddings seed precision overwrite_base_config target
    nemo_version use_cpu_initialization persist_layer_norm masked_softmax_fusion
    bias_dropout_add_fusion apply_rope_fusion gradient_accumulation_fusion moe_aux_loss_coeff
    moe_z_loss_coeff moe_token_dispatcher_type mcore_customization_config hugging_face""",
)
_OPTIM = dotted(
    "model.optim",
    """name lr weight_decay betas eps momentum overlap_grad_sync bucket_cap_mb sched.name
    mcore_customization_config""",
) | {f"model.optim.sched.{key}" for key in SCHEDULE_KEYS}
_PEFT = dotted(
    "model.peft",
    """peft_scheme restore_from_path restore_from_ckpt.checkpoint_dir
    restore_from_ckpt.checkpoint_name lora_tuning.target_modules
    lora_tuning.adapter_dim lora_tuning.alpha lora_tuning.adapter_dropout
    lora_tuning.dropout_position
    lora_tuning.column_init_method lora_tuning.row_init_method lora_tuning.layer_selection
    lora_tuning.weight_tying lora_tuning.position_embedding_strategy lora_tuning.variant""",
)
_GENERATES = {"model.peft.merge_for_generation"}  # of jobs with a policy
_SAMPLED = "sampling_params." + " sampling_params.".join(
    "use_greedy temperature top_k top_p repetition_penalty".split()
)
_SAMPLING = f"{_SAMPLED} sampling_params.end_strings"
_CHAT_KEYS = "chat_template chat_template_kwargs chat_date chat chat_prompt_tokens." + (
    " chat_prompt_tokens.".join(
        "system_turn_start turn_start label_start end_of_turn end_of_name".split()
    )
)
_CHAT = dotted("model.data", _CHAT_KEYS)
_DATA = (
    dotted(
        "model.data",
        """data_impl splits_string seq_length num_workers data_prefix validation_drop_last
    apply_ftfy add_bos append_eod columns index_mapping_dir prompt_end allow_empty_prompt""",
    )
    | _CHAT
)
_REWARD_MODEL = dotted(
    "model",
    """reward_model_type output_sequence use_avg_pool pad_token_id force_head_dtype
    forward_micro_batch_size reward_standardization.enable reward_standardization.mean
    reward_standardization.std""",
) | dotted(
    "model.regression",
    """num_attributes merge_attributes attribute_weights loss_mask_val loss_func
    load_rm_head_weights""",
)
_COMMON = _TRAINER | _EXP_MANAGER | _ARCHITECTURE | _PARALLEL | _MODEL | _OPTIM | {"model.save_hf"}
_CHECKPOINT = {"pretrained_checkpoint.restore_from_path"}

_REWARD_ADDRESS = "name ip port"
_POLICY = f"""rollout_micro_batch_size num_rollout_samples forward_micro_batch_size
    val_rollout_micro_batch_size num_val_samples offload_adam_states loss_reduction {_SAMPLING}
    length_params.max_length length_params.min_length generation.reshard
    generation.kv_cache_gb generation.cuda_graphs environment.path environment.max_turns
    environment.workers environment.timeout_s environment.fallback"""
_REWARD_FN = """reward_fn reward_fn_workers reward_fn_timeout_s reward_fn_fallback rewards_per
    step_end"""
_EPOCHS = """max_epochs max_steps val_check_interval save_interval gradient_clip_val
    alarms.replica_check_interval"""
_SUPERVISED = f"{_EPOCHS} limit_train_batches limit_val_batches"
_ROLLOUTS = f"""{_EPOCHS} {_REWARD_FN} reward_token_file reward_tls_ca_file run_init_validation
    rollout_batch_seq_length model_gbs model_mbs alarms.truncated_fraction"""
_ACTOR = (
    dotted(
        "trainer.ppo",
        f"""{_ROLLOUTS} critic_warmup_steps ppo_epochs initial_policy_kl_penalty use_absolute_kl
        discount_factor gae_lambda normalize_advantages ratio_eps entropy_bonus trt_llm.enable
        trt_llm.reshard batch_iterator.use_flask advantage_estimator kl_estimator
        adaptive_kl.enable adaptive_kl.target adaptive_kl.horizon target_kl critic_gae_lambda
        advantage_clip reward_clip whiten_rewards process_rewards overlong_buffer_len
        overlong_penalty_factor alarms.sampling_mismatch alarms.first_update_kl
        alarms.clip_fraction alarms.explained_variance""",
    )
    | dotted(
        "remote_critic_rm",
        "pad_to_length combine_rm_and_critic_server init_timeout_s inference_timeout_s "
        "reward_models token_file tls_ca_file",
    )
    | dotted("remote_critic_rm.reward_model", _REWARD_ADDRESS)
    | dotted(
        "remote_critic_rm.critic",
        "name.train name.infer name.save name.status name.resume ip port",
    )
    | dotted(
        "model.ppo",
        f"""{_POLICY} entropy_bonus ratio_eps dual_clip kl_loss_coef kl_loss_estimator
        rollout_logprobs train_on_truncated num_rollouts_per_prompt trt_llm.enable
        trt_llm.reshard""",
    )
)
_REMOTE_RM = dotted(
    "remote_rm",
    "pad_to_length init_timeout_s inference_timeout_s host port reward_models token_file "
    "tls_ca_file",
) | dotted("remote_rm.reward_model", _REWARD_ADDRESS)
_RS = (
    dotted("trainer.rs", _ROLLOUTS)
    | _REMOTE_RM
    | dotted("model.rs", f"{_POLICY} num_rollouts_per_prompt top_n_rollouts")
)
_REINFORCE = (
    dotted(
        "trainer.reinforce",
        f"""{_ROLLOUTS} initial_policy_kl_penalty use_absolute_kl num_rollouts_per_prompt
        trt_llm.enable trt_llm.reshard batch_iterator.use_flask alarms.sampling_mismatch""",
    )
    | _REMOTE_RM
    | dotted("model.reinforce", f"{_POLICY} trt_llm.enable trt_llm.reshard")
)
_FRONT = dotted("server", "frontend tls_certificate tls_key")
_ENDPOINT = _FRONT | dotted(
    "inference",
    """host port token_file max_request_mb model_name max_queue_delay_microseconds
    inference_micro_batch_size strip_sequence_length_to_multiple""",
)
_REWARD_SERVER = (
    {"rm_model_file"} | _ENDPOINT | dotted("inference", f"micro_batch_size {_REWARD_FN}")
)
_CRITIC = (
    _FRONT
    | dotted(
        "trainer.ppo",
        """host port token_file max_request_mb require_lease combine_rm_and_critic_server max_steps
    gradient_clip_val max_queue_delay_microseconds strip_sequence_length_to_multiple
    inference_micro_batch_size alarms.replica_check_interval""",
    )
    | dotted("model", "loss_clip_val loss_reduction offload_adam_states")
)
_RM = dotted("trainer.rm", f"{_SUPERVISED} train_random_sampler val_random_sampler")
_PREFERENCES = """ref_policy_kl_penalty preference_average_log_probs sft_average_log_probs
    preference_loss_weight sft_loss_weight log_prob_forward_micro_batch_size ref_log_probs_dir"""
_DPO = (
    dotted(
        "trainer.dpo",
        f"""{_SUPERVISED} alarms.likelihood_fall alarms.first_rewards alarms.accuracy
        alarms.margin""",
    )
    | dotted("model.dpo", f"{_PREFERENCES} preference_loss label_smoothing gt_reward_scale")
    | dotted("model.data", "default_chosen_reward default_rejected_reward")
)
_DISTILLATION = (
    dotted(
        "trainer.knowledge_distillation",
        f"{_SUPERVISED} alarms.teacher_mass alarms.truncated_fraction",
    )
    | dotted(
        "model.knowledge_distillation",
        """target_logits_scale logits_scale kd_loss_weight sft_loss_weight kd_loss jsd_beta
        outside_top_k cross_tokenizer""",
    )
    | dotted(
        "model.knowledge_distillation.on_policy",
        f"""fraction rollout_micro_batch_size {_SAMPLING} length_params.max_length
        length_params.min_length""",
    )
    | dotted(
        "remote_teacher",
        "init_timeout_s inference_timeout_s token_file tls_ca_file name host port",
    )
    | dotted("model.data", "top_k n_chunks")
    | {"name", "model.loss_reduction"}
)
_KTO = dotted(
    "trainer.kto", f"{_SUPERVISED} alarms.likelihood_fall alarms.first_rewards alarms.margin"
) | dotted("model.kto", f"{_PREFERENCES} desirable_loss_weight undesirable_loss_weight")
_SFT_SET = """file_path global_batch_size micro_batch_size shuffle max_seq_length drop_last
    label_key add_eos add_sep add_bos truncation_field truncation_method prompt_template
    pad_to_max_length columns index_mapping_dir packed_sequence"""
_SFT = (
    {"name"}
    | dotted("trainer.sft", f"{_SUPERVISED} alarms.effective_responses")
    | dotted("model", "restore_from_path answer_only_loss loss_reduction")
    | dotted("model.steerlm2", "micro_batch_size forward_micro_batch_size")
    | dotted("model.data", "num_workers columns one_turn_per_sample allow_empty_prompt")
    | _CHAT
    | set().union(
        *(
            dotted(f"model.data.{split}", _SFT_SET)
            for split in ("train_ds", "validation_ds", "test_ds")
        )
    )
)

_SPIN_SET = """file_path shuffle max_seq_length drop_last label_key add_eos add_sep add_bos
    truncation_field truncation_method prompt_template pad_to_max_length columns
    index_mapping_dir"""
_SPIN = (
    dotted(
        "trainer.spin",
        f"""{_SUPERVISED} max_iterations alarms.truncated_fraction alarms.identical_fraction
        alarms.likelihood_fall alarms.first_rewards alarms.accuracy alarms.margin""",
    )
    | dotted(
        "model.spin",
        f"""ref_policy_kl_penalty preference_average_log_probs log_prob_forward_micro_batch_size
        rollout_micro_batch_size offload_adam_states {_SAMPLING} length_params.max_length
        length_params.min_length generation.reshard generation.kv_cache_gb
        generation.cuda_graphs""",
    )
    | dotted("model.data", "num_workers columns one_turn_per_sample allow_empty_prompt")
    | _CHAT
    | dotted("model.data.train_ds", _SPIN_SET)
    | dotted("model.data.validation_ds", f"{_SPIN_SET} global_batch_size micro_batch_size")
)

_GENERATE = (
    dotted("trainer", "num_nodes devices accelerator precision logger")
    | _ARCHITECTURE
    | _PARALLEL
    | (_MODEL - dotted("model", "micro_batch_size global_batch_size dynamic_micro_batch_tokens"))
    | _CHECKPOINT
    | _CHAT
    | set(f"responses_per_prompt micro_batch_size sampling_params.add_BOS {_SAMPLING}".split())
    | dotted("length_params", "max_length min_length")
)
_EVALUATE = (
    dotted("bootstrap", "resamples confidence seed")
    | dotted("inference", "reward_fn_workers reward_fn_timeout_s reward_fn_fallback")
    | {"reward_model"}
)

_TOP_K = (
    _TRAINER
    | _ARCHITECTURE
    | _PARALLEL
    | _MODEL
    | _CHECKPOINT
    | set("top_k output_path start_from_idx end_at_idx".split())
    | dotted("data", f"{_CHAT_KEYS} one_turn_per_sample allow_empty_prompt")
    | dotted(
        "data.data",
        """file_path max_seq_length label_key add_eos add_sep add_bos truncation_field
        truncation_method prompt_template pad_to_max_length columns index_mapping_dir""",
    )
)

_TEACHER = (
    _TRAINER
    | _ARCHITECTURE
    | _PARALLEL
    | (_MODEL - {"model.global_batch_size"})
    | _CHECKPOINT
    | _ENDPOINT
    | {"inference.top_k"}
)

LIVE = {
    "gpt_ppo_actor": _COMMON | _CHECKPOINT | _DATA | _PEFT | _GENERATES | _ACTOR,
    # A critic serves until it is stopped: it has neither a time limit nor an end of training.
    "gpt_ppo_critic": (_COMMON | _CHECKPOINT | _PEFT | _REWARD_MODEL | _CRITIC)
    - {
        "trainer.max_time",
        "exp_manager.max_time_per_run",
        "exp_manager.checkpoint_callback_params.save_nemo_on_train_end",
    },
    "gpt_rs_actor": _COMMON | _CHECKPOINT | _DATA | _PEFT | _GENERATES | _RS,
    "gpt_reinforce_actor": _COMMON | _CHECKPOINT | _DATA | _PEFT | _GENERATES | _REINFORCE,
    "training_rm": _COMMON
    | _CHECKPOINT
    | (_DATA - {"model.data.allow_empty_prompt"})
    | _PEFT
    | _REWARD_MODEL
    | _RM
    | {"model.loss_func"},
    "inference_rm": _TRAINER
    | _ARCHITECTURE
    | _PARALLEL
    | (_MODEL - {"model.global_batch_size"})
    | _REWARD_MODEL
    | _REWARD_SERVER,
    "gpt_sft": _COMMON | _PEFT | _GENERATES | _SFT,
    "gpt_dpo": _COMMON | _CHECKPOINT | _DATA | _PEFT | _DPO,
    "gpt_knowledge_distillation": _COMMON
    | _CHECKPOINT
    | _DATA
    | _PEFT
    | _GENERATES
    | _DISTILLATION,
    "gpt_kto": _COMMON | _CHECKPOINT | _DATA | _PEFT | _KTO,
    "gpt_spin": _COMMON | _CHECKPOINT | _PEFT | _GENERATES | _SPIN,
    "generate": _GENERATE,
    "evaluate": _GENERATE | _EVALUATE,
    "compute_topk_logits": _TOP_K,
    "inference_teacher": _TEACHER,
}

FREE = (
    "model.data.data_prefix",
    "model.data.columns",
    "model.data.chat_template_kwargs",
    "data.chat_template_kwargs",
    "model.data.n_chunks",
    "data.data.columns",
    *(f"model.data.{split}.columns" for split in ("train_ds", "validation_ds", "test_ds")),
    "model.overwrite_base_config",
    "model.tokenizer.special_tokens",
    "model.mcore_customization_config",
    "model.optim.mcore_customization_config",
    "model.hugging_face",
    "model.ppo.generation.reshard",
    "model.rs.generation.reshard",
    "model.reinforce.generation.reshard",
    "model.spin.generation.reshard",
    "model.spin.ref_policy_kl_penalty",
    "exp_manager.summary_writer_kwargs",
    "exp_manager.wandb_logger_kwargs",
    "exp_manager.mlflow_logger_kwargs",
    "exp_manager.dllogger_logger_kwargs",
    "exp_manager.clearml_logger_kwargs",
    "exp_manager.neptune_logger_kwargs",
    "remote_rm.reward_models",
    "remote_critic_rm.reward_models",
    "reward_model",
)

# Keys that say how the weights look. Null means "as in the checkpoint" (`defaults.drop_unset`).
ARCHITECTURE_KEYS = tuple(sorted(key.removeprefix("model.") for key in _ARCHITECTURE)) + (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "reward_model_type",
    "use_avg_pool",
    "pad_token_id",
    "regression.num_attributes",
    "regression.attribute_weights",
)

# --- kinds of values ---

# Keys of ours and of a checkpoint that hold True or False. Where they are live, nothing else is
# accepted: Hydra reads `off`, `no` and `None` as texts, which Python takes for true.
FLAGS = (
    dotted("trainer", "logger enable_checkpointing use_distributed_sampler")
    | dotted(
        "trainer.ppo",
        """run_init_validation use_absolute_kl normalize_advantages whiten_rewards
        adaptive_kl.enable batch_iterator.use_flask trt_llm.enable trt_llm.reshard
        combine_rm_and_critic_server require_lease""",
    )
    | dotted(
        "trainer.reinforce",
        """run_init_validation use_absolute_kl batch_iterator.use_flask trt_llm.enable
        trt_llm.reshard""",
    )
    | dotted("trainer", "rs.run_init_validation rm.train_random_sampler rm.val_random_sampler")
    | {"remote_critic_rm.combine_rm_and_critic_server"}
    | dotted("sampling_params", "use_greedy add_BOS")
    | dotted(
        "data",
        """chat one_turn_per_sample allow_empty_prompt data.add_eos data.add_sep data.add_bos
        data.pad_to_max_length""",
    )
    | dotted(
        "exp_manager",
        """use_datetime_version resume_if_exists resume_past_end resume_ignore_no_checkpoint
        create_tensorboard_logger create_wandb_logger create_mlflow_logger create_dllogger_logger
        create_clearml_logger create_neptune_logger create_checkpoint_callback
        checkpoint_callback_params.always_save_nemo checkpoint_callback_params.async_save
        checkpoint_callback_params.save_nemo_on_train_end""",
    )
    | dotted(
        "model",
        """layernorm_zero_centered_gamma qk_layernorm rotary_interleaved scale_positional_embedding
        yarn_correction_range_round_to_int
        apply_embedding_scaling openai_gelu bias_activation_fusion use_scaled_init_method bias
        add_qkv_bias qkv_bias share_embeddings_and_output_weights moe_router_pre_softmax
        moe_shared_expert_gate tokenizer.use_fast tokenizer.sentencepiece_legacy
        tokenizer.trust_remote_code sequence_parallel megatron_amp_O2 use_cpu_initialization
        persist_layer_norm masked_softmax_fusion bias_dropout_add_fusion apply_rope_fusion
        gradient_accumulation_fusion optim.overlap_grad_sync output_sequence use_avg_pool
        reward_standardization.enable regression.merge_attributes regression.load_rm_head_weights
        optim.sched.cycle
        offload_adam_states answer_only_loss peft.lora_tuning.weight_tying
        peft.merge_for_generation ppo.offload_adam_states
        dpo.preference_average_log_probs dpo.sft_average_log_probs
        knowledge_distillation.cross_tokenizer
        knowledge_distillation.on_policy.sampling_params.use_greedy
        kto.preference_average_log_probs kto.sft_average_log_probs
        ppo.train_on_truncated ppo.sampling_params.use_greedy ppo.trt_llm.enable
        ppo.trt_llm.reshard rs.offload_adam_states rs.sampling_params.use_greedy
        reinforce.offload_adam_states reinforce.sampling_params.use_greedy
        reinforce.trt_llm.enable reinforce.trt_llm.reshard spin.preference_average_log_probs
        spin.offload_adam_states spin.sampling_params.use_greedy""",
    )
    | dotted(
        "model.data",
        """validation_drop_last apply_ftfy add_bos append_eod chat one_turn_per_sample
        allow_empty_prompt""",
    )
    | {
        f"model.data.{split}.{key}"
        for split in ("train_ds", "validation_ds", "test_ds")
        for key in (
            "shuffle drop_last add_eos add_sep add_bos pad_to_max_length packed_sequence".split()
        )
    }
)

# Flags for which null has a meaning of its own (conf/model_fallbacks.yaml).
_BOS = {"model.data.add_bos", "sampling_params.add_BOS", "data.data.add_bos"} | {
    f"model.data.{split}.add_bos" for split in ("train_ds", "validation_ds", "test_ds")
}
NULLABLE_FLAGS = {"model.use_cpu_initialization"} | _BOS

# Keys that must not be null: null would not mean "off" or "as in the checkpoint" there. Flags need
# no line here.
_REQUIRED_DEVICES = dotted("trainer", "num_nodes devices accelerator")
_REQUIRED_TRAINING = _REQUIRED_DEVICES | dotted(
    "model",
    """micro_batch_size global_batch_size encoder_seq_length seed optim.name optim.lr
    optim.weight_decay optim.betas optim.eps""",
)
_REQUIRED_LINES = _REQUIRED_TRAINING | dotted("model.data", "num_workers seq_length")
_REQUIRED_STEPS = "max_steps val_check_interval save_interval"
_REQUIRED_SAMPLING = f"{_SAMPLED} length_params.min_length"
_REQUIRED_POLICY = f"""rollout_micro_batch_size num_rollout_samples
    forward_micro_batch_size val_rollout_micro_batch_size num_val_samples loss_reduction
    {_REQUIRED_SAMPLING} length_params.max_length generation.reshard environment.max_turns
    environment.workers environment.timeout_s"""
_REQUIRED_GENERATE = _REQUIRED_DEVICES | set(
    f"responses_per_prompt micro_batch_size model.seed {_REQUIRED_SAMPLING}".split()
)
_REQUIRED_REWARD_FN = "reward_fn_workers reward_fn_timeout_s rewards_per"
_REQUIRED_LOOP = f"max_epochs {_REQUIRED_STEPS} model_gbs {_REQUIRED_REWARD_FN}"
REQUIRED = {
    "gpt_ppo_actor": _REQUIRED_LINES
    | dotted(
        "trainer.ppo",
        f"""{_REQUIRED_LOOP} ppo_epochs advantage_estimator discount_factor gae_lambda
        initial_policy_kl_penalty overlong_buffer_len overlong_penalty_factor
        critic_warmup_steps""",
    )
    | dotted(
        "model.ppo",
        f"""{_REQUIRED_POLICY} num_rollouts_per_prompt kl_loss_coef kl_loss_estimator ratio_eps
        entropy_bonus rollout_logprobs""",
    ),
    "gpt_ppo_critic": _REQUIRED_TRAINING
    | dotted(
        "trainer.ppo",
        "host port max_steps max_queue_delay_microseconds inference_micro_batch_size",
    ),
    "gpt_rs_actor": _REQUIRED_LINES
    | dotted("trainer.rs", _REQUIRED_LOOP)
    | dotted("model.rs", f"{_REQUIRED_POLICY} num_rollouts_per_prompt top_n_rollouts"),
    "gpt_reinforce_actor": _REQUIRED_LINES
    | dotted(
        "trainer.reinforce", f"{_REQUIRED_LOOP} initial_policy_kl_penalty num_rollouts_per_prompt"
    )
    | dotted("model.reinforce", _REQUIRED_POLICY),
    "training_rm": _REQUIRED_LINES | dotted("trainer.rm", _REQUIRED_STEPS),
    "inference_rm": _REQUIRED_DEVICES
    | dotted(
        "inference",
        f"""host port model_name max_queue_delay_microseconds inference_micro_batch_size
        {_REQUIRED_REWARD_FN}""",
    ),
    "gpt_sft": _REQUIRED_TRAINING
    | dotted("trainer.sft", _REQUIRED_STEPS)
    | dotted(
        "model", "data.num_workers data.train_ds.max_seq_length data.validation_ds.max_seq_length"
    )
    | dotted("model.steerlm2", "micro_batch_size forward_micro_batch_size")
    | dotted("model.data.validation_ds", "micro_batch_size global_batch_size"),
    "gpt_dpo": _REQUIRED_LINES
    | dotted("trainer.dpo", _REQUIRED_STEPS)
    | dotted(
        "model.dpo",
        """preference_loss ref_policy_kl_penalty label_smoothing gt_reward_scale
        preference_loss_weight sft_loss_weight log_prob_forward_micro_batch_size""",
    ),
    "gpt_knowledge_distillation": _REQUIRED_LINES
    | dotted("trainer.knowledge_distillation", _REQUIRED_STEPS)
    | {"model.loss_reduction"}
    | dotted(
        "model.knowledge_distillation",
        """target_logits_scale logits_scale kd_loss_weight sft_loss_weight kd_loss jsd_beta
        outside_top_k""",
    )
    | dotted(
        "model.knowledge_distillation.on_policy", f"{_REQUIRED_SAMPLING} length_params.max_length"
    )
    | dotted("remote_teacher", "init_timeout_s inference_timeout_s name host port"),
    "gpt_kto": _REQUIRED_LINES
    | dotted("trainer.kto", _REQUIRED_STEPS)
    | dotted(
        "model.kto",
        """ref_policy_kl_penalty desirable_loss_weight undesirable_loss_weight
        preference_loss_weight sft_loss_weight log_prob_forward_micro_batch_size""",
    ),
    "gpt_spin": _REQUIRED_TRAINING
    | dotted(
        "trainer.spin", "max_iterations max_epochs max_steps val_check_interval save_interval"
    )
    | dotted(
        "model",
        """data.num_workers data.train_ds.max_seq_length data.validation_ds.max_seq_length
        data.validation_ds.micro_batch_size data.validation_ds.global_batch_size""",
    )
    | dotted(
        "model.spin",
        f"""ref_policy_kl_penalty log_prob_forward_micro_batch_size rollout_micro_batch_size
        {_REQUIRED_SAMPLING} length_params.max_length generation.reshard""",
    ),
    "generate": _REQUIRED_GENERATE,
    "evaluate": _REQUIRED_GENERATE
    | dotted("bootstrap", "resamples confidence seed")
    | dotted("inference", "reward_fn_workers reward_fn_timeout_s"),
    "compute_topk_logits": _REQUIRED_DEVICES
    | dotted("model", "micro_batch_size global_batch_size seed")
    | {"top_k", "output_path"},
    "inference_teacher": _REQUIRED_DEVICES
    | dotted("model", "micro_batch_size seed")
    | dotted(
        "inference",
        """host port model_name max_queue_delay_microseconds inference_micro_batch_size top_k""",
    ),
}
