# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in NeMo's other forms: per-rank files, zarr, NeMo 2.0 folders. A model that loads
one computes exactly what the model that it was made from computes.
"""

import argparse
import itertools
import json
import os
import re
import shutil

import pytest
import torch
import yaml
from megatron.core.dist_checkpointing.mapping import ShardedObject
from omegaconf import OmegaConf

from nemo_aligner.checkpoint import forms, megatron, sources
from nemo_aligner.checkpoint.stored_weights import checked
from nemo_aligner.convert.__main__ import main as convert
from nemo_aligner.core.errors import UserError
from nemo_aligner.launch.model_loading import load_from_nemo
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.plan.__main__ import main as plan
from tests import nemo_files
from tests.cases import says, some_of
from tests.tiny_models import tiny_config

pytestmark = pytest.mark.slow

CPU = OmegaConf.create({"precision": 32, "seed": 99})
TOKENS = torch.randint(0, 290, (2, 12), generator=torch.Generator().manual_seed(0))


def logits_of(model):
    model.set_eval()
    positions = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
    with torch.no_grad():
        return model.unwrapped()[0](TOKENS, positions, None)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def source(request, tiny_tokenizer_dir):
    return MegatronGPTModel(tiny_config(tiny_tokenizer_dir, request.param, num_layers=3))


def restored(path):
    """The model in a checkpoint, whose initial weights differ from those in it."""
    cfg = sources.read_config(path)
    cfg = nemo_files.with_own_tokenizer(cfg)
    own = {"seed": 99, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    return MegatronGPTModel.restore_from(path, override_config_path=OmegaConf.merge(cfg, own))


def same_model(path, source):
    return torch.equal(logits_of(restored(path)), logits_of(source))


@some_of(
    "tp, stages, wrapper, tar",
    [
        (1, [3], "model.", False),
        (2, [3], "model.", True),
        (2, [2, 1], "model.module.", False),
        (1, [1, 2], "model.", True),
    ],
    keep=3,
)
def test_weights_of_each_rank(source, tmp_path, tp, stages, wrapper, tar):
    folder = nemo_files.write_rank_files(source, tmp_path / "ranks", tp, stages, wrapper)
    names = {path.name for path in folder.iterdir()}
    assert (tp, len(stages)) == (1, 1) or "model_weights.ckpt" not in names
    assert same_model(nemo_files.packed(folder) if tar else folder, source)


def with_rank_file(source, folder, state):
    """Files of one rank, with `state` in the place of its weights."""
    nemo_files.write_rank_files(source, folder, 1, [3])
    torch.save(state, folder / "model_weights.ckpt")
    return folder


def test_weights_of_each_rank_without_transformer_engine(source, tmp_path):
    state = source.unwrapped()[0].state_dict()
    assert any(".input_layernorm." in name for name in state)
    state = {f"model.{name}": value for name, value in state.items()}
    assert same_model(with_rank_file(source, tmp_path / "ranks", state), source)


def test_faults_of_rank_files_are_named(source, tmp_path):
    def ranks(name):
        return nemo_files.write_rank_files(source, tmp_path / name, 2, [2, 1])

    folder = ranks("gap")
    shutil.rmtree(folder / "tp_rank_01_pp_rank_000")
    with pytest.raises(UserError, match="rank 1 of stage 0, in a job of 2 x 2 ranks"):
        restored(folder)
    file = ranks("cut") / "tp_rank_00_pp_rank_001" / "model_weights.ckpt"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model_weights.ckpt in .*cut is damaged"):
        restored(tmp_path / "cut")
    for name, kind in (
        ("model.language_model.encoder.layers.0.mlp.dense_h_to_4h.weight", "legacy_layers"),
        ("model.decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight", "rank_experts"),
    ):
        folder = with_rank_file(source, tmp_path / kind, {name: torch.zeros(2, 2)})
        with says(UserError, "which is not read; ", forms.FORMS[kind].remedy):
            restored(folder)
    folder = nemo_files.write_rank_files(source, tmp_path / "less", 1, [3])
    state = torch.load(folder / "model_weights.ckpt", weights_only=False)
    gone = "model.decoder.layers.1.mlp.linear_fc1.weight"
    kept = {name: value for name, value in state.items() if ".mlp.linear_fc1.w" not in name}
    assert gone in state and gone not in kept
    torch.save(kept, folder / "model_weights.ckpt")
    with pytest.raises(UserError, match=r"lacks 1 weight.*mlp.linear_fc1.weight"):
        restored(folder)


def test_a_rank_file_runs_no_code(source, tmp_path):
    harmful = {"model.x": nemo_files.Harmful(str(tmp_path / "harm"))}
    folder = with_rank_file(source, tmp_path / "ranks", harmful)
    with pytest.raises(UserError, match="model_weights.ckpt in .* names .*mkdir, which no"):
        restored(folder)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("tar", [False, True])
def test_zarr(source, tmp_path, tar):
    folder = nemo_files.write_zarr(source, tmp_path / "zarr", chunk_rows=5)
    shapes = [json.loads(f.read_text())["chunks"] for f in folder.glob("*/*/.zarray")]
    assert len(shapes) > 5 and any(shape[-2:-1] == [5] for shape in shapes)
    assert same_model(nemo_files.packed(folder) if tar else folder, source)


@some_of("name", ["bfloat16", "<V2"])
def test_zarr_in_bfloat16(source, tmp_path, name):
    folder = nemo_files.write_zarr(source, tmp_path / "zarr", dtype=name)
    rounded = MegatronGPTModel(source.cfg)
    modules = (rounded.unwrapped()[0], source.unwrapped()[0])
    for mine, theirs in zip(*(module.parameters() for module in modules), strict=True):
        mine.data.copy_(theirs.data.bfloat16())
    assert same_model(folder, rounded) and not same_model(folder, source)


def test_faults_of_zarr_are_named(source, tmp_path):
    folder = nemo_files.write_zarr(source, tmp_path / "blosc", compressor={"id": "blosc"})
    with pytest.raises(UserError, match="zarr, compressed.*convert_zarr_to_torch_dist.py"):
        restored(folder)
    folder = nemo_files.write_zarr(source, tmp_path / "gap")
    chunk = next(folder.glob("model_weights/model.decoder.final_layernorm.weight/0"))
    chunk.unlink()
    with pytest.raises(UserError, match="lacks the chunk 0 of model.decoder.final_layernorm"):
        restored(folder)
    chunk.write_bytes(b"12")
    with pytest.raises(UserError, match="has 2 bytes in the place of"):
        restored(folder)
    (folder / "model_weights" / "metadata.json").write_text('{"sharded_backend": "array"}')
    with pytest.raises(UserError, match="format 'array'; formats that load: torch_dist, zarr"):
        restored(folder)


LLAMA = yaml.safe_load("""{
    _target_: nemo.collections.llm.gpt.model.llama.LlamaConfig, gated_linear_unit: true,
    activation_func: {_target_: torch.nn.functional.silu, _call_: false}, normalization: RMSNorm,
    position_embedding_type: rope, add_bias_linear: false, num_query_groups: 2,
    share_embeddings_and_output_weights: false}
""")
GPT = yaml.safe_load("""{
    _target_: nemo.collections.llm.gpt.model.base.GPTConfig, gated_linear_unit: false,
    activation_func: {_target_: torch._C._nn.gelu, _call_: false}, normalization: LayerNorm,
    position_embedding_type: learned_absolute, add_bias_linear: true, num_query_groups: null,
    share_embeddings_and_output_weights: true}
""")
COMMON = yaml.safe_load("""{
    num_layers: 3, hidden_size: 32, ffn_hidden_size: 48, num_attention_heads: 4,
    kv_channels: null, seq_length: 48, rotary_base: 10000, rotary_percent: 1.0,
    layernorm_epsilon: 1.0e-5, hidden_dropout: 0.0, attention_dropout: 0.0,
    make_vocab_size_divisible_by: 128, init_method_std: 0.1,
    # what does not matter
    tensor_model_parallel_size: 8, params_dtype: {_target_: torch.bfloat16, _call_: true},
    fp8_margin: 1, tp_comm_overlap: true, calculate_per_token_loss: false, moe_router_topk: 3,
    attention_backend: {_target_: megatron.core.transformer.enums.AttnBackend},
    transformer_layer_spec: {_target_: nemo.collections.llm.gpt.model.base.default_layer_spec,
        _call_: false}, num_moe_experts: null, qk_layernorm: false, softmax_type: vanilla}
""")
TOKENIZER = yaml.safe_load("""{
    _target_: nemo.collections.common.tokenizers.huggingface.auto_tokenizer.AutoTokenizer,
    pretrained_model_name: nemo_tokenizer, vocab_file: null, merges_file: null, bos_token: null,
    eos_token: null, use_fast: true, chat_template: null}
""")


def nemo2_of(source, tokenizer_dir, folder, **changes):
    llama = source.transformer_config.gated_linear_unit
    config = (LLAMA if llama else GPT) | COMMON | changes
    kind = "LlamaModel" if llama else "GPTModel"
    nemo_files.write_nemo2(source, folder, kind, config, TOKENIZER)
    shutil.copytree(tokenizer_dir, folder / "context" / "nemo_tokenizer")
    return folder


def test_nemo2_folder(source, tiny_tokenizer_dir, tmp_path):
    folder = nemo2_of(source, tiny_tokenizer_dir, tmp_path / "nemo2")
    model = restored(folder)
    assert torch.equal(logits_of(model), logits_of(source))
    assert model.cfg.tokenizer.type == str(folder / "context" / "nemo_tokenizer")
    assert model.tokenizer.text_to_ids("the film") == source.tokenizer.text_to_ids("the film")
    model.save_to(str(tmp_path / "again.nemo"))
    assert same_model(tmp_path / "again.nemo", source)


@pytest.fixture(scope="module")
def by_megatron_core(source, tmp_path_factory):
    """Folder with the weights of `source` as Megatron Core itself saves them, by prefix."""
    root = tmp_path_factory.mktemp("megatron_core")
    beside = {"args": argparse.Namespace(num_layers=3, params_dtype=torch.float32), "iteration": 9}
    for prefix in ("model.", "module."):
        weights = nemo_files.under_prefix(source.sharded_weights(), prefix)
        nemo_files.save_as_megatron_core({**weights, **beside}, root / prefix)
    return root


def nemo_of(source, weights, folder):
    """A `.nemo` folder without checksums, with the weights in the folder `weights`."""
    source.save_to(f"{folder}/")
    (folder / "CHECKSUMS.xxh128").unlink()
    shutil.rmtree(folder / "model_weights")
    shutil.copytree(weights, folder / "model_weights")
    return folder


@some_of("form", ["folder", "file", "nemo2"], keep=2)
def test_what_megatron_core_itself_saves(
    source, by_megatron_core, tiny_tokenizer_dir, tmp_path, capsys, form
):
    if form == "nemo2":
        path = nemo2_of(source, tiny_tokenizer_dir, tmp_path / "model")
        shutil.rmtree(path / "weights")
        shutil.copytree(by_megatron_core / "module.", path / "weights")
    else:
        path = nemo_of(source, by_megatron_core / "model.", tmp_path / "model")
        path = nemo_files.packed(path) if form == "file" else path
    model = load_from_nemo(MegatronGPTModel, CPU, None, restore_path=path)
    assert torch.equal(logits_of(model), logits_of(source))
    assert plan(["--gpus", "1", "--memory", "24GB", str(path)]) == 0
    assert convert(["nemo-info", str(path)]) == 0
    parameters = sum(p.numel() for p in source.unwrapped()[0].parameters())
    assert f"{parameters:,} parameters" in capsys.readouterr().out
    assert convert(["nemo-to-hf", str(path), str(tmp_path / "hf"), "--quiet"]) == 0
    ids = 300  # the folder has no rows for padding
    again = logits_of(restored(tmp_path / "hf"))
    assert torch.equal(again[..., :ids], logits_of(source)[..., :ids])


def test_what_a_later_megatron_core_saves_has_no_common_file(source, by_megatron_core, tmp_path):
    """Whatever the release of this environment: 0.16 does not know such checkpoints."""
    beside = ShardedObject("common_state", {"iteration": 9}, (1,), (0,))
    state = {**source.sharded_weights(), "common_state": beside}
    weights = nemo_files.save_as_megatron_core(state, tmp_path / "weights")
    (weights / "common.pt").unlink(missing_ok=True)
    assert same_model(nemo_of(source, weights, tmp_path / "model"), source)


def damages(folder, weights):
    """What can happen to each file of a checkpoint: name -> contents, or None for no file."""
    small = (weights + "metadata.json", weights + ".metadata")
    yield from itertools.product(small, (None, b"", b"\xff{[", -7))
    yield from itertools.product((weights + "__0_0.distcp",), (None, b"", b"\xff{[" * 9000, -9000))
    config = "context/model.yaml" if "context" in os.listdir(folder) else "model_config.yaml"
    yield from itertools.product((config,), (None, b"", b"\xff{[", b"- a", b"a: ${"))


@pytest.mark.parametrize("source", ["llama"], indirect=True)
@some_of("form", ["folder", "file", "nemo2"])
def test_each_damage_to_files_without_checksums_is_one_error(
    source, by_megatron_core, tiny_tokenizer_dir, tmp_path, form
):
    whole, weights = tmp_path / "whole", "weights/" if form == "nemo2" else "model_weights/"
    if form == "nemo2":
        nemo2_of(source, tiny_tokenizer_dir, whole)
    else:
        nemo_of(source, by_megatron_core / "model.", whole)
    for number, (name, content) in enumerate(damages(whole, weights)):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        file = folder / name
        if isinstance(content, int):
            content = file.read_bytes()[:content]
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        path = nemo_files.packed(folder) if form == "file" else folder
        for read in (restored, everything_in):
            with pytest.raises(UserError) as error:
                read(path)
            said = str(error.value)
            assert str(path) in said and file.name in said, (name, content, said)
            remedies = "copy it again|Copy it again|not an unpacked .nemo|no model_c"
            assert re.search(remedies, said), said
            assert "weights_only" not in said and "trust" not in said, said


def everything_in(path):
    with sources.open_source(path).tensors() as tensors:
        for key, shape in tensors.shapes().items():
            tensors.read(key, tuple(slice(0, size) for size in shape))


TWICE = ("ranks", "hugging_face")  # names of layers, with their numbers too


@pytest.mark.parametrize("source", ["llama"], indirect=True)
@some_of(
    "form, value",
    [
        ("folder", 1.8e37),
        ("folder", -65505.0),
        ("file", float("nan")),
        ("nemo2", float("-inf")),
        ("ranks", 1.8e37),
        ("zarr", 1.8e37),
        ("hugging_face", 1.8e37),
    ],
    keep=3,
)
def test_a_weight_beyond_reason_is_named(source, tiny_tokenizer_dir, tmp_path, form, value):
    name, path = "linear_fc2.weight", tmp_path / ("m.nemo" if form == "file" else "model")
    weight = next(w for n, w in source._named_weights() if n.endswith(name) and ".1." in n)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        before = weight[3, 5].clone()
        for found in (65504.0, value):  # the first is none
            shutil.rmtree(path, ignore_errors=True)
            weight[3, 5] = found
            if form == "nemo2":
                nemo2_of(source, tiny_tokenizer_dir, path)
            elif form == "ranks":
                nemo_files.write_rank_files(source, path, 2, [2, 1])
            elif form == "zarr":
                nemo_files.write_zarr(source, path)
            elif form == "hugging_face":
                patch.setattr("nemo_aligner.checkpoint.torch_dist_stream.checked", lambda *_: None)
                source.save_to(nemo := str(tmp_path / "source.nemo"))
                assert convert(["nemo-to-hf", nemo, str(path), "--quiet", "--overwrite"]) == 0
                patch.undo()
                name = "model.layers.1.mlp.down_proj.weight"
            else:
                source.save_to(str(path) if form == "file" else f"{path}/")
            if found == 65504.0:
                restored(path)
        weight[3, 5] = before
    shown = re.escape(f"{value:.6g}")
    for read in (restored,) if form in TWICE else (restored, everything_in):
        with pytest.raises(UserError, match=f"{path}.*{name} has the value {shown};"):
            read(path)


def test_numbers_of_any_type_are_checked(tmp_path):
    checked(torch.tensor([10**9, -(10**9)]), "ids", tmp_path)
    checked(torch.zeros(0), "none", tmp_path)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2):
        for value in (57344, -57344, float("nan"), float("inf"), float("-inf")):
            values = torch.tensor([[0.0, value], [2.0, 1.0]]).to(dtype).T
            if value in (57344, -57344):
                assert checked(values, "w", tmp_path) is values
                continue
            named = f"{tmp_path}: the weight w has the value {value};"
            with pytest.raises(UserError, match=named):
                checked(values, "w", tmp_path)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_moe_experts": 8}, "config.num_moe_experts=8"),
        ({"softmax_scale": 0.1}, "config.softmax_scale=0.1"),
        ({"normalization": "L2"}, "config.normalization='L2'"),
        ({"scale_factor": 8, "low_freq_factor": 2}, "config.low_freq_factor=2"),
        ({"activation_func": {"_target_": "a.quick_gelu"}}, "config.activation_func='quick_gelu"),
        ({"transformer_layer_spec": {"_target_": "nemo.x.gemma2_layer_spec"}}, "gemma2_layer"),
    ],
)
def test_nemo2_arguments_without_counterpart_are_refused(changes, message):
    with pytest.raises(UserError, match=f"{message}.*would change the model; convert it"):
        megatron._nemo2_keys(LLAMA | COMMON | changes, "model.yaml")


def test_nemo2_keys():
    gemma = {"scale_factor": 32, **megatron.ROPE_SCALING, "window_size": [7, 0]}
    gemma |= {"activation_func": {"_target_": "nemo.openai_gelu"}, "vocab_size": 300}
    keys = megatron._nemo2_keys(LLAMA | COMMON | gemma, "model.yaml")
    expected = {"activation": "geglu", "openai_gelu": True, "window_size": [7, 0]}
    expected |= {"scale_positional_embedding": True, "scale_factor": 32}
    assert {key: keys[key] for key in expected} == expected
    assert not {"seq_length", "add_bias_linear", "vocab_size", "fp8_margin"} & keys.keys()


def test_other_models_and_versions_of_nemo2_are_refused(source, tiny_tokenizer_dir, tmp_path):
    folder = tmp_path / "nemo2"
    nemo_files.write_nemo2(source, folder, "Gemma2Model", LLAMA | COMMON, TOKENIZER)
    with pytest.raises(UserError, match="describes a Gemma2Model; models that load.*GemmaModel"):
        sources.read_config(folder)
    (folder / "context" / "model.yaml").unlink()
    with pytest.raises(UserError, match="no model.yaml.*NeMo 2.1 or later"):
        sources.read_config(folder)


def test_nemo2_tokenizers(tmp_path):
    (tmp_path / "t.model").write_text("")
    file = tmp_path / "model.yaml"
    piece = {"_target_": "nemo.SentencePieceTokenizer", "model_path": "t.model", "legacy": True}
    assert megatron._nemo2_tokenizer_keys(piece, file)["model"] == str(tmp_path / "t.model")
    assert megatron._nemo2_tokenizer_keys(piece, file)["sentencepiece_legacy"] is True
    name = {"_target_": "nemo.FileArtifact", "attr": "meta-llama/Llama-2", "skip": True}
    auto = TOKENIZER | {"pretrained_model_name": name, "eos_token": "</s>"}
    keys = megatron._nemo2_tokenizer_keys(auto, file)
    assert keys["type"] == "meta-llama/Llama-2"
    assert keys["special_tokens"] == {"eos_token": "</s>"}
    outside = TOKENIZER | {"pretrained_model_name": "../../etc"}
    keys = megatron._nemo2_tokenizer_keys(outside, file)
    assert keys["type"] == "../../etc"  # refused where it is used
    with pytest.raises(UserError, match="has a tokenizer NullTokenizer; those that load"):
        megatron._nemo2_tokenizer_keys({"_target_": "nemo.NullTokenizer"}, file)


def test_folders_of_others_are_named(tmp_path):
    for file, message in (
        ("metadata.json", "is a checkpoint of a training run.*save_nemo_on_train_end"),
        ("text", "Forms that load: .nemo file or folder with a distributed checkpoint"),
    ):
        folder = tmp_path / file.split(".")[0]
        folder.mkdir()
        (folder / file).write_text("{}")
        with pytest.raises(UserError, match=message):
            forms.check_restore_path(folder)
