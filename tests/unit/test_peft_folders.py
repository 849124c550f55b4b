# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Folders of Hugging Face's PEFT: adapters of theirs compute and learn here as they do there, and
the other way round.
"""

import json
import shutil

import pytest
import torch
import transformers
from omegaconf import OmegaConf, open_dict
from safetensors import safe_open
from safetensors.torch import load_file

from nemo_aligner.checkpoint import sources
from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.checkpoint.hugging_face.architectures import ARCHITECTURES
from nemo_aligner.checkpoint.hugging_face.peft import CHECKSUM
from nemo_aligner.launch.model_loading import load_from_nemo
from nemo_aligner.models.nlp.gpt.gpt_sft_model import GPTSFTModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_critic import MegatronGPTCriticModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
from nemo_aligner.models.nlp.gpt.reward_model_classes import reward_model_class
from tests import hugging_face
from tests.cases import some_of
from tests.oracles import oracle
from tests.peft_folders import (
    ADAPTERS,
    CONFIG,
    EXACT,
    MODULES,
    TOKENS,
    add_adapters,
    assert_same_logits,
    assert_same_tensors,
    convert,
    load,
    load_base,
    logits_in_peft,
    logits_of,
    outputs_of,
    start_from,
    with_adapters,
)
from tests.sft_steps import OPTIM, train, train_in_transformers

pytestmark = pytest.mark.slow

# --- PEFT's adapters here ---


@some_of("name", MODULES, keep=["GPT-2", "Phi 3", "Qwen 2 MoE"])
def test_adapters_of_peft_give_the_same_logits(write_folder, name):
    base, folder, model = with_adapters(write_folder, name)
    expected = logits_of(model)
    fused = ARCHITECTURES[load_base(base).config.model_type].layer
    fused = len(fused["self_attention.linear_qkv."].names) == 1
    beside = start_from(base, folder)
    assert beside.lora.variant == ("nemo" if fused else "canonical")
    assert_same_logits(beside, expected)
    with beside.adapters_merged():
        assert_same_logits(beside, expected)
    with beside.adapters_disabled():
        with model.disable_adapter():
            assert_same_logits(beside, logits_of(model))
    assert_same_logits(load(folder), expected)


@some_of(
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
    keep=3,
)
def test_settings_of_peft_mean_the_same(write_folder, settings):
    base, folder, model = with_adapters(write_folder, "Llama, odd sizes", **settings)
    expected = logits_of(model)
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
    assert_same_logits(start_from(tmp_path / "bare", folder), logits_of(model))


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


@some_of(
    ("name", "variant", "targets"),
    [
        ("Llama, odd sizes", "canonical", "all"),
        ("Llama, odd sizes", "nemo", "all"),
        ("Qwen 2", "nemo", "attention"),
        ("Gemma", "canonical", "mlp"),
        ("GPT-2", "nemo", "all"),
        ("Gemma 3", "canonical", "all"),
        ("OLMo 2", "nemo", "all"),
        ("Cohere 2", "canonical", "all"),
        ("GLM 4", "canonical", "all"),
        ("Phi 3", "nemo", "all"),
        ("Phi 3", "canonical", "all"),
        ("Mixtral", "canonical", "attention"),
        ("Qwen 2 MoE", "nemo", "attention"),
    ],
    keep=["Gemma", "GPT-2", "Qwen 2 MoE"],
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
    if (name, variant) == ("Phi 3", "canonical"):  # of several ranks in PEFT
        assert_same_logits(start_from(base, root / "sft-hf"), expected)
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


@some_of(
    ("name", "modules"),
    [
        ("Llama", MODULES["Llama, odd sizes"]),
        ("Llama", ["q_proj", "v_proj"]),
        ("Phi3", MODULES["Phi 3"]),
        ("GPT2", MODULES["GPT-2"]),
    ],
    keep=["Phi3"],
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
        train_in_transformers(theirs, 3), abs=1e-5
    )
    callback.custom_save({"step": 3}, is_train_end=True)
    theirs.save_pretrained(tmp_path / "theirs")
    ours, others = (load_file(f / ADAPTERS) for f in (callback.root / "x-hf", tmp_path / "theirs"))
    assert ours.keys() == others.keys()
    for key, tensor in others.items():
        torch.testing.assert_close(ours[key], tensor, atol=2e-5, rtol=1e-5)
    model.set_eval()
    theirs.eval()
    found = outputs_of(model)[..., :300]
    torch.testing.assert_close(found, logits_of(theirs), atol=1e-4, rtol=1e-4)


# --- heads ---


SAMPLES, LENGTHS = TOKENS[:, :20].clamp(min=1), torch.tensor([20, 13])


def scores_in_peft(model):
    padded = torch.where(torch.arange(20) < LENGTHS[:, None], SAMPLES, 0)
    return logits_of(model, padded, attention_mask=(padded > 0).long())


def assert_same_scores(model, expected):
    found = model.infer((SAMPLES, LENGTHS))
    torch.testing.assert_close(found.view_as(expected), expected, **EXACT)


def with_headed_adapters(write_folder, name, kind, task_type):
    """Folders of a base with a head and of adapters over it, and the `PeftModel`, whose own head
    is another one.
    """
    base = write_folder(hugging_face.with_head(kind, name), "base")
    modules = MODULES.get(name, ["q_proj", "v_proj"])
    theirs = add_adapters(load_base(base, kind), modules, task_type=task_type)
    inside = theirs.base_model.model
    head = (inside.score if hasattr(inside, "score") else inside.classifier).modules_to_save
    with torch.no_grad():
        for parameter in head["default"].parameters():
            parameter.add_(0.5)
    theirs.save_pretrained(base.with_name("adapters"))
    return base, base.with_name("adapters"), theirs


@pytest.mark.parametrize("name", ["Llama 2", "GPT-2"])
def test_a_reward_model_gives_the_same_scores(write_folder, tmp_path, name):
    kind = "SequenceClassification"
    base, folder, theirs = with_headed_adapters(write_folder, name, kind, "SEQ_CLS")
    expected = scores_in_peft(theirs)
    started = start_from(base, folder, MegatronGPTRewardModel)
    for model in (started, load(folder, MegatronGPTRewardModel)):
        assert model.has_trained_head
        assert_same_scores(model, expected)

    model = start_from(base, folder, MegatronGPTRewardModel)
    model.unwrapped()[0].rm_head.weight.data.mul_(1.5)
    model.save_to(f"{tmp_path}/rm.nemo")
    assert convert("nemo-to-hf", tmp_path / "rm.nemo", tmp_path / "back") == 0
    config = json.loads((tmp_path / "back" / CONFIG).read_text())
    assert config["task_type"] == "SEQ_CLS" and config["modules_to_save"] == ["score"]
    again = oracle("peft").PeftModel.from_pretrained(load_base(base, kind), tmp_path / "back")
    assert_same_scores(model, scores_in_peft(again.eval()))


def test_a_reward_model_over_a_language_model(write_folder, tmp_path):
    """As PEFT users train them: the base is a language model, the head is in the adapters."""
    base = write_folder(hugging_face.randomized(hugging_face.FOLDERS["Llama 2"]), "base")
    torch.manual_seed(4)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=3, pad_token_id=0, attn_implementation="eager"
    )
    theirs = add_adapters(theirs, ["q_proj", "up_proj"], task_type="SEQ_CLS")
    theirs.save_pretrained(tmp_path / "adapters")
    section = sources.read_config(tmp_path / "adapters")
    assert section.reward_model_type == "regression" and section.regression.num_attributes == 3
    assert convert("nemo-to-hf", tmp_path / "adapters", tmp_path / "whole", "--merged") == 0
    whole = load_base(tmp_path / "whole", "SequenceClassification").eval()
    assert "lm_head.weight" not in load_file(tmp_path / "whole" / "model.safetensors")
    expected = scores_in_peft(theirs)
    whole.config.pad_token_id = 0
    torch.testing.assert_close(scores_in_peft(whole), expected, **EXACT)
    keys = {"reward_model_type": "regression", "regression": {"num_attributes": 3}}
    model = start_from(base, tmp_path / "adapters", reward_model_class("regression"), **keys)
    assert model.has_trained_head
    assert_same_scores(model, expected)


@pytest.mark.parametrize("name", ["Llama 2", "GPT-2"])
def test_a_critic_gives_the_same_values(write_folder, tmp_path, name):
    kind = "TokenClassification"
    base, folder, theirs = with_headed_adapters(write_folder, name, kind, "TOKEN_CLS")
    model = start_from(base, folder, MegatronGPTCriticModel)
    torch.testing.assert_close(outputs_of(model), logits_of(theirs).squeeze(-1), **EXACT)
    model.save_to(f"{tmp_path}/critic.nemo")
    assert convert("nemo-to-hf", tmp_path / "critic.nemo", tmp_path / "back") == 0
    assert_same_tensors(folder, tmp_path / "back")
