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
from megatron.core.utils import get_batch_on_this_cp_rank

from nemo_aligner.generation import GenerationParams
from nemo_aligner.models.nlp.gpt.gpt_sft_model import GPTSFTModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_critic import MegatronGPTCriticModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_ppo_actor import MegatronGPTActorModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_regression_reward_model import (
    MegatronGPTRegressionRewardModel,
)
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_rs_actor import MegatronGPTRSModel
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.context_parallel import gather_shares, share_positions, take_share
from nemo_aligner.training.optim import optimizer_step
from tests.distributed.launcher import progress, run_ranks
from tests.tiny_models import PPO, tiny_config

pytestmark = pytest.mark.timeout(400)

ROWS, WIDTH = 4, 9  # a width that no share fits: padded to 12
LENGTHS = [9, 4, 6, 8]
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
    for dim in (0, 1, 2):
        y = x.movedim(1, dim)
        assert torch.equal(gather_shares(take_share(y, dim), dim), y)
    assert gather_shares(torch.arange(4) + rank, 0).tolist() == [0, 1, 1, 2, 3, 4, 2, 3]

    weights = torch.randn(3, 8, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (gradient,) = torch.autograd.grad((gather_shares(mine, 1) * weights).sum(), mine)
    assert torch.equal(gradient, take_share(weights, 1)), (
        "the same loss on all ranks: nothing to sum"
    )
    (gradient,) = torch.autograd.grad(
        (gather_shares(mine, 1, sum_gradients=True) * weights * (rank + 1)).sum(), mine
    )
    torch.testing.assert_close(gradient, take_share(weights, 1) * 3)


def batches():
    """Global batches with rows of unequal weight."""
    generator = torch.Generator().manual_seed(3)

    def tokens():
        return torch.randint(0, 290, (ROWS, WIDTH), generator=generator)

    def numbers(*shape):
        return torch.randn(*shape, generator=generator)

    lengths, column = torch.tensor(LENGTHS), torch.arange(WIDTH)
    mask = ((column >= 2) & (column < lengths[:, None] - 1)).float()[:, :-1]
    text_mask = torch.ones(ROWS, WIDTH)
    text_mask[1] = 0
    pairs = {
        "chosen": tokens(),
        "rejected": tokens(),
        "chosen_length": lengths,
        "rejected_length": lengths.flip(0),
    }
    answers = {"response_tokens": tokens(), "mask": mask}
    return {
        "actor": answers
        | {
            "is_end": torch.tensor([True, True, False, True]),
            "advantages": numbers(ROWS, WIDTH - 1),
        }
        | {"prev_logprobs": -5.7 + 0.1 * numbers(ROWS, WIDTH - 1)},
        "critic": {"tokens": tokens(), "mask": mask}
        | {"returns": numbers(ROWS, WIDTH - 1), "prev_values": numbers(ROWS, WIDTH - 1)},
        "reward": pairs | {"loss_mask": text_mask},
        "labels": {
            "inputs": tokens(),
            "lengths": lengths,
            "labels": numbers(ROWS, 3),
            "loss_mask": text_mask,
        },
        "sft": {
            "tokens": tokens(),
            "labels": tokens(),
            "loss_mask": (column < lengths[:, None]).float(),
        },
        "rejection sampling": answers,
    }


# role: (class, batch, architecture, further settings)
ROLES = {
    "actor, GPT-2": (MegatronGPTActorModel, "actor", "gpt2", {"micro_batch_size": 2}),
    "actor, Llama": (MegatronGPTActorModel, "actor", "llama", {}),
    "critic": (
        MegatronGPTCriticModel,
        "critic",
        "llama",
        {"micro_batch_size": 2, "output_sequence": True},
    ),
    "reward model": (MegatronGPTRewardModel, "reward", "llama", {"micro_batch_size": 2}),
    "reward model, average": (MegatronGPTRewardModel, "reward", "gpt2", {"use_avg_pool": True}),
    "attributes": (
        MegatronGPTRegressionRewardModel,
        "labels",
        "llama",
        {"regression": {"num_attributes": 3}},
    ),
    "sft": (GPTSFTModel, "sft", "gpt2", {"activations_checkpoint_granularity": "selective"}),
    "rejection sampling": (
        MegatronGPTRSModel,
        "rejection sampling",
        "llama",
        {"optim": {"name": "adamw"}},
    ),
}


def build(tokenizer_dir, role, **split):
    model_class, _, architecture, settings = ROLES[role]
    settings = {"loss_clip_val": 0.2, "ppo": PPO, "rs": PPO} | settings | split
    # 9 positions: the padding must not reach beyond a learned position embedding.
    positions = (
        dict(encoder_seq_length=WIDTH + 16, max_position_embeddings=WIDTH)
        if architecture == "gpt2"
        else {}
    )
    cfg = tiny_config(tokenizer_dir, architecture, **positions, **settings)
    # Keys have a bias that changes nothing; its gradient is rounding alone, which Adam would blow
    # up to whole steps.
    cfg.optim.eps = 1e-5
    return model_class(cfg)


def evaluate(tokenizer_dir, role, **split):
    """Three optimizer steps of a role and what it infers then.

    Returns:
        (loss, gradient norm and metrics of each step; inferred tensors; {name: weight}).
    """
    model = build(tokenizer_dir, role, **split)
    batch = batches()[ROLES[role][1]]
    inputs = batches()["critic"]["tokens"], torch.tensor(LENGTHS)
    if role == "critic":
        model.has_trained_head = True
        model.set_reward_model()
    optimizer, scheduler = model.setup_megatron_optimization(10)
    numbers = []
    for _ in range(3):
        optimizer.zero_grad()
        model.prepare_for_training_step()
        loss, metrics = model.get_loss_and_metrics(batch, forward_only=False)
        numbers.append(
            {"loss": loss, "norm": optimizer_step(optimizer, scheduler, 0.5), **metrics}
        )
    inferred = []
    if "reward" in role or role == "attributes":
        inferred = [model.infer(inputs)]
    elif role == "critic":
        inferred = list(model.infer_rm_critic(inputs))
    elif role != "sft":
        inferred = [model.get_inference_log_probs(batch["response_tokens"])]
    validation = model.get_loss_and_metrics(batch, forward_only=True)[0]
    return (
        numbers + [{"validation": validation}],
        inferred,
        {n: w.detach().clone() for n, w in model._named_weights()},
    )


def ragged_prompts(rows=5):
    generator = torch.Generator().manual_seed(5)
    return {
        "text": torch.randint(0, 290, (rows, 7), generator=generator),
        "length": torch.randint(1, 8, (rows,), generator=generator),
        "sample_seeds": torch.arange(rows) + 50,
    }


def generate(tokenizer_dir, architecture, **split):
    """Texts of 5 prompts and of a single one, greedy and sampled, before and after log-probs of
    the same widths.
    """
    settings = PPO | {
        "sampling_params": PPO["sampling_params"] | {"end_strings": [*"aeiou"], "temperature": 1.4}
    }
    model = MegatronGPTActorModel(
        tiny_config(tokenizer_dir, architecture, init_method_std=0.3, ppo=settings, **split)
    )
    greedy = GenerationParams(max_length=9, use_greedy=True, return_logprobs=True)
    model.set_train()
    results = []
    for rows in (5, 1):
        prompts = ragged_prompts(rows)
        sampled = model.infer(prompts)
        output = model.generator.generate(
            prompts["text"], prompts["length"], prompts["sample_seeds"], greedy
        )
        results += [
            *sampled.values(),
            output.response_tokens,
            output.response_lengths,
            output.logprobs,
        ]
        # The rotary embedding remembers lengths; here it must not give what it gave when decoding.
        results.append(model.get_inference_log_probs(sampled["response_tokens"]))
    assert all(chunk.training for chunk in model.model)
    assert model.transformer_config.context_parallel_size == split.get("context_parallel_size", 1)
    return results


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
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    MegatronGPTRSModel(tiny_config(tokenizer_dir, "llama", rs=PPO, **CP2))
    ones = torch.ones(64)
    outside = torch.nn.functional.dropout(ones, 0.5)
    with get_cuda_rng_tracker().fork():
        return outside, torch.nn.functional.dropout(ones, 0.5)


def on_two_ranks(tokenizer_dir):
    parallel_state.initialize(**CP2)
    assert parallel_state.get_data_parallel_world_size() == 1
    assert torch.distributed.get_process_group_ranks(
        parallel_state.get_model_parallel_group()
    ) == [0, 1]
    assert parallel_state.get_model_parallel_src_rank() == 0
    check_shares()
    results = {role: evaluate(tokenizer_dir, role, **CP2) for role in ROLES}
    results |= {name: generate(tokenizer_dir, name, **CP2) for name in ("gpt2", "llama")}
    check_prompt_that_breaks_one_rank(tokenizer_dir)
    progress("updates and texts")
    results["dropout"] = dropout_masks(tokenizer_dir)
    destroy_model_parallel()
    return results


@pytest.fixture(scope="module")
def two_ranks(tiny_tokenizer_dir):
    return run_ranks(on_two_ranks, 2, 300, tiny_tokenizer_dir)


def assert_equal_numbers(ours, expected):
    for step, wanted in zip(ours[0], expected[0], strict=True):
        assert step.keys() == wanted.keys()
        for name, number in wanted.items():
            torch.testing.assert_close(
                torch.as_tensor(step[name], dtype=torch.float64),
                torch.as_tensor(number, dtype=torch.float64),
                rtol=1e-5,
                atol=1e-7,
                msg=lambda text, name=name: f"{name}: {text}",
            )
    for inferred, wanted in zip(ours[1], expected[1], strict=True):
        torch.testing.assert_close(inferred, wanted, rtol=1e-5, atol=1e-5)
    for name, weight in expected[2].items():
        assert torch.allclose(ours[2][name], weight, rtol=1e-5, atol=2e-6), name


def assert_equal_texts(ours, expected):
    for tensor, wanted in zip(ours, expected, strict=True):
        if wanted.is_floating_point():
            torch.testing.assert_close(tensor, wanted, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(tensor, wanted)


@pytest.mark.parametrize("role", ROLES)
def test_two_ranks_that_share_sequences_compute_what_one_does(tiny_tokenizer_dir, two_ranks, role):
    expected = evaluate(tiny_tokenizer_dir, role)
    for ours in two_ranks:
        assert_equal_numbers(ours[role], expected)
    # Whatever follows from the metrics (a stop, a log entry) happens on both ranks or on none.
    for one, other in zip(two_ranks[0][role][0], two_ranks[1][role][0], strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(torch.as_tensor(one[k]), torch.as_tensor(other[k])) for k in one)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_text_and_its_log_probs(tiny_tokenizer_dir, two_ranks, architecture):
    expected = generate(tiny_tokenizer_dir, architecture)
    for ours in two_ranks:
        assert_equal_texts(ours[architecture], expected)


def test_ranks_draw_different_dropout_masks(two_ranks):
    """They hold different positions: equal masks would be correlated."""
    for ours, theirs in zip(two_ranks[0]["dropout"], two_ranks[1]["dropout"], strict=True):
        assert not torch.equal(ours, theirs)
