# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""No file of a `.nemo` or of a checkpoint runs code: each member that is a pickle is replaced by
one that touches a marker, or has such a call beside what it should hold. Its configuration reads
nothing of the machine: no variable of the environment and no file outside.
"""

import io
import os
import pickle
import tarfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing.strategies import torch as megatron_strategy
from omegaconf import OmegaConf
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from nemo_aligner.checkpoint import dist_ckpt, sources, torch_dist_stream
from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.checkpoint.checksums import write_manifest
from nemo_aligner.checkpoint.folders import mark
from nemo_aligner.checkpoint.hugging_face import reading
from nemo_aligner.checkpoint.nemo_archive import write_config
from nemo_aligner.checkpoint.torch_dist_stream import read_metadata
from nemo_aligner.core.errors import UserError
from nemo_aligner.launch.model_loading import load_and_override_model_config
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
from nemo_aligner.parallel import parallel_state
from tests.nemo_files import convert, restore
from tests.tiny_models import tiny_config

pytestmark = pytest.mark.slow


class Call:
    """Unpickles as the result of `function(*arguments)`."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments

    def __str__(self):
        return f"{self.function.__name__}{len(self.arguments)}"


def stealthy(file: Path, marker: Path) -> None:
    """The same table of contents, with a call in a field that nobody looks at."""
    with file.open("rb") as stream:
        table = pickle.load(stream)
    table.planner_data = Call(Path.touch, marker)
    file.write_bytes(pickle.dumps(table))


def disguise(folder: Path) -> None:
    """Make the checksums fit: they find damage, not forgery."""
    checksum = write_manifest(folder, {})
    if (folder / "COMPLETE").exists():
        mark(folder, checksum)


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "code_ran"


@pytest.fixture
def nemo_folder(tiny_tokenizer_dir, tmp_path):
    MegatronGPTModel(tiny_config(tiny_tokenizer_dir)).save_to(str(tmp_path / "model") + "/")
    return tmp_path / "model"


@pytest.mark.parametrize("as_file", [False, True], ids=["folder", "file"])
@pytest.mark.parametrize("read", [restore, convert])
def test_a_table_of_contents_runs_nothing(nemo_folder, tmp_path, marker, read, as_file):
    stealthy(nemo_folder / "model_weights/.metadata", marker)
    disguise(nemo_folder)
    path = nemo_folder
    if as_file:
        path = tmp_path / "model.nemo"
        with tarfile.open(path, "w") as tar:
            tar.add(nemo_folder, arcname=".")
    with pytest.raises(UserError, match=r"\.metadata.* pathlib.* do not use this file"):
        read(path)
    assert not marker.exists()


def test_what_stands_beside_the_tensors_is_not_read(nemo_folder, marker):
    torch.save({"args": Call(Path.touch, marker)}, nemo_folder / "model_weights/common.pt")
    disguise(nemo_folder)
    restore(nemo_folder)
    assert not marker.exists()


def training(tokenizer_dir):
    model = MegatronGPTRewardModel(tiny_config(tokenizer_dir, num_layers=1))
    return model, *model.setup_megatron_optimization(10)


@pytest.mark.parametrize("member", ["weights/.metadata", "weights/common.pt", "rng/rank_00000.pt"])
def test_a_checkpoint_runs_nothing(tiny_tokenizer_dir, tmp_path, marker, member):
    job = training(tiny_tokenizer_dir)
    CheckpointCallback(tmp_path, *job, name="rm").custom_save({}, trainer_state={})
    (folder,) = (tmp_path / "checkpoints").glob("checkpoint-*")
    if member.endswith(".pt"):
        state = torch.load(folder / member, weights_only=False)
        torch.save({**state, "more": Call(Path.touch, marker)}, folder / member)
    else:
        stealthy(folder / member, marker)
    disguise(folder)
    with pytest.raises(UserError, match=f"{folder / member}.* names .*(getattr|pathlib)") as error:
        CheckpointCallback(tmp_path, *training(tiny_tokenizer_dir), name="rm").load_latest()
    assert "weights_only" not in str(error.value) and not marker.exists()


def test_objects_among_the_tensors_are_not_read(tmp_path, marker):
    """Those of Transformer Engine, which are pickles."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    parallel_state.initialize()

    def entry(data):
        key = "model.layer._extra_state"
        return {"layer": ShardedObject(key, data, (1,), (0,), replica_id=0)}

    dist_ckpt.save(entry(Call(Path.touch, marker)), tmp_path)
    stored = torch_dist_stream.TorchDistTensors(tmp_path, prefix=None)
    assert torch_dist_stream.load(entry("own"), stored) == {"layer": "own"}
    assert not marker.exists()


def plan(kind=None):
    """A saver's plan; its data are of a class `kind`."""
    index = metadata.MetadataIndex("w", torch.Size([0]))
    item = planner.WriteItem(index, WriteItemType.SHARD, tensor_data=kind)
    return SavePlan([item], storage_data=filesystem._StoragePrefix("__0_"))


def test_what_pytorch_and_megatron_core_put_into_a_table_is_read(monkeypatch):
    """Also under the names of former releases, and as Python 3.11.0 to 3.11.3 stores members."""
    written = {}
    for by_name in (False, True):
        if by_name:
            for kind in (WriteItemType, metadata._MEM_FORMAT_ENCODING):
                reduced = lambda self, _protocol: (getattr, (type(self), self.name))  # noqa: E731
                monkeypatch.setattr(kind, "__reduce_ex__", reduced)
        properties, size = metadata.TensorProperties(torch.bfloat16), torch.Size([2])
        chunk = metadata.ChunkStorageMetadata(torch.Size([0]), size)
        place = metadata.MetadataIndex("w", torch.Size([0]))
        table = Metadata(
            {"w": metadata.TensorStorageMetadata(properties, size, [chunk])},
            planner_data=OrderedDict(w=("w", 1)),
            storage_data={place: filesystem._StorageInfo("__0_0.distcp", 0, 9)},
            storage_meta=metadata.StorageMeta("x", modules=["a"]),
        )
        table.all_local_plans = [plan(planner.TensorWriteData(chunk, properties, size))]
        written[by_name] = pickle.dumps(table)
        found = read_metadata(io.BytesIO(written[by_name]), Path("x"))
        assert found == table and found.all_local_plans == table.all_local_plans
    assert b"getattr" in written[True] and b"getattr" not in written[False]

    class Former(Metadata):
        """As Megatron Core 0.15 has it, under the name that its files give it."""

    Former.__module__ = "megatron.core.dist_checkpointing.strategies.torch"
    Former.__qualname__ = Former.__name__ = "MCoreMetadata"
    monkeypatch.setattr(megatron_strategy, "MCoreMetadata", Former)
    content = pickle.dumps(Former({"w": metadata.BytesStorageMetadata()}, storage_data={}))
    found = read_metadata(io.BytesIO(content), Path("x"))
    assert type(found) is Metadata and list(found.state_dict_metadata) == ["w"]


@pytest.mark.parametrize(
    "inside",
    [
        Call(os.system, "touch {}"),
        Call(getattr, SavePlan, "__init__"),
        Call(getattr, WriteItemType, "mro"),
        Call(getattr, WriteItemType.SHARD, "name"),
        Call(planner.SavePlanner),  # of the same module, and no dataclass
        Call(filesystem.FileSystemWriter, "{}"),
        Call(torch.load, "{}"),
    ],
    ids=str,
)
def test_a_plan_runs_nothing(marker, inside):
    """Whatever lies beside the classes of plans, in their modules or in Python."""
    arguments = (a.format(marker) if isinstance(a, str) else a for a in inside.arguments)
    table = Metadata({}, storage_data={})
    table.all_local_plans = [plan(Call(inside.function, *arguments))]
    with pytest.raises(UserError, match="^x/.metadata: it .*do not use this file"):
        read_metadata(io.BytesIO(pickle.dumps(table)), Path("x/.metadata"))
    assert not marker.exists()


# ---- what a configuration in a checkpoint refers to ----


def edited(folder: Path, **changes) -> Path:
    """`folder`, with keys of its configuration changed."""
    config = OmegaConf.load(folder / "model_config.yaml")
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value)
    OmegaConf.save(config, folder / "model_config.yaml")
    disguise(folder)
    return folder


def text_of(folder: Path) -> str:
    """All small files of a `.nemo`."""
    files = [f for f in folder.rglob("*") if f.is_file() and "model_weights" not in f.parts]
    return "".join(f.read_text(errors="replace") for f in files)


def save_next(path: Path, target: Path, **tokenizer) -> None:
    """What a job saves that starts from `path`."""
    cfg = load_and_override_model_config(path, OmegaConf.create({"tokenizer": tokenizer}))
    MegatronGPTModel(cfg).save_to(f"{target}/")


@pytest.fixture
def secret(tmp_path, monkeypatch):
    """A file that no checkpoint may copy, and a variable of the same content."""
    monkeypatch.setenv("ROW_NINE", "sesame-open")
    (tmp_path / "secret").write_text("sesame-open")
    return tmp_path / "secret"


@pytest.mark.parametrize(
    "key, value",
    [
        ("position_embedding_type", "${oc.env:ROW_NINE}"),
        ("tokenizer__type", "${oc.env:ROW_NINE,gpt2}"),
        ("a_note", "x ${.hidden_size} ${${.resolver}:ROW_NINE}"),
        ("a_note", r"\${oc.env:ROW_NINE}"),  # escaped: it would come alive when it is copied
        ("a_list", [{"deep": "${oc.decode:1}"}]),
    ],
)
def test_a_configuration_calls_no_resolver(nemo_folder, tmp_path, secret, key, value):
    edited(nemo_folder, resolver="oc.env", **{key: value})
    name = key.replace("__", ".") + (r"\[0\].deep" if key == "a_list" else "")
    with pytest.raises(UserError, match=f"(?s){nemo_folder}: {name}=.*environment.*unpack it"):
        save_next(nemo_folder, tmp_path / "next")
    assert not (tmp_path / "next").exists()


def test_what_refers_to_no_file_of_the_tokenizer_stays(nemo_folder):
    """Keys of the configuration itself, names of the Hub, and paths of data."""
    tokenizer = {"library": "huggingface", "type": "meta-llama/Llama-2-7b", "folder": None}
    data = {"data_prefix": ["/lustre/of/the/writer"], "index_mapping_dir": "/etc"}
    note = "${.hidden_size} of ${tokenizer.library}"
    edited(nemo_folder, tokenizer=tokenizer, data=data, note=note)
    cfg = sources.read_config(nemo_folder)
    assert cfg.tokenizer.type == "meta-llama/Llama-2-7b" and cfg.data == data
    assert cfg.note == f"{tiny_config('').hidden_size} of huggingface"


def test_json_of_others_calls_no_resolver(tmp_path, monkeypatch):
    found = OmegaConf.create({"hidden_act": "${oc.env:ROW_NINE}"})
    monkeypatch.setattr(reading, "model_section", lambda path: found)
    with pytest.raises(UserError, match=f"{tmp_path}: hidden_act="):
        sources.Source(tmp_path, "hugging_face").config()


@pytest.mark.parametrize("value", ["{secret}", "/not/on/this/machine"])
@pytest.mark.parametrize("key", ["vocab_file", "merge_file", "model"])
def test_a_file_outside_is_not_copied(nemo_folder, tmp_path, secret, key, value):
    """Hugging Face's library does not read these keys, but each would be copied."""
    value = value.format(secret=secret)
    edited(nemo_folder, **{f"tokenizer__{key}": value})
    folder = tmp_path / "next"
    folder.mkdir()
    write_config(folder, sources.read_config(nemo_folder))
    assert "eos_token" in text_of(folder) and "sesame-open" not in text_of(folder)
    assert OmegaConf.load(folder / "model_config.yaml").tokenizer[key] == value


def test_a_file_outside_is_read_only_where_the_user_names_it(
    nemo_folder, tmp_path, tiny_sentencepiece_model
):
    section = {"library": "sentencepiece", "model": tiny_sentencepiece_model}
    edited(nemo_folder, tokenizer=section, override_vocab_size=None)
    message = rf"tokenizer.model={tiny_sentencepiece_model} stands in.*tokenizer.model=PATH"
    with pytest.raises(UserError, match=message):
        MegatronGPTModel(sources.read_config(nemo_folder))
    save_next(nemo_folder, tmp_path / "next", model=tiny_sentencepiece_model)
    written = OmegaConf.load(tmp_path / "next/model_config.yaml").tokenizer.model
    copy = tmp_path / "next" / written.removeprefix("nemo:")
    assert copy.read_bytes() == Path(tiny_sentencepiece_model).read_bytes()


@pytest.mark.parametrize("relative", [False, True])
def test_the_folder_of_a_tokenizer_outside_is_not_opened(
    nemo_folder, tmp_path, tiny_tokenizer_dir, monkeypatch, relative
):
    outside = Path(tiny_tokenizer_dir)
    monkeypatch.chdir(outside.parent)
    value = outside.name if relative else str(outside)
    edited(nemo_folder, tokenizer={"library": "huggingface", "type": value, "folder": None})
    with pytest.raises(UserError, match=f"tokenizer.type={value} stands in the checkpoint"):
        MegatronGPTModel(sources.read_config(nemo_folder))
    save_next(nemo_folder, tmp_path / "next", type=value)
    assert "eos_token" in text_of(tmp_path / "next")


@pytest.mark.parametrize("name", ["../secret", "a/../../secret", "{secret}", "link", "linked"])
def test_a_member_lies_in_the_archive(nemo_folder, secret, name):
    (nemo_folder / "link").symlink_to(secret)
    (nemo_folder / "linked").mkdir()
    (nemo_folder / "linked/tokenizer.json").symlink_to(secret)
    key = "tokenizer__folder" if name == "linked" else "tokenizer__merge_file"
    edited(nemo_folder, **{key: "nemo:" + name.format(secret=secret)})
    with pytest.raises(UserError, match="leads out of the archive; do not use this file"):
        sources.read_config(nemo_folder)
