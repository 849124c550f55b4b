# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts gives the same on one rank and on two, with the experts on both or spread
over them.

One launch of two ranks serves all splits. Checkpoints are in the matrix.
"""

import json
from functools import cache, partial

import pytest
import torch
from megatron.core.parallel_state import destroy_model_parallel
from omegaconf import OmegaConf

from nemo_aligner.checkpoint import sources
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.data.nlp.batch_iterators import StoreBatchIterator
from nemo_aligner.generation import GenerationParams, MegatronGenerator
from nemo_aligner.launch.model_loading import load_from_nemo
from nemo_aligner.models.nlp.gpt.gpt_sft_model import GPTSFTModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_critic import MegatronGPTCriticModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_ppo_actor import MegatronGPTActorModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
from nemo_aligner.parallel import parallel_state
from nemo_aligner.training.optim import optimizer_step
from tests.distributed.launcher import progress, run_ranks
from tests.tiny_models import PPO, tiny_config

pytestmark = pytest.mark.timeout(300)

SAMPLES, WIDTH, STEPS, EXPERTS = 8, 12, 3, 4
LENGTHS = torch.tensor([12, 4, 7, 9, 5, 11, 8, 3])
MOE = {"num_moe_experts": EXPERTS, "moe_ffn_hidden_size": 24, "init_method_std": 0.3}
EP2 = {"expert_model_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
BALANCED = {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.1}
RECOMPUTATION = {
    "activations_checkpoint_granularity": "full",
    "activations_checkpoint_method": "uniform",
    "activations_checkpoint_num_layers": 1,
}
# name -> (split, other keys). One rank computes each with the same other keys. At other splits the
# matrix compares.
CASES = {
    "EP2": (EP2, {}),
    "EP2, unsharded optimizer": (EP2, {"optim": {"name": "adamw"}}),
    "EP2, recomputation": (EP2 | RECOMPUTATION, {}),
    "EP2, auxiliary losses": (EP2, BALANCED),
    "TP2, sequence parallel, auxiliary losses": (TP2, BALANCED),
}
SAMPLING = {
    "greedy": GenerationParams(
        max_length=12, use_greedy=True, repetition_penalty=1.3, return_logprobs=True
    ),
    "sampled": GenerationParams(
        max_length=12,
        temperature=1.3,
        top_p=0.95,
        end_strings=tuple("abcdefghilmnoprstu"),
        return_logprobs=True,
    ),
}


# --- what every rank computes


def mine(tensor):
    """This data-parallel rank's samples of a global batch."""
    return tensor.chunk(parallel_state.get_data_parallel_world_size())[
        parallel_state.get_data_parallel_rank()
    ]


def unequal():
    """Samples of this rank where the ranks have unequal work: 2 and 6 of 8."""
    if parallel_state.get_data_parallel_world_size() == 1:
        return slice(None)
    return slice(0, 2) if parallel_state.get_data_parallel_rank() == 0 else slice(2, None)


def rollouts():
    generator = torch.Generator().manual_seed(3)
    column = torch.arange(WIDTH)
    return {
        "response_tokens": torch.randint(0, 290, (SAMPLES, WIDTH), generator=generator),
        "is_end": torch.arange(SAMPLES) != 2,
        "mask": ((column >= 1) & (column < LENGTHS[:, None] - 1)).float()[:, :-1],
        "advantages": torch.randn(SAMPLES, WIDTH - 1, generator=generator),
        "prev_logprobs": -5.5 + 0.3 * torch.randn(SAMPLES, WIDTH - 1, generator=generator),
    }


def named(model, value=lambda parameter: parameter):
    """`value(parameter)` by name; experts are numbered as in the whole model."""
    found = {}
    first = (
        parallel_state.get_expert_model_parallel_rank()
        * EXPERTS
        // (parallel_state.get_expert_model_parallel_world_size())
    )
    for module in model.unwrapped():
        for name, parameter in module.named_parameters():
            before, local, after = name.partition(".local_experts.")
            if local:
                number, after = after.split(".", 1)
                name = f"{before}.{first + int(number)}.{after}"
            if ".layers." in name:  # numbered on this pipeline stage
                number = int(name.split(".layers.")[1].split(".")[0])
                stage_first = parallel_state.get_pipeline_model_parallel_rank() * len(
                    module.decoder.layers
                )
                name = name.replace(f".layers.{number}.", f".layers.{stage_first + number}.")
            found[name] = value(parameter).detach().clone()
    return found


def step(model, optimizer, scheduler, batch):
    """Loss, gradient norm and, where there are any, balance losses of one update."""
    model.prepare_for_training_step()
    loss, metrics = model.get_loss_and_metrics(batch)
    return [
        loss,
        optimizer_step(optimizer, scheduler, 0.5),
        *(metrics[key] for key in metrics if "moe_" in key),
    ]


def updates(folder, split, other):
    """Losses, gradient norms, first gradients (unsharded optimizer), weights and log-probs of
    `STEPS` updates.
    """
    nemo = str(folder / "llama.nemo")
    cfg = OmegaConf.merge(
        sources.read_config(nemo), {"ppo": PPO, "micro_batch_size": 1}, split, other
    )
    actor = MegatronGPTActorModel.restore_from(nemo, override_config_path=cfg)
    actor.set_reference_policy()
    tokens = rollouts()["response_tokens"][unequal()]
    before = actor.get_inference_log_probs(tokens), actor.get_init_policy_logprobs(tokens)
    assert torch.equal(*before)  # policy and reference agree before the first update
    optimizer, scheduler = actor.setup_megatron_optimization(max_steps=10)
    batch = {key: mine(value) for key, value in rollouts().items()}
    numbers, gradients = [], None
    for _ in range(STEPS):
        numbers += step(actor, optimizer, scheduler, batch)
        if gradients is None and cfg.optim.name == "adamw":
            gradients = named(actor, lambda parameter: parameter.main_grad)
    assert torch.equal(actor.get_init_policy_logprobs(tokens), before[0])  # whatever was trained
    return numbers, gradients, named(actor), actor.get_inference_log_probs(tokens)


def fresh(folder):
    """Initial weights of a model that is not loaded from a file."""
    experts = {"expert_model_parallel_size": torch.distributed.get_world_size()}
    return named(
        MegatronGPTModel(OmegaConf.merge(sources.read_config(folder / "llama.nemo"), experts))
    )


def responses(folder):
    """Responses to ragged prompts, of which the ranks have an unequal number: {params: [(ids,
    ended, log-probs)]}.
    """
    generator = torch.Generator().manual_seed(5)
    prompts = torch.randint(0, 290, (SAMPLES, 6), generator=generator)
    lengths = torch.tensor([1, 6, 2, 3, 6, 5, 1, 4])
    inputs = [x[unequal()] for x in (prompts, lengths, torch.arange(SAMPLES) + 50)]
    nemo = str(folder / "llama.nemo")
    experts = {"expert_model_parallel_size": parallel_state.get_world_size()}
    cfg = OmegaConf.merge(sources.read_config(nemo), experts)
    model = MegatronGPTModel.restore_from(nemo, override_config_path=cfg)
    results = {}
    for name, params in SAMPLING.items():
        output = MegatronGenerator(model.model, model.tokenizer, max_sequence_length=40).generate(
            *inputs, params
        )
        results[name] = [
            (
                output.response_tokens[i, :length].tolist(),
                bool(output.is_end[i]),
                output.logprobs[i, : length - 1],
            )
            for i, length in enumerate(output.response_lengths.tolist())
        ]
    if parallel_state.get_world_size() > 1:  # one rank's logits are not finite: both hear of it
        if parallel_state.get_rank() == 0:
            with torch.no_grad():
                model.unwrapped()[0].output_layer.weight.fill_(torch.nan)
        with pytest.raises(
            RuntimeError, match="not finite" if parallel_state.get_rank() == 0 else "another rank"
        ):
            MegatronGenerator(model.model, model.tokenizer, max_sequence_length=40).generate(
                *inputs, params
            )
    return results


def supervised(folder, role):
    """Losses of two updates of another role, and what it infers for unequal shares."""
    experts = {"expert_model_parallel_size": torch.distributed.get_world_size()}
    tokens, column = rollouts()["response_tokens"], torch.arange(WIDTH)
    inside = (column < LENGTHS[:, None]).float()
    nemo = "llama.nemo" if role == "sft" else "reward.nemo"
    model_class = {
        "sft": GPTSFTModel,
        "reward model": MegatronGPTRewardModel,
        "critic": MegatronGPTCriticModel,
    }[role]
    stored = sources.read_config(folder / nemo)
    cfg = OmegaConf.merge(
        stored, {"output_sequence": role == "critic", "loss_clip_val": 0.2}, experts
    )
    model = load_from_nemo(model_class, cfg, None, restore_path=folder / nemo)
    batch = {
        "sft": {"tokens": tokens, "labels": tokens.roll(-1, 1), "loss_mask": inside},
        "reward model": {
            "chosen": tokens,
            "rejected": tokens.flip(0),
            "chosen_length": LENGTHS,
            "rejected_length": LENGTHS.flip(0),
            "loss_mask": inside,
        },
        "critic": {
            "tokens": tokens,
            "returns": rollouts()["advantages"],
            "prev_values": rollouts()["advantages"].flip(0),
            "mask": rollouts()["mask"],
        },
    }[role]
    optimizer, scheduler = model.setup_megatron_optimization(10)
    batch = {key: mine(value) for key, value in batch.items()}
    numbers = [number for _ in range(2) for number in step(model, optimizer, scheduler, batch)]
    if role == "sft":
        return numbers, torch.zeros(SAMPLES)[unequal()]
    return numbers, model.infer((tokens[unequal()], LENGTHS[unequal()]))


# --- two ranks


def run_into(results, folder, name, function, *args, **sizes):
    """Keep this rank's share of the samples and what `function` computes at a split."""
    parallel_state.initialize(seed=7, **sizes)
    results[name] = (unequal(), function(folder, *args))
    progress(name)
    destroy_model_parallel()


def on_two_ranks(folder):
    results = {}
    for name, (split, other) in CASES.items():
        sizes = {key: value for key, value in split.items() if key.endswith("model_parallel_size")}
        run_into(results, folder, name, updates, split, other, **sizes)
    run = partial(run_into, results, folder)
    run("fresh", fresh, **EP2)
    run("responses", responses, **EP2)
    for role in ("sft", "reward model", "critic"):
        run(role, supervised, role, **EP2)
    parallel_state.initialize(seed=7, **EP2)
    with pytest.raises(ConfigError, match="use_flask"):
        StoreBatchIterator([], 0, None, None)
    return results


@pytest.fixture(scope="module")
def folder(tiny_tokenizer_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    MegatronGPTModel(tiny_config(tiny_tokenizer_dir, **MOE)).save_to(str(folder / "llama.nemo"))
    MegatronGPTRewardModel(tiny_config(tiny_tokenizer_dir, **MOE)).save_to(
        str(folder / "reward.nemo")
    )
    return folder


@pytest.fixture(scope="module")
def one_rank(folder):
    """What one rank computes."""
    results = {"fresh": fresh(folder), "responses": responses(folder)}
    for role in ("sft", "reward model", "critic"):
        results[role] = supervised(folder, role)
    return results


@pytest.fixture(scope="module")
def one_rank_updates(folder):
    """`updates_on_one_rank(name)` of a case; computed once."""

    @cache
    def compute(keys):
        return updates(folder, {}, OmegaConf.create(keys))

    # A dict is no key of the cache.
    return lambda name: compute(json.dumps(CASES[name][1]))


@pytest.fixture(scope="module")
def two_ranks(folder, one_rank):
    return run_ranks(on_two_ranks, 2, 120, folder)


def part(name, whole, shape, rank):
    """What tensor-parallel rank `rank` of two holds of a weight; `whole` itself where it is not
    split.
    """
    if whole.shape == shape:
        return whole
    dim = 0 if whole.shape[0] != shape[0] else 1
    if name.endswith("linear_fc1.weight"):  # gate and value of the activation, each split
        return torch.cat([half.chunk(2, dim)[rank] for half in whole.chunk(2, dim)], dim)
    return whole.chunk(2, dim)[rank]


def assert_weights(ours, expected, rank=0, tolerance=1e-5):
    """No tensor is further off than `tolerance` of its largest entry on one rank."""
    assert ours
    for name, tensor in ours.items():
        difference = (tensor - part(name, expected[name], tensor.shape, rank)).abs().max()
        assert difference <= tolerance * expected[name].abs().max() + 1e-8, name


@pytest.mark.parametrize("name", CASES)
def test_updates_equal_those_of_one_rank(one_rank_updates, two_ranks, name):
    numbers, gradients, weights, logprobs = one_rank_updates(name)
    seen = set()
    for rank, results in enumerate(two_ranks):
        share, (rank_numbers, rank_gradients, rank_weights, rank_logprobs) = results[name]
        assert rank_numbers == pytest.approx(numbers, rel=1e-5)
        torch.testing.assert_close(rank_logprobs, logprobs[share], rtol=1e-5, atol=2e-5)
        assert_weights(rank_weights, weights, rank)
        if gradients is not None:
            assert_weights(rank_gradients, gradients)
        seen |= set(rank_weights)
    assert seen == set(weights)


def test_initial_weights_do_not_depend_on_the_split(one_rank, two_ranks):
    weights = [rank["fresh"][1] for rank in two_ranks]
    assert_weights({**weights[0], **weights[1]}, one_rank["fresh"], tolerance=0)
    assert set(weights[0] | weights[1]) == set(one_rank["fresh"])


def test_responses_equal_those_of_one_rank(one_rank, two_ranks):
    for name, expected in one_rank["responses"].items():
        ended = [end for _, end, _ in expected]
        assert name == "greedy" or (any(ended) and not all(ended))
        for results in two_ranks:
            share, by_params = results["responses"]
            for ours, wanted in zip(by_params[name], expected[share], strict=True):
                assert ours[:2] == wanted[:2]
                torch.testing.assert_close(ours[2], wanted[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("role", ["sft", "reward model", "critic"])
def test_other_roles_equal_one_rank(one_rank, two_ranks, role):
    numbers, inferred = one_rank[role]
    for results in two_ranks:
        share, (rank_numbers, rank_inferred) = results[role]
        assert rank_numbers == pytest.approx(numbers, rel=1e-5)
        torch.testing.assert_close(rank_inferred, inferred[share], rtol=1e-4, atol=1e-5)
