# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probs of the reference policy that are kept in files: every split writes those of one rank,
and a job of another split finds them; a full disk on one rank is an error on all.
"""

import shutil
from pathlib import Path

import pytest
import torch
from megatron.core.parallel_state import destroy_model_parallel

from nemo_aligner.algorithms.reference_log_probs import ShardWriter, with_reference_log_probs
from nemo_aligner.data.nlp.datasets import DPOModelDataset
from tests import preference_jobs
from tests.distributed import matrix
from tests.distributed.launcher import at_each, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WIDTH, ITEMS = 40, 19
SPLITS = {
    "DP2": ("llama", {}),
    "TP2+SP": ("llama", {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP2": ("llama", {"pipeline_model_parallel_size": 2}),
    "CP2": ("llama", {"context_parallel_size": 2}),
    "EP2": ("moe", {"expert_model_parallel_size": 2}),
    "LoRA TP2": ("lora", {"tensor_model_parallel_size": 2}),
}


def kept(tokenizer_dir, folder: Path, root: str, architecture: str = "llama", **split):
    """All log-probs `[ITEMS, 2, WIDTH - 1]` that a job keeps below `root`, and how many passes it
    made; all ranks call it.
    """
    model, *_ = matrix.build(tokenizer_dir, folder, architecture, "dpo", split)
    if architecture == "lora":  # adapters that do something
        with torch.no_grad():
            for chunk in model.model:
                for parameter in chunk.parameters():
                    if parameter.requires_grad:
                        parameter.fill_(0.1)
    passes, compute = [], model.get_ref_policy_logprobs
    model.get_ref_policy_logprobs = lambda batch: passes.append(1) or compute(batch)
    data = DPOModelDataset([str(folder / "pairs.jsonl")], model.tokenizer, WIDTH)
    checkpoint = folder / "llama-lm.nemo"
    found = with_reference_log_probs(model, data, folder / root, checkpoint, "train")
    assert model.init_policy_state_dict is None
    rows = torch.stack(
        [torch.stack([found[i][name] for name in model.REFERENCE_COLUMNS]) for i in range(ITEMS)]
    )
    destroy_model_parallel()
    return rows, len(passes)


def found_and_made(tokenizer_dir, folder, root, **case):
    """What is kept, then what is computed anew."""
    found = kept(tokenizer_dir, folder, root, **case)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(folder / root)
    torch.distributed.barrier()
    return *found, *kept(tokenizer_dir, folder, root, **case)


def full_disk(tokenizer_dir, folder):
    """What a job raises on each of two ranks when there is no space for the second's shards."""
    add = ShardWriter.add

    def full(self, *args):
        if torch.distributed.get_rank() == 1:
            raise OSError(28, "No space left on device")
        add(self, *args)

    ShardWriter.add = full
    with pytest.raises(Exception) as ending:
        kept(tokenizer_dir, folder, "full")
    return repr(ending.value)


@pytest.fixture(scope="module")
def folder(models):
    """The models of the matrix, and preference pairs."""
    texts = ["was a joy", " is dull, and far too long", " bad"]
    pairs = [(texts[i % 3], texts[(i + 1) % 3]) for i in range(ITEMS)]
    lines = [
        {"prompt": f"the film {i}", "chosen": a, "rejected": b} for i, (a, b) in enumerate(pairs)
    ]
    preference_jobs.write(models / "pairs.jsonl", lines)
    return models


@pytest.mark.full
def test_every_split_keeps_the_log_probs_of_one_rank(tiny_tokenizer_dir, folder):
    args = (tiny_tokenizer_dir, folder)
    alone = {name: {"root": name, "architecture": case[0]} for name, case in SPLITS.items()}
    together = {name: alone[name] | case[1] for name, case in SPLITS.items()}
    (found,) = run_ranks(at_each, 1, 120, alone, kept, *args)
    whole = {name: rows for name, (rows, _) in found.items()}
    for results in run_ranks(at_each, 2, 120, together, found_and_made, *args):
        for name, (again, without, fresh, passes) in results.items():
            assert (without, passes > 0) == (0, True), name
            assert torch.equal(again, whole[name]), name
            assert matrix.deviation(fresh, whole[name]) < 1e-5, name
    assert not torch.equal(whole["DP2"], whole["EP2"])  # of another model
    assert torch.equal(whole["DP2"], whole["LoRA TP2"])  # of the base


@pytest.mark.full
def test_a_full_disk_on_one_rank_is_an_error_on_both(tiny_tokenizer_dir, folder):
    endings = run_ranks(full_disk, 2, 60, tiny_tokenizer_dir, folder)
    assert all(ending.startswith("SaveError('no space left") for ending in endings), endings
    assert not list((folder / "full").iterdir())
