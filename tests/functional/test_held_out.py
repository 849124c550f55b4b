# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Reward models on data that they were not trained on: the real script on the quickstart's data,
from random weights.
"""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_aligner.models.nlp.gpt.megatron_gpt_regression_reward_model import (
    MegatronGPTRegressionRewardModel,
)
from tests.functional.jobs import ScriptJob, must_succeed, read_metrics

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "quickstart"))

import make_data  # noqa: E402

pytestmark = pytest.mark.timeout(300)

STEPS, BATCH, SEQ_LENGTH = 50, 32, 56
ARCHITECTURE = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 256,
    "num_attention_heads": 4,
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "position_embedding_type": "rope",
    "bias": False,
}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    make_data.make_data(folder, seed=0)
    return folder


def training(log_dir: Path, data_prefix: str, *overrides: str) -> ScriptJob:
    log_dir.mkdir(exist_ok=True)
    return ScriptJob(
        "train_reward_model.py",
        log_dir.with_suffix(".log"),
        [
            f"exp_manager.explicit_log_dir={log_dir}",
            "trainer.accelerator=cpu",
            "trainer.precision=32",
            f"trainer.rm.max_steps={STEPS}",
            "trainer.rm.val_check_interval=25",
            f"trainer.rm.save_interval={STEPS}",
            f"model.data.data_prefix={data_prefix}",
            "++model.data.append_eod=True",
            f"model.encoder_seq_length={SEQ_LENGTH}",
            "model.force_head_dtype=float32",
            f"model.global_batch_size={BATCH}",
            f"model.micro_batch_size={BATCH}",
            "model.optim.lr=3e-3",
            "model.optim.sched.warmup_steps=10",
            "model.optim.sched.constant_steps=0",
            "model.optim.sched.min_lr=1e-5",
            *overrides,
        ],
    )


def from_random_weights(data_dir: Path, kind: str) -> list[str]:
    architecture = {
        **ARCHITECTURE,
        "tokenizer.library": "huggingface",
        "tokenizer.type": data_dir / "tokenizer",
    }
    return [
        f"model.reward_model_type={kind}",
        *(f"model.{key}={value}" for key, value in architecture.items()),
    ]


def files(data_dir: Path, kind: str) -> str:
    train, validation = (data_dir / f"{kind}_{split}.jsonl" for split in ("train", "validation"))
    return f"{{train: [{train}], validation: [{validation}]}}"


def printed(job: ScriptJob, what: str) -> tuple[float, int]:
    """The number that the job ends with, and on how much it was measured."""
    (found,) = re.findall(rf"validation: held-out {what} ([\d.]+) on (\d+) ", job.log)
    return float(found[0]), int(found[1])


@pytest.mark.full
def test_accuracy_on_held_out_pairs(data_dir, tmp_path):
    job = training(
        tmp_path / "rm", files(data_dir, "pairs"), *from_random_weights(data_dir, "binary_ranking")
    )
    must_succeed(job)
    accuracy, pairs = printed(job, "accuracy")
    assert accuracy > 0.95 and pairs == 256
    history = read_metrics(tmp_path / "rm", "validation/acc")
    assert len(history) == 2 and history[-1] == pytest.approx(accuracy, abs=6e-4)


@pytest.mark.full
def test_correlation_with_held_out_labels(data_dir, tmp_path):
    job = training(
        tmp_path / "rm", files(data_dir, "labels"), *from_random_weights(data_dir, "regression")
    )
    must_succeed(job)
    correlation, labels = printed(job, "correlation")
    assert correlation > 0.9 and labels == 256
    history = read_metrics(tmp_path / "rm", "validation/correlation")
    assert len(history) == 2 and history[-1] == pytest.approx(correlation, abs=6e-4)
    # The same from the .nemo that the job leaves, sample by sample, and numpy.
    model = MegatronGPTRegressionRewardModel.restore_from(
        tmp_path / "rm" / "checkpoints" / "megatron_gpt.nemo"
    )
    lines = [
        json.loads(line)
        for line in (data_dir / "labels_validation.jsonl").read_text().splitlines()
    ]
    model.prepare_for_inference()
    rewards = torch.cat([model.infer([line["text"]], add_EOS=True) for line in lines])[:, 0]
    expected = np.corrcoef(rewards.numpy(), [line["label"][0] for line in lines])[0, 1]
    assert history[-1] == pytest.approx(expected, abs=1e-4)
