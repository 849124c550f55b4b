# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Alarms on two data-parallel ranks: the fault is planted on one rank, and both raise the same
error; none is left in a collective."""

import re

import pytest
import torch
from megatron.core.parallel_state import destroy_model_parallel
from omegaconf import OmegaConf

from nemo_aligner.models.nlp.gpt.megatron_gpt_policy import MegatronGPTActorModel
from nemo_aligner.parallel.collectives import check_replicas
from nemo_aligner.training.optim import optimizer_step
from tests.distributed.launcher import at_each, progress, run_ranks
from tests.distributed.test_ppo_trainer import untimed
from tests.tiny_models import PPO, tiny_config
from tests.unit import test_alarms_at_work as at_work

NAN = float("nan")
pytestmark = pytest.mark.timeout(300)


def make_actor(tokenizer_dir, optim=None, **settings):
    settings = {"ppo": OmegaConf.merge(PPO, {"entropy_bonus": 0.0}), **settings}
    cfg = tiny_config(tokenizer_dir, "gpt2", optim=optim or {}, **settings)
    actor = MegatronGPTActorModel(cfg)
    return actor, *actor.setup_megatron_optimization(max_steps=10)


def rows_of_this_rank():
    generator = torch.Generator().manual_seed(3)
    batch = {"response_tokens": torch.randint(0, 300, (4, 11), generator=generator)}
    batch |= {"is_end": torch.ones(4, dtype=torch.bool), "mask": torch.ones(4, 10)}
    batch |= {"advantages": torch.randn(4, 10, generator=generator)}
    batch |= {"prev_logprobs": -5.5 + 0.3 * torch.randn(4, 10, generator=generator)}
    return {key: value.chunk(2)[torch.distributed.get_rank()] for key, value in batch.items()}


def error_of(function, *args):
    """The class and text of the error, or None."""
    try:
        function(*args)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def update(actor, optimizer, scheduler, batch):
    optimizer.zero_grad()
    actor.prepare_for_training_step()
    actor.get_loss_and_metrics(batch)
    actor.finish_training_step()
    optimizer_step(optimizer, scheduler, None)


def weights(actor):
    parameters = actor.unwrapped()[0].named_parameters()
    return {name: parameter.detach().clone() for name, parameter in parameters}


def faults(tokenizer_dir):
    rank = torch.distributed.get_rank()
    found = {}
    for name in ("mcore_distributed_optim", "adamw"):
        actor, optimizer, scheduler = make_actor(tokenizer_dir, {"name": name})
        parts = actor, optimizer, scheduler
        update(*parts, rows_of_this_rank())
        before = weights(actor)
        found[name, "healthy"] = error_of(check_replicas, actor.unwrapped())
        progress(name)

        # A loss that is not finite: the second row of the second rank.
        batch = rows_of_this_rank()
        if rank == 1:
            batch["advantages"][1, 3] = NAN
        found[name, "loss"] = error_of(update, *parts, batch)

        # A finite loss with a gradient that is not, on one rank: the derivative of sqrt at 0 times
        # 0.
        layer = actor.unwrapped()[0].decoder.layers[1].mlp.linear_fc2

        def poison(module, inputs, output):
            root = (module.bias * 0).abs().sqrt().sum()
            return output[0] + 0 * root, *output[1:]

        hook = layer.register_forward_hook(poison) if rank == 1 else None
        found[name, "gradient"] = error_of(update, *parts, rows_of_this_rank())
        if hook:
            hook.remove()
        found[name, "unchanged"] = all(
            torch.equal(value, before[key]) for key, value in weights(actor).items()
        )
        update(*parts, rows_of_this_rank())  # a job that goes on (a critic server) can
        found[name, "changed"] = any(
            not torch.equal(value, before[key]) for key, value in weights(actor).items()
        )

    # One bit of one weight of one rank.
    parameter = actor.unwrapped()[0].decoder.layers[1].mlp.linear_fc1.weight
    bits = parameter.data.view(torch.int32).view(-1)
    for name in ("bit", "mended"):
        bits[17] ^= rank
        found[name] = error_of(check_replicas, actor.unwrapped())
    destroy_model_parallel()
    return found | at_each(SPLITS, flipped, tokenizer_dir) | jobs(tokenizer_dir)


EXPERTS = {"num_moe_experts": 2, "moe_ffn_hidden_size": 16}
SPLITS = {
    "CP2": {"context_parallel_size": 2},
    "TP2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "EP2": {"expert_model_parallel_size": 2, **EXPERTS},
}


def flipped(tokenizer_dir, **settings):
    """What is said of replicas that two ranks share, and of one bit of each part of a layer."""
    module = make_actor(tokenizer_dir, **settings)[0].unwrapped()[0]
    found = {"healthy": error_of(check_replicas, [module])}
    for part in ("mlp", "self_attention"):
        names = [name for name, _ in module.named_parameters() if f"layers.1.{part}." in name]
        name = [name for name in names if name.endswith("weight") and "router" not in name][-1]
        bits = module.get_parameter(name).data.view(torch.int32).view(-1)
        bits[3] ^= torch.distributed.get_rank()
        found[part] = error_of(check_replicas, [module])
        bits[3] ^= torch.distributed.get_rank()
    return found


def jobs(tokenizer_dir):
    """PPO jobs: a healthy one, and one whose reward model gives one rank a NaN."""
    found = {}
    trainer = at_work.make_job(at_work.make_actor(tokenizer_dir, temperature=0.7))
    found["job"] = error_of(trainer.fit)
    progress("a healthy job")
    found["metrics"] = untimed(trainer.logger.metrics)

    trainer = at_work.make_job(at_work.make_actor(tokenizer_dir, temperature=0.7))
    score = trainer.score

    def infer_rm_critic(rollout):
        future = score(rollout)
        if torch.distributed.get_rank() == 1:
            future.value.rewards[1] = NAN
        return future

    trainer.score = infer_rm_critic
    found["reward"] = error_of(trainer.fit)
    return found


@pytest.fixture(scope="module")
def two_ranks(tiny_tokenizer_dir):
    return run_ranks(faults, 2, 120, tiny_tokenizer_dir)


@pytest.mark.parametrize("optimizer", ["mcore_distributed_optim", "adamw"])
def test_a_fault_of_one_rank_is_an_error_of_both_and_changes_no_weight(two_ranks, optimizer):
    assert two_ranks[0] == two_ranks[1]
    found = two_ranks[0]
    assert found[optimizer, "healthy"] is None
    kind, text = found[optimizer, "loss"]
    assert kind == "NonFiniteError"
    where = "in sample 1 of the share of data-parallel rank 1"
    assert f"the loss is nan (first {where}) and the gradient of" in text
    kind, text = found[optimizer, "gradient"]
    assert kind == "NonFiniteError"
    assert text.startswith(
        "the gradient of decoder.layers.1.mlp.linear_fc2.bias is not finite. No weight was changed"
    )
    assert found[optimizer, "unchanged"] and found[optimizer, "changed"]


def test_replicas_that_differ_by_one_bit_are_named(two_ranks):
    for found in two_ranks:
        kind, text = found["bit"]
        assert kind == "ReplicaError"
        assert text.startswith(
            "decoder.layers.1.mlp.linear_fc1.weight (model chunk 0 of rank 0) differs between"
        )
        assert "ranks with equal bits are 0 | 1; 1 weight(s) differ in all" in text
        assert found["mended"] is None


def test_only_replicas_are_compared(two_ranks):
    for found in two_ranks:
        context, tensor, experts = (found[split] for split in SPLITS)
        assert context["healthy"] is tensor["healthy"] is experts["healthy"] is None
        assert context["mlp"][0] == context["self_attention"][0] == "ReplicaError"
        # Shards: they differ anyway.
        assert tensor["mlp"] is tensor["self_attention"] is None
        assert experts["mlp"] is None  # another expert
        assert experts["self_attention"][1].startswith("decoder.layers.1.self_attention.")


def test_a_healthy_job_and_a_reward_of_one_rank(two_ranks):
    """Rows keep the sampler's log-probs on their way between the ranks: misplaced ones would
    differ widely.
    """
    assert two_ranks[0]["job"] is two_ranks[1]["job"] is None
    assert two_ranks[0]["metrics"] == two_ranks[1]["metrics"]
    key = "sampling_ratio_mean_error"
    errors = [value for name, _, value in two_ranks[0]["metrics"] if name.endswith(key)]
    assert len(errors) == 2 and all(0 < error < 1e-4 for error in errors)
    assert two_ranks[0]["reward"] == two_ranks[1]["reward"]
    kind, text = two_ranks[0]["reward"]
    assert kind == "NonFiniteError"
    # Of rank 1, whose samples are scored in the order in which their responses end.
    opening = r"PPO step 0: rewards of sample [2367] \(index in the data set; prompt "
    assert re.match(opening, text) and "2 of 8" in text
