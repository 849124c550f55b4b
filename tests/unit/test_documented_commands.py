# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The commands that NeMo-Aligner documents, and its own YAML files, run through our scripts until
the job would start its processes.

The commands are in documented_commands.txt. Of the YAML files the tests hold only what differs
from `conf/`.
"""

import math
import runpy
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from nemo_aligner.config import checks
from nemo_aligner.config.defaults import CONF, complete_config
from nemo_aligner.config.rules import SECTIONS
from nemo_aligner.launch import job_entry, processes
from tests.cases import some_of

SCRIPTS = Path(__file__).parents[2] / "examples/nlp/gpt"

# The configuration in a `.nemo` of NeMo: a model of Llama's form, large enough for the parallel
# sizes of all commands, with the keys of pre-training that such a file carries along.
MODEL = {
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "normalization": "rmsnorm",
    "bias": False,
    "activation": "fast-swiglu",
    "position_embedding_type": "rope",
    "share_embeddings_and_output_weights": False,
    "encoder_seq_length": 8192,
    "max_position_embeddings": 8192,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "micro_batch_size": 1,
    "global_batch_size": 128,
    "precision": "bf16",
    "mcore_gpt": True,
    "tokenizer": {"library": "huggingface", "type": "some/model"},
    "data": {"data_impl": "mmap", "splits_string": "900,50,50", "seq_length": 8192},
    "optim": {"name": "fused_adam", "lr": 2e-4, "sched": {"name": "CosineAnnealing"}},
    "target": "nemo.collections.nlp.models.language_modeling.megatron_gpt_model.MegatronGPTModel",
}


class Started(BaseException):
    """The script has checked everything and is about to start its processes."""


@dataclass
class Command:
    where: str
    script: str
    arguments: list[str] = field(default_factory=list)
    refused: str | None = None
    notes: list[str] = field(default_factory=list)


def read_commands():
    commands = []
    for line in (Path(__file__).with_name("documented_commands.txt")).read_text().splitlines():
        if line.startswith("== "):
            commands.append(Command(*line.split()[1:]))
        elif line.startswith("-> refused: "):
            commands[-1].refused = line.removeprefix("-> refused: ")
        elif line.startswith("-> note: "):
            commands[-1].notes.append(line.removeprefix("-> note: "))
        elif line and not line.startswith(("#", "-> accepted")):
            commands[-1].arguments.append(line)
    return commands


COMMANDS = read_commands()


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a script in this process, as `python script.py arguments` would, until it would start
    its processes; returns (configuration, notes), or the error that it printed.
    """
    model = tmp_path / "model.nemo"
    model.mkdir()
    OmegaConf.save(OmegaConf.create(MODEL), model / "model_config.yaml")
    seen = {}

    def start(cfg, *_section):
        seen["cfg"] = cfg
        raise Started

    def check_config(cfg, *args, **kwargs):
        seen["notes"] = plain_check(cfg, *args, **kwargs)

    plain_check = checks.check_config
    # Hydra closes all logging handlers; absl's would close the file that pytest captures into.
    monkeypatch.setattr("absl.logging.PythonHandler.close", lambda _handler: None)
    monkeypatch.setattr(job_entry, "check_config", check_config)
    # The files that the commands name are not there.
    monkeypatch.setattr(job_entry, "check_inputs", lambda _cfg, _name: None)
    monkeypatch.setattr(processes, "resolve_and_create_trainer", start)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)

    def run(script, arguments):
        path = SCRIPTS / f"{script}.py"
        paths = {"{model}": str(model), "{conf}": str(CONF)}
        for name, value in paths.items():
            arguments = [argument.replace(name, value) for argument in arguments]
        monkeypatch.setattr(sys, "argv", [str(path), *arguments, "trainer.accelerator=cpu"])
        GlobalHydra.instance().clear()
        try:
            runpy.run_path(str(path), run_name="__main__")
        except Started:
            return seen["cfg"], seen["notes"]
        except SystemExit:
            return capsys.readouterr().err
        raise AssertionError("the script ended without a start")

    return run


def asked_for(arguments):
    """Dotted key -> value of what a command line sets last, but for the checkpoint."""
    wanted = {}
    lines = [text for text in arguments if not text.startswith("--") and "{model}" not in text]
    for override in OverridesParser.create().parse_overrides(lines):
        key = override.key_or_group
        wanted = {k: v for k, v in wanted.items() if not f"{k}.".startswith(f"{key}.")}
        if not override.is_delete():
            wanted[key] = override.value()
    return wanted


def resolved(value):
    """A value of the command line as the configuration sees it."""
    return OmegaConf.to_container(OmegaConf.create({"x": value}), resolve=True)["x"]


def same(value, other):
    if isinstance(value, float) or isinstance(other, float):
        return math.isclose(value, other)
    return value == other


@some_of(
    "command",
    sorted(COMMANDS, key=lambda command: (not command.refused, -len(command.notes))),
    keep=4,
    ids=lambda command: command.where,
)
def test_a_documented_command_is_accepted_or_refused_with_its_reason(command, run):
    ended = run(command.script, command.arguments)
    if command.refused:
        assert isinstance(ended, str) and f"ERROR: {command.refused}" in ended
        return
    assert not isinstance(ended, str), ended
    cfg, notes = ended
    assert sorted(note.split(": ")[0] for note in notes if ":" in note) == sorted(
        note.split(": ")[0] for note in command.notes
    )
    for key, value in asked_for(command.arguments).items():
        got = OmegaConf.select(cfg, key)
        got = OmegaConf.to_container(got) if OmegaConf.is_config(got) else got
        if isinstance(value, dict):  # a section: what is missing in it takes defaults
            got = {name: got[name] for name in value}
        value = resolved(value)
        if str(value).startswith("${"):  # the shell of the terminal form hands over `\${...}`
            value = resolved(value)
        assert same(got, value), key


def test_every_documented_command_is_there():
    documents = [command.where.split(":")[0].split("/")[-1] for command in COMMANDS]
    assert (len(documents), len({*documents})) == (47, 16)


# What NeMo-Aligner 0.7.0's YAML files have and ours do not, or otherwise. Those of its last
# revision are the same without gradient_clip_val, overlap_param_sync and SFT's
# context_parallel_size.
_SIZES = "${multiply:${model.tensor_model_parallel_size}, ${model.pipeline_model_parallel_size}}"
_PARALLEL_SIZE = "exp_manager.checkpoint_callback_params.model_parallel_size"


def training(section):
    keys = {"trainer.devices": 8, "trainer.accelerator": "gpu", _PARALLEL_SIZE: _SIZES}
    keys |= {"exp_manager.explicit_log_dir": "/results", "model.optim.overlap_param_sync": False}
    clip = f"${{trainer.{section}.gradient_clip_val}}"
    return keys | {"trainer.gradient_clip_val": clip}


# Of the jobs that began as NeMo's own.
_OF_NEMO = {"trainer.accelerator": "gpu", "model.restore_from_path": "???"}
_OF_NEMO |= {"model.resume_from_checkpoint": None, "model.save_nemo_on_validation_end": True}
_OF_NEMO |= {"model.sync_batch_comm": False}
_OF_NEMO |= {"model.activations_checkpoint_layers_per_pipeline": None}
_OF_NEMO |= {"model.answer_only_loss": False, "model.gradient_as_bucket_view": False}
_OF_NEMO |= {"model.seq_len_interpolation_factor": None, "model.use_flash_attention": None}
_OF_NEMO |= {"model.ffn_dropout": 0.0}
_FOLDER_OF_NEMO = {
    "exp_manager.explicit_log_dir": None,
    _PARALLEL_SIZE: "${model.tensor_model_parallel_size}",
    "exp_manager.checkpoint_callback_params.save_best_model": False,
}
OLD_VALUES = {
    "gpt_ppo_actor": training("ppo")
    | {"trainer.num_nodes": 8, "model.ppo.entropy_bonus": 0.0, "model.ppo.ratio_eps": 0.2},
    "gpt_ppo_critic": training("ppo")
    | {
        "exp_manager.checkpoint_callback_params.save_nemo_on_train_end": True,
        "model.use_avg_pool": False,
        "model.reward_model_type": "binary_ranking",
        "model.regression.num_attributes": 1,
        "model.max_position_embeddings": "${.encoder_seq_length}",
    },
    "gpt_rs_actor": training("rs") | {"trainer.num_nodes": 8},
    "gpt_reinforce_actor": training("reinforce")
    | {"trainer.num_nodes": 8, "trainer.reinforce.use_absolute_kl": True},
    "training_rm": training("rm") | {"trainer.num_nodes": 8},
    "inference_rm": {
        "trainer.devices": 8,
        "trainer.accelerator": "gpu",
        "inference.inference_micro_batch_size": "${model.forward_micro_batch_size}",
    },
    "gpt_sft": _OF_NEMO
    | _FOLDER_OF_NEMO
    | {
        "trainer.gradient_clip_val": "${trainer.sft.gradient_clip_val}",
        "model.tensor_model_parallel_size": 1,
        "model.pipeline_model_parallel_size": 1,
        "model.context_parallel_size": 1,
        "model.megatron_amp_O2": False,
        "model.global_batch_size": "${.data.train_ds.global_batch_size}",
        "model.micro_batch_size": "${.data.train_ds.micro_batch_size}",
        "model.data.validation_ds.drop_last": True,
        "model.data.validation_ds.truncation_method": "right",
    },
    "gpt_dpo": training("dpo")
    | {
        "trainer.num_nodes": 8,
        "trainer.dpo.val_check_interval": 0.1,
        "model.data.pad_length_to_multiple_of": None,
        "precision": "${trainer.precision}",
    },
    "gpt_kto": training("kto")
    | {
        "trainer.num_nodes": 8,
        "trainer.kto.val_check_interval": 0.1,
        "model.kto.log_prob_forward_micro_batch_size": "${multiply:${model.micro_batch_size}, 2}",
        "precision": "${trainer.precision}",
    },
    "gpt_spin": training("spin")
    | {
        "trainer.num_nodes": 8,
        "trainer.precision": "bf16-mixed",
        "trainer.spin.val_check_interval": 0.1,
        "model.data.train_ds.prompt_template": None,
        "model.data.validation_ds.drop_last": True,
        "model.data.validation_ds.truncation_method": "right",
        "precision": "${trainer.precision}",
    },
    "gpt_knowledge_distillation": _FOLDER_OF_NEMO
    | {"trainer.accelerator": "gpu", "model.tensor_model_parallel_size": 1},
    "compute_topk_logits": _OF_NEMO
    | {
        "name": "megatron_gpt_infer_topk_logits",
        "model.global_batch_size": 1,
        "model.encoder_seq_length": 4096,
        "model.hidden_dropout": 0.0,
        "model.attention_dropout": 0.0,
    },
}
NODES = "trainer.num_nodes"
# What ours have and NeMo-Aligner's do not.
_ARCHITECTURE = """model.num_layers model.hidden_size model.ffn_hidden_size
    model.num_attention_heads model.num_query_groups model.kv_channels model.normalization
    model.layernorm_epsilon model.activation model.position_embedding_type model.rotary_base
    model.rotary_percentage model.bias model.make_vocab_size_divisible_by model.init_method_std
    model.tokenizer model.virtual_pipeline_model_parallel_size"""
NEW_KEYS = {
    "gpt_ppo_actor": """trainer.ppo.ppo_epochs trainer.ppo.run_init_validation
        trainer.ppo.advantage_estimator trainer.ppo.kl_estimator trainer.ppo.adaptive_kl
        trainer.ppo.target_kl trainer.ppo.critic_gae_lambda trainer.ppo.advantage_clip
        trainer.ppo.reward_clip trainer.ppo.whiten_rewards trainer.ppo.overlong_buffer_len
        trainer.ppo.process_rewards
        trainer.ppo.overlong_penalty_factor trainer.ppo.ratio_eps trainer.ppo.entropy_bonus
        trainer.ppo.alarms remote_critic_rm.init_timeout_s remote_critic_rm.inference_timeout_s
        remote_critic_rm.reward_models exp_manager.max_time_per_run
        model.ppo.num_rollouts_per_prompt model.ppo.dual_clip model.ppo.kl_loss_coef
        model.ppo.kl_loss_estimator model.ppo.train_on_truncated model.ppo.loss_reduction""",
    "gpt_ppo_critic": """trainer.ppo.host trainer.ppo.alarms exp_manager.resume_from_checkpoint
        model.loss_reduction model.mcore_gpt model.sequence_parallel""",
    "gpt_rs_actor": """trainer.rs.run_init_validation trainer.rs.alarms remote_rm.init_timeout_s
        remote_rm.inference_timeout_s remote_rm.host remote_rm.port remote_rm.reward_models
        exp_manager.max_time_per_run model.rs.loss_reduction""",
    "gpt_reinforce_actor": """trainer.reinforce.run_init_validation trainer.reinforce.alarms
        remote_rm.init_timeout_s remote_rm.inference_timeout_s remote_rm.host remote_rm.port
        remote_rm.reward_models exp_manager.max_time_per_run model.reinforce.loss_reduction""",
    "training_rm": f"""trainer.rm.limit_train_batches trainer.rm.alarms {_ARCHITECTURE}
        model.hidden_dropout model.attention_dropout model.tensor_model_parallel_size
        model.pipeline_model_parallel_size model.context_parallel_size
        model.data.validation_drop_last""",
    "inference_rm": """inference.host inference.micro_batch_size inference.reward_fn
        inference.reward_fn_workers inference.reward_fn_timeout_s inference.reward_fn_fallback
        inference.rewards_per inference.step_end
        model.reward_model_type model.regression.num_attributes model.tokenizer""",
    "gpt_sft": f"""trainer.sft.alarms exp_manager.max_time_per_run
        exp_manager.resume_from_checkpoint model.mcore_gpt model.max_position_embeddings
        exp_manager.checkpoint_callback_params.always_save_nemo model.loss_reduction
        model.precision {_ARCHITECTURE} model.share_embeddings_and_output_weights
        model.peft.restore_from_ckpt model.optim.bucket_cap_mb model.optim.overlap_grad_sync
        model.optim.contiguous_grad_buffer model.data.dataloader_type""",
    "gpt_dpo": """trainer.dpo.alarms model.dpo.label_smoothing model.dpo.ref_log_probs_dir
        model.encoder_seq_length model.max_position_embeddings model.sequence_parallel
        model.precision model.data.validation_drop_last""",
    "gpt_kto": """trainer.kto.alarms model.kto.ref_log_probs_dir model.encoder_seq_length
        model.max_position_embeddings model.sequence_parallel model.precision
        model.data.validation_drop_last""",
    "gpt_spin": """trainer.spin.alarms model.spin.preference_average_log_probs
        model.spin.generation model.peft model.encoder_seq_length model.max_position_embeddings
        model.sequence_parallel model.data.dataloader_type""",
    "gpt_knowledge_distillation": """trainer.knowledge_distillation.alarms
        exp_manager.max_time_per_run exp_manager.resume_from_checkpoint
        exp_manager.checkpoint_callback_params.always_save_nemo model.loss_reduction
        model.knowledge_distillation.jsd_beta model.knowledge_distillation.outside_top_k
        model.encoder_seq_length model.max_position_embeddings model.sequence_parallel
        model.precision model.peft.restore_from_ckpt model.data.columns
        model.data.validation_drop_last model.optim.bucket_cap_mb
        model.optim.overlap_grad_sync model.optim.contiguous_grad_buffer""",
    "compute_topk_logits": """trainer.hang_timeout_s model.dynamic_micro_batch_tokens
        model.context_parallel_size
        model.expert_model_parallel_size model.precision data.chat_template data.data.columns""",
}
_DATA = "model.data.data_prefix={train: [a.jsonl], validation: [b.jsonl], test: [c.jsonl]}"
_START = "pretrained_checkpoint.restore_from_path={model}"
_FILES = [f"model.data.{split}.file_path=a.jsonl" for split in ("train_ds", "validation_ds")]
JOBS = {  # script, what a user must give, notes
    "gpt_ppo_actor": ("train_gpt_ppo_actor", [_START, _DATA], []),
    "gpt_ppo_critic": (
        "serve_ppo_critic",
        [_START],
        ["exp_manager.checkpoint_callback_params.save_nemo_on_train_end=True"],
    ),
    "gpt_rs_actor": ("train_gpt_rs_actor", [_START, _DATA], []),
    "gpt_reinforce_actor": ("train_gpt_reinforce_actor", [_START, _DATA], []),
    "training_rm": ("train_reward_model", [_START, _DATA], []),
    "inference_rm": ("serve_reward_model", ["rm_model_file={model}"], []),
    "gpt_sft": (
        "train_gpt_sft",
        ["model.restore_from_path={model}", *_FILES],
        ["model.save_nemo_on_validation_end=True", "model.answer_only_loss=False"],
    ),
    "gpt_dpo": ("train_gpt_dpo", [_START, _DATA], []),
    "gpt_kto": ("train_gpt_kto", [_START, _DATA], []),
    "gpt_spin": ("train_gpt_spin", [_START, *_FILES], []),
    "gpt_knowledge_distillation": ("train_gpt_knowledge_distillation", [_START, _DATA], []),
    "compute_topk_logits": (
        "../synthetic_data_gen/compute_topk_logits",
        [_START, "data.data.file_path=a.jsonl", "output_path=b.jsonl"],
        ["model.save_nemo_on_validation_end=True"],
    ),
}


def old_yaml(name):
    """A YAML file of NeMo-Aligner, from ours and the differences."""
    cfg = complete_config({}, name)
    for key in NEW_KEYS[name].split():
        parent, _, leaf = key.rpartition(".")
        del OmegaConf.select(cfg, parent)[leaf]
    for key, value in OLD_VALUES[name].items():
        OmegaConf.update(cfg, key, value, force_add=True)
    if name in SECTIONS:
        cfg.defaults = [{"optional tp_overlap@model.ub_tp_comm_overlap_cfg": None}]
    return cfg


@some_of("name", JOBS, keep=2)
def test_a_yaml_file_of_nemo_aligner_is_accepted_unchanged(name, run, tmp_path):
    script, given, notes = JOBS[name]
    old = old_yaml(name)
    folder = tmp_path / "aligner_conf"
    folder.mkdir()
    OmegaConf.save(old, folder / f"{name}.yaml")

    one = ["trainer.devices=1", "trainer.num_nodes=1"]
    ended = run(script, [f"--config-path={folder}", f"--config-name={name}", *given, *one])

    assert not isinstance(ended, str), ended
    cfg, noted = ended
    assert [note.split(": ")[0] for note in noted] == notes
    ours = complete_config({}, name)
    for key in NEW_KEYS[name].split():  # today's defaults; architecture comes from the checkpoint
        default = OmegaConf.select(ours, key)
        given_whole = key.startswith("model.optim.")  # an optimizer is never mixed with ours
        if default is not None and not OmegaConf.is_config(default) and not given_whole:
            assert OmegaConf.select(cfg, key) == default, key
    for key, value in OLD_VALUES[name].items():
        if isinstance(value, (bool, int, float)) and key not in ("trainer.devices", NODES):
            assert OmegaConf.select(cfg, key) == value, key
