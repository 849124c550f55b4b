# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The reward model against plain torch on its own hidden states, its losses against loops over
pairs or labels, and the validation of labels against numpy on the whole set.
"""

import math
from functools import partial

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from nemo_aligner.algorithms.supervised import SupervisedTrainer
from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.data.nlp.builders import build_dataloader
from nemo_aligner.launch.model_loading import load_from_nemo
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import (
    MegatronGPTRegressionRewardModel,
    MegatronGPTRewardModel,
    RewardModelType,
    held_out_text,
)
from nemo_aligner.training.optim import optimizer_step
from tests.data_sets import build_labelled
from tests.ppo_fakes import FakeLogger
from tests.tiny_models import assert_gradients_of, tiny_config

pytestmark = pytest.mark.slow

LENGTHS = torch.tensor([9, 1, 5, 7, 3])


def random_tokens(samples, width=9, seed=0):
    return torch.randint(0, 290, (samples, width), generator=torch.Generator().manual_seed(seed))


def make_model(tokenizer_dir, **overrides):
    return MegatronGPTRewardModel(tiny_config(tokenizer_dir, **overrides))


def head_of(model):
    return model.unwrapped()[-1].rm_head


def hidden_states(model, tokens):
    """[B, S, H]: the decoder's output, computed for one sample at a time."""
    seen = []
    module = model.unwrapped()[-1]
    hook = module.decoder.register_forward_hook(
        lambda _module, _inputs, output: seen.append(output.detach())
    )
    for row in tokens:
        alone(module, row, len(row))
    hook.remove()
    return torch.cat(seen, dim=1).transpose(0, 1).float()


def alone(module, row, length):
    """The outputs for one sample without its padding."""
    row = row[None, : int(length)]
    given = row, torch.arange(row.size(1))[None], None
    return module(*given, lengths=torch.tensor([row.size(1)]))


def pair_batch(width=9, seed=1):
    """Four pairs; the third does not count."""
    lengths = torch.tensor([[9, 4], [6, 8], [3, 5], [7, 7]])
    mask = torch.ones(4, width)
    mask[2] = 0
    chosen, rejected = random_tokens(4, width, seed), random_tokens(4, width, seed + 1)
    pairs = {"chosen": chosen, "rejected": rejected, "loss_mask": mask}
    return pairs | {"chosen_length": lengths[:, 0], "rejected_length": lengths[:, 1]}


@pytest.mark.parametrize("use_avg_pool", [False, True])
def test_rewards_are_the_head_on_the_last_token_or_on_the_mean(tiny_tokenizer_dir, use_avg_pool):
    model = make_model(tiny_tokenizer_dir, use_avg_pool=use_avg_pool, forward_micro_batch_size=2)
    tokens, head = random_tokens(5), head_of(model)
    expected = []
    for row, length in zip(hidden_states(model, tokens), LENGTHS, strict=True):
        vector = row[:length].mean(0) if use_avg_pool else row[length - 1]
        expected.append(vector @ head.weight.detach()[0] + head.bias.detach()[0])
    rewards = model.infer((tokens, LENGTHS))
    assert rewards.shape == (5, 1) and rewards.dtype == torch.float32
    torch.testing.assert_close(rewards.flatten(), torch.stack(expected))
    junk = tokens.clone()
    junk[torch.arange(9) >= LENGTHS[:, None]] = 5
    torch.testing.assert_close(model.infer((junk, LENGTHS[:, None])), rewards)


def test_attributes_and_their_merging(tiny_tokenizer_dir):
    weights = [0.5, -1.0, 2.0]
    apart = make_model(tiny_tokenizer_dir, regression={"num_attributes": 3})
    regression = {"num_attributes": 3, "merge_attributes": True, "attribute_weights": weights}
    merged = make_model(tiny_tokenizer_dir, regression=regression)
    values = make_model(tiny_tokenizer_dir, regression={"num_attributes": 3}, output_sequence=True)
    inputs = (random_tokens(5), LENGTHS)
    attributes = apart.infer(inputs)
    assert attributes.shape == (5, 3)
    wanted = (attributes * torch.tensor(weights)).sum(-1, keepdim=True)
    torch.testing.assert_close(merged.infer(inputs), wanted)
    last = values.infer(inputs)[torch.arange(5), LENGTHS - 1]  # by default the attributes' mean
    torch.testing.assert_close(last, attributes.mean(-1))


def test_strings_and_their_limits(tiny_tokenizer_dir):
    model = make_model(tiny_tokenizer_dir)
    ids, eos = model.tokenizer.text_to_ids, model.tokenizer.eos_id
    texts = ["a dull plot", "I loved the music; the story is warm"]
    rewards = model.infer(texts, add_EOS=True)
    for text, reward in zip(texts, rewards, strict=True):
        row = torch.tensor([ids(text) + [eos]])
        torch.testing.assert_close(model.infer((row, torch.tensor([row.size(1)])))[0], reward)
    with pytest.raises(UserError, match=r"sentence 1 has more than 48 tokens; .*length=48"):
        model.infer(["short", "xyz " * 40])
    with pytest.raises(UserError, match="sentence 0 has 0 tokens"):
        model.infer([""])
    with pytest.raises(UserError, match="from 1 to 12 for 9 token columns"):
        model.infer((random_tokens(2), torch.tensor([1, 12])))


def test_standardization(tiny_tokenizer_dir):
    inputs = (random_tokens(5), LENGTHS)
    raw = make_model(tiny_tokenizer_dir).infer(inputs)
    standard = {"enable": True, "mean": 2.0, "std": 0.5}
    scaled = make_model(tiny_tokenizer_dir, reward_standardization=standard).infer(inputs)
    torch.testing.assert_close(scaled, (raw - 2.0) / 0.5)
    with pytest.raises(ConfigError, match="reward_standardization.std is not set"):
        make_model(tiny_tokenizer_dir, reward_standardization={"enable": True, "mean": 0.0})


@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_loss_metrics_and_gradient_equal_a_loop_over_pairs(tiny_tokenizer_dir, micro_batch_size):
    batch = pair_batch()
    plain = make_model(tiny_tokenizer_dir).unwrapped()[0]
    score = lambda kind, i: alone(plain, batch[kind][i], batch[f"{kind}_length"][i]).squeeze()
    rewards = [(score("chosen", i), score("rejected", i)) for i in (0, 1, 3)]
    expected = sum(-torch.log(1 / (1 + torch.exp(r - c))) for c, r in rewards) / 3
    expected.backward()

    model = make_model(tiny_tokenizer_dir, micro_batch_size=micro_batch_size)
    model.setup_megatron_optimization(10)
    model.prepare_for_training_step()
    loss, metrics = model.get_loss_and_metrics(batch, forward_only=False)
    flat = [float(reward) for pair in rewards for reward in pair]
    mean = sum(flat) / 6
    assert loss == pytest.approx(expected.item(), rel=1e-5) and metrics["loss"] == loss
    assert metrics["acc"] == pytest.approx(sum(c > r for c, r in rewards).item() / 3)
    assert metrics["weights"] == 3
    assert metrics["rewards_chosen_mean"] == pytest.approx(sum(flat[0::2]) / 3, rel=1e-4)
    assert metrics["rewards_rejected_mean"] == pytest.approx(sum(flat[1::2]) / 3, rel=1e-4)
    assert metrics["rewards_all_mean"] == pytest.approx(mean, rel=1e-4)
    wanted = pytest.approx(math.sqrt(sum((x - mean) ** 2 for x in flat) / 6), rel=1e-3)
    assert metrics["rewards_all_std"] == wanted
    assert_gradients_of(plain, model)
    model.set_eval()
    assert model.get_loss_and_metrics(batch, forward_only=True)[0] == pytest.approx(loss, rel=1e-6)


def test_head_starts_the_same_whatever_was_drawn_before(tiny_tokenizer_dir):
    one = head_of(make_model(tiny_tokenizer_dir)).weight
    deep = head_of(make_model(tiny_tokenizer_dir, num_layers=4, init_method_std=0.1)).weight
    other = head_of(make_model(tiny_tokenizer_dir, seed=8)).weight
    assert torch.equal(one, deep) and not torch.equal(one, other)
    assert 0.02 < one.std() < 0.3


def train_steps(model, optimizer, scheduler, steps):
    results = []
    for _ in range(steps):
        optimizer.zero_grad()
        model.prepare_for_training_step()
        loss, _ = model.get_loss_and_metrics(pair_batch(), forward_only=False)
        results.append((loss, optimizer_step(optimizer, scheduler, 1.0)))
    return results


def test_attributes_of_a_bf16_head_are_merged_in_float32(tiny_tokenizer_dir):
    weights = [0.7, 0.2, 0.1]
    model = make_model(
        tiny_tokenizer_dir,
        precision="bf16",
        force_head_dtype="bfloat16",
        regression={"num_attributes": 3, "merge_attributes": True, "attribute_weights": weights},
    )
    head = head_of(model)
    hidden = torch.randn(1, 64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    lengths = torch.ones(64, dtype=torch.int64)
    with torch.no_grad():
        merged = head(hidden, lengths)
        head.merge_attributes = False
        attributes = head(hidden, lengths)
    assert attributes.dtype == torch.bfloat16 and merged.dtype == torch.float32
    found, wanted = merged[:, 0], (attributes.double() @ torch.tensor(weights).double()).float()
    torch.testing.assert_close(found, wanted)


def test_fp32_head_of_a_bf16_model_trains_and_resumes(tiny_tokenizer_dir, tmp_path):
    """With weights of two dtypes the distributed optimizer equals the plain one, and resumes."""
    runs = {}
    for name in ("adamw", "distributed_fused_adam"):
        model = make_model(tiny_tokenizer_dir, precision="bf16", optim={"name": name})
        assert head_of(model).weight.dtype == torch.float32
        assert model.unwrapped()[0].embedding.word_embeddings.weight.dtype == torch.bfloat16
        optimizer, scheduler = model.setup_megatron_optimization(10)
        before = head_of(model).weight.detach().clone()
        runs[name] = train_steps(model, optimizer, scheduler, 3)
        # Three Adam steps of at most the learning rate.
        assert (head_of(model).weight - before).abs().max() <= 4e-3
    for ours, theirs in zip(runs["distributed_fused_adam"], runs["adamw"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert runs["adamw"][2][0] < runs["adamw"][0][0]

    saving = CheckpointCallback(tmp_path, model, optimizer, scheduler, name="rm")
    saving.custom_save({}, trainer_state={"step": 3})
    expected = train_steps(model, optimizer, scheduler, 2)
    again = make_model(tiny_tokenizer_dir, precision="bf16", seed=9)
    parts = again, *again.setup_megatron_optimization(10)
    assert CheckpointCallback(tmp_path, *parts, name="rm").load_latest() == {"step": 3}
    assert train_steps(*parts, 2) == expected


def test_a_language_model_becomes_a_reward_model_and_a_reward_model_keeps_its_head(
    tiny_tokenizer_dir, tmp_path
):
    cfg = tiny_config(tiny_tokenizer_dir, architecture="gpt2", seed=3)
    language_model = MegatronGPTModel(cfg)
    language_model.save_to(str(tmp_path / "lm.nemo"))
    other_seed = tiny_config(tiny_tokenizer_dir, architecture="gpt2", seed=5)
    load = partial(load_from_nemo, MegatronGPTRewardModel, other_seed, None)
    fresh = load(restore_path=tmp_path / "lm.nemo")
    assert not fresh.has_trained_head
    trunk = dict(language_model.unwrapped()[0].named_parameters())
    for name, parameter in fresh.unwrapped()[0].named_parameters():
        assert name.startswith("rm_head.") or torch.equal(parameter, trunk[name]), name
    names = {name for name, _ in fresh.unwrapped()[0].named_parameters()}
    assert names - set(trunk) == {"rm_head.weight", "rm_head.bias"}
    with torch.no_grad():
        head_of(fresh).weight.add_(1.0)
    fresh.save_to(str(tmp_path / "rm.nemo"))
    kept = load(restore_path=tmp_path / "rm.nemo")
    assert kept.has_trained_head and torch.equal(head_of(kept).weight, head_of(fresh).weight)
    dropped = load(restore_path=tmp_path / "rm.nemo", load_base_model_only=True)
    assert not dropped.has_trained_head
    torch.testing.assert_close(head_of(dropped).weight, head_of(fresh).weight - 1.0)


def test_a_critic_has_no_head_for_rewards(tiny_tokenizer_dir, tmp_path):
    for output_sequence in (True, False):
        path = tmp_path / f"{output_sequence}.nemo"
        make_model(tiny_tokenizer_dir, output_sequence=output_sequence).save_to(str(path))
        cfg = tiny_config(tiny_tokenizer_dir, output_sequence=False)
        loaded = load_from_nemo(MegatronGPTRewardModel, cfg, None, restore_path=path)
        assert loaded.has_trained_head is not output_sequence


def test_what_cannot_be_trained_is_refused(tiny_tokenizer_dir):
    def check(**overrides):
        MegatronGPTRewardModel.check_training_config(tiny_config(tiny_tokenizer_dir, **overrides))

    three = {"num_attributes": 3}
    check(regression={**three, "merge_attributes": True})
    with pytest.raises(ConfigError, match="num_attributes=3"):
        check(regression=three)
    with pytest.raises(ConfigError, match="output_sequence=True makes a critic"):
        check(output_sequence=True)
    with pytest.raises(ConfigError, match=r"attribute_weights=\[1.0, 2.0\] has 2 numbers .*=3"):
        make_model(tiny_tokenizer_dir, regression={**three, "attribute_weights": [1.0, 2.0]})


# --- regression


NAN = float("nan")
NO_LABEL = -100.0


def make_regression(tokenizer_dir, num_attributes=2, **overrides):
    regression = {"num_attributes": num_attributes} | overrides.pop("regression", {})
    own = tiny_config(tokenizer_dir, regression=regression, **overrides)
    return MegatronGPTRegressionRewardModel(own)


def labelled_batch(width=9):
    """Four samples with two attributes; the second lacks a label, and the third, an empty slot,
    holds NaN.
    """
    generator = torch.Generator().manual_seed(1)
    loss_mask = torch.ones(4, width)
    loss_mask[2] = 0
    labels = torch.tensor([[0.5, 2.0], [NO_LABEL, -1.0], [NAN, NAN], [3.0, 0.0]])
    batch = {"inputs": torch.randint(0, 290, (4, width), generator=generator), "labels": labels}
    return batch | {"lengths": torch.tensor([9, 4, 3, 7]), "loss_mask": loss_mask}


def squared_errors(module, batch):
    """One entry for each label that counts, the samples one by one and without padding."""
    errors = []
    for i in (0, 1, 3):
        predictions = alone(module, batch["inputs"][i], batch["lengths"][i])[0]
        labels = batch["labels"][i]
        errors += [(predictions[a] - labels[a]) ** 2 for a in range(2) if labels[a] != NO_LABEL]
    return errors


@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_loss_and_gradient_of_labels_equal_a_loop(tiny_tokenizer_dir, micro_batch_size):
    batch = labelled_batch()
    plain = make_regression(tiny_tokenizer_dir).unwrapped()[0]
    errors = squared_errors(plain, batch)
    assert len(errors) == 5
    expected = sum(errors) / 5
    expected.backward()

    model = make_regression(tiny_tokenizer_dir, micro_batch_size=micro_batch_size)
    model.setup_megatron_optimization(10)
    model.prepare_for_training_step()
    loss, metrics = model.get_loss_and_metrics(batch, forward_only=False)
    assert loss == metrics["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert metrics["weights"] == 5
    assert_gradients_of(plain, model)
    model.set_eval()
    assert model.get_loss_and_metrics(batch, forward_only=True)[0] == pytest.approx(loss, rel=1e-6)


def test_another_value_may_stand_for_a_missing_label(tiny_tokenizer_dir):
    def metrics_of(model, batch):
        return model.summarize_metrics(model.get_loss_and_metrics(batch, forward_only=True)[1])

    batch = labelled_batch()
    expected = metrics_of(make_regression(tiny_tokenizer_dir), batch)
    batch["labels"][batch["labels"] == NO_LABEL] = -1e4
    model = make_regression(tiny_tokenizer_dir, regression={"loss_mask_val": -1e4})
    assert metrics_of(model, batch) == expected


def test_what_cannot_be_a_regression_is_refused(tiny_tokenizer_dir):
    standard = {"enable": True, "mean": 0.0, "std": 1.0}
    with pytest.raises(ConfigError, match="reward_standardization.enable=True"):
        make_regression(tiny_tokenizer_dir, reward_standardization=standard)
    with pytest.raises(ConfigError, match="loss_func='classification' must be one of"):
        make_regression(tiny_tokenizer_dir, regression={"loss_func": "classification"})
    check = MegatronGPTRegressionRewardModel.check_training_config
    cfg = tiny_config(tiny_tokenizer_dir, regression={"num_attributes": 2})
    check(cfg)
    cfg.regression.merge_attributes = True
    with pytest.raises(ConfigError, match="merge_attributes=True"):
        check(cfg)
    with pytest.raises(ConfigError, match="output_sequence=True makes a critic"):
        check(tiny_config(tiny_tokenizer_dir, output_sequence=True))
    # Whoever trains such a model all the same must not compare its one number with both labels.
    with pytest.raises(ValueError, match="must be equal"):
        model = MegatronGPTRegressionRewardModel(cfg)
        model.get_loss_and_metrics(labelled_batch(), forward_only=True)


@pytest.mark.parametrize("num_attributes", [1, 3])
def test_validation_over_uneven_batches_is_the_correlation_of_the_whole_set(
    tiny_tokenizer_dir, write, num_attributes
):
    """Seven samples in batches of four: an empty slot fills the last one."""
    rng = np.random.default_rng(2)
    labels = rng.normal(size=(7, num_attributes)).round(3)
    labels[[1, 5], 0] = NO_LABEL
    texts = [f"the film {'was very '[: 3 * i]}dull {i}" for i in range(7)]
    path = write(*({"text": text, "label": row} for text, row in zip(texts, labels.tolist())))
    model = make_regression(tiny_tokenizer_dir, num_attributes, micro_batch_size=2)
    own = {"model": {"regression": {"num_attributes": num_attributes}}, "append_eod": True}
    dataset, *_ = build_labelled({"train": [path]}, model.tokenizer, seq_length=48, **own)
    cfg = OmegaConf.create({"model": {"seed": 1, "data": {"num_workers": 0}}})

    def loader(is_training):
        options = dict(drop_last=is_training, pad_samples_to_global_batch_size=not is_training)
        return build_dataloader(cfg, dataset, 0, 2, 4, use_random_sampler=is_training, **options)

    settings = OmegaConf.create({"max_epochs": 1, "val_check_interval": 1, "save_interval": -1})
    loaders = loader(True), loader(False), None
    trainer = SupervisedTrainer(settings, model, None, None, *loaders, FakeLogger(), None, None)
    metrics = trainer.run_validation()
    model.prepare_for_inference()
    predictions = model.infer(texts, add_EOS=True).double().numpy()
    keep = labels != NO_LABEL
    columns = [(predictions[keep[:, a], a], labels[keep[:, a], a]) for a in range(num_attributes)]
    expected = [np.corrcoef(*column)[0, 1] for column in columns]
    assert metrics["loss"] == pytest.approx(((predictions - labels)[keep] ** 2).mean(), rel=1e-5)
    assert metrics["correlation"] == pytest.approx(np.mean(expected), abs=1e-5)
    assert trainer.held_out["validation"] == (metrics, keep.sum())
    if num_attributes == 1:
        assert set(metrics) == {"loss", "correlation"}
    else:
        assert [metrics[f"correlation_{a}"] for a in range(3)] == pytest.approx(expected, abs=1e-5)


def test_held_out_text():
    pairs, labels = RewardModelType.BINARY_RANKING, RewardModelType.REGRESSION
    parts = {"correlation": 0.5, "correlation_0": 0.25, "correlation_2": 0.75}
    for kind, metrics, count, text in (
        (pairs, {"loss": 0.1, "acc": 0.98046875}, 1, "accuracy 0.980 on 256 pairs"),
        (labels, parts, 3, "correlation 0.500 on 256 labels (by attribute 0: 0.250, 2: 0.750)"),
        (labels, {"loss": 1.0}, 1, "correlation undefined on 256 labels"),
    ):
        assert held_out_text(kind, metrics, 256.0, count) == f"held-out {text}"
