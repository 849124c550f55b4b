# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""One GPU, bf16: generation, log-probs and updates against Hugging Face's model with PyTorch's
fused AdamW, and generation against vLLM where it is installed, on the same weights and the same
samples. vLLM gives the log-prob of each chosen token, as a rollout needs it.

    python benchmarks/one_gpu.py

The model has the shape of TinyLlama (1.1 billion weights) and counts down, so that both give
responses of the same lengths (`benchmarks/countdown.py`). The cases are those of `generate.py` and
`updates.py` in sizes that fill a GPU; the measure are seconds on the clock. TFLOP/s count two
operations for each weight and token, six in updates, and no padding.
"""

import contextlib
import functools
import importlib.util
import os
import statistics
from collections.abc import Callable
from typing import Any

import countdown
import generate
import measure
import torch
import updates

SHAPE, PRECISION = countdown.TINY_LLAMA, "bf16"
PROMPT = 256
CASES = {
    "64 rows, 256 + 128 tokens": generate.Case(countdown.fixed_lengths(64), 64, PROMPT),
    "256 rows, 256 + 128 tokens": generate.Case(countdown.fixed_lengths(256), 256, PROMPT),
    "128 skewed responses, 64 slots": generate.Case(countdown.skewed_lengths(128), 64, PROMPT),
    "prefill: 4 responses to each of 16 prompts of 768 tokens": generate.Case(
        torch.ones(16, dtype=torch.int64), 64, prompt=768, copies=4
    ),
}
SIZES = updates.Sizes(samples=64, prompt=384, micro_batch=8, forward_batch=16)
OPERATIONS = {updates.LOGPROBS: 2, updates.UPDATE: 6}  # for each weight and token
Functions = dict[str, Callable[[], object]]


def build_ours(at: countdown.Folders) -> Functions:
    return generate.build_ours(at, PRECISION, CASES) | updates.build_ours(at, PRECISION, SIZES)


def build_peer(at: countdown.Folders) -> Functions:
    return generate.build_peer(at, PRECISION, CASES) | updates.build_peer(at, PRECISION, SIZES)


def build_vllm(at: countdown.Folders) -> Functions:
    """vLLM's generation of each case, in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    model = LLM(
        model=str(at.hugging_face),
        dtype="bfloat16",
        max_model_len=countdown.POSITIONS,
        gpu_memory_utilization=0.3,  # the other sides have their models there too
        enable_prefix_caching=False,  # the same prompts come again
    )

    def run(case: generate.Case) -> None:
        prompts = [{"prompt_token_ids": row} for row in case.prompts.tolist()]
        params = [
            SamplingParams(n=case.copies, max_tokens=int(case.lengths.max()), logprobs=0, seed=row)
            for row in range(len(prompts))
        ]
        outputs = model.generate(prompts, params, use_tqdm=False)
        found = [len(each.token_ids) for output in outputs for each in output.outputs]
        assert found == case.expected.tolist(), found

    return {name: functools.partial(run, case) for name, case in CASES.items()}


def warm_turns(
    sides: dict[str, measure.Side], case: str, repeats: int
) -> dict[str, measure.Figures]:
    """`measure.in_turns`; kernels are chosen, and some compiled, at the first sight of a shape."""
    for side in sides.values():
        side.run(case)
    return measure.in_turns(sides, case, repeats)


def row(name: str, figures: dict[str, measure.Figures], **more: Any) -> measure.Row:
    """Median seconds on the clock of both sides, and their ratio."""
    ours, peer = (statistics.median(figures[side].wall) for side in ("ours", "peer"))
    spreads = [
        (max(figures[side].wall) - min(figures[side].wall)) / statistics.median(figures[side].wall)
        for side in ("ours", "peer")
    ]
    if "vLLM" in figures:
        vllm = statistics.median(figures["vLLM"].wall)
        texts = {"vLLM, s": round(vllm, 3), "ratio to vLLM": round(vllm / ours, 2)}
    else:
        texts = {}
    found = {
        "case": name,
        "ours, s": round(ours, 3),
        "peer, s": round(peer, 3),
        "ratio": round(peer / ours, 2),
        **texts,
        "spread": ", ".join(f"{spread:.0%}" for spread in spreads),
        **{key: round(value / ours) for key, value in more.items()},
    }
    print(found, flush=True)  # a run that is cut off leaves what it has found
    return found


def main() -> None:
    args = measure.arguments(__doc__, repeats=3).parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    rows, tables = [], []
    with countdown.folders(SHAPE) as at:
        with contextlib.ExitStack() as stack:
            enter = stack.enter_context
            sides = {
                "ours": enter(measure.Side(build_ours, at)),
                "peer": enter(measure.Side(build_peer, at)),
            }
            generating = dict(sides)
            if importlib.util.find_spec("vllm"):
                generating["vLLM"] = enter(measure.Side(build_vllm, at))
            for name, case in CASES.items():
                figures = warm_turns(generating, name, args.repeats)
                rows.append(row(name, figures, **{"tokens/s": int(case.expected.sum())}))
            weights = SHAPE.weights
            for kind, operations in OPERATIONS.items():
                for name, lengths in SIZES.lengths.items():
                    tokens = int((SIZES.prompt + lengths).sum())
                    work = operations * weights * tokens / 1e12
                    figures = warm_turns(sides, kind + name, args.repeats)
                    tables.append(row(kind + name, figures, **{"TFLOP/s": work}))
    more = {"tables": {"Log-probs and updates": tables}}
    measure.report("one_gpu", "One GPU, generation", rows, args.json, **more)


if __name__ == "__main__":
    main()
