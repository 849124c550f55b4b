# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights in other forms of NeMo and Megatron, loaded by two ranks at another split than the one
that wrote them: the same bits as from a distributed checkpoint.
"""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from nemo_aligner.checkpoint import sources
from nemo_aligner.core.errors import UserError
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from tests import megatron_folders, nemo_files
from tests.cases import some_of
from tests.distributed.launcher import at_each, progress, run_ranks
from tests.tiny_models import tiny_config

SPLITS = {
    "TP2": {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 1,
        "sequence_parallel": True,  # experts need it
    },
    "PP2": {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2},
}


def differences(trusted: str, others: list[str], **split) -> dict[str, list[str]]:
    """Weights of this rank that differ from those in `trusted`, by file; all ranks call it."""

    def loaded(path: str, seed: int) -> dict[str, torch.Tensor]:
        own = {**split, "seed": seed}
        cfg = nemo_files.with_own_tokenizer(sources.read_config(path))
        cfg = OmegaConf.merge(cfg, own)
        model = MegatronGPTModel.restore_from(path, override_config_path=cfg)
        return {name: weight.detach().clone() for name, weight in model._named_weights()}

    expected = loaded(trusted, seed=1)
    assert expected
    result = {}
    for path in others:
        found = loaded(path, seed=2)
        assert found.keys() == expected.keys()
        result[path] = [n for n in found if not torch.equal(found[n], expected[n])]
        progress(path)
    return result


def megatron_roots(model, kind: str, folder: Path, tokenizer: str) -> list[Path]:
    """What Megatron-LM would write of the model."""
    changes = {"rotary_base": 10000, "norm_epsilon": 1e-5, "use_rope_scaling": False}
    changes = {} if kind == "gpt2" else changes | {"qk_layernorm": False, "moe_layer_freq": 1}
    args = megatron_folders.args_of(kind, **changes, tokenizer_model=tokenizer)
    module = model.unwrapped()[0]
    megatron_folders.save(module, folder / "torch_dist", {"args": args})
    if kind == "moe":
        return [folder / "torch_dist"]
    megatron_folders.save_ranks(module, folder / "torch", args, tp=2, pp=2, virtual=2)
    return [folder / "torch_dist", folder / "torch"]


@some_of("kind", ["llama", "gpt2", "moe"])
def test_other_forms_load_at_another_split(tiny_tokenizer_dir, tmp_path, kind):
    experts = {"num_moe_experts": 4, "moe_ffn_hidden_size": 24} if kind == "moe" else {}
    architecture = "gpt2" if kind == "gpt2" else "llama"
    cfg = tiny_config(tiny_tokenizer_dir, architecture, num_layers=4, **experts)
    source = MegatronGPTModel(cfg)
    trusted = str(tmp_path / "trusted.nemo")
    source.save_to(trusted)
    folders = megatron_roots(source, kind, tmp_path, tiny_tokenizer_dir)
    if kind != "moe":
        folders += [
            nemo_files.write_rank_files(source, tmp_path / "tp2pp2", 2, [3, 1]),
            nemo_files.write_rank_files(source, tmp_path / "tp2", 2, [4]),
            nemo_files.packed(nemo_files.write_rank_files(source, tmp_path / "tp1", 1, [4])),
            nemo_files.packed(nemo_files.write_zarr(source, tmp_path / "zarr", chunk_rows=7)),
            nemo_files.write_by_megatron_core(source, tmp_path / "core"),
        ]
    paths = [str(folder) for folder in folders]
    for found in run_ranks(at_each, 2, 120, SPLITS, differences, trusted, paths):
        assert found == {name: {path: [] for path in paths} for name in SPLITS}


def errors_of(path: str, split: dict) -> str:
    cfg = OmegaConf.merge(sources.read_config(path), split)
    with pytest.raises(UserError) as error:
        MegatronGPTModel.restore_from(path, override_config_path=cfg)
    return str(error.value)


@pytest.mark.parametrize("split", SPLITS)
def test_a_weight_beyond_reason_of_one_rank_is_the_same_error_on_all(
    tiny_tokenizer_dir, tmp_path, split
):
    source = MegatronGPTModel(tiny_config(tiny_tokenizer_dir))
    path = str(tmp_path / "model.nemo")
    with torch.no_grad():
        named = "1.mlp.linear_fc2.weight"
        (weight,) = (w for n, w in source._named_weights() if n.endswith(named))
        weight[0, -1] = 1.8e37  # of the last columns and the last layer
    source.save_to(path)
    first, second = run_ranks(errors_of, 2, 120, path, SPLITS[split])
    assert first == second
    assert f"{path}/model_weights/__0_0.distcp: the weight" in first and "1.8e+37" in first
