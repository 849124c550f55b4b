# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Megatron-LM and Megatron-Bridge: a model that loads one computes what the GPT of
Megatron Core computes that wrote it, and Megatron Core loads what is written in their form.
"""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import yaml
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from omegaconf import OmegaConf

from nemo_aligner.checkpoint import megatron, megatron_keys, sources
from nemo_aligner.convert.__main__ import main
from nemo_aligner.core.errors import UserError
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from tests import megatron_folders, nemo_files
from tests.tiny_models import tiny_config

pytestmark = pytest.mark.slow

TABLES = ("model.embedding.word_embeddings.weight", "model.output_layer.weight")
TOKENS = torch.randint(0, 290, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=["llama", "gpt2", "moe"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def source(kind):
    """A model of Megatron Core."""
    return megatron_folders.gpt(kind)


@pytest.fixture(scope="module")
def root(kind, source, tmp_path_factory):
    """What Megatron-LM writes of it."""
    folder = tmp_path_factory.mktemp(kind) / "checkpoints"
    megatron_folders.save(source, folder, {"args": megatron_folders.args_of(kind)})
    return folder


def restored(path, tokenizer):
    """The model in a checkpoint, whose initial weights differ from those in it."""
    cfg = sources.read_config(path)
    own = {"seed": 99, "tokenizer": {"library": "huggingface", "type": tokenizer}}
    return MegatronGPTModel.restore_from(path, override_config_path=OmegaConf.merge(cfg, own))


def assert_same_logits(path, source, tokenizer):
    model = restored(path, tokenizer)
    model.set_eval()
    positions = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
    with torch.no_grad():
        found = model.unwrapped()[0](TOKENS, positions, None)
    expected = megatron_folders.logits(source, TOKENS)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    return model


def test_megatron_lm(source, root, tiny_tokenizer_dir):
    for path in (root, root / "iter_0000010"):
        model = assert_same_logits(path, source, tiny_tokenizer_dir)
    assert model.padded_vocab_size == megatron_folders.PADDED


def test_megatron_bridge(kind, source, tiny_tokenizer_dir, tmp_path):
    config = megatron_folders.bridge_config(kind)
    folder = megatron_folders.save_bridge(source, tmp_path, tiny_tokenizer_dir, config)
    model = assert_same_logits(tmp_path, source, str(folder / "tokenizer"))
    cfg = sources.read_config(tmp_path)
    assert cfg.tokenizer.type == str(folder / "tokenizer")
    assert model.tokenizer.vocab_size == megatron_folders.IDS < model.padded_vocab_size


@pytest.mark.parametrize("sizes", [{}, {"tp": 2, "pp": 2}, {"pp": 2, "virtual": 2}])
def test_files_of_each_rank(kind, source, tiny_tokenizer_dir, tmp_path, sizes):
    args = megatron_folders.args_of(kind)
    folder = megatron_folders.save_ranks(source, tmp_path, args, **sizes)
    if kind == "moe":
        with pytest.raises(UserError, match="has experts in files of each rank.*torch_dist"):
            restored(tmp_path, tiny_tokenizer_dir)
        return
    assert_same_logits(tmp_path, source, tiny_tokenizer_dir)
    keys = whole_weights(tmp_path).keys()
    assert ("model.output_layer.weight" in keys) == (kind == "llama")
    last = max(folder.iterdir())
    shutil.rmtree(last)
    with pytest.raises(UserError, match="lacks .*_rng.pt of .*stage 1" if sizes else ""):
        restored(tmp_path, tiny_tokenizer_dir)


def whole_weights(path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, by its name without numbers where layers are alike."""
    with sources.open_source(path).own_tensors() as source:
        shapes = source.shapes()
        return {k: source.read(k, tuple(slice(0, n) for n in s)) for k, s in shapes.items()}


def test_to_megatron_and_back(kind, source, root, tiny_tokenizer_dir, tmp_path, capsys):
    target = tmp_path / "again"
    command = ["to-megatron", str(root), str(target), "--quiet", "--tokenizer", tiny_tokenizer_dir]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert f"--load {target} --finetune --use-checkpoint-args" in printed
    assert ("--norm-epsilon 1e-06" in printed) == (kind != "gpt2")
    before, after = whole_weights(root), whole_weights(target)
    assert before.keys() == after.keys() and before
    assert all(torch.equal(before[key], after[key]) for key in before)
    # Megatron Core reads it with its own reader, strictly.
    alike = {"moe_layer_freq": 1} if kind == "moe" else {}
    model = megatron_folders.gpt(kind, **alike)
    for value in model.parameters():
        value.data.zero_()
    wanted = {"model": model.sharded_state_dict()}
    loaded = dist_checkpointing.load(wanted, str(target / "release"))
    model.load_state_dict(loaded["model"])
    expected = megatron_folders.logits(source, TOKENS)
    assert torch.equal(megatron_folders.logits(model, TOKENS), expected)
    args, given = loaded["args"], megatron_folders.args_of(kind)
    differ = {k: v for k, v in vars(given).items() if k in args and getattr(args, k) != v}
    others = "vocab_size", "num_query_groups", "bias_gelu_fusion", "moe_layer_freq"
    assert differ.keys() <= {"tokenizer_model", *others}
    assert args.tokenizer_model == str(target / "release" / "tokenizer")


def test_hugging_face_and_back(kind, root, tiny_tokenizer_dir, tmp_path):
    def convert(command, source, target, *more):
        command = [command, str(source), str(tmp_path / target), "--quiet", *more]
        assert main(command) == 0
        return tmp_path / target

    first = convert("nemo-to-hf", root, "hf", "--tokenizer", tiny_tokenizer_dir)
    config = json.loads((first / "config.json").read_text())
    assert config["vocab_size"] == megatron_folders.IDS  # no padding there
    assert config["model_type"] == {"llama": "llama", "gpt2": "gpt2", "moe": "qwen3_moe"}[kind]
    again = convert("to-megatron", first, "again")
    before, after = whole_weights(root), whole_weights(again)
    assert before.keys() == after.keys()
    for key, value in before.items():
        rows = megatron_folders.IDS if key in TABLES else len(value)
        assert torch.equal(value[:rows], after[key][:rows]) and value.shape == after[key].shape
        assert not after[key][rows:].any()
    second = convert("nemo-to-hf", again, "hf2")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


@pytest.mark.parametrize(
    "kind, args, named",
    [
        ("llama", {"quick_geglu": True}, "args.quick_geglu=True"),
        ("llama", {"spec": ["mine", "other_spec"]}, r"args.spec=\['mine', 'other_spec'\]"),
        ("llama", {"qk_l2_norm": True}, "args.qk_l2_norm=True"),
        ("llama", {"normalization": "L2Norm"}, "args.normalization='L2Norm'"),
        ("moe", {"moe_expert_capacity_factor": 1.5}, "args.moe_expert_capacity_factor=1.5"),
        ("moe", {"moe_router_load_balancing_type": "sinkhorn"}, "args.moe_router_load_bal"),
    ],
)
def test_what_would_change_the_model_is_refused_by_name(kind, args, named):
    given = vars(megatron_folders.args_of(kind, **args))
    refusal = megatron._refusal("root: args")
    with pytest.raises(UserError, match=f"^root: {named}.*would change the model; use another"):
        megatron_keys.argument_keys(given, refusal)


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"a_new_field": 3}, "model.a_new_field=3"),
        ({"_target_": "megatron.bridge.models.gemma.Gemma2ModelProvider"}, "a Gemma2ModelProvi"),
    ],
)
def test_run_config_is_read_as_data(tmp_path, changes, named):
    folder = tmp_path / "iter_0000002"
    folder.mkdir()

    def write(**changed):
        config = {"model": megatron_folders.bridge_config("llama", **changed), "peft": None}
        (folder / "run_config.yaml").write_text(yaml.safe_dump(config))

    write(**changes)
    with pytest.raises(UserError, match=named):
        sources.read_config(folder)
    write(init_method={"_target_": "os.mkdir", "_args_": [str(tmp_path / "harm")]})
    assert sources.read_config(folder).num_layers == 4
    assert not (tmp_path / "harm").exists()
    (folder / "run_config.yaml").write_text(
        f"model: !!python/object/apply:os.mkdir [{tmp_path / 'harm'}]"
    )
    with pytest.raises(UserError, match="run_config.yaml in .* is damaged"):
        sources.read_config(folder)
    assert not (tmp_path / "harm").exists()


def test_arguments_of_two_ages():
    refusal = megatron._refusal("args")
    old = {"norm_epsilon": 1e-6, "apply_layernorm_1p": True, "disable_bias_linear": True}
    new = {"layernorm_epsilon": 1e-6, "layernorm_zero_centered_gamma": True}
    for args in (old, new | {"add_bias_linear": False}):
        keys = megatron_keys.argument_keys(args | {"rotary_percent": 0.5}, refusal)
        assert keys["layernorm_epsilon"] == 1e-6 and keys["layernorm_zero_centered_gamma"]
        assert keys["bias"] is False and keys["rotary_percentage"] == 0.5
    gelu = {"bias_gelu_fusion": True, "num_query_groups": 1, "group_query_attention": False}
    keys = megatron_keys.argument_keys(gelu, refusal)
    assert keys["bias_activation_fusion"] is True and "num_query_groups" not in keys
    keys = megatron_keys.argument_keys(gelu | {"add_bias_linear": False}, refusal)
    assert keys["bias_activation_fusion"] is False  # Megatron-LM has no kernel without a bias


def test_what_megatron_lm_cannot_express_is_refused(tiny_tokenizer_dir):
    section = tiny_config(tiny_tokenizer_dir, "llama", activation="geglu", window_size=[7, 0])
    with pytest.raises(UserError, match="no arguments for model.activation='geglu'"):
        megatron_keys.arguments(section)
    window = {"window_size": [7, 0], "window_attn_skip_freq": [1, 0]}
    args = megatron_keys.arguments(tiny_config(tiny_tokenizer_dir, "gpt2", **window))
    expected = "--no-bias-gelu-fusion --window-size 7,0 --window-attn-skip-freq '[1,0]'"
    assert megatron_keys.command_line(args) == expected
    scaled = tiny_config(tiny_tokenizer_dir, "llama", seq_len_interpolation_factor=2.0)
    expected = "--rotary-seq-len-interpolation-factor 2"  # an int there
    assert megatron_keys.command_line(megatron_keys.arguments(scaled)) == expected


def test_faults_of_folders_are_named(tmp_path, tiny_tokenizer_dir):
    model = megatron_folders.gpt("llama")
    args = megatron_folders.args_of("llama")
    folder = megatron_folders.save(model, tmp_path, {"args": args})
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    for text, message in (("20", "names iter_0000020, which is not there"), ("x", "says 'x'")):
        tracker.write_text(text)
        with pytest.raises(UserError, match=message):
            sources.read_config(tmp_path)
    tracker.write_text("10\n")
    cfg = sources.read_config(tmp_path)
    said = "type=/elsewhere/tokenizer stands in the checkpoint.*PATH"
    with pytest.raises(UserError, match=said):
        MegatronGPTModel.restore_from(tmp_path, override_config_path=cfg)
    cfg.tokenizer.type, cfg.override_vocab_size = tiny_tokenizer_dir, 128
    with pytest.raises(UserError, match="less than the 300 ids of the tokenizer"):
        MegatronGPTModel.restore_from(tmp_path, override_config_path=cfg)
    # Beside the weights: no arguments, and more than data
    torch.save({"iteration": 3}, folder / "common.pt")
    with pytest.raises(UserError, match="is a checkpoint of a training run.*without args"):
        sources.read_config(tmp_path)
    args.harm = nemo_files.Harmful(str(tmp_path / "harm"))
    torch.save({"args": args}, folder / "common.pt")
    with pytest.raises(UserError, match="common.pt names .*mkdir, which no checkpoint needs"):
        sources.read_config(tmp_path)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    "kind, changes, key",
    [
        ("llama", {"untie_embeddings_and_output_weights": False}, "output_layer.weight"),
        ("gpt2", {"add_bias_linear": False}, "linear_qkv.bias|linear_proj.bias"),
    ],
)
def test_weights_that_the_arguments_do_not_describe_are_named(tmp_path, kind, changes, key):
    args = megatron_folders.args_of(kind, **changes)
    megatron_folders.save(megatron_folders.gpt(kind), tmp_path, {"args": args})
    with pytest.raises(UserError, match=f"holds '.*({key})', but its configuration describes"):
        whole_weights(tmp_path)


def test_a_weight_without_place_is_named(tmp_path, tiny_tokenizer_dir):
    model = megatron_folders.gpt("llama")
    state = model.sharded_state_dict()
    state["x"] = ShardedTensor.from_rank_offsets("decoder.layers.0.scale.weight", torch.ones(2))
    args = megatron_folders.args_of("llama")
    model = SimpleNamespace(sharded_state_dict=lambda: state)
    megatron_folders.save(model, tmp_path, {"args": args})
    said = "holds 'decoder.layers.0.scale.weight', which has no place"
    with pytest.raises(UserError, match=said):
        restored(tmp_path, tiny_tokenizer_dir)
