# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What the distributed optimizer puts into a checkpoint, where its gradients are in several
buckets with padding between them: with overlapping reductions, and with tied embeddings in a
pipeline.
"""

import pytest
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.parallel_state import destroy_model_parallel

from nemo_aligner.checkpoint.checkpointing import FULLY_RESHARDABLE, sharded_optimizer_state
from nemo_aligner.models.nlp.gpt.megatron_gpt_ppo_actor import MegatronGPTActorModel
from nemo_aligner.parallel import parallel_state
from tests.distributed.launcher import run_ranks
from tests.tiny_models import tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SPLITS = {
    "overlap": {"optim": {"overlap_grad_sync": True, "bucket_cap_mb": 0.02}},
    "tied": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
}
PREFIX = "optimizer.state.param."


def states(tokenizer_dir) -> dict[str, tuple[bool, int, list[str]]]:
    """Body of a rank: for each split whether there is padding between buckets, and of how many
    weights it saves the optimizer's copy, and which copies are other numbers.
    """
    found = {}
    for name, split in SPLITS.items():
        model = MegatronGPTActorModel(tiny_config(tokenizer_dir, "gpt2", num_layers=4, **split))
        optimizer, _ = model.setup_megatron_optimization(10)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        metadata = {"distrib_optim_sharding_type": FULLY_RESHARDABLE, "dp_cp_group": group}
        weights = model.sharded_weights(metadata)
        own = {  # layers have one key
            (part.key, part.global_offset): part.data
            for part in nested_values(weights)
            if isinstance(part, ShardedTensor)
        }
        state = sharded_optimizer_state(optimizer, weights, False, metadata)
        parts = [part for part in nested_values(state) if isinstance(part, ShardedTensor)]
        mine = {
            part.key.removeprefix(PREFIX): part for part in parts if part.key.startswith(PREFIX)
        }
        copies = {(key, part.global_offset): part.data for key, part in mine.items()}
        buffers = [buffer for chunk in model.model for buffer in chunk.buffers]
        pairs = [pair for buffer in buffers for pair in zip(buffer.buckets, buffer.buckets[1:])]
        padded = any(a.offset + a.numel_unpadded < b.offset for a, b in pairs)
        wrong = [key for (key, place), x in copies.items() if not x.equal(own[key, place])]
        found[name] = padded, len(copies), wrong
        destroy_model_parallel()
    return found


def test_each_weight_is_saved_with_its_own_state(tiny_tokenizer_dir):
    ranks = run_ranks(states, 2, 120, tiny_tokenizer_dir)
    for name in SPLITS:
        assert any(found[name][0] for found in ranks), f"{name}: no padding, so nothing is tested"
        for _, count, wrong in (found[name] for found in ranks):
            assert count > 4 and not wrong
