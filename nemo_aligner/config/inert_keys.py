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
from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml
from omegaconf import DictConfig, OmegaConf

from nemo_aligner.config.fields import Configuration, tree_of
from nemo_aligner.config.jobs import JOBS
from nemo_aligner.config.parallel_rules import RECOMPUTE
from nemo_aligner.config.schema import CONFIG_NAMES, LIVE
from nemo_aligner.config.values import Values, entries
from nemo_aligner.core.errors import ConfigError


class Inert(NamedTuple):
    reason: str  # why, for the warning
    neutral: tuple = ()  # values that need no warning; `(...,)` means every value

    def is_neutral(self, value: object) -> bool:
        return ... in self.neutral or any(
            value == n and type(value) is type(n) for n in self.neutral
        )


_SPLITS = ("train_ds", "validation_ds", "test_ds")


@functools.cache
def _neutral(values: str) -> tuple:
    return tuple(
        ... if each == "*" else each and yaml.safe_load(each) for each in values.split("|")
    )


def _read(text: str, job: Configuration | None = None) -> dict[str, Inert]:
    """Dotted key -> `Inert` of a table. An entry, whose further lines are indented, is `reason |
    section: key key=value|value ...`, with the neutral values as YAML and `*` for all of them; or
    it begins with the jobs that it is for, `jobs | reason | ...`.
    """
    remote = "remote_critic_rm" if job and job.name == "gpt_ppo_actor" else "remote_rm"
    text = text.replace("<algo>", str(job and job.algo)).replace("<remote>", remote)
    found: dict[str, Inert] = {}
    for *jobs, reason, words in entries(text):
        if jobs and job and job.name not in jobs[0].split():
            continue
        sections = [""]
        for word in words.split():
            name, sign, values = word.partition("=")
            if name.endswith(":"):
                name = name.replace(":", ".")
                sections = list(dict.fromkeys(name.replace("<split>", s) for s in _SPLITS))
            else:
                inert = Inert(reason, _neutral(values) if sign else ())
                found |= {section + name: inert for section in sections}
    return found


_PARAMS = "exp_manager.checkpoint_callback_params:"
_LIGHTNING = (
    "Lightning only launches the job: the loops are this project's own; see trainer.<algorithm>"
)
_APEX = "apex's own optimizer and kernels are not used; Megatron Core's are"
_NEMO = "a key of NeMo's model that Megatron Core has no use for here"
_DATASET = "the data sets read the files directly, and recognize their form"
_DEAD = "an old flag of NeMo-Aligner's scripts that had no effect there either"
_IN_ORDER = "examples keep their order"

# Keys of the network; their other values are worth a warning even in a checkpoint.
INERT_ARCHITECTURE = _read("""
every model here is a Megatron Core model | model: mcore_gpt=True
it is for fp16 only; NeMo switched it off in other precisions too | model:
    apply_query_key_layer_scaling=False
the softmax of the attention is computed in float32 in any case | model:
    attention_softmax_in_fp32=*
Megatron Core has no such dropout; NeMo ignored it too | model: ffn_dropout=0|0.0
it is for the export of a model; NeMo ignored it too | model: onnx_safe=False
the pipeline stage decides it | model: pre_process=True post_process=True
""")

# `exp_manager` does not get to see them: its callbacks are for Lightning's loops.
INERT_EXPERIMENT = _read(f"""
{_LIGHTNING} | exp_manager: create_early_stopping_callback early_stopping_callback_params
    create_ipl_epoch_stopper_callback ipl_epoch_stopper_callback_params create_preemption_callback
    log_step_timing log_delta_step_timing step_timing_kwargs disable_validation_on_resume ema
    create_straggler_detection_callback straggler_detection_params create_fault_tolerance_callback
    fault_tolerance log_tflops_per_sec_per_gpu
""")

_FLASK = "there is no Flask server: the shared work queue is a counter in the job's own store"
_ACTORS = "gpt_ppo_actor gpt_rs_actor gpt_reinforce_actor"

# The other keys, of all jobs and of single ones; `<algo>` is a job's own section below `trainer`,
# `<remote>` the section of an actor's servers. What is derived from other keys needs no warning.
_TABLE = f"""
{_LIGHTNING} | trainer: replace_sampler_ddp strategy callbacks fast_dev_run min_epochs min_steps
    limit_train_batches limit_val_batches limit_test_batches limit_predict_batches overfit_batches
    val_check_interval check_val_every_n_epoch num_sanity_val_steps log_every_n_steps
    enable_progress_bar enable_model_summary accumulate_grad_batches gradient_clip_algorithm
    deterministic benchmark inference_mode profiler detect_anomaly barebones plugins sync_batchnorm
    reload_dataloaders_every_n_epochs default_root_dir {_PARAMS} dirpath verbose save_last prefix
    postfix save_best_model filepath save_weights_only auto_insert_metric_name every_n_epochs
    every_n_train_steps train_time_interval save_on_train_epoch_end save_last_n_optim_states
trainer.<algorithm>.gradient_clip_val counts | trainer: gradient_clip_val=*
a checkpoint is one folder for all ranks | {_PARAMS} model_parallel_size=*
LoRA is the only method here; the settings of others are not used | model.peft: adapter_tuning=*
    p_tuning=* ia3_tuning=* selective_tuning=*
the layers depend on what is installed (Transformer Engine on a GPU, else local ones) | model:
    ub_tp_comm_overlap=False ub_tp_comm_overlap_cfg=False ub_tp_comm_overlap_disable_qkv=False
    transformer_engine use_flash_attention fp8_e4m3 fp8_hybrid fp8_margin fp8_interval
    fp8_amax_history_len fp8_amax_compute_algo fp8_params reduce_amax use_emha te_rng_tracker
    use_te_rng_tracker inference_rng_tracker attention_backend cp_comm_type tp_only_amax_red
    skip_fp8_attention_checkpoint_load ub_tp_comm_bootstrap_backend
{_APEX} | model: apex_transformer_log_level apex_transformer_log_level_o2 gradient_as_bucket_view
    grad_allreduce_chunk_size_mb grad_div_ar_fusion bias_dropout_fusion cross_entropy_loss_fusion
    get_attention_mask_from_fusion batch_p2p_comm overlap_p2p_comm deallocate_pipeline_outputs
    native_amp_init_scale native_amp_growth_interval hysteresis fp16_lm_cross_entropy
    async_grad_allreduce sync_batch_comm no_async_tensor_model_parallel_allreduce
    num_micro_batches_with_partial_activation_checkpoints
    activations_checkpoint_layers_per_pipeline sharp use_tp_pp_dp_mapping cpu_offloading
    cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights
    defer_embedding_wgrad_compute wgrad_deferral_limit distributed_adam_bucket_merge_size
    with_fp32_embedding_grads enable_cuda_graph megatron_legacy batch_p2p_sync variable_seq_lengths
    memory_efficient_layer_norm moe_permute_fusion moe_layer_recompute distribute_saved_activations
    model.optim: contiguous_grad_buffer=True overlap_param_sync=False contiguous_param_buffer
    grad_sync_on_finish average_in_collective grad_sync_dtype store_params store_param_remainders
    with_scaled_states param_sync_dtype dtype process_group capturable master_weights foreach fused
    amsgrad d_coef delay_param_gather delay_grad_reduce align_param_gather align_grad_reduce
    ddp_bucket_size
{_NEMO} | model: nsys_profile memory_profile gc_interval rampup_batch_size resume_from_checkpoint
    resume_from_path save_nemo_on_validation_end enable_nge tokens_to_generate inference
    init_method hidden_steps num_trainable_params log_token_counts dist_ckpt_format
    dist_ckpt_load_strictness dist_ckpt_torch_dist_multiproc dist_ckpt_assume_constant_structure
    dist_ckpt_parallel_save dist_ckpt_parallel_save_within_dp dist_ckpt_parallel_load
    dist_ckpt_parallel_dist_opt tp_comm_bootstrap_backend nccl_communicator_config_path
    distributed_timeout_minutes steerlm steerable_attributes chunk_size fsdp fsdp_sharding_strategy
    fsdp_grad_reduce_dtype fsdp_sharded_checkpoint fsdp_use_orig_params share_embeddings
    data_prefix chat_template use_loss_mask dist_ckpt_load_on_device drop_last
    enable_megatron_timers megatron_timer_kwargs pipeline_model_parallel_split_rank reset_lr
    reset_lr_steps restore_from_ckpt sep_id skip_train tensor_model_parallel_world_size
    validation_param_sync_overlap calculate_per_token_loss perform_initialization test_mode
    deterministic_mode model.optim.sched: max_steps last_epoch monitor reduce_on_plateau
use num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage | model:
    account_for_embedding_in_pipeline_split=False account_for_loss_in_pipeline_split=False
only SFT packs samples: model.data.train_ds.packed_sequence, which resets both | model.data:
    reset_position_ids=False reset_attention_mask=False eod_mask_loss=False
{_DATASET} | model.data: skip_warmup=True dataloader_type=single no_seqlen_plus_one_input_tokens
    pad_samples_to_global_batch_size shuffle_documents exchange_indices_distributed mock_dataset
    legacy_dataset validation_drop_last_batch pin_memory delay_data_init delay_data_mmap
    data_cache_generation_only num_dataset_builder_threads ceil_to_power_2
    get_attention_mask_from_fusion
gpt_ppo_actor gpt_reinforce_actor | TensorRT-LLM is gone; the built-in engine generates |
    trainer.<algo>.trt_llm: model_type=llama|gptj|gptnext|gemma|falcon unload_engine_train=False
    max_input_len=* seed=* max_input_tokens generation_batch_size engine_path model.<algo>.trt_llm:
    model_type=* unload_engine_train=* max_input_len=* seed=* max_input_tokens=*
    generation_batch_size=* engine_path=*
gpt_ppo_actor | TensorRT-LLM is gone; the built-in engine generates | trainer.ppo:
    trt_model_dir=/tmp/trt_llm_model trainer: trt_llm model.ppo: trt_model_dir
gpt_ppo_actor gpt_ppo_critic gpt_reinforce_actor | {_FLASK} | trainer.<algo>: flask_server
gpt_ppo_actor gpt_reinforce_actor | {_FLASK} | trainer.<algo>.batch_iterator: port=5557
gpt_ppo_actor | {_FLASK} | trainer: flask_server
{_ACTORS} | the data set tokenizes prompts; use model.data.add_bos | model.<algo>.sampling_params:
    add_BOS=False
gpt_spin | the data set tokenizes prompts; use model.data.train_ds.add_bos |
    model.spin.sampling_params: add_BOS=False
{_ACTORS} gpt_spin | log-probabilities come from their own pass | model.<algo>.sampling_params:
    all_probs=False compute_logprob=False
{_ACTORS} | {_DEAD}; use model.<algo>.forward_micro_batch_size | model: forward_mbs
{_ACTORS} | {_DEAD}; use model.<algo>.offload_adam_states | model: offload_adam_states
{_ACTORS} | {_DEAD}; use <remote>.pad_to_length | <remote>: pad_sequence_length_to_multiple
{_ACTORS} | {_DEAD} | model.<algo>: share_dir
gpt_ppo_actor | {_DEAD} | trainer.ppo: wandb_table
gpt_ppo_actor | {_DEAD}; use model.ppo.forward_micro_batch_size | model.ppo: forward_mbs
gpt_rs_actor gpt_reinforce_actor | {_DEAD} | model.<algo>: forward_mbs
gpt_ppo_actor | it belongs to remote_critic_rm | trainer.ppo: combine_rm_and_critic_server
gpt_ppo_actor | {_DEAD}; it belongs to remote_critic_rm | model.ppo: combine_rm_and_critic_server
gpt_ppo_critic training_rm | {_DEAD}; use model.forward_micro_batch_size | model: forward_mbs
gpt_ppo_critic | {_DEAD}; use strip_sequence_length_to_multiple | trainer.ppo:
    pad_sequence_length_to_multiple
gpt_ppo_critic | the critic serves until it is stopped | exp_manager: max_time_per_run trainer:
    max_time
gpt_ppo_critic | the critic serves until it is stopped; use always_save_nemo | {_PARAMS}
    save_nemo_on_train_end=False
gpt_ppo_critic | the actor decides when to save and to stop | trainer.ppo: max_epochs
    val_check_interval save_interval
gpt_ppo_critic | the critic has no data of its own; batch sizes are those of the actor's requests |
    model: ppo data
gpt_reinforce_actor | its loss has no such term | model.reinforce: entropy_bonus=* ratio_eps=*
inference_rm inference_teacher | a server trains nothing | model: global_batch_size=* optim=*
    data=*
inference_rm | a reward server writes no files | exp_manager: explicit_log_dir exp_dir name
inference_rm | use rm_model_file | pretrained_checkpoint: restore_from_path
gpt_dpo gpt_kto gpt_spin | {_DEAD}; model.precision counts | precision=*
gpt_dpo | micro-batches are padded as sequence and context parallelism need it | model.data:
    pad_length_to_multiple_of=*
gpt_dpo | NeMo-Aligner 0.7 does not read it either; use model.dpo.preference_average_log_probs |
    model.dpo: average_log_probs=False
gpt_knowledge_distillation | the files say how many they hold | model.data: n_examples_per_chunk=*
gpt_knowledge_distillation gpt_sft | checkpoints are ranked by monitor, mode and save_top_k; the
    best are never copied | {_PARAMS} save_best_model=False
gpt_spin gpt_sft | an epoch is one pass over the data; for more steps raise
    trainer.<algo>.max_epochs | model.data: sample=False
gpt_spin gpt_sft | {_DATASET} | model.data.<split>: min_seq_length=1 output_original_text=True
    write_predictions_to_file=False memmap_workers file_names concat_sampling_probabilities
    num_workers pin_memory names metric output_file_path_prefix packed_sequence_return_cu_seqlen
    tokens_to_generate virtual_tokens hf_dataset=False
gpt_spin | {_DATASET} | model.data.<split>: hf_dataset=False|True
gpt_sft | training generates no responses; GPTSFTModel.infer, called from Python, reads it | model:
    inference
gpt_sft | NeMo-Aligner's SFT never read it; use exp_manager.resume_from_checkpoint | model:
    resume_from_checkpoint
gpt_sft | NeMo-Aligner's SFT never read it; use
    exp_manager.checkpoint_callback_params.always_save_nemo | model:
    save_nemo_on_validation_end=False
gpt_sft compute_topk_logits | {_APEX} | model: sync_batch_comm=False gradient_as_bucket_view=False
gpt_sft | {_NEMO} | model: ffn_dropout=0.0
compute_topk_logits | nothing reads it | name=*
compute_topk_logits | use pretrained_checkpoint.restore_from_path | model: restore_from_path=???
compute_topk_logits | {_DEAD}: the responses count alone | model: answer_only_loss=False
compute_topk_logits | {_IN_ORDER} | data: sample=* num_workers=* dataloader_type=*
compute_topk_logits | {_IN_ORDER}, and the data sets recognize the form of the files | data.data:
    shuffle=* memmap_workers=* min_seq_length=* drop_last=* hf_dataset=*
"""


def _table(job: Configuration) -> dict[str, Inert]:
    if job.name in ("generate", "evaluate"):  # NeMo-Aligner has no such command
        return {}
    table = INERT_EXPERIMENT | INERT_ARCHITECTURE
    if "model.data.data_prefix" in job.keys:
        reason = "name the files under model.data.data_prefix"
        table |= {f"model.data.{split}": Inert(reason) for split in _SPLITS}
    if job.name in CONFIG_NAMES:  # top-level leftovers of NeMo's launchers
        names = {"restore_from_path", "cluster_type", "run", "mode", "inference", "name"}
        for name in names - {key.split(".")[0] for key in job.keys}:
            table[name] = Inert(_NEMO, ("megatron_gpt",) if name == "name" else ())
    return table | _read(_TABLE, job)


INERT = {job.name: _table(job) for job in JOBS.values()}

# --- values that would change the mathematics if they were ignored ---

# key -> (accepted values, what to do instead). None (not set) is always accepted.
_ONLY = _read("""
its layers differ from a GPT's, and cannot be built here | model:
    name=|te_gpt|megatron_gpt_full_te_layer_autocast|modelopt|megatron_gpt
Hyena layers cannot be built here | model: hyena
norms stand where model.norm_position says, and not behind the sum of hidden states and branch |
    model: transformer_block_type=pre_ln apply_residual_connection_post_layernorm=False
Megatron Core has biases in all linear layers of a layer (model.bias), or in queries, keys and
    values alone (model.qkv_bias) | model: attention_bias=False mlp_bias=False
Megatron Core's output layer has no bias | model: lm_head_bias=False
use model.query_pre_attn_scalar, which is 1 / softmax_scale**2 | model: softmax_scale
use model.rotary_base_local | model: rope_local_base_freq
only self-attention with a causal mask exists here | model: attention_type=multihead
fp8 is not supported: train in bf16 | model: fp8=False
hidden states have the precision of the model; set it to False | model:
    fp32_residual_connection=False
such a model cannot be built on Megatron Core | model: headscale=False
attention scores are always scaled by 1/sqrt(head size) | model: normalize_attention_scores=True
only Llama 3's value is supported; set it to null | model: low_freq_factor=1 high_freq_factor=4
    old_context_len=8192
every layer is computed; set it to null | model: drop_layers=[]
norms and biases have no weight decay; set it to False | model: do_layer_norm_weight_decay=False
the experts are computed one after the other; set it to False | model: moe_grouped_gemm=False
no token is ever dropped; set it to False | model: moe_token_dropping=False
the router computes without noise; set it to null | model: moe_input_jitter_eps=0
""")
ONLY = {key: (only.neutral, only.reason) for key, only in _ONLY.items()}


@functools.cache
def known_model_keys() -> frozenset[str]:
    """First names of all keys below `model.` that act, have no effect, or are refused."""
    keys = {key for table in (*LIVE.values(), *INERT.values(), ONLY) for key in table}
    return frozenset(key.split(".")[1] for key in keys if key.startswith("model."))


def has_no_effect(name: str) -> bool:
    """Whether `model.<name>` is a key without effect, in any job."""
    return any(f"model.{name}" in table for table in INERT.values())


def refuse_values(
    values: Values, table: Mapping[str, tuple] = ONLY, what: str = "supported here"
) -> None:
    for key, (accepted, remedy) in table.items():
        if values.has(key) and values.get(key) not in accepted:
            raise ConfigError(f"{key}={values.get(key)!r} is not {what}: {remedy}.")


def check_later(values: Values, config_name: str) -> None:
    own = {key: only for (job, key), only in LATER.items() if job == config_name}
    refuse_values(values, own, "supported yet")


def notes_on(given: Mapping[str, Any], table: Mapping[str, Inert]) -> list[str]:
    """One line for each key of `table` whose value among the `given` ones asks for something."""
    return [
        f"{key}={value}: {table[key].reason}"
        for key, value in given.items()
        if key in table and value is not None and not table[key].is_neutral(value)
    ]


def check_model_keys(cfg: DictConfig | Mapping[str, Any]) -> list[str]:
    """Check the keys of the `model` section that a model is built from, with what the checkpoint
    says; returns notes worth a warning: keys without effect, and unknown ones. References in other
    keys are not resolved. `ConfigError`: a value that would change the model and is not supported.
    """
    read = {key.split(".")[1] for key in (*ONLY, *INERT_ARCHITECTURE)}
    section = {f"model.{name}": to_plain(cfg[name]) for name in cfg if name in read}
    refuse_values(Values(tree_of(section)))
    notes = notes_on(section, INERT_ARCHITECTURE)
    unknown = sorted(f"model.{name}" for name in cfg if name not in known_model_keys())
    return [*notes, f"{', '.join(unknown)}: unknown here"] if unknown else notes


def to_plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


_TRT_LLM = (
    "TensorRT-LLM is gone; the built-in engine serves instead. trt_llm.reshard=True acts as model."
)
TRAINING_JOBS = tuple(name for name in CONFIG_NAMES if name != "inference_rm")


class OldForm(NamedTuple):
    form: str  # as a command or a YAML file writes it
    happens: str  # what becomes of it, and what to write instead
    conditions: str  # of `Values.holds`, on a job without its checkpoint's values
    jobs: tuple[str, ...]  # whose form it is


# `form | happens | conditions`, and the jobs if it is not of all that train; `<own>` is a job's
# own section below `trainer`.
OLD_FORMS = [
    OldForm(form, happens, conditions, tuple(" ".join(jobs).split()) or TRAINING_JOBS)
    for form, happens, conditions, *jobs in entries(f"""
{RECOMPUTE}granularity=selective with {RECOMPUTE}method=uniform | {RECOMPUTE}method has no effect,
    here and in NeMo-Aligner: selective recomputes the attention of every layer; set it to null |
    {RECOMPUTE}granularity=selective & {RECOMPUTE}method!=null | {" ".join(CONFIG_NAMES)}
{RECOMPUTE}granularity=null with {RECOMPUTE}method or {RECOMPUTE}num_layers | nothing is
    recomputed, here and in NeMo-Aligner; for less memory set {RECOMPUTE}granularity=full |
    ~{RECOMPUTE}granularity & {RECOMPUTE}method!=null or {RECOMPUTE}num_layers!=null |
    {" ".join(CONFIG_NAMES)}
trainer.gradient_clip_val other than trainer.<algorithm>.gradient_clip_val | the latter counts;
    NeMo-Aligner's mcore_distributed_optim read the former | trainer.gradient_clip_val!=-1 &
    trainer.gradient_clip_val<trainer.<own>.gradient_clip_val or
    trainer.gradient_clip_val>trainer.<own>.gradient_clip_val or
    trainer.<own>.gradient_clip_val=null
trainer.max_steps other than trainer.<algorithm>.max_steps | the latter counts |
    trainer.max_steps!=-1 & trainer.max_steps<trainer.<own>.max_steps or
    trainer.max_steps>trainer.<own>.max_steps
exp_manager=null | the job writes no logs, no metrics and no checkpoints, and resumes from none |
    exp_manager=null
model.optim without lr | the learning rate is PyTorch's default; set model.optim.lr |
    model.optim!=null & model.optim.lr=null
trainer.ppo.trt_llm.enable=True | {_TRT_LLM}ppo.generation.reshard=auto |
    trainer.ppo.trt_llm.enable | gpt_ppo_actor
trainer.reinforce.trt_llm.enable=True | {_TRT_LLM}reinforce.generation.reshard=auto |
    trainer.reinforce.trt_llm.enable | gpt_reinforce_actor
model.answer_only_loss=False | the loss counts the prompts too. NeMo-Aligner never read this key
    (False in its gpt_sft.yaml) and trained on the responses only: set it to True for that |
    model.answer_only_loss=false | gpt_sft
inference.micro_batch_size | the name of inference.inference_micro_batch_size until NeMo-Aligner
    0.3; it counts where the latter is not given | inference.micro_batch_size!=null &
    inference.micro_batch_size<model.forward_micro_batch_size or
    inference.micro_batch_size>model.forward_micro_batch_size | inference_rm
""")
]

# (config name, key) -> (accepted values, what to do instead). Only for the job that reads the key:
# a checkpoint may well hold it.
_LATER = """
gpt_sft gpt_spin | no separator is put between prompt and response; write it into prompt_template,
    and set it to False | model.data.<split>: add_sep=False
gpt_knowledge_distillation | logits of another vocabulary would be compared by their rank alone;
    distil from the teacher's texts (SFT), or from a teacher with the student's tokenizer, and set
    it to False | model.knowledge_distillation: cross_tokenizer=False
gpt_sft | metrics of generated responses are not computed yet; compute them from the .nemo with
    GPTSFTModel.infer and nemo_aligner.metrics.InferenceMetricsHandler, and remove the key |
    trainer.sft: inference_metrics
"""
LATER = {
    (name, key): (later.neutral, later.reason)
    for name, job in JOBS.items()
    for key, later in _read(_LATER, job).items()
}


def old_form_notes(values: Values, config_name: str) -> list[str]:
    """One line for each of `OLD_FORMS` that a job's configuration holds."""
    own = str(JOBS[config_name].algo)
    return [
        f"{old.form}: {old.happens}"
        for old in OLD_FORMS
        if config_name in old.jobs and values.holds(old.conditions.replace("<own>", own))
    ]
