# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A model built with the keys that NeMo's converters write computes what Hugging Face's does, and
one from a folder of Hugging Face makes the steps of transformers and PyTorch; the trained model is
written as a folder (`model.save_hf`).
"""

import pytest
import torch
from omegaconf import OmegaConf

from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.config.schema import ARCHITECTURE_KEYS
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.generation import GenerationParams, MegatronGenerator
from nemo_aligner.launch.model_loading import load_and_override_model_config, load_from_nemo
from nemo_aligner.models.nlp.gpt.gpt_sft_model import GPTSFTModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
from tests import hugging_face
from tests.cases import some_of
from tests.peft_folders import load, load_base, outputs_of
from tests.sft_steps import OPTIM, batches, train, train_in_transformers
from tests.tiny_models import tiny_config

pytestmark = pytest.mark.slow

TOKENS = torch.randint(0, 300, (2, 1200), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def build(tiny_tokenizer_dir, write_folder):
    """`build(name)`: the model `name` with Hugging Face's weights, and Hugging Face's."""

    def build(name):
        hf = hugging_face.randomized(hugging_face.FOLDERS[name])
        source = load(write_folder(hf))
        model = MegatronGPTModel(tiny_config(tiny_tokenizer_dir, **hugging_face.MODELS[name].keys))
        assert model.padded_vocab_size == hugging_face.VOCAB
        model.unwrapped()[0].load_state_dict(source.unwrapped()[0].state_dict())
        model.set_eval()
        return model, hf

    return build


@some_of("name", hugging_face.MODELS, keep=hugging_face.FEW)
def test_logits_equal_hugging_face_at_long_positions(build, name):
    model, hf = build(name)
    for width in (150, 1200):
        with torch.no_grad():
            expected = hf(TOKENS[:, :width]).logits
        found = outputs_of(model, TOKENS[:, :width])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@some_of("name", hugging_face.MODELS, keep=hugging_face.FEW)
def test_greedy_responses_equal_hugging_face(build, name):
    """Decoded with a cache, from ragged prompts that are longer than the windows; Hugging Face
    computes every prefix anew.
    """
    model, hf = build(name)
    prompts, lengths = TOKENS[:, :120], torch.tensor([120, 113])
    params = GenerationParams(max_length=10, use_greedy=True)
    output = MegatronGenerator(model.model, model.tokenizer, 200).generate(
        prompts, lengths, torch.arange(2), params
    )
    for row, length in enumerate(lengths.tolist()):
        sample = prompts[row, :length].tolist()
        while len(sample) < length + 10 and sample[-1] != model.tokenizer.eos_id:
            with torch.no_grad():
                logits = hf(torch.tensor([sample])).logits[0, -1]
            sample.append(int(logits[: model.tokenizer.vocab_size].argmax()))
        end = int(output.response_lengths[row])
        assert output.response_tokens[row, :end].tolist() == sample


@pytest.mark.parametrize("name", ["Llama 3.1", "Gemma", "Mistral", "Qwen 2 MoE", "Qwen 2, YaRN"])
def test_a_nemo_file_says_what_the_model_is(build, tmp_path, name):
    """Written and loaded over the configuration of a job, it computes the same."""
    model, _ = build(name)
    path = str(tmp_path / "model.nemo")
    model.save_to(path)
    # null: as in the file
    keys = dict.fromkeys(set(ARCHITECTURE_KEYS) & set(hugging_face.MODELS[name].keys))
    job = OmegaConf.create(keys | {"micro_batch_size": 2, "precision": 32})
    cfg = load_and_override_model_config(path, job)
    options = {"modify_config_fn": lambda _file, cfg: cfg, "restore_path": path}
    restored = load_from_nemo(MegatronGPTModel, cfg, None, **options)
    restored.set_eval()
    tokens = TOKENS[:, :300]
    assert torch.equal(outputs_of(restored, tokens), outputs_of(model, tokens))


# --- training ---

STEPS = 5


@some_of(
    "name", ["Llama", "Qwen2", "Gemma", "Mixtral", "Gemma3Text", "Olmo3", "Granite", "Cohere2"]
)
def test_sft_steps_equal_those_of_transformers(write_folder, tmp_path, name):
    # All rows belong to tokens: here ids that are none get no probability.
    # All rows learn: transformers leaves out that of the padding.
    settings = {**hugging_face.ODD, "vocab_size": 300, "pad_token_id": None}
    if name == "Mixtral":
        settings |= {"num_local_experts": 4, "router_aux_loss_coef": 0.0}
    if name in ("Olmo3", "Cohere2"):  # whose heads have hidden_size / heads channels
        settings.pop("head_dim")
    if name == "Granite":
        settings |= {"residual_multiplier": 0.5, "logits_scaling": 2.0}
        settings["attention_multiplier"] = 0.2
    hf = hugging_face.randomized(hugging_face.causal_lm(name, **settings))
    model = load(write_folder(hf), GPTSFTModel, optim=OPTIM | {"weight_decay": 0.0})
    optimizer, scheduler = model.setup_megatron_optimization(max_steps=STEPS)
    callback = CheckpointCallback(tmp_path, model, optimizer, scheduler, name="sft", save_hf=True)
    losses = train(model, optimizer, scheduler, STEPS)
    assert losses == pytest.approx(train_in_transformers(hf, STEPS, 0.0), abs=1e-4)

    callback.custom_save({"step": STEPS}, is_train_end=True)
    written = load_base(callback.root / "sft-hf")
    assert type(written) is type(hf)
    tokens = next(batches(1))["tokens"]
    with torch.no_grad():
        torch.testing.assert_close(written(tokens).logits, hf(tokens).logits, atol=2e-3, rtol=2e-3)


def _callback(model, tmp_path, **options):
    parts = model, *model.setup_megatron_optimization(max_steps=1)
    return CheckpointCallback(tmp_path, *parts, name="x", **options)


def test_every_checkpoint_replaces_the_folder(tiny_tokenizer_dir, tmp_path):
    model = MegatronGPTRewardModel(tiny_config(tiny_tokenizer_dir, "llama"))
    callback = _callback(model, tmp_path, save_hf="every_checkpoint")
    head = model.unwrapped()[0].rm_head
    for step in (1, 2):
        head.weight.data.fill_(step)
        head.bias.data.fill_(0.25)  # has no place; a job warns and goes on
        callback.custom_save({"step": step})
        hf = load_base(callback.root / "x-hf", "SequenceClassification")
        assert (hf.score.weight == step).all()
    assert not [path for path in callback.root.iterdir() if path.name.endswith(".writing")]


def test_what_cannot_be_written_is_refused_before_training(tiny_tokenizer_dir, tmp_path):
    model = GPTSFTModel(tiny_config(tiny_tokenizer_dir, "llama", bias=True))
    with pytest.raises(UserError, match=r"llama cannot express .*model\.bias=True"):
        _callback(model, tmp_path, save_hf=True)
    with pytest.raises(ConfigError, match="save_hf='always'"):
        _callback(model, tmp_path, save_hf="always")
    model = MegatronGPTRewardModel(tiny_config(tiny_tokenizer_dir, "llama", use_avg_pool=True))
    with pytest.raises(UserError, match=r"model\.use_avg_pool=True"):
        _callback(model, tmp_path, save_hf=True)
