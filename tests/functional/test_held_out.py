# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Reward models on data that they were not trained on: the real script on the quickstart's data,
from random weights.
"""

import json
import re
import sys

import numpy as np
import pytest
import torch

from nemo_aligner.models.nlp.gpt.megatron_gpt_regression_reward_model import (
    MegatronGPTRegressionRewardModel,
)
from tests.functional.jobs import ROOT, must_succeed, read_metrics
from tests.functional.test_sft_rm_scripts import prefix, training

sys.path.insert(0, str(ROOT / "examples" / "quickstart"))

import make_data  # noqa: E402

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

SETTINGS = """
    trainer.rm.max_steps=50 trainer.rm.val_check_interval=25 ++model.data.append_eod=True
    model.encoder_seq_length=56 model.force_head_dtype=float32 model.global_batch_size=32
    model.micro_batch_size=32 model.optim.lr=3e-3 model.optim.sched.warmup_steps=10
    model.optim.sched.min_lr=1e-5 model.num_layers=2 model.hidden_size=64
    model.ffn_hidden_size=256 model.num_attention_heads=4 model.normalization=rmsnorm
    model.activation=swiglu model.position_embedding_type=rope model.bias=False
    model.tokenizer.library=huggingface
"""


@pytest.mark.parametrize(
    "kind, files, what, metric, least",
    [
        ("binary_ranking", "pairs", "accuracy", "acc", 0.95),
        ("regression", "labels", "correlation", "correlation", 0.9),
    ],
)
def test_a_reward_model_on_held_out_data(tmp_path, kind, files, what, metric, least):
    data, folder = tmp_path / "data", tmp_path / "rm"
    data.mkdir()
    make_data.make_data(data, seed=0)
    own = prefix(data / f"{files}_train.jsonl", data / f"{files}_validation.jsonl")
    own += [f"model.reward_model_type={kind}", f"model.tokenizer.type={data}/tokenizer"]
    job = training("train_reward_model.py", folder, *SETTINGS.split(), *own)
    must_succeed(job)
    # The number that the job ends with, and on how much it was measured.
    ((found, count),) = re.findall(rf"validation: held-out {what} ([\d.]+) on (\d+) ", job.log)
    assert float(found) > least and count == "256"
    history = read_metrics(folder, f"validation/{metric}")
    assert len(history) == 2 and history[-1] == pytest.approx(float(found), abs=6e-4)
    if kind == "binary_ranking":
        return
    # The same from the .nemo that the job leaves, sample by sample, and numpy.
    nemo = folder / "checkpoints" / "megatron_gpt.nemo"
    model = MegatronGPTRegressionRewardModel.restore_from(nemo)
    lines = [json.loads(line) for line in (data / "labels_validation.jsonl").open()]
    model.prepare_for_inference()
    rewards = torch.cat([model.infer([line["text"]], add_EOS=True) for line in lines])[:, 0]
    expected = np.corrcoef(rewards.numpy(), [line["label"][0] for line in lines])[0, 1]
    assert history[-1] == pytest.approx(expected, abs=1e-4)
