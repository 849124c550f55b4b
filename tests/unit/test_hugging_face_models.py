# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A model built with the keys that NeMo's converters write computes what Hugging Face's does."""

import pytest
import torch
from omegaconf import OmegaConf

from nemo_aligner.config.schema import ARCHITECTURE_KEYS
from nemo_aligner.generation import GenerationParams, MegatronGenerator
from nemo_aligner.launch.model_loading import load_and_override_model_config, load_from_nemo
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from tests import hugging_face
from tests.cases import some_of
from tests.peft_folders import load, outputs_of
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
