# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Models on Megatron Core's `HybridModel` give the bits of those on its `GPTModel`, and each loads
the other's checkpoints.
"""

import contextlib
import importlib.util

import pytest
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import destroy_model_parallel

from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.models.nlp.gpt import gpt_reward_model, megatron_gpt_model, megatron_gpt_policy
from nemo_aligner.parallel.megatron_switches import changed
from nemo_aligner.training.megatron_steps import forward_collect
from tests.distributed import matrix, matrix_reload
from tests.distributed.launcher import progress, run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("megatron.core.models.hybrid") is None,
        reason="Megatron Core 0.16 has no HybridModel",
    ),
]

VPP2 = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
UNEVEN = {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 1}
RESHARDED = {"ppo": {"generation": {"reshard": "auto"}}}  # to one stage
SP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
# What `HybridModel` does not know, or would do otherwise
OWN = {
    "rotary_interleaved": True,
    "scale_positional_embedding": True,
    "hidden_dropout": 0.2,
    "window_size": [3, 0],
    "window_attn_skip_freq": 2,
}
PACKED = {
    "tokens": torch.arange(20).view(2, 10),
    "packed_position_ids": torch.tensor([[*range(4), *range(6)], [*range(7), *range(3)]]),
}
# Ranks -> name -> (architecture, role, keys)
CASES = {
    1: {
        "gpt2": ("gpt2", "critic", {}),
        "own": ("llama", "actor", OWN),
        "lora": ("lora", "actor", {}),
        "moe": ("moe", "actor", {}),
    },
    2: {
        "TP2+SP": ("llama", "actor", SP2 | OWN),
        "TP2+SP lora": ("lora", "actor", SP2),
        "PP2+VPP2": ("gpt2", "reward model", VPP2 | matrix.FULL),
        "PP2, 1 layer and 3": ("llama", "actor", UNEVEN | {"precision": "bf16"}),
        "PP2 moe": ("moe", "actor", {"pipeline_model_parallel_size": 2} | RESHARDED),
    },
}


@contextlib.contextmanager
def built_on(kind):
    """Inside, all models are built on `kind`, and compute with it."""
    before = gpt_reward_model.GPTRewardModel.__bases__
    gpt_reward_model.GPTRewardModel.__bases__ = (kind,)
    own = megatron_gpt_model.MegatronGPTModel
    with changed([(own, "module_class", kind), (megatron_gpt_policy, "GPTModel", kind)]):
        yield
    gpt_reward_model.GPTRewardModel.__bases__ = before


def job(tokenizer_dir, folder, case, place):
    """A model with its optimizer and schedule, and the callback that saves them."""
    parts = matrix.build(tokenizer_dir, folder, *case)
    root = f"{folder}/{place}"
    return parts, CheckpointCallback(root, *parts, name="x", save_nemo_on_train_end=False)


def step(parts, role):
    """Metrics of an update, and the weights after it."""
    metrics = matrix_reload.step(*parts, role)
    return metrics, {name: tensor.detach().clone() for name, tensor in parts[0]._named_weights()}


def same(found, expected, what):
    torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=lambda text: f"{what}: {text}")


def compare(tokenizer_dir, folder, cases):
    """Body of a rank."""
    kinds = (GPTModel, megatron_gpt_model.GPTModel)
    for name, case in cases.items():
        role, results = case[1], []
        for kind in kinds:
            with built_on(kind):
                parts, saving = job(tokenizer_dir, folder, case, f"{name}/{kind.__name__}")
                assert all(isinstance(module, kind) for module in parts[0].unwrapped())
                found = matrix.inferred(parts[0], role)
                if role == "actor":
                    found |= matrix.generated(parts[0], role)
                    found["logits"] = forward_collect(
                        parts[0].model, PACKED, micro_batch_size=2, output_fn=lambda x, _: x
                    )
                first = step(parts, role)
                saving.custom_save({}, trainer_state={"step": 1})
                results.append([found, first, step(parts, role)])
            progress(f"{name} {kind.__name__}")
        same(results[1], results[0], name)
        for kind, other in zip(kinds, reversed(kinds), strict=True):
            with built_on(kind):
                parts, saving = job(tokenizer_dir, folder, case, f"{name}/{other.__name__}")
                assert saving.load_latest() == {"step": 1}
                same(step(parts, role), results[0][-1], f"{name}, loaded")
            progress(f"{name} {other.__name__} loaded")
        destroy_model_parallel()


@pytest.mark.parametrize("ranks", CASES)
def test_both_models_give_the_same_bits(tiny_tokenizer_dir, models, ranks):
    run_ranks(compare, ranks, 120, tiny_tokenizer_dir, models, CASES[ranks])
