# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Two updates of SFT on packed sequences on two ranks, at each split, against unpacked examples on
one rank: loss, gradient and weights.
"""

import json

import pytest
import torch
from megatron.core.parallel_state import destroy_model_parallel
from omegaconf import OmegaConf

from nemo_aligner.checkpoint import sources
from nemo_aligner.data.nlp.builders import build_sft_dataset
from nemo_aligner.models.nlp.gpt.gpt_sft_model import GPTSFTModel
from nemo_aligner.training.optim import optimizer_step
from tests.distributed import matrix
from tests.distributed.launcher import at_each, progress, run_ranks
from tests.tiny_models import tiny_config

SPLITS = {"DP2": {}, "TP2": {"tensor_model_parallel_size": 2}}
SPLITS["TP2-SP"] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
SPLITS["PP2"] = {"pipeline_model_parallel_size": 2, "micro_batch_size": 2}
CASES = (("gpt2", "token"), ("llama", "sequence"))  # architecture, loss_reduction
WORDS = "the film was a joy and a dull plot with old friends but I loved its warm music".split()


def examples(path: str, tokenizer, packed: bool) -> tuple:
    """The dataset, and all of its items as one global batch."""
    section = {"file_path": str(path), "max_seq_length": 40, "packed_sequence": packed}
    dataset = build_sft_dataset(
        OmegaConf.create(section), tokenizer, is_chat=False, allow_empty_prompt=True
    )
    items = [dataset[number] for number in range(len(dataset))]
    items += [dataset[-1]] * (-len(items) % 4)
    return dataset, items


def updates(nemo: str, path: str, packed: bool, reduction: str, **split) -> dict | None:
    """Loss and gradient norm of two updates, and the first gradient and the last weights, whole;
    on rank 0. All ranks call it.
    """
    cfg = OmegaConf.merge(
        sources.read_config(nemo), {"micro_batch_size": 1, "loss_reduction": reduction}, split
    )
    model = GPTSFTModel.restore_from(nemo, override_config_path=cfg)
    optimizer, scheduler = model.setup_megatron_optimization(max_steps=10)
    dataset, items = examples(path, model.tokenizer, packed)
    share = dataset.collate_fn(items[matrix.my_samples(len(items))])
    steps, gradients = [], []
    for _ in range(2):
        optimizer.zero_grad()
        model.prepare_for_training_step()
        loss, metrics = model.get_loss_and_metrics(share)
        gradients.append(matrix.gradient(model))
        steps.append([loss, optimizer_step(optimizer, scheduler, 1.0), metrics["weights"]])
    weights = matrix.gathered(model)
    if weights is None:
        return None
    numbers = {"steps": torch.tensor(steps), "rows": len(dataset)}
    return numbers | {"gradient": gradients[0], "weights": weights}


def all_cases(nemos: dict[str, str], path: str, packed: bool, **split) -> dict:
    """By (architecture, reduction)."""
    results = {}
    for architecture, reduction in CASES:
        found = updates(nemos[architecture], path, packed, reduction, **split)
        results[architecture, reduction] = found
        progress(f"{packed=}, {architecture}")
        destroy_model_parallel()
    return results


@pytest.fixture(scope="module")
def nemos(tiny_tokenizer_dir, tmp_path_factory) -> dict[str, str]:
    """The initial weights of all: pipeline stages would draw others than one rank."""
    folder = tmp_path_factory.mktemp("packing")
    paths = {}
    for architecture, _ in CASES:
        paths[architecture] = str(folder / f"{architecture}.nemo")
        # Adam would blow up the rounding of gradients that are zero, such as those of key biases.
        cfg = tiny_config(tiny_tokenizer_dir, architecture, optim={"eps": 1e-2})
        GPTSFTModel(cfg).save_to(paths[architecture])
    return paths


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    texts = [(WORDS[n % 5 : n % 5 + n % 4], WORDS[: 1 + n % 6]) for n in range(13)]
    rows = [{"input": " ".join(given), "output": " ".join(wanted)} for given, wanted in texts]
    path = tmp_path_factory.mktemp("packed") / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def check(found: dict, expected: dict, what: str) -> None:
    torch.testing.assert_close(found["steps"], expected["steps"], rtol=1e-5, atol=1e-6, msg=what)
    for name in ("gradient", "weights"):
        apart = matrix.apart(found[name], expected[name], is_gradient=name == "gradient")
        assert apart < 1e-5, f"{what}: {name}"


@pytest.mark.timeout(400)
def test_packed_sequences_give_the_numbers_of_examples_on_one_rank(nemos, path):
    apart, packed = (run_ranks(all_cases, 1, 120, nemos, path, x)[0] for x in (False, True))
    splits = run_ranks(at_each, 2, 120, SPLITS, all_cases, nemos, path, True)[0]
    assert splits.keys() == SPLITS.keys()
    for case, expected in apart.items():
        assert packed[case]["rows"] < expected["rows"]
        for name, found in {"one rank": packed, **splits}.items():
            check(found[case], expected, f"{name}, {case}")
