# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The engine that decodes on the Megatron model that is being trained.

Shapes: b samples, W width of the prompts, P prompt length, R total length (prompt and response), V
vocabulary.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.utils import unwrap_model
from nemo.utils import logging
from torch import Tensor

from nemo_aligner.core.endings import progress
from nemo_aligner.core.errors import UserError
from nemo_aligner.core.tokenizer import Tokenizer
from nemo_aligner.generation.batch import (
    DecodingBatch,
    FinishedSample,
    WaitingSample,
    padded,
    rounded,
)
from nemo_aligner.generation.cache import DecodingPass, FeedingPass
from nemo_aligner.generation.decoding_model import DecodingModel, StepGraphs
from nemo_aligner.generation.interface import (
    Conversation,
    Details,
    EndConditions,
    Environment,
    GenerationOutput,
    GenerationParams,
    OnTokens,
    Prompts,
)
from nemo_aligner.generation.split import Split, divide, drawn, join, training_split, until_all_end
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import largest, on_rank_zero
from nemo_aligner.parallel.device import get_device
from nemo_aligner.parallel.megatron_switches import decoding_mode

# Most tokens of prompts in one pass; more take several passes, a longer prompt is cut.
PREFILL_TOKENS = 4096
# A prompt that is shorter than this part of the longest one of a pass waits for the next.
LEAST_FILLED = 0.75
# Free slots, of all of them, at which the next samples are admitted.
ADMITTED_AT = 1 / 8
# Steps between two looks of the host; on a GPU a look waits for all that was started.
LOOK_EVERY = {"cpu": 1, "cuda": 4}
# How many times the slots are filled before ranks that divide the samples exchange their results.
DRAWN_AHEAD = 4


class MegatronGenerator:
    """Decodes on the Megatron model that is being trained, with a cache (docs/performance.md).

    Every rank of a TP x PP x CP group calls `generate` with the same arguments. One rank chooses
    tokens for all that hold the same copy of the weights (TP x PP); context-parallel ranks divide
    the samples. With expert parallelism the data-parallel ranks of an expert-parallel group must
    call `generate` equally often, each with its own samples: they make their passes in lockstep;
    so must those that generate their samples together with a `split`, whose weights stay the same
    from the first token to the last. With an environment one rank of each copy of the weights asks
    it (`asks_environment`); other samples are decoded meanwhile.

    Args:
        model: model chunks of this pipeline stage, wrapped or not.
        tokenizer: its eos ends a response and pads the batch.
        max_sequence_length: of prompt with response; a learned position embedding may limit it.
        split: how the ranks share weights and samples; None: as in training.
        cuda_graphs: run decoding steps as CUDA graphs: "auto" where possible, True or else fail.
    """

    def __init__(
        self,
        model: Sequence[torch.nn.Module],
        tokenizer: Tokenizer,
        max_sequence_length: int,
        split: Split | None = None,
        cuda_graphs: bool | str = "auto",
    ) -> None:
        self.model = list(model)
        self.cuda_graphs, self._said = cuda_graphs, False
        self.split = split or training_split()
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.max_sequence_length = max_sequence_length
        first = unwrap_model(self.model)[0]
        if first.position_embedding_type == "learned_absolute":
            self.max_sequence_length = min(max_sequence_length, first.max_sequence_length)
        self.end_conditions = functools.cache(partial(EndConditions, tokenizer))

    @torch.no_grad()
    def generate(
        self,
        prompts: Tensor,
        prompt_lengths: Tensor,
        sample_seeds: Tensor,
        params: GenerationParams,
        on_tokens: OnTokens | None = None,
        environment: Environment | None = None,
        slots: int | None = None,
        records: Tensor | None = None,
    ) -> GenerationOutput:
        """Generate one response to each prompt, or with an `environment` a conversation; every
        rank of a TP x PP x CP group calls it. Returns the same on all of them, on `get_device()`.
        `UserError`: a prompt is empty, leaves no room for a response, or has ids outside the
        vocabulary; or the environment failed. `RuntimeError`: the model's logits are not finite.

        A response depends on its prompt, its seed, `params` and the weights only (up to rounding:
        in bf16 two near-equal logits may change places with the shape of a batch).

        Args:
            prompts: int64 `[b, W]`; only the first P columns of each are read.
            prompt_lengths: int64 `[b]`, P.
            sample_seeds: int64 `[b]`, seeds of the samples' random streams.
            on_tokens: called with the tokens as they are generated; of samples that ranks divide,
                with those of its own rank, which rank 0 numbers as the caller does.
            environment: replies to responses; given on every rank. `params.max_length` is that of
                each response, `min_length` that of all together. A conversation ends when it says
                so, with a response that was cut off, after `max_turns` responses, or for lack of
                room.
            slots: samples decoded together at most, by all ranks that divide them; None: all.
            records: int64 `[b]`, numbers of the prompts' records, for an environment that asks.
        """
        inputs: Prompts = prompts, prompt_lengths, sample_seeds
        if records is not None:
            inputs = *inputs, records
        slots = min(slots or len(prompts), len(prompts))
        with self._decoding_model() as model:
            return self._generate(model, inputs, params, slots, environment, on_tokens)

    def _generate(
        self,
        model: DecodingModel,
        inputs: Prompts,
        params: GenerationParams,
        slots: int,
        environment: Environment | None = None,
        on_tokens: OnTokens | None = None,
    ) -> GenerationOutput:
        joined = self.split.joined
        if joined is not None:
            inputs, own = join(inputs, joined, self._checked)
            slots *= torch.distributed.get_world_size(joined)
        else:
            self._checked(inputs)
        own_slots = math.ceil(slots / self._dividing_ranks())

        def decode(*inputs: Tensor) -> GenerationOutput:
            batches = iter([inputs])
            run = _Decoding(self, model, batches, params, own_slots, environment, on_tokens)
            return self._joined(sorted(run.samples(), key=lambda sample: sample.number))

        for group in self.split.dividing:
            decode = partial(divide, decode, group, self.tokenizer.eos_id)
        output = decode(*inputs)
        return output if joined is None else output.at(own)

    @contextlib.contextmanager
    def _decoding_model(self) -> Iterator[DecodingModel]:
        """The weights to generate with, gathered and packed once; the model generates inside."""
        chunks = list(self.split.weights(unwrap_model(self.model)))
        with decoding_mode(chunks):
            yield DecodingModel(chunks, self.vocab_size, self.split)

    @property
    def asks_environment(self) -> bool:
        """Whether this rank asks the environment for its copy of the weights."""
        return torch.distributed.get_rank(self.split.copy) == 0

    @torch.no_grad()
    def stream(
        self,
        batches: Iterable[Prompts],
        params: GenerationParams,
        slots: int,
        environment: Environment | None = None,
    ) -> Iterator[tuple[list[int], GenerationOutput]]:
        """As `generate` for all `batches`: yields places of samples, counted through all batches,
        and their responses as they end. Every rank of a TP x PP x CP group iterates to the end.

        Args:
            batches: asked for the next one once there is room for a sample of it, so several ranks
                can take from one queue; ranks that divide the samples take some at a time.
            slots: samples decoded, and given out, together (the last group may be smaller).
        """
        with self._decoding_model() as model:
            if self.split.dividing or self.split.joined is not None:
                number, rounds = 0, drawn(iter(batches), DRAWN_AHEAD * slots)
                if self.split.joined is not None:
                    rounds = until_all_end(rounds, self.split.joined)
                for inputs in rounds:
                    output = self._generate(model, inputs, params, slots, environment)
                    count = len(inputs[1])
                    for places in torch.arange(count).split(slots) if count else ():
                        yield (places + number).tolist(), output.at(places)
                    number += count
                return
            checked = map(self._checked, batches)
            samples = _Decoding(self, model, checked, params, slots, environment).samples()
            while ready := list(itertools.islice(samples, slots)):
                yield [each.number for each in ready], self._joined(ready)

    def _dividing_ranks(self) -> int:
        return math.prod(map(torch.distributed.get_world_size, self.split.dividing))

    @property
    def dtype(self) -> torch.dtype:
        return unwrap_model(self.model)[0].config.params_dtype

    def slots_within(self, memory: float) -> int:
        """Most samples, however long, with `memory` bytes on each rank for the cache. All ranks
        that generate together call it.
        """
        config, split = unwrap_model(self.model)[0].config, self.split
        layers, stages = config.num_layers // split.pipeline.size(), split.pipeline.size()
        if stages == parallel_state.get_pipeline_model_parallel_world_size():
            layers = sum(len(chunk.decoder.layers) for chunk in unwrap_model(self.model))
        layers = largest(layers, split.copy)  # stages may have unequal numbers of them
        groups = config.num_query_groups // split.tensor.size()
        numbers = 2 * layers * groups * config.kv_channels * self.max_sequence_length
        slots = max(1, int(memory // (numbers * self.dtype.itemsize)))
        sharing = 1 if split.joined is None else torch.distributed.get_world_size(split.joined)
        return max(1, slots * self._dividing_ranks() // sharing)

    def step_graphs(self) -> StepGraphs:
        """How the next steps run, logged once. `UserError`: `cuda_graphs=True` cannot be."""
        config = unwrap_model(self.model)[0].config
        modules = (module for chunk in self.model for module in chunk.modules())
        adapters = (getattr(module, "lora", None) for module in modules)
        obstacles = {
            "there is no GPU": get_device().type == "cpu",
            "several ranks hold the weights": self.split.copy.size() > 1,
            "the model has experts": config.num_moe_experts,
            "adapters are not merged (model.peft.merge_for_generation)": any(
                adapter is not None and not adapter.merged for adapter in adapters
            ),
        }
        obstacle = next((text for text, holds in obstacles.items() if holds), None)
        if obstacle and self.cuda_graphs is True:
            remedy = "Set it to auto or False."
            raise UserError(f"generation.cuda_graphs=True cannot be: {obstacle}. {remedy}")
        wanted = obstacle is None and self.cuda_graphs is not False
        if not self._said and get_device().type != "cpu":
            self._said = True
            reason = f": {obstacle}" if obstacle else ""
            logging.info(f"decoding steps run {'as CUDA graphs' if wanted else 'eagerly'}{reason}")
        return StepGraphs(wanted, required=self.cuda_graphs is True)

    def _checked(self, inputs: Prompts) -> Prompts:
        prompts, lengths, *_ = inputs
        shortest, longest = int(lengths.min()), int(lengths.max())
        if shortest < 1:
            raise UserError(f"prompt {int(lengths.argmin())} of the batch is empty.")
        if longest > prompts.size(1):
            raise UserError(f"a prompt length of {longest} exceeds the width of the prompts.")
        if longest >= self.max_sequence_length:
            raise UserError(
                f"prompt {int(lengths.argmax())} of the batch has {longest} tokens: no room for a "
                f"response within {self.max_sequence_length}; see model.encoder_seq_length."
            )
        inside = torch.arange(prompts.size(1), device=prompts.device) < lengths.unsqueeze(1)
        wrong = inside & ((prompts < 0) | (prompts >= self.vocab_size))
        if wrong.any():
            raise UserError(
                f"a prompt holds the id {int(prompts[wrong][0])}, outside the tokenizer's "
                f"{self.vocab_size} ids; was it tokenized with another tokenizer?"
            )
        return inputs

    def _joined(self, samples: list[FinishedSample]) -> GenerationOutput:
        device = get_device()
        tokens = padded([sample.tokens for sample in samples], device, self.tokenizer.eos_id)

        def columns(given: list[Tensor | None], value: float) -> Tensor | None:
            there = [column for column in given if column is not None]
            if not there:
                return None
            rows = torch.nn.utils.rnn.pad_sequence(there, batch_first=True, padding_value=value)
            return rows.to(device)

        return GenerationOutput(
            tokens,
            torch.tensor([len(sample.tokens) for sample in samples], device=device),
            torch.tensor([sample.is_end for sample in samples], device=device),
            columns([sample.logprobs for sample in samples], 0.0),
            columns([sample.observed for sample in samples], False),
            columns([sample.token_rewards for sample in samples], float("nan")),
        )


@dataclass(eq=False)
class _Decoding:
    generator: MegatronGenerator
    model: DecodingModel
    prompts: Iterator[Prompts]
    params: GenerationParams
    slots: int
    environment: Environment | None = None
    on_tokens: OnTokens | None = None

    def __post_init__(self) -> None:
        generator, params = self.generator, self.params
        self.longest = generator.max_sequence_length
        self.copy = generator.split.copy
        self.queue = _numbered(self.prompts, params.max_length, self.longest)
        self.cache = self.model.new_cache(self.slots)
        self.batch = DecodingBatch(
            self.slots,
            params,
            generator.end_conditions(params.end_strings),
            generator.vocab_size,
            get_device(),
            LOOK_EVERY[get_device().type] if self.on_tokens is None else 1,
            1 if self.environment is None else self.environment.max_turns,
        )
        self.graphs = generator.step_graphs()
        self.conversations: dict[int, Conversation] = {}

    def samples(self) -> Iterator[FinishedSample]:
        """The samples as they end; all ranks of a TP x PP group iterate to the end."""
        batch = self.batch
        try:
            self._refill([])
            while batch.active:
                ended = []
                if batch.pausing < batch.active:
                    for _ in range(batch.steps()):
                        self._step()
                    ended = batch.look()
                if self.environment is None:
                    over = [(slot, batch.finished(slot, is_end)) for slot, is_end in ended]
                else:
                    self._ask(self.environment, ended)
                    over = self._go_on(self.environment)
                yield from (sample for _, sample in over)
                self._refill([slot for slot, _ in over])
        except _FailedElsewhere:
            raise
        except Exception as error:
            _on_all_expert_ranks(done=False, failure=error)
            raise
        finally:
            self.graphs.close()
        while not _on_all_expert_ranks(done=True):
            # One token through the model, for the ranks that need this one's experts.
            progress.made()
            cache = self.model.new_cache(1)
            cache.reserve(1)
            first = torch.zeros(1, dtype=torch.int64, device=get_device())
            self.model.forward(first.unsqueeze(1), DecodingPass(cache, first, 1))

    def _refill(self, done: list[int]) -> None:
        """Give slots to the next samples once a part is free: their prompts share a pass."""
        batch, cache = self.batch, self.cache
        wanted = len(done) + batch.slots - batch.active
        while len(batch.waiting) < wanted and (samples := next(self.queue, None)) is not None:
            batch.waiting.extend(samples)
        admit = wanted >= min(batch.slots * ADMITTED_AT, len(batch.waiting))
        moves, fresh, shared = batch.refill(done, admit)
        self._reserve()
        cache.copy(moves, batch.longest())
        # All tokens but the last one.
        self._feed([(slot, 0, len(batch.in_slots[slot].ids) - 1) for slot in fresh])
        cache.copy(shared, batch.longest())

    def _feed(self, pieces: list[tuple[int, int, int]]) -> None:
        """Feed each (slot, first position, position beyond the last)."""
        for slots, starts, width in _feeding_passes(pieces):
            progress.made()
            _on_all_expert_ranks(done=False)
            rows = zip(slots, starts, strict=True)
            ids = [self.batch.in_slots[slot].ids[start : start + width] for slot, start in rows]
            tokens = padded([*ids, [0] * width], self.batch.device)[:-1]
            places = torch.tensor(slots, device=self.batch.device)
            self.model.forward(tokens, FeedingPass(self.cache, places, starts, width))

    def _reserve(self) -> None:
        """Make room for the samples in slots; on a GPU in large steps, as captures are lost."""
        width = self.batch.width
        if self.batch.device.type != "cpu":
            width = max(width, min(rounded(width), self.longest))
        self.cache.reserve(width)

    def _step(self) -> None:
        progress.made()
        _on_all_expert_ranks(done=False)
        batch, cache = self.batch, self.cache
        rows, width = batch.shape()
        width = min(width, cache.width)

        def step() -> Tensor:
            which = DecodingPass(cache, batch.positions[:rows], width)
            hidden = self.model.forward(batch.fed[:rows].unsqueeze(1), which)
            if hidden is not None:
                tokens, logprobs = batch.choose(self.model.logits(hidden))
            else:
                tokens, logprobs = torch.empty_like(batch.fed[:rows]), None
                if self.params.return_logprobs:
                    logprobs = torch.empty_like(tokens, dtype=torch.float32)
            ranks = torch.distributed.get_process_group_ranks(self.copy)
            if len(ranks) > 1:
                source = ranks[-self.generator.split.tensor.size()]  # the last stage's first rank
                torch.distributed.broadcast(tokens, src=source, group=self.copy)
                if logprobs is not None:
                    torch.distributed.broadcast(logprobs, src=source, group=self.copy)
            batch.append(tokens, logprobs)
            return tokens

        tokens = batch.keep(self.graphs.run((rows, width, cache.width), step))
        if self.on_tokens is not None:
            numbers = torch.tensor([each.sample.number for each in batch.in_slots])
            self.on_tokens(numbers, tokens)

    def _ask(self, environment: Environment, ended: list[tuple[int, bool]]) -> None:
        for slot, is_end in ended:
            sample = self.batch.in_slots[slot].sample
            conversation = self.conversations.setdefault(sample.number, Conversation())
            conversation.responses.append(self.batch.pause(slot))
            conversation.is_end = is_end
            if self.generator.asks_environment:
                details = Details(is_end, sample.record, self.batch.response_logprobs(slot))
                said = tuple(conversation.responses)
                environment.submit(sample.number, sample.seed, sample.prompt, said, details)

    def _go_on(self, environment: Environment) -> list[tuple[int, FinishedSample]]:
        """Take replies that have come; returns slots and samples of ended conversations."""
        batch = self.batch
        if not batch.pausing:
            return []
        wait = batch.pausing == batch.active
        replies = on_rank_zero(lambda: environment.replies(wait), self.copy)
        over, fed = [], []
        for slot, held in enumerate(batch.in_slots):
            sample, length = held.sample, len(held.ids)
            if (reply := replies.get(sample.number)) is None:
                continue
            conversation = self.conversations[sample.number]
            conversation.rewards.append((length - 1, reply.reward))
            # A response of one token must have room after the observation.
            room = length + len(reply.observation) < self.longest
            more = conversation.is_end and len(conversation.responses) < environment.max_turns
            if not reply.done and more and room:
                start, stop = batch.extend(slot, reply.observation, self.longest)
                conversation.observed.append((start + 1, stop + 1))
                fed.append((slot, start, stop))
                continue
            if not reply.done and self.generator.asks_environment:
                environment.end(sample.number)
            is_end = reply.done and conversation.is_end
            over.append((slot, batch.finished(slot, is_end, conversation)))
            del self.conversations[sample.number]
        self._reserve()
        self._feed(fed)
        return over


def _numbered(
    batches: Iterator[Prompts], max_length: int, longest: int
) -> Iterator[list[WaitingSample]]:
    number = 0
    for inputs in batches:
        samples = []
        for tokens, length, *seed_and_record in zip(*map(Tensor.tolist, inputs), strict=True):
            limit = min(length + max_length, longest)
            samples.append(WaitingSample(number, tuple(tokens[:length]), limit, *seed_and_record))
            number += 1
        yield samples


def _feeding_passes(
    fed: list[tuple[int, int, int]],
) -> Iterator[tuple[list[int], list[int], int]]:
    """(slots, first positions, width) of the passes that feed each of `fed`."""
    left = sorted(fed, key=lambda each: each[1] - each[2])
    while left:
        most = left[0][2] - left[0][1]
        first = left[: max(1, PREFILL_TOKENS // max(1, most))]
        share = [each for each in first if each[2] - each[1] >= LEAST_FILLED * most]
        left = left[len(share) :]
        for done in range(0, most, PREFILL_TOKENS):
            width = min(PREFILL_TOKENS, most - done)
            yield [slot for slot, _, _ in share], [start + done for _, start, _ in share], width


class _FailedElsewhere(RuntimeError):
    """Generation failed on another rank, which has told this one."""


def _on_all_expert_ranks(done: bool, failure: Exception | None = None) -> bool:
    """Expert-parallel ranks call it before a pass: True if all are `done`, else all make it."""
    if parallel_state.get_expert_model_parallel_world_size() == 1:
        return done
    # 0: done, 1: makes a pass, 2: has failed.
    group = parallel_state.get_expert_model_parallel_group()
    state = largest(2 if failure else int(not done), group)
    if failure is None and state == 2:
        raise _FailedElsewhere("generation failed on another expert-parallel rank; see its error.")
    return state == 0
