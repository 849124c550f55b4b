# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages of different sizes, keys that act on embeddings, positions, norms and attention,
and layers with experts between others give the numbers of one rank at each kind of split.
"""

import pytest
import torch
from megatron.core.parallel_state import destroy_model_parallel
from omegaconf import OmegaConf

from nemo_aligner.checkpoint import sources
from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.generation import GenerationParams, MegatronGenerator
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.training.megatron_steps import forward_collect
from tests.distributed.launcher import at_each, run_ranks
from tests.distributed.test_quick_splits import actor_of, update, updates
from tests.tiny_models import NORMS_AFTER, tiny_config

DENSE = {"num_layers": 3, "apply_embedding_scaling": True, "layernorm_zero_centered_gamma": True}
DENSE |= {"qk_layernorm": True, "scale_positional_embedding": True, "window_size": [3, 0]}
DENSE |= {"window_attn_skip_freq": 2, "no_rope_freq": [0, 1, 0], "query_pre_attn_scalar": 5}
DENSE |= {"activation": "geglu", "openai_gelu": True, "norm_position": "both"}
DENSE |= {"rotary_base_local": 100.0, "attn_logit_softcapping": 0.5}
DENSE |= {"final_logit_softcapping": 1.5, "embedding_multiplier": 3.0, "residual_multiplier": 0.7}
DENSE |= {"logits_scaling": 0.5}
YARN = {"position_embedding_type": "yarn", "yarn_rotary_scaling_factor": 4.0}
YARN["yarn_original_max_position_embeddings"] = 16
AFTER = YARN | NORMS_AFTER | {"num_layers": 4}
BESIDE = {  # Cohere
    "num_layers": 4,
    "normalization": "layernorm",
    "layernorm_bias": False,
    "parallel_attention": True,
    "rotary_interleaved": True,
}
# A layer without experts on each of two pipeline stages.
EXPERTS = YARN | {"num_layers": 4, "init_method_std": 0.3, "num_moe_experts": 4}
EXPERTS |= {"moe_ffn_hidden_size": 24, "moe_layer_freq": [0, 1, 1, 0]}
EXPERTS |= {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True}
PP2 = {"pipeline_model_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2}
TP2_SP = TP2 | {"sequence_parallel": True}
CP2 = {"context_parallel_size": 2}
# name -> (keys, splits)
CASES = {
    "dense": (
        DENSE,
        {
            "PP2, 2 layers and 1": PP2 | {"num_layers_in_first_pipeline_stage": 2},
            "PP2, 1 layer and 2": PP2 | {"num_layers_in_last_pipeline_stage": 2},
            "TP2": TP2,
            "TP2+SP": TP2_SP,
            "CP2": CP2,
        },
    ),
    "after": (AFTER, {"PP2": PP2, "TP2": TP2, "TP2+SP": TP2_SP, "CP2": CP2}),
    "beside": (BESIDE, {"PP2": PP2, "TP2": TP2, "TP2+SP": TP2_SP, "CP2": CP2}),
    "experts": (
        EXPERTS,
        {"PP2": PP2, "TP2+SP": TP2_SP, "CP2": CP2, "EP2": {"expert_model_parallel_size": 2}},
    ),
}


def compute(nemo: str, **split) -> dict:
    """What `updates` gives, and greedy responses; all ranks call it."""
    results = updates(nemo, **split)
    cfg = OmegaConf.merge(sources.read_config(nemo), split)
    model = MegatronGPTModel.restore_from(nemo, override_config_path=cfg)
    tokens = torch.randint(0, 300, (2, 12), generator=torch.Generator().manual_seed(4))

    def logits():
        return forward_collect(
            model.model, {"tokens": tokens}, micro_batch_size=2, output_fn=lambda x, _: x
        )

    before = logits()  # of sequences as long as the samples below
    params = GenerationParams(max_length=6, use_greedy=True, return_logprobs=True)
    output = MegatronGenerator(model.model, model.tokenizer, 40).generate(
        tokens[:, :6], torch.tensor([6, 4]), torch.arange(2), params
    )
    if before is not None:  # the last pipeline stage
        assert torch.equal(before, logits())
    else:
        logits()
    return results | {"responses": output.response_tokens, "their logprobs": output.logprobs}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_compute_as_one_does(tiny_tokenizer_dir, tmp_path, case):
    keys, splits = CASES[case]
    nemo = str(tmp_path / "policy.nemo")
    MegatronGPTModel(tiny_config(tiny_tokenizer_dir, "llama", **keys)).save_to(nemo)
    one = compute(nemo)
    for rank in run_ranks(at_each, 2, 120, splits, compute, nemo):
        for split in splits:
            for name in one:
                torch.testing.assert_close(
                    rank[split][name], one[name], rtol=1e-5, atol=1e-5, msg=f"{split} {name}"
                )


def across_a_checkpoint(nemo: str, folder: str, save: bool, **split) -> list[float]:
    """Numbers of the update behind a checkpoint: `save` it after two updates, or load it. All
    ranks call it.
    """
    job = actor_of(nemo, **split)
    callback = CheckpointCallback(folder, *job, name="policy", save_nemo_on_train_end=False)
    if save:
        for _ in range(2):
            update(*job)
        callback.custom_save({}, is_train_end=True, trainer_state={"step": 2})
    else:
        assert callback.load_latest() == {"step": 2}
    return update(*job)


def place(folder, split: dict) -> str:
    return f"{folder}/{next(iter(split))}"


def both_ways(nemo: str, folder: str, **split) -> tuple[list[float], list[float]]:
    loaded = across_a_checkpoint(nemo, f"{folder}/one rank", False, **split)
    destroy_model_parallel()
    return loaded, across_a_checkpoint(nemo, place(folder, split), True, **split)


@pytest.mark.timeout(400)
def test_a_model_of_unlike_layers_resumes_at_another_split(tiny_tokenizer_dir, tmp_path):
    """A checkpoint names its layers otherwise than that of a uniform model."""
    nemo = str(tmp_path / "policy.nemo")
    MegatronGPTModel(tiny_config(tiny_tokenizer_dir, "llama", **EXPERTS)).save_to(nemo)
    expected = across_a_checkpoint(nemo, str(tmp_path / "one rank"), True)
    splits = {name: CASES["experts"][1][name] for name in ("PP2", "TP2+SP", "EP2")}
    for rank in run_ranks(at_each, 2, 120, splits, both_ways, nemo, str(tmp_path)):
        for name in splits:
            for numbers in rank[name]:
                assert numbers == pytest.approx(expected, rel=1e-5, abs=1e-6), name
    for split in splits.values():
        again = across_a_checkpoint(nemo, place(tmp_path, split), False)
        assert again == pytest.approx(expected, rel=1e-5, abs=1e-6), split
