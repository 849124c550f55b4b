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

from nemo_aligner.config.schema import CONFIG_NAMES
from tests.cases import rows
from tests.patience import patience

ROOT = Path(__file__).parents[2]

# The keys that scripts written for NeMo-Aligner use, by hand from its configuration trees: jobs
# (without `gpt_`) -> section, of which `*` is named after the job -> keys.
KEYS = rows("""
all -> trainer -> num_nodes devices accelerator precision logger
all -> model -> global_batch_size precision
all but inference_rm -> trainer -> enable_checkpointing use_distributed_sampler max_epochs
    max_steps
all but inference_rm -> exp_manager -> explicit_log_dir exp_dir name create_wandb_logger
    wandb_logger_kwargs.project wandb_logger_kwargs.name resume_if_exists
    resume_ignore_no_checkpoint create_checkpoint_callback
all but inference_rm -> exp_manager.checkpoint_callback_params -> monitor save_top_k mode
    always_save_nemo save_nemo_on_train_end filename model_parallel_size
all but inference_rm -> model -> mcore_gpt micro_batch_size megatron_amp_O2 encoder_seq_length
    max_position_embeddings seed
all but inference_rm -> model.optim -> name bucket_cap_mb overlap_grad_sync contiguous_grad_buffer
    lr weight_decay betas sched.name sched.warmup_steps sched.constant_steps sched.min_lr
all but inference_rm -> trainer.* -> max_steps gradient_clip_val
all but inference_rm sft -> pretrained_checkpoint -> restore_from_path
all but ppo_critic inference_rm -> trainer.* -> max_epochs val_check_interval save_interval
all but ppo_critic inference_rm -> model -> data.num_workers
all but ppo_critic inference_rm sft -> trainer -> max_time
all but ppo_critic inference_rm sft -> exp_manager -> resume_from_checkpoint max_time_per_run
all but ppo_critic inference_rm sft -> model.data -> reset_position_ids reset_attention_mask
    eod_mask_loss
ppo_actor rs_actor reinforce_actor sft dpo knowledge_distillation kto -> model.peft -> peft_scheme
    restore_from_path restore_from_ckpt.checkpoint_dir restore_from_ckpt.checkpoint_name
ppo_actor rs_actor reinforce_actor sft dpo knowledge_distillation kto -> model.peft.lora_tuning ->
    target_modules adapter_dim adapter_dropout column_init_method row_init_method layer_selection
    weight_tying position_embedding_strategy
ppo_actor rs_actor reinforce_actor training_rm dpo knowledge_distillation kto -> model ->
    overwrite_base_config.data.data_prefix
ppo_actor rs_actor reinforce_actor training_rm dpo knowledge_distillation kto -> model.data ->
    data_impl splits_string seq_length skip_warmup index_mapping_dir data_prefix
training_rm sft dpo knowledge_distillation kto spin -> trainer.* -> limit_val_batches
sft dpo knowledge_distillation kto spin -> trainer.* -> limit_train_batches
ppo_actor rs_actor reinforce_actor inference_rm sft -> model -> sequence_parallel
ppo_actor rs_actor reinforce_actor spin -> model.* -> rollout_micro_batch_size offload_adam_states
    length_params.max_length length_params.min_length
ppo_actor rs_actor reinforce_actor spin -> model.*.sampling_params -> use_greedy temperature top_k
    top_p repetition_penalty add_BOS all_probs compute_logprob end_strings
dpo knowledge_distillation kto -> model.* -> sft_loss_weight
dpo kto spin -> model.* -> log_prob_forward_micro_batch_size ref_policy_kl_penalty
rs_actor knowledge_distillation kto -> model -> data.dataloader_type
ppo_actor rs_actor reinforce_actor -> trainer.* -> rollout_batch_seq_length model_gbs model_mbs
ppo_actor rs_actor reinforce_actor -> model.* -> num_rollout_samples forward_micro_batch_size
    val_rollout_micro_batch_size num_val_samples loss_reduction
ppo_critic training_rm inference_rm -> model -> forward_micro_batch_size
    regression.merge_attributes regression.attribute_weights
dpo kto -> model.* -> preference_average_log_probs sft_average_log_probs preference_loss_weight
ppo_actor reinforce_actor -> trainer.* -> initial_policy_kl_penalty use_absolute_kl trt_llm.enable
    trt_llm.reshard batch_iterator.use_flask
ppo_actor reinforce_actor -> model.* -> trt_llm
ppo_critic inference_rm -> model.reward_standardization -> enable mean std
ppo_critic training_rm -> model -> output_sequence use_avg_pool force_head_dtype reward_model_type
    regression.num_attributes
rs_actor reinforce_actor -> trainer.* -> run_init_validation
rs_actor reinforce_actor -> remote_rm -> pad_to_length host port reward_models
rs_actor reinforce_actor -> remote_rm.reward_model -> name ip port
sft spin -> model -> data.chat data.sample
sft spin -> model.data.chat_prompt_tokens -> system_turn_start turn_start label_start end_of_turn
    end_of_name
sft spin -> model.data.train_ds -> file_path shuffle max_seq_length label_key add_eos
    prompt_template truncation_field truncation_method hf_dataset
sft spin -> model.data.validation_ds -> file_path global_batch_size micro_batch_size shuffle
    max_seq_length label_key add_eos prompt_template truncation_field truncation_method hf_dataset
inference_rm sft -> model -> activations_checkpoint_granularity activations_checkpoint_method
training_rm sft -> model -> share_embeddings_and_output_weights num_layers hidden_size
    ffn_hidden_size num_attention_heads num_query_groups normalization activation
    position_embedding_type rotary_base rotary_percentage bias make_vocab_size_divisible_by
    layernorm_epsilon init_method_std hidden_dropout attention_dropout tensor_model_parallel_size
    pipeline_model_parallel_size virtual_pipeline_model_parallel_size context_parallel_size
training_rm sft -> model.tokenizer -> library type model vocab_file merge_file
dpo -> model.* -> gt_reward_scale preference_loss
dpo -> model -> data.default_chosen_reward data.default_rejected_reward
knowledge_distillation -> . -> name
knowledge_distillation -> model.* -> target_logits_scale logits_scale kd_loss_weight kd_loss
    cross_tokenizer
knowledge_distillation -> model.data -> top_k n_chunks n_examples_per_chunk
kto -> model.* -> desirable_loss_weight undesirable_loss_weight
ppo_actor -> trainer.* -> critic_warmup_steps discount_factor gae_lambda normalize_advantages
    trt_model_dir ppo_epochs ratio_eps entropy_bonus batch_iterator.port
ppo_actor -> trainer.*.trt_llm -> max_input_len seed model_type unload_engine_train
ppo_actor -> remote_critic_rm -> pad_to_length combine_rm_and_critic_server init_timeout_s
    inference_timeout_s reward_models
ppo_actor -> remote_critic_rm.reward_model -> name ip port
ppo_actor -> remote_critic_rm.critic -> name.train name.infer name.save ip port
ppo_actor -> model.* -> entropy_bonus ratio_eps
ppo_critic -> model -> loss_clip_val offload_adam_states
ppo_critic -> trainer.* -> port combine_rm_and_critic_server max_queue_delay_microseconds
    strip_sequence_length_to_multiple inference_micro_batch_size host
reinforce_actor -> trainer.* -> num_rollouts_per_prompt
rs_actor -> model.* -> num_rollouts_per_prompt top_n_rollouts
sft -> model -> restore_from_path activations_checkpoint_num_layers
sft -> model.data -> train_ds.global_batch_size train_ds.micro_batch_size
spin -> model -> overwrite_base_config.data.train_ds.file_path
    overwrite_base_config.data.validation_ds.file_path
spin -> trainer.* -> max_iterations
spin -> model.data.train_ds -> memmap_workers min_seq_length drop_last add_sep add_bos
    index_mapping_dir
spin -> model.data.validation_ds -> memmap_workers min_seq_length drop_last add_sep add_bos
    index_mapping_dir output_original_text
inference_rm -> . -> rm_model_file
inference_rm -> inference -> port model_name max_queue_delay_microseconds
    inference_micro_batch_size strip_sequence_length_to_multiple host reward_fn reward_fn_workers
    reward_fn_timeout_s reward_fn_fallback
training_rm -> model.regression -> loss_mask_val loss_func load_rm_head_weights
training_rm -> trainer.* -> train_random_sampler val_random_sampler
training_rm -> model -> data.validation_drop_last
""")
DEFAULTS = rows("""
gpt_ppo_actor -> trainer.ppo.use_absolute_kl=false trainer.ppo.initial_policy_kl_penalty=0.01
    trainer.ppo.gae_lambda=0.95 trainer.ppo.trt_llm.max_input_len=2048
    remote_critic_rm.init_timeout_s=600 remote_critic_rm.inference_timeout_s=3600
    remote_critic_rm.critic.port=5556 model.ppo.loss_reduction=token model.ppo.ratio_eps=0.2
    model.ppo.entropy_bonus=0.0 model.ppo.num_rollout_samples=512
    model.ppo.length_params.max_length=2048 model.optim.lr=9e-7
gpt_ppo_critic -> trainer.ppo.port=5556 model.optim.lr=9e-6 model.loss_clip_val=0.2
gpt_rs_actor -> model.rs.num_rollouts_per_prompt=4 model.rs.top_n_rollouts=1
    remote_rm.reward_model.port=5555
    exp_manager.checkpoint_callback_params.monitor=val_global_rewards
inference_rm -> inference.port=5555
training_rm -> model.force_head_dtype=bfloat16
gpt_sft -> model.optim.lr=3e-5 model.data.train_ds.global_batch_size=128
""")


@pytest.fixture(scope="module")
def configs():
    with initialize_config_dir(str(ROOT / "conf"), version_base=None):
        return {name: compose(name) for name in CONFIG_NAMES}


@pytest.mark.parametrize("name", CONFIG_NAMES)
def test_keys_of_nemo_aligner_stand_in_the_yaml_file(name, configs):
    """NeMo's own `hydra_runner` refuses `key=value` for a key that the YAML file lacks."""
    job, own = name.removeprefix("gpt_"), re.sub("gpt_|training_|_actor|_critic", "", name)
    tree = OmegaConf.to_container(configs[name], resolve=False)
    for jobs, section, keys in KEYS:
        if (job in jobs.split()) == jobs.startswith("all"):  # also: all but this one
            continue
        for key in keys.split():
            node = tree
            for part in f"{section}.{key}".replace("*", own).strip(".").split("."):
                if isinstance(node, str):  # a reference to another section
                    break
                assert part in node, f"{section}.{key}"
                node = node[part]


def test_defaults_of_nemo_aligner_are_kept(configs):
    """A sample by hand, after those that differ on purpose."""
    for name in CONFIG_NAMES:
        trainer, results = configs[name].trainer, configs[name].get("exp_manager")
        assert (trainer.accelerator, trainer.num_nodes, trainer.devices) == ("auto", 1, 1)
        assert results is None or results.explicit_log_dir == f"./results/{name}"
    for name, given in DEFAULTS:
        for word in given.split():
            key, wanted = word.partition("=")[0], OmegaConf.from_dotlist([word])
            assert OmegaConf.select(configs[name], key) == OmegaConf.select(wanted, key), key


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
