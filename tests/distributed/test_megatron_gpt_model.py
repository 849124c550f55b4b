# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The base model on several ranks: weights at start, and the actor's update at several splits."""

import torch
from omegaconf import OmegaConf

from tests.distributed.launcher import run_ranks
from tests.tiny_models import PPO, tiny_config


def stages_start_different(tokenizer_dir):
    from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel

    cfg = tiny_config(tokenizer_dir, num_layers=3, pipeline_model_parallel_size=3)
    weight = MegatronGPTModel(cfg).unwrapped()[0].decoder.layers[0].mlp.linear_fc1.weight
    weights = [torch.empty_like(weight) for _ in range(3)]
    torch.distributed.all_gather(weights, weight.detach().contiguous())
    assert not torch.equal(weights[1], weights[2]) and not torch.equal(weights[0], weights[1])


def test_pipeline_stages_do_not_start_with_the_same_weights(tiny_tokenizer_dir):
    run_ranks(stages_start_different, 3, 120, tiny_tokenizer_dir)


def actor_update(nemo, **parallel):
    """Loss, gradient norm and log-probs after three updates of the actor on fixed data, with this rank's rows."""
    from nemo_aligner.models.nlp.gpt.megatron_gpt_ppo_actor import MegatronGPTActorModel
    from nemo_aligner.utils import nemo_archive, parallel_state
    from nemo_aligner.utils.train_utils import optimizer_step

    cfg = OmegaConf.merge(nemo_archive.read_config(nemo), {"ppo": PPO, "micro_batch_size": 1}, parallel)
    actor = MegatronGPTActorModel.restore_from(nemo, override_config_path=cfg)
    optimizer, scheduler = actor.setup_megatron_optimization(max_steps=10)
    generator = torch.Generator().manual_seed(3)
    batch = {
        "response_tokens": torch.randint(0, 300, (4, 11), generator=generator),
        "is_end": torch.tensor([True, False, True, True]),
        "mask": (torch.rand(4, 10, generator=generator) < 0.6).float(),
        "advantages": torch.randn(4, 10, generator=generator),
        "prev_logprobs": -5.5 + 0.3 * torch.randn(4, 10, generator=generator),
    }
    tokens = batch["response_tokens"]
    size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    batch = {key: value.chunk(size)[rank] for key, value in batch.items()}
    steps = []
    for _ in range(3):
        actor.prepare_for_training_step()
        loss, _ = actor.get_loss_and_metrics(batch)
        steps.append([loss, optimizer_step(optimizer, scheduler, 1.0)])
    actor.set_eval()
    return torch.tensor(steps), actor.get_inference_log_probs(tokens)


def splits_agree(nemo, expected_steps, expected_logprobs):
    from nemo_aligner.utils import parallel_state  # noqa: F401  (adapts Megatron Core)

    from megatron.core import parallel_state as megatron  # isort: skip

    for parallel in (
        {"tensor_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"pipeline_model_parallel_size": 2},
        {},  # DP=2, distributed optimizer
        {"optim": {"name": "adamw"}},  # DP=2
    ):
        steps, logprobs = actor_update(nemo, **parallel)
        torch.testing.assert_close(steps, expected_steps, rtol=1e-5, atol=1e-6, msg=lambda m, p=parallel: f"{p}: {m}")
        torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-5, atol=1e-5)
        megatron.destroy_model_parallel()  # the ranks stay


def test_actor_updates_agree_at_every_split(tiny_tokenizer_dir, tmp_path):
    from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel

    nemo = str(tmp_path / "policy.nemo")
    MegatronGPTModel(tiny_config(tiny_tokenizer_dir)).save_to(nemo)
    run_ranks(splits_agree, 2, 180, nemo, *actor_update(nemo))
