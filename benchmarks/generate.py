# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Generation against Hugging Face's `generate`, on the same weights: fixed and skewed lengths, fp32
and bf16, several responses to one long prompt.

    OMP_NUM_THREADS=1 python benchmarks/generate.py

Both give responses of the same lengths (`benchmarks/countdown.py`), which is checked. The bound is
the time of the matrix products alone, each measured at its shape; `of the bound` is the bound over
ours. With "n slots" ours keeps n samples in its batch, and the peer decodes batches of n.
"""

from collections.abc import Callable
from typing import Any

import countdown
import measure
import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_aligner.generation import GenerationParams

PROMPT = 32
DTYPES = {"32": torch.float32, "bf16": torch.bfloat16}


def peer(model: Any, tokens: Tensor, lengths: Tensor, slots: int, copies: int = 1) -> Callable:
    """Hugging Face's generation in batches of `slots`; checks the lengths."""

    def run() -> None:
        for rows, wanted in zip(tokens.split(slots), lengths.split(slots), strict=True):
            output = model.generate(
                rows,
                attention_mask=torch.ones_like(rows),
                max_new_tokens=int(wanted.max()),
                do_sample=True,
                top_k=0,
                top_p=1.0,
                num_return_sequences=copies,
            )
            responses = output[:, tokens.size(1) :]
            found = torch.where(responses == countdown.END, 1, 0).argmax(1) + 1
            assert torch.equal(found, wanted.repeat_interleave(copies)), found

    return run


def ours(model: Any, tokens: Tensor, lengths: Tensor, slots: int, copies: int = 1) -> Callable:
    """Our generation with `slots` samples at a time; checks the lengths."""
    prompt_lengths = torch.full((len(tokens),), tokens.size(1))
    seeds = torch.arange(len(tokens) * copies)

    def run() -> None:
        params = GenerationParams(max_length=int(lengths.max()))
        rows = [x.repeat_interleave(copies, 0) for x in (tokens, prompt_lengths)]
        for part in zip(*(x.split(slots) for x in (*rows, seeds)), strict=True):
            output = model.generator.generate(*part, params)
            found.append(output.response_lengths - tokens.size(1))
        assert torch.equal(torch.cat(found), lengths.repeat_interleave(copies)), found
        found.clear()

    found: list[Tensor] = []
    return run


def matrix_seconds(rows: int, precision: str, head_rows: int | None = None) -> float:
    """CPU seconds of all matrix products of a pass over `rows` tokens, of which `head_rows` go
    through the output layer; each layer has weights of its own, as in the model.
    """
    hidden, ffn = countdown.HIDDEN, countdown.FFN
    width = hidden + 2 * hidden * countdown.GROUPS // countdown.HEADS
    layer = [(width, hidden), (hidden, hidden), (2 * ffn, hidden), (hidden, ffn)]
    shapes = [(rows, shape) for shape in layer * countdown.LAYERS]
    shapes.append((rows if head_rows is None else head_rows, (countdown.VOCABULARY, hidden)))
    dtype = DTYPES[precision]
    pairs = [
        (torch.randn(count, shape[1], dtype=dtype), torch.randn(shape, dtype=dtype))
        for count, shape in shapes
    ]

    def run() -> None:
        for x, weight in pairs:
            F.linear(x, weight)

    return measure.alternate({"": run}, 20)[""].seconds


def bound(lengths: Tensor, slots: int, precision: str, prompt: int = PROMPT) -> float:
    """CPU seconds of the matrix products, with every step's batch full until the samples run out:
    nothing an engine of `slots` rows does can be less.
    """
    samples = len(lengths)
    prefill = matrix_seconds(min(slots, samples) * prompt, precision, min(slots, samples))
    steps = int(lengths.sum() - samples) / slots
    return prefill * samples / min(slots, samples) + steps * matrix_seconds(slots, precision)


def case(
    name: str, models: dict[str, Any], lengths: Tensor, slots: int, precision: str, repeats: int
) -> measure.Row:
    tokens = countdown.prompts(lengths)
    figures = measure.alternate(
        {
            "ours": ours(models["ours"], tokens, lengths, slots),
            "peer": peer(models["peer"], tokens, lengths, slots),
        },
        repeats,
    )
    least = bound(lengths, slots, precision)
    share = f"{least / figures['ours'].seconds:.0%}"
    rate = round(int(lengths.sum()) / figures["ours"].seconds)
    extra = {"bound, CPU s": round(least, 3), "of the bound": share, "tokens per CPU s": rate}
    return measure.pair_row(name, figures, **extra)


def long_prompts(models: dict[str, Any], repeats: int) -> measure.Row:
    """16 samples, 4 responses to each of 4 prompts of 512 tokens, of a single token."""
    lengths = torch.ones(4, dtype=torch.int64)
    tokens = countdown.prompts(lengths, 512)
    figures = measure.alternate(
        {
            "ours": ours(models["ours"], tokens, lengths, 16, 4),
            "peer": peer(models["peer"], tokens, lengths, 16, 4),
        },
        repeats,
    )
    return measure.pair_row("prefill, 4 prompts of 512 tokens, 4 responses each", figures)


def cases(args: Any) -> list[measure.Row]:
    rows = []
    with countdown.folders() as at:
        for precision in args.precision:
            models = {
                "ours": countdown.load_actor(at, precision),
                "peer": countdown.load_peer(at, precision),
            }
            for model in (models["ours"],):
                model.set_eval()
            for slots in (16, 64):
                name = f"{slots} rows, 32 + 128 tokens, {precision}"
                fixed = countdown.fixed_lengths(slots)
                rows.append(case(name, models, fixed, slots, precision, args.repeats))
            for slots in (16, 64):
                name = f"64 skewed responses, {slots} slots, {precision}"
                skewed = countdown.skewed_lengths(64)
                rows.append(case(name, models, skewed, slots, precision, args.repeats))
            if precision == "32":
                rows.append(long_prompts(models, args.repeats))
    return rows


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--precision", nargs="+", default=["32", "bf16"], choices=list(DTYPES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = cases(args)
    measure.report("generate", "Generation against Hugging Face", rows, args.json)


if __name__ == "__main__":
    main()
