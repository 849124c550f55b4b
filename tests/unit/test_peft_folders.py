# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Folders of Hugging Face's PEFT: adapters of theirs compute and learn here as they do there, and
the other way round.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from omegaconf import OmegaConf, open_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from nemo_aligner.checkpoint import adapters, nemo_archive
from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.checkpoint.hugging_face.architectures import ARCHITECTURES
from nemo_aligner.checkpoint.hugging_face.peft_reading import CHECKSUM, PeftTensors
from nemo_aligner.convert.__main__ import main
from nemo_aligner.core.errors import UserError
from nemo_aligner.launch.model_loading import load_from_nemo
from nemo_aligner.models.nlp.gpt.gpt_sft_model import GPTSFTModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_critic import MegatronGPTCriticModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
from nemo_aligner.training.megatron_steps import forward_collect
from nemo_aligner.training.update import optimizer_step
from tests import hugging_face
from tests.oracles import oracle
from tests.peft_folders import (
    MODULES,
    TOKENS,
    add_adapters,
    load_base,
    logits_in_peft,
    with_adapters,
)

ADAPTERS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
EXACT = {"atol": 1e-5, "rtol": 1e-5}
OPTIM = {
    "name": "distributed_fused_adam",
    "lr": 0.01,
    "weight_decay": 0.1,
    "betas": [0.9, 0.95],
    "eps": 1e-8,
    "sched": {"name": "constant"},
}


def load(path, cls=MegatronGPTModel, **keys):
    """The model of a checkpoint, as a job loads it."""
    job = OmegaConf.create({"micro_batch_size": 2, "precision": 32, **keys})
    model = load_from_nemo(cls, job, None, restore_path=path)
    model.set_eval()
    return model


def start_from(base, folder, cls=GPTSFTModel, **keys):
    """A job that goes on training the adapters in `folder`."""
    model = load(base, cls, **keys)
    model.init_peft({"peft_scheme": "lora", "restore_from_path": str(folder)})
    model.set_eval()
    return model


def outputs_of(model, tokens=TOKENS):
    with torch.no_grad():
        return forward_collect(
            model.model, {"tokens": tokens}, micro_batch_size=2, output_fn=lambda x, _: x.clone()
        )


def assert_same_logits(model, expected):
    torch.testing.assert_close(outputs_of(model)[..., : expected.size(-1)], expected, **EXACT)


def convert(*arguments) -> int:
    return main([str(argument) for argument in arguments] + ["--quiet"])


def edit(folder: Path, **keys) -> None:
    file = folder / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def change_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / ADAPTERS)
    change(tensors)
    save_file(tensors, folder / ADAPTERS, {"format": "pt"})


def assert_same_tensors(one: Path, other: Path) -> None:
    before, after = load_file(one / ADAPTERS), load_file(other / ADAPTERS)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name


# --- PEFT's adapters here ---


@pytest.mark.parametrize("name", MODULES)
def test_adapters_of_peft_give_the_same_logits(write_folder, name):
    base, folder, model = with_adapters(write_folder, name)
    with torch.no_grad():
        expected = model(TOKENS).logits
    fused = ARCHITECTURES[load_base(base).config.model_type].names.layer
    fused = len(fused["self_attention.linear_qkv."].names) == 1
    beside = start_from(base, folder)
    assert beside.lora.variant == ("nemo" if fused else "canonical")
    assert_same_logits(beside, expected)
    with beside.adapters_merged():
        assert_same_logits(beside, expected)
    with beside.adapters_disabled():
        with model.disable_adapter(), torch.no_grad():
            assert_same_logits(beside, model(TOKENS).logits)
    assert_same_logits(load(folder), expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"modules": ["q_proj", "v_proj"]},  # PEFT's default
        {"use_rslora": True},
        {"layers_to_transform": [0, 2]},
        {"layers_to_transform": 1, "layers_pattern": "layers"},
        {"rank_pattern": {"q_proj": 7, "layers.1.self_attn.o_proj": 2}},
        {"alpha_pattern": {"down_proj": 3}, "rank_pattern": {"gate_proj": 6}, "use_rslora": True},
        {"modules": r".*layers\.[01]\.(self_attn\.(q|o)_proj|mlp\.up_proj)"},
    ],
    ids=str,
)
def test_settings_of_peft_mean_the_same(write_folder, settings):
    base, folder, model = with_adapters(write_folder, "Llama, odd sizes", **settings)
    with torch.no_grad():
        expected = model(TOKENS).logits
    assert_same_logits(start_from(base, folder), expected)


def test_the_base_need_not_come_from_hugging_face(write_folder, tmp_path):
    """Names of modules choose between the architectures that can express a `.nemo`."""
    base, folder, model = with_adapters(write_folder, "Phi 3")
    assert convert("hf-to-nemo", base, tmp_path / "base.nemo") == 0
    nemo = load(tmp_path / "base.nemo")
    with open_dict(nemo.cfg):
        del nemo.cfg.hugging_face
    nemo.save_to(f"{tmp_path}/bare/")
    shutil.rmtree(base)
    with torch.no_grad():
        assert_same_logits(start_from(tmp_path / "bare", folder), model(TOKENS).logits)


# --- adapters of this package in PEFT ---


def trained(base, tuning, tmp_path, **keys):
    """A model whose adapters were trained for a step, and the folder that its job wrote."""
    job = OmegaConf.create({"micro_batch_size": 2, "precision": 32, "optim": OPTIM, **keys})
    model = load_from_nemo(GPTSFTModel, job, None, restore_path=base)
    model.init_peft({"peft_scheme": "lora", "lora_tuning": {"adapter_dim": 3, **tuning}})
    optimizer, scheduler = model.setup_megatron_optimization(max_steps=2)
    callback = CheckpointCallback(tmp_path, model, optimizer, scheduler, name="sft", save_hf=True)
    train(model, optimizer, scheduler, 2)
    callback.custom_save({"step": 2}, is_train_end=True)
    model.set_eval()
    return model, callback.root


@pytest.mark.parametrize(
    ("name", "variant", "targets"),
    [
        ("Llama, odd sizes", "canonical", "all"),
        ("Llama, odd sizes", "nemo", "all"),
        ("Qwen 2", "nemo", "attention"),
        ("Gemma", "canonical", "mlp"),
        ("GPT-2", "nemo", "all"),
        ("Phi 3", "nemo", "all"),
        ("Phi 3", "canonical", "all"),
        ("Mixtral", "canonical", "attention"),
        ("Qwen 2 MoE", "nemo", "attention"),
    ],
)
def test_trained_adapters_give_the_same_logits_in_peft(
    write_folder, tmp_path, name, variant, targets
):
    base = write_folder(hugging_face.randomized(hugging_face.FOLDERS[name]), "base")
    tuning = {"variant": variant, "target_modules": [targets], "alpha": 5}
    model, root = trained(base, tuning, tmp_path)
    expected = logits_in_peft(base, root / "sft-hf")
    assert (expected - outputs_of(load(base))[..., : expected.size(-1)]).abs().max() > 0.01
    assert_same_logits(model, expected)
    config = json.loads((root / "sft-hf" / CONFIG).read_text())
    assert config["base_model_name_or_path"] == str(base)
    with safe_open(root / "sft-hf" / ADAPTERS, framework="pt") as opened:
        assert opened.metadata()[CHECKSUM] == model._base.checksum


def test_selected_layers_go_there_and_back(write_folder, tmp_path):
    base = write_folder(hugging_face.randomized(hugging_face.FOLDERS["Llama, odd sizes"]), "base")
    tuning = {"layer_selection": [1, 3], "variant": "canonical", "target_modules": ["all"]}
    model, root = trained(base, tuning, tmp_path)
    config = json.loads((root / "sft-hf" / CONFIG).read_text())
    assert config["layers_to_transform"] == [0, 2] and config["lora_alpha"] == 3
    assert_same_logits(model, logits_in_peft(base, root / "sft-hf"))
    # From the .nemo and the checkpoint of the job the same folder comes.
    (checkpoint,) = root.glob("*step*")
    for number, source in enumerate((root / "sft.nemo", checkpoint)):
        assert convert("nemo-to-hf", source, tmp_path / f"again{number}") == 0
        assert_same_tensors(root / "sft-hf", tmp_path / f"again{number}")
    again = start_from(base, root / "sft-hf")
    assert again.lora.layers == (1, 3)
    assert_same_logits(again, outputs_of(model))


# --- learning as there ---


def batches(steps):
    """Batches of SFT with the first 5 to 8 tokens as the prompt."""
    generator = torch.Generator().manual_seed(6)
    for _ in range(steps):
        tokens = torch.randint(0, 300, (4, 25), generator=generator)
        mask = (torch.arange(24) >= torch.arange(5, 9)[:, None]).float()
        yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask}


def train(model, optimizer, scheduler, steps) -> list[float]:
    losses = []
    for batch in batches(steps):
        optimizer.zero_grad()
        model.prepare_for_training_step()
        losses.append(model.get_loss_and_metrics(batch, forward_only=False)[0])
        optimizer_step(optimizer, scheduler, 1.0)
    return losses


def train_in_peft(model, steps) -> list[float]:
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        learned, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=OPTIM["weight_decay"]
    )
    losses = []
    for batch in batches(steps):
        logprobs = torch.log_softmax(model(batch["tokens"]).logits, -1)
        nll = -logprobs.gather(-1, batch["labels"][..., None])[..., 0]
        loss = (nll * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("Llama", MODULES["Llama, odd sizes"]),
        ("Llama", ["q_proj", "v_proj"]),
        ("Phi3", MODULES["Phi 3"]),
        ("GPT2", MODULES["GPT-2"]),
    ],
)
def test_steps_of_sft_equal_those_of_peft(write_folder, tmp_path, name, modules):
    # All rows belong to tokens: here ids that are none get no probability.
    settings = {**hugging_face.ODD, "vocab_size": 300, "pad_token_id": None}
    if name == "GPT2":
        config = transformers.GPT2Config(
            vocab_size=300, n_positions=64, n_embd=36, n_layer=3, n_head=6, initializer_range=0.15
        )
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        config._attn_implementation = "eager"
        hf = hugging_face.randomized(lambda: transformers.GPT2LMHeadModel(config))
    else:
        if name == "Phi3":
            del settings["head_dim"]
        hf = hugging_face.randomized(hugging_face.causal_lm(name, **settings))
    base = write_folder(hf, "base")
    theirs = add_adapters(load_base(base), modules)
    theirs.save_pretrained(tmp_path / "adapters")

    job = OmegaConf.create({"micro_batch_size": 2, "precision": 32, "optim": OPTIM})
    model = load_from_nemo(GPTSFTModel, job, None, restore_path=base)
    model.init_peft({"peft_scheme": "lora", "restore_from_path": str(tmp_path / "adapters")})
    optimizer, scheduler = model.setup_megatron_optimization(max_steps=3)
    callback = CheckpointCallback(tmp_path, model, optimizer, scheduler, name="x", save_hf=True)
    assert train(model, optimizer, scheduler, 3) == pytest.approx(
        train_in_peft(theirs, 3), abs=1e-5
    )
    callback.custom_save({"step": 3}, is_train_end=True)
    theirs.save_pretrained(tmp_path / "theirs")
    ours, others = (load_file(f / ADAPTERS) for f in (callback.root / "x-hf", tmp_path / "theirs"))
    assert ours.keys() == others.keys()
    for key, tensor in others.items():
        torch.testing.assert_close(ours[key], tensor, atol=2e-5, rtol=1e-5)
    model.set_eval()
    theirs.eval()
    with torch.no_grad():
        torch.testing.assert_close(
            outputs_of(model, TOKENS[:, :40])[..., :300],
            theirs(TOKENS[:, :40]).logits,
            atol=1e-4,
            rtol=1e-4,
        )


# --- heads ---


def scores_in_peft(model, lengths):
    padded = torch.where(torch.arange(20) < lengths[:, None], TOKENS[:, :20].clamp(min=1), 0)
    with torch.no_grad():
        return model(padded, attention_mask=(padded > 0).long()).logits


@pytest.mark.parametrize("name", ["Llama 2", "GPT-2"])
def test_a_reward_model_gives_the_same_scores(write_folder, tmp_path, name):
    head = hugging_face.with_head("SequenceClassification", name)
    base = write_folder(head, "base")
    modules = MODULES.get(name, ["q_proj", "v_proj"])
    theirs = add_adapters(load_base(base, "SequenceClassification"), modules, task_type="SEQ_CLS")
    with torch.no_grad():
        theirs.base_model.model.score.modules_to_save["default"].weight.add_(0.5)
    folder = tmp_path / "adapters"
    theirs.save_pretrained(folder)
    lengths = torch.tensor([20, 13])
    expected = scores_in_peft(theirs, lengths)
    for model in (
        start_from(base, folder, MegatronGPTRewardModel),
        load(folder, MegatronGPTRewardModel),
    ):
        assert model.has_trained_head
        found = model.infer((TOKENS[:, :20].clamp(min=1), lengths))
        torch.testing.assert_close(found.view_as(expected), expected, **EXACT)

    model = start_from(base, folder, MegatronGPTRewardModel)
    model.unwrapped()[0].rm_head.weight.data.mul_(1.5)
    model.save_to(f"{tmp_path}/rm.nemo")
    assert convert("nemo-to-hf", tmp_path / "rm.nemo", tmp_path / "back") == 0
    config = json.loads((tmp_path / "back" / CONFIG).read_text())
    assert config["task_type"] == "SEQ_CLS" and config["modules_to_save"] == ["score"]
    again = oracle("peft").PeftModel.from_pretrained(
        load_base(base, "SequenceClassification"), tmp_path / "back"
    )
    found = model.infer((TOKENS[:, :20].clamp(min=1), lengths))
    expected = scores_in_peft(again.eval(), lengths)
    torch.testing.assert_close(found.view_as(expected), expected, **EXACT)


def test_a_reward_model_over_a_language_model(write_folder, tmp_path):
    """As PEFT users train them: the base is a language model, the head is in the adapters."""
    base = write_folder(hugging_face.randomized(hugging_face.FOLDERS["Llama 2"]), "base")
    torch.manual_seed(4)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=3, pad_token_id=0, attn_implementation="eager"
    )
    theirs = add_adapters(theirs, ["q_proj", "up_proj"], task_type="SEQ_CLS")
    theirs.save_pretrained(tmp_path / "adapters")
    section = nemo_archive.read_config(tmp_path / "adapters")
    assert section.reward_model_type == "regression" and section.regression.num_attributes == 3
    assert convert("nemo-to-hf", tmp_path / "adapters", tmp_path / "whole", "--merged") == 0
    whole = load_base(tmp_path / "whole", "SequenceClassification").eval()
    assert "lm_head.weight" not in load_file(tmp_path / "whole" / "model.safetensors")
    lengths = torch.tensor([20, 13])
    whole.config.pad_token_id = 0
    torch.testing.assert_close(
        scores_in_peft(whole, lengths), scores_in_peft(theirs, lengths), **EXACT
    )


@pytest.mark.parametrize("name", ["Llama 2", "GPT-2"])
def test_a_critic_gives_the_same_values(write_folder, tmp_path, name):
    base = write_folder(hugging_face.with_head("TokenClassification", name), "base")
    modules = MODULES.get(name, ["q_proj", "v_proj"])
    theirs = add_adapters(load_base(base, "TokenClassification"), modules, task_type="TOKEN_CLS")
    head = (
        theirs.base_model.model.score if name == "Llama 2" else theirs.base_model.model.classifier
    )
    with torch.no_grad():
        head.modules_to_save["default"].bias.add_(0.5)
    theirs.save_pretrained(tmp_path / "adapters")
    model = start_from(base, tmp_path / "adapters", MegatronGPTCriticModel)
    with torch.no_grad():
        expected = theirs(TOKENS).logits.squeeze(-1)
    torch.testing.assert_close(outputs_of(model), expected, **EXACT)
    model.save_to(f"{tmp_path}/critic.nemo")
    assert convert("nemo-to-hf", tmp_path / "critic.nemo", tmp_path / "back") == 0
    assert_same_tensors(tmp_path / "adapters", tmp_path / "back")


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
    with nemo_archive.own_tensors(tmp_path / "a.nemo") as a:
        with nemo_archive.own_tensors(tmp_path / "b.nemo") as b:
            assert a.shapes() == b.shapes()
            for key, shape in a.shapes().items():
                whole = tuple(slice(0, size) for size in shape)
                assert torch.equal(a.read(key, whole), b.read(key, whole))


@pytest.mark.parametrize("name", ["Llama, odd sizes", "GPT-2", "Phi 3", "Qwen 2 MoE"])
def test_merged_equals_unmerged(write_folder, tmp_path, name):
    base, folder, model = with_adapters(write_folder, name)
    with torch.no_grad():
        expected = model(TOKENS).logits
    assert convert("hf-to-nemo", folder, tmp_path / "adapters.nemo") == 0
    assert convert("merge-lora", tmp_path / "adapters.nemo", tmp_path / "merged.nemo") == 0
    assert_same_logits(load(tmp_path / "merged.nemo"), expected)
    assert "lora_base" not in nemo_archive.read_stored_config(tmp_path / "merged.nemo")
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
        with torch.no_grad():
            assert_same_logits(load(out), model(TOKENS).logits)
    assert convert("hf-to-nemo", folder, tmp_path / "b.nemo") == 2
    assert "base_model_name_or_path" in capsys.readouterr().err
    assert convert("hf-to-nemo", folder, tmp_path / "b.nemo", "--base", moved) == 0
    base_of = adapters.base_in(nemo_archive.read_stored_config(tmp_path / "b.nemo"))
    assert base_of.path == str(moved)
    assert convert("nemo-to-hf", tmp_path / "a.nemo", tmp_path / "c", "--base", moved) == 0
    assert json.loads((tmp_path / "c" / CONFIG).read_text())["base_model_name_or_path"] == str(
        moved
    )


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


@pytest.mark.parametrize("name", ["Llama, odd sizes", "GPT-2", "Phi 3", "Qwen 2 MoE"])
def test_checksums_do_not_depend_on_the_form(write_folder, tmp_path, name):
    base = write_folder(hugging_face.randomized(hugging_face.FOLDERS[name]), "base")
    assert convert("hf-to-nemo", base, tmp_path / "base.nemo") == 0
    found = set()
    for path in (base, tmp_path / "base.nemo"):
        with nemo_archive.stored_tensors(path) as source:
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
    assert found["adapters"] == {
        "target_modules": ["attention_qkv", "mlp_fc1"],
        "adapter_dim": 4,
        "alpha": 6.0,
        "variant": "canonical",
        "layer_selection": None,
        "base": str(base),
        "base_checksum": found["adapters"]["base_checksum"],
    }
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


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"peft_type": "LOHA"}, "peft_type='LOHA'"),
        ({"use_dora": True}, "use_dora=True asks for DoRA"),
        ({"bias": "all"}, "bias='all'"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"trainable_token_indices": [1, 2]}, r"trainable_token_indices=\[1, 2\]"),
        ({"modules_to_save": ["lm_head"]}, "trained the whole of 'lm_head'"),
        ({"modules_to_save": ["score", "embed_tokens"]}, "trained the whole of 'embed_tokens'"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters="),
        ({"layer_replication": [[0, 2]]}, "layer_replication="),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"task_type": "SEQ_2_SEQ_LM"}, "task_type='SEQ_2_SEQ_LM'"),
        ({"alora_invocation_tokens": [5]}, "activated LoRA"),
        ({"r": 0}, "r=0 is not a number above 0"),
        ({"lora_alpha": -1}, "lora_alpha=-1 is not a number above 0"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern.q_proj='x' is not a number above 0"),
        ({"a_new_form_of_lora": {"x": 1}}, "a_new_form_of_lora=.* is not known here"),
        (
            {"task_type": "SEQ_CLS"},
            "task_type=SEQ_CLS but holds no 'base_model.model.score.weight'",
        ),
        ({"layers_to_transform": [0, 5]}, r"lacks the adapter of 'model\.layers\.5"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_is_not_computed_here_is_named(kept, folder, keys, says):
    edit(folder, **keys)
    with pytest.raises(UserError, match=says):
        PeftTensors(folder, nemo_archive.read_config(kept / "base"))


Q = "base_model.model.model.layers.1.self_attn.q_proj."


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 36)}),
            r"'base_model\.model\.lm_head\.lora_A\.weight', which has no place",
        ),
        (
            lambda t: t.update(
                {"base_model.model.model.embed_tokens.weight": torch.ones(301, 36)}
            ),
            r"embed_tokens\.weight', which has no place",
        ),
        (
            lambda t: t.update({Q + "lora_magnitude_vector": torch.ones(60)}),
            "lora_magnitude_vector', which has no place",
        ),
        (
            lambda t: t.update({Q.replace("q_proj", "qkv_proj") + "lora_A.weight": torch.ones(1)}),
            r"qkv_proj\.lora_A\.weight', which has no place in a model of Llama with 3 layers",
        ),
        (
            lambda t: t.update({Q.replace(".1.", ".3.") + "lora_A.weight": torch.ones(4, 36)}),
            r"layers\.3.* with 3 layers",
        ),
        (
            lambda t: t.update({Q + "lora_A.weight": torch.ones(4, 40)}),
            r"shapes \(4, 40\) and \(60, 4\), but the weight of the base is \(60, 36\)",
        ),
        (lambda t: t.pop(Q + "lora_A.weight"), r"but not .*lora_A\.weight"),
        (
            lambda t: [t.pop(Q + f"lora_{half}.weight") for half in "AB"],
            r"lacks the adapter of 'model\.layers\.1\.self_attn\.q_proj'",
        ),
        (lambda t: t.clear(), "holds no adapters"),
    ],
)
def test_tensors_without_a_place_are_named(kept, folder, change, says):
    change_tensors(folder, change)
    with pytest.raises(UserError, match=says):
        PeftTensors(folder, nemo_archive.read_config(kept / "base"))


def test_damaged_folders_are_named(kept, folder):
    base = nemo_archive.read_config(kept / "base")
    file = folder / ADAPTERS
    whole = file.read_bytes()
    file.write_bytes(whole[:-50])
    with pytest.raises(UserError, match=f"{ADAPTERS} is damaged or incomplete"):
        PeftTensors(folder, base)
    file.unlink()
    with pytest.raises(UserError, match=f"holds no {ADAPTERS}"):
        PeftTensors(folder, base)
    (folder / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(UserError, match="pickled adapters .*save_pretrained"):
        PeftTensors(folder, base)
    file.write_bytes(whole)
    (folder / CONFIG).write_text("{")
    with pytest.raises(UserError, match=f"{CONFIG} cannot be read"):
        PeftTensors(folder, base)


def test_a_base_by_its_name_on_the_hub_is_an_error_that_names_the_key(folder, capsys, tmp_path):
    edit(folder, base_model_name_or_path="someone/llama")
    with pytest.raises(UserError, match="base_model_name_or_path='someone/llama'.*restore_from"):
        load(folder)
    assert convert("merge-lora", folder, tmp_path / "out") == 2
    assert "base_model_name_or_path='someone/llama'" in capsys.readouterr().err


def test_every_architecture_has_its_projections_all_apart_or_all_together():
    kinds = {hugging_face.FOLDERS[name]().config.model_type for name in MODULES}
    assert kinds == set(ARCHITECTURES)
    for architecture in ARCHITECTURES.values():
        layer = architecture.names.layer
        separate = len(layer["self_attention.linear_qkv."].names) == 3
        gated = len(layer["mlp.linear_fc1."].names) if "mlp.linear_fc1." in layer else 1
        assert separate or gated == 1, architecture.model_type
