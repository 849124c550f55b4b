# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What LoRA costs and saves beside training all weights: generation with adapters added in each
layer or merged into the weights, one update, and the memory of gradients and optimizer.

    OMP_NUM_THREADS=1 python benchmarks/lora.py

Two policies of one shape take turns in one process. Times are CPU seconds of the process at one
thread, the median of `--repeats` runs; merging and restoring count as generation.
"""

import argparse
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import countdown
import measure
import torch
from omegaconf import OmegaConf

from nemo_aligner.generation import GenerationParams
from nemo_aligner.models.nlp.gpt.megatron_gpt_ppo_actor import MegatronGPTActorModel
from nemo_aligner.training.optim import train_on_batch

VOCABULARY = countdown.VOCABULARY
MODEL = {
    "num_layers": countdown.LAYERS,
    "hidden_size": countdown.HIDDEN,
    "ffn_hidden_size": countdown.FFN,
    "num_attention_heads": countdown.HEADS,
    "num_query_groups": countdown.GROUPS,
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "position_embedding_type": "rope",
    "bias": False,
    "share_embeddings_and_output_weights": False,
    "encoder_seq_length": 256,
    "max_position_embeddings": 256,
    "micro_batch_size": 4,
    "global_batch_size": 16,
}
OPTIM = {"name": "distributed_fused_adam", "lr": 1e-4, "sched": {"name": "constant"}}
PPO = {"length_params": {"max_length": 128}, "forward_micro_batch_size": 16}
SAMPLES, PROMPT, WIDTH = 16, 32, 160


def actor(tokenizer: str, precision: str, tuning: dict | None) -> MegatronGPTActorModel:
    """A policy with random weights, with adapters that are not 0 if `tuning` is given."""
    config = {
        **MODEL,
        "precision": precision,
        "tokenizer": {"library": "huggingface", "type": tokenizer},
        "optim": OPTIM,
        "ppo": PPO,
    }
    model = MegatronGPTActorModel(OmegaConf.create(config))
    if tuning is not None:
        # Small, so that both policies generate as many tokens.
        model.init_peft({"peft_scheme": "lora", "lora_tuning": {**tuning, "alpha": 0.01}})
    return model


def generation(model: MegatronGPTActorModel, context: Callable[[], AbstractContextManager]):
    """A function that generates one batch inside `context`."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, VOCABULARY, (SAMPLES, PROMPT), generator=generator)
    params = GenerationParams(max_length=WIDTH - PROMPT, min_length=WIDTH - PROMPT)
    lengths = torch.full((SAMPLES,), PROMPT)

    def run() -> None:
        model.set_eval()
        with torch.no_grad(), context():
            model.generator.generate(prompts, lengths, torch.arange(SAMPLES), params)

    return run


def updates(model: MegatronGPTActorModel) -> Callable[[], object]:
    """A function that makes one update."""
    training = model.setup_megatron_optimization(max_steps=100)
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(2, SAMPLES, WIDTH - 1, generator=generator)
    batch = {
        "response_tokens": torch.randint(1, VOCABULARY, (SAMPLES, WIDTH), generator=generator),
        "is_end": torch.ones(SAMPLES, dtype=torch.bool),
        "mask": torch.ones(SAMPLES, WIDTH - 1),
        "advantages": numbers[0],
        "prev_logprobs": numbers[1] - 9,
    }
    return lambda: train_on_batch(model, *training, batch, 1.0)


def megabytes_of_training(model: MegatronGPTActorModel) -> float:
    """Memory of the gradients and of the optimizer's states and fp32 weights."""
    gradients = sum(b.grad_data.nbytes for chunk in model.model for b in chunk.buffers)
    assert model._optimizer is not None
    states = [
        tensor
        for part in model._optimizer.chained_optimizers
        for state in part.optimizer.state.values()
        for tensor in state.values()
        if isinstance(tensor, torch.Tensor)
    ]
    return (gradients + sum(tensor.nbytes for tensor in states)) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--precision", default="32", choices=["32", "bf16"])
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = str(Path(folder, "tokenizer"))
        countdown.write_tokenizer(Path(tokenizer))
        whole = actor(tokenizer, args.precision, None)
        adapted = actor(
            tokenizer,
            args.precision,
            {"target_modules": ["all"], "adapter_dim": args.dim, "row_init_method": "normal"},
        )
    found = measure.seconds_in_turns(
        {
            "all weights": generation(whole, nullcontext),
            "added": generation(adapted, nullcontext),
            "merged": generation(adapted, adapted.adapters_merged),
        },
        args.repeats,
    )
    print(f"{SAMPLES} samples of {PROMPT} + {WIDTH - PROMPT} tokens, {args.precision}")
    for name, spent in found.items():
        print(f"generation, {name}: {spent:.2f} s, {found['all weights'] / spent:.2f} x")
    steps = measure.seconds_in_turns(
        {"all weights": updates(whole), "LoRA": updates(adapted)}, args.repeats
    )
    for name, model in (("all weights", whole), ("LoRA", adapted)):
        count = sum(p.numel() for p in model.unwrapped()[0].parameters() if p.requires_grad)
        print(
            f"update, {name}: {steps[name]:.2f} s, {steps['all weights'] / steps[name]:.2f} x; "
            f"{count:,} weights trained, {megabytes_of_training(model):.1f} MB of gradients and "
            "optimizer"
        )


if __name__ == "__main__":
    main()
