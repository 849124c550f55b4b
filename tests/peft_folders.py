# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters of Hugging Face's PEFT, as an oracle: tiny models with adapters, written as folders;
and the same adapters in this package.
"""

from pathlib import Path

import torch
import transformers
from omegaconf import OmegaConf
from safetensors.torch import load_file

from nemo_aligner.convert.__main__ import main
from nemo_aligner.launch.model_loading import load_from_nemo
from nemo_aligner.models.nlp.gpt.gpt_sft_model import GPTSFTModel
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.training.megatron_steps import forward_collect
from tests import hugging_face
from tests.oracles import oracle

ADAPTERS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
EXACT = {"atol": 1e-5, "rtol": 1e-5}
FUSED_MLP = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"]
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
SEPARATE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Models of `hugging_face.FOLDERS` and all modules of theirs that can have adapters
MODULES = {
    **dict.fromkeys(("Llama, odd sizes", "Qwen 2", "Gemma", "Gemma 2", "OLMo 3"), SEPARATE),
    **dict.fromkeys(("Cohere 2", "Granite", "Mistral", "Qwen 3"), SEPARATE),
    # Layers with and without experts
    **dict.fromkeys(("Mixtral", "Qwen 2 MoE", "Qwen 3 MoE"), SEPARATE[:4]),
    "GLM 4": FUSED_MLP,
    "Nemotron": [name for name in SEPARATE if name != "gate_proj"],
    "GPT-2": ["c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"],
    "Phi 3": FUSED,
    "StarCoder 2": ["q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "mlp.c_proj"],
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


@torch.no_grad()
def logits_of(model: torch.nn.Module, tokens: torch.Tensor = TOKENS, **keys) -> torch.Tensor:
    """`[B, S, V]` of a model of transformers or PEFT."""
    return model(tokens, **keys).logits


def logits_in_peft(base: Path, folder: Path) -> torch.Tensor:
    """`[B, S, V]` of a folder of PEFT over a base, as PEFT loads them."""
    return logits_of(oracle("peft").PeftModel.from_pretrained(load_base(base), folder).eval())


# --- in this package ---


def load(path, cls=MegatronGPTModel, **keys):
    """The model of a checkpoint, as a job loads it."""
    job = OmegaConf.create({"micro_batch_size": 2, "precision": 32, **keys})
    model = load_from_nemo(cls, job, None, restore_path=path)
    model.set_eval()
    return model


def start_from(base, folder, cls=GPTSFTModel, **keys):
    """A job that goes on training the adapters in `folder`."""
    model = load(base, cls, **keys)
    model.init_peft({"peft_scheme": "lora", "restore_from_path": str(folder)})
    model.set_eval()
    return model


def outputs_of(model, tokens=TOKENS) -> torch.Tensor:
    """float32 `[B, S, V]`, or values `[B, S]` of a critic."""
    with torch.no_grad():
        return forward_collect(
            model.model, {"tokens": tokens}, micro_batch_size=2, output_fn=lambda x, _: x.clone()
        )


def assert_same_logits(model, expected) -> None:
    """That a model gives `expected` for `TOKENS`; its vocabulary may be padded."""
    torch.testing.assert_close(outputs_of(model)[..., : expected.size(-1)], expected, **EXACT)


def convert(*arguments) -> int:
    """Exit code of `python -m nemo_aligner.convert`."""
    return main([str(argument) for argument in arguments] + ["--quiet"])


def assert_same_tensors(one: Path, other: Path) -> None:
    """That two folders of PEFT hold the same bits under the same names."""
    before, after = load_file(one / ADAPTERS), load_file(other / ADAPTERS)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name
