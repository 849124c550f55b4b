# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Reward models, critics, SFT and rejection-sampling models give the same on one rank and on two, however the work is
split.

The weights are written to `.nemo` files by one rank and read at each split. One launch serves all splits.
"""

import pytest
import torch
from megatron.core.parallel_state import destroy_model_parallel

from nemo_aligner.models.nlp.gpt.gpt_sft_model import GPTSFTModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_critic import MegatronGPTCriticModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_regression_reward_model import MegatronGPTRegressionRewardModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_rs_actor import MegatronGPTRSModel
from nemo_aligner.utils import parallel_state
from nemo_aligner.utils.train_script_utils import load_from_nemo
from nemo_aligner.utils.train_utils import optimizer_step
from tests.distributed.launcher import run_ranks
from tests.tiny_models import PPO, tiny_config

pytestmark = pytest.mark.timeout(300)

ROWS, WIDTH, ATTRIBUTES = 4, 9, 2
SPLITS = {
    "TP=2": dict(tensor_model_parallel_size=2),
    "TP=2, sequence parallel": dict(tensor_model_parallel_size=2, sequence_parallel=True),
    "PP=2": dict(pipeline_model_parallel_size=2),
    "DP=2": {},
    "DP=2, micro-batches of 2": dict(micro_batch_size=2),
    "DP=2, bf16": dict(precision="bf16"),
}


def batches():
    """Global batches with rows of unequal weight: {role: batch}."""
    generator = torch.Generator().manual_seed(3)

    def tokens():
        return torch.randint(0, 290, (ROWS, WIDTH), generator=generator)

    lengths = torch.tensor([9, 4, 6, 8])
    column = torch.arange(WIDTH)
    pairs = {"chosen": tokens(), "rejected": tokens(), "chosen_length": lengths, "rejected_length": lengths.flip(0)}
    pairs["loss_mask"] = torch.ones(ROWS, WIDTH)
    pairs["loss_mask"][1] = 0
    transitions = {
        "tokens": tokens(),
        "returns": torch.randn(ROWS, WIDTH - 1, generator=generator),
        "prev_values": torch.randn(ROWS, WIDTH - 1, generator=generator),
        "mask": ((column >= 2) & (column < lengths[:, None] - 1)).float()[:, :-1],
    }
    labels = torch.randn(ROWS, ATTRIBUTES, generator=generator)
    labels[0, 1] = -100.0
    labelled = {"inputs": tokens(), "lengths": lengths, "labels": labels, "loss_mask": pairs["loss_mask"]}
    answers = {"tokens": tokens(), "labels": tokens(), "loss_mask": (column < lengths[:, None]).float()}
    return {
        "reward model": pairs,
        "regression": labelled,
        "critic": transitions,
        "critic of a language model": transitions,
        "sft": answers,
        "rejection sampling": {"response_tokens": transitions["tokens"], "mask": transitions["mask"]},
    }


# Class, and the file that it starts from: lm.nemo holds no head.
ROLES = {
    "reward model": (MegatronGPTRewardModel, "rm.nemo"),
    "regression": (MegatronGPTRegressionRewardModel, "lm.nemo"),
    "critic": (MegatronGPTCriticModel, "rm.nemo"),
    "critic of a language model": (MegatronGPTCriticModel, "lm.nemo"),
    "sft": (GPTSFTModel, "lm.nemo"),
    "rejection sampling": (MegatronGPTRSModel, "lm.nemo"),
}


def evaluate(tokenizer_dir, folder, precision=32, **split):
    """Two optimizer steps of each role, and what it infers before and after, on this rank's rows."""
    size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    rows = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    results = {}
    for role, batch in batches().items():
        cfg = tiny_config(
            tokenizer_dir,
            precision=precision,
            output_sequence=role.startswith("critic"),
            loss_clip_val=0.2,
            rs=PPO,
            regression={"num_attributes": ATTRIBUTES if role == "regression" else 1},
            **split,
        )
        model_class, base = ROLES[role]
        model = load_from_nemo(model_class, cfg, None, restore_path=folder / base)
        inputs = (batches()["critic"]["tokens"][rows], torch.tensor([9, 4, 6, 8])[rows])
        batch = {key: value[rows] for key, value in batch.items()}
        if role == "critic":
            model.set_reward_model()
        optimizer, scheduler = model.setup_megatron_optimization(10)
        numbers = []
        for _ in range(2):
            optimizer.zero_grad()
            model.prepare_for_training_step()
            loss, metrics = model.get_loss_and_metrics(batch, forward_only=False)
            metrics = model.summarize_metrics(metrics)
            numbers += [loss, optimizer_step(optimizer, scheduler, 0.5), *(metrics[key] for key in sorted(metrics))]
        inferred = []
        if role in ("reward model", "regression", "critic of a language model"):
            inferred = [model.infer(inputs)]
        elif role == "critic":
            inferred = [x for _ in range(2) for x in model.infer_rm_critic(inputs)]
        elif role == "rejection sampling":
            inferred = [model.get_inference_log_probs(batch["response_tokens"])]
        results[role] = (numbers, inferred)
    return results


def evaluate_all_splits(tokenizer_dir, folder):
    results = {}
    for name, split in SPLITS.items():
        parallel_state.initialize(
            **{key: value for key, value in split.items() if key.endswith("model_parallel_size")}, seed=7
        )
        results[name] = (parallel_state.get_data_parallel_rank(), evaluate(tokenizer_dir, folder, **split))
        destroy_model_parallel()
    return results


@pytest.fixture(scope="module")
def folder(tiny_tokenizer_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    MegatronGPTModel(tiny_config(tiny_tokenizer_dir, seed=3)).save_to(str(folder / "lm.nemo"))
    MegatronGPTRewardModel(tiny_config(tiny_tokenizer_dir, seed=4)).save_to(str(folder / "rm.nemo"))
    return folder


@pytest.fixture(scope="module")
def two_ranks(tiny_tokenizer_dir, folder):
    return run_ranks(evaluate_all_splits, 2, 240, tiny_tokenizer_dir, folder)


@pytest.mark.parametrize("name", SPLITS)
def test_two_ranks_equal_one(tiny_tokenizer_dir, folder, two_ranks, name):
    precision = SPLITS[name].get("precision", 32)
    tolerance = 1e-4 if precision == 32 else 2e-2
    one = evaluate(tiny_tokenizer_dir, folder, precision=precision)
    for rank_results in two_ranks:
        dp_rank, results = rank_results[name]
        rows = slice(2 * dp_rank, 2 * dp_rank + 2) if name.startswith("DP") else slice(None)
        for role, (numbers, inferred) in results.items():
            assert numbers == pytest.approx(one[role][0], rel=tolerance, abs=tolerance / 10), role
            for ours, expected in zip(inferred, one[role][1], strict=True):
                torch.testing.assert_close(ours, expected[rows], rtol=tolerance, atol=tolerance)
