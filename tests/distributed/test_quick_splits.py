# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Two updates of a tiny actor on two ranks, on each axis, against one rank.

The matrix (`matrix.py`) covers every role, model and split; this test takes seconds, and
`tests.mutants` runs it many times.
"""

import pytest
import torch
from omegaconf import OmegaConf

from nemo_aligner.checkpoint import sources
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_ppo_actor import MegatronGPTActorModel
from nemo_aligner.parallel import parallel_state
from nemo_aligner.training.optim import optimizer_step
from tests.distributed.launcher import at_each, run_ranks
from tests.tiny_models import PPO, tiny_config

SAMPLES, WIDTH = 4, 11
TUNING = {"target_modules": ["all"], "adapter_dim": 3, "row_init_method": "normal"}
LORA = {"peft_scheme": "lora", "lora_tuning": TUNING}
SPLITS = {
    "DP2": {},
    "DP2-adamw": {"optim": {"name": "adamw"}},
    "DP2-overlap": {"optim": {"overlap_grad_sync": True, "bucket_cap_mb": 0.02}},
    "TP2-SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP2": {"pipeline_model_parallel_size": 2},
    "PP2-VPP2-recomputed": {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "activations_checkpoint_granularity": "full",
        "activations_checkpoint_method": "uniform",
        "activations_checkpoint_num_layers": 1,
    },
    "CP2": {"context_parallel_size": 2},
    "TP2-LoRA": {"tensor_model_parallel_size": 2, "peft": LORA},
    "TP2-SP-LoRA": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "peft": LORA},
}


def actor_of(nemo: str, **split) -> tuple:
    """An actor with the weights of `nemo`, its optimizer and its schedule; all ranks call it."""
    sampling = {**PPO["sampling_params"], "temperature": 0.8}
    ppo = {**PPO, "sampling_params": sampling}
    cfg = OmegaConf.merge(sources.read_config(nemo), {"ppo": ppo, "micro_batch_size": 1}, split)
    actor = MegatronGPTActorModel.restore_from(nemo, override_config_path=cfg)
    actor.init_peft(split.get("peft"))
    return actor, *actor.setup_megatron_optimization(max_steps=10)


def global_batch() -> dict[str, torch.Tensor]:
    """The samples of all ranks."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([11, 5, 8, 4])
    columns = torch.arange(WIDTH - 1)
    return {
        "response_tokens": torch.randint(0, 300, (SAMPLES, WIDTH), generator=generator),
        "is_end": torch.tensor([True, True, False, True]),
        "mask": ((columns >= 2) & (columns < lengths[:, None] - 1)).float(),
        "advantages": torch.randn(SAMPLES, WIDTH - 1, generator=generator),
        "prev_logprobs": -5.5 + 0.3 * torch.randn(SAMPLES, WIDTH - 1, generator=generator),
    }


def update(actor, optimizer, scheduler) -> list[float]:
    """Loss, gradient norm and ratio of one update; all ranks call it."""
    size = parallel_state.get_data_parallel_world_size()
    rank = parallel_state.get_data_parallel_rank()
    batch = {key: value.chunk(size)[rank] for key, value in global_batch().items()}
    optimizer.zero_grad()
    actor.prepare_for_training_step()
    loss, metrics = actor.get_loss_and_metrics(batch)
    return [loss, optimizer_step(optimizer, scheduler, 1.0), metrics["ppo_ratio"]]


def updates(nemo: str, **split) -> dict:
    """What `update` gives, twice, and the log-probs of all samples after them; all ranks call
    it.
    """
    actor, optimizer, scheduler = actor_of(nemo, **split)
    steps = [update(actor, optimizer, scheduler) for _ in range(2)]
    actor.set_eval()
    tokens = global_batch()["response_tokens"]
    return {"steps": torch.tensor(steps), "logprobs": actor.get_inference_log_probs(tokens)}


@pytest.fixture(scope="module")
def nemo(tiny_tokenizer_dir, tmp_path_factory) -> str:
    """The initial weights of all: pipeline stages would draw others than one rank."""
    path = str(tmp_path_factory.mktemp("quick") / "policy.nemo")
    MegatronGPTModel(tiny_config(tiny_tokenizer_dir, "llama", num_layers=4)).save_to(path)
    return path


@pytest.fixture(scope="module")
def two_ranks(nemo, request):
    """Results of both ranks at the splits that this run of pytest selects."""
    items = [item for item in request.session.items if item.path == request.path]
    selected = {item.callspec.params["split"] for item in items}
    splits = {name: split for name, split in SPLITS.items() if name in selected}
    return run_ranks(at_each, 2, 120, splits, updates, nemo)


@pytest.fixture(scope="module")
def one_rank(nemo) -> dict:
    """Results of one rank: with all weights trained, and with adapters."""
    return {lora: updates(nemo, **({"peft": LORA} if lora else {})) for lora in (False, True)}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("split", SPLITS)
def test_two_ranks_update_as_one_does(one_rank, two_ranks, split):
    expected = one_rank[split.endswith("LoRA")]
    for rank in two_ranks:
        torch.testing.assert_close(rank[split]["steps"], expected["steps"], rtol=1e-5, atol=1e-6)
        found, wanted = rank[split]["logprobs"], expected["logprobs"]
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
