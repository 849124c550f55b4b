# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders at splits: each rank reads its own part, and the logits are theirs."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from omegaconf import OmegaConf

from nemo_aligner.launch.model_loading import load_from_nemo
from nemo_aligner.models.nlp.gpt.megatron_gpt_critic import MegatronGPTCriticModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
from nemo_aligner.parallel import parallel_state
from nemo_aligner.training.megatron_steps import forward_collect
from tests import hugging_face
from tests.cases import some_of
from tests.distributed.launcher import at_each, run_ranks

TOKENS = torch.randint(0, 300, (2, 150), generator=torch.Generator().manual_seed(1))
SPLITS = {
    "TP2+SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP2": {
        "pipeline_model_parallel_size": 2,
        "num_layers_in_first_pipeline_stage": 1,  # also for three layers
    },
    "EP2": {"expert_model_parallel_size": 2},
}

# Its experts are in each layer, as those of Qwen1.5-MoE are.
ALL_EXPERTS = "Qwen 2 MoE, experts in each layer"
EXPERTS = ("Mixtral", "Qwen 2 MoE", "Qwen 3 MoE", "Qwen 3 MoE, experts in one layer", ALL_EXPERTS)
# Those of `make test`; tests/unit/test_hugging_face_folders.py has all on one rank.
FEW = ("Llama 3.2", "Qwen 2, windows in the later layers", "GPT-2", ALL_EXPERTS)
# Their first layer has no experts, and each stage must have one that has.
NOT_AT = {"PP2": ("Qwen 2 MoE", "Qwen 3 MoE, experts in one layer")}
SHORT, LENGTHS = TOKENS[:, :20].clamp(min=1), torch.tensor([20, 13])


def all_experts() -> torch.nn.Module:
    """A Qwen2-MoE model without a dense layer."""
    config = hugging_face.FOLDERS["Qwen 2 MoE"]().config
    config.decoder_sparse_step = 1
    return type(hugging_face.FOLDERS["Qwen 2 MoE"]())._from_config(config)


BUILDS = hugging_face.FOLDERS | {ALL_EXPERTS: all_experts}
ALL = tuple(BUILDS)


def logits(folder: str, **split) -> torch.Tensor | None:
    """float32 `[B, S, V]` on ranks of the last stage, else None; all ranks call it."""
    job = OmegaConf.create({"micro_batch_size": 2, "precision": 32, **split})
    return whole_logits(load_from_nemo(MegatronGPTModel, job, None, restore_path=folder), TOKENS)


def whole_logits(model, tokens: torch.Tensor) -> torch.Tensor | None:
    """As `logits`, of a model."""
    model.set_eval()
    with torch.no_grad():
        found = forward_collect(
            model.model, {"tokens": tokens}, micro_batch_size=2, output_fn=lambda output, _: output
        )
    if not parallel_state.is_pipeline_last_stage():
        return None
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(found) for _ in range(group.size())]
    torch.distributed.all_gather(parts, found.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


def scores(model_class: type, folder: str, **split) -> torch.Tensor:
    """Rewards float32 `[B, 1]` of a reward model, values `[B, S]` of a critic; all ranks call
    it.
    """
    # As many samples as a micro-batch has on all data-parallel ranks together.
    job = OmegaConf.create({"micro_batch_size": 1, "precision": 32, **split})
    model = load_from_nemo(model_class, job, None, restore_path=folder)
    model.set_eval()
    return model.infer((SHORT, LENGTHS))


def at_all_splits(compute: Callable, folders: dict[str, str]) -> list[dict]:
    """What `compute(folder, **split)` gives on each of two ranks, by split and name."""
    cases = {
        (split, name): {"folder": folder, **keys}
        for split, keys in SPLITS.items()
        for name, folder in folders.items()
        if name not in NOT_AT.get(split, ()) and (split != "EP2" or name in EXPERTS)
    }
    return run_ranks(at_each, 2, 120, cases, compute)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "names", [FEW, pytest.param(ALL, marks=pytest.mark.full)], ids=["few", "all"]
)
def test_logits_at_each_split_are_those_of_hugging_face(write_folder, names):
    builds = {name: BUILDS[name] for name in names}
    models = {name: hugging_face.randomized(build) for name, build in builds.items()}
    folders = {name: str(write_folder(model, name)) for name, model in models.items()}
    ranks = at_all_splits(logits, folders)
    assert {name for _, name in ranks[0]} == set(models)
    for found in ranks:
        for (split, name), result in found.items():
            if result is None:
                continue
            with torch.no_grad():
                expected = models[name](TOKENS).logits
            result = result[..., : expected.size(-1)]
            assert_close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)
            assert_close(result, expected, msg=lambda m, s=split, n=name: f"{s} {n} {m}")


@pytest.mark.timeout(400)
@some_of("kind", ["SequenceClassification", "TokenClassification"])
def test_heads_at_each_split_are_those_of_hugging_face(write_folder, kind):
    names = ("Llama 3.2", "GPT-2", "Mixtral")
    models = {name: hugging_face.with_head(kind, name) for name in names}
    folders = {name: str(write_folder(model, name)) for name, model in models.items()}
    reward_model = kind == "SequenceClassification"
    model_class = MegatronGPTRewardModel if reward_model else MegatronGPTCriticModel
    ranks = at_all_splits(partial(scores, model_class), folders)
    padded = torch.where(torch.arange(20) < LENGTHS[:, None], SHORT, 0)
    for name, model in models.items():
        with torch.no_grad():
            expected = model(padded, attention_mask=(padded > 0).long()).logits.squeeze(-1)
        for found in ranks:
            for split in SPLITS if name in EXPERTS else ("TP2+SP", "PP2"):
                result = found[split, name].reshape(expected.shape)
                if not reward_model:
                    result = torch.where(padded > 0, result, 0)
                    expected = torch.where(padded > 0, expected, 0)
                torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
