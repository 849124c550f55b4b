# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters of Hugging Face's PEFT, as an oracle: tiny models with adapters, written as folders."""

from pathlib import Path

import torch
import transformers

from tests import hugging_face
from tests.oracles import oracle

FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
SEPARATE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Models of `hugging_face.FOLDERS` and all modules of theirs that can have adapters
MODULES = {
    "Llama, odd sizes": SEPARATE,
    "Qwen 2": SEPARATE,  # biases
    "Gemma": SEPARATE,
    "Mistral": SEPARATE,
    "Qwen 3": SEPARATE,
    "Nemotron": [name for name in SEPARATE if name != "gate_proj"],
    "GPT-2": ["c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"],
    "Phi 3": FUSED,
    "StarCoder 2": ["q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "mlp.c_proj"],
    "Mixtral": SEPARATE[:4],
    "Qwen 2 MoE": SEPARATE[:4],  # layers with and without experts
    "Qwen 3 MoE": SEPARATE[:4],
}
TOKENS = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(1))


def load_base(folder: Path, kind: str = "CausalLM") -> torch.nn.Module:
    """The model in a folder; `kind` is the ending of an `AutoModelFor` class."""
    auto = getattr(transformers, f"AutoModelFor{kind}")
    return auto.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)


def add_adapters(model: torch.nn.Module, modules: list[str], **settings) -> torch.nn.Module:
    """A `PeftModel` over `model` in evaluation mode, with random A and B in all adapters."""
    peft = oracle("peft")
    settings = {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM"} | settings
    if "c_attn" in modules:
        settings["fan_in_fan_out"] = True
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=modules, **settings)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.15, generator=generator)
    return model


def with_adapters(write_folder, name: str, **settings) -> tuple[Path, Path, torch.nn.Module]:
    """The model `name`, with adapters on all its modules.

    Args:
        write_folder: the fixture.
        settings: of `LoraConfig`; `modules` in the place of `target_modules`.

    Returns:
        Folders of the base and the adapters, and the `PeftModel`.
    """
    base = write_folder(hugging_face.randomized(hugging_face.FOLDERS[name]), "base")
    modules = settings.pop("modules", MODULES[name])
    model = add_adapters(load_base(base), modules, **settings)
    folder = base.with_name("adapters")
    model.save_pretrained(folder)
    return base, folder, model


def logits_in_peft(base: Path, folder: Path, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    """`[B, S, V]` of a folder of PEFT over a base, as PEFT loads them."""
    model = oracle("peft").PeftModel.from_pretrained(load_base(base), folder).eval()
    with torch.no_grad():
        return model(tokens).logits
