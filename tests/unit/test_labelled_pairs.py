# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Bradley-Terry losses with a margin from the data: formulas, data set, model and job."""

import json

import pytest
import torch
from omegaconf import OmegaConf

from nemo_aligner.config.defaults import complete_model
from nemo_aligner.config.jobs.supervised import learns_labelled_pairs
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.estimators import PREFERENCE_LOSSES
from nemo_aligner.core.losses import loss_weights, preference_loss
from nemo_aligner.data.nlp.datasets import LabelledPairDataset
from nemo_aligner.jobs.supervised import reward_model_loaders
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import (
    MegatronGPTRegressionRewardModel,
    MegatronGPTRewardModel,
    RewardModelType,
    held_out_text,
)
from tests.data_sets import sample_of
from tests.tiny_models import assert_gradients_of, tiny_config

NAN = float("nan")


def by_hand(loss_func, difference, margin):
    """The losses of pairs."""
    exponent = margin - difference if loss_func == "margin_bt" else -difference
    losses = torch.log1p(exponent.double().exp())
    return losses * margin if loss_func == "scaled_bt" else losses


# --- the formulas ---


@pytest.mark.parametrize("loss_func", PREFERENCE_LOSSES)
def test_loss_and_gradient_by_hand(loss_func):
    """Five pairs, one of them an empty slot with NaN; a margin of 0 counts in the mean."""
    pairs = [(2.0, 0.5), (0.0, 1.0), (1.0, 1.0), (-3.0, 4.0), (NAN, NAN)]
    margins = torch.tensor([1.0, 3.0, 0.0, 2.0, NAN])
    rewards, plain = (torch.tensor(pairs, requires_grad=True) for _ in range(2))
    sides = {"rewards_chosen": rewards[:, :1], "rewards_rejected": rewards[:, 1]}
    weights = loss_weights(torch.tensor([1, 1, 1, 1, 0]))
    loss, metrics = preference_loss(**sides, weights=weights, loss_func=loss_func, margins=margins)
    loss.backward()
    expected = by_hand(loss_func, (plain[:, 0] - plain[:, 1])[:4], margins[:4]).mean()
    expected.backward()
    assert loss.item() == metrics["loss"].item() == pytest.approx(expected.item(), rel=1e-6)
    assert metrics["acc"].item() == 0.25
    torch.testing.assert_close(rewards.grad, plain.grad, rtol=0, atol=1e-6)


def test_misuse_of_the_loss():
    pair = {"rewards_chosen": torch.ones(1), "rewards_rejected": torch.ones(1)}
    for loss_func in ("margin_bt", "scaled_bt"):
        with pytest.raises(ValueError, match=f"'{loss_func}' needs the margin of each pair"):
            preference_loss(**pair, weights=torch.ones(1), loss_func=loss_func)
    with pytest.raises(ValueError, match="'bt' is unknown; choose one of regular_bt, margin_bt"):
        preference_loss(**pair, weights=torch.ones(1), loss_func="bt")


# --- the data ---


def write(path, labels, texts=None):
    """Two lines for each label; a pair of labels gives its lines different ones."""
    lines = []
    for number, label in enumerate(labels):
        both = label if isinstance(label, tuple) else (label, label)
        for side, own in zip("ab", both):
            record = {"text": f"{number}{side}" if texts is None else texts[len(lines)]}
            lines.append(json.dumps(record if own is None else record | {"label": own}))
    path.write_text("\n".join(lines))
    return str(path)


def test_the_sign_of_the_label_says_which_text_is_better(tmp_path, tiny_tokenizer, warnings):
    """No preference counts for the second and is told; a pair too long is left out, and the others
    keep their margins.
    """
    labels = [[-3, -100.0], [2, -100.0], [9], 0.5, [-1], [0]]
    texts = ["0a", "0b", "1a", "1b", "#c", "#" * 30, "2a", "2b", "3a", "3b", "4a", "4b"]
    path = write(tmp_path / "pairs.jsonl", labels, texts)
    dataset = LabelledPairDataset([path], tiny_tokenizer, 8)
    items = [dataset[index] for index in range(len(dataset))]
    sides = ("chosen", "rejected")
    seen = [tuple(sample_of(item, side, tiny_tokenizer) for side in sides) for item in items]
    assert seen == [("0a", "0b"), ("1b", "1a"), ("2b", "2a"), ("3a", "3b"), ("4b", "4a")]
    assert [item["margin"].item() for item in items] == [3.0, 2.0, 0.5, 1.0, 0.0]
    assert dataset[-1]["loss_mask"].sum() == 0
    assert any("1 of 6 pairs have the label 0, no preference" in said for said in warnings)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (None, "line 3: field 'label' is missing"),
        ([-100, 1], r"line 3: field 'label' begins with -100 \(model.regression.loss_mask_val\)"),
        ([], "line 3: field 'label' has 0 numbers"),
        ("better", "line 3: field 'label' is \"better\": it must hold finite numbers"),
        (([1], [-1]), "the two lines of pair 1 have the labels 1 and -1"),
    ],
)
def test_data_without_a_margin_is_refused(tmp_path, tiny_tokenizer, label, message):
    path = write(tmp_path / "pairs.jsonl", [[1], label])
    with pytest.raises(UserError, match=message):
        LabelledPairDataset([path], tiny_tokenizer, 8)


# --- the model ---


def config(tokenizer_dir, loss, num_attributes=6, **overrides):
    regression = {"num_attributes": num_attributes, "loss_func": loss}
    own = {"reward_model_type": "regression", "regression": regression, "micro_batch_size": 2}
    return tiny_config(tokenizer_dir, **(own | overrides))


def pair_batch(width=9):
    """Four pairs; the third is an empty slot."""
    generator = torch.Generator().manual_seed(3)
    loss_mask = torch.ones(4, width)
    loss_mask[2] = 0
    return {
        "chosen": torch.randint(0, 290, (4, width), generator=generator),
        "rejected": torch.randint(0, 290, (4, width), generator=generator),
        "chosen_length": torch.tensor([9, 4, 3, 7]),
        "rejected_length": torch.tensor([5, 9, 3, 2]),
        "loss_mask": loss_mask,
        "margin": torch.tensor([1.0, 3.0, NAN, 0.5]),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss_func", "num_attributes", "micro_batch_size"),
    [("regular_bt", 6, 2), ("margin_bt", 6, 8), ("scaled_bt", 6, 4), ("scaled_bt", 1, 2)],
)
def test_loss_and_gradient_equal_a_loop_over_pairs(
    tiny_tokenizer_dir, loss_func, num_attributes, micro_batch_size
):
    def make():
        sizes = {"num_attributes": num_attributes, "micro_batch_size": micro_batch_size}
        return MegatronGPTRegressionRewardModel(config(tiny_tokenizer_dir, loss_func, **sizes))

    batch = pair_batch()
    plain = make().unwrapped()[0]

    def reward(side, pair):
        length = int(batch[f"{side}_length"][pair])
        row = batch[side][pair : pair + 1, :length]
        positions = torch.arange(length)[None]
        rewards = plain(row, positions, None, lengths=torch.tensor([length]))
        return rewards[0, 0 if num_attributes == 1 else 4]

    expected = torch.zeros(())
    for pair in (0, 1, 3):
        difference = reward("chosen", pair) - reward("rejected", pair)
        expected = expected + by_hand(loss_func, difference, batch["margin"][pair]) / 3
    expected.backward()

    model = make()
    model.setup_megatron_optimization(10)
    model.prepare_for_training_step()
    loss, metrics = model.get_loss_and_metrics(batch, forward_only=False)
    assert loss == metrics["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert metrics["weights"] == 3
    assert_gradients_of(plain, model)
    summary = model.summarize_metrics(metrics)
    text = held_out_text(RewardModelType.REGRESSION, summary, metrics["weights"], num_attributes)
    assert text == f"held-out accuracy {summary['acc']:.3f} on 3 pairs"


def test_configurations_that_cannot_work_are_refused(tiny_tokenizer_dir):
    check = MegatronGPTRegressionRewardModel.check_training_config
    check(config(tiny_tokenizer_dir, "scaled_bt"))
    for loss, changes, message in (
        ("margin_bt", {"micro_batch_size": 1}, "micro_batch_size=1 is odd, .* margin_bt compares"),
        ("scaled_bt", {"num_attributes": 3}, "num_attributes=3: scaled_bt compares .*attribute 4"),
        ("bt", {}, "'bt' must be one of regression, regular"),
        ("scaled_bt", {"loss_func": "margin_bt"}, "loss_func=margin_bt and .*=scaled_bt contrad"),
    ):
        with pytest.raises(ConfigError, match=message):
            check(config(tiny_tokenizer_dir, loss, **changes))
    cfg = config(tiny_tokenizer_dir, "scaled_bt", num_attributes=1)
    cfg.reward_model_type = "binary_ranking"
    with pytest.raises(ConfigError, match="binary_ranking does not .*reward_model_type=regress"):
        MegatronGPTRewardModel.check_training_config(cfg)
    cfg.regression.loss_func = "regular_bt"  # what it learns by anyway
    MegatronGPTRewardModel.check_training_config(cfg)


def test_the_key_that_nemo_aligners_code_read_means_the_same(tiny_tokenizer_dir):
    cfg = config(tiny_tokenizer_dir, "regression", loss_func="scaled_bt")
    model = MegatronGPTRegressionRewardModel(cfg)
    assert (model.pair_loss, model.pairs_per_micro_batch) == ("scaled_bt", 1)
    assert learns_labelled_pairs(model.cfg)


# --- the job ---


def test_sizes_of_batches_count_samples_and_pairs_stay_together(
    tiny_tokenizer_dir, tiny_tokenizer, tmp_path
):
    """As in NeMo-Aligner a global batch of 4 has two pairs."""
    path = write(tmp_path / "pairs.jsonl", [[-1], [2], [-3], [4], [-5]])
    model_cfg = config(tiny_tokenizer_dir, "scaled_bt", global_batch_size=4)
    data = {"data_prefix": {"train": [path], "validation": [path]}, "data_impl": "jsonl"}
    data |= {"splits_string": None, "seq_length": 8, "num_workers": 0}
    data["validation_drop_last"] = False
    model = {**complete_model(model_cfg, "training_rm"), "data": data}
    rm = {"train_random_sampler": True, "val_random_sampler": False}
    cfg = OmegaConf.create({"model": model, "trainer": {"rm": rm}})
    train, validation, _ = reward_model_loaders(cfg, tiny_tokenizer)
    batches = list(train)
    assert [len(batch["chosen"]) for batch in batches] == [2, 2]
    for batch in batches:
        for tokens, margin in zip(batch["chosen"], batch["margin"].tolist(), strict=True):
            text = tiny_tokenizer.ids_to_text(tokens[:2].tolist())
            # The pair of margin m is number m - 1; in odd ones the first text is the better one.
            assert text.startswith(f"{margin - 1:.0f}{'a' if margin % 2 else 'b'}")
    assert sum(len(batch["chosen"]) for batch in validation["validation"]) == 6
