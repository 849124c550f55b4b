# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The samples of one rank while they are decoded: waiting ones, and those in slots of the cache;
and how a token follows from logits.

The device keeps what a step reads and writes; the host keeps ids and lengths, and every few steps
takes the chosen tokens (`look`), without those beyond the end of a response. A token is drawn by
inverting the cumulative distribution at a number of the sample's own stream: other samples have no
effect.

Shapes: c slots, b of them in use, P prompt length, R total length (prompt and response), V
vocabulary without padding.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_aligner.core.tensors import _splitmix64
from nemo_aligner.generation.interface import Conversation, EndConditions, GenerationParams


@dataclass(frozen=True)
class WaitingSample:
    number: int  # of the sample, in the order in which samples came
    prompt: tuple[int, ...]  # its ids
    limit: int  # longest R; of several turns, at the end of the first
    seed: int  # of its random stream
    record: int | None = None  # number of the prompt's record, if it has one


@dataclass
class Slot:
    """What the host knows of a sample in a slot."""

    sample: WaitingSample  # as it came
    ids: list[int]  # of prompt and responses; the last one has not been fed to the model
    start: int  # where its response begins, the last one of several turns
    foreign: int  # its tokens that the policy did not generate, of prompt and observations
    limit: int  # longest R at the end of this response
    pauses: bool = False  # its response has ended, while the sample may go on


@dataclass(frozen=True)
class FinishedSample:
    number: int  # of the sample
    tokens: tuple[int, ...]  # R
    is_end: bool  # the response ended by itself
    # logprobs (on the device), observed, token_rewards: `[R - 1]`, as in `GenerationOutput`
    logprobs: Tensor | None
    observed: Tensor | None
    token_rewards: Tensor | None


_Pairs = list[tuple[int, int]]


@dataclass(eq=False)
class DecodingBatch:
    """Samples that wait, and samples in the slots: the first `active` slots are in use. Of each
    slot, int64 `[c]`: `fed` is the token to feed next, `positions` where to, `last` the last
    position of a response, where the same token is fed again, `drawn` the number of tokens drawn.
    `width`: positions that the samples may need.
    """

    slots: int
    params: GenerationParams
    end: EndConditions
    vocab_size: int
    device: torch.device
    look_every: int
    max_turns: int = 1

    def __post_init__(self) -> None:
        self.waiting: deque[WaitingSample] = deque()
        self.in_slots: list[Slot] = []
        self.width = 0
        params = self.params
        self.most = self.max_turns * params.max_length  # tokens that a sample may draw
        self.fed, self.positions = self._new(torch.int64), self._new(torch.int64)
        self.last, self.drawn = self._new(torch.int64), self._new(torch.int64)
        self.uniforms = None if params.use_greedy else self._new(torch.float64, self.most)
        penalized = params.repetition_penalty != 1.0
        self.seen = self._new(torch.bool, self.vocab_size) if penalized else None
        # Of the tokens drawn; what is dropped goes last.
        wanted = params.return_logprobs
        self.logprobs = self._new(torch.float32, self.most + 1) if wanted else None
        self.end_token_ids = torch.tensor(self.end.token_ids, device=self.device)
        self._chosen: list[Tensor] = []  # int64 [b] each, by step, since the last look

    @property
    def active(self) -> int:
        """b."""
        return len(self.in_slots)

    @property
    def pausing(self) -> int:
        return sum(each.pauses for each in self.in_slots)

    def _new(self, dtype: torch.dtype, *widths: int) -> Tensor:
        return torch.zeros(self.slots, *widths, dtype=dtype, device=self.device)

    def refill(self, done: list[int], admit: bool) -> tuple[_Pairs, list[int], _Pairs]:
        """Give `done` and free slots to waiting samples if `admit`, or close the gaps. Returns
        what is to be done to the cache, in this order: (from, to) slots to be copied at once,
        slots whose prompts are to be fed to the model, (from, to) slots with the same prompt.
        """
        free = done + list(range(self.active, self.slots))
        count = len(self.waiting) if admit else 0
        taken = [(slot, self.waiting.popleft()) for slot in free[:count]]
        if not done and not taken:
            return [], [], []
        gaps = done[len(taken) :]
        active = max([self.active, *(slot + 1 for slot, _ in taken)]) - len(gaps)
        gone = set(gaps)
        last = [slot for slot in range(active, self.active) if slot not in gone]
        moves = list(zip(last, (slot for slot in gaps if slot < active), strict=True))
        sources = {each.sample.prompt: slot for slot, each in enumerate(self.in_slots)}
        fresh: dict[tuple[int, ...], int] = {}
        shared = []
        for slot, sample in taken:
            if sample.prompt in sources:  # its keys and values are there, perhaps in this slot
                moves.append((sources[sample.prompt], slot))
            elif sample.prompt in fresh:
                shared.append((fresh[sample.prompt], slot))
            else:
                fresh[sample.prompt] = slot
        if last:
            source, target = torch.tensor(moves[: len(last)], device=self.device).T
            for name in "fed positions last drawn uniforms seen logprobs".split():
                if (tensor := getattr(self, name)) is not None:
                    tensor[target] = tensor[source]
            for old, new in moves[: len(last)]:
                self.in_slots[new] = self.in_slots[old]
        if taken:
            for slot, sample in taken:
                length = len(sample.prompt)
                placed = Slot(sample, list(sample.prompt), length, length, sample.limit)
                self.in_slots[slot : slot + 1] = [placed]
            slots = self._set([slot for slot, _ in taken])
            seeds = torch.tensor([sample.seed for _, sample in taken], device=self.device)
            if self.uniforms is not None:
                self.uniforms[slots] = sample_uniforms(seeds, self.most)
        del self.in_slots[active:]
        return [move for move in moves if move[0] != move[1]], list(fresh.values()), shared

    def _set(self, slots: list[int]) -> Tensor:
        """Have the device go on in `slots` from what the host knows; returns them, int64 `[n]`."""
        held = [self.in_slots[slot] for slot in slots]
        self.width = max([self.width, *(each.limit for each in held)])
        numbers = [
            (slot, each.ids[-1], len(each.ids) - 1, each.limit - 1, len(each.ids) - each.foreign)
            for slot, each in zip(slots, held, strict=True)
        ]
        rows, fed, positions, last, drawn = torch.tensor(numbers, device=self.device).T
        self.fed[rows], self.positions[rows], self.last[rows] = fed, positions, last
        self.drawn[rows] = drawn
        if self.seen is not None:
            lengths = torch.tensor([len(each.ids) for each in held], device=self.device)
            ids = padded([each.ids for each in held], self.device)
            self.seen[rows] = seen_tokens(ids, lengths, self.vocab_size)
        return rows

    def pause(self, slot: int) -> tuple[int, ...]:
        """Stop decoding in `slot` until it is extended or finished; returns its last response."""
        held = self.in_slots[slot]
        held.pauses, held.limit = True, len(held.ids)
        self._set([slot])
        return tuple(held.ids[held.start :])

    def response_logprobs(self, slot: int) -> tuple[float, ...] | None:
        """Of the tokens of the response that has ended in `slot`, if log-probs are computed."""
        if self.logprobs is None:
            return None
        held = self.in_slots[slot]
        drawn = len(held.ids) - held.foreign
        return tuple(self.logprobs[slot, drawn - len(held.ids) + held.start : drawn].tolist())

    def extend(self, slot: int, observation: tuple[int, ...], longest: int) -> tuple[int, int]:
        """Append at most `longest` tokens of an observation; the next response begins. Returns the
        first position to feed before it and the one beyond the last.
        """
        held = self.in_slots[slot]
        start = len(held.ids)
        held.pauses = False
        held.ids += observation
        held.start, held.foreign = len(held.ids), held.foreign + len(observation)
        held.limit = min(held.start + self.params.max_length, longest)
        self._set([slot])
        return start - 1, held.start - 1

    def longest(self) -> int:
        """The most tokens of a sample in a slot at the next step, or a few more."""
        most = max((len(each.ids) for each in self.in_slots), default=0)
        return min(most + len(self._chosen), self.width)

    def shape(self) -> tuple[int, int]:
        """Rows and width of the next step; on a GPU few different ones, as each needs a graph."""
        rows, width = self.active, self.longest()
        if self.device.type != "cpu":
            halves = self.slots
            while (halves + 1) // 2 >= rows and halves > 1:
                halves = (halves + 1) // 2
            rows, width = halves, rounded(width)
        return rows, width

    def steps(self) -> int:
        left = [each.limit - len(each.ids) for each in self.in_slots if not each.pauses]
        return min(max(left), self.look_every)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """The next tokens `[b]` from `logits` `[b, V]`, and their log-probs if asked for."""
        params, b = self.params, len(logits)
        drawn, uniforms = self.drawn[:b], None
        if self.uniforms is not None:
            # Beyond the end of a response it may have drawn all; the token is not used.
            places = drawn.clamp(max=self.most - 1).unsqueeze(1)
            uniforms = self.uniforms[:b].gather(1, places).squeeze(1)
        tokens = choose_tokens(
            logits,
            params,
            uniforms,
            seen=None if self.seen is None else self.seen[:b],
            end_token_ids=self.end_token_ids,
            too_short=drawn < params.min_length if params.min_length else None,
        )
        if not params.return_logprobs:
            return tokens, None
        temperature = 1.0 if params.use_greedy else params.temperature
        scores = (logits / temperature).log_softmax(dim=1)
        return tokens, scores.gather(1, tokens.clamp(min=0).unsqueeze(1)).squeeze(1)

    def append(self, tokens: Tensor, logprobs: Tensor | None) -> None:
        """Have the next step go on from the chosen `tokens` `[b]`; nothing waits for them."""
        b = len(tokens)
        drawn, positions, last = self.drawn[:b], self.positions[:b], self.last[:b]
        fed = self.fed[:b]
        torch.where(positions < last, tokens.clamp(min=0), fed, out=fed)
        if self.seen is not None:
            self.seen[:b].scatter_(1, fed.unsqueeze(1), True)
        if logprobs is not None and self.logprobs is not None:
            places = drawn.clamp(max=self.most).unsqueeze(1)
            self.logprobs[:b].scatter_(1, places, logprobs.unsqueeze(1))
        drawn += 1
        torch.minimum(positions + 1, last, out=positions)

    def keep(self, tokens: Tensor) -> Tensor:
        """Remember what a step chose, `tokens` `[b or more]`, for the next look; returns `[b]`."""
        self._chosen.append(tokens[: self.active].clone())
        return self._chosen[-1]

    def look(self) -> list[tuple[int, bool]]:
        """Wait for the tokens chosen since the last look. Returns the slots whose response has
        ended, and whether by itself. `RuntimeError`: logits are not finite.
        """
        steps = torch.stack(self._chosen, 1).tolist()
        self._chosen.clear()
        ended, not_finite = [], []
        for slot, (held, tokens) in enumerate(zip(self.in_slots, steps, strict=True)):
            if held.pauses:
                continue
            for token in tokens:
                if token < 0:
                    not_finite.append(len(held.ids) - 1)
                    break
                held.ids.append(token)
                length = len(held.ids)
                is_end = length - held.foreign > self.params.min_length and self.end.at_end(
                    held.ids, held.start
                )
                if is_end or length >= held.limit:
                    ended.append((slot, is_end))
                    break
        if not_finite:
            raise RuntimeError(
                f"the model's logits at position {min(not_finite)} are not finite: its weights "
                "are not, or its activations overflow. Was the learning rate too high?"
            )
        return ended

    def finished(
        self, slot: int, is_end: bool, conversation: Conversation | None = None
    ) -> FinishedSample:
        """The complete sample in `slot`, with its turns if there are several."""
        held = self.in_slots[slot]
        length, first = len(held.ids), len(held.sample.prompt) - 1
        own: slice | Tensor = slice(first, None)  # columns of the tokens that were drawn
        observed = token_rewards = logprobs = None
        if conversation is not None:
            observed = conversation.observed_tokens(length)
            token_rewards = conversation.token_rewards(length)
            own = ~observed
            own[:first] = False
        if self.logprobs is not None:
            logprobs = torch.zeros(length - 1, device=self.device)
            logprobs[own] = self.logprobs[slot, : length - held.foreign]
        return FinishedSample(
            held.sample.number, tuple(held.ids), is_end, logprobs, observed, token_rewards
        )


def rounded(width: int) -> int:
    """`width` up to a multiple of 128, and of an eighth of the power of two that follows."""
    unit = max(128, (1 << (width - 1).bit_length()) // 8)
    return -(-width // unit) * unit


def padded(rows: Sequence[Sequence[int]], device: torch.device, value: int = 0) -> Tensor:
    """int64 `[b, W]`: `rows` of ids, with `value` on the right."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows], device=device)


_GOLDEN_GAMMA = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed number: SplitMix64's step


def sample_uniforms(sample_seeds: Tensor, max_length: int) -> Tensor:
    """float64 `[b, max_length]` in [0, 1): a number per generated token, from SplitMix64 streams
    of `sample_seeds` int64 `[b]`. A longer stream starts like a shorter one.
    """
    steps = torch.arange(max_length, device=sample_seeds.device) * _GOLDEN_GAMMA
    bits = _splitmix64(_splitmix64(sample_seeds.long()).unsqueeze(1) + steps)
    return ((bits >> 11) & (2**53 - 1)).double() * 2.0**-53


def seen_tokens(tokens: Tensor, lengths: Tensor, vocab_size: int) -> Tensor:
    """bool `[b, vocab_size]`: the id is among the first `lengths` `[b]` of `tokens` `[b, W]`."""
    valid = torch.arange(tokens.size(1), device=tokens.device) < lengths.unsqueeze(1)
    seen = torch.zeros(tokens.size(0), vocab_size + 1, dtype=torch.bool, device=tokens.device)
    return seen.scatter_(1, torch.where(valid, tokens, vocab_size), True)[:, :vocab_size]


def keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Keep the fewest likeliest ids whose probabilities reach `top_p` (Holtzman et al. 2020)."""
    ordered, order = logits.sort(dim=1, descending=True, stable=True)
    probabilities = ordered.softmax(dim=1).double()
    before = probabilities.cumsum(dim=1) - probabilities
    forbidden = torch.empty_like(order, dtype=torch.bool).scatter_(1, order, before >= top_p)
    return logits.masked_fill(forbidden, float("-inf"))


def invert_cdf(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Ids int64 `[b]` where cumulative probability passes float64 `uniforms` `[b]` in [0, 1)."""
    cumulative = logits.softmax(dim=1).cumsum(dim=1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Below the total even after rounding: an id of probability zero is never reached.
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniforms.unsqueeze(1) * total, below)
    ids = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return ids.clamp(max=logits.size(1) - 1)


def choose_tokens(
    logits: Tensor,
    params: GenerationParams,
    uniforms: Tensor | None,
    seen: Tensor | None = None,
    end_token_ids: Tensor | None = None,
    too_short: Tensor | None = None,
) -> Tensor:
    """The next token of each sample, int64 `[b]`; -1 for one whose logits are not finite. Order:
    repetition penalty (Keskar et al. 2019, CTRL, section 4.1), temperature, minimum length, top-k,
    top-p, then the draw.

    Args:
        logits: float32 `[b, V]`.
        uniforms: float64 `[b]` in [0, 1); None takes the likeliest id, whatever the other values.
        seen: bool `[b, V]`, True for ids that the sample has; needed with a repetition penalty.
        end_token_ids: int64 `[n]`, ids that samples with `too_short` must not take.
        too_short: bool `[b]`, True for responses below their minimum length; None for none.
    """
    penalty = params.repetition_penalty
    if seen is not None and penalty != 1.0:
        penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = torch.where(seen, penalized, logits)
    if too_short is not None and end_token_ids is not None:
        ends = torch.zeros(logits.size(1), dtype=torch.bool, device=logits.device)
        ends.index_fill_(0, end_token_ids, True)  # an assignment would copy it from the host
        logits = logits.masked_fill(too_short.unsqueeze(1) & ends, float("-inf"))
    finite = logits.amax(dim=1).isfinite()  # a NaN among logits is their maximum
    if uniforms is None:
        tokens = logits.argmax(dim=1)
    else:
        if params.temperature != 1.0:
            logits = logits / params.temperature
        if 0 < params.top_k < logits.size(1):  # ids that tie with the k-th stay
            threshold = logits.topk(params.top_k, dim=1).values[:, -1:]
            logits = logits.masked_fill(logits < threshold, float("-inf"))
        if params.top_p < 1.0:
            logits = keep_top_p(logits, params.top_p)
        tokens = invert_cdf(logits, uniforms)
    return torch.where(finite, tokens, -1)
