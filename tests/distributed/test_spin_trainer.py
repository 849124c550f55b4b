# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""SPIN on two ranks, at several splits of training and generation, does what it does on one: the
same responses, metrics and weights, over two iterations.
"""

import pytest
import torch
from megatron.core.parallel_state import destroy_model_parallel

from nemo_aligner.parallel import parallel_state
from tests.distributed.launcher import run_ranks
from tests.distributed.matrix import ADAM_EPS, deviation, gathered
from tests.preference_jobs import write
from tests.spin_jobs import LORA, STEPS, records, sft_data, tiny_model, trainer_of

SPLITS = {
    "DP2": ({}, {}),
    "TP2+SP": ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, {}),
    "PP2": ({"pipeline_model_parallel_size": 2}, {"generation": {"reshard": "auto"}}),
}
CASES = [("TP2+SP", None), ("PP2", LORA)]
OTHERS = [("DP2", None), ("DP2", LORA)]
DATA, BASE = "sft.jsonl", "base.nemo"
NOT_COMPARED = ("step_time", "generate", "ref_policy_logprobs_time")


def run_job(tokenizer_dir, folder, split, spin, peft):
    """Metrics of all steps, the generated responses, and the weights on rank 0."""
    more = {**split, "optim": {"eps": ADAM_EPS}}
    model = tiny_model(
        tokenizer_dir, peft, hidden_dropout=0.0, more=more, base=folder / BASE, **spin
    )
    data = sft_data(model.tokenizer, str(folder / DATA))
    trainer, log, _ = trainer_of(model, data, model.tokenizer)
    responses, play = [], trainer.play

    def record(batches):
        pairs = play(batches)
        for each in pairs:
            rows = zip(each["generated"], each["generated_length"], strict=True)
            mine = [row[:length].tolist() for row, length in rows]
            everyones = [None] * parallel_state.get_data_parallel_world_size()
            group = parallel_state.get_data_parallel_group()
            torch.distributed.all_gather_object(everyones, mine, group=group)
            responses.append(sum(everyones, []))
        return pairs

    trainer.play = record
    trainer.fit()
    metrics = [{k: v for k, v in m.items() if k not in NOT_COMPARED} for m in log]
    return metrics, responses, gathered(model)


def run_on_this_rank(tokenizer_dir, folder, cases):
    results = []
    for split, peft in cases:
        results.append(run_job(tokenizer_dir, folder, *SPLITS[split], peft))
        destroy_model_parallel()
    return results


def expected_on_one_rank(tokenizer_dir, folder):
    """By whether adapters are trained."""
    adapters = {False: None, True: LORA}
    return {key: run_job(tokenizer_dir, folder, {}, {}, lora) for key, lora in adapters.items()}


@pytest.mark.full
@pytest.mark.timeout(450)
@pytest.mark.parametrize("cases", [CASES, OTHERS], ids=["model-parallel", "data-parallel"])
def test_two_ranks_at_any_split_equal_one(tiny_tokenizer_dir, tmp_path, cases):
    write(tmp_path / DATA, records())
    # The initial weights of a new model depend on the split.
    tiny_model(tiny_tokenizer_dir).save_to(str(tmp_path / BASE))
    expected = expected_on_one_rank(tiny_tokenizer_dir, tmp_path)
    parallel_state.destroy()
    found = run_ranks(run_on_this_rank, 2, 120, tiny_tokenizer_dir, tmp_path, cases)
    for number, (split, peft) in enumerate(cases):
        one, two = expected[peft is not None], [rank[number] for rank in found]
        assert len(one[0]) == len(one[1]) == STEPS
        for metrics, responses, _ in two:
            assert responses == one[1], split
            for step, (mine, theirs) in enumerate(zip(metrics, one[0], strict=True)):
                for name in theirs.keys() - ({"acc"} if step % 6 == 0 else set()):
                    wanted = pytest.approx(theirs[name], rel=1e-4, abs=1e-4)
                    assert mine[name] == wanted, (split, step, name)
        weights = two[0][2]
        assert weights.keys() == one[2].keys()
        for name, weight in one[2].items():
            assert deviation(weights[name], weight, 1e-2) < 1e-3, (split, name)
