# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders as checkpoints of a job, and what they describe."""

import contextlib
import json
import re
from pathlib import Path

import pytest
import torch
import transformers

from nemo_aligner.checkpoint import sources
from nemo_aligner.checkpoint.hugging_face.architecture import PER_SAMPLE, PER_TOKEN
from nemo_aligner.checkpoint.hugging_face.architectures import ARCHITECTURES
from nemo_aligner.core.errors import UserError
from nemo_aligner.core.tokenizer import end_ids
from nemo_aligner.generation import GenerationParams, MegatronGenerator
from nemo_aligner.models.nlp.gpt.megatron_gpt_critic import MegatronGPTCriticModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
from nemo_aligner.models.nlp.gpt.reward_model_classes import reward_model_class
from tests import hugging_face
from tests.cases import some_of
from tests.hugging_face import change_tensors, edit_json
from tests.peft_folders import load, outputs_of

pytestmark = pytest.mark.slow

TOKENS = torch.randint(0, 300, (2, 1200), generator=torch.Generator().manual_seed(1))
KINDS = tuple(hugging_face.FOLDERS)


@some_of("name", KINDS, keep=hugging_face.FEW)
def test_a_folder_loads_directly(write_folder, name):
    hf = hugging_face.randomized(hugging_face.FOLDERS[name])
    model = load(write_folder(hf))
    with torch.no_grad():
        expected = hf(TOKENS).logits
    found = outputs_of(model, TOKENS)[..., : expected.size(-1)]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("name", ["Llama, odd sizes", "GPT-2"])
def test_greedy_generation_equals_hugging_face(write_folder, name):
    hf = hugging_face.randomized(hugging_face.FOLDERS[name])
    model = load(write_folder(hf))
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(1, 40, (20,), generator=generator)
    prompts = torch.randint(0, 299, (20, 40), generator=generator)
    engine = MegatronGenerator(model.model, model.tokenizer, max_sequence_length=200)
    # An end token would end the two at different lengths: 64 tokens of each are compared.
    params = GenerationParams(max_length=64, min_length=64, use_greedy=True)
    output = engine.generate(prompts, lengths, torch.arange(20), params)
    ids = model.tokenizer.vocab_size
    for prompt, length, row in zip(prompts, lengths, output.response_tokens, strict=True):
        tokens = prompt[None, :length]
        with torch.no_grad():
            for _ in range(64):
                logits = hf(tokens).logits[0, -1, :ids]
                logits[end_ids(model.tokenizer)] = -torch.inf  # the minimum length
                tokens = torch.cat([tokens, logits.argmax().view(1, 1)], dim=1)
        assert row[: length + 64].tolist() == tokens[0].tolist()


def has_class(architecture, role):
    with contextlib.suppress(UserError):
        return bool(architecture.class_for(role))


def with_class(role):
    """Those of `EACH` that transformers has such a class for."""
    kinds = ((name, hugging_face.FOLDERS[name]().config.model_type) for name in EACH)
    return [name for name, kind in kinds if has_class(ARCHITECTURES[kind], role)]


# One model of each architecture
EACH = ("Llama 3.2", "Mistral", "Qwen 2, odd sizes, tied", "Qwen 3", "Gemma", "Gemma 2", "Gemma 3")
EACH += ("OLMo 2", "OLMo 3", "Granite", "Cohere 2", "GLM", "GLM 4", "SmolLM 3", "GPT-2", "Phi 3")
EACH += ("Nemotron", "StarCoder 2", "Mixtral", "Qwen 2 MoE", "Qwen 3 MoE")


def test_each_architecture_is_there():
    kinds = {hugging_face.FOLDERS[name]().config.model_type for name in EACH}
    assert kinds == set(ARCHITECTURES)


@some_of(
    ("name", "labels"), [*((name, 1) for name in with_class(PER_SAMPLE)), ("Llama 2", 3)], keep=4
)
def test_a_reward_model_gives_the_same_scores(write_folder, name, labels):
    hf = hugging_face.with_head("SequenceClassification", name, labels)
    folder = write_folder(hf)
    section = sources.read_config(folder)
    assert section.regression.num_attributes == labels
    model = load(folder, reward_model_class(section.reward_model_type))
    assert model.has_trained_head
    tokens = TOKENS[:, :20].clamp(min=1)
    lengths = torch.tensor([20, 13])
    with torch.no_grad():
        padded = torch.where(torch.arange(20) < lengths[:, None], tokens, 0)
        expected = hf(padded, attention_mask=(padded > 0).long()).logits
    found = model.infer((tokens, lengths))
    torch.testing.assert_close(found.view_as(expected), expected, atol=1e-5, rtol=1e-5)


@some_of("name", with_class(PER_TOKEN), keep=4)
def test_a_critic_gives_the_same_values(write_folder, name):
    hf = hugging_face.with_head("TokenClassification", name)
    folder = write_folder(hf)
    assert sources.read_config(folder).output_sequence
    model = load(folder, MegatronGPTCriticModel)
    tokens = TOKENS[:, :20]
    with torch.no_grad():
        expected = hf(tokens).logits.squeeze(-1)
    torch.testing.assert_close(outputs_of(model, tokens), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cls", [MegatronGPTCriticModel, MegatronGPTRewardModel])
def test_a_language_model_gets_a_new_head(write_folder, cls):
    model = load(write_folder(hugging_face.randomized(hugging_face.FOLDERS["Llama 3.2"])), cls)
    assert not model.has_trained_head


# --- what is refused, by name ---


def _tiny_llama(write_folder, **settings):
    config = transformers.LlamaConfig(**hugging_face.SIZES | {"max_position_embeddings": 64})
    return write_folder(transformers.LlamaForCausalLM(config), **settings)


PART = {"rope_type": "default", "partial_rotary_factor": 0.5}
TEXT = {"rope_type": "linear", "rope_theta": 1e4, "factor": "x"}
DYNAMIC = {"type": "dynamic", "factor": 4.0}


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"model_type": "deepseek_v3"}, "'deepseek_v3' is not supported .*latent.*llama"),
        ({"model_type": "no_such"}, "architecture 'no_such' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"hidden_act": "mish"}, "hidden_act='mish'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"model_type": ["llama"]}, "has no model_type"),
        ({"rope_parameters": PART}, "rotates whole heads"),
        ({"rope_parameters": TEXT}, "factor='x'|is not valid"),
        ({"rope_scaling": DYNAMIC, "rope_parameters": None}, "rope_type='dynamic'"),
    ],
)
def test_what_cannot_be_computed_is_named(write_folder, keys, says):
    folder = _tiny_llama(write_folder)
    edit_json(folder / "config.json", **keys)
    with pytest.raises(UserError, match=says):
        sources.read_config(folder)


def test_older_forms_of_rotary_settings_mean_the_same(write_folder):
    folder = _tiny_llama(write_folder)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    llama_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    llama_3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config |= {"rope_theta": 500000.0, "rope_scaling": llama_3}
    (folder / "config.json").write_text(json.dumps(config))
    section = sources.read_config(folder)
    assert section.rotary_base == 500000.0
    assert section.scale_positional_embedding and section.scale_factor == 8.0


def test_a_missing_shard_is_named(write_folder):
    folder = _tiny_llama(write_folder, max_shard_size="20KB")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    with pytest.raises(UserError, match=f"lacks the file {shards[1].name}"):
        load(folder)


def test_a_tensor_that_the_index_does_not_list_does_not_count(write_folder):
    folder = _tiny_llama(write_folder, max_shard_size="20KB")
    shard = min(folder.glob("*.safetensors"))
    change_tensors(shard, lambda tensors: tensors.update({"left.over": torch.zeros(2)}))
    load(folder)


def test_a_truncated_file_is_named(write_folder):
    folder = _tiny_llama(write_folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="model.safetensors is damaged or incomplete"):
        load(folder)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"num_key_value_heads": 4}, r"self_attn\.q_proj\.weight|self_attn\.k_proj\.weight"),
        ({"intermediate_size": 64}, r"gate_proj\.weight has the shape \(48, 32\).* ask"),
        ({"vocab_size": 500}, r"embed_tokens.weight has the shape \(384, 32\)"),
        ({"num_hidden_layers": 3}, r"lacks 'model\.layers\.2\."),
        ({"tie_word_embeddings": True}, r"lm_head\.weight that differs from its embeddings"),
    ],
)
def test_a_configuration_of_other_weights_is_refused(write_folder, keys, says):
    folder = _tiny_llama(write_folder)
    edit_json(folder / "config.json", **keys)
    with pytest.raises(UserError, match=says):
        load(folder)


WIDTHS, BIAS = {"q": 32, "k": 16, "v": 16}, "model.layers.{}.self_attn.{}_proj.bias"
BIASES = {BIAS.format(n, part): torch.zeros(WIDTHS[part]) for part in WIDTHS for n in (0, 1)}


@pytest.mark.parametrize(
    ("removed", "added", "says"),
    [
        ("lm_head.weight", {}, "lacks 'lm_head.weight'"),
        ("model.norm.weight", {}, "lacks 'model.norm.weight'"),
        ("model.layers.1.self_attn.o_proj.weight", {}, "lacks 'model.layers.1.self_attn.o_proj"),
        (None, BIASES, r"no place in a model of llama.*_proj\.bias"),
        (None, {"model.layers.0.self_attn.sinks": torch.zeros(4)}, "llama.*sinks"),
        (None, {"model.norm.weight": torch.zeros(32, dtype=torch.int8)}, r"weight of the type I8"),
    ],
)
def test_weights_that_do_not_fit_are_named(write_folder, removed, added, says):
    folder = _tiny_llama(write_folder)

    def change(tensors):
        tensors.pop(removed, None)
        tensors.update(added)

    change_tensors(folder / "model.safetensors", change)
    with pytest.raises(UserError, match=says):
        load(folder)


def test_a_missing_expert_is_named(write_folder):
    folder = write_folder(hugging_face.FOLDERS["Mixtral"]())
    name = "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    change_tensors(folder / "model.safetensors", lambda tensors: tensors.pop(name))
    with pytest.raises(UserError, match=r"experts\.1"):
        load(folder)


@pytest.mark.parametrize(
    "lost, added, says",
    [
        ("post_attention_layernorm.weight", {}, "lacks .*layernorm"),
        (None, {"model.layers.0.mlp.down_proj.weight": torch.ones(2)}, "no place"),
    ],
    ids=["without its norm", "with a dense MLP"],
)
def test_a_layer_of_experts_has_what_one_has(write_folder, lost, added, says):
    def change(tensors):
        tensors.pop(f"model.layers.0.{lost}", None)
        tensors.update(added)

    folder = write_folder(hugging_face.FOLDERS["Qwen 3 MoE"](), "qwen")
    change_tensors(folder / "model.safetensors", change)
    with pytest.raises(UserError, match=says):
        load(folder)


def test_a_tied_output_layer_may_be_the_table(write_folder):
    folder = _tiny_llama(write_folder)
    edit_json(folder / "config.json", tie_word_embeddings=True)

    def tie(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    change_tensors(folder / "model.safetensors", tie)
    load(folder)


def test_windows_of_qwen3_moe_cover_all_layers(write_folder):
    """Whatever max_window_layers says, as in its class."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    window = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    own = {"head_dim": 8, "initializer_range": 0.1, **experts, **window}
    build = hugging_face.causal_lm("Qwen3Moe", **own)
    hf = hugging_face.randomized(build)
    model = load(write_folder(hf))
    with torch.no_grad():
        expected = hf(TOKENS[:, :100]).logits
    torch.testing.assert_close(outputs_of(model, TOKENS[:, :100]), expected, atol=1e-5, rtol=1e-5)


def test_pickled_weights_are_refused(write_folder):
    folder = _tiny_llama(write_folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="pickled weights only.*safetensors"):
        load(folder)


def test_a_larger_tokenizer_is_refused(write_folder):
    config = transformers.LlamaConfig(**hugging_face.SIZES | {"vocab_size": 280})
    folder = write_folder(transformers.LlamaForCausalLM(config))
    with pytest.raises(UserError, match="280.*300 ids of the tokenizer"):
        load(folder)


def test_the_table_of_the_page_lists_the_architectures():
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    row = r"^\| .*? \| `(\w+)` \| (yes|no) \| (yes|no) \|$"
    expected = [
        (name, *("yes" if has_class(each, role) else "no" for role in (PER_SAMPLE, PER_TOKEN)))
        for name, each in ARCHITECTURES.items()
    ]
    assert sorted(re.findall(row, page, re.M)) == sorted(expected)
