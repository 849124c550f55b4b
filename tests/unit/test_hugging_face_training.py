# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Training from a Hugging Face folder: the same steps as transformers and PyTorch make, and the
trained model written as a folder (`model.save_hf`).
"""

import pytest
import torch

from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.models.nlp.gpt.gpt_sft_model import GPTSFTModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
from tests import hugging_face
from tests.cases import some_of
from tests.peft_folders import load, load_base
from tests.sft_steps import OPTIM, batches, train, train_in_transformers
from tests.tiny_models import tiny_config

pytestmark = pytest.mark.slow

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
