# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages of different sizes, and keys of NeMo that act on embeddings, positions, norms
and attention, give the numbers of one rank at each kind of split.
"""

import pytest
import torch

from tests.distributed.launcher import progress, run_ranks
from tests.distributed.test_quick_splits import updates
from tests.tiny_models import tiny_config

KEYS = {
    "num_layers": 3,
    "apply_embedding_scaling": True,
    "layernorm_zero_centered_gamma": True,
    "qk_layernorm": True,
    "scale_positional_embedding": True,
    "window_size": [3, 0],
    "activation": "geglu",
    "openai_gelu": True,
}
PP2 = {"pipeline_model_parallel_size": 2}
SPLITS = {
    "PP2, 2 layers and 1": PP2 | {"num_layers_in_first_pipeline_stage": 2},
    "PP2, 1 layer and 2": PP2 | {"num_layers_in_last_pipeline_stage": 2},
    "TP2": {"tensor_model_parallel_size": 2},
    "TP2+SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "CP2": {"context_parallel_size": 2},
}


def at_each(nemo: str) -> dict:
    from megatron.core.parallel_state import destroy_model_parallel

    results = {}
    for name, split in SPLITS.items():
        results[name] = updates(nemo, **split)
        progress(name)
        destroy_model_parallel()  # the ranks stay
    return results


@pytest.mark.timeout(400)
def test_two_ranks_update_as_one_does(tiny_tokenizer_dir, tmp_path):
    from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel

    nemo = str(tmp_path / "policy.nemo")
    MegatronGPTModel(tiny_config(tiny_tokenizer_dir, "llama", **KEYS)).save_to(nemo)
    one = updates(nemo)
    for rank in run_ranks(at_each, 2, 120, nemo):
        for split in SPLITS:
            for name in ("steps", "logprobs"):
                torch.testing.assert_close(
                    rank[split][name], one[name], rtol=1e-5, atol=1e-5, msg=f"{split} {name}"
                )
