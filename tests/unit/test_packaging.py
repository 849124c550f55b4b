# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What ships around the code: YAML files, the keys that users know, dependencies, links and
headers.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from nemo_aligner.config.checks import check_keys
from nemo_aligner.config.schema import CONFIG_NAMES
from tests.patience import patience

ROOT = Path(__file__).parents[2]

# The keys that scripts written for NeMo-Aligner use, by hand from its configuration trees.
TRAINER = """num_nodes devices accelerator precision logger enable_checkpointing
use_distributed_sampler max_epochs max_steps"""
EXP = """explicit_log_dir exp_dir name create_wandb_logger wandb_logger_kwargs.project
wandb_logger_kwargs.name resume_if_exists resume_ignore_no_checkpoint
create_checkpoint_callback checkpoint_callback_params.monitor
checkpoint_callback_params.save_top_k checkpoint_callback_params.mode
checkpoint_callback_params.always_save_nemo checkpoint_callback_params.save_nemo_on_train_end
checkpoint_callback_params.filename checkpoint_callback_params.model_parallel_size"""
OPTIM = """name bucket_cap_mb overlap_grad_sync contiguous_grad_buffer lr weight_decay betas
sched.name sched.warmup_steps sched.constant_steps sched.min_lr"""
PEFT = """peft_scheme restore_from_path restore_from_ckpt.checkpoint_dir
restore_from_ckpt.checkpoint_name lora_tuning.target_modules lora_tuning.adapter_dim
lora_tuning.adapter_dropout lora_tuning.column_init_method lora_tuning.row_init_method
lora_tuning.layer_selection lora_tuning.weight_tying lora_tuning.position_embedding_strategy"""
DATA = """data_impl splits_string seq_length skip_warmup num_workers reset_position_ids
reset_attention_mask eod_mask_loss index_mapping_dir data_prefix"""
MODEL = """mcore_gpt micro_batch_size global_batch_size megatron_amp_O2 encoder_seq_length
max_position_embeddings seed precision"""
ACTOR_TRAINER = """critic_warmup_steps max_epochs max_steps val_check_interval save_interval
gradient_clip_val initial_policy_kl_penalty use_absolute_kl discount_factor gae_lambda
normalize_advantages rollout_batch_seq_length model_gbs model_mbs trt_model_dir trt_llm.enable
trt_llm.reshard trt_llm.max_input_len trt_llm.seed trt_llm.model_type
trt_llm.unload_engine_train batch_iterator.use_flask batch_iterator.port"""
REMOTE = """pad_to_length combine_rm_and_critic_server reward_model.name reward_model.ip
reward_model.port critic.name.train critic.name.infer critic.name.save critic.ip critic.port"""
ACTOR_MODEL = """rollout_micro_batch_size num_rollout_samples forward_micro_batch_size
val_rollout_micro_batch_size num_val_samples offload_adam_states entropy_bonus ratio_eps
sampling_params.use_greedy sampling_params.temperature sampling_params.top_k
sampling_params.top_p sampling_params.repetition_penalty sampling_params.add_BOS
sampling_params.all_probs sampling_params.compute_logprob sampling_params.end_strings
length_params.max_length length_params.min_length trt_llm"""
CRITIC_TRAINER = """port combine_rm_and_critic_server max_steps gradient_clip_val
max_queue_delay_microseconds strip_sequence_length_to_multiple inference_micro_batch_size"""
CRITIC_MODEL = """loss_clip_val offload_adam_states output_sequence
reward_standardization.enable reward_standardization.mean reward_standardization.std
forward_micro_batch_size use_avg_pool force_head_dtype reward_model_type
regression.num_attributes regression.merge_attributes regression.attribute_weights"""
RM_TRAINER = """max_epochs max_steps val_check_interval save_interval train_random_sampler
val_random_sampler limit_val_batches gradient_clip_val"""
RM_MODEL = """share_embeddings_and_output_weights reward_model_type regression.num_attributes
regression.merge_attributes regression.attribute_weights regression.loss_mask_val
regression.loss_func regression.load_rm_head_weights output_sequence use_avg_pool
force_head_dtype forward_micro_batch_size"""
DISTILLATION_MODEL = """target_logits_scale logits_scale kd_loss_weight sft_loss_weight kd_loss
cross_tokenizer"""
DPO_MODEL = """log_prob_forward_micro_batch_size ref_policy_kl_penalty
preference_average_log_probs sft_average_log_probs gt_reward_scale preference_loss
preference_loss_weight sft_loss_weight"""
KTO_MODEL = """log_prob_forward_micro_batch_size ref_policy_kl_penalty desirable_loss_weight
undesirable_loss_weight preference_average_log_probs sft_average_log_probs
preference_loss_weight sft_loss_weight"""
SPIN_MODEL = """ref_policy_kl_penalty log_prob_forward_micro_batch_size
rollout_micro_batch_size offload_adam_states length_params.max_length length_params.min_length
sampling_params.use_greedy sampling_params.temperature sampling_params.top_k
sampling_params.top_p sampling_params.repetition_penalty sampling_params.add_BOS
sampling_params.all_probs sampling_params.compute_logprob sampling_params.end_strings"""
SPIN_SET = """file_path shuffle memmap_workers max_seq_length min_seq_length drop_last label_key
add_eos add_sep add_bos truncation_field index_mapping_dir prompt_template hf_dataset
truncation_method"""
SFT_TRAINER = """max_epochs max_steps val_check_interval save_interval limit_train_batches
limit_val_batches gradient_clip_val"""
SFT_DATA = """chat chat_prompt_tokens.system_turn_start chat_prompt_tokens.turn_start
chat_prompt_tokens.label_start chat_prompt_tokens.end_of_turn chat_prompt_tokens.end_of_name
sample num_workers"""
SFT_SET = """file_path global_batch_size micro_batch_size shuffle max_seq_length label_key
add_eos prompt_template truncation_field truncation_method hf_dataset"""
ARCHITECTURE = """num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups
normalization activation position_embedding_type rotary_base rotary_percentage bias
share_embeddings_and_output_weights make_vocab_size_divisible_by layernorm_epsilon
init_method_std hidden_dropout attention_dropout tokenizer.library tokenizer.type
tokenizer.model tokenizer.vocab_file tokenizer.merge_file tensor_model_parallel_size
pipeline_model_parallel_size virtual_pipeline_model_parallel_size context_parallel_size"""
COMMON = {"trainer": TRAINER, "exp_manager": EXP, "model": MODEL, "model.optim": OPTIM}

RS_TRAINER = """max_epochs max_steps val_check_interval save_interval gradient_clip_val
model_gbs model_mbs rollout_batch_seq_length"""
RS_MODEL = " ".join(set(ACTOR_MODEL.split()) - {"entropy_bonus", "ratio_eps", "trt_llm"})
INFERENCE = """port model_name max_queue_delay_microseconds inference_micro_batch_size
strip_sequence_length_to_multiple"""
INFERENCE_MODEL = """forward_micro_batch_size sequence_parallel
activations_checkpoint_granularity activations_checkpoint_method precision
reward_standardization.enable reward_standardization.mean reward_standardization.std
regression.merge_attributes regression.attribute_weights global_batch_size"""

TRAINING = COMMON | {
    "trainer": TRAINER + " max_time",
    "exp_manager": EXP + " resume_from_checkpoint max_time_per_run",
    "pretrained_checkpoint": "restore_from_path",
    "model.overwrite_base_config": "data.data_prefix",
}
REFERENCE = {
    "gpt_ppo_actor": TRAINING
    | {
        "trainer.ppo": ACTOR_TRAINER + " ppo_epochs ratio_eps entropy_bonus",
        "remote_critic_rm": REMOTE + " init_timeout_s inference_timeout_s reward_models",
        "model.ppo": ACTOR_MODEL + " loss_reduction",
        "model.peft": PEFT,
        "model": MODEL + " sequence_parallel",
        "model.data": DATA,
    },
    "gpt_ppo_critic": COMMON
    | {
        "trainer.ppo": CRITIC_TRAINER + " host",
        "pretrained_checkpoint": "restore_from_path",
        "model": f"{MODEL} {CRITIC_MODEL}",
    },
    "gpt_rs_actor": TRAINING
    | {
        "trainer.rs": RS_TRAINER + " run_init_validation",
        "remote_rm": "pad_to_length reward_model.name reward_model.ip reward_model.port host "
        "port reward_models",
        "model.rs": RS_MODEL + " num_rollouts_per_prompt top_n_rollouts loss_reduction",
        "model.peft": PEFT,
        "model": MODEL + " sequence_parallel",
        "model.data": DATA + " dataloader_type",
    },
    "gpt_reinforce_actor": TRAINING
    | {
        "trainer.reinforce": RS_TRAINER
        + " run_init_validation initial_policy_kl_penalty use_absolute_kl num_rollouts_per_prompt"
        " trt_llm.enable trt_llm.reshard batch_iterator.use_flask",
        "remote_rm": "pad_to_length reward_model.name reward_model.ip reward_model.port host "
        "port reward_models",
        "model.reinforce": RS_MODEL + " trt_llm loss_reduction",
        "model.peft": PEFT,
        "model": MODEL + " sequence_parallel",
        "model.data": DATA,
    },
    "inference_rm": {
        "": "rm_model_file",
        "trainer": "num_nodes devices accelerator logger precision",
        "inference": INFERENCE
        + " host reward_fn reward_fn_workers reward_fn_timeout_s reward_fn_fallback",
        "model": INFERENCE_MODEL,
    },
    "training_rm": TRAINING
    | {
        "trainer.rm": RM_TRAINER,
        "model": f"{MODEL} {RM_MODEL} {ARCHITECTURE}",
        "model.data": DATA + " validation_drop_last",
    },
    "gpt_sft": COMMON
    | {
        "trainer.sft": SFT_TRAINER,
        "model": f"{MODEL} {ARCHITECTURE} restore_from_path sequence_parallel"
        " activations_checkpoint_granularity activations_checkpoint_method"
        " activations_checkpoint_num_layers",
        "model.peft": PEFT,
        "model.data": SFT_DATA,
        "model.data.train_ds": SFT_SET,
        "model.data.validation_ds": SFT_SET,
    },
    "gpt_dpo": TRAINING
    | {
        "trainer.dpo": SFT_TRAINER,
        "model.dpo": DPO_MODEL,
        "model.peft": PEFT,
        "model.data": DATA + " default_chosen_reward default_rejected_reward",
    },
    "gpt_kto": TRAINING
    | {
        "trainer.kto": SFT_TRAINER,
        "model.kto": KTO_MODEL,
        "model.peft": PEFT,
        "model.data": DATA + " dataloader_type",
    },
    "gpt_spin": TRAINING
    | {
        "trainer.spin": SFT_TRAINER + " max_iterations",
        "model.spin": SPIN_MODEL,
        "model.data": SFT_DATA + " reset_position_ids reset_attention_mask eod_mask_loss",
        "model.data.train_ds": SPIN_SET,
        "model.data.validation_ds": SPIN_SET
        + " global_batch_size micro_batch_size output_original_text",
        "model.overwrite_base_config": "data.train_ds.file_path data.validation_ds.file_path",
    },
    "gpt_knowledge_distillation": TRAINING
    | {
        "": "name",
        "trainer.knowledge_distillation": SFT_TRAINER,
        "model.knowledge_distillation": DISTILLATION_MODEL,
        "model.peft": PEFT,
        "model.data": DATA + " top_k n_chunks n_examples_per_chunk dataloader_type",
    },
}


DEFAULTS = {
    "gpt_ppo_actor": {
        "trainer.ppo.use_absolute_kl": False,
        "trainer.ppo.initial_policy_kl_penalty": 0.01,
        "trainer.ppo.gae_lambda": 0.95,
        "trainer.ppo.trt_llm.max_input_len": 2048,
        "remote_critic_rm.init_timeout_s": 600,
        "remote_critic_rm.inference_timeout_s": 3600,
        "remote_critic_rm.critic.port": 5556,
        "model.ppo.loss_reduction": "token",
        "model.ppo.ratio_eps": 0.2,
        "model.ppo.entropy_bonus": 0.0,
        "model.ppo.num_rollout_samples": 512,
        "model.ppo.length_params.max_length": 2048,
        "model.optim.lr": 9e-7,
    },
    "gpt_ppo_critic": {
        "trainer.ppo.port": 5556,
        "model.optim.lr": 9e-6,
        "model.loss_clip_val": 0.2,
    },
    "gpt_rs_actor": {
        "model.rs.num_rollouts_per_prompt": 4,
        "model.rs.top_n_rollouts": 1,
        "remote_rm.reward_model.port": 5555,
        "exp_manager.checkpoint_callback_params.monitor": "val_global_rewards",
    },
    "inference_rm": {"inference.port": 5555},
    "training_rm": {"model.force_head_dtype": "bfloat16"},
    "gpt_sft": {"model.optim.lr": 3e-5, "model.data.train_ds.global_batch_size": 128},
}


@pytest.fixture(scope="module")
def configs():
    with initialize_config_dir(str(ROOT / "conf"), version_base=None):
        return {name: compose(name) for name in CONFIG_NAMES}


@pytest.mark.parametrize("name", CONFIG_NAMES)
def test_keys_of_nemo_aligner_stand_in_the_yaml_file(name, configs):
    """NeMo's own `hydra_runner` refuses `key=value` for a key that the YAML file lacks."""
    for section, keys in REFERENCE.get(name, {}).items():  # of a job of NeMo-Aligner's
        for key in keys.split():
            node = OmegaConf.to_container(configs[name], resolve=False)
            for part in f"{section}.{key}".strip(".").split("."):
                if isinstance(node, str):  # a reference to another section
                    break
                assert part in node, f"{section}.{key}"
                node = node[part]


@pytest.mark.parametrize("name", CONFIG_NAMES)
def test_schema_knows_every_key_of_the_yaml_file(name, configs):
    check_keys(OmegaConf.to_container(configs[name], resolve=False), name)


def test_defaults_of_nemo_aligner_are_kept(configs):
    """A sample by hand, after those that differ on purpose."""
    for name in CONFIG_NAMES:
        trainer, results = configs[name].trainer, configs[name].get("exp_manager")
        assert (trainer.accelerator, trainer.num_nodes, trainer.devices) == ("auto", 1, 1)
        assert results is None or results.explicit_log_dir == f"./results/{name}"
    for name, keys in DEFAULTS.items():
        for key, value in keys.items():
            assert OmegaConf.select(configs[name], key) == value, key


def test_ratio_eps_and_entropy_bonus_can_be_set_in_both_places():
    with initialize_config_dir(str(ROOT / "conf"), version_base=None):
        for section in ("trainer", "model"):
            given = {"ratio_eps": 0.3, "entropy_bonus": 0.1}
            given = [f"{section}.ppo.{key}={x}" for key, x in given.items()]
            cfg = compose("gpt_ppo_actor", given)
            assert (cfg.model.ppo.ratio_eps, cfg.model.ppo.entropy_bonus) == (0.3, 0.1)


def test_scripts_find_the_yaml_files():
    link = ROOT / "examples/nlp/gpt/conf"
    assert link.is_symlink() and link.readlink() == Path("../../../conf")
    assert {path.stem for path in link.glob("*.yaml")} >= set(CONFIG_NAMES)


def test_import_is_light():
    """`import nemo_aligner` works on a login node at once: no torch, no NeMo, no Megatron."""
    heavy = "('torch', 'nemo', 'megatron', 'pytriton')"
    code = f"import sys, nemo_aligner; print([m for m in {heavy} if m in sys.modules])"
    options = {"capture_output": True, "text": True, "check": True, "timeout": patience(60)}
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, **options)
    assert result.stdout.strip() == "[]"


def test_make_names_this_python_versions():
    setup, makefile = (ROOT / "setup.py").read_text(), (ROOT / "Makefile").read_text()
    assert 'python_requires=">=3.10,<3.13"' in setup
    assert "(3, 10) <= v <= (3, 12)" in makefile


def test_every_dependency_says_why():
    source = (ROOT / "setup.py").read_text()
    lines = source.splitlines()
    silent = [
        line
        for before, line in zip(lines, lines[1:])
        if re.match(r'\s+"[\w\-\[\],]+[=><]', line)
        and not ("  # " in line or before.lstrip().startswith("# "))
    ]
    assert "torch>=" in source and not silent


def test_files_open_with_the_licence_header():
    files = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True)
    if files.returncode:
        pytest.skip("not a git checkout")
    header = "# Copyright (c) 2026 the nemo_aligner authors.\n"
    header += "# SPDX-License-Identifier: Apache-2.0\n"
    for name in files.stdout.split():
        path = ROOT / name
        if path.exists() and path.stat().st_size:
            text = path.read_text()
            assert text.removeprefix("#!/usr/bin/env python\n").startswith(header), name
