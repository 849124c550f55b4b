# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Peak memory and time of log-probs and entropy over the vocabulary: the blockwise computation of
`vocab_parallel`, compared with the naive one.

    OMP_NUM_THREADS=1 python benchmarks/logprob_memory.py

The naive way is `log_softmax` of the whole `[B, S, V]` in float32 and a gather; with tensor
parallelism the slices of the vocabulary are gathered first. Both ways run in the same process, in
turns, and their results are compared.

Every allocation of tensor memory counts, temporaries inside operations included: on a CPU as
PyTorch's allocator reports it to the profiler, on a GPU by `torch.cuda.max_memory_allocated`.
"Beyond" is the peak beside the logits, which exist before; the gradient of the logits, if there is
one, is part of it. "With" adds the logits. Time is the best of a few runs, without the profiler.
"""

import argparse
import functools
import os
import time
from collections.abc import Callable, Iterator

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces each start and stop

import torch  # noqa: E402  (the environment comes first)
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402

from nemo_aligner.config.defaults import complete_model  # noqa: E402
from nemo_aligner.models.nlp.gpt.megatron_config import build_transformer_config  # noqa: E402
from nemo_aligner.models.nlp.gpt.megatron_layers import GPTModel, build_layer_spec  # noqa: E402
from nemo_aligner.parallel import parallel_state  # noqa: E402
from nemo_aligner.parallel.device import get_device  # noqa: E402
from nemo_aligner.parallel.vocab_parallel import (  # noqa: E402
    from_parallel_logits_to_logprobs,
    logprobs_and_entropy,
)
from nemo_aligner.servers.ports import find_free_port  # noqa: E402

CASES = ("log-probs, inference", "log-probs, training", "log-probs and entropy, training")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HEADER = (
    "| case | V | logits | TP | naive, beyond | blockwise, beyond | ratio "
    "| naive, with | blockwise, with | ratio | naive, s | blockwise, s | ratio |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def peak_bytes(function: Callable[[], object]) -> int:
    """Peak of the tensor memory while `function` runs, beyond what was in use before."""
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        function()
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    used = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        used += event.nbytes()
        peak = max(peak, used)
    return peak


def naive(logits: torch.Tensor, tokens: torch.Tensor, case: str) -> list[torch.Tensor]:
    """Log-probs `[B, S-1]`, and the entropy if `case` has it, from logits `[B, S, V/TP]` and
    tokens `[B, S]`.
    """
    several_ranks = parallel_state.get_tensor_model_parallel_world_size() > 1
    whole = gather_from_tensor_model_parallel_region(logits) if several_ranks else logits
    logprobs = whole.float().log_softmax(-1)
    # The last column, which predicts nothing, is dropped at the end: slicing the logits would copy
    # them.
    results = [logprobs.gather(-1, tokens.roll(-1, 1).unsqueeze(-1)).squeeze(-1)]
    if "entropy" in case:
        results.append(-(logprobs.exp() * logprobs).sum(-1))
    return [result[:, :-1] for result in results]


def blockwise(logits: torch.Tensor, tokens: torch.Tensor, case: str) -> list[torch.Tensor]:
    """As `naive`; the gradient takes the place of the logits, as in the models' training."""
    if "entropy" in case:
        return list(logprobs_and_entropy(logits, tokens, overwrite_logits=True))
    inference = "inference" in case
    return [
        from_parallel_logits_to_logprobs(
            logits, tokens, inference_only=inference, overwrite_logits=True
        )
    ]


def run(way, logits: torch.Tensor, tokens: torch.Tensor, case: str) -> list[torch.Tensor]:
    """Results of `case`; with training, also the gradient of their sum by the logits."""
    with torch.set_grad_enabled("training" in case):
        results = way(logits, tokens, case)
        if "training" in case:
            results += torch.autograd.grad(sum(result.sum() for result in results), logits)
    return [result.detach() for result in results]


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(case: str, vocab: int, dtype: str, elements: int, repeats: int) -> dict[str, float]:
    """Peak bytes and best seconds of both ways.

    Args:
        elements: size of the logits of all ranks together, approximately.
        repeats: runs per timing.
    """
    size, rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    torch.manual_seed(0)
    tokens = torch.randint(0, vocab, (2, max(2, elements // vocab // 2)), device=get_device())
    torch.manual_seed(1 + rank)
    source = torch.randn(
        *tokens.shape, vocab // size, dtype=DTYPES[dtype], device=get_device()
    ).requires_grad_()

    def logits():
        return source.clone()  # not a leaf, as in a model

    expected = run(naive, logits(), tokens, case)
    for mine, theirs in zip(run(blockwise, logits(), tokens, case), expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-2 if dtype == "bf16" else 1e-4)
    del expected, mine, theirs
    figures = {"logits": source.nbytes}
    ways = {"naive": naive, "blockwise": blockwise}
    for name, way in ways.items():
        x = logits()
        figures[f"{name} bytes"] = peak_bytes(functools.partial(run, way, x, tokens, case))
    times = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            x = logits()
            times[name].append(seconds(functools.partial(run, way, x, tokens, case)))
    return figures | {f"{name} s": min(values) for name, values in times.items() if values}


def table_row(case: str, vocab: int, dtype: str, tp: int, f: dict[str, float]) -> str:
    cells = [case, vocab, dtype, tp]
    for extra in (0, f["logits"]):
        a, b = f["naive bytes"] + extra, f["blockwise bytes"] + extra
        cells += [f"{a / 2**20:.1f} MiB", f"{b / 2**20:.1f} MiB", f"{b / a:.3f}"]
    cells += [f"{f['naive s']:.3f}", f"{f['blockwise s']:.3f}"]
    cells += [f"{f['blockwise s'] / f['naive s']:.2f}"]
    return f"| {' | '.join(map(str, cells))} |"


def bf16_model_rows(vocab: int, elements: int) -> Iterator[str]:
    """Peaks of a tiny bf16 GPT, forward and backward, with `Float16Module`'s float32 copy of the
    logits and without it.
    """
    samples, columns = 2, max(2, elements // vocab // 2)
    shape = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 2}
    transformer_config = build_transformer_config(
        complete_model({**shape, "encoder_seq_length": columns, "precision": "bf16"})
    )
    module = GPTModel(
        config=transformer_config,
        transformer_layer_spec=build_layer_spec(transformer_config),
        vocab_size=vocab,
        max_sequence_length=columns,
        parallel_output=True,
    )
    model = Float16Module(transformer_config, module.to(get_device()))
    torch.manual_seed(0)
    tokens = torch.randint(0, vocab, (samples, columns), device=get_device())
    positions = torch.arange(columns, device=get_device()).expand_as(tokens)

    def step(fp32_output: bool, training: bool):
        with torch.set_grad_enabled(training):
            logits = model(tokens, positions, None, fp32_output=fp32_output)
            logprobs = from_parallel_logits_to_logprobs(logits, tokens, overwrite_logits=True)
            del logits
            if training:
                model.zero_grad()
                logprobs.sum().backward()
        return logprobs.detach()

    for training in (False, True):
        step(True, training)  # allocates what is kept
        if not torch.equal(step(True, training), step(False, training)):
            raise AssertionError("log-probs from bf16 logits and from their float32 copy differ")
        peaks = [
            peak_bytes(functools.partial(step, fp32_output, training)) / 2**20
            for fp32_output in (True, False)
        ]
        name = "forward and backward" if training else "forward"
        sizes = [samples * columns * vocab * 2 / 2**20, *peaks]
        cells = " | ".join(f"{size:.1f} MiB" for size in sizes)
        yield f"| {name} | {cells} | {peaks[1] / peaks[0]:.3f} |"


def _rank_main(rank: int, tp: int, port: int, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": tp,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in environment.items()})
    parallel_state.initialize(tensor_model_parallel_size=tp)
    for case in CASES:
        for vocab in arguments.vocab:
            for dtype in arguments.logits:
                figures = measure(case, vocab, dtype, arguments.elements, arguments.repeats)
                if rank == 0:
                    print(table_row(case, vocab, dtype, tp, figures), flush=True)
    if tp == 1 and "bf16" in arguments.logits:
        arguments.results.extend(bf16_model_rows(max(arguments.vocab), arguments.elements))
    parallel_state.destroy()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--vocab", type=int, nargs="+", default=[32768, 131072], help="sizes of the vocabulary, V"
    )
    parser.add_argument(
        "--logits",
        nargs="+",
        default=list(DTYPES),
        choices=list(DTYPES),
        help="dtypes of the logits",
    )
    parser.add_argument(
        "--tp", type=int, nargs="+", default=[1, 2], help="numbers of tensor-parallel ranks"
    )
    parser.add_argument("--elements", type=int, default=2**23, help="B * S * V")
    parser.add_argument("--repeats", type=int, default=3, help="runs per timing")
    arguments = parser.parse_args()
    arguments.results = []
    print(HEADER, flush=True)
    for tp in arguments.tp:
        if tp == 1:
            _rank_main(0, 1, find_free_port(), arguments)
        else:
            torch.multiprocessing.spawn(
                _rank_main, args=(tp, find_free_port(), arguments), nprocs=tp
            )
    if arguments.results:
        print(
            "\nA bf16 model of one narrow layer, both with blockwise log-probs: peak memory of a "
            "pass\n"
        )
        print(
            "| pass | bf16 logits | with Float16Module's float32 copy | without | ratio "
            "|\n|---|---|---|---|---|"
        )
        print("\n".join(arguments.results))


if __name__ == "__main__":
    main()
