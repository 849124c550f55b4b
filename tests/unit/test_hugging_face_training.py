# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Training from a Hugging Face folder: the same steps as transformers and PyTorch make, and the
trained model written as a folder (`model.save_hf`).
"""

import pytest
import torch
import transformers
from omegaconf import OmegaConf

from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.launch.model_loading import load_from_nemo
from nemo_aligner.models.nlp.gpt.gpt_sft_model import GPTSFTModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
from nemo_aligner.training.optim import optimizer_step
from tests import hugging_face
from tests.cases import some_of
from tests.tiny_models import tiny_config

pytestmark = pytest.mark.slow

STEPS, SAMPLES, WIDTH = 5, 4, 24
OPTIM = {
    "name": "distributed_fused_adam",
    "lr": 0.01,
    "weight_decay": 0.0,
    "betas": [0.9, 0.95],
    "eps": 1e-8,
    "sched": {"name": "constant"},
}


def batches():
    """Batches of SFT with the first 5 to 8 tokens as the prompt."""
    generator = torch.Generator().manual_seed(6)
    for _ in range(STEPS):
        tokens = torch.randint(0, 300, (SAMPLES, WIDTH + 1), generator=generator)
        mask = (torch.arange(WIDTH) >= torch.arange(5, 5 + SAMPLES)[:, None]).float()
        yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask}


def steps_of_transformers(hf) -> list[float]:
    optimizer = torch.optim.Adam(hf.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for batch in batches():
        logprobs = torch.log_softmax(hf(batch["tokens"]).logits, -1)
        nll = -logprobs.gather(-1, batch["labels"][..., None])[..., 0]
        loss = (nll * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(hf.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@some_of("name", ["Llama", "Qwen2", "Gemma", "Mixtral"])
def test_sft_steps_equal_those_of_transformers(write_folder, tmp_path, name):
    # All rows belong to tokens: here ids that are none get no probability.
    # All rows learn: transformers leaves out that of the padding.
    settings = {**hugging_face.ODD, "vocab_size": 300, "pad_token_id": None}
    if name == "Mixtral":
        settings |= {"num_local_experts": 4, "router_aux_loss_coef": 0.0}
    hf = hugging_face.randomized(hugging_face.causal_lm(name, **settings))
    job = OmegaConf.create({"micro_batch_size": 2, "precision": 32, "optim": OPTIM})
    model = load_from_nemo(GPTSFTModel, job, None, restore_path=write_folder(hf))
    optimizer, scheduler = model.setup_megatron_optimization(max_steps=STEPS)
    callback = CheckpointCallback(tmp_path, model, optimizer, scheduler, name="sft", save_hf=True)
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        model.prepare_for_training_step()
        losses.append(model.get_loss_and_metrics(batch, forward_only=False)[0])
        optimizer_step(optimizer, scheduler, 1.0)
    assert losses == pytest.approx(steps_of_transformers(hf), abs=1e-4)

    callback.custom_save({"step": STEPS}, is_train_end=True)
    written = transformers.AutoModelForCausalLM.from_pretrained(
        callback.root / "sft-hf", attn_implementation="eager"
    )
    assert type(written) is type(hf)
    tokens = next(batches())["tokens"]
    with torch.no_grad():
        torch.testing.assert_close(written(tokens).logits, hf(tokens).logits, atol=1e-3, rtol=1e-3)


def _callback(model, tmp_path, **options):
    return CheckpointCallback(
        tmp_path, model, *model.setup_megatron_optimization(max_steps=1), name="x", **options
    )


def test_every_checkpoint_replaces_the_folder(tiny_tokenizer_dir, tmp_path):
    model = MegatronGPTRewardModel(tiny_config(tiny_tokenizer_dir, "llama"))
    callback = _callback(model, tmp_path, save_hf="every_checkpoint")
    head = model.unwrapped()[0].rm_head
    for step in (1, 2):
        head.weight.data.fill_(step)
        head.bias.data.fill_(0.25)  # has no place; a job warns and goes on
        callback.custom_save({"step": step})
        hf = transformers.AutoModelForSequenceClassification.from_pretrained(
            callback.root / "x-hf"
        )
        assert (hf.score.weight == step).all()
    assert not [path for path in callback.root.iterdir() if path.name.endswith(".writing")]


def test_what_cannot_be_written_is_refused_before_training(tiny_tokenizer_dir, tmp_path):
    model = GPTSFTModel(tiny_config(tiny_tokenizer_dir, "llama", bias=True))
    with pytest.raises(UserError, match=r"Llama cannot express .*model\.bias=True"):
        _callback(model, tmp_path, save_hf=True)
    with pytest.raises(ConfigError, match="save_hf='always'"):
        _callback(model, tmp_path, save_hf="always")
    model = MegatronGPTRewardModel(tiny_config(tiny_tokenizer_dir, "llama", use_avg_pool=True))
    with pytest.raises(UserError, match=r"model\.use_avg_pool=True"):
        _callback(model, tmp_path, save_hf=True)
