# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The optimizers and schedules that `model.optim` can name: against formulas by hand, PyTorch's
optimizers and NeMo's registry.
"""

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch
from nemo.core.optim.lr_scheduler import AVAILABLE_SCHEDULERS
from nemo.core.optim.optimizers import AVAILABLE_OPTIMIZERS
from omegaconf import OmegaConf

from nemo_aligner.config.defaults import complete
from nemo_aligner.config.optim_rules import (
    OPTIMIZERS,
    OTHER_OPTIMIZERS,
    OTHER_SCHEDULES,
    SCHEDULES,
    check_optim,
)
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.training.optim import build_scheduler
from tests.cases import rows
from tests.tiny_models import tiny_config

LR = 0.4


def schedule(max_steps=10, lr=LR, **sched):
    optim = complete({"lr": lr, "sched": sched}, None, "model.optim")
    optimizer = SimpleNamespace(param_groups=[{}, {"wd_mult": 0.0}])
    return build_scheduler(optimizer, optim, max_steps)


def rates(updates, **settings):
    """The rates of the first `updates` updates."""
    return rates_of(schedule(**settings), updates)


def rates_of(built, updates):
    found = []
    for _ in range(updates):
        found.append(built.optimizer.param_groups[0]["lr"])
        assert found[-1] == built.optimizer.param_groups[1]["lr"]
        built.step(increment=1)
    return found


# --- the tables ---


def test_tables_cover_the_registries_of_nemo():
    assert set(AVAILABLE_SCHEDULERS) == (set(SCHEDULES) | set(OTHER_SCHEDULES)) - {"constant"}
    assert set(AVAILABLE_OPTIMIZERS) <= set(OPTIMIZERS) | set(OTHER_OPTIMIZERS)
    assert not set(OPTIMIZERS) & set(OTHER_OPTIMIZERS)
    assert not set(SCHEDULES) & set(OTHER_SCHEDULES)


# --- rates ---

HOLD = {"hold_steps": 3}
FORMULAS = {  # of update t >= 3 of ten
    "WarmupAnnealing": ({"min_lr": 0.1}, lambda t: 0.1 + 0.3 * (1 - (t - 2) / 8)),
    "InverseSquareRootAnnealing": ({}, lambda t: LR / math.sqrt((t + 1) / 3)),
    "SquareAnnealing": ({"min_lr": 0.02}, lambda t: max(LR * ((10 - t) / 8) ** 2, 0.02)),
    "SquareRootAnnealing": ({}, lambda t: LR * math.sqrt((10 - t) / 10)),
    "PolynomialDecayAnnealing": (
        {"power": 3.0, "min_lr": 0.1},
        lambda t: 0.1 + 0.3 * (1 - (t - 2) / 8) ** 3,
    ),
    "PolynomialHoldDecayAnnealing": (HOLD, lambda t: LR if t < 5 else LR * (1 - (t - 5) / 5)),
    "WarmupHoldAnnealLinear": (
        {**HOLD, "min_lr": 0.1},
        lambda t: LR if t < 5 else LR - 0.3 * (t - 5) / 5,
    ),
    "WarmupHoldAnnealOneMinusSquareRoot": (
        {"hold_ratio": 0.3},
        lambda t: LR if t < 5 else LR * (1 - math.sqrt((t - 5) / 5)),
    ),
    "NoamHoldAnnealing": (
        {**HOLD, "decay_rate": 1.0},
        lambda t: LR if t < 5 else LR * 2 / (t - 3),
    ),
    "WarmupPolicy": ({}, lambda t: LR),
    "WarmupHoldPolicy": ({"hold_steps": 4}, lambda t: LR),
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("warmup", [{"warmup_steps": 2}, {"warmup_ratio": 0.29}])
def test_rates_by_formula(name, warmup):
    """Two updates of warm-up, which ends at the full rate, then the formula; ten updates."""
    sched, formula = FORMULAS[name]
    expected = [LR / 3, LR * 2 / 3, LR, *(formula(t) for t in range(3, 10))]
    assert rates(10, name=name, **sched, **warmup) == pytest.approx(expected, rel=1e-6)


def test_rates_of_schedules_without_that_warmup():
    noam = [LR / 4 * min((t or 1) ** -0.5, (t or 1) * 3**-1.5) for t in range(8)]
    assert rates(8, name="NoamAnnealing", d_model=16, warmup_steps=3) == pytest.approx(noam)
    steps = [LR * 0.5 ** (t // 3) for t in range(8)]
    assert rates(8, name="StepLR", step_size=3, gamma=0.5) == pytest.approx(steps)
    t5 = [0.5] * 5 + [t**-0.5 for t in range(5, 8)]
    assert rates(8, name="T5InverseSquareRootAnnealing", constant_steps=4) == pytest.approx(t5)


def test_ratios_of_the_cosine_are_shares_of_the_job():
    by_steps = rates(10, name="CosineAnnealing", warmup_steps=2, constant_steps=3, min_lr=0.1)
    ratios = {"warmup_ratio": 0.25, "constant_ratio": 0.35}
    assert rates(10, name="CosineAnnealing", min_lr=0.1, **ratios) == by_steps
    assert by_steps[-2:] == [0.1, 0.1]


@pytest.mark.parametrize("name", ["StepLR", "WarmupAnnealing"])
def test_a_resumed_schedule_goes_on_exactly(name):
    settings = {"name": name, **({"step_size": 2} if name == "StepLR" else {"warmup_steps": 2})}
    uninterrupted = rates(9, **settings)
    first, resumed = schedule(**settings), schedule(**settings)
    first.step(increment=6)
    resumed.num_steps = 0  # as `CheckpointCallback` does
    resumed.load_state_dict(first.state_dict())
    assert rates_of(resumed, 3) == uninterrupted[6:]


def test_a_schedule_that_ends_in_nonsense_is_refused_at_once():
    with pytest.raises(ConfigError, match="NoamHoldAnnealing cannot work .* without warmup steps"):
        schedule(name="NoamHoldAnnealing")
    with pytest.raises(ConfigError, match="the rate after 2 updates is inf"):
        schedule(name="StepLR", step_size=1, gamma=1e200)


def test_keys_that_a_schedule_does_not_read_are_named(warnings):
    schedule(name="WarmupAnnealing", warmup_steps=1, constant_steps=1000, power=2.0)
    assert warnings == [
        "model.optim.sched.name=WarmupAnnealing does not read model.optim.sched.constant_steps="
        "1000, model.optim.sched.power=2.0."
    ]


# --- optimizers ---


BETAS = {"betas": (0.9, 0.98)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "optim", "torch_class", "settings"),
    [
        (32, {"name": "sgd"}, torch.optim.SGD, {}),
        (32, {"name": "sgd", "momentum": 0.9}, torch.optim.SGD, {"momentum": 0.9}),
        (32, {"name": "adam"}, torch.optim.Adam, BETAS),
        (32, {"name": "adamw"}, torch.optim.AdamW, BETAS),
        (32, {"name": "distributed_fused_adam"}, torch.optim.AdamW, BETAS),
        ("bf16", {"name": "adamw"}, torch.optim.AdamW, BETAS),
        ("bf16", {"name": "distributed_fused_adam"}, torch.optim.AdamW, BETAS),
    ],
    ids=str,
)
def test_three_updates_equal_pytorchs_optimizer(
    tiny_tokenizer_dir, precision, optim, torch_class, settings
):
    """With weight decay on matrices only, as Megatron Core does it. Weights of bf16 are those of
    updates in fp32, rounded once.
    """
    sched = {"name": "constant", "warmup_steps": 0}
    optim = {**optim, "lr": 0.05, "weight_decay": 0.3, "sched": sched}
    keys = {"num_layers": 1, "optim": optim, "precision": precision}
    model = MegatronGPTModel(tiny_config(tiny_tokenizer_dir, "gpt2", **keys))
    optimizer, _scheduler = model.setup_megatron_optimization(3)
    weights = dict(model.unwrapped()[0].named_parameters())
    floats = {name: tensor.detach().float().clone() for name, tensor in weights.items()}
    copies = {name: torch.nn.Parameter(tensor) for name, tensor in floats.items()}
    decays = {name: 0.3 if copy.dim() > 1 else 0.0 for name, copy in copies.items()}
    groups = [{"params": [copies[name]], "weight_decay": x} for name, x in decays.items()]
    plain = torch_class(groups, lr=0.05, **settings)
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        optimizer.zero_grad()
        model.prepare_for_training_step()
        for name, tensor in weights.items():
            gradient = torch.randn(tensor.shape, generator=generator)
            assert tensor.main_grad.dtype == torch.float32
            tensor.main_grad.copy_(gradient)
            copies[name].grad = gradient
        assert optimizer.step()[0]
        plain.step()
    for name, tensor in weights.items():
        half_a_bit = 2**-8 if precision == "bf16" else 0.0
        found, wanted = tensor.float(), copies[name]
        torch.testing.assert_close(found, wanted, rtol=1e-5 + half_a_bit, atol=1e-6, msg=name)


@pytest.mark.slow
def test_fields_of_megatron_core_reach_the_optimizer(tiny_tokenizer_dir):
    """The tied embedding gets a rate of its own, and padded buckets change no number."""

    def updated(**fields):
        optim = {"lr": 0.05, "sched": {"name": "constant"}, "mcore_customization_config": fields}
        model = MegatronGPTModel(tiny_config(tiny_tokenizer_dir, "gpt2", optim=optim))
        optimizer, scheduler = model.setup_megatron_optimization(3)
        optimizer.zero_grad()
        model.prepare_for_training_step()
        for tensor in model.unwrapped()[0].parameters():
            tensor.main_grad.fill_(0.01)
        scheduler.step(increment=1)
        optimizer.step()
        return dict(model.unwrapped()[0].named_parameters()), model

    plain, _ = updated()
    padded, model = updated(pad_buckets_for_high_nccl_busbw=True)
    assert model.model[0].ddp_config.pad_buckets_for_high_nccl_busbw
    slow, _ = updated(decoupled_lr=0.005)
    embedding = "embedding.word_embeddings.weight"
    for name, tensor in plain.items():
        assert torch.equal(tensor, padded[name]), name
        assert torch.equal(tensor, slow[name]) == (name != embedding), name


# --- refusals ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"overlap_param_gather": True}, "would break a promise: weights are whole after an upd"),
        ({"overlap_grad_reduce": True}, "does not act there; set model.optim.overlap_grad_sync"),
        ({"lr": 1.0}, "lr=1.0 does not act there; set model.optim.lr"),
        ({"decoupled_weight_decay": False}, "is always True here"),
        ({"decoupled_learning_rate": 1.0}, "is no field of Megatron Core's that is known"),
        ({"apply_wd_to_qk_layernorm": True, "sched": "StepLR"}, None),
        ({"apply_wd_to_qk_layernorm": 1}, "=1 must be True or False"),
        ({"decoupled_lr": 0.1, "sched": "StepLR"}, "decoupled_lr.*StepLR.*CosineAnnealing"),
    ],
)
def test_fields_of_megatron_core_that_cannot_be_given(tiny_tokenizer_dir, fields, message):
    sched = {"name": fields.pop("sched", "constant"), "step_size": 2}
    optim = {"sched": sched, "mcore_customization_config": fields}
    model = MegatronGPTModel(tiny_config(tiny_tokenizer_dir, "gpt2", num_layers=1, optim=optim))
    with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
        model.setup_megatron_optimization(3)


@pytest.mark.parametrize(
    ("optim", "message"),
    rows("""
name=sdg -> 'sdg' is not supported; use one of distributed_fused_adam, mcore
momentum=1.5 -> momentum=1.5 must be at least 0 and at most 1
sched.name=Cosine -> 'Cosine' is not supported; use one of constant, Cosine
sched.name=NoamAnnealing -> d_model=None must be above 0; NoamAnnealing needs it
sched.name=constant sched.warmup_steps=1.5 -> warmup_steps=1.5 must be a whole
sched.name=constant sched.warmup_ratio=2 -> warmup_ratio=2 must be at least 0 a
sched.name=CosineAnnealing sched.warmup_ratio=0.1 sched.warmup_steps=3 -> warmup_ratio=0.1 and
    .*warmup_steps=3 say the same thing twice; set .* null
lr=0.1 sched.name=WarmupAnnealing sched.min_lr=0.2 -> min_lr=0.2 is above model.optim.lr=0.1
"""),
)
def test_refusals(optim, message):
    with pytest.raises(ConfigError, match=message):
        check_optim(OmegaConf.from_dotlist(optim.split()))
