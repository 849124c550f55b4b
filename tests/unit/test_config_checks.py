# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The checks of a configuration: which keys are known, and which values can work together."""

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nemo_aligner.config import parallel_rules
from nemo_aligner.config import schema as config_schema
from nemo_aligner.config.checks import check_config, unknown_keys
from nemo_aligner.config.defaults import complete_config, drop_unset
from nemo_aligner.config.inert_keys import INERT
from nemo_aligner.config.parallel_rules import (
    check_accelerator,
    check_architecture,
    count_ranks,
    default_precision,
)
from nemo_aligner.config.rules import PREFIX_DATA_JOBS, check_values, restore_key
from nemo_aligner.config.schema import CONFIG_NAMES
from nemo_aligner.config.values import plain_dict
from nemo_aligner.core.errors import ConfigError
from tests.cases import rows

CONF = Path(__file__).parents[2] / "conf"


def job_configuration(name, model, **changes):
    """The configuration `name` with what it requires, of which `model` is the path of its base."""
    files = {}
    if name in PREFIX_DATA_JOBS:
        splits = ("train", "validation", "test")
        files = {"model.data.data_prefix": {split: ["a.jsonl"] for split in splits}}
    elif name in ("gpt_sft", "gpt_spin"):
        splits = ("train_ds", "validation_ds")
        files = {f"model.data.{split}.file_path": "a.jsonl" for split in splits}
    cfg = complete_config({}, name)
    for key, value in {restore_key(name): str(model), **files, **changes}.items():
        OmegaConf.update(cfg, key, value, force_add=True)
    return cfg


def load(name, tmp_path, *overrides):
    """`job_configuration`, and dot-list overrides on top."""
    model = tmp_path / "model.nemo"
    model.touch()
    cfg = job_configuration(name, model)
    return OmegaConf.merge(cfg, OmegaConf.from_dotlist(list(overrides)))


def with_value(tree, key, value):
    """`tree`, nested dicts, with `value` at the dotted key; the dicts on the way are copies, and
    what is in the place of a section gives way.
    """
    name, _, rest = key.partition(".")
    below = tree.get(name) if isinstance(tree.get(name), dict) else {}
    return {**tree, name: with_value(below, rest, value) if rest else value}


def check(name, tmp_path, *overrides):
    return check_at_start(load(name, tmp_path, *overrides), name)


def check_at_start(cfg, name):
    return check_config(cfg, name, visible_devices=0, env={})


def check_with_checkpoint(cfg, name):
    """Once `cfg.model` holds what the checkpoint says."""
    check_values(cfg, name, complete=True, visible_devices=0, env={})


@pytest.mark.parametrize("name", CONFIG_NAMES)
def test_shipped_defaults_pass_without_a_note(name, tmp_path):
    assert check(name, tmp_path) == []


@pytest.mark.parametrize("name", ["mlflow", "dllogger", "clearml", "neptune", "wandb"])
def test_a_logger_whose_package_is_missing_is_refused(name, tmp_path, monkeypatch):
    key = f"exp_manager.create_{name}_logger"
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=f"^{key}=True needs the package {name}, which"):
        check("gpt_dpo", tmp_path, f"{key}=True")


# ---- keys


def test_all_unknown_keys_come_in_one_error(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer\.pop; model\.ppo\.foo\."):
        check("gpt_ppo_actor", tmp_path, "trainer.pop.x=1", "trainer.pop.y=2", "model.ppo.foo=1")


@pytest.mark.parametrize(
    ("name", "key", "nearest"),
    rows("""
gpt_ppo_actor -> trainer.ppo.initial_policy_kl_penality -> trainer.ppo.initial_policy_kl_penalty
gpt_ppo_actor -> model.ppo.num_rollout_sample -> model.ppo.num_rollout_samples
gpt_ppo_actor -> model.rollout_micro_batch_size -> model.ppo.rollout_micro_batch_size
gpt_ppo_actor -> model.restore_from_path -> pretrained_checkpoint.restore_from_path
gpt_sft -> model.lerning_rate -> model.optim.lr
gpt_sft -> batch_size -> model.global_batch_size
gpt_sft -> modle -> model
gpt_sft -> trainer.max_step -> trainer.sft.max_steps
gpt_sft -> pretrained_checkpoint.restore_from_path -> model.restore_from_path
gpt_sft -> trainer.sfft -> trainer.sft
gpt_sft -> zzz ->
gpt_sft -> trainer.learner ->
"""),
)
def test_an_unknown_key_is_named_with_the_nearest_if_one_is_near(name, key, nearest):
    (note,) = unknown_keys(plain_dict(OmegaConf.from_dotlist([f"{key}=1"])), name)
    found = re.search(r" \(did you mean ([\w.]+), (\S+):(\d+)\?\)$", note)
    if key == "batch_size":  # the YAML does not show the nearest
        assert note.endswith(f" (did you mean {nearest}?)")
    elif not nearest:
        assert note.endswith(key)
    else:
        assert found[1] == nearest
        line = Path(found[2]).read_text().splitlines()[int(found[3]) - 1]
        assert line.strip().startswith(nearest.rpartition(".")[2] + ":")


def test_notes_are_one_grouped_warning(tmp_path, monkeypatch):
    import nemo.utils

    said = []
    monkeypatch.setattr(nemo.utils.logging, "warning", said.append)
    given = "model.enable_nge=True", "trainer.ppo.flask_server.enable=True"
    check("gpt_ppo_actor", tmp_path, *given)
    assert len(said) == 1
    assert "model.enable_nge" in said[0] and "trainer.ppo.flask_server" in said[0]


@pytest.mark.parametrize(
    ("name", "overrides", "note"),
    [
        ("gpt_ppo_actor", ["exp_manager=null"], "writes no logs, no metrics and no checkpoints"),
        ("gpt_sft", ["model.answer_only_loss=False"], "set it to True for that"),
        ("gpt_sft", ["model.data.sample=True"], "raise trainer.sft.max_epochs"),
        ("gpt_rs_actor", ["trainer.gradient_clip_val=0.5"], "trainer.<algorithm>"),
    ],
)
def test_what_means_something_else_is_accepted_with_a_note(name, overrides, note, tmp_path):
    (said,) = check(name, tmp_path, *overrides)
    assert note in said


def test_keys_of_a_checkpoint_are_not_checked_in_jobs_that_do_not_read_them(tmp_path):
    for name in ("gpt_sft", "gpt_ppo_critic"):
        given = "model.data.seq_length=9999", "model.num_layers=2", "model.a_key=1"
        cfg = load(name, tmp_path, *given)
        check_with_checkpoint(cfg, name)


@pytest.mark.parametrize("name", CONFIG_NAMES)
def test_no_key_is_both_live_and_inert(name):
    inert = INERT[name]
    for key in config_schema.LIVE[name]:
        parts = key.split(".")
        above = {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
        assert not above & set(inert), key


def test_exp_manager_keys_are_those_of_nemo():
    from dataclasses import fields

    from nemo.utils.exp_manager import CallbackParams, ExpManagerConfig

    known = config_schema.LIVE["gpt_ppo_actor"] | set(INERT["gpt_ppo_actor"])
    known = {key for key in known if key.startswith("exp_manager.")}
    ours = {f"exp_manager.{field.name}" for field in fields(ExpManagerConfig)} - {
        "exp_manager.checkpoint_callback_params"
    }
    section = "exp_manager.checkpoint_callback_params"
    ours |= {f"{section}.{field.name}" for field in fields(CallbackParams)}
    assert known - {"exp_manager.prometheus_address"} == ours


# ---- values


@pytest.mark.parametrize(
    ("gpus", "accelerator", "precision"), [(0, "auto", 32), (2, "auto", "bf16"), (2, "cpu", 32)]
)
def test_the_default_precision_goes_by_the_device(gpus, accelerator, precision, monkeypatch):
    monkeypatch.setattr(parallel_rules, "cuda_devices", lambda: gpus)
    assert default_precision(accelerator) == precision


@pytest.mark.parametrize(
    ("devices", "nodes", "visible", "env", "ranks"),
    [
        (2, 1, 0, {}, 2),
        ("2", 3, 0, {}, 6),
        ([0, 3], 1, 4, {}, 2),
        ("0,3,4", 1, 8, {}, 3),
        ("auto", 2, 8, {}, 16),
        (-1, 1, 0, {}, 1),
        (1, 1, 0, {"RANK": "0", "WORLD_SIZE": "4"}, 4),  # torchrun decides
        (2, 1, 0, {"WORLD_SIZE": "4"}, 2),  # a left-over variable does not
    ],
)
def test_count_ranks(devices, nodes, visible, env, ranks):
    assert count_ranks(devices, nodes, visible, env) == ranks


def test_accelerator():
    check_accelerator("auto", 2, 0)
    check_accelerator("gpu", 2, 2)
    said = r"trainer\.accelerator=gpu, but PyTorch sees no CUDA.*accelerator=auto"
    with pytest.raises(ConfigError, match=said):
        check_accelerator("gpu", 1, 0)
    with pytest.raises(ConfigError, match="is 2; set trainer.devices=2"):
        check_accelerator("auto", 8, 2)
    with pytest.raises(ConfigError, match="'tpu'"):
        check_accelerator("tpu", 1, 0)


# By the job: overrides with `; ` between them, and what the error says. Types and bounds of all
# keys: test_config_values.py.
REFUSED = {
    "gpt_ppo_actor": rows(r"""
model.global_batch_size=5; model.micro_batch_size=2 -> model.global_batch_size=5 .* use 4 or 6
model.global_batch_size=1; model.micro_batch_size=2 -> model.global_batch_size=1 .* use 2,
trainer.devices=8; model.tensor_model_parallel_size=2; model.pipeline_model_parallel_size=3 ->
    = 6 does not divide the 8 ranks
trainer.devices=4; model.context_parallel_size=2; model.global_batch_size=6;
    model.micro_batch_size=2; model.tensor_model_parallel_size=1;
    model.pipeline_model_parallel_size=1 ->
    a multiple of 4 \(model.micro_batch_size=2 x data parallel size=2\); use 4 or 8
model.data.seq_length=9999 -> model.data.seq_length=9999 is above .*=4096
model.ppo.num_rollout_samples=500 -> rollout_micro_batch_size=8\); use 496 or 504
model.ppo.num_rollout_samples=72 -> multiple of 64 \(model.global_batch_size=64\)
model.ppo.num_val_samples=12 -> model.ppo.num_val_samples=12
model.ppo.length_params.max_length=4096 -> max_length=4096 leaves no room for a prompt
model.ppo.length_params.min_length=3000 -> min_length=3000 is above .*max_length=2048
model.dynamic_micro_batch_tokens=512; model.ppo.loss_reduction=microbatch ->
    model.dynamic_micro_batch_tokens=512 makes micro-batches of similar samples, but
    model.ppo.loss_reduction=microbatch depends on which samples share one; use token or
trainer.ppo.model_gbs=32 -> model_gbs=32 and model.global_batch_size=64 must be the same
pretrained_checkpoint.restore_from_path=null -> restore_from_path is not set
model.data.data_prefix=null -> data_prefix is not set; give the data files
model.tensor_model_parallel_size=2 -> = 2 does not divide the 1 rank of
model.moe_grouped_gemm=True -> moe_grouped_gemm=True is not supported here
model.expert_model_parallel_size=2; trainer.ppo.batch_iterator.use_flask=True -> use_flask=True
    does not work with model.expert_model_parallel_size=2
trainer.accelerator=gpu -> no CUDA device
model.seed=${model.sead} -> reference that cannot be resolved
remote_critic_rm.reward_model.port=[5555,0] -> port=\[5555, 0\]: 0 is not a TCP port
remote_critic_rm.combine_rm_and_critic_server=True; remote_critic_rm.reward_models.a.ip=localhost;
    remote_critic_rm.reward_models.a.port=5555 -> combine_rm_and_critic_server=True has the critic
    server score rewards; set it to False
model.data.chat=True; model.data.chat_template=tokenizer -> set one
model.data.chat_template=nowhere.jinja -> model.data.chat_template=nowhere.jinja does not exist;
    give tokenizer
remote_critic_rm.token_file=/none -> /none cannot be read
"""),
    "training_rm": rows(r"""
model.optim.name=lamb -> model.optim.name='lamb' is not supported .*has Adam and SGD only\)
model.optim.sched.name=CyclicLR -> 'CyclicLR' is not supported \(it changes the optim
pretrained_checkpoint.restore_from_path=null; model.peft.peft_scheme=lora; model.num_layers=2;
    model.hidden_size=32; model.num_attention_heads=4; model.tokenizer.library=huggingface;
    model.tokenizer.type=folder -> trains adapters of a checkpoint; name it in
    pretrained_checkpoint.restore_from_path
model.peft.peft_scheme=ia3 -> peft_scheme='ia3' must be one of lora, none
model.data.chat_template=tokenizer; model.data.append_eod=True -> append_eod=True contradicts
    model.data.chat_template=tokenizer
model.micro_batch_size=3 -> model.global_batch_size=64 must be a multiple of 3
pretrained_checkpoint.restore_from_path=null -> model.num_layers, .* are not set either
"""),
    "gpt_sft": rows(r"""
model.data.train_ds.add_sep=True -> add_sep=True is not supported yet
model.data.validation_ds.packed_sequence=True; model.context_parallel_size=2; trainer.devices=2 ->
    packed_sequence=True with model.context_parallel_size=2
model.data.train_ds.packed_sequence=True; model.data.train_ds.file_path=a.npy -> file_path=a.npy:
    files that were packed beforehand cannot be read
model.data.columns={input: 3} -> columns.input=3: give the name of a
model.data.validation_ds.micro_batch_size=3 -> model.data.validation_ds.global_batch_size=128
model.data.train_ds.max_seq_length=5000 -> max_seq_length=5000 is above
model.max_position_embeddings=8 -> encoder_seq_length=4096 is above model.max_position_embeddings=8
"""),
    "gpt_ppo_critic": rows(r"""
model.dynamic_micro_batch_tokens=512; model.num_moe_experts=4; model.moe_z_loss_coeff=0.1 -> the
    loss of model.moe_z_loss_coeff=0.1 depends on which samples share one; set one
trainer.ppo.host=10.0.0.1 -> host=10.0.0.1 .* needs a token
trainer.ppo.token_file=/none -> /none cannot be read
model.reward_standardization.enable=True -> model.reward_standardization.mean is not set
trainer.ppo.inference_micro_batch_size=[4,0] -> inference_micro_batch_size=\[4, 0\]
"""),
    "gpt_rs_actor": rows(r"""
model.rs.top_n_rollouts=5 -> top_n_rollouts=5 must be .*num_rollouts_per_prompt=4
model.rs.num_rollout_samples=24 -> num_rollout_samples=24 must be a multiple of 64
model.rs.num_rollout_samples=60 -> rollout_micro_batch_size=8\); use 56 or 64
remote_rm.port=-1 -> port=-1: -1 is not a TCP port
model.data.chat_template=tokenizer; model.data.data_impl=mmap -> data_impl=mmap holds tokens, which
    have no place for model.data.chat_template
model.data.columns=[a] -> columns=.'a'.: give a mapping
remote_rm.reward_model.ip=[a,b]; remote_rm.reward_model.port=[1,2,3] -> names 2 servers, but .* has
    3 ports
remote_rm.reward_model.ip=[] -> ip=\[\] .* names no server
model.rs.sampling_params.use_greedy=True -> 4 responses to a prompt would be the same
remote_rm.host=localhost:5555 -> give the host name or IP address alone
remote_rm.reward_models=5 -> reward_models=5 must map names to servers
remote_rm.reward_models.with_kl.port=5555 -> the name 'with_kl', which becomes part of
remote_rm.reward_models.a=5 -> reward_models.a=5 must be a section
remote_rm.reward_models.a.wieght=2 -> a has the unknown key wieght
remote_rm.reward_models.a.ip=b; remote_rm.reward_models.a.port=0 -> a.port=0: 0 is not a TCP port
"""),
    "inference_rm": rows(r"""
inference.host=0.0.0.0 -> host=0.0.0.0 .* needs a token
rm_model_file=null -> rm_model_file is not set
inference.reward_fn=a.py:f; rm_model_file=null -> needs the tokenizer of the policy
inference.reward_fn=a.py:f; trainer.devices=2 -> the job has 2 ranks; set trainer.dev
"""),
}


@pytest.mark.parametrize(
    "name, overrides, message",
    [(name, *case) for name, cases in REFUSED.items() for case in cases],
)
def test_bad_values_name_the_value_and_the_remedy(name, overrides, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        check(name, tmp_path, *overrides.split("; "))


def test_required_values_are_named(tmp_path):
    cfg = load("gpt_sft", tmp_path)
    cfg.model.data.train_ds.file_path = "???"
    with pytest.raises(ConfigError, match="Not set: model.data.train_ds.file_path; give a value"):
        check_at_start(cfg, "gpt_sft")


def test_a_job_that_keeps_nothing_says_so(tmp_path, monkeypatch):
    for override, why in (
        ("trainer.dpo.val_check_interval=0", "trainer.dpo.save_interval=0"),
        ("exp_manager.create_checkpoint_callback=False", "create_checkpoint_callback=False"),
    ):
        said = []
        monkeypatch.setattr("nemo.utils.logging.warning", said.append)
        check("gpt_dpo", tmp_path, override)
        assert why in said[0] and "neither a checkpoint nor a model" in said[0] and len(said) == 1
    assert check("gpt_ppo_critic", tmp_path, override) == []


def test_data_parallel_size_counts_once_it_is_known(tmp_path):
    overrides = ["trainer.devices=2", "model.global_batch_size=8"]
    overrides += ["model.ppo.num_rollout_samples=8", "model.ppo.num_val_samples=8"]
    cfg = load("gpt_ppo_actor", tmp_path, *overrides)
    check_at_start(cfg, "gpt_ppo_actor")  # TP=2 in the checkpoint would make DP=1
    with pytest.raises(ConfigError, match="data parallel size=2"):
        check_with_checkpoint(cfg, "gpt_ppo_actor")
    cfg = load("gpt_ppo_actor", tmp_path, *overrides, "model.tensor_model_parallel_size=2")
    check_with_checkpoint(cfg, "gpt_ppo_actor")


def test_virtual_stages_need_whole_groups_of_micro_batches(tmp_path):
    sizes = ["tensor_model_parallel_size=1", "pipeline_model_parallel_size=2"]
    sizes += ["micro_batch_size=2", "num_layers=4"]
    overrides = ["trainer.devices=2", "model.global_batch_size=2"]
    overrides += [f"model.{size}" for size in sizes]
    check("training_rm", tmp_path, *overrides)
    with pytest.raises(ConfigError, match=r"multiple of 4 .*model.pipeline_model_parallel_size"):
        check("training_rm", tmp_path, *overrides, "model.virtual_pipeline_model_parallel_size=2")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_size": 30}, "model.hidden_size=30 must be a multiple of 4"),
        ({"num_query_groups": 3}, r"multiple of 3 \(model.num_query_groups=3\)"),
        ({"tensor_model_parallel_size": 8}, "tensor_model_parallel_size=8"),
        ({"num_query_groups": 1, "tensor_model_parallel_size": 2}, "model.num_query_groups=1"),
        ({"pipeline_model_parallel_size": 4}, "model.num_layers=2"),
        ({"virtual_pipeline_model_parallel_size": 2}, "needs model.pipeline_model_parallel_size"),
    ],
)
def test_architecture(overrides, message):
    good = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    check_architecture(good)
    with pytest.raises(ConfigError, match=message):
        check_architecture(good | overrides)


def test_old_yaml_may_refer_to_sizes_that_only_the_checkpoint_knows(tmp_path):
    old = "${multiply:${model.tensor_model_parallel_size},${model.pipeline_model_parallel_size}}"
    given = f"exp_manager.checkpoint_callback_params.model_parallel_size={old}"
    assert check("gpt_ppo_actor", tmp_path, given) == []


# ---- null architecture keys


def test_drop_unset_keeps_what_was_given(tmp_path):
    given = "model.num_layers=2 model.tokenizer.library=sentencepiece trainer.precision=bf16"
    cfg = load("gpt_sft", tmp_path, *given.split())
    model = drop_unset(cfg.model)
    assert model.num_layers == 2
    assert dict(model.tokenizer) == {"library": "sentencepiece"}
    assert "hidden_size" not in model and "tensor_model_parallel_size" not in model
    assert model.activations_checkpoint_granularity is None  # null means "off" there
    assert model.precision == "bf16"  # an interpolation to a key outside of `model`
    assert "hidden_size" in cfg.model  # the argument is left alone
    assert "tokenizer" not in drop_unset(load("gpt_sft", tmp_path).model)  # it would be empty


def test_a_checkpoint_may_have_the_experts_that_are_to_be_spread(tmp_path):
    """With all parallel sizes on the command line, and the architecture still in the file."""
    sizes = [f"model.{name}_model_parallel_size=1" for name in ("tensor", "pipeline")]
    experts = "model.expert_model_parallel_size=2"
    assert check("gpt_ppo_actor", tmp_path, *sizes, experts, "trainer.devices=2") == []
    with pytest.raises(ConfigError, match="expert_model_parallel_size=2 does not divide the 1 "):
        check("gpt_ppo_actor", tmp_path, *sizes, experts, "trainer.devices=1")
