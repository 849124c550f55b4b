# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders as checkpoints of a job."""

import pytest
import torch
from omegaconf import OmegaConf

from nemo_aligner.launch.model_loading import load_from_nemo
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.training.megatron_steps import forward_collect

TOKENS = torch.randint(0, 300, (2, 1200), generator=torch.Generator().manual_seed(1))
# Sizes that divide into nothing: 301 ids, groups of 3 heads, heads of another size than
# hidden_size / heads.
ODD = dict(
    vocab_size=301,
    hidden_size=36,
    intermediate_size=52,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=1300,
    initializer_range=0.15,
)


def logits_of(model, tokens):
    return forward_collect(
        model.model, {"tokens": tokens}, micro_batch_size=2, output_fn=lambda output, _: output
    )


def load(folder, **keys):
    """The model of a folder, as a job loads it."""
    job = OmegaConf.create({"micro_batch_size": 2, "precision": 32, **keys})
    model = load_from_nemo(MegatronGPTModel, job, None, restore_path=folder)
    model.set_eval()
    return model


KINDS = ("Llama 2", "Llama 3.1", "Llama 3.2", "Mistral", "Qwen 2", "Gemma", "GPT-2")


@pytest.mark.parametrize("name", KINDS)
def test_a_folder_loads_directly(write_folder, name):
    folder, hf = write_folder(name)
    model = load(folder)
    with torch.no_grad():
        expected = hf(TOKENS).logits
    torch.testing.assert_close(logits_of(model, TOKENS), expected, atol=1e-5, rtol=1e-5)
