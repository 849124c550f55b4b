# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Scores of a request that is worked off in slices have the bits of one that is scored in one go,
with real models on two ranks.
"""

import numpy as np
import pytest
import torch

from nemo_aligner.models.nlp.gpt.megatron_gpt_critic import MegatronGPTCriticModel
from nemo_aligner.servers import requests
from nemo_aligner.servers.scoring import Scorer
from tests.distributed.launcher import run_ranks
from tests.tiny_models import tiny_config


def scores(tokenizer_dir, split):
    """Rank 0's scores of 40 samples in one go, and in slices; how many operations each took."""
    model = MegatronGPTCriticModel(
        tiny_config(tokenizer_dir, forward_micro_batch_size=2, force_head_dtype="float32", **split)
    )
    model.has_trained_head = True
    model.set_reward_model()
    model.prepare_for_inference()
    calls = []

    def values(tokens, lengths, _prompt_lengths):
        calls.append("values")
        return {"values": model.infer((tokens, lengths))}

    def rewards(tokens, lengths, _prompt_lengths):
        calls.append("rewards")
        return {"rewards": model.infer_rewards((tokens, lengths)).reshape(-1, 1)}

    def both(tokens, lengths, _prompt_lengths):
        calls.append("both")
        found = model.infer_rm_critic((tokens, lengths))
        return {"rewards": found[0].reshape(-1, 1), "values": found[1]}

    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 290, (40, 30), generator=generator).numpy()
    lengths = torch.randint(1, 31, (40, 1), generator=generator).numpy()
    request = {"tokens": tokens, "sequence_lengths": lengths}
    scorer = Scorer(both, None, 2, passes=(values, rewards))
    answers = [scorer.run(request)]
    requests.SLICE_TOKENS = 100
    answers.append(scorer.run(request))
    return answers, calls


@pytest.mark.parametrize(
    "split, count",
    [
        ({}, 10),  # DP2: a slice has one micro-batch of two samples for each
        pytest.param({"pipeline_model_parallel_size": 2}, 3, marks=pytest.mark.full),
        pytest.param({"tensor_model_parallel_size": 2}, 20, marks=pytest.mark.full),
    ],
    ids=["dp2", "pp2", "tp2"],
)
def test_slices_change_no_bit(tiny_tokenizer_dir, split, count):
    (whole, sliced), calls = run_ranks(scores, 2, 120, tiny_tokenizer_dir, split)[0]
    assert calls == ["both", *count * ["values"], *count * ["rewards"]]
    assert whole.keys() == sliced.keys() == {"values", "rewards"}
    for name, expected in whole.items():
        assert np.array_equal(sliced[name], expected), name
        assert np.unique(expected).size > 30
