# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Keys of every job, and defaults that several jobs have in common."""

from typing import Any, ClassVar, Literal

from nemo_aligner.config.fields import ABSENT, Section, inert, key, section


class Machines(Section):
    """Machines and precision.

    num_nodes, devices: nodes, and processes on each; torchrun's own numbers override them.
        NeMo-Aligner: 8 x 8 for the actor and the reward model
    accelerator: `auto`: the GPUs if there are any; `cpu`: hides them from the job, but not from
        reward functions and environments of its first process; `gpu`. NeMo-Aligner: gpu
    precision: `bf16` or `32`; null: `bf16` on GPUs, `32` on CPUs. The log begins with it; a job
        that resumes with another one says so
    logger: Lightning's own switch; leave it as it is
    """

    num_nodes: int = key(1, at_least=1)
    devices: Any = key(1, required=True)
    accelerator: str = key("auto")
    precision: Any = key(None)
    logger: bool = key(False)


class ServerMachines(Machines):
    """What a job has that does not train.

    hang_timeout_s: **new**: a job that makes no progress for so many seconds ends with exit code
        77; null: never. See [troubleshooting](troubleshooting.md#a-job-that-hangs)
    max_time: wall-clock limit, `DD:HH:MM:SS`; the job saves and ends with exit code 75 (a critic
        serves until it is stopped). See also `max_time_per_run`
    enable_checkpointing, use_distributed_sampler, max_epochs, max_steps: Lightning's own switches;
        leave them as they are
    """

    hang_timeout_s: float | None = key(600, above=0)
    max_time: Any = key(ABSENT)
    enable_checkpointing: bool = key(ABSENT)
    use_distributed_sampler: bool = key(ABSENT)
    max_epochs: Any = key(ABSENT)
    max_steps: Any = key(ABSENT)


class Trainer(ServerMachines):
    """What a job has that trains; `<algo>` is its own section below `trainer`."""

    max_time: Any = key(None)
    enable_checkpointing: bool = key(False)
    use_distributed_sampler: bool = key(False)
    max_epochs: Any = key("${.<algo>.max_epochs}")
    max_steps: Any = key("${.<algo>.max_steps}")


class Alarms(Section):
    """Alarms of every job that trains.

    replica_check_interval: **new**: steps between comparisons of the weights of data-parallel
        replicas, which end the job if a bit differs; 0 or null: never
    """

    OTHERS: ClassVar[str] = (  # what fields of subclasses mean
        "**new**: thresholds of [alarms](troubleshooting.md#alarms); null switches one off"
    )
    replica_check_interval: int | None = key(10, at_least=0)


class Loop(Section):
    """How long a job trains, and what it does on the way.

    max_epochs, max_steps: whichever comes first; -1: no limit
    val_check_interval, save_interval: steps between validations and checkpoints; 0: never.
        `save_interval` is that of validations by default; a save has a validation too. Without
        validation data nothing is validated, and the newest checkpoints are kept where the
        `monitor` is of a validation. For `rm`, `sft`, `dpo`, `kto`, `spin` and
        `knowledge_distillation` a fraction means part of an epoch
    gradient_clip_val: largest norm of the whole gradient; 0: no clipping
    """

    max_epochs: int | None = key(1, at_least=1)
    max_steps: int = key(-1, at_least=-1)
    val_check_interval: float = key(100)
    save_interval: float = key("${.val_check_interval}")
    gradient_clip_val: float | None = key(1.0, at_least=0)
    alarms: Alarms | None = section()


class SupervisedLoop(Loop):
    """The loop of a job that learns from data.

    limit_train_batches, limit_val_batches: of `rm`, `sft`, `dpo`, `kto`, `spin` and
        `knowledge_distillation`: a fraction of the batches, or their number
    """

    limit_train_batches: float | None = key(1.0, at_least=0)
    limit_val_batches: float | None = key(1.0, at_least=0)


class CheckpointParams(Section):
    """Which checkpoints are kept, and in what form.

    monitor, mode, save_top_k: which value ranks checkpoints, `min` or `max`, how many of the best
        are kept beside the last two (actor and critic may differ by one saved step)
    filename: name of a checkpoint folder; nothing is read from it
    save_nemo_on_train_end, always_save_nemo: write a `.nemo` at the end; with every checkpoint
    async_save: checkpoints are written in the background, from a copy in host memory
        ([jobs.md](jobs.md#checkpoints))
    """

    monitor: str | None = key("val_loss")
    mode: Literal["min", "max"] | None = key("min")
    save_top_k: Any = key(3)
    filename: str | None = key("megatron_gpt--{${.monitor}:.3f}-{step}-{consumed_samples}-{epoch}")
    save_nemo_on_train_end: bool = key(True)
    always_save_nemo: bool = key(False)
    async_save: bool = key(False)
    model_parallel_size: Any = inert(None)


class ExpManager(Section):
    """The experiment folder: the fields of NeMo's `ExpManagerConfig`.

    explicit_log_dir: folder of logs, metrics and checkpoints; the same folder again resumes.
        NeMo-Aligner: /results
    exp_dir, name: as in NeMo; the final model is `checkpoints/<exp_manager.name>.nemo`
    max_time_per_run: the same limit under NeMo's name
    create_wandb_logger: Weights & Biases. Likewise `create_mlflow_logger` with
        `mlflow_logger_kwargs` (null: into `mlruns` of the job's folder, for `mlflow ui
        --backend-store-uri`), and NeMo's others, for which see there
    prometheus_address: **new**: `HOST:PORT` where rank 0 serves the newest metrics at `/metrics`
        ([Prometheus](metrics.md#prometheus)), unencrypted and to all who reach it; null: nowhere
    resume_from_checkpoint, resume_if_exists, resume_ignore_no_checkpoint: resume from this
        checkpoint; from the last one of the folder; start from the beginning if there is none
    create_checkpoint_callback: False: no checkpoints
    wandb_logger_kwargs: `project`, `name` and other arguments of that logger
    """

    explicit_log_dir: str | None = key("./results/<job>")
    exp_dir: str | None = key(None)
    name: str | None = key("megatron_gpt")
    version: Any = key(ABSENT)
    use_datetime_version: bool = key(ABSENT)
    max_time_per_run: Any = key("${trainer.max_time}")
    create_wandb_logger: bool = key(False)
    wandb_logger_kwargs: dict | None = key(
        {"project": "nemo_aligner_ppo", "name": "gpt3_ppo_2b"}, free=True
    )
    create_mlflow_logger: bool = key(ABSENT)
    mlflow_logger_kwargs: dict | None = key(ABSENT, free=True)
    create_tensorboard_logger: bool = key(ABSENT)
    summary_writer_kwargs: dict | None = key(ABSENT, free=True)
    create_dllogger_logger: bool = key(ABSENT)
    dllogger_logger_kwargs: dict | None = key(ABSENT, free=True)
    create_clearml_logger: bool = key(ABSENT)
    clearml_logger_kwargs: dict | None = key(ABSENT, free=True)
    create_neptune_logger: bool = key(ABSENT)
    neptune_logger_kwargs: dict | None = key(ABSENT, free=True)
    prometheus_address: str | None = key(ABSENT, fallback=None)
    resume_from_checkpoint: str | None = key(None)
    resume_if_exists: bool = key(True)
    resume_past_end: bool = key(ABSENT)
    resume_ignore_no_checkpoint: bool = key(True)
    create_checkpoint_callback: bool = key(True)
    checkpoint_callback_params: CheckpointParams = section()
    files_to_copy: Any = key(ABSENT)
    seconds_to_sleep: Any = key(ABSENT)


class Named(Section):
    """The name of an experiment.

    name: name of the experiment
    """

    name: str | None = key("megatron_gpt_sft")


class Pretrained(Section):
    """What a job starts from.

    restore_from_path: `.nemo` file or folder to start from. Required by actors, critic, DPO, KTO,
        SPIN and distillation; without it `training_rm` starts from random weights. The
        reward-model server uses `rm_model_file`, SFT `model.restore_from_path`
    """

    restore_from_path: str | None = key(None)


# Sections of jobs that train, without and with a checkpoint that they start from.
TRAINS: dict[str, type] = {"trainer": Trainer, "exp_manager": ExpManager}
FROM_CHECKPOINT = {**TRAINS, "pretrained_checkpoint": Pretrained}

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

BOTH_0 = "and {} are both 0: nothing would be learned; raise one of them"

SIZES = ("global_batch_size", "micro_batch_size")

VALIDATION_SIZES = frozenset(f"model.data.validation_ds.{name}" for name in SIZES)
