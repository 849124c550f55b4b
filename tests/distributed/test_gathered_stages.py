# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Generation with the stages of a pipeline gathered gives the texts of the pipeline."""

import pytest
import torch
from megatron.core.parallel_state import destroy_model_parallel

from nemo_aligner.generation import gathered_stages
from nemo_aligner.parallel import parallel_state
from tests.distributed import matrix
from tests.distributed.launcher import progress, run_ranks
from tests.tiny_models import PPO

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = PP2 | {"virtual_pipeline_model_parallel_size": 2}
TWO_RANKS = {
    "gpt2": ("gpt2", PP2),
    "llama VPP2": ("llama", VPP2),
    "lora": ("lora", PP2),
}
FOUR_RANKS = {
    "TP2xPP2": ("llama", PP2 | {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP2xCP2": ("llama", PP2 | {"context_parallel_size": 2}),
    "PP2xDP2": ("gpt2", VPP2),
    "PP2xEP2": ("moe", PP2 | {"expert_model_parallel_size": 2}),
}


def generated(model):
    with model.adapters_for_generation():
        return matrix.generated(model)


def streamed(model):
    """Lengths and log-probs of `matrix.generated`'s prompts in batches of 3, by their places."""
    generator = torch.Generator().manual_seed(5)
    prompts = torch.randint(0, 290, (10, 7), generator=generator)
    inputs = (prompts, torch.randint(1, 8, (10,), generator=generator), torch.arange(10) + 50)
    batches = zip(*(x.split(3) for x in inputs), strict=True)
    params, found = matrix.GENERATION["sampled"], {}
    with model.adapters_for_generation():
        for places, output in model.generator.stream(batches, params, slots=2):
            assert len(places) <= 2
            for place, tokens, length in zip(
                places, output.response_tokens, output.response_lengths, strict=True
            ):
                found[place] = tokens[:length].tolist()
    return [found[place] for place in range(10)]


def compare(tokenizer_dir, folder, cases):
    """On all ranks: through the pipeline, then gathered."""
    for name, (architecture, split) in cases.items():
        progress(name)
        model, *_ = matrix.build(tokenizer_dir, folder, architecture, "actor", split)
        before = {n: t.detach().clone() for n, t in model._named_weights()}
        through_pipeline, streams = generated(model), streamed(model)
        assert model.generator.build_undivided is None
        model.generator.build_undivided = model._build_undivided
        gathered, gathered_streams = generated(model), streamed(model)
        for kind, samples in gathered.items():
            assert matrix.apart(samples, through_pipeline[kind]) < 1e-5, (name, kind)
        assert gathered_streams == streams, name
        for n, tensor in model._named_weights():
            assert torch.equal(tensor, before[n]), (name, n)
        destroy_model_parallel()


def configured_and_damaged(tokenizer_dir, folder):
    """On all ranks: the configuration switches it on; bf16 weights are gathered as they are; a
    weight that was changed on its way is found.
    """
    split = PP2 | {"ppo": {**PPO, "generation": {"reshard": "auto"}}, "precision": "bf16"}
    model, *_ = matrix.build(tokenizer_dir, folder, "llama", "actor", split)
    assert model.generator.build_undivided is not None
    assert all(ended or len(ids) > 1 for ids, ended, _ in generated(model)["sampled"])
    whole = gathered_stages.gather_stages(model.unwrapped(), model._build_undivided)
    assert len(whole.decoder.layers) == 4
    assert {tensor.dtype for tensor in whole.parameters()} == {torch.bfloat16}
    honest = torch.distributed.broadcast

    def flips(tensor, src, group):
        honest(tensor, src=src, group=group)
        if src == 0 and torch.distributed.get_rank() == 1:
            tensor.view(torch.int16).view(-1)[0] ^= 1

    torch.distributed.broadcast = flips
    with pytest.raises(RuntimeError, match="different weights after the exchange"):
        gathered_stages.gather_stages(model.unwrapped(), model._build_undivided)
    torch.distributed.broadcast = honest
    assert parallel_state.get_pipeline_model_parallel_world_size() == 2
    destroy_model_parallel()


def two_ranks(tokenizer_dir, folder):
    compare(tokenizer_dir, folder, TWO_RANKS)
    configured_and_damaged(tokenizer_dir, folder)


@pytest.fixture(scope="module")
def models(tiny_tokenizer_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    matrix.write_models(tiny_tokenizer_dir, folder)
    return folder


def test_texts_are_those_of_the_pipeline(tiny_tokenizer_dir, models):
    run_ranks(two_ranks, 2, 120, tiny_tokenizer_dir, models)


@pytest.mark.full
def test_texts_are_those_of_the_pipeline_beside_other_splits(tiny_tokenizer_dir, models):
    run_ranks(compare, 4, 120, tiny_tokenizer_dir, models, FOUR_RANKS)
