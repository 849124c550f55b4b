# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Configurations of tiny models for tests, one like GPT-2, one like Llama; and what policies and
reward models are compared with.
"""

import torch
from omegaconf import DictConfig, OmegaConf

from nemo_aligner.training.megatron_steps import forward_collect

GPT2_LIKE = {"normalization": "layernorm", "activation": "gelu", "bias": True}
GPT2_LIKE["position_embedding_type"] = "learned_absolute"
GPT2_LIKE["share_embeddings_and_output_weights"] = True
LLAMA_LIKE = {"normalization": "rmsnorm", "activation": "swiglu", "num_query_groups": 2}
LLAMA_LIKE |= {"position_embedding_type": "rope", "bias": False}
LLAMA_LIKE["share_embeddings_and_output_weights"] = False
# Norms behind attention and MLP, those of queries and keys over all heads, another rotation in the
# layers with a window (OLMo 3)
NORMS_AFTER = {"norm_position": "after", "qk_layernorm": True, "qk_layernorm_all_heads": True}
NORMS_AFTER |= {"window_size": [3, 0], "window_attn_skip_freq": 2, "rotary_base_local": 100.0}
# A section `model.ppo`
PPO = {
    "entropy_bonus": 0.01,
    "ratio_eps": 0.2,
    "loss_reduction": "token",
    "forward_micro_batch_size": 2,
    "offload_adam_states": True,
    "length_params": {"max_length": 16, "min_length": 1},
    "sampling_params": {
        "use_greedy": False,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "repetition_penalty": 1.0,
        "add_BOS": False,
        "end_strings": [],
    },
}
ARCHITECTURES = {"gpt2": GPT2_LIKE, "llama": LLAMA_LIKE}


def tiny_config(tokenizer_dir: str, architecture: str = "llama", **overrides) -> DictConfig:
    """Model configuration: 2 layers, width 32, 4 heads, 48 positions, an optimizer; fp32."""
    config = {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "encoder_seq_length": 48,
        "max_position_embeddings": 48,
        "init_method_std": 0.1,
        "seed": 7,
        "precision": 32,
        "micro_batch_size": 1,
        "global_batch_size": 4,
        "tokenizer": {"library": "huggingface", "type": tokenizer_dir},
        "optim": {
            "name": "distributed_fused_adam",
            "lr": 1e-3,
            "weight_decay": 0.1,
            "betas": [0.9, 0.98],
            "sched": {
                "name": "CosineAnnealing",
                "warmup_steps": 2,
                "constant_steps": 0,
                "min_lr": 1e-4,
            },
        },
        **ARCHITECTURES[architecture],
    }
    return OmegaConf.merge(OmegaConf.create(config), OmegaConf.create(overrides))


def logprobs_by_hand(model, tokens, temperature=1.0):
    """(log-probs of the next tokens, entropy) from the model's own logits, over the real
    vocabulary.
    """
    model.set_eval()
    whole = {"micro_batch_size": len(tokens), "output_fn": lambda output, _: output}
    logits = forward_collect(model.model, {"tokens": tokens}, **whole)
    distribution = torch.distributions.Categorical(
        logits=logits[:, :-1, : model.tokenizer.vocab_size].double() / temperature
    )
    return distribution.log_prob(tokens[:, 1:]).float(), distribution.entropy().float()


def assert_gradients_of(plain, model, rtol=1e-4, atol=1e-6):
    """The gradients of `model` are those of `plain`, a module that PyTorch alone has trained."""
    ours = model.unwrapped()[0].parameters()
    for (name, parameter), own in zip(plain.named_parameters(), ours, strict=True):
        torch.testing.assert_close(own.main_grad, parameter.grad, rtol=rtol, atol=atol, msg=name)
