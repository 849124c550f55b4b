# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Commands on folders of Hugging Face's PEFT and adapters: there and back, merging, bases; and
what is refused.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from nemo_aligner.checkpoint import adapters, sources
from nemo_aligner.checkpoint.hugging_face.architectures import ARCHITECTURES
from nemo_aligner.checkpoint.hugging_face.peft import PeftTensors
from nemo_aligner.convert.__main__ import main
from nemo_aligner.core.errors import UserError
from nemo_aligner.models.nlp.gpt.gpt_sft_model import GPTSFTModel
from tests import hugging_face
from tests.cases import some_of
from tests.hugging_face import change_tensors, edit_json
from tests.peft_folders import (
    ADAPTERS,
    CONFIG,
    assert_same_logits,
    assert_same_tensors,
    convert,
    load,
    load_base,
    logits_of,
    start_from,
    with_adapters,
)

pytestmark = pytest.mark.slow


# --- the commands ---


@pytest.fixture
def llama(write_folder):
    return with_adapters(write_folder, "Llama, odd sizes", modules=["q_proj", "v_proj", "up_proj"])


def test_there_and_back_gives_the_same_bits(llama, tmp_path):
    base, folder, _ = llama
    assert convert("hf-to-nemo", folder, tmp_path / "a.nemo") == 0
    assert convert("nemo-to-hf", tmp_path / "a.nemo", tmp_path / "back") == 0
    assert_same_tensors(folder, tmp_path / "back")
    before, after = (json.loads((f / CONFIG).read_text()) for f in (folder, tmp_path / "back"))
    for key in ("r", "lora_alpha", "peft_type", "task_type", "base_model_name_or_path"):
        assert before[key] == after[key], key
    assert set(before["target_modules"]) == set(after["target_modules"])
    assert convert("hf-to-nemo", tmp_path / "back", tmp_path / "b.nemo") == 0
    with sources.open_source(tmp_path / "a.nemo").own_tensors() as a:
        with sources.open_source(tmp_path / "b.nemo").own_tensors() as b:
            assert a.shapes() == b.shapes()
            for key, shape in a.shapes().items():
                whole = tuple(slice(0, size) for size in shape)
                assert torch.equal(a.read(key, whole), b.read(key, whole))


@some_of("name", ["Llama, odd sizes", "GPT-2", "Phi 3", "Qwen 2 MoE"], keep=["Phi 3"])
def test_merged_equals_unmerged(write_folder, tmp_path, name):
    base, folder, model = with_adapters(write_folder, name)
    expected = logits_of(model)
    assert convert("hf-to-nemo", folder, tmp_path / "adapters.nemo") == 0
    assert convert("merge-lora", tmp_path / "adapters.nemo", tmp_path / "merged.nemo") == 0
    assert_same_logits(load(tmp_path / "merged.nemo"), expected)
    assert "lora_base" not in sources.open_source(tmp_path / "merged.nemo").stored_config()
    # Adapters in their layers' weights, by PEFT
    assert convert("nemo-to-hf", tmp_path / "adapters.nemo", tmp_path / "hf", "--merged") == 0
    whole = model.merge_and_unload().state_dict()
    merged = load_base(tmp_path / "hf").state_dict()
    for key, tensor in whole.items():
        torch.testing.assert_close(merged[key], tensor, atol=1e-6, rtol=1e-6, msg=key)


def test_a_base_that_has_moved(llama, tmp_path, capsys):
    base, folder, model = llama
    assert convert("hf-to-nemo", folder, tmp_path / "a.nemo") == 0
    moved = base.rename(tmp_path / "moved")
    for source in (folder, tmp_path / "a.nemo"):
        assert convert("merge-lora", source, tmp_path / "merged") == 2
        assert "--base" in capsys.readouterr().err
        out = tmp_path / f"merged-{source.name}"
        assert convert("merge-lora", source, out, "--base", moved) == 0
        assert_same_logits(load(out), logits_of(model))
    assert convert("hf-to-nemo", folder, tmp_path / "b.nemo") == 2
    assert "base_model_name_or_path" in capsys.readouterr().err
    assert convert("hf-to-nemo", folder, tmp_path / "b.nemo", "--base", moved) == 0
    base_of = adapters.base_in(sources.open_source(tmp_path / "b.nemo").stored_config())
    assert base_of.path == str(moved)
    assert convert("nemo-to-hf", tmp_path / "a.nemo", tmp_path / "c", "--base", moved) == 0
    written = json.loads((tmp_path / "c" / CONFIG).read_text())
    assert written["base_model_name_or_path"] == str(moved)


def test_another_base_is_refused(llama, write_folder, tmp_path, capsys):
    _base, folder, _ = llama
    torch.manual_seed(99)
    other = write_folder(hugging_face.FOLDERS["Llama, odd sizes"](), "other")
    assert convert("hf-to-nemo", folder, tmp_path / "a.nemo") == 0
    assert convert("nemo-to-hf", tmp_path / "a.nemo", tmp_path / "back") == 0
    for command, source in (
        ("merge-lora", tmp_path / "a.nemo"),
        ("merge-lora", tmp_path / "back"),  # the checksum is in the folder
        ("hf-to-nemo", tmp_path / "back"),
        ("nemo-to-hf", tmp_path / "a.nemo"),
    ):
        assert convert(command, source, tmp_path / "out", "--base", other) == 2
        assert "another base" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="another base"):
        start_from(other, tmp_path / "back")


@some_of("name", ["Llama, odd sizes", "GPT-2", "Phi 3", "Qwen 2 MoE"], keep=["Phi 3"])
def test_checksums_do_not_depend_on_the_form(write_folder, tmp_path, name):
    base = write_folder(hugging_face.randomized(hugging_face.FOLDERS[name]), "base")
    assert convert("hf-to-nemo", base, tmp_path / "base.nemo") == 0
    found = set()
    for path in (base, tmp_path / "base.nemo"):
        with sources.open_source(path).tensors() as source:
            found.add(adapters.checksum_of_source(source))
    model = load(base, GPTSFTModel)
    model.init_peft({"peft_scheme": "lora"})
    assert found == {model._base.checksum}


def test_info_says_what_adapters_belong_to(llama, tmp_path, capsys):
    base, folder, _ = llama
    assert convert("hf-to-nemo", folder, tmp_path / "a.nemo") == 0
    shutil.rmtree(base)  # it is not needed
    capsys.readouterr()
    assert main(["nemo-info", str(tmp_path / "a.nemo"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    known = {"target_modules": ["attention_qkv", "mlp_fc1"], "adapter_dim": 4, "alpha": 6.0}
    known |= {"variant": "canonical", "layer_selection": None, "base": str(base)}
    checksum = found["adapters"]["base_checksum"]
    assert found["adapters"] == {**known, "base_checksum": checksum}
    assert len(found["adapters"]["base_checksum"]) == 16
    assert main(["nemo-info", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["adapters"]["target_modules"]) == {"q_proj", "v_proj", "up_proj"}
    assert found["adapters"]["base"] == str(base) and found["adapters"]["base_checksum"] is None
    assert found["parameters"] == sum(t.numel() for t in load_file(folder / ADAPTERS).values())
    assert main(["nemo-info", str(folder)]) == 0
    assert "adapters (LoRA)\n  target_modules" in capsys.readouterr().out


def test_options_without_a_meaning_are_refused(llama, tmp_path, capsys):
    base, folder, _ = llama
    for arguments, says in (
        (("merge-lora", base, tmp_path / "x"), "nothing to merge"),
        (("nemo-to-hf", base, tmp_path / "x", "--merged"), "--merged is for adapters"),
        (("nemo-to-hf", base, tmp_path / "x", "--base", base), "--base is for adapters"),
        (("hf-to-nemo", base, tmp_path / "x", "--base", base), "--base is for adapters"),
        (("nemo-to-hf", folder, tmp_path / "x", "--architecture", "llama"), "add --merged"),
    ):
        assert convert(*arguments) == 2
        assert says in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


# --- what is refused, by name ---


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A base and adapters that tests copy."""
    root = tmp_path_factory.mktemp("kept")

    def write(model, name):
        model.save_pretrained(root / name)
        return root / name

    with_adapters(write, "Llama, odd sizes", modules=["q_proj", "o_proj"])
    return root


@pytest.fixture
def folder(kept, tmp_path):
    return shutil.copytree(kept / "adapters", tmp_path / "adapters")


@pytest.fixture
def read(kept, folder):
    """Reads the adapters in `folder`."""
    base = sources.read_config(kept / "base")
    return lambda: PeftTensors(folder, base)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"use_dora": True}, "use_dora=True asks for DoRA"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["score", "embed_tokens"]}, "trained the whole of 'embed_tokens'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"alora_invocation_tokens": [5]}, "activated LoRA"),
        ({"r": 0}, "r=0 is not a number above 0"),
        ({"r": 8}, "but with the rank 8"),
        ({"rank_pattern": {"o_proj": 3}}, r"o_proj.*but with the rank 3"),
        ({"alpha_pattern": {"(": 3}}, r"alpha_pattern has no pattern in '\('"),
        ({"lora_dropout": 1.5}, "lora_dropout=1.5 is not a number from 0 to below 1"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern.q_proj='x' is not a number above 0"),
        ({"a_new_form_of_lora": {"x": 1}}, "a_new_form_of_lora=.* is not known here"),
        ({"task_type": "SEQ_CLS"}, "task_type=SEQ_CLS but holds no 'base_model.model.score.wei"),
        ({"layers_to_transform": [0, 5]}, r"lacks the adapter of 'model\.layers\.5"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_is_not_computed_here_is_named(folder, read, keys, says):
    edit_json(folder / CONFIG, **keys)
    with pytest.raises(UserError, match=says):
        read()


@pytest.mark.parametrize("value", [None, "x", -1, 1e400, True, [1], {"a": "b"}], ids=repr)
def test_values_that_make_no_sense_are_errors_of_the_user(folder, read, value):
    before = json.loads((folder / CONFIG).read_text())
    for key in before:
        edit_json(folder / CONFIG, **before | {key: value})
        try:
            read()
        except UserError as error:
            assert str(folder) in str(error)


Q = "base_model.model.model.layers.1.self_attn.q_proj."
A, B = f"{Q}lora_A.weight", f"{Q}lora_B.weight"


@pytest.mark.parametrize(
    ("gone", "added", "says"),
    [
        ((), {"base_model.model.lm_head.lora_A.weight": (4, 36)}, "lm_head.*, which has no place"),
        ((), {f"{Q.replace('.1.', '.3.')}lora_A.weight": (4, 36)}, r"layers\.3.* with 3 layers"),
        ((), {A: (4, 40)}, r"shapes \(4, 40\) and \(60, 4\), but .* weight of shape \(60, 36\)"),
        ((A,), {}, r"but not .*lora_A\.weight"),
        ((A, B), {}, r"lacks the adapter of 'model\.layers\.1\.self_attn\.q_proj'"),
        (None, {}, "holds no adapters"),
    ],
)
def test_tensors_without_a_place_are_named(folder, read, gone, added, says):
    def change(tensors):
        for name in [*tensors] if gone is None else gone:
            del tensors[name]
        tensors |= {name: torch.ones(shape) for name, shape in added.items()}

    change_tensors(folder / ADAPTERS, change)
    with pytest.raises(UserError, match=says):
        read()


def test_damaged_folders_are_named(folder, read):
    file = folder / ADAPTERS
    whole = file.read_bytes()
    file.write_bytes(whole[:-50])
    with pytest.raises(UserError, match=f"{ADAPTERS} is damaged or incomplete"):
        read()
    file.unlink()
    with pytest.raises(UserError, match=f"holds no {ADAPTERS}"):
        read()
    (folder / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(UserError, match="pickled adapters .*save_pretrained"):
        read()
    assert main(["nemo-info", str(folder)]) == 2
    file.write_bytes(whole)
    (folder / CONFIG).write_text("{")
    with pytest.raises(UserError, match=f"{CONFIG} cannot be read"):
        read()


def test_a_base_by_its_name_on_the_hub_is_an_error_that_names_the_key(folder, capsys, tmp_path):
    edit_json(folder / CONFIG, base_model_name_or_path="someone/llama")
    with pytest.raises(UserError, match="base_model_name_or_path='someone/llama'.*restore_from"):
        load(folder)
    assert convert("merge-lora", folder, tmp_path / "out") == 2
    assert "base_model_name_or_path='someone/llama'" in capsys.readouterr().err


def test_every_architecture_has_its_projections_all_apart_or_all_together():
    for architecture in ARCHITECTURES.values():
        layer = architecture.layer
        separate = len(layer["self_attention.linear_qkv."].names) == 3
        gated = len(layer["mlp.linear_fc1."].names) if "mlp.linear_fc1." in layer else 1
        assert separate or gated == 1, architecture.model_type
