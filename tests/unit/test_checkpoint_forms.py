# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A job resumes with the distributed optimizer from a checkpoint without it, and vice versa, to
the same weights. The bf16 model has an fp32 head: weights of two dtypes in one optimizer.
"""

import pytest
import torch

from nemo_aligner.checkpoint import dist_ckpt
from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.checkpoint.dist_ckpt import Chunk
from nemo_aligner.checkpoint.torch_dist_stream import TorchDistTensors
from nemo_aligner.core.errors import UserError
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
from nemo_aligner.training.optim import optimizer_step
from tests.cases import some_of
from tests.tiny_models import tiny_config

pytestmark = pytest.mark.slow

OPTIMIZERS = ("distributed_fused_adam", "adamw")


def training(tokenizer_dir, precision, optimizer):
    optim = {"name": optimizer} if isinstance(optimizer, str) else optimizer
    cfg = tiny_config(tokenizer_dir, "gpt2", precision=precision, optim=optim, num_layers=1)
    model = MegatronGPTRewardModel(cfg)
    return model, *model.setup_megatron_optimization(10)


def step(model, optimizer, scheduler):
    tokens = torch.randint(0, 290, (4, 9), generator=torch.Generator().manual_seed(3))
    lengths = torch.tensor([9, 5, 7, 8])
    pairs = {"chosen": tokens, "rejected": tokens.flip(0)}
    pairs |= {"chosen_length": lengths, "rejected_length": lengths.flip(0)}
    model.prepare_for_training_step()
    model.get_loss_and_metrics({**pairs, "loss_mask": torch.ones(4, 9)})
    optimizer_step(optimizer, scheduler, 1.0)
    return {name: tensor.detach().float().clone() for name, tensor in model._named_weights()}


@some_of("precision", [32, "bf16"], keep=["bf16"])
@pytest.mark.parametrize("saved", OPTIMIZERS)
def test_either_optimizer_resumes_from_either(tiny_tokenizer_dir, tmp_path, saved, precision):
    job = training(tiny_tokenizer_dir, precision, saved)
    step(*job)
    callback = CheckpointCallback(tmp_path, *job, name="rm", save_nemo_on_train_end=False)
    callback.custom_save({}, trainer_state={"step": 1})
    uninterrupted = step(*job)
    for optimizer in OPTIMIZERS:
        resumed = training(tiny_tokenizer_dir, precision, optimizer)
        assert CheckpointCallback(tmp_path, *resumed, name="rm").load_latest() == {"step": 1}
        torch.testing.assert_close(step(*resumed), uninterrupted, rtol=1e-6, atol=1e-8)


@some_of("precision", [32, "bf16"], keep=["bf16"])
@pytest.mark.parametrize("optim", [{"name": "adam"}, {"name": "sgd", "momentum": 0.9}], ids=str)
def test_a_resumed_job_equals_an_uninterrupted(tiny_tokenizer_dir, tmp_path, optim, precision):
    """Saved after two updates, resumed into a schedule of NeMo's registry and saved once more."""
    sched = {"name": "PolynomialDecayAnnealing", "power": 2.0, "warmup_steps": 1}
    optim = {**optim, "sched": sched}
    job = training(tiny_tokenizer_dir, precision, optim)
    for updates in (1, 2, 3, 4):
        weights = step(*job)
        if updates == 2:
            CheckpointCallback(tmp_path, *job, name="rm").custom_save({}, trainer_state={})
    for _save in range(2):
        resumed = training(tiny_tokenizer_dir, precision, optim)
        callback = CheckpointCallback(tmp_path, *resumed, name="rm", filename="again")
        assert callback.load_latest() == {}
        callback.custom_save({}, trainer_state={})
        step(*resumed)
        torch.testing.assert_close(step(*resumed), weights, rtol=0, atol=0)
        assert resumed[1].param_groups[0]["lr"] == job[1].param_groups[0]["lr"]


def test_sgd_without_momentum_resumes_and_another_kind_is_refused(tiny_tokenizer_dir, tmp_path):
    job = training(tiny_tokenizer_dir, 32, "sgd")
    step(*job)
    CheckpointCallback(tmp_path, *job, name="rm").custom_save({}, trainer_state={})
    uninterrupted = step(*job)
    resumed = training(tiny_tokenizer_dir, 32, "sgd")
    CheckpointCallback(tmp_path, *resumed, name="rm").load_latest()
    torch.testing.assert_close(step(*resumed), uninterrupted, rtol=0, atol=0)
    for optim, kind in (("adamw", "Adam"), ({"name": "sgd", "momentum": 0.5}, "SGD with momen")):
        other = training(tiny_tokenizer_dir, 32, optim)
        with pytest.raises(UserError, match=f"asks for {kind}.* saved with another kind"):
            CheckpointCallback(tmp_path, *other, name="rm").load_latest()


def test_a_tensor_that_is_there_in_part_is_refused(tmp_path):
    """Another part of it would be whatever the memory held."""
    half = Chunk("a.weight", (4,), (0,), (2,), torch.float32)
    dist_ckpt.write([half], lambda chunk: torch.ones(chunk.size), tmp_path)
    stored = TorchDistTensors(tmp_path, prefix=None)
    assert stored.read("a.weight", (slice(0, 2),)).tolist() == [1, 1]
    with pytest.raises(UserError, match="a.weight it has 2 of 3 values"):
        stored.read("a.weight", (slice(0, 3),))
