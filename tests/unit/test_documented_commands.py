# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The commands that NeMo-Aligner documents, and its own YAML files, run through our scripts until
the job would start its processes.

The commands are in documented_commands.txt. Of the YAML files the tests hold only what differs
from `conf/`.
"""

import math
import runpy
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from nemo_aligner.config import checks
from nemo_aligner.config.defaults import CONF, complete_config
from nemo_aligner.config.rules import PREFIX_DATA_JOBS, SECTIONS, restore_key
from nemo_aligner.launch import job_entry, processes
from tests.cases import some_of

SCRIPTS = Path(__file__).parents[2] / "examples/nlp/gpt"

# The configuration in a `.nemo` of NeMo: a model of Llama's form, large enough for the parallel
# sizes of all commands, with the keys of pre-training that such a file carries along.
MODEL = """num_layers=32 hidden_size=4096 ffn_hidden_size=14336 num_attention_heads=32
    num_query_groups=8 normalization=rmsnorm bias=False activation=fast-swiglu
    position_embedding_type=rope share_embeddings_and_output_weights=False
    encoder_seq_length=8192 max_position_embeddings=8192 tensor_model_parallel_size=1
    pipeline_model_parallel_size=1 micro_batch_size=1 global_batch_size=128 precision=bf16
    mcore_gpt=True tokenizer.library=huggingface tokenizer.type=some/model
    data.data_impl=mmap data.splits_string='900,50,50' data.seq_length=8192
    optim.name=fused_adam optim.lr=2e-4 optim.sched.name=CosineAnnealing
    target=nemo.collections.nlp.models.language_modeling.megatron_gpt_model.MegatronGPTModel"""


class Started(BaseException):
    """The script has checked everything and is about to start its processes."""


@dataclass
class Command:
    where: str
    script: str
    arguments: list[str] = field(default_factory=list)
    refused: str | None = None
    notes: list[str] = field(default_factory=list)


DATA = "'{train: [/data/train.jsonl], validation: [/data/val.jsonl], test: [/data/val.jsonl]}'"


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
            commands[-1].arguments += shlex.split(line.replace("{data}", DATA))
    return commands


COMMANDS = read_commands()


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a script in this process, as `python script.py arguments` would, until it would start
    its processes; returns (configuration, notes), or the error that it printed.
    """
    model = tmp_path / "model.nemo"
    model.mkdir()
    OmegaConf.save(OmegaConf.from_dotlist(MODEL.split()), model / "model_config.yaml")
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


def settings(text):
    """Of `key=value` words."""
    words = (word.partition("=") for word in text.split())
    return {key: yaml.safe_load(value) for key, _, value in words}


# What NeMo-Aligner 0.7.0's YAML files have and ours do not, or otherwise. Those of its last
# revision are the same without gradient_clip_val, overlap_param_sync and SFT's
# context_parallel_size.
_CALLBACK = "exp_manager.checkpoint_callback_params"
_TENSOR, _PIPELINE = (f"${{model.{kind}_model_parallel_size}}" for kind in ("tensor", "pipeline"))


def training(section, nodes=8):
    return f"""trainer.devices=8 trainer.num_nodes={nodes} trainer.accelerator=gpu
        {_CALLBACK}.model_parallel_size=${{multiply:{_TENSOR},{_PIPELINE}}}
        exp_manager.explicit_log_dir=/results model.optim.overlap_param_sync=False
        trainer.gradient_clip_val=${{trainer.{section}.gradient_clip_val}} """


def preferences(section):
    return f"""{training(section)} trainer.{section}.val_check_interval=0.1
        precision=${{trainer.precision}} """


# Of the jobs that began as NeMo's own.
_OF_NEMO = """trainer.accelerator=gpu model.restore_from_path=???
    model.resume_from_checkpoint=null model.save_nemo_on_validation_end=True
    model.sync_batch_comm=False model.activations_checkpoint_layers_per_pipeline=null
    model.answer_only_loss=False model.gradient_as_bucket_view=False model.ffn_dropout=0.0
    model.seq_len_interpolation_factor=null model.use_flash_attention=null """
_FOLDER_OF_NEMO = f"""exp_manager.explicit_log_dir=null {_CALLBACK}.save_best_model=False
    {_CALLBACK}.model_parallel_size={_TENSOR} """
_VALIDATION = """model.data.validation_ds.drop_last=True
    model.data.validation_ds.truncation_method=right """
OLD_VALUES = {
    "gpt_ppo_actor": training("ppo") + "model.ppo.entropy_bonus=0.0 model.ppo.ratio_eps=0.2",
    "gpt_ppo_critic": training("ppo", nodes=1)
    + f"""{_CALLBACK}.save_nemo_on_train_end=True model.use_avg_pool=False
        model.reward_model_type=binary_ranking model.regression.num_attributes=1
        model.max_position_embeddings=${{.encoder_seq_length}}""",
    "gpt_rs_actor": training("rs"),
    "gpt_reinforce_actor": training("reinforce") + "trainer.reinforce.use_absolute_kl=True",
    "training_rm": training("rm"),
    "inference_rm": """trainer.devices=8 trainer.accelerator=gpu
        inference.inference_micro_batch_size=${model.forward_micro_batch_size}""",
    "gpt_sft": _OF_NEMO
    + _FOLDER_OF_NEMO
    + _VALIDATION
    + """trainer.gradient_clip_val=${trainer.sft.gradient_clip_val}
        model.tensor_model_parallel_size=1 model.pipeline_model_parallel_size=1
        model.context_parallel_size=1 model.megatron_amp_O2=False
        model.global_batch_size=${.data.train_ds.global_batch_size}
        model.micro_batch_size=${.data.train_ds.micro_batch_size}""",
    "gpt_dpo": preferences("dpo") + "model.data.pad_length_to_multiple_of=null",
    "gpt_kto": preferences("kto")
    + "model.kto.log_prob_forward_micro_batch_size=${multiply:${model.micro_batch_size},2}",
    "gpt_spin": preferences("spin")
    + _VALIDATION
    + "trainer.precision=bf16-mixed model.data.train_ds.prompt_template=null",
    "gpt_knowledge_distillation": _FOLDER_OF_NEMO
    + "trainer.accelerator=gpu model.tensor_model_parallel_size=1",
    "compute_topk_logits": _OF_NEMO
    + """name=megatron_gpt_infer_topk_logits model.global_batch_size=1
        model.encoder_seq_length=4096 model.hidden_dropout=0.0 model.attention_dropout=0.0""",
}
# What ours have and NeMo-Aligner's do not.
_ARCHITECTURE = """model.num_layers model.hidden_size model.ffn_hidden_size
    model.num_attention_heads model.num_query_groups model.kv_channels model.normalization
    model.layernorm_epsilon model.activation model.position_embedding_type model.rotary_base
    model.rotary_percentage model.bias model.make_vocab_size_divisible_by model.init_method_std
    model.tokenizer model.virtual_pipeline_model_parallel_size"""
_ROLLOUTS = """trainer.{0}.run_init_validation trainer.{0}.alarms exp_manager.max_time_per_run
    {1}.init_timeout_s {1}.inference_timeout_s {1}.reward_models model.{0}.loss_reduction """
_PREFERENCES = """trainer.{0}.alarms model.{0}.ref_log_probs_dir model.encoder_seq_length
    model.max_position_embeddings model.sequence_parallel model.precision
    model.data.validation_drop_last """
_SUPERVISED = """trainer.{0}.alarms exp_manager.max_time_per_run model.max_position_embeddings
    exp_manager.resume_from_checkpoint model.peft.restore_from_ckpt model.loss_reduction
    exp_manager.checkpoint_callback_params.always_save_nemo model.precision
    model.optim.bucket_cap_mb model.optim.overlap_grad_sync model.optim.contiguous_grad_buffer """
NEW_KEYS = {
    "gpt_ppo_actor": _ROLLOUTS.format("ppo", "remote_critic_rm")
    + """trainer.ppo.ppo_epochs trainer.ppo.advantage_estimator trainer.ppo.kl_estimator
        trainer.ppo.adaptive_kl trainer.ppo.target_kl trainer.ppo.critic_gae_lambda
        trainer.ppo.advantage_clip trainer.ppo.reward_clip trainer.ppo.whiten_rewards
        trainer.ppo.overlong_buffer_len trainer.ppo.overlong_penalty_factor
        trainer.ppo.process_rewards trainer.ppo.ratio_eps trainer.ppo.entropy_bonus
        model.ppo.num_rollouts_per_prompt model.ppo.dual_clip model.ppo.kl_loss_coef
        model.ppo.kl_loss_estimator model.ppo.train_on_truncated""",
    "gpt_ppo_critic": """trainer.ppo.host trainer.ppo.alarms exp_manager.resume_from_checkpoint
        model.loss_reduction model.mcore_gpt model.sequence_parallel""",
    "gpt_rs_actor": _ROLLOUTS.format("rs", "remote_rm") + "remote_rm.host remote_rm.port",
    "gpt_reinforce_actor": _ROLLOUTS.format("reinforce", "remote_rm")
    + "remote_rm.host remote_rm.port",
    "training_rm": f"""trainer.rm.limit_train_batches trainer.rm.alarms {_ARCHITECTURE}
        model.hidden_dropout model.attention_dropout model.tensor_model_parallel_size
        model.pipeline_model_parallel_size model.context_parallel_size
        model.data.validation_drop_last""",
    "inference_rm": """inference.host inference.micro_batch_size inference.reward_fn
        inference.reward_fn_workers inference.reward_fn_timeout_s inference.reward_fn_fallback
        inference.rewards_per inference.step_end
        model.reward_model_type model.regression.num_attributes model.tokenizer""",
    "gpt_sft": _SUPERVISED.format("sft")
    + f"""{_ARCHITECTURE} model.share_embeddings_and_output_weights model.mcore_gpt
        model.data.dataloader_type""",
    "gpt_dpo": _PREFERENCES.format("dpo") + "model.dpo.label_smoothing",
    "gpt_kto": _PREFERENCES.format("kto"),
    "gpt_spin": """trainer.spin.alarms model.spin.preference_average_log_probs
        model.spin.generation model.peft model.encoder_seq_length model.max_position_embeddings
        model.sequence_parallel model.data.dataloader_type""",
    "gpt_knowledge_distillation": _SUPERVISED.format("knowledge_distillation")
    + """model.knowledge_distillation.jsd_beta model.knowledge_distillation.outside_top_k
        model.encoder_seq_length model.sequence_parallel model.data.columns
        model.data.validation_drop_last""",
    "compute_topk_logits": """trainer.hang_timeout_s model.dynamic_micro_batch_tokens
        model.context_parallel_size
        model.expert_model_parallel_size model.precision data.chat_template data.data.columns""",
}
DEVICES = "trainer.devices", "trainer.num_nodes"
OTHER_SCRIPTS = {
    "gpt_ppo_critic": "serve_ppo_critic",
    "training_rm": "train_reward_model",
    "inference_rm": "serve_reward_model",
    "compute_topk_logits": "../synthetic_data_gen/compute_topk_logits",
}
NOTES = {
    "gpt_ppo_critic": [f"{_CALLBACK}.save_nemo_on_train_end=True"],
    "gpt_sft": ["model.save_nemo_on_validation_end=True", "model.answer_only_loss=False"],
    "compute_topk_logits": ["model.save_nemo_on_validation_end=True"],
}


def required(name):
    """What a user must give."""
    files = []
    if name in PREFIX_DATA_JOBS:
        files = ["model.data.data_prefix={train: [a.jsonl], validation: [b], test: [c]}"]
    elif name in ("gpt_sft", "gpt_spin"):
        files = [f"model.data.{split}.file_path=a" for split in ("train_ds", "validation_ds")]
    elif name == "compute_topk_logits":
        files = ["data.data.file_path=a.jsonl", "output_path=b.jsonl"]
    return [f"{restore_key(name)}={{model}}", *files]


def old_yaml(name):
    """A YAML file of NeMo-Aligner, from ours and the differences."""
    cfg = complete_config({}, name)
    for key in NEW_KEYS[name].split():
        parent, _, leaf = key.rpartition(".")
        del OmegaConf.select(cfg, parent)[leaf]
    for key, value in settings(OLD_VALUES[name]).items():
        OmegaConf.update(cfg, key, value, force_add=True)
    if name in SECTIONS:
        cfg.defaults = [{"optional tp_overlap@model.ub_tp_comm_overlap_cfg": None}]
    return cfg


@some_of("name", OLD_VALUES, keep=2)
def test_a_yaml_file_of_nemo_aligner_is_accepted_unchanged(name, run, tmp_path):
    OmegaConf.save(old_yaml(name), tmp_path / f"{name}.yaml")
    words = [f"--config-path={tmp_path}", f"--config-name={name}", *required(name)]
    words += [f"{key}=1" for key in DEVICES]
    ended = run(OTHER_SCRIPTS.get(name, f"train_{name}"), words)

    assert not isinstance(ended, str), ended
    cfg, noted = ended
    assert [note.split(": ")[0] for note in noted] == NOTES.get(name, [])
    ours = complete_config({}, name)
    for key in NEW_KEYS[name].split():  # today's defaults; architecture comes from the checkpoint
        default = OmegaConf.select(ours, key)
        given_whole = key.startswith("model.optim.")  # an optimizer is never mixed with ours
        if default is not None and not OmegaConf.is_config(default) and not given_whole:
            assert OmegaConf.select(cfg, key) == default, key
    for key, value in settings(OLD_VALUES[name]).items():
        if isinstance(value, (bool, int, float)) and key not in DEVICES:
            assert OmegaConf.select(cfg, key) == value, key
