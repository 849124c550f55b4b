# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Generation at another split of the ranks gives the texts of the split of training."""

import pytest
import torch
from megatron.core.parallel_state import destroy_model_parallel

from nemo_aligner.parallel import parallel_state
from tests.distributed import matrix, matrix_reload
from tests.distributed.launcher import progress, run_ranks
from tests.tiny_models import PPO

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = PP2 | {"virtual_pipeline_model_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2}
SP2 = TP2 | {"sequence_parallel": True}
# Architecture, split of training, `generation.reshard`.
TWO_RANKS = {"llama DP2 to TP2": ("llama", {}, {"tp": 2, "pp": 1})}
TWO_RANKS["lora PP2 to 1"] = "lora", PP2, "auto"
TWO_RANKS_FULL = {
    "llama VPP2 to 1": ("llama", VPP2, "auto"),
    "llama TP2+SP to 1": ("llama", SP2, {"tp": 1, "pp": 1}),
    "gpt2 VPP2 to TP2": ("gpt2", VPP2, {"tp": 2, "pp": 1}),
    "moe PP2 to 1": ("moe", PP2, {"tp": 1, "pp": 1}),
    "lora TP2 to 1": ("lora", TP2, {"tp": 1, "pp": 1}),
    "gpt2 TP2 to PP2": ("gpt2", TP2, {"tp": 1, "pp": 2}),
    "gpt2 DP2 to PP2": ("gpt2", {}, {"tp": 1, "pp": 2}),
}
FOUR_RANKS = {
    "TP2xPP2 to TP2": ("llama", PP2 | SP2, "auto"),
    "PP2xCP2 to CP2": ("llama", PP2 | {"context_parallel_size": 2}, "auto"),
    "PP2xDP2 to DP4": ("gpt2", VPP2, "auto"),
    "PP2xEP2 to EP2": ("moe", PP2 | {"expert_model_parallel_size": 2}, "auto"),
    "TP2xPP2 to 1": ("gpt2", PP2 | TP2, {"tp": 1, "pp": 1}),
    "TP2xVPP2 to PP2": ("llama", VPP2 | SP2, {"tp": 1, "pp": 2}),
    "TP2xPP2 to PP4": ("gpt2", PP2 | TP2, {"tp": 1, "pp": 4}),
    "PP2xDP2 to TP2xPP2": ("gpt2", PP2, {"tp": 2, "pp": 2}),
    "TP2xCP2 to CP2": ("lora", TP2 | {"context_parallel_size": 2}, {"tp": 1, "pp": 1}),
}


def generated(model):
    with model.adapters_for_generation():
        return matrix.generated(model, kinds=("sampled", "turns"))


def streamed(model):
    """Lengths and log-probs of `matrix.generated`'s prompts in batches of 3, by their places."""
    batches = zip(*(x.split(3) for x in matrix.ragged_prompts()), strict=True)
    params, found = matrix.GENERATION["sampled"], {}
    with model.adapters_for_generation():
        for places, output in model.generator.stream(batches, params, slots=2):
            assert 1 <= len(places) <= 2
            for place, tokens, length in zip(
                places, output.response_tokens, output.response_lengths, strict=True
            ):
                found[place] = tokens[:length].tolist()
    return [found[place] for place in range(10)]


def compare(tokenizer_dir, folder, cases):
    """On all ranks: with the weights as they are trained, then resharded."""
    for name, (architecture, split, wanted) in cases.items():
        progress(name)
        model, *_ = matrix.build(tokenizer_dir, folder, architecture, "actor", split)
        before = {n: t.detach().clone() for n, t in model._named_weights()}
        state = torch.get_rng_state()
        trained, streams = generated(model), streamed(model)
        model.settings.generation.reshard = wanted
        resharded = model._generation_split()
        assert resharded.weights(model.unwrapped())[0] is not model.unwrapped()[0], name
        model.generator.split = resharded
        moved, moved_streams = generated(model), streamed(model)
        for kind, samples in moved.items():
            assert matrix.apart(samples, trained[kind]) < 1e-5, (name, kind)
        assert moved_streams == streams, name
        for n, tensor in model._named_weights():
            assert torch.equal(tensor, before[n]), (name, n)
        assert torch.equal(torch.get_rng_state(), state), name  # a resumed job draws the same
        destroy_model_parallel()


def configured_and_damaged(tokenizer_dir, folder):
    """On all ranks: the configuration switches it on; bf16 weights arrive with their bits; one
    that does not is named on all ranks, whether stages are gathered or shards are joined.
    """
    trt_llm = {"trt_llm": {"enable": True, "reshard": True}}  # NeMo-Aligner's reshard=auto
    for split, wanted in ((PP2, trt_llm), (SP2, {"generation": {"reshard": {"tp": 1, "pp": 1}}})):
        split = split | {"ppo": {**PPO, **wanted}, "precision": "bf16"}
        model, *_ = matrix.build(tokenizer_dir, folder, "llama", "actor", split)
        assert all(ended or len(ids) > 1 for ids, ended, _ in generated(model)["sampled"])
        moved = model.generator.split
        assert (moved.tensor.size(), moved.pipeline.size(), len(moved.dividing)) == (1, 1, 1)
        (whole,) = moved.weights(model.unwrapped())
        assert len(whole.decoder.layers) == 4
        assert {tensor.dtype for tensor in whole.parameters()} == {torch.bfloat16}
        assert whole.decoder.layers[0].mlp.linear_fc2.weight.shape[1] == model.cfg.ffn_hidden_size
        honest = torch.distributed.broadcast

        def flips(tensor, src, group):
            honest(tensor, src=src, group=group)  # noqa: B023
            if src == 0 and torch.distributed.get_rank() == 1:
                tensor.view(torch.int16).view(-1)[0] ^= 1

        torch.distributed.broadcast = flips
        with pytest.raises(RuntimeError, match="of rank 1 has other bits"):
            moved.weights(model.unwrapped())
        torch.distributed.broadcast = honest
        assert parallel_state.get_tensor_and_pipeline_parallel_group().size() == 2
        destroy_model_parallel()


def in_turns(tokenizer_dir, folder, name, reshard, resume=False):
    """On all ranks: rollouts and two updates with dropout, in turns; saved after the first update,
    or resumed there. Returns the second update's numbers, the last texts and the weights.
    """
    overrides = TP2 | {"ppo": {**PPO, "generation": {"reshard": reshard}}, "hidden_dropout": 0.1}
    training = matrix.build(tokenizer_dir, folder, "gpt2", "actor", overrides)
    model, *_ = training
    callback = matrix_reload._callback(folder, name, "gpt2", "actor", *training)
    if resume:
        assert callback.load_latest() == {"step": 1}
    else:
        generated(model)
        matrix_reload.step(*training, "actor")
        callback.custom_save({}, trainer_state={"step": 1})
    generated(model)
    numbers = matrix_reload.step(*training, "actor")
    texts = [ids for ids, *_ in generated(model)["sampled"]]
    weights = {n: t.detach().clone() for n, t in model._named_weights()}
    destroy_model_parallel()
    return numbers, texts, weights


def resumes_exactly(tokenizer_dir, folder):
    moved = {"tp": 1, "pp": 1}
    whole = in_turns(tokenizer_dir, folder, "moved", moved)
    others = [in_turns(tokenizer_dir, folder, "moved", moved, resume=True)]
    for other in [*others, in_turns(tokenizer_dir, folder, "kept", "none")]:
        assert other[0] == whole[0] and other[1] == whole[1]
        assert all(torch.equal(other[2][name], tensor) for name, tensor in whole[2].items())


def two_ranks(tokenizer_dir, folder):
    compare(tokenizer_dir, folder, TWO_RANKS)
    configured_and_damaged(tokenizer_dir, folder)


def more_on_two_ranks(tokenizer_dir, folder):
    compare(tokenizer_dir, folder, TWO_RANKS_FULL)
    resumes_exactly(tokenizer_dir, folder)


def test_texts_are_those_of_the_split_of_training(tiny_tokenizer_dir, models):
    run_ranks(two_ranks, 2, 200, tiny_tokenizer_dir, models)


@pytest.mark.full
def test_more_texts_are_those_of_the_split_of_training(tiny_tokenizer_dir, models):
    run_ranks(more_on_two_ranks, 2, 200, tiny_tokenizer_dir, models)


@pytest.mark.full
def test_texts_are_those_of_the_split_of_training_beside_other_splits(tiny_tokenizer_dir, models):
    run_ranks(compare, 4, 280, tiny_tokenizer_dir, models, FOUR_RANKS)
