# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Megatron-LM and Megatron-Bridge, made from a GPT of Megatron Core that knows
nothing of this package. The layouts are stated here anew, not taken from it.
"""

import argparse
import itertools
import shutil
import signal
from pathlib import Path

import numpy as np
import torch
import yaml
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_aligner.models.nlp.gpt.megatron_layers import build_layer_spec
from nemo_aligner.parallel import parallel_state
from tests.nemo_files import save_as_megatron_core, states_of_ranks

PADDED, IDS = 384, 300  # rows of the tables; ids of the tokenizer of the tests
SIZES = {"num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4}
# What of the three models is a field of `TransformerConfig`, and what an argument of `GPTModel`
FIELDS = {
    "llama": {
        "num_query_groups": 2,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
    },
    "gpt2": {"add_bias_linear": True, "normalization": "LayerNorm"},
}
FIELDS["moe"] = FIELDS["llama"] | {
    "qk_layernorm": True,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_dtype": "fp32",
    "moe_layer_freq": [1] * 4,  # with a list the names of weights have the layers' numbers
}
ROPE = {"position_embedding_type": "rope", "rotary_base": 5000}
ROPE["share_embeddings_and_output_weights"] = False
LEARNED = {"position_embedding_type": "learned_absolute"}
LEARNED["share_embeddings_and_output_weights"] = True
ARGUMENTS = {"llama": {**ROPE, "rope_scaling": True, "rope_scaling_factor": 4.0}}
ARGUMENTS |= {"gpt2": LEARNED, "moe": ROPE}
# Of a command line of `pretrain_gpt.py`; a real one has some 700 names, most of them of this kind.
TRAINING = {
    "tokenizer_type": "HuggingFaceTokenizer",
    "tokenizer_model": "/elsewhere/tokenizer",
    "seq_length": 48,
    "max_position_embeddings": 48,
    "padded_vocab_size": PADDED,
    "make_vocab_size_divisible_by": 128,
    "params_dtype": torch.bfloat16,
    "attention_backend": AttnBackend.auto,
    "exit_signal": signal.SIGTERM,
    "transformer_impl": "transformer_engine",
    "cp_comm_type": ["p2p"],
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "seq_aux_loss",
    "ckpt_format": "torch_dist",
    "position_embedding_type": "learned_absolute",
    "num_query_groups": 1,  # as Megatron-LM says where there are none
    "normalization": "LayerNorm",
    "norm_epsilon": 1e-5,
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "moe_router_topk": 2,
    "add_position_embedding": True,
    "add_bias_linear": True,
}
TRAINING |= dict.fromkeys(["hidden_dropout", "attention_dropout"], 0.0)
PARALLEL = ("tensor_model", "pipeline_model", "expert_model", "context")
TRAINING |= {f"{name}_parallel_size": 1 for name in PARALLEL[:3]}
OFF = "swiglu squared_relu bias_gelu_fusion group_query_attention qk_layernorm use_rope_scaling"
TRAINING |= dict.fromkeys([*OFF.split(), "untie_embeddings_and_output_weights"], False)
NOT_SET = "vocab_size mtp_num_layers spec num_experts moe_ffn_hidden_size"
TRAINING |= dict.fromkeys(NOT_SET.split())
LLAMA = {"group_query_attention": True, "num_query_groups": 2, "swiglu": True}
LLAMA |= {"add_bias_linear": False, "normalization": "RMSNorm", "norm_epsilon": 1e-6}
LLAMA |= {"untie_embeddings_and_output_weights": True, "position_embedding_type": "rope"}
LLAMA |= {"rotary_base": 5000, "use_rope_scaling": True, "rope_scaling_factor": 4.0}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 24, "use_rope_scaling": False}
EXPERTS |= {"qk_layernorm": True, "moe_layer_freq": [1] * 4}
ARGS = {"llama": LLAMA, "gpt2": {}, "moe": LLAMA | EXPERTS}


def args_of(kind: str, **changes) -> argparse.Namespace:
    """The command line of Megatron-LM that builds the model."""
    return argparse.Namespace(**(TRAINING | SIZES | ARGS[kind] | changes))


def gpt(kind: str, **fields) -> GPTModel:
    """A model of Megatron Core with random weights."""
    sizes = {f"{name}_parallel_size": 1 for name in PARALLEL}
    parallel_state.initialize(seed=1, virtual_pipeline_model_parallel_size=None, **sizes)
    torch.manual_seed(3)
    plain = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "use_cpu_initialization": True}
    keys = FIELDS[kind] | fields
    config = TransformerConfig(**SIZES, **keys, init_method_std=0.1, **plain)
    if kind == "moe":  # Megatron Core's router needs Transformer Engine
        spec = build_layer_spec(config)
    else:
        spec = get_gpt_layer_local_spec(
            normalization=config.normalization, qk_layernorm=config.qk_layernorm
        )
    model = GPTModel(config, spec, vocab_size=PADDED, max_sequence_length=48, **ARGUMENTS[kind])
    for name, value in model.named_parameters():  # norms and biases too
        if "norm" in name or name.endswith("bias"):
            value.data += 0.1 * torch.randn_like(value)
    return model.eval()


def logits(model: GPTModel, tokens: torch.Tensor) -> torch.Tensor:
    """What the model computes."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    mask = torch.ones(1, 1, *[tokens.shape[1]] * 2).tril() < 0.5
    with torch.no_grad():
        return model(tokens, positions, mask)


def save(model: GPTModel, root: Path, common: dict, name: str = "iter_0000010") -> Path:
    """`root/<name>` as Megatron Core's own writer makes it."""
    state = {**common, "checkpoint_version": 3.0, "iteration": 10}
    key = "optimizer.state.exp_avg.output_layer.weight"  # not to be taken for a weight
    moment = ShardedTensor.from_rank_offsets(key, torch.ones(3))
    state |= {"optimizer": {"moment": moment}, "model": model.sharded_state_dict()}
    save_as_megatron_core(state, root / name)
    (root / "latest_checkpointed_iteration.txt").write_text("10")
    return root / name


def _target(name: str, *arguments) -> dict:
    """A value in a file of Megatron-Bridge: an object, or what it returns."""
    called = {"_call_": True, "_args_": list(arguments)} if arguments else {"_call_": False}
    return {"_target_": name, **called}


def bridge_config(kind: str, **changes) -> dict:
    """Section `model` of a `run_config.yaml` of Megatron-Bridge."""
    fields = SIZES | FIELDS[kind] | ARGUMENTS[kind]
    function = fields.get("activation_func", torch.nn.functional.gelu)
    return fields | {
        "_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider",
        "activation_func": {"_target_": f"torch.nn.functional.{function.__name__}"},
        "attention_backend": _target("megatron.core.transformer.enums.AttnBackend", 5),
        "transformer_layer_spec": _target(
            "megatron.bridge.models.gpt_provider.default_layer_spec"
        ),
        "params_dtype": _target("torch.bfloat16"),
        "seq_length": 48,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "vocab_size": IDS,
        "should_pad_vocab": True,
        "make_vocab_size_divisible_by": 128,
        "tensor_model_parallel_size": 1,
        "bias_activation_fusion": False,
        "generation_config": None,
        "mtp_enabled": False,
        **changes,
    }


def save_bridge(model: GPTModel, root: Path, tokenizer: str, config: dict) -> Path:
    """`root/iter_0000010` as Megatron-Bridge writes it."""
    folder = save(model, root, {})
    described = {"_target_": "megatron.bridge.training.config.ConfigContainer", "model": config}
    named = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "org/name"}
    (folder / "run_config.yaml").write_text(yaml.safe_dump(described | {"tokenizer": named}))
    shutil.copytree(tokenizer, folder / "tokenizer")
    return folder


def save_ranks(model: GPTModel, root: Path, args, tp=1, pp=1, virtual=1) -> Path:
    """`root/release` with a file for each rank (`--ckpt-format torch`)."""
    folder = root / "release"
    weights = {n: v for n, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    args = argparse.Namespace(**vars(args) | sizes | {"ckpt_format": "torch"})
    layers = [args.num_layers // (pp * virtual)] * (pp * virtual)
    chunks = list(states_of_ranks(weights, tp, layers, args.swiglu))
    for rank, stage in itertools.product(range(tp), range(pp)):
        state = {"args": args, "checkpoint_version": 3.0, "iteration": 10}
        state["rng_state"] = [{"np_rng_state": np.random.get_state()}]
        for chunk in range(virtual):  # each stage has a first one, then each a second, ...
            state["model" if virtual == 1 else f"model{chunk}"] = chunks[chunk * pp + stage][rank]
        name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else "")
        (folder / name).mkdir(parents=True)
        torch.save(state, folder / name / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("release")
    return folder
