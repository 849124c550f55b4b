# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The configurations of jobs and commands: which sections each has, and which defaults of its own.

Sections and their keys are in `keys/`.
"""

from typing import Any

from nemo_aligner.config.fields import ABSENT, Job
from nemo_aligner.config.keys.commands import (
    Bootstrap,
    EvaluateCommand,
    EvaluateRewards,
    GenerateCommand,
    RewardModelFile,
    RewardServerModel,
    TeacherInference,
    TeacherModel,
    TopKChat,
    TopKCommand,
    TopKModel,
    TopKSet,
)
from nemo_aligner.config.keys.common import (
    ExpManager,
    Machines,
    Named,
    Pretrained,
    ServerMachines,
    SupervisedLoop,
    Trainer,
)
from nemo_aligner.config.keys.data import (
    Chat,
    Examples,
    Lines,
    PackedSet,
    ShuffledSet,
    SizedSet,
)
from nemo_aligner.config.keys.model import Model, Peft, PolicyPeft, RewardHead, TrainedModel
from nemo_aligner.config.keys.ppo import (
    CriticModel,
    PPOLoop,
    PPOPolicy,
    ReinforceLoop,
    ReinforcePolicy,
    RemoteCriticRM,
    RSPolicy,
)
from nemo_aligner.config.keys.rollouts import RemoteRM, RolloutLoop
from nemo_aligner.config.keys.servers import CriticServer, RewardInference, Server
from nemo_aligner.config.keys.supervised import (
    DPO,
    KTO,
    SPIN,
    Distillation,
    KDAlarms,
    PairAlarms,
    Pairs,
    PreferenceAlarms,
    RemoteTeacher,
    RMLoop,
    RMModel,
    SFTAlarms,
    SFTModel,
    SPINLoop,
    Student,
    TeacherLines,
)

PARAMS = "exp_manager.checkpoint_callback_params"
_DATALOADER = {"model.data.dataloader_type": "single"}
_NEW_DATA = {"model.overwrite_base_config": {"data": {"data_prefix": True}}}
_CHAT_TOKENS = {
    "chat_prompt_tokens.system_turn_start": "<extra_id_0>",
    "chat_prompt_tokens.turn_start": "<extra_id_1>",
    "chat_prompt_tokens.label_start": "<extra_id_2>",
}
_PARALLEL = {
    f"model.{name}_parallel_size": 1
    for name in ("tensor_model", "pipeline_model", "context", "expert_model")
}
# As null they switch off what a checkpoint was trained with.
_NO_RECOMPUTATION = {
    f"model.activations_checkpoint_{name}": None for name in ("granularity", "method")
}
_NO_LAYERS = {"model.activations_checkpoint_num_layers": None}
# What a model is built from where no checkpoint is named.
_TOKENIZER = {
    f"model.tokenizer.{name}": None for name in "library type model vocab_file merge_file".split()
}
_FROM_SCRATCH = _TOKENIZER | {
    f"model.{name}": None
    for name in """num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups
    kv_channels normalization layernorm_epsilon activation position_embedding_type rotary_base
    rotary_percentage bias make_vocab_size_divisible_by init_method_std
    tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
    virtual_pipeline_model_parallel_size share_embeddings_and_output_weights""".split()
}


def _in(section: str, values: dict[str, Any]) -> dict[str, Any]:
    return {f"{section}.{name}": value for name, value in values.items()}


def _actor(algo: str, monitor: str) -> dict[str, Any]:
    """Defaults of the actors."""
    name = f"megatron_gpt-{{step}}-{{consumed_samples}}-{{{algo}_optimization_step}}-{{epoch}}"
    return {
        **_NEW_DATA,
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


def _wandb(project: str | None, name: str | None) -> dict[str, Any]:
    return {"exp_manager.wandb_logger_kwargs": {"project": project, "name": name}}


_OF_SFT = {
    "exp_manager.name": "${name}",
    **_wandb(None, None),
    f"{PARAMS}.save_top_k": 5,
    f"{PARAMS}.filename": "megatron_gpt_sft--{${.monitor}:.3f}-{step}-{consumed_samples}-{epoch}",
    "model.optim.lr": 3e-5,
    "model.optim.weight_decay": 0.01,
}
_VALIDATION_SET = {
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
_SIZES = ("global_batch_size", "micro_batch_size")
_VALIDATION_SIZES = frozenset(f"model.data.validation_ds.{name}" for name in _SIZES)

PPO_ACTOR = Job(
    "gpt_ppo_actor",
    {
        "trainer": Trainer,
        "trainer.ppo": PPOLoop,
        "remote_critic_rm": RemoteCriticRM,
        "exp_manager": ExpManager,
        "pretrained_checkpoint": Pretrained,
        "model": TrainedModel,
        "model.ppo": PPOPolicy,
        "model.peft": PolicyPeft,
        "model.data": Lines,
    },
    _actor("ppo", "val_rewards"),
)
PPO_CRITIC = Job(
    "gpt_ppo_critic",
    {
        "trainer": Trainer,
        "trainer.ppo": CriticServer,
        "server": Server,
        "exp_manager": ExpManager,
        "pretrained_checkpoint": Pretrained,
        "model": (TrainedModel, RewardHead, CriticModel),
        "model.peft": Peft,
    },
    {
        "trainer.max_epochs": None,
        "exp_manager.name": "megatron_gpt_critic",
        f"{PARAMS}.monitor": "step",
        f"{PARAMS}.mode": "max",
        f"{PARAMS}.save_top_k": 0,
        f"{PARAMS}.filename": "megatron_gpt-{step}",
        f"{PARAMS}.save_nemo_on_train_end": False,
        "model.regression.merge_attributes": True,
    },
    # A critic serves until it is stopped: it has neither a time limit nor an end of training.
    without=frozenset(("trainer.max_time", "exp_manager.max_time_per_run")),
    inert=frozenset([f"{PARAMS}.save_nemo_on_train_end"]),
)
RS_ACTOR = Job(
    "gpt_rs_actor",
    {
        "trainer": Trainer,
        "trainer.rs": RolloutLoop,
        "remote_rm": RemoteRM,
        "exp_manager": ExpManager,
        "pretrained_checkpoint": Pretrained,
        "model": TrainedModel,
        "model.rs": RSPolicy,
        "model.peft": PolicyPeft,
        "model.data": Lines,
    },
    _actor("rs", "val_global_rewards") | _DATALOADER,
)
REINFORCE_ACTOR = Job(
    "gpt_reinforce_actor",
    {
        "trainer": Trainer,
        "trainer.reinforce": ReinforceLoop,
        "remote_rm": RemoteRM,
        "exp_manager": ExpManager,
        "pretrained_checkpoint": Pretrained,
        "model": TrainedModel,
        "model.reinforce": ReinforcePolicy,
        "model.peft": PolicyPeft,
        "model.data": Lines,
    },
    _actor("reinforce", "val_rewards"),
)
REWARD_MODEL = Job(
    "training_rm",
    {
        "trainer": Trainer,
        "trainer.rm": RMLoop,
        "exp_manager": ExpManager,
        "pretrained_checkpoint": Pretrained,
        "model": (TrainedModel, RewardHead, RMModel),
        "model.peft": Peft,
        "model.data": Lines,
    },
    {
        **_NEW_DATA,
        **_FROM_SCRATCH,
        **_wandb("nemo_aligner_rm", "rlhf_gpt3_rm_2b"),
        "model.micro_batch_size": 2,
        "model.sequence_parallel": ABSENT,
        "model.share_embeddings_and_output_weights": False,
        "model.hidden_dropout": None,
        "model.attention_dropout": None,
        "model.reward_model_type": "binary_ranking",
        "model.output_sequence": False,
        "model.use_avg_pool": False,
        "model.force_head_dtype": "bfloat16",
        "model.regression.num_attributes": 1,
        "model.regression.loss_mask_val": -100,
        "model.regression.loss_func": "regression",
        "model.regression.load_rm_head_weights": False,
        **_in("model.reward_standardization", dict.fromkeys(("enable", "mean", "std"), ABSENT)),
    },
    without=frozenset(["model.data.allow_empty_prompt"]),
)
REWARD_SERVER = Job(
    "inference_rm",
    {
        "": RewardModelFile,
        "trainer": ServerMachines,
        "server": Server,
        "inference": RewardInference,
        "model": (RewardServerModel, RewardHead),
    },
    {
        "inference.port": 5555,
        "inference.inference_micro_batch_size": "${.micro_batch_size}",
        "model.forward_micro_batch_size": 4,
        **_in("model", dict.fromkeys(("output_sequence", "use_avg_pool", "seed"), ABSENT)),
        "model.force_head_dtype": ABSENT,
        **_TOKENIZER,
        **_NO_RECOMPUTATION,
    },
)
SFT = Job(
    "gpt_sft",
    {
        "": Named,
        "trainer": Trainer,
        "trainer.sft": SupervisedLoop,
        "trainer.sft.alarms": SFTAlarms,
        "exp_manager": ExpManager,
        "model": (TrainedModel, SFTModel),
        "model.peft": PolicyPeft,
        "model.data": Examples,
        "model.data.train_ds": PackedSet,
        "model.data.validation_ds": PackedSet,
        "model.data.test_ds": PackedSet,
    },
    {
        **_OF_SFT,
        **_FROM_SCRATCH,
        **_NO_RECOMPUTATION,
        **_NO_LAYERS,
        "model.hidden_dropout": 0.0,
        "model.attention_dropout": 0.0,
        **_in("model", {name: f"${{model.data.train_ds.{name}}}" for name in _SIZES}),
        **_in("model.data.validation_ds", _VALIDATION_SET),
        **_in(
            "model.data.validation_ds",
            {name: f"${{model.data.train_ds.{name}}}" for name in _SIZES},
        ),
    },
    required=_VALIDATION_SIZES,
    bare=("model.data.test_ds",),
)
DPO_JOB = Job(
    "gpt_dpo",
    {
        "trainer": Trainer,
        "trainer.dpo": SupervisedLoop,
        "trainer.dpo.alarms": PairAlarms,
        "exp_manager": ExpManager,
        "pretrained_checkpoint": Pretrained,
        "model": TrainedModel,
        "model.dpo": DPO,
        "model.peft": Peft,
        "model.data": Pairs,
    },
    _NEW_DATA | _wandb("nemo_aligner_dpo", "rlhf_gpt3_dpo"),
)
KNOWLEDGE_DISTILLATION = Job(
    "gpt_knowledge_distillation",
    {
        "": Named,
        "trainer": Trainer,
        "trainer.knowledge_distillation": SupervisedLoop,
        "trainer.knowledge_distillation.alarms": KDAlarms,
        "remote_teacher": RemoteTeacher,
        "exp_manager": ExpManager,
        "pretrained_checkpoint": Pretrained,
        "model": (TrainedModel, Student),
        "model.knowledge_distillation": Distillation,
        "model.peft": PolicyPeft,
        "model.data": TeacherLines,
    },
    {
        **_NEW_DATA,
        **_OF_SFT,
        "name": "megatron_gpt_knowledge_distillation",
        "model.data.data_impl": "chunked_jsonl",
        "model.data.append_eod": False,
        **_DATALOADER,
        **_in("model.data", _CHAT_TOKENS),
    },
)
KTO_JOB = Job(
    "gpt_kto",
    {
        "trainer": Trainer,
        "trainer.kto": SupervisedLoop,
        "trainer.kto.alarms": PreferenceAlarms,
        "exp_manager": ExpManager,
        "pretrained_checkpoint": Pretrained,
        "model": TrainedModel,
        "model.kto": KTO,
        "model.peft": Peft,
        "model.data": Lines,
    },
    _NEW_DATA | _DATALOADER | _wandb("nemo_aligner_kto", "rlhf_gpt3_kto"),
)
SPIN_JOB = Job(
    "gpt_spin",
    {
        "trainer": Trainer,
        "trainer.spin": SPINLoop,
        "exp_manager": ExpManager,
        "pretrained_checkpoint": Pretrained,
        "model": TrainedModel,
        "model.spin": SPIN,
        "model.peft": PolicyPeft,
        "model.data": Examples,
        "model.data.train_ds": ShuffledSet,
        "model.data.validation_ds": SizedSet,
    },
    {
        **_wandb("nemo_aligner_dpo", "rlhf_gpt3_dpo"),
        f"{PARAMS}.filename": "megatron_gpt--{${.monitor}:.3f}-{step}-{consumed_samples}-"
        "{iteration}-{epoch}",
        "model.overwrite_base_config": {
            "data": {"train_ds": {"file_path": True}, "validation_ds": {"file_path": True}}
        },
        "model.data.chat": True,
        **_in("model.data", _CHAT_TOKENS),
        **_in(
            "model.data",
            dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False),
        ),
        "model.data.train_ds.hf_dataset": True,
        "model.data.validation_ds.hf_dataset": True,
        **_in("model.data.validation_ds", _VALIDATION_SET),
        **_in("model.data.validation_ds", {name: f"${{model.{name}}}" for name in _SIZES}),
    },
    required=_VALIDATION_SIZES,
)
_NO_BATCHES = frozenset(("model.dynamic_micro_batch_tokens", "model.micro_batch_size"))
_GENERATE: dict[str, Any] = {
    "": GenerateCommand,
    "trainer": Machines,
    "pretrained_checkpoint": Pretrained,
    "model": Model,
    "model.data": Chat,
}
_OF_GENERATE = {**_PARALLEL, **_NO_RECOMPUTATION, "model.virtual_pipeline_model_parallel_size": 1}
GENERATE = Job("generate", _GENERATE, _OF_GENERATE, without=_NO_BATCHES)
EVALUATE = Job(
    "evaluate",
    {**_GENERATE, "": EvaluateCommand, "bootstrap": Bootstrap, "inference": EvaluateRewards},
    _OF_GENERATE,
    without=_NO_BATCHES,
)
TOP_K_LOGITS = Job(
    "compute_topk_logits",
    {
        "": TopKCommand,
        "trainer": Trainer,
        "pretrained_checkpoint": Pretrained,
        "model": TopKModel,
        "data": TopKChat,
        "data.data": TopKSet,
    },
    {
        **_PARALLEL,
        **_NO_RECOMPUTATION,
        **_NO_LAYERS,
        "model.virtual_pipeline_model_parallel_size": None,
        "trainer.max_epochs": 1,
        "trainer.max_steps": ABSENT,
        "model.encoder_seq_length": None,
        **_in("data", _CHAT_TOKENS),
        "data.data.columns": None,
    },
)
TEACHER_SERVER = Job(
    "inference_teacher",
    {
        "trainer": ServerMachines,
        "server": Server,
        "inference": TeacherInference,
        "pretrained_checkpoint": Pretrained,
        "model": TeacherModel,
    },
    {
        **_PARALLEL,
        **_NO_RECOMPUTATION,
        **_NO_LAYERS,
        "model.virtual_pipeline_model_parallel_size": None,
        "inference.model_name": "teacher_logits",
        "inference.max_queue_delay_microseconds": 2000,
        "inference.inference_micro_batch_size": "${model.micro_batch_size}",
    },
)

JOBS = {
    job.name: job
    for job in (
        PPO_ACTOR,
        PPO_CRITIC,
        RS_ACTOR,
        REINFORCE_ACTOR,
        REWARD_MODEL,
        REWARD_SERVER,
        SFT,
        DPO_JOB,
        KNOWLEDGE_DISTILLATION,
        KTO_JOB,
        SPIN_JOB,
        GENERATE,
        EVALUATE,
        TOP_K_LOGITS,
        TEACHER_SERVER,
    )
}
