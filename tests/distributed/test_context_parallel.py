# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: the shares of the ranks, and that ranks which share each sequence compute
what one does.

One launch of two ranks serves all tests. More ranks, and checkpoints, are in the matrix.
"""

import inspect

import pytest
import torch
from megatron.core.parallel_state import destroy_model_parallel, get_context_parallel_group
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.utils import get_batch_on_this_cp_rank

from nemo_aligner.models.nlp.gpt.megatron_gpt_ppo_actor import MegatronGPTActorModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_rs_actor import MegatronGPTRSModel
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import (
    gather_shares,
    share_positions,
    take_share,
    width_multiple,
)
from tests.distributed import matrix, matrix_reload
from tests.distributed.launcher import progress, run_ranks
from tests.tiny_models import PPO, tiny_config

pytestmark = pytest.mark.timeout(400)

CP2 = dict(context_parallel_size=2)


def check_shares():
    """Shares of two ranks against Megatron Core's own split, and the gradients of both ways to
    gather.
    """
    rank = torch.distributed.get_rank()
    x = torch.randn(3, 8, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    only_in_0_19 = {"is_hybrid_cp"} & set(inspect.signature(get_batch_on_this_cp_rank).parameters)
    expected = get_batch_on_this_cp_rank(
        {"x": x}, cp_group=get_context_parallel_group(), **dict.fromkeys(only_in_0_19, False)
    )["x"]
    mine = take_share(x, 1).requires_grad_()
    assert torch.equal(mine, expected)
    assert torch.equal(share_positions(8), torch.tensor([[0, 1, 6, 7], [2, 3, 4, 5]][rank]))
    assert width_multiple() == 4
    with pytest.raises(ValueError, match="a width of 6 is no multiple of 4"):
        take_share(torch.zeros(3, 6), 1)
    for dim in (0, 1, 2):
        y = x.movedim(1, dim)
        assert torch.equal(gather_shares(take_share(y, dim), dim), y)
    assert gather_shares(torch.arange(4) + rank, 0).tolist() == [0, 1, 1, 2, 3, 4, 2, 3]

    weights = torch.randn(3, 8, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (gradient,) = torch.autograd.grad((gather_shares(mine, 1) * weights).sum(), mine)
    why = "the same loss on all ranks: nothing to sum"
    assert torch.equal(gradient, take_share(weights, 1)), why
    (gradient,) = torch.autograd.grad(
        (gather_shares(mine, 1, sum_gradients=True) * weights * (rank + 1)).sum(), mine
    )
    torch.testing.assert_close(gradient, take_share(weights, 1) * 3)


# Architecture and role of the matrix
CASES = "gpt2 actor, llama actor, llama critic, gpt2 reward model, llama regression, llama sft"
CASES += ", gpt2 rs, llama dpo, gpt2 kto"
CASES = [tuple(case.split(" ", 1)) for case in CASES.split(", ")]


def evaluate(tokenizer_dir, folder, architecture, role, **split):
    """Of an actor texts of 5 prompts and of a single one; then what a role infers, an optimizer
    step, and the weights after it.
    """
    training = matrix.build(tokenizer_dir, folder, architecture, role, split)
    model, numbers = training[0], {}
    if role == "actor":
        model.set_train()
        for rows in (5, 1):
            texts = matrix.generated(model, kinds=matrix.GENERATION, rows=rows)
            numbers |= {f"{kind}, {rows}": samples for kind, samples in texts.items()}
            assert all(chunk.training for chunk in model.model)
            # The rotary embedding remembers lengths: it must not give what it gave when decoding.
            matrix.inferred(model, role)
        assert model.transformer_config.context_parallel_size == len(split) + 1
    numbers |= matrix.inferred(model, role)
    numbers["step"] = matrix_reload.step(*training, role)
    return numbers | {"weights": {n: w.detach().clone() for n, w in model._named_weights()}}


def check_prompt_that_breaks_one_rank(tokenizer_dir):
    """The logits of the last row are not finite: both ranks hear of it."""
    model = MegatronGPTActorModel(tiny_config(tokenizer_dir, "llama", ppo=PPO, **CP2))
    prompts = {"text": torch.tensor([[5, 6], [7, 8], [9, 289]]), "length": torch.tensor([2, 2, 2])}
    with torch.no_grad():
        model.unwrapped()[0].embedding.word_embeddings.weight[289] = float("nan")
    with pytest.raises(RuntimeError, match="not finite"):
        model.infer(prompts)


def dropout_masks(tokenizer_dir):
    """Where dropout of 0.5 zeroes a vector of ones in this process, outside and inside the
    tensor-parallel regions.
    """
    MegatronGPTRSModel(tiny_config(tokenizer_dir, "llama", rs=PPO, **CP2))
    ones = torch.ones(64)
    outside = torch.nn.functional.dropout(ones, 0.5)
    with get_cuda_rng_tracker().fork():
        return outside, torch.nn.functional.dropout(ones, 0.5)


def on_two_ranks(tokenizer_dir, folder):
    parallel_state.initialize(**CP2)
    assert parallel_state.get_data_parallel_world_size() == 1
    group = parallel_state.get_model_parallel_group()
    assert torch.distributed.get_process_group_ranks(group) == [0, 1]
    assert parallel_state.get_model_parallel_src_rank() == 0
    check_shares()
    results = {case: evaluate(tokenizer_dir, folder, *case, **CP2) for case in CASES}
    check_prompt_that_breaks_one_rank(tokenizer_dir)
    progress("updates and texts")
    results["dropout"] = dropout_masks(tokenizer_dir)
    destroy_model_parallel()
    return results


@pytest.fixture(scope="module")
def two_ranks(tiny_tokenizer_dir, models):
    return run_ranks(on_two_ranks, 2, 300, tiny_tokenizer_dir, models)


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_two_ranks_that_share_sequences_compute_what_one_does(
    tiny_tokenizer_dir, models, two_ranks, case
):
    expected = evaluate(tiny_tokenizer_dir, models, *case)
    for ours in two_ranks:
        matrix.assert_same(ours[case], expected)
    # Whatever follows from the metrics (a stop, a log entry) happens on both ranks or on none.
    assert two_ranks[0][case]["step"] == two_ranks[1][case]["step"]


def test_ranks_draw_different_dropout_masks(two_ranks):
    """They hold different positions: equal masks would be correlated."""
    for ours, theirs in zip(two_ranks[0]["dropout"], two_ranks[1]["dropout"], strict=True):
        assert not torch.equal(ours, theirs)
