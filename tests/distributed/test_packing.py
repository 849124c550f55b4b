# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Two updates of SFT on packed sequences on two ranks, at each split, against unpacked examples on
one rank: loss, gradient and weights.
"""

import json

import pytest
from omegaconf import OmegaConf

from nemo_aligner.data.nlp.builders import build_sft_dataset
from tests.distributed import matrix
from tests.distributed.launcher import at_each, run_ranks

SPLITS = {"DP2": {}, "TP2": {"tensor_model_parallel_size": 2}}
SPLITS["TP2-SP"] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
SPLITS["PP2"] = {"pipeline_model_parallel_size": 2, "micro_batch_size": 2}
CASES = (("gpt2", "token"), ("llama", "sequence"))  # architecture, loss reduction
WORDS = "the film was a joy and a dull plot with old friends but I loved its warm music".split()


def updates(
    tokenizer_dir, folder, path, packed, architecture, reduction, micro_batch_size=1, **split
) -> tuple[int, dict]:
    """Rows of the data set, all of which make one global batch, and what two updates with it
    give.
    """
    training = matrix.build(tokenizer_dir, folder, architecture, "sft", split)
    section = {"file_path": str(path), "max_seq_length": 40, "packed_sequence": packed}
    options = {"is_chat": False, "allow_empty_prompt": True}
    dataset = build_sft_dataset(OmegaConf.create(section), training[0].tokenizer, **options)
    items = [dataset[number] for number in range(len(dataset))]
    items += [dataset[-1]] * (-len(items) % 4)
    batch = dataset.collate_fn(items)
    return len(dataset), matrix.updates(training, batch, 2, reduction, micro_batch_size)


@pytest.fixture
def path(tmp_path):
    texts = [(WORDS[n % 5 : n % 5 + n % 4], WORDS[: 1 + n % 6]) for n in range(13)]
    rows = [{"input": " ".join(given), "output": " ".join(wanted)} for given, wanted in texts]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.timeout(400)
def test_packed_sequences_give_the_numbers_of_examples_on_one_rank(
    tiny_tokenizer_dir, models, path
):
    def run(ranks, splits, packed):
        """By split and case, on rank 0."""
        cases = {
            (split, kind, reduction): {"architecture": kind, "reduction": reduction, **keys}
            for split, keys in splits.items()
            for kind, reduction in CASES
        }
        args = tiny_tokenizer_dir, models, path, packed
        return run_ranks(at_each, ranks, 120, cases, updates, *args)[0]

    alone = {"one rank": {}}
    examples, packs = run(1, alone, False), run(1, alone, True) | run(2, SPLITS, True)
    for case, (rows, found) in packs.items():
        unpacked, expected = examples[("one rank", *case[1:])]
        assert rows < unpacked
        matrix.assert_same(found, expected, str(case))
