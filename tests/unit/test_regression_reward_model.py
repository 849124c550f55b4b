# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The regression reward model against a loop over samples, and its validation against numpy on the
whole set.
"""

import json

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from nemo_aligner.algorithms.supervised import SupervisedTrainer
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.data.nlp.builders import (
    build_dataloader,
    build_train_valid_test_regression_rm_datasets,
)
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import (
    MegatronGPTRegressionRewardModel,
    RewardModelType,
    held_out_text,
)
from tests.tiny_models import assert_gradients_of, tiny_config

pytestmark = pytest.mark.slow

NAN = float("nan")
NO_LABEL = -100.0


def make_model(tokenizer_dir, num_attributes=2, **overrides):
    regression = {"num_attributes": num_attributes} | overrides.pop("regression", {})
    return MegatronGPTRegressionRewardModel(
        tiny_config(tokenizer_dir, regression=regression, **overrides)
    )


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
        length = int(batch["lengths"][i])
        row = batch["inputs"][i : i + 1, :length]
        given = row, torch.arange(length)[None], None
        predictions = module(*given, lengths=torch.tensor([length]))[0]
        labels = batch["labels"][i]
        errors += [(predictions[a] - labels[a]) ** 2 for a in range(2) if labels[a] != NO_LABEL]
    return errors


@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_loss_and_gradient_equal_a_loop_over_samples(tiny_tokenizer_dir, micro_batch_size):
    batch = labelled_batch()
    plain = make_model(tiny_tokenizer_dir).unwrapped()[0]
    errors = squared_errors(plain, batch)
    assert len(errors) == 5
    expected = sum(errors) / 5
    expected.backward()

    model = make_model(tiny_tokenizer_dir, micro_batch_size=micro_batch_size)
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
    expected = metrics_of(make_model(tiny_tokenizer_dir), batch)
    batch["labels"][batch["labels"] == NO_LABEL] = -1e4
    model = make_model(tiny_tokenizer_dir, regression={"loss_mask_val": -1e4})
    assert metrics_of(model, batch) == expected


def test_refusals(tiny_tokenizer_dir):
    standard = {"enable": True, "mean": 0.0, "std": 1.0}
    with pytest.raises(ConfigError, match="reward_standardization.enable=True"):
        make_model(tiny_tokenizer_dir, reward_standardization=standard)
    with pytest.raises(ConfigError, match="loss_func='classification' must be one of"):
        make_model(tiny_tokenizer_dir, regression={"loss_func": "classification"})
    cfg = tiny_config(tiny_tokenizer_dir, regression={"num_attributes": 2})
    MegatronGPTRegressionRewardModel.check_training_config(cfg)
    cfg.regression.merge_attributes = True
    with pytest.raises(ConfigError, match="merge_attributes=True"):
        MegatronGPTRegressionRewardModel.check_training_config(cfg)
    with pytest.raises(ConfigError, match="output_sequence=True makes a critic"):
        MegatronGPTRegressionRewardModel.check_training_config(
            tiny_config(tiny_tokenizer_dir, output_sequence=True)
        )
    # Whoever trains such a model all the same must not compare its one number with both labels.
    with pytest.raises(ValueError, match="must be equal"):
        model = MegatronGPTRegressionRewardModel(cfg)
        model.get_loss_and_metrics(labelled_batch(), forward_only=True)


@pytest.mark.parametrize("num_attributes", [1, 3])
def test_validation_over_uneven_batches_is_the_correlation_of_the_whole_set(
    tiny_tokenizer_dir, tmp_path, num_attributes
):
    """Seven samples in batches of four: an empty slot fills the last one."""
    rng = np.random.default_rng(2)
    labels = rng.normal(size=(7, num_attributes)).round(3)
    labels[[1, 5], 0] = NO_LABEL
    texts = [f"the film {'was very '[: 3 * i]}dull {i}" for i in range(7)]
    path = tmp_path / "labels.jsonl"
    pairs = zip(texts, labels.tolist(), strict=True)
    lines = [json.dumps({"text": text, "label": row}) for text, row in pairs]
    path.write_text("\n".join(lines))
    own = {"data": {"append_eod": True}, "micro_batch_size": 2}
    model = make_model(tiny_tokenizer_dir, num_attributes, **own)
    named = {"cfg": model.cfg, "data_prefix": {"train": [str(path)]}, "data_impl": "jsonl"}
    named |= {"splits_string": None, "train_valid_test_num_samples": [-1, -1, -1]}
    named |= {"seq_length": 48, "seed": 1, "tokenizer": model.tokenizer}
    dataset, *_ = build_train_valid_test_regression_rm_datasets(**named)
    cfg = OmegaConf.create({"model": {"seed": 1, "data": {"num_workers": 0}}})

    def loader(drop_last, random):
        options = dict(drop_last=drop_last, pad_samples_to_global_batch_size=not drop_last)
        options["use_random_sampler"] = random
        return build_dataloader(cfg, dataset, 0, 2, 4, **options)

    trainer = SupervisedTrainer(
        cfg=OmegaConf.create({"max_epochs": 1, "val_check_interval": 1, "save_interval": -1}),
        model=model,
        optimizer=None,
        scheduler=None,
        train_dataloader=loader(True, True),
        val_dataloader=loader(False, False),
        test_dataloader=None,
        logger=type("Logger", (), {"log_metrics": lambda *_args, **_kwargs: None})(),
        ckpt_callback=None,
        run_timer=None,
    )
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
