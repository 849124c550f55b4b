# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The GPT on Megatron Core: its optimizer, schedule, .nemo files and checkpoints.
test_hugging_face_models.py compares it with Hugging Face's implementations.
"""

import math
import tarfile
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from nemo_aligner.checkpoint import sources
from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.checkpoint.folders import complete_checkpoints, format_name
from nemo_aligner.checkpoint.forms import MARKER
from nemo_aligner.core.errors import UserError
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.training.megatron_steps import forward_backward, forward_collect
from nemo_aligner.training.optim import learning_rate, optimizer_step
from tests.tiny_models import tiny_config

pytestmark = pytest.mark.slow

TOKENS = torch.tensor([[5, 9, 200, 31, 7, 8, 11, 250], [3, 3, 17, 90, 121, 60, 2, 1]])


def logits_of(model, tokens, micro_batch_size=2):
    options = {"micro_batch_size": micro_batch_size, "output_fn": lambda output, _: output}
    return forward_collect(model.model, {"tokens": tokens}, **options)


def share_of_loss(logits, batch):
    """This micro-batch's share of the mean cross-entropy over a global batch of two samples."""
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].float().transpose(1, 2), batch["tokens"][:, 1:], reduction="sum"
    )
    loss = losses / TOKENS[:, 1:].numel()
    return loss, {"loss": loss}


def train_step(model, optimizer, scheduler, micro_batch_size=1):
    model.prepare_for_training_step()
    own = {"micro_batch_size": micro_batch_size, "loss_fn": share_of_loss}
    metrics, _ = forward_backward(model.model, {"tokens": TOKENS}, **own)
    return metrics["loss"], optimizer_step(optimizer, scheduler, 1.0)


def job(folder, cfg, **saving):
    """Where the checkpoints of a job go, and (model, optimizer, scheduler)."""
    model = MegatronGPTModel(cfg)
    parts = model, *model.setup_megatron_optimization(max_steps=10)
    return CheckpointCallback(folder, *parts, name="x", **saving), parts


def test_samples_that_no_micro_batch_divides(tiny_tokenizer_dir):
    model = MegatronGPTModel(tiny_config(tiny_tokenizer_dir))
    model.set_eval()
    tokens = TOKENS.repeat(2, 1)[:3]
    found, wanted = logits_of(model, tokens, 2), logits_of(model, tokens, 3)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
    with pytest.raises(UserError, match="3 samples.*micro_batch_size=2"):
        own = {"micro_batch_size": 2, "loss_fn": share_of_loss}
        forward_backward(model.model, {"tokens": tokens}, **own)


def test_learning_rate_warms_up_anneals_and_holds(tiny_tokenizer_dir):
    sched = {"warmup_steps": 4, "constant_steps": 5, "min_lr": 0.1}
    cfg = tiny_config(tiny_tokenizer_dir, optim={"lr": 1.0, "sched": sched})
    model = MegatronGPTModel(cfg)
    optimizer, scheduler = model.setup_megatron_optimization(max_steps=19)
    rates = []
    for _ in range(19):
        rates.append(learning_rate(optimizer))
        scheduler.step(1)
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])  # the first update is not wasted
    by_hand = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * i / 10)) for i in range(10)]
    assert rates[4:14] == pytest.approx(by_hand)
    assert rates[14:] == pytest.approx([0.1] * 5)


def test_job_shorter_than_its_constant_phase_still_anneals(tiny_tokenizer_dir):
    sched = {"warmup_steps": 1, "constant_steps": 1000}
    model = MegatronGPTModel(tiny_config(tiny_tokenizer_dir, optim={"lr": 1.0, "sched": sched}))
    optimizer, scheduler = model.setup_megatron_optimization(max_steps=11)
    for _ in range(6):
        scheduler.step(1)
    assert 0.4 < learning_rate(optimizer) < 0.7


@pytest.mark.parametrize("optimizer_name", ["distributed_fused_adam", "adamw"])
def test_resumed_job_uses_the_learning_rate_it_is_given(
    tiny_tokenizer_dir, tmp_path, optimizer_name
):
    def start(lr):
        optim = {"name": optimizer_name, "lr": lr, "betas": [0.9, 0.98 if lr > 4 else 0.95]}
        optim["sched"] = {"min_lr": lr / 2}
        return job(tmp_path, tiny_config(tiny_tokenizer_dir, optim=optim))

    callback, parts = start(lr=8.0)
    # Before the first step: loads as well.
    callback.custom_save({"step": 0}, trainer_state={"step": 0})
    callback, parts = start(lr=2.0)
    assert callback.load_latest() == {"step": 0}
    for _ in range(2):  # to the end of the warm-up
        train_step(*parts)
    assert learning_rate(parts[1]) == pytest.approx(2.0)
    assert {tuple(group["betas"]) for group in parts[1].param_groups} == {(0.9, 0.95)}


def test_checkpoints_keep_the_best_and_the_last_two(tiny_tokenizer_dir, tmp_path):
    best = {"filename": "c-{step}", "monitor": "val", "save_top_k": 1, "mode": "max"}
    callback, _ = job(tmp_path, tiny_config(tiny_tokenizer_dir), **best)
    for step, value in enumerate([0.1, 0.9, float("nan"), 0.2, 0.5]):
        callback.custom_save({"step": step, "val": value})
    # The best, and the last two: a critic that has saved one step more than its actor can go back.
    names = sorted(path.name for path in callback.root.iterdir())
    assert names == ["c-step=1", "c-step=3", "c-step=4"]

    # A checkpoint that was cut off while it was written is not resumed from.
    (callback.root / "c-step=4" / MARKER).unlink()
    names = [path.name for path, _ in complete_checkpoints(callback.root)]
    assert names == ["c-step=1", "c-step=3"]
    assert callback.newest_sound().name == "c-step=3"

    callback.enabled = False
    assert callback.custom_save({"step": 5}) is None and not (callback.root / "c-step=5").exists()
    with pytest.raises(UserError, match="c-step=4 is not a complete checkpoint"):
        callback.load_latest(callback.root / "c-step=4")


def test_checkpoint_names():
    metrics = {"step": 10.0, "val_rewards": 0.81249}
    for template, name in (
        ("gpt-{step}-{val_rewards:.3f}-{missing}", "gpt-step=10-val_rewards=0.812-missing=nan"),
        ("{step:05d}-{val_rewards:d}-{missing:d}", "step=00010-val_rewards=0.81249-missing=nan"),
    ):
        assert format_name(template, metrics) == name


@pytest.mark.parametrize("as_directory", [False, True])
def test_nemo_file_holds_weights_config_and_tokenizer(tiny_tokenizer_dir, tmp_path, as_directory):
    model = MegatronGPTModel(tiny_config(tiny_tokenizer_dir, seed=11))
    model.set_eval()
    path = tmp_path / ("folder" if as_directory else "model.nemo")
    model.save_to(str(path))
    assert path.is_dir() == as_directory and not list(tmp_path.glob("*.writing"))
    if not as_directory:
        names = tarfile.open(path).getnames()
        assert "./model_config.yaml" in names and any("model_weights" in name for name in names)

    config = sources.read_config(path)
    # The tokenizer inside is used, not the original folder.
    assert config.tokenizer.type != tiny_tokenizer_dir
    config.seed = 12  # other initial weights
    restored = MegatronGPTModel.restore_from(path, override_config_path=config)
    restored.set_eval()
    assert restored.tokenizer.text_to_ids("the film") == model.tokenizer.text_to_ids("the film")
    assert torch.equal(logits_of(restored, TOKENS), logits_of(model, TOKENS))


def test_sentencepiece_tokenizer_travels_too(tiny_sentencepiece_model, tmp_path):
    tokenizer = {"library": "sentencepiece", "model": tiny_sentencepiece_model}
    model = MegatronGPTModel(tiny_config("", tokenizer=tokenizer))
    model.save_to(str(tmp_path / "m.nemo"))
    restored = MegatronGPTModel.restore_from(tmp_path / "m.nemo")
    ids, again = (m.tokenizer.text_to_ids("the film was") for m in (model, restored))
    assert ids == again


def test_a_replaced_file_is_read_again(tiny_tokenizer_dir, tmp_path):
    for layers in (2, 4):
        model = MegatronGPTModel(tiny_config(tiny_tokenizer_dir, num_layers=layers))
        model.save_to(str(tmp_path / "m.nemo"))
        assert sources.read_config(tmp_path / "m.nemo").num_layers == layers


def test_bad_input_is_named(tiny_tokenizer_dir, tmp_path):
    with pytest.raises(UserError, match="nowhere.nemo does not exist"):
        MegatronGPTModel.restore_from(tmp_path / "nowhere.nemo")
    (tmp_path / "text.nemo").write_text("not a tar file")
    with pytest.raises(UserError, match="not a tar file"):
        MegatronGPTModel.restore_from(tmp_path / "text.nemo")
    good = tmp_path / "good.nemo"
    MegatronGPTModel(tiny_config(tiny_tokenizer_dir)).save_to(str(good))
    for kept in (2000, 60000):  # cut off within the first members, and within the weights
        (tmp_path / "cut.nemo").write_bytes(good.read_bytes()[:kept])
        with pytest.raises(UserError, match="cut.nemo"):
            MegatronGPTModel.restore_from(tmp_path / "cut.nemo")
    for overrides, message in [
        ({"activation": "gleu"}, "activation='gleu'"),
        ({"normalization": "batchnorm"}, "normalization='batchnorm'"),
        ({"precision": "fp8"}, "precision='fp8' must be one of"),
        ({"tensor_model_parallel_size": 2}, "does not divide the 1 rank"),
        ({"tokenizer": {"type": "/nowhere"}}, "tokenizer.type=/nowhere does not exist"),
    ]:
        with pytest.raises(UserError, match=message):
            MegatronGPTModel(tiny_config(tiny_tokenizer_dir, **overrides))
    positions = tmp_path / "positions.nemo"
    MegatronGPTModel(tiny_config(tiny_tokenizer_dir, "gpt2")).save_to(str(positions))
    said = r"position_embeddings.weight of shape \(48, 32\).*\(64, 32\)"
    for path, changes, message in [
        (good, {"num_layers": 3, "bias": True}, "good.nemo"),
        (positions, {"max_position_embeddings": 64}, said),
    ]:
        other = OmegaConf.merge(sources.read_config(path), changes)
        with pytest.raises(UserError, match=message):
            MegatronGPTModel.restore_from(path, override_config_path=other)


def test_a_model_of_several_processes_needs_them_connected(tiny_tokenizer_dir, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    said = r"2 processes .*not connected.*init_distributed\(trainer\)"
    with pytest.raises(UserError, match=said):
        MegatronGPTModel(tiny_config(tiny_tokenizer_dir), trainer=SimpleNamespace(world_size=2))


def test_missing_keys_have_the_defaults_of_the_yaml_file(tiny_tokenizer_dir):
    cfg = tiny_config(tiny_tokenizer_dir, bias=None)  # null: as if it were not there
    model = MegatronGPTModel(cfg)
    assert model.transformer_config.add_bias_linear is True
    assert model.transformer_config.layernorm_epsilon == 1e-5
    assert "layernorm_epsilon" not in cfg and cfg.bias is None  # the caller's stays as it is
