# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What the distributed optimizer puts into a checkpoint, where its gradients are in several
buckets with padding between them: with overlapping reductions, and with tied embeddings in a
pipeline.
"""

import pytest
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from nemo_aligner.checkpoint.checkpointing import FULLY_RESHARDABLE, sharded_optimizer_state
from nemo_aligner.models.nlp.gpt.megatron_gpt_ppo_actor import MegatronGPTActorModel
from nemo_aligner.parallel import parallel_state
from tests.distributed.launcher import at_each, run_ranks
from tests.tiny_models import tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SPLITS = {
    "overlap": {"optim": {"overlap_grad_sync": True, "bucket_cap_mb": 0.02}},
    "tied": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
}
PREFIX = "optimizer.state.param."


def states(tokenizer_dir, **split) -> tuple[bool, int, list[str]]:
    """Whether there is padding between buckets, of how many weights this rank saves the
    optimizer's copy, and which copies are other numbers.
    """
    model = MegatronGPTActorModel(tiny_config(tokenizer_dir, "gpt2", num_layers=4, **split))
    optimizer, _ = model.setup_megatron_optimization(10)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"distrib_optim_sharding_type": FULLY_RESHARDABLE, "dp_cp_group": group}
    weights = model.sharded_weights(metadata)
    state = sharded_optimizer_state(optimizer, weights, False, metadata)
    own, saved = (  # layers have one key
        {
            (part.key, part.global_offset): part.data
            for part in nested_values(tree)
            if isinstance(part, ShardedTensor)
        }
        for tree in (weights, state)
    )
    copies = {key: data for key, data in saved.items() if key[0].startswith(PREFIX)}
    buffers = [buffer for chunk in model.model for buffer in chunk.buffers]
    pairs = [pair for buffer in buffers for pair in zip(buffer.buckets, buffer.buckets[1:])]
    padded = any(a.offset + a.numel_unpadded < b.offset for a, b in pairs)
    weight_of = lambda key: own[key[0].removeprefix(PREFIX), key[1]]
    return padded, len(copies), [key for key, x in copies.items() if not x.equal(weight_of(key))]


def test_each_weight_is_saved_with_its_own_state(tiny_tokenizer_dir):
    ranks = run_ranks(at_each, 2, 120, SPLITS, states, tiny_tokenizer_dir)
    for name in SPLITS:
        assert any(found[name][0] for found in ranks), f"{name}: no padding, so nothing is tested"
        for _, count, wrong in (found[name] for found in ranks):
            assert count > 4 and not wrong
