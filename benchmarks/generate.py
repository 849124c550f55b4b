# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Generation against Hugging Face's `generate`, on the same weights: fixed and skewed lengths,
fp32 and bf16, several responses to one long prompt, two ranks.

    OMP_NUM_THREADS=1 python benchmarks/generate.py

Both give responses of the same lengths (`benchmarks/countdown.py`), which is checked. The bound is
the time of the matrix products alone, each measured at its shape; `of the bound` is the bound over
ours. With "n slots" ours keeps n samples in its batch, and the peer decodes batches of n. Of two
ranks each generates half of the responses (DP 2), or all of them with half of the weights (TP 2);
of the peer two processes generate half each. CPU seconds are those of both.
"""

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import countdown
import measure
import torch
from torch import Tensor

from nemo_aligner.parallel.device import packed_linear

PRECISIONS = {"32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Case:
    """Prompts of one width, and how many samples are decoded at a time.

    Attributes:
        lengths: int64 `[B]`, of the responses.
        slots: samples at a time.
        prompt: tokens of each prompt.
        copies: responses to each.
    """

    lengths: Tensor
    slots: int
    prompt: int = 32
    copies: int = 1

    @property
    def prompts(self) -> Tensor:
        """int64 `[B, prompt]`."""
        return countdown.prompts(self.lengths, self.prompt)

    @property
    def expected(self) -> Tensor:
        """int64 `[B * copies]`, lengths of the responses."""
        return self.lengths.repeat_interleave(self.copies)


CASES = {
    "16 rows, 32 + 128 tokens": Case(countdown.fixed_lengths(16), 16),
    "64 rows, 32 + 128 tokens": Case(countdown.fixed_lengths(64), 64),
    "64 skewed responses, 16 slots": Case(countdown.skewed_lengths(64), 16),
    "64 skewed responses, 64 slots": Case(countdown.skewed_lengths(64), 64),
    "prefill: 4 responses to each of 4 prompts of 512 tokens": Case(
        torch.ones(4, dtype=torch.int64), 16, prompt=512, copies=4
    ),
}


@dataclass
class RanksCase:
    """A case that two ranks share.

    Attributes:
        whole: the case.
        ways: of `TENSOR_PARALLEL`, those in which ours is measured.
    """

    whole: Case
    ways: tuple[str, ...]

    def of_rank(self, rank: int, ranks: int) -> Case:
        """What one of `ranks` data-parallel ranks generates."""
        return Case(self.whole.lengths[rank::ranks], self.whole.slots // ranks)


RANKS = 2
TENSOR_PARALLEL = {"DP": 1, "TP": RANKS}  # number of ranks that divide the weights
RANKS_CASES = {
    "64 rows": RanksCase(CASES["64 rows, 32 + 128 tokens"], ("DP", "TP")),
    "64 skewed responses": RanksCase(CASES["64 skewed responses, 64 slots"], ("DP",)),
}


def build_peer_rank(
    at: countdown.Folders, precision: str, rank: int, ranks: int, _port: int
) -> dict[str, Callable]:
    """Hugging Face's generation of a part of the responses of each case of ranks."""
    parts = {name: case.of_rank(rank, ranks) for name, case in RANKS_CASES.items()}
    return build_peer(at, precision, parts)


def build_our_rank(
    at: countdown.Folders, precision: str, way: str, rank: int, ranks: int, port: int
) -> dict[str, Callable]:
    """Our generation on one rank, of the cases that are measured in that way."""
    os.environ.update(measure.rank_environment(rank, ranks, port))
    size = TENSOR_PARALLEL[way]
    parts = {
        name: case.of_rank(rank // size, ranks // size)
        for name, case in RANKS_CASES.items()
        if way in case.ways
    }
    return build_ours(at, precision, parts, tensor_model_parallel_size=size)


def build_peer(
    at: countdown.Folders, precision: str, cases: Mapping[str, Case] = CASES
) -> dict[str, Callable]:
    """Hugging Face's generation of each case, in batches of its slots."""
    model = countdown.load_peer(at, precision)

    def run(case: Case) -> None:
        batches = zip(case.prompts.split(case.slots), case.lengths.split(case.slots), strict=True)
        for rows, lengths in batches:
            rows = rows.to(model.device)
            output = model.generate(
                rows,
                attention_mask=torch.ones_like(rows),
                max_new_tokens=int(lengths.max()),
                do_sample=True,
                top_k=0,
                top_p=1.0,
                num_return_sequences=case.copies,
            )
            ended = output[:, case.prompt :].cpu() == countdown.END
            found = ended.to(torch.uint8).argmax(1) + 1
            assert torch.equal(found, lengths.repeat_interleave(case.copies)), found

    return {name: partial(run, case) for name, case in cases.items()}


def build_ours(
    at: countdown.Folders, precision: str, cases: Mapping[str, Case] = CASES, **keys: Any
) -> dict[str, Callable]:
    """Our generation of each case, `slots` samples at a time; `keys` of section `model`."""
    from nemo_aligner.generation import GenerationParams

    model = countdown.load_actor(at, precision, **keys)
    model.set_eval()

    def run(case: Case) -> None:
        params = GenerationParams(max_length=int(case.lengths.max()))
        prompts = case.prompts.repeat_interleave(case.copies, 0)
        seeds = torch.arange(len(prompts))
        lengths = torch.full_like(seeds, case.prompt)
        output = model.generator.generate(prompts, lengths, seeds, params, slots=case.slots)
        found = output.response_lengths.cpu() - case.prompt
        assert torch.equal(found, case.expected), found

    return {name: partial(run, case) for name, case in cases.items()}


def matrix_seconds(rows: int, head_rows: int, precision: str) -> float:
    """CPU seconds of all matrix products of a pass over `rows` tokens, of which `head_rows` go
    through the output layer; each layer has weights of its own, as in the model.
    """
    hidden, ffn = countdown.HIDDEN, countdown.FFN
    width = hidden + 2 * hidden * countdown.GROUPS // countdown.HEADS
    layer = [(width, hidden), (hidden, hidden), (2 * ffn, hidden), (hidden, ffn)]
    shapes = [(rows, shape) for shape in layer * countdown.LAYERS]
    shapes.append((head_rows, (countdown.VOCABULARY, hidden)))
    dtype = PRECISIONS[precision]
    pairs = [
        (torch.randn(count, shape[1], dtype=dtype), torch.randn(shape, dtype=dtype))
        for count, shape in shapes
    ]

    products = [packed_linear(weight, None) for _x, weight in pairs]

    def run() -> None:
        for (x, _weight), product in zip(pairs, products, strict=True):
            product(x)

    return measure.seconds_of(run, 9)


def bound(case: Case, precision: str) -> float:
    """CPU seconds of the matrix products, if each prompt is read once and every step has a full
    batch.
    """
    prefill = matrix_seconds(len(case.lengths) * case.prompt, len(case.lengths), precision)
    steps = int(case.expected.sum() - len(case.expected)) / case.slots
    return prefill + steps * matrix_seconds(case.slots, case.slots, precision)


def row(name: str, precision: str, sides: dict[str, measure.Side], repeats: int) -> measure.Row:
    """Figures of one case."""
    case = CASES[name]
    figures = measure.in_turns(sides, name, repeats)
    ours, least = figures["ours"].seconds, bound(case, precision)
    return measure.pair_row(
        f"{name}, {precision}",
        figures,
        **{
            "bound, CPU s": round(least, 3),
            "of the bound": f"{least / ours:.0%}",
            "tokens per CPU s": round(int(case.expected.sum()) / ours),
        },
    )


def ranks_rows(at: countdown.Folders, repeats: int) -> list[measure.Row]:
    """Figures of two ranks, fp32; the peer, which has one way, is measured once."""
    rows = []
    with contextlib.ExitStack() as stack:
        peer = stack.enter_context(measure.Ranks(build_peer_rank, RANKS, at, "32"))
        ours = {
            way: stack.enter_context(measure.Ranks(build_our_rank, RANKS, at, "32", way))
            for way in TENSOR_PARALLEL
        }
        for name, case in RANKS_CASES.items():
            sides = {way: ours[way] for way in case.ways} | {"peer": peer}
            figures = measure.in_turns(sides, name, repeats)
            for way in case.ways:
                both = {"ours": figures[way], "peer": figures["peer"]}
                tokens = round(int(case.whole.lengths.sum()) / both["ours"].seconds)
                title = f"{name}, {RANKS} ranks ({way}), 32"
                rows.append(measure.pair_row(title, both, **{"tokens per CPU s": tokens}))
    return rows


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument(
        "--precision", nargs="+", default=measure.precisions(), choices=list(PRECISIONS)
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with countdown.folders() as at:
        for precision in args.precision:
            with (
                measure.Side(build_ours, at, precision) as ours,
                measure.Side(build_peer, at, precision) as peer,
            ):
                sides = {"ours": ours, "peer": peer}
                rows += [row(name, precision, sides, args.repeats) for name in CASES]
        rows += ranks_rows(at, min(args.repeats, 2))
    measure.report("generate", "Generation, against Hugging Face's `generate`", rows, args.json)


if __name__ == "__main__":
    main()
