# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What is written loads in NeMo-Aligner's NeMo, and what is read from a `.nemo` meets a user's
configuration.

NeMo 2.1, which NeMo-Aligner 0.7 pins, is not installed: its restore code is stated here as facts
(`NLPSaveRestoreConnector`, `MegatronGPTModel`, `DistributedCheckpointIO`, Megatron Core 0.10), and
`nemo_reads` follows its steps.
"""

import io
import json
import pickle
import shutil
import tarfile
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from omegaconf import OmegaConf

from nemo_aligner.checkpoint import sources
from nemo_aligner.config.defaults import complete_config
from nemo_aligner.core.errors import UserError
from nemo_aligner.launch.model_loading import load_and_override_model_config, load_from_nemo
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from tests.cases import some_of
from tests.tiny_models import tiny_config

pytestmark = pytest.mark.slow

# Per layer and beside the layers: what the sharded state dict of NeMo's GPT asks for, with layers
# of Transformer Engine.
LAYER_TENSORS = """self_attention.linear_qkv.weight self_attention.linear_qkv.layer_norm_weight
    self_attention.linear_proj.weight mlp.linear_fc1.weight mlp.linear_fc1.layer_norm_weight
    mlp.linear_fc2.weight""".split()
EXTRA_STATES = """self_attention.linear_qkv self_attention.linear_proj
    self_attention.core_attention mlp.linear_fc1 mlp.linear_fc2""".split()
TENSORS = "embedding.word_embeddings.weight decoder.final_layernorm.weight output_layer.weight"
# What a pickled `.metadata` may name so that PyTorch 2.4, of NeMo-Aligner's container, finds it.
METADATA = """Metadata MetadataIndex TensorStorageMetadata BytesStorageMetadata
    ChunkStorageMetadata TensorProperties StorageMeta _MEM_FORMAT_ENCODING""".split()
METADATA_CLASSES = {f"torch.distributed.checkpoint.metadata {name}" for name in METADATA} | {
    "torch.distributed.checkpoint.filesystem _StorageInfo",
    "torch.serialization _get_layout",
    "torch Size",
    "torch float32",
    "pathlib PosixPath",
    "collections OrderedDict",
}


class Recorder(pickle.Unpickler):
    """Notes the classes and functions that a pickled object names."""

    def __init__(self, file):
        super().__init__(file)
        self.names = set()

    def find_class(self, module, name):
        self.names.add(f"{module} {name}")
        return super().find_class(module, name)


def nemo_reads(path: Path, folder: Path) -> dict:
    """What NeMo's restoring makes of the configuration of a `.nemo`: it unpacks everything, and
    `register_artifact` turns the three file keys into paths.
    """
    with tarfile.open(path, "r:") as tar:
        tar.extractall(folder, filter="data")
    config = OmegaConf.to_container(OmegaConf.load(folder / "model_config.yaml"))
    for key in ("model", "vocab_file", "merge_file"):
        value = config["tokenizer"].get(key)
        if value in (None, ""):
            continue
        assert value.startswith("nemo:")
        file = folder / value[5:]
        assert file.is_file()
        config["tokenizer"][key] = str(file)
    return config


def test_nemo_finds_what_it_needs_in_the_configuration(
    tiny_tokenizer_dir, tmp_path, tiny_sentencepiece_model
):
    cfg = tiny_config(tiny_tokenizer_dir, add_qkv_bias=True, dist_ckpt_format="zarr")
    MegatronGPTModel(cfg).save_to(str(tmp_path / "m.nemo"))
    config = nemo_reads(tmp_path / "m.nemo", tmp_path / "unpacked")
    # Without mcore_gpt it builds its own layers; with zarr it looks for zarr arrays.
    assert config["mcore_gpt"] is True and config["transformer_engine"] is True
    assert config["dist_ckpt_format"] == "torch_dist"
    assert config["dist_ckpt_load_strictness"] == "log_all"
    assert config["qkv_bias"] is True  # NeMo's name of add_qkv_bias
    # `type` goes to Hugging Face as it stands: a name, or a folder that exists.
    assert config["tokenizer"]["type"] == tiny_tokenizer_dir
    module, _, name = config["target"].rpartition(".")
    assert module.startswith("nemo.collections.nlp.models.language_modeling.")
    assert name == "MegatronGPTModel"
    assert all(not str(value).startswith("nemo:") for value in config.values())

    pieces = {"library": "sentencepiece", "model": tiny_sentencepiece_model}
    MegatronGPTModel(tiny_config("", tokenizer=pieces)).save_to(str(tmp_path / "sp.nemo"))
    config = nemo_reads(tmp_path / "sp.nemo", tmp_path / "sp")
    assert Path(config["tokenizer"]["model"]).read_bytes() == (
        Path(tiny_sentencepiece_model).read_bytes()
    )
    assert not config["tokenizer"]["type"]


def test_nemo_finds_the_weights_that_it_asks_for(tiny_tokenizer_dir, tmp_path):
    MegatronGPTModel(tiny_config(tiny_tokenizer_dir)).save_to(str(tmp_path / "m.nemo"))
    nemo_reads(tmp_path / "m.nemo", tmp_path)
    folder = tmp_path / "model_weights"
    # Megatron Core 0.19 leaves these two out; what reads them has the same defaults.
    defaults = {"common_backend": "torch", "common_backend_version": 1}
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    found = json.loads((folder / "metadata.json").read_text())
    assert defaults | found == {**backend, **defaults}
    asked = {f"model.decoder.layers.{name}" for name in LAYER_TENSORS}
    asked |= {f"model.{name}" for name in TENSORS.split()}
    tensors = dist_checkpointing.load_tensors_metadata(str(folder))
    assert set(tensors) == asked
    places = [(name, layer) for name in EXTRA_STATES for layer in range(2)]
    state = "model.decoder.layers.{}._extra_state/shard_{}_2"
    states = {state.format(name, layer) for name, layer in places}
    assert states <= set(load_sharded_metadata(str(folder)))
    recorder = Recorder((folder / ".metadata").open("rb"))
    assert asked <= set(recorder.load().state_dict_metadata)
    assert len(recorder.names) > 5 and recorder.names <= METADATA_CLASSES
    assert torch.load(folder / "common.pt", weights_only=True) is not None


@pytest.mark.parametrize("form", ["again.nemo", "again/"])
def test_a_file_that_was_written_again_names_the_first_tokenizer(
    tiny_tokenizer_dir, tmp_path, form
):
    MegatronGPTModel(tiny_config(tiny_tokenizer_dir)).save_to(str(tmp_path / "first.nemo"))
    model = MegatronGPTModel.restore_from(tmp_path / "first.nemo")
    assert model.cfg.tokenizer.type != tiny_tokenizer_dir  # the copy in the file
    model.save_to(f"{tmp_path}/{form}")
    if form.endswith(".nemo"):
        written = nemo_reads(tmp_path / form, tmp_path / "unpacked")
    else:
        written = OmegaConf.load(tmp_path / "again/model_config.yaml")
        again = MegatronGPTModel.restore_from(tmp_path / "again")
        assert Path(again.cfg.tokenizer.type).parent == tmp_path / "again"
    assert written["tokenizer"]["type"] == tiny_tokenizer_dir


def edited(path, folder, **changes):
    """A folder `.nemo` whose configuration has other values; None removes a key."""
    shutil.copytree(path, folder)
    config = OmegaConf.load(folder / "model_config.yaml")
    for key, value in changes.items():
        if value is None:
            config.pop(key, None)
        else:
            OmegaConf.update(config, key, value, force_add=True)
    OmegaConf.save(config, folder / "model_config.yaml")
    (folder / "CHECKSUMS.xxh128").unlink()
    return folder


@pytest.fixture(scope="module")
def nemo_folder(tiny_tokenizer_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("nemo") / "model"
    MegatronGPTModel(tiny_config(tiny_tokenizer_dir)).save_to(f"{folder}/")
    return folder


SPLITS = {"train": ["a.jsonl"], "validation": ["b.jsonl"], "test": ["c.jsonl"]}


@pytest.mark.parametrize("in_file", [["1.0", "/data/old"], "/data/old", {"train": ["old"]}])
@some_of("drop", [True, False])
def test_the_data_of_a_file_does_not_disturb_the_users(nemo_folder, tmp_path, in_file, drop):
    path = edited(nemo_folder, tmp_path / "m", data={"data_prefix": in_file, "old_key": 1})
    cfg = OmegaConf.create({"model": {"data": {"data_prefix": SPLITS}}})
    cfg.model.overwrite_base_config = {"data": {"data_prefix": drop, "old_key": drop}}
    merged = load_and_override_model_config(path, cfg.model)
    assert merged.data.data_prefix == SPLITS
    assert ("old_key" in merged.data) == (not drop)
    # The second merging must not bring back what was dropped.
    model, used = load_from_nemo(
        MegatronGPTModel, merged, None, restore_path=path, return_updated_cfg=True
    )
    assert used.data == merged.data and model.cfg.num_layers == 2
    direct = OmegaConf.create({"data": {"data_prefix": SPLITS}})
    options = {"restore_path": path, "return_updated_cfg": True}
    _, cfg = load_from_nemo(MegatronGPTModel, direct, None, **options)
    assert cfg.data.data_prefix == SPLITS


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"bias": True, "activation": "gelu"}, True),
        ({"bias": False, "activation": "gelu"}, False),
        ({"bias": True, "activation": "gelu", "openai_gelu": True}, False),
        ({"bias": False, "activation": "geglu"}, True),
        ({"bias": True, "activation": "gelu", "target": "nemo_aligner.models.X"}, True),
    ],
)
def test_a_file_of_nemo_has_nemos_form_of_gelu(nemo_folder, tmp_path, changes, expected):
    assert sources.read_config(nemo_folder).bias_activation_fusion is False  # ours has it
    path = edited(nemo_folder, tmp_path / "m", bias_activation_fusion=None, **changes)
    assert sources.read_config(path).get("bias_activation_fusion") is expected


def test_a_file_without_parallel_sizes_has_those_of_one_rank(nemo_folder, tmp_path):
    sizes = "tensor pipeline virtual_pipeline".split()
    without = {f"{size}_model_parallel_size": None for size in sizes}
    path = edited(nemo_folder, tmp_path / "m", context_parallel_size=None, **without)
    (tmp_path / "prompts.jsonl").write_text('{"text": "a"}\n')
    prefix = {name: [str(tmp_path / "prompts.jsonl")] for name in ("train", "validation", "test")}
    start = {"pretrained_checkpoint": {"restore_from_path": str(path)}}
    start["model"] = {"data": {"data_prefix": prefix}}
    cfg = complete_config(start, "gpt_ppo_actor")
    product = "${multiply:${model.tensor_model_parallel_size},"
    product += "${model.pipeline_model_parallel_size}}"
    cfg.exp_manager.checkpoint_callback_params.model_parallel_size = product  # NeMo-Aligner's YAML
    cfg.model = load_and_override_model_config(path, cfg.model)
    assert cfg.exp_manager.checkpoint_callback_params.model_parallel_size == 1
    assert cfg.model.virtual_pipeline_model_parallel_size is None
    assert cfg.model.context_parallel_size == 1


def test_an_archive_cannot_name_files_outside_or_run_code(nemo_folder, tmp_path):
    path = edited(nemo_folder, tmp_path / "n", **{"tokenizer.trust_remote_code": True})
    assert sources.read_config(path).tokenizer.trust_remote_code is False
    with tarfile.open(tmp_path / "evil.nemo", "w") as tar:
        for name in ("model_config.yaml", "../outside", "mp_rank_00/../../outside"):
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(UserError, match="a path that leads out of it.*do not use this file"):
        sources.read_config(tmp_path / "evil.nemo")
    with pytest.raises(UserError, match="a path that leads out of it.*do not use this file"):
        with sources.open_source(tmp_path / "evil.nemo").tensors():
            pass
    assert not (tmp_path / "outside").exists() and not (tmp_path.parent / "outside").exists()


@pytest.mark.parametrize("named", ["/of/the/writer/spm.model", "nemo:spm.model"])
def test_tokenizer_files_lie_beside_the_configuration(
    tiny_sentencepiece_model, nemo_folder, tmp_path, named
):
    """Also without a reference, and as links, which lead to `blobs` beside the folder in the cache
    of the Hugging Face hub.
    """
    for folder in ("snapshots", "blobs"):
        (tmp_path / folder).mkdir()
    tokenizer = {"library": "sentencepiece", "model": named}
    path = edited(nemo_folder, tmp_path / "snapshots/0123", tokenizer=tokenizer)
    shutil.copyfile(tiny_sentencepiece_model, tmp_path / "blobs/4567")
    (path / "spm.model").symlink_to("../../blobs/4567")
    assert sources.read_config(path).tokenizer.model == str(path / "spm.model")
