# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and `.nemo` files that travel between two environments, for
`test_release_exchange.py`.

    python -m tests.release_exchange write FOLDER TOKENIZER
    python -m tests.release_exchange read FOLDER TOKENIZER

`write` trains a reward model for two updates in each of `CASES`, saves it and trains one more.
`read`, in the other environment, starts from the same seed, loads what was saved, and compares:
initial weights and those of the `.nemo` must be equal to the bit, the weights after the third
update within rounding. It prints the largest deviation of each case.
"""

import itertools
import sys
from pathlib import Path

import torch

from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
from nemo_aligner.training.optim import optimizer_step
from tests.tiny_models import tiny_config

MIXTURE = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.01}
MODELS = {"gpt2": ("gpt2", {}), "llama": ("llama", {}), "mixture": ("llama", MIXTURE)}
CASES = list(
    itertools.product(MODELS, ("distributed_fused_adam", "adamw"), (32, "bf16"), ("none", "lora"))
)
CASES = [case for case in CASES if case[0] != "mixture" or case[3] == "none"]
# Of the weights' own size. In bf16 a sum in another order may round to the next number.
TOLERANCE = {32: 1e-5, "bf16": 2e-2}
Weights = dict[str, torch.Tensor]


def weights_of(model: MegatronGPTRewardModel) -> Weights:
    """A copy of all weights, in float32."""
    return {name: tensor.detach().float().clone() for name, tensor in model._named_weights()}


def build(tokenizer: str, case: tuple) -> tuple:
    """A model with its optimizer and schedule."""
    name, optimizer, precision, adapters = case
    architecture, keys = MODELS[name]
    if adapters == "lora":
        keys = {**keys, "peft": {"peft_scheme": "lora", "lora_tuning": {"adapter_dim": 4}}}
    optim = {"name": optimizer}
    cfg = tiny_config(tokenizer, architecture, precision=precision, optim=optim, **keys)
    model = MegatronGPTRewardModel(cfg)
    if adapters == "lora":
        model.init_peft(model.cfg.peft)
    return model, *model.setup_megatron_optimization(10)


def update(model, optimizer, scheduler) -> Weights:
    """One update on fixed pairs; the weights after it."""
    tokens = torch.randint(0, 290, (4, 9), generator=torch.Generator().manual_seed(3))
    lengths = torch.tensor([9, 5, 7, 8])
    model.prepare_for_training_step()
    pairs = {"chosen": tokens, "rejected": tokens.flip(0), "loss_mask": torch.ones(4, 9)}
    pairs |= {"chosen_length": lengths, "rejected_length": lengths.flip(0)}
    model.get_loss_and_metrics(pairs)
    optimizer_step(optimizer, scheduler, 1.0)
    return weights_of(model)


def write(folder: Path, tokenizer: str) -> None:
    """Train, save, train once more; what the weights were goes into `weights.pt`."""
    for case in CASES:
        place = folder / "-".join(map(str, case))
        place.mkdir(parents=True)
        job = build(tokenizer, case)
        found = {"initial": weights_of(job[0])}
        update(*job)
        found["saved"] = update(*job)
        callback = CheckpointCallback(place, *job, name="rm", save_nemo_on_train_end=False)
        callback.custom_save({}, trainer_state={"step": 2})
        job[0].save_to(str(place / "model.nemo"))
        found["next"] = update(*job)
        torch.save(found, place / "weights.pt")


def read(folder: Path, tokenizer: str) -> None:
    """Load what the other environment saved, and compare.

    Raises:
        AssertionError: something differs by more than it may.
    """
    for case in CASES:
        place = folder / "-".join(map(str, case))
        expected = torch.load(place / "weights.pt")
        job = build(tokenizer, case)
        torch.testing.assert_close(weights_of(job[0]), expected["initial"], rtol=0, atol=0)
        callback = CheckpointCallback(place, *job, name="rm", save_nemo_on_train_end=False)
        assert callback.load_latest() == {"step": 2}
        torch.testing.assert_close(weights_of(job[0]), expected["saved"], rtol=0, atol=0)
        found = update(*job)
        assert any(not torch.equal(found[name], expected["saved"][name]) for name in found)
        deviation = max(
            float((found[name] - tensor).norm() / tensor.norm().clamp(min=1e-3))
            for name, tensor in expected["next"].items()
        )
        print(f"case {' '.join(map(str, case))}: {deviation:.1e}", flush=True)
        assert deviation < TOLERANCE[case[2]], case
        if case[3] == "none":
            restored = MegatronGPTRewardModel.restore_from(str(place / "model.nemo"))
            torch.testing.assert_close(weights_of(restored), expected["saved"], rtol=0, atol=0)


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])
