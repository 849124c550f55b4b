# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The samples of one rank while they are decoded: those that wait, and those in the slots of the
cache.

Shapes: c slots, b of them in use, P prompt length, R total length (prompt and response), V
vocabulary.

A sample may have several turns (`turns.py`): its slot then pauses at the end of each response,
until an observation extends it or it is finished.
"""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_aligner.generation.end_conditions import EndConditions
from nemo_aligner.generation.params import GenerationParams
from nemo_aligner.generation.sampling import choose_tokens, sample_uniforms, seen_tokens
from nemo_aligner.generation.turns import Conversation


@dataclass(frozen=True)
class WaitingSample:
    """A sample that has no slot yet."""

    number: int  # of the sample, in the order in which samples came
    prompt: tuple[int, ...]  # its ids
    limit: int  # longest R; of several turns, at the end of the first
    seed: int  # of its random stream


@dataclass(frozen=True)
class FinishedSample:
    """A sample whose response has ended."""

    number: int  # of the sample
    prompt_length: int  # P
    tokens: Tensor  # int64 `[R]`
    is_end: bool  # the response ended by itself
    # float32 `[R - P]` of the tokens after the prompt, 0 for observed ones; or None
    logprobs: Tensor | None
    # observed, token_rewards: bool and float32 `[R - 1]`, as in `GenerationOutput`; or None
    observed: Tensor | None = None
    token_rewards: Tensor | None = None


@dataclass(frozen=True)
class Refill:
    """What is to be done to the cache after slots have changed hands, in this order."""

    # (from, to) pairs of slots whose positions are to be copied at once
    moves: list[tuple[int, int]]
    prefill: list[int]  # slots whose prompts are to be fed to the model
    # (from, to) pairs of slots with the same prompt, to be copied after the prefill
    shared: list[tuple[int, int]]


class DecodingBatch:
    """Samples that wait, and samples in the slots: the first `active` slots are in use.

    Tensors have one entry per slot. A sample in a slot has `lengths` tokens, the last of which has
    not been fed to the model. `starts` is where its response begins, the last one of several
    turns; `foreign` counts its tokens that the policy did not generate, of prompt and
    observations.

    Args:
        slots: c.
        params: how to generate.
        end: when a response has ended.
        vocab_size: number of ids.
        device: of the tensors.
        max_turns: most responses of a sample.

    Attributes:
        pausing: slots whose response has ended, while the sample may go on.
    """

    _PER_SLOT = "tokens starts foreign lengths limits uniforms seen logprobs pauses".split()

    def __init__(
        self,
        slots: int,
        params: GenerationParams,
        end: EndConditions,
        vocab_size: int,
        device: torch.device,
        max_turns: int = 1,
    ) -> None:
        self.slots = slots
        self.params = params
        self.end = end
        self.vocab_size = vocab_size
        self.device = device
        self.active = 0
        self.waiting: deque[WaitingSample] = deque()
        self.samples: list[WaitingSample] = []  # of the slots; those beyond `active` have left
        self.width = 0
        self.tokens = self._new(torch.int64, 0)
        self.starts, self.foreign = self._new(torch.int64), self._new(torch.int64)
        self.lengths, self.limits = self._new(torch.int64), self._new(torch.int64)
        self.pauses = self._new(torch.bool)
        self.pausing = 0
        self.most = max_turns * params.max_length  # tokens that a sample may draw
        self.uniforms: Tensor | None = None
        if not params.use_greedy:
            self.uniforms = self._new(torch.float64, self.most)
        self.seen: Tensor | None = None
        if params.repetition_penalty != 1.0:
            self.seen = self._new(torch.bool, vocab_size)
        self.logprobs: Tensor | None = None  # of the tokens drawn, from column 0 on
        if params.return_logprobs:
            self.logprobs = self._new(torch.float32, self.most)
        self.end_token_ids = torch.tensor(end.token_ids, device=device)

    def _new(self, dtype: torch.dtype, *widths: int) -> Tensor:
        return torch.zeros(self.slots, *widths, dtype=dtype, device=self.device)

    # --- slots ----------------------------------------------------------------------------------

    def refill(self, done: list[int], admit: bool) -> Refill:
        """Give the slots `done`, and those that were free, to waiting samples if `admit`. Where
        none come, the last samples move into the gaps.
        """
        free = done + list(range(self.active, self.slots))
        count = len(self.waiting) if admit else 0
        taken = [(slot, self.waiting.popleft()) for slot in free[:count]]
        gaps = done[len(taken) :]
        active = max([self.active, *(slot + 1 for slot, _ in taken)]) - len(gaps)
        gone = set(gaps)
        last = [slot for slot in range(active, self.active) if slot not in gone]
        moves = list(zip(last, (slot for slot in gaps if slot < active), strict=True))
        sources = {sample.prompt: slot for slot, sample in enumerate(self.samples)}
        fresh: dict[tuple[int, ...], int] = {}
        shared = []
        for slot, sample in taken:
            if sample.prompt in sources:  # its keys and values are there, perhaps in this slot
                moves.append((sources[sample.prompt], slot))
            elif sample.prompt in fresh:
                shared.append((fresh[sample.prompt], slot))
            else:
                fresh[sample.prompt] = slot
        self._move(moves[: len(last)])
        self._place(taken)
        self.active = active
        del self.samples[active:]
        return Refill([move for move in moves if move[0] != move[1]], list(fresh.values()), shared)

    def _move(self, moves: list[tuple[int, int]]) -> None:
        if not moves:
            return
        source, target = torch.tensor(moves, device=self.device).T
        for name in self._PER_SLOT:
            tensor = getattr(self, name)
            if tensor is not None:
                tensor[target] = tensor[source]
        for old, new in moves:
            self.samples[new] = self.samples[old]

    def _place(self, taken: list[tuple[int, WaitingSample]]) -> None:
        """Put samples that waited into slots."""
        if not taken:
            return
        self._widen(max(sample.limit for _, sample in taken))
        for slot, sample in taken:
            if slot == len(self.samples):
                self.samples.append(sample)
            self.samples[slot] = sample
        longest = max(len(sample.prompt) for _, sample in taken)
        prompts = torch.tensor(
            [sample.prompt + (0,) * (longest - len(sample.prompt)) for _, sample in taken]
        ).to(self.device)
        numbers = [(slot, len(each.prompt), each.limit, each.seed) for slot, each in taken]
        slots, lengths, limits, seeds = torch.tensor(numbers, device=self.device).T
        self.tokens[slots, :longest] = prompts
        self.starts[slots] = self.foreign[slots] = self.lengths[slots] = lengths
        self.limits[slots] = limits
        self.pauses[slots] = False
        if self.uniforms is not None:
            self.uniforms[slots] = sample_uniforms(seeds, self.most)
        if self.seen is not None:
            self.seen[slots] = seen_tokens(prompts, lengths, self.vocab_size)

    def _widen(self, width: int) -> None:
        if width > self.width:
            self.tokens = torch.nn.functional.pad(self.tokens, (0, width - self.width))
            self.width = width

    # --- several turns --------------------------------------------------------------------------

    def pause(self, slot: int) -> tuple[int, ...]:
        """Stop decoding in `slot` for a while; returns the response that has ended there."""
        self.pauses[slot] = True
        self.pausing += 1
        ids: list[int] = self.tokens[slot, self.starts[slot] : self.lengths[slot]].tolist()
        return tuple(ids)

    def resume(self, slot: int) -> None:
        """End the pause of `slot`."""
        self.pauses[slot] = False
        self.pausing -= 1

    def extend(self, slot: int, observation: tuple[int, ...], longest: int) -> tuple[int, int]:
        """Append an observation to the sample in `slot`, whose next response begins.

        Args:
            longest: most R.

        Returns:
            The first position that is to be fed to the model before, and the one beyond the last.
        """
        start = int(self.lengths[slot])
        stop = start + len(observation)
        limit = min(stop + self.params.max_length, longest)
        self._widen(limit)
        ids = torch.tensor(observation, device=self.device)
        self.tokens[slot, start:stop] = ids
        if self.seen is not None:
            self.seen[slot, ids] = True
        self.starts[slot] = self.lengths[slot] = stop
        self.foreign[slot] += len(observation)
        self.limits[slot] = limit
        return start - 1, stop - 1

    # --- a step ---------------------------------------------------------------------------------

    def fed(self) -> tuple[Tensor, Tensor]:
        """The tokens to feed next, int64 `[b, 1]`, and their positions, int64 `[b]`.

        A slot that pauses is fed its last token again and again, which changes nothing.
        """
        positions = self.lengths[: self.active] - 1
        return self.tokens[: self.active].gather(1, positions.unsqueeze(1)), positions

    def longest(self) -> int:
        """The most tokens of a sample in a slot."""
        return int(self.lengths[: self.active].max()) if self.active else 0

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Choose the next token, int64 `[b]`, from `logits` `[b, V]`.

        Returns:
            The tokens, and their log-probs `[b]` if `params.return_logprobs`.
        """
        params, b = self.params, self.active
        generated, uniforms = self.lengths[:b] - self.foreign[:b], None
        if self.uniforms is not None:
            # A slot that pauses may have drawn them all; its token is not used.
            places = generated.clamp(max=self.most - 1).unsqueeze(1)
            uniforms = self.uniforms[:b].gather(1, places).squeeze(1)
        tokens = choose_tokens(
            logits,
            uniforms=uniforms,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            repetition_penalty=params.repetition_penalty,
            seen=None if self.seen is None else self.seen[:b],
            end_token_ids=self.end_token_ids,
            too_short=generated < params.min_length if params.min_length else None,
        )
        if not params.return_logprobs:
            return tokens, None
        temperature = 1.0 if params.use_greedy else params.temperature
        scores = (logits / temperature).log_softmax(dim=1)
        return tokens, scores.gather(1, tokens.clamp(min=0).unsqueeze(1)).squeeze(1)

    def append(self, tokens: Tensor, logprobs: Tensor | None) -> list[tuple[int, bool]]:
        """Append the chosen `tokens` `[b]` to their samples, but for those that pause.

        Returns:
            The slots whose response has ended, and whether by itself.

        Raises:
            RuntimeError: the model's logits are not finite.
        """
        slots = torch.arange(self.active, device=self.device)
        if self.pausing:
            slots = slots[~self.pauses[: self.active]]
            tokens, logprobs = tokens[slots], None if logprobs is None else logprobs[slots]
        lengths = self.lengths[slots]
        generated = lengths - self.foreign[slots]
        if bool((tokens < 0).any()):
            position = int(lengths[tokens < 0].min()) - 1
            raise RuntimeError(
                f"the model's logits at position {position} are not finite: its weights hold NaN "
                "or infinity, or its activations overflow. Was the learning rate too high?"
            )
        self.tokens[slots, lengths] = tokens
        if self.seen is not None:
            self.seen[slots, tokens] = True
        if logprobs is not None and self.logprobs is not None:
            self.logprobs[slots, generated] = logprobs
        rows = self.tokens[: self.active] if len(slots) == self.active else self.tokens[slots]
        ended = self.end.ended(
            rows, lengths, generated >= self.params.min_length, first=self.starts[slots]
        )
        lengths = lengths + 1
        self.lengths[slots] = lengths
        over = (ended | (lengths >= self.limits[slots])).nonzero()[:, 0]
        return list(zip(slots[over].tolist(), ended[over].tolist(), strict=True))

    def finished(
        self, slot: int, is_end: bool, conversation: Conversation | None = None
    ) -> FinishedSample:
        """The sample in `slot`, which is complete.

        Args:
            conversation: its turns, if there are several.
        """
        sample, length = self.samples[slot], int(self.lengths[slot])
        start = len(sample.prompt)
        observed = token_rewards = logprobs = None
        if conversation is not None:
            observed = conversation.observed_tokens(length, self.device)
            token_rewards = conversation.token_rewards(length, self.device)
        if self.logprobs is not None:
            drawn = self.logprobs[slot, : length - int(self.foreign[slot])]
            logprobs = torch.zeros(length - start, device=self.device)
            logprobs[slice(None) if observed is None else ~observed[start - 1 :]] = drawn
        return FinishedSample(
            sample.number,
            start,
            self.tokens[slot, :length].clone(),
            is_end,
            logprobs,
            observed,
            token_rewards,
        )
