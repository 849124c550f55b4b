# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Memory that `python -m nemo_aligner.plan` predicts, and that real steps of the models take.

    OMP_NUM_THREADS=1 python benchmarks/plan_memory.py

Each case builds a model with its optimizer and runs the phases of its job: generation, log-probs
and one update (actor), scores of reward model and critic and one update (critic), generation and
one update (student), one update (SFT, reward model). Cases of several ranks start as many
processes.

Measured is every allocation of tensor memory, temporaries inside operations included, as PyTorch's
allocator reports it: to the profiler on CPUs, directly on a GPU, where larger cases run. That is
not the resident size of the process, which also holds the interpreter and what the C library has
not given back.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces each start and stop

import countdown  # noqa: E402  (the environment comes first)
import measure as measure_with  # noqa: E402

RESPONSE, MICRO_BATCHES, OPTIMIZER = 8, 2, "distributed_fused_adam"
SMALL = dict(num_layers=4, hidden_size=256, ffn_hidden_size=1024, num_attention_heads=8)
MEDIUM = dict(num_layers=8, hidden_size=512, ffn_hidden_size=1408, num_attention_heads=8)
LARGE = dict(num_layers=8, hidden_size=768, ffn_hidden_size=2048, num_attention_heads=12)
ODD = dict(
    num_layers=7,
    hidden_size=384,
    ffn_hidden_size=1000,
    num_attention_heads=6,
    num_query_groups=3,
    kv_channels=80,
)
LLAMA = dict(
    normalization="rmsnorm",
    activation="swiglu",
    position_embedding_type="rope",
    bias=False,
    share_embeddings_and_output_weights=False,
)
GPT2 = dict(
    normalization="layernorm",
    activation="gelu",
    position_embedding_type="learned_absolute",
    bias=True,
    share_embeddings_and_output_weights=True,
)
FULL = dict(
    activations_checkpoint_granularity="full",
    activations_checkpoint_method="uniform",
    activations_checkpoint_num_layers=1,
)
LORA_KEYS = dict(variant="canonical", adapter_dim=16)


def _lora(*targets: str) -> dict[str, Any]:
    tuning = dict(LORA_KEYS, target_modules=list(targets))
    return dict(peft=dict(peft_scheme="lora", lora_tuning=tuning))


EXPERTS = dict(num_moe_experts=4, moe_router_topk=2)
SIZES = dict(
    tp="tensor_model_parallel_size",
    pp="pipeline_model_parallel_size",
    cp="context_parallel_size",
    ep="expert_model_parallel_size",
)
CONFIGS = dict(actor="gpt_ppo_actor", critic="gpt_ppo_critic", sft="gpt_sft", rm="training_rm")
CONFIGS |= dict(student="gpt_knowledge_distillation")
TOP_K = 16  # logits of a teacher


def _case(role: str, *model: dict[str, Any], vocab: int, seq: int, mbs: int, **keys: Any) -> dict:
    merged = {name: value for part in model for name, value in part.items()}
    return dict(role=role, model=merged, vocab=vocab, seq=seq, mbs=mbs, **keys)


def _split(ranks: int, sequence_parallel: bool = False, **sizes: int) -> dict[str, Any]:
    split: dict[str, Any] = {SIZES[name]: size for name, size in sizes.items()}
    return dict(ranks=ranks, split=split | dict(sequence_parallel=sequence_parallel))


# Numbers of weights are of whole models.
CASES: dict[str, dict[str, Any]] = {
    "actor 8M fp32": _case("actor", SMALL, LLAMA, vocab=8192, seq=256, mbs=2, forward=4),
    "actor 8M bf16": _case(
        "actor", SMALL, LLAMA, vocab=8192, seq=512, mbs=1, forward=2, rollout=4, precision="bf16"
    ),
    "actor 8M fp32, long": _case("actor", SMALL, LLAMA, vocab=8192, seq=1024, mbs=1),
    "actor 8M fp32, full recomputation": _case(
        "actor", SMALL, LLAMA, FULL, dict(num_layers=8), vocab=1024, seq=512, mbs=2
    ),
    "actor 41M fp32, grouped queries": _case(
        "actor", MEDIUM, LLAMA, dict(num_query_groups=2), vocab=16384, seq=256, mbs=2
    ),
    "actor 41M bf16": _case(
        "actor", MEDIUM, LLAMA, vocab=16384, seq=256, mbs=1, forward=2, precision="bf16"
    ),
    "actor 106M fp32": _case("actor", LARGE, LLAMA, vocab=32000, seq=256, mbs=1, rollout=4),
    "actor like GPT-2, 21M fp32": _case("actor", MEDIUM, GPT2, vocab=8192, seq=256, mbs=2),
    "actor of experts, 28M fp32": _case(
        "actor", SMALL, LLAMA, EXPERTS, dict(num_layers=8), vocab=1024, seq=256, mbs=2
    ),
    "critic 33M fp32": _case("critic", MEDIUM, LLAMA, vocab=16384, seq=256, mbs=2, forward=4),
    "critic 33M bf16": _case(
        "critic", MEDIUM, LLAMA, vocab=16384, seq=256, mbs=2, precision="bf16"
    ),
    "reward model like GPT-2, 20M fp32": _case("rm", MEDIUM, GPT2, vocab=8192, seq=256, mbs=1),
    "SFT 41M fp32": _case("sft", MEDIUM, LLAMA, vocab=16384, seq=256, mbs=4),
    "student 41M fp32": _case("student", MEDIUM, LLAMA, vocab=16384, seq=256, mbs=2),
    "student 41M bf16": _case(
        "student", MEDIUM, LLAMA, vocab=16384, seq=256, mbs=4, precision="bf16"
    ),
    "actor 28M bf16, odd sizes": _case(
        "actor", LLAMA, ODD, vocab=10000, seq=300, mbs=3, forward=5, rollout=7, precision="bf16"
    ),
    "SFT like GPT-2, 21M bf16, adamw": _case(
        "sft", MEDIUM, GPT2, vocab=8192, seq=200, mbs=3, precision="bf16", optimizer="adamw"
    ),
    "actor 41M fp32, LoRA": _case(
        "actor", MEDIUM, LLAMA, _lora("all"), vocab=16384, seq=256, mbs=2
    ),
    "actor 41M bf16, LoRA of queries": _case(
        "actor",
        MEDIUM,
        LLAMA,
        _lora("attention_qkv"),
        vocab=16384,
        seq=256,
        mbs=1,
        forward=2,
        precision="bf16",
    ),
    "critic 33M fp32, LoRA": _case(
        "critic", MEDIUM, LLAMA, _lora("attention"), vocab=16384, seq=256, mbs=2, forward=4
    ),
    "actor 8M fp32, LoRA, TP2 with sequence parallelism": _case(
        "actor", SMALL, LLAMA, _lora("all"), vocab=8192, seq=256, mbs=2, **_split(2, True, tp=2)
    ),
    "actor 8M fp32, TP2": _case(
        "actor", SMALL, LLAMA, vocab=8192, seq=256, mbs=2, **_split(2, tp=2)
    ),
    "actor 8M fp32, TP2 with sequence parallelism": _case(
        "actor", SMALL, LLAMA, vocab=8192, seq=256, mbs=2, **_split(2, True, tp=2)
    ),
    "actor 8M fp32, PP2": _case(
        "actor", SMALL, LLAMA, vocab=8192, seq=256, mbs=2, **_split(2, pp=2)
    ),
    "actor 8M fp32, CP2": _case(
        "actor", SMALL, LLAMA, vocab=8192, seq=256, mbs=2, **_split(2, cp=2)
    ),
    "actor 8M fp32, DP2": _case("actor", SMALL, LLAMA, vocab=8192, seq=256, mbs=2, ranks=2),
    "actor of experts, 28M fp32, EP2": _case(
        "actor",
        SMALL,
        LLAMA,
        EXPERTS,
        dict(num_layers=8),
        vocab=1024,
        seq=256,
        mbs=2,
        **_split(2, ep=2),
    ),
    "critic 33M fp32, TP2 with sequence parallelism": _case(
        "critic", MEDIUM, LLAMA, vocab=16384, seq=256, mbs=2, **_split(2, True, tp=2)
    ),
}
# Of one GPU.
TINY_LLAMA = dict(
    num_layers=22,
    hidden_size=2048,
    ffn_hidden_size=5632,
    num_attention_heads=32,
    num_query_groups=4,
)
_LARGE = dict(vocab=32000, seq=1024, precision="bf16")
GPU_CASES = {
    "actor 1.1B bf16": _case("actor", TINY_LLAMA, LLAMA, mbs=8, forward=16, rollout=64, **_LARGE),
    "actor 1.1B bf16, LoRA": _case(
        "actor", TINY_LLAMA, LLAMA, _lora("all"), mbs=8, forward=16, rollout=64, **_LARGE
    ),
    "critic 1.1B bf16": _case("critic", TINY_LLAMA, LLAMA, mbs=8, forward=16, **_LARGE),
    "SFT 1.1B bf16": _case("sft", TINY_LLAMA, LLAMA, mbs=8, **_LARGE),
    "SFT 1.1B bf16, full recomputation": _case("sft", TINY_LLAMA, LLAMA, FULL, mbs=8, **_LARGE),
    "student 1.1B bf16": _case("student", TINY_LLAMA, LLAMA, mbs=8, **_LARGE),
    "SFT like GPT-2, 355M bf16": _case(
        "sft",
        GPT2,
        dict(num_layers=24, hidden_size=1024, ffn_hidden_size=4096, num_attention_heads=16),
        mbs=8,
        **_LARGE | dict(vocab=50257),
    ),
}


def model_section(case: dict[str, Any], tokenizer: str) -> dict[str, Any]:
    """Section `model` of the case."""
    seq, mbs, split = case["seq"], case["mbs"], case.get("split", {})
    section = {
        **case["model"],
        "encoder_seq_length": seq,
        "max_position_embeddings": seq,
        "precision": case.get("precision", 32),
        "micro_batch_size": mbs,
        "global_batch_size": MICRO_BATCHES * mbs,
        "forward_micro_batch_size": case.get("forward", mbs),
        "tokenizer": {"library": "huggingface", "type": tokenizer},
        "optim": {
            "name": case.get("optimizer", OPTIMIZER),
            "lr": 1e-4,
            "sched": {"name": "constant"},
        },
        **split,
    }
    if case["role"] == "actor":
        section["ppo"] = {
            "forward_micro_batch_size": case.get("forward", mbs),
            "rollout_micro_batch_size": case.get("rollout", mbs),
            "length_params": {"max_length": RESPONSE, "min_length": 1},
        }
    if case["role"] == "student":
        lengths = {"max_length": RESPONSE, "min_length": 1}
        on_policy = {"fraction": 1.0, "length_params": lengths}
        section["knowledge_distillation"] = {"outside_top_k": "bucket", "on_policy": on_policy}
    return section


class PhasesOnGpu:
    """Runs the phases of a case, and asks PyTorch's allocator after each.

    Attributes:
        figures: by phase: its peak, and what is in use after it, in bytes since the start.
    """

    def __init__(self) -> None:
        import torch

        self.figures: dict[str, tuple[int, int]] = {}
        self._before = torch.cuda.memory_allocated()

    def __call__(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        import torch

        torch.cuda.reset_peak_memory_stats()
        result = function(*arguments)
        figures = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        self.figures[name] = figures[0] - self._before, figures[1] - self._before
        return result


class Phases:
    """Runs the phases of a case, each marked for the profiler."""

    def __call__(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        import torch

        with torch.profiler.record_function(f"phase:{name}"):
            return function(*arguments)


def read_phases(profiler: Any) -> dict[str, tuple[int, int]]:
    """By phase: its peak, and what is in use after it, in bytes since the profiler began."""
    events = list(profiler.profiler.kineto_results.events())
    spans = {
        event.name().removeprefix("phase:"): (event.start_ns(), event.end_ns())
        for event in events
        if event.name().startswith("phase:")
    }
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    result = {}
    for name, (start, end) in spans.items():
        used = peak = 0
        for time_ns, nbytes in changes:
            if time_ns > end:
                break
            if time_ns >= start:
                peak = max(peak, used, used + nbytes)
            used += nbytes
        result[name] = (peak, used)
    return result


# --- the phases of each job ----------------------------------------------------------------------


def run_case(case: dict[str, Any], section: dict[str, Any], phase: Phases | PhasesOnGpu) -> None:
    """Build the model of the case and run the phases of its job."""
    import torch
    from omegaconf import OmegaConf

    from nemo_aligner.models.nlp.gpt.gpt_sft_model import GPTSFTModel
    from nemo_aligner.models.nlp.gpt.megatron_gpt_critic import MegatronGPTCriticModel
    from nemo_aligner.models.nlp.gpt.megatron_gpt_knowledge_distillation import (
        GPTKnowledgeDistillationModel,
    )
    from nemo_aligner.models.nlp.gpt.megatron_gpt_ppo_actor import MegatronGPTActorModel
    from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel
    from nemo_aligner.training.optim import train_on_batch

    classes = {
        "actor": MegatronGPTActorModel,
        "critic": MegatronGPTCriticModel,
        "sft": GPTSFTModel,
        "rm": MegatronGPTRewardModel,
        "student": GPTKnowledgeDistillationModel,
    }

    def setup() -> Any:
        model = classes[case["role"]](OmegaConf.create(section))
        model.init_peft(model.cfg.get("peft"))
        model.setup_megatron_optimization(10)
        return model

    def tokens(samples: int, width: int) -> torch.Tensor:
        return torch.randint(0, case["vocab"] - 2, (samples, width))

    torch.manual_seed(1)
    seq, rows = case["seq"], MICRO_BATCHES * case["mbs"]
    model = phase("setup", setup)
    forward = tokens(case.get("forward", case["mbs"]), seq)
    lengths = torch.full((len(forward),), seq)
    full, short = torch.ones(rows, seq), torch.ones(rows, seq - 1)
    if case["role"] == "actor":
        phase("copies", model.set_reference_policy)
        model.prepare_for_inference()
        prompts = tokens(case.get("rollout", case["mbs"]), seq - RESPONSE)
        batch = {"text": prompts, "length": torch.full((len(prompts),), seq - RESPONSE)}
        phase("generation", model.infer, batch)
        phase("log-probs", model.get_inference_log_probs, forward)
        phase("more copies", model.get_init_policy_logprobs, forward)
        model.finish_inference()
        train_batch = {
            "response_tokens": tokens(rows, seq),
            "is_end": torch.ones(rows, dtype=torch.bool),
            "mask": short,
            "advantages": torch.randn(rows, seq - 1),
            "prev_logprobs": -8.0 * short,
        }
    elif case["role"] == "critic":
        model.has_trained_head = True  # its weights are random; only their memory counts
        phase("copies", model.set_reward_model)
        model.prepare_for_inference()
        phase("more copies", model.infer_rm_critic, (forward, lengths))
        phase("scores", model.infer_rm_critic, (forward, lengths))
        model.finish_inference()
        train_batch = {
            "tokens": tokens(rows, seq),
            "mask": short,
            "returns": torch.randn(rows, seq - 1),
            "prev_values": torch.randn(rows, seq - 1),
        }
    elif case["role"] == "student":
        prompts, lengths = tokens(rows, seq - RESPONSE), torch.full((rows,), seq - RESPONSE)
        phase("generation", model.respond, prompts, lengths, torch.arange(rows))
        logits = torch.randn(rows, seq, TOP_K).sort(descending=True).values
        train_batch = {
            "tokens": tokens(rows, seq),
            "labels": tokens(rows, seq),
            "loss_mask": full,
            "topk_logits": logits,
            "topk_token_ids": torch.arange(TOP_K).expand_as(logits).contiguous(),
            "log_sum_exp_logits": logits.logsumexp(-1) + 1,
        }
    elif case["role"] == "sft":
        train_batch = {"tokens": tokens(rows, seq), "labels": tokens(rows, seq), "loss_mask": full}
    else:
        train_batch = {
            "chosen": tokens(rows, seq),
            "rejected": tokens(rows, seq),
            "chosen_length": torch.full((rows,), seq),
            "rejected_length": torch.full((rows,), seq),
            "loss_mask": full,
        }
    if case["role"] in ("actor", "critic"):
        model.prepare_for_training()
    parts = model, model._optimizer, model._scheduler
    phase("update", train_on_batch, *parts, train_batch, 1.0)


def measure(case: dict[str, Any], section: dict[str, Any]) -> dict[str, float]:
    """Peak bytes of each phase on this rank, without copies that a GPU job has in host memory,
    and under `host` these copies.
    """
    import torch

    from nemo_aligner.parallel import parallel_state

    gc.collect()
    if torch.cuda.is_available():
        return measure_on_gpu(case, section)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        run_case(case, section, Phases())
    figures = read_phases(profiler)
    parallel_state.destroy()
    standing = before = figures.pop("setup")[1]
    result = {"standing": float(standing)}
    for name, (peak, after) in figures.items():
        if "copies" not in name:
            result[name] = float(peak - (before - standing))
        before = after
    if "copies" in figures:
        result["host"] = float(figures["more copies"][1] - standing)
    return result


def measure_on_gpu(case: dict[str, Any], section: dict[str, Any]) -> dict[str, float]:
    """Peak bytes of each phase on the GPU; copies are in host memory there."""
    from nemo_aligner.parallel import parallel_state
    from nemo_aligner.parallel.device import clear_memory

    phases = PhasesOnGpu()
    run_case(case, section, phases)
    parallel_state.destroy()
    clear_memory()
    result = {"standing": float(phases.figures.pop("setup")[1])}
    return result | {
        name: float(peak)
        for name, (peak, _after) in phases.figures.items()
        if "copies" not in name
    }


def predict(case: dict[str, Any], section: dict[str, Any], rank: int) -> dict[str, float]:
    """The same figures as `measure`, from the formulas."""
    import torch

    from nemo_aligner.config.defaults import complete_model
    from nemo_aligner.config.parallel_rules import pad_vocab_size
    from nemo_aligner.config.values import plain_dict
    from nemo_aligner.models.nlp.gpt.megatron_config import use_transformer_engine
    from nemo_aligner.plan.memory import GRADIENTS, WEIGHTS, Workload, rank_memory
    from nemo_aligner.plan.memory import OPTIMIZER as STATES
    from nemo_aligner.plan.parameters import Split, read_architecture

    model = plain_dict(complete_model(section, CONFIGS[case["role"]]), resolve=True)
    sizes = {short: case.get("split", {}).get(key, 1) for short, key in SIZES.items()}
    ranks = case.get("ranks", 1)
    dp = ranks // (sizes["tp"] * sizes["pp"] * sizes["cp"])
    split = Split(**sizes, dp=dp, sequence_parallel=bool(model["sequence_parallel"]))
    rows = pad_vocab_size(case["vocab"], model["make_vocab_size_divisible_by"], split.tp)
    is_actor, is_critic = case["role"] == "actor", case["role"] == "critic"
    rollout = case.get("rollout", case["mbs"]) if is_actor else 0
    if case["role"] == "student":
        rollout = MICRO_BATCHES * case["mbs"]
    architecture = read_architecture(model, rows, head_outputs=case["role"] in ("critic", "rm"))
    workload = Workload(
        width=case["seq"],
        samples=case["mbs"] * (2 if case["role"] == "rm" else 1),
        micro_batches=MICRO_BATCHES,
        forward_samples=case.get("forward", case["mbs"]) if is_actor or is_critic else 0,
        rollout_samples=rollout,
        response=RESPONSE,
        merges=is_actor and architecture.lora is not None,
        reference=is_actor,
        swaps=is_critic,
        recompute=model["activations_checkpoint_granularity"],
        recompute_layers=model["activations_checkpoint_num_layers"] or 1,
        block=model["activations_checkpoint_method"] == "block",
        distributed_optimizer=case.get("optimizer", OPTIMIZER) == OPTIMIZER,
        offloads=is_actor and torch.cuda.is_available(),
        on_gpu=use_transformer_engine(),
    )
    memory = rank_memory(architecture, split, rank * split.pp // ranks, workload)
    parts = memory.phases["update"]
    result = {"standing": parts[WEIGHTS] + parts[GRADIENTS] + parts[STATES]}
    result |= {name: sum(phase.values()) for name, phase in memory.phases.items()}
    return result | {"host": float(sum(memory.host.values()))}


# --- processes -----------------------------------------------------------------------------------


def work(names: list[str], folder: Path) -> None:
    """Measure and predict the cases on this rank, and write one line of JSON for each."""
    import torch

    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", 0))
    with (folder / f"rank{rank}-of-{os.environ.get('WORLD_SIZE', 1)}.jsonl").open("a") as file:
        for name in names:
            case = (CASES | GPU_CASES)[name]
            tokenizer = folder / f"rank{rank}" / f"tokenizer{case['vocab']}"
            countdown.write_tokenizer(tokenizer, case["vocab"])
            section = model_section(case, str(tokenizer))
            line = [name, rank, predict(case, section, rank), measure(case, section)]
            print(json.dumps(line), file=file, flush=True)


def table(folder: Path) -> str:
    """Markdown: one row per case and phase, of the rank that needs most; `beyond` compares what a
    phase needs beside weights, gradients and optimizer.
    """
    rows: dict[tuple[str, str], tuple[dict, dict]] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            name, _rank, predicted, measured = json.loads(line)
            for phase, value in measured.items():
                key = name, phase
                if key not in rows or value > rows[key][1][phase]:
                    rows[key] = predicted, measured
    lines = [
        "| case | phase | predicted | measured | error | error beyond |",
        "|---|---|---|---|---|---|",
    ]
    worst = 0.0
    for (name, phase), (predicted, measured) in rows.items():
        if phase == "host" and not predicted[phase]:
            continue  # no copies; what is measured are buffers of communication
        error = predicted[phase] / measured[phase] - 1
        worst = max(worst, abs(error))
        beyond = ""
        if phase not in ("standing", "host"):
            extra = [figures[phase] - figures["standing"] for figures in (predicted, measured)]
            beyond = f"{extra[0] / extra[1] - 1:+.1%}"
        sizes = [f"{figures[phase] / 2**20:.1f} MiB" for figures in (predicted, measured)]
        lines.append(f"| {name} | {phase} | {sizes[0]} | {sizes[1]} | {error:+.1%} | {beyond} |")
    return "\n".join([*lines, "", f"Largest error: {worst:.1%}"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    known = CASES | GPU_CASES
    parser.add_argument(
        "cases", nargs="*", help=f"of {', '.join(known)}; default: all of a CPU, or of a GPU"
    )
    args = parser.parse_args()
    import torch

    names = args.cases or list(GPU_CASES if torch.cuda.is_available() else CASES)
    if args.worker:
        work(names, args.worker)
        return
    with tempfile.TemporaryDirectory() as folder:
        alone = [name for name in names if known[name].get("ranks", 1) == 1]
        try:
            command = [sys.executable, __file__, "--worker", folder]
            if alone:
                measure_with.run_ranks([*command, *alone], 1)
            for name in names:  # process groups cannot be made anew, so in new processes
                if name not in alone:
                    measure_with.run_ranks([*command, name], known[name]["ranks"])
        finally:
            print(table(Path(folder)))


if __name__ == "__main__":
    main()
