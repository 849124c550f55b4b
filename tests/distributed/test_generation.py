# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The text is the same on one rank and on two, split by tensors, by layers (also interleaved) or by samples.

The weights are written to a `.nemo` by one rank and read at each split. One launch serves all splits.
"""

import pytest
import torch
from megatron.core.parallel_state import destroy_model_parallel

from nemo_aligner.generation import GenerationParams, MegatronGenerator
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.utils import parallel_state
from tests.distributed.launcher import run_ranks
from tests.tiny_models import tiny_config

SPLITS = {
    "TP=2": dict(tensor_model_parallel_size=2),
    "TP=2, sequence parallel": dict(tensor_model_parallel_size=2, sequence_parallel=True),
    "PP=2": dict(pipeline_model_parallel_size=2),
    "PP=2 x 2 virtual": dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
    "DP=2": {},
}
PARAMS = {
    "greedy": GenerationParams(max_length=14, use_greedy=True, repetition_penalty=1.3, return_logprobs=True),
    "sampled": GenerationParams(
        max_length=14,
        temperature=1.4,
        top_k=100,
        top_p=0.95,
        end_strings=(*"aeiourstln", "the film"),
        return_logprobs=True,
    ),
}


def prompts():
    """Ragged prompts of 10 samples: tokens, lengths, seeds."""
    generator = torch.Generator().manual_seed(5)
    return (
        torch.randint(0, 290, (10, 7), generator=generator),
        torch.randint(1, 8, (10,), generator=generator),
        torch.arange(10) + 50,
    )


def generate(model, rows=slice(None)):
    """What each row's response is: {name: [(ids, ended, log-probs)]}."""
    generator = MegatronGenerator(model.model, model.tokenizer, max_sequence_length=48)
    results = {}
    for name, params in PARAMS.items():
        output = generator.generate(*(x[rows] for x in prompts()), params)
        results[name] = [
            (output.response_tokens[i, :length].tolist(), bool(output.is_end[i]), output.logprobs[i, : length - 1])
            for i, length in enumerate(output.response_lengths.tolist())
        ]
    return results


def check_splits(path):
    results = {}
    for split, sizes in SPLITS.items():
        cfg = MegatronGPTModel.restore_from(path, return_config=True)
        cfg.update(sizes)
        model = MegatronGPTModel.restore_from(path, override_config_path=cfg)
        model.set_train()
        # The samples of a data-parallel rank are another batch, in another order.
        mine = (
            torch.arange(10).flip(0)[parallel_state.get_data_parallel_rank() :: 2] if split == "DP=2" else slice(None)
        )
        results[split] = mine, generate(model, mine)
        assert all(chunk.training for chunk in model.model)
        assert model.transformer_config.sequence_parallel == sizes.get("sequence_parallel", False)
        destroy_model_parallel()
    return results


@pytest.mark.timeout(240)
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_text_does_not_depend_on_the_split(architecture, tiny_tokenizer_dir, tmp_path):
    cfg = tiny_config(tiny_tokenizer_dir, architecture, init_method_std=0.3, num_layers=4)
    model = MegatronGPTModel(cfg)
    model.save_to(str(tmp_path / "model.nemo"))
    expected = generate(model)
    assert any(ended for _, ended, _ in expected["sampled"]) and not all(ended for _, ended, _ in expected["sampled"])
    for rank, results in enumerate(run_ranks(check_splits, 2, 200, str(tmp_path / "model.nemo"))):
        for split, (rows, by_params) in results.items():
            for name, responses in by_params.items():
                wanted = (
                    [expected[name][i] for i in range(10)] if split != "DP=2" else [expected[name][i] for i in rows]
                )
                where = f"{split}, {name}, rank {rank}"
                assert [r[:2] for r in responses] == [w[:2] for w in wanted], where
                for (_, _, logprobs), (_, _, reference) in zip(responses, wanted, strict=True):
                    torch.testing.assert_close(logprobs, reference, atol=1e-4, rtol=1e-4, msg=where)
