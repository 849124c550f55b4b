# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probs and updates of the policy against a Hugging Face model with PyTorch's fused AdamW, on
the same weights and the same samples.

    OMP_NUM_THREADS=1 python benchmarks/updates.py

16 samples of 32 + 128 tokens, or of skewed lengths. Log-probs are made 16 samples at a time. An
update is PPO's: log-probs of 4 samples at a time, the clipped loss, the gradient of all of them,
clipped, and one step of the optimizer. The peer computes log-probs as TRL does, by `logsumexp` of
one row after another, and no entropy; ours reports the entropy. In bf16 the peer trains bf16
weights and computes log-probs in bf16; ours has fp32 weights in its optimizer and fp32 log-probs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import countdown
import measure
import torch
from torch import Tensor

CLIP, LR, RATIO_EPS = 1.0, 1e-6, 0.2
LOGPROBS, UPDATE = "log-probs, ", "update, "


@dataclass(frozen=True)
class Sizes:
    """Samples with prompts of one width, and how many of them go through a model at a time."""

    samples: int
    prompt: int
    micro_batch: int
    forward_batch: int

    @property
    def lengths(self) -> dict[str, Tensor]:
        """Lengths of the responses, by the names of their cases."""
        fixed = f"{self.samples} samples of {self.prompt} + {countdown.LONGEST} tokens"
        return {
            fixed: countdown.fixed_lengths(self.samples),
            f"{self.samples} samples of skewed lengths": countdown.skewed_lengths(self.samples),
        }

    @property
    def cases(self) -> list[str]:
        return [kind + name for kind in (LOGPROBS, UPDATE) for name in self.lengths]


SMALL = Sizes(samples=16, prompt=32, micro_batch=4, forward_batch=16)


def samples(lengths: Tensor, prompt: int) -> dict[str, Tensor]:
    """A rollout as the actor is trained on it; what a rollout computes is random."""
    generator = torch.Generator().manual_seed(3)
    count, width = len(lengths), prompt + int(lengths.max())
    tokens = torch.randint(
        countdown.LONGEST + 1, countdown.VOCABULARY - 1, (count, width), generator=generator
    )
    positions = torch.arange(1, width)
    ends = (prompt + lengths).unsqueeze(1)
    return {
        "response_tokens": torch.where(torch.arange(width) < ends, tokens, countdown.END),
        "response_lengths": prompt + lengths,
        "prompt_lengths": torch.full((count,), prompt),
        "is_end": torch.ones(count, dtype=torch.bool),
        "mask": ((positions >= prompt) & (positions < ends)).float(),
        "advantages": torch.randn(count, width - 1, generator=generator),
    }


def build_ours(at: countdown.Folders, precision: str, sizes: Sizes = SMALL) -> dict[str, Callable]:
    """Our log-probs and updates of each kind of lengths."""
    from nemo_aligner.training.optim import train_on_batch

    optim = {"name": "distributed_fused_adam", "lr": LR, "sched": {"name": "constant"}}
    batches = {"micro_batch_size": sizes.micro_batch, "global_batch_size": sizes.samples}
    model = countdown.load_actor(at, precision, optim=optim, **batches)
    training = model.setup_megatron_optimization(max_steps=10**6)
    functions: dict[str, Callable] = {}
    for name, lengths in sizes.lengths.items():
        batch = samples(lengths, sizes.prompt)

        def logprobs(batch: dict[str, Tensor] = batch) -> Tensor:
            model.set_eval()
            return model.get_inference_log_probs(
                batch["response_tokens"], sizes.forward_batch, batch["response_lengths"]
            )

        def update(batch: dict[str, Tensor] = batch) -> None:
            train_on_batch(model, *training, batch, CLIP)

        batch["prev_logprobs"] = logprobs()
        functions |= {LOGPROBS + name: logprobs, UPDATE + name: update}
    return functions


def selected_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probs of `targets` `[B, S]` from logits `[B, S, V]`, which are not copied."""
    chosen = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return chosen - torch.stack([row.logsumexp(-1) for row in logits])


def build_peer(at: countdown.Folders, precision: str, sizes: Sizes = SMALL) -> dict[str, Callable]:
    """The peer's log-probs and updates of each kind of lengths."""
    model = countdown.load_peer(at, precision)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(0.9, 0.98), weight_decay=0.1, fused=True
    )

    def logprobs_of(tokens: Tensor) -> Tensor:
        logits = model(tokens, use_cache=False).logits[:, :-1]
        return selected_logprobs(logits, tokens[:, 1:]).float()

    functions: dict[str, Callable] = {}
    for name, lengths in sizes.lengths.items():
        batch = {
            key: value.to(model.device) for key, value in samples(lengths, sizes.prompt).items()
        }

        def logprobs(batch: dict[str, Tensor] = batch) -> Tensor:
            model.eval()
            with torch.no_grad():
                return torch.cat(
                    [
                        logprobs_of(rows)
                        for rows in batch["response_tokens"].split(sizes.forward_batch)
                    ]
                )

        def update(batch: dict[str, Tensor] = batch) -> None:
            model.train()
            keys = ("response_tokens", "prev_logprobs", "advantages", "mask")
            for part in zip(*(batch[key].split(sizes.micro_batch) for key in keys), strict=True):
                tokens, previous, advantages, mask = part
                ratio = (logprobs_of(tokens) - previous).exp()
                clamped = ratio.clamp(1 - RATIO_EPS, 1 + RATIO_EPS)
                loss = torch.maximum(-advantages * ratio, -advantages * clamped) * mask
                (loss.sum() / batch["mask"].sum()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()

        batch["prev_logprobs"] = logprobs()
        functions |= {LOGPROBS + name: logprobs, UPDATE + name: update}
    return functions


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument(
        "--precision", nargs="+", default=measure.precisions(), choices=["32", "bf16"]
    )
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with countdown.folders() as at:
        for precision in args.precision:
            with (
                measure.Side(build_ours, at, precision) as ours,
                measure.Side(build_peer, at, precision) as peer,
            ):
                sides = {"ours": ours, "peer": peer}
                for case in SMALL.cases:
                    figures = measure.in_turns(sides, case, args.repeats)
                    rows.append(measure.pair_row(f"{case}, {precision}", figures))
    measure.report("updates", "Log-probs and updates, against Hugging Face", rows, args.json)


if __name__ == "__main__":
    main()
