# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Defaults that several jobs have in common."""

from typing import Any

from nemo_aligner.config.fields import ABSENT

PARAMS = "exp_manager.checkpoint_callback_params"


DATALOADER = {"model.data.dataloader_type": "single"}


NEW_DATA = {"model.overwrite_base_config": {"data": {"data_prefix": True}}}


CHAT_TOKENS = {
    "chat_prompt_tokens.system_turn_start": "<extra_id_0>",
    "chat_prompt_tokens.turn_start": "<extra_id_1>",
    "chat_prompt_tokens.label_start": "<extra_id_2>",
}


PARALLEL = {
    f"model.{name}_parallel_size": 1
    for name in ("tensor_model", "pipeline_model", "context", "expert_model")
}


# As null they switch off what a checkpoint was trained with.
NO_RECOMPUTATION = {
    f"model.activations_checkpoint_{name}": None for name in ("granularity", "method")
}


NO_LAYERS = {"model.activations_checkpoint_num_layers": None}


# What a model is built from where no checkpoint is named.
TOKENIZER = {
    f"model.tokenizer.{name}": None for name in "library type model vocab_file merge_file".split()
}


FROM_SCRATCH = TOKENIZER | {
    f"model.{name}": None
    for name in """num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups
    kv_channels normalization layernorm_epsilon activation position_embedding_type rotary_base
    rotary_percentage bias make_vocab_size_divisible_by init_method_std
    tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
    virtual_pipeline_model_parallel_size share_embeddings_and_output_weights""".split()
}


def below(section: str, values: dict[str, Any]) -> dict[str, Any]:
    return {f"{section}.{name}": value for name, value in values.items()}


def of_actor(algo: str, monitor: str) -> dict[str, Any]:
    """Defaults of the actors."""
    name = f"megatron_gpt-{{step}}-{{consumed_samples}}-{{{algo}_optimization_step}}-{{epoch}}"
    return {
        **NEW_DATA,
        "exp_manager.name": f"megatron_gpt_{algo}_actor",
        "exp_manager.wandb_logger_kwargs": {
            "project": f"nemo_aligner_{algo}",
            "name": f"gpt3_{algo}_2b",
        },
        f"{PARAMS}.monitor": monitor,
        f"{PARAMS}.mode": "max",
        f"{PARAMS}.save_top_k": 1,
        f"{PARAMS}.filename": f"{name}-{{{monitor}:.3f}}",
        "model.optim.lr": 9e-7,
        "model.optim.sched.min_lr": 9e-8,
        "model.data.validation_drop_last": ABSENT,
    }


def wandb(project: str | None, name: str | None) -> dict[str, Any]:
    return {"exp_manager.wandb_logger_kwargs": {"project": project, "name": name}}


OF_SFT = {
    "exp_manager.name": "${name}",
    **wandb(None, None),
    f"{PARAMS}.save_top_k": 5,
    f"{PARAMS}.filename": "megatron_gpt_sft--{${.monitor}:.3f}-{step}-{consumed_samples}-{epoch}",
    "model.optim.lr": 3e-5,
    "model.optim.weight_decay": 0.01,
}


VALIDATION_SET = {
    "file_path": None,
    "shuffle": False,
    "drop_last": False,
    "output_original_text": True,
    **{
        name: f"${{model.data.train_ds.{name}}}"
        for name in """max_seq_length label_key add_eos add_sep add_bos truncation_field
        truncation_method prompt_template columns index_mapping_dir memmap_workers""".split()
    },
}


SIZES = ("global_batch_size", "micro_batch_size")


VALIDATION_SIZES = frozenset(f"model.data.validation_ds.{name}" for name in SIZES)
