# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m nemo_aligner.convert`: there and back gives the same bits; errors leave nothing."""

import errno
import functools
import json
import shutil
import tarfile

import pytest
import torch
import transformers
from omegaconf import OmegaConf
from safetensors.torch import load_file

from nemo_aligner.checkpoint import dist_ckpt, nemo_archive
from nemo_aligner.checkpoint.hugging_face import writing
from nemo_aligner.checkpoint.hugging_face.architecture import PER_SAMPLE, PER_TOKEN, as_class_reads
from nemo_aligner.checkpoint.hugging_face.writing import describe
from nemo_aligner.convert.__main__ import main
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
from tests import hugging_face
from tests.cases import some_of
from tests.peft_folders import convert, outputs_of
from tests.tiny_models import GPT2_LIKE, tiny_config
from tests.unit.test_hugging_face_folders import with_class

pytestmark = pytest.mark.slow

TOKENS = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(1))
# What `config.json` holds beside the model, or can say in several ways; the logits are compared
BESIDE = {"transformers_version", "_name_or_path", "max_window_layers", "sliding_window"}
BESIDE |= {"decoder_sparse_step", "mlp_only_layers", "head_dim"}


def tensors_of(folder) -> dict[str, torch.Tensor]:
    files = map(load_file, sorted(folder.glob("*.safetensors")))
    return {name: tensor for file in files for name, tensor in file.items()}


def assert_same_bits(folder, back, **dtype):
    """`dtype`: another one of the tensors in `back`."""
    before, after = tensors_of(folder), tensors_of(back)
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        tensor = tensor.to(**dtype)
        assert after[key].dtype == tensor.dtype and torch.equal(after[key], tensor), key


def there_and_back(folder, tmp_path, *words):
    """The folder that becomes a .nemo and a folder again."""
    assert convert("hf-to-nemo", folder, tmp_path / "model.nemo", "--overwrite") == 0
    back = tmp_path / "back"
    assert convert("nemo-to-hf", tmp_path / "model.nemo", back, "--overwrite", *words) == 0
    return back


@some_of("name", hugging_face.FOLDERS, keep=hugging_face.FEW)
def test_there_and_back_gives_the_same_bits(write_folder, tmp_path, name):
    hf = hugging_face.randomized(hugging_face.FOLDERS[name])
    if name == "Qwen 2":
        hf = hf.bfloat16()
    folder = write_folder(hf, max_shard_size="40KB")
    back = there_and_back(folder, tmp_path, "--shard-size", 0.00004)
    assert_same_bits(folder, back)
    read = transformers.AutoConfig.from_pretrained
    configs = [read(f).to_dict() for f in (folder, back)]
    for key, value in configs[0].items():
        if key == "rope_parameters":
            assert value.items() <= configs[1][key].items()
        elif key not in BESIDE:
            assert value == configs[1][key], key
    windows = [config.get("sliding_window") or None for config in configs]
    assert windows[0] == windows[1]
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors_of(back))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (back / file).read_text() == (folder / file).read_text()

    load = functools.partial(type(hf).from_pretrained, attn_implementation="eager")
    with torch.no_grad():
        assert torch.equal(load(back)(TOKENS).logits, load(folder)(TOKENS).logits)
    settings = "generation_config.json"
    before, after = (json.loads((f / settings).read_text()) for f in (folder, back))
    assert before | ({} if configs[0].get("eos_token_id") else {"eos_token_id": 299}) == after


def test_a_folder_without_a_tokenizer_is_converted(write_folder, tmp_path):
    folder = write_folder(hugging_face.randomized(hugging_face.FOLDERS["Llama 2"]))
    hugging_face.edit_json(folder / "config.json", eos_token_id=7)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert convert("hf-to-nemo", folder, tmp_path / "out.nemo") == 0


@some_of(
    ("name", "kind"),
    [
        (name, role.removeprefix("For"))
        for role in (PER_SAMPLE, PER_TOKEN)
        for name in with_class(role)
    ],
    keep=4,
)
def test_heads_go_there_and_back(write_folder, tmp_path, name, kind):
    hf = hugging_face.with_head(kind, name, labels=2)
    folder = write_folder(hf)
    back = there_and_back(folder, tmp_path)
    assert_same_bits(folder, back)
    auto = getattr(transformers, f"AutoModelFor{kind}")
    again = auto.from_pretrained(back, attn_implementation="eager")
    assert type(again) is type(hf) and again.config.num_labels == 2


def test_a_model_of_this_package_goes_to_hugging_face(tiny_tokenizer_dir, tmp_path):
    """One that never was a folder: the first architecture that can express it is written, without
    the padding of the vocabulary.
    """
    cases = ("llama", {}, "LlamaForCausalLM"), ("gpt2", GPT2_LIKE, "GPT2LMHeadModel")
    for name, keys, class_name in cases:
        model = MegatronGPTModel(tiny_config(tiny_tokenizer_dir, name, **keys))
        model.save_to(str(tmp_path / f"{name}.nemo"))
        assert convert("nemo-to-hf", tmp_path / f"{name}.nemo", tmp_path / name) == 0
        tables = tensors_of(tmp_path / name).items()
        tables = [table for key, table in tables if "embed_tokens" in key or "wte" in key]
        assert [table.size(0) for table in tables] == [300]
        hf = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / name, attn_implementation="eager"
        )
        assert type(hf).__name__ == class_name
        assert hf.config.vocab_size == model.tokenizer.vocab_size == 300
        model.set_eval()
        with torch.no_grad():
            expected = hf(TOKENS).logits
        found = outputs_of(model, TOKENS)[..., :300]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_reward_model_goes_to_hugging_face(tiny_tokenizer_dir, tmp_path, capsys):
    model = MegatronGPTRewardModel(tiny_config(tiny_tokenizer_dir, "llama"))
    model.unwrapped()[0].rm_head.bias.data.fill_(0.5)
    model.save_to(str(tmp_path / "rm.nemo"))
    assert convert("nemo-to-hf", tmp_path / "rm.nemo", tmp_path / "rm") == 2
    assert "bias [0.5]" in capsys.readouterr().err
    assert convert("nemo-to-hf", tmp_path / "rm.nemo", tmp_path / "rm", "--drop-head-bias") == 0
    hf = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "rm", attn_implementation="eager"
    )
    hf.config.pad_token_id = 299
    model.set_eval()
    lengths = torch.full((2,), TOKENS.size(1))
    with torch.no_grad():
        expected = hf(TOKENS.clamp(max=298)).logits.squeeze(-1) + 0.5
    rewards = model.infer((TOKENS.clamp(max=298), lengths)).view(-1)
    torch.testing.assert_close(rewards, expected, atol=1e-5, rtol=1e-5)


def test_transformers_stops_at_the_end_token_of_the_tokenizer(write_folder, tmp_path):
    folder = write_folder(hugging_face.randomized(hugging_face.FOLDERS["Llama 2"]))
    for name in ("config.json", "generation_config.json"):  # name no token
        settings = json.loads((folder / name).read_text())
        settings = {key: value for key, value in settings.items() if "token_id" not in key}
        (folder / name).write_text(json.dumps(settings))
    for settings, expected in ((None, 299), ({"temperature": 0.5}, 299), ({"eos_token_id": 7}, 7)):
        (folder / "generation_config.json").unlink(missing_ok=True)
        if settings:
            (folder / "generation_config.json").write_text(json.dumps(settings))
        back = there_and_back(folder, tmp_path)
        hf = transformers.AutoModelForCausalLM.from_pretrained(back)
        assert hf.generation_config.eos_token_id == expected
        assert hf.generation_config.temperature == (settings or {}).get("temperature")


def test_names_of_labels_come_back(write_folder, tmp_path):
    hf = hugging_face.with_head("SequenceClassification", "Llama 2", 2)
    hf.config.id2label = {0: "helpful", 1: "safe"}
    hf.config.label2id = {"helpful": 0, "safe": 1}
    back = there_and_back(write_folder(hf), tmp_path)
    config = transformers.AutoConfig.from_pretrained(back)
    assert config.id2label == hf.config.id2label and config.label2id == hf.config.label2id


def test_a_dtype_can_be_asked_for(folder, tmp_path):
    assert convert("hf-to-nemo", folder, tmp_path / "nemo", "--dtype", "bf16") == 0
    assert convert("nemo-to-hf", tmp_path / "nemo", tmp_path / "back") == 0
    assert convert("nemo-to-hf", folder, tmp_path / "half", "--dtype", "bf16") == 0
    for name in ("back", "half"):
        assert_same_bits(folder, tmp_path / name, dtype=torch.bfloat16)
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == "bfloat16"


# --- errors: one message, nothing half-written ---


@pytest.fixture
def folder(write_folder):
    return write_folder(hugging_face.randomized(hugging_face.FOLDERS["Llama 2"]))


def left_beside(path) -> list[str]:
    return sorted(child.name for child in path.iterdir() if "writing" in child.name)


def test_a_full_disk_leaves_nothing(folder, tmp_path, monkeypatch, capsys):
    def full(*_arguments, **_settings):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(dist_ckpt, "write", full)
        assert convert("hf-to-nemo", folder, tmp_path / "model.nemo") == 2
    assert "No space left" in capsys.readouterr().err
    assert not (tmp_path / "model.nemo").exists() and not left_beside(tmp_path)

    assert convert("hf-to-nemo", folder, tmp_path / "model.nemo") == 0
    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_tensors", full)
        assert convert("nemo-to-hf", tmp_path / "model.nemo", tmp_path / "back") == 2
    assert not (tmp_path / "back").exists() and not left_beside(tmp_path)


def test_folders_of_something_else_are_never_replaced(folder, tmp_path, capsys):
    nemo = tmp_path / "model.nemo"
    assert convert("hf-to-nemo", folder, nemo) == 0
    assert convert("hf-to-nemo", folder, nemo) == 2  # without --overwrite
    assert "exists" in capsys.readouterr().err
    home = tmp_path / "home"
    home.mkdir()
    (home / "precious.txt").write_text("mine")
    assert convert("nemo-to-hf", nemo, home, "--overwrite") == 2
    assert "a folder of something else" in capsys.readouterr().err
    assert convert("nemo-to-hf", nemo, tmp_path, "--overwrite") == 2
    assert "holds the source" in capsys.readouterr().err
    assert (home / "precious.txt").read_text() == "mine" and nemo.is_file()
    assert convert("nemo-to-hf", nemo, tmp_path / "hf") == 0
    assert convert("nemo-to-hf", nemo, tmp_path / "hf", "--overwrite") == 0
    assert not [child for child in tmp_path.iterdir() if child.suffix in (".former", ".writing")]


def test_files_are_read_where_they_lie(folder, tmp_path, monkeypatch, capsys):
    """Unpacking would write the weights once more; only a compressed file needs it."""
    plain, packed = tmp_path / "plain.nemo", tmp_path / "packed.nemo"
    assert convert("hf-to-nemo", folder, plain) == 0
    with tarfile.open(plain) as source, tarfile.open(packed, "w:gz") as target:
        for member in source:
            target.addfile(member, source.extractfile(member) if member.isreg() else None)
    assert convert("nemo-to-hf", packed, tmp_path / "from_packed") == 0
    monkeypatch.setattr(nemo_archive, "_unpacked_weights", None)  # calling it would fail
    assert convert("nemo-to-hf", plain, tmp_path / "from_plain") == 0
    monkeypatch.undo()
    for name in ("from_plain", "from_packed"):
        assert_same_bits(folder, tmp_path / name)

    short = tmp_path / "short.nemo"
    short.write_bytes(plain.read_bytes()[: plain.stat().st_size // 2])
    assert convert("nemo-to-hf", short, tmp_path / "from_short") == 2
    assert "short.nemo is damaged or incomplete" in capsys.readouterr().err

    bad = tmp_path / "link.nemo"
    with tarfile.open(plain) as source, tarfile.open(bad, "w") as target:
        for member in source:
            content = source.extractfile(member)
            if member.name.endswith(".distcp"):
                member.type, member.linkname = tarfile.SYMTYPE, "/etc/hostname"
                member.size, content = 0, None
            target.addfile(member, content)
    assert convert("nemo-to-hf", bad, tmp_path / "from_bad") == 2
    assert "a link or a path" in capsys.readouterr().err
    assert not (tmp_path / "from_short").exists() and not (tmp_path / "from_bad").exists()


def test_what_a_class_has_by_default_is_not_left_to_it(tiny_tokenizer_dir, tmp_path):
    """Mistral's class has a window, Nemotron's rotates half of a head, Qwen3's and Gemma's have
    heads of their own size.
    """
    config = transformers.MistralConfig(**hugging_face.SIZES | {"sliding_window": None})
    source = tmp_path / "mistral"
    transformers.MistralForCausalLM(config).save_pretrained(source)
    shutil.copytree(tiny_tokenizer_dir, source, dirs_exist_ok=True)
    again = transformers.AutoConfig.from_pretrained(there_and_back(source, tmp_path))
    assert again.sliding_window is None and again.model_type == "mistral"

    sizes = dict(num_layers=2, hidden_size=32, num_attention_heads=4, encoder_seq_length=48)
    common = dict(normalization="rmsnorm", activation="swiglu", bias=False)
    common |= dict(position_embedding_type="rope", share_embeddings_and_output_weights=True)
    nemotron = dict(normalization="layernorm1p", activation="squared-relu")
    for keys, kind, expected in (
        (dict(qk_layernorm=True), "qwen3", {"head_dim": 8}),
        (dict(rotary_percentage=0.5), "phi3", {}),
        (nemotron, "nemotron", {"rope_parameters.partial_rotary_factor": 1.0}),
    ):
        architecture, written, _ = describe(OmegaConf.create(sizes | common | keys))
        assert architecture.model_type == kind
        whole = OmegaConf.create(as_class_reads(written))
        assert {name: OmegaConf.select(whole, name) for name in expected} == expected


def test_what_hugging_face_cannot_express_is_named(tiny_tokenizer_dir, tmp_path, capsys):
    model = MegatronGPTModel(tiny_config(tiny_tokenizer_dir, "llama", bias=True))
    model.save_to(str(tmp_path / "model.nemo"))
    assert convert("nemo-to-hf", tmp_path / "model.nemo", tmp_path / "hf") == 2
    said = capsys.readouterr().err
    assert "llama cannot express model.add_qkv_bias=True, model.bias=True" in said
    files = tmp_path / "model.nemo", tmp_path / "hf"
    assert convert("nemo-to-hf", *files, "--architecture", "bert") == 2
    assert "'bert' is not known" in capsys.readouterr().err


def test_info_counts_the_parameters(folder, tmp_path, capsys):
    assert convert("hf-to-nemo", folder, tmp_path / "model.nemo") == 0
    capsys.readouterr()
    expected = sum(tensor.numel() for tensor in tensors_of(folder).values())
    for path in (folder, tmp_path / "model.nemo"):
        assert main(["nemo-info", str(path), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["parameters"] == expected
        assert found["keys"]["num_layers"] == 2
    assert main(["nemo-info", str(tmp_path)]) == 2
