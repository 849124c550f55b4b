# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Folders of PEFT at splits: each rank reads its own part of the adapters, and the logits are
PEFT's.
"""

import contextlib

import pytest
import torch
from omegaconf import OmegaConf

from nemo_aligner.checkpoint.hugging_face.reading import Tensors
from nemo_aligner.launch.model_loading import load_from_nemo
from nemo_aligner.models.nlp.gpt.gpt_sft_model import GPTSFTModel
from nemo_aligner.parallel.megatron_switches import changed
from tests.distributed.launcher import at_each, run_ranks
from tests.distributed.test_hugging_face_folders import whole_logits
from tests.peft_folders import TOKENS, with_adapters

SPLITS = {
    "TP2+SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP2": {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 1},
}
NAMES = ("Llama, odd sizes", "Phi 3")  # projections apart, and together


@contextlib.contextmanager
def counting_reads():
    """Numbers that this rank reads of each tensor, inside."""
    read, counts = Tensors.read, {}

    def counted(self, name, index):
        values = read(self, name, index)
        if values.numel() > 1:  # one is read for its type
            counts[name] = counts.get(name, 0) + values.numel()
        return values

    with changed([(Tensors, "read", counted)]):
        yield counts


def logits(base: str, folder: str, **split) -> tuple[tuple, dict[str, int]]:
    """Those of adapters beside the weights, merged into them, and loaded with them; and what this
    rank read of the adapters. All ranks call it.
    """
    job = OmegaConf.create({"micro_batch_size": 2, "precision": 32, **split})
    model = load_from_nemo(GPTSFTModel, job, None, restore_path=base)
    with counting_reads() as read:
        model.init_peft({"peft_scheme": "lora", "restore_from_path": folder})
    beside = whole_logits(model, TOKENS)
    with model.adapters_merged():
        merged = whole_logits(model, TOKENS)
    model = load_from_nemo(GPTSFTModel, job, None, restore_path=folder)
    return (beside, merged, whole_logits(model, TOKENS)), read


@pytest.mark.timeout(300)
def test_logits_at_each_split_are_those_of_peft(write_folder, tmp_path):
    folders, expected = {}, {}
    for name in NAMES:

        def write(model, part, name=name):
            return write_folder(model, f"{name}/{part}")

        base, folder, model = with_adapters(write, name)
        folders[name] = str(base), str(folder)
        with torch.no_grad():
            expected[name] = model(TOKENS).logits
    cases = {
        (split, name): {"base": base, "folder": folder, **keys}
        for split, keys in SPLITS.items()
        for name, (base, folder) in folders.items()
    }
    for rank, found in enumerate(run_ranks(at_each, 2, 120, cases, logits)):
        for (split, name), (results, read) in found.items():
            for result in results:
                assert (result is None) == (split == "PP2" and rank == 0)
                if result is None:
                    continue
                result = result[..., : expected[name].size(-1)]
                torch.testing.assert_close(result, expected[name], atol=1e-5, rtol=1e-5)
            layers = {int(key.split("layers.")[1].partition(".")[0]) for key in read}
            if split == "PP2":
                assert layers == ({0} if rank == 0 else set(range(1, len(layers) + 1)))
            elif name.startswith("Llama"):
                stem = "base_model.model.model.layers.0."
                assert read[stem + "self_attn.q_proj.lora_B.weight"] == 60 * 4
                assert read[stem + "self_attn.q_proj.lora_A.weight"] == 36 * 4
