# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Text generation: the interface that every engine has, and the engine that decodes on the
Megatron model itself.

Shapes: b rows, W width of the prompts, P prompt length, R total length (prompt and response), V
vocabulary.
"""

import contextlib
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.utils import unwrap_model
from torch import Tensor

from nemo_aligner.core.errors import UserError
from nemo_aligner.generation.sampling import choose_tokens, sample_uniforms, seen_tokens
from nemo_aligner.generation.text_generation_utils import EndConditions, GenerationParams
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import rebalance_nd_tensor
from nemo_aligner.parallel.device import get_device


@dataclass
class GenerationOutput:
    """Prompts with their responses.

    Attributes:
        response_tokens: int64 `[b, max R]`, prompt and response, then eos.
        response_lengths: int64 `[b]`, R; the token that ended a response counts.
        is_end: bool `[b]`, True if the response ended by itself (eos or an end string), False if
            its room was used up.
        logprobs: float32 `[b, max R - 1]` or None. Column t scores token t+1, on `[P-1, R-1)`, 0
            elsewhere; over the whole vocabulary at the sampling temperature (1 if greedy), before
            repetition penalty, top-k and top-p.
    """

    response_tokens: Tensor
    response_lengths: Tensor
    is_end: Tensor
    logprobs: Tensor | None = None


class TextGenerator(ABC):
    """What trainers and models know of a generation engine."""

    @abstractmethod
    def generate(
        self,
        prompts: Tensor,
        prompt_lengths: Tensor,
        sample_seeds: Tensor,
        params: GenerationParams,
    ) -> GenerationOutput:
        """Generate one response to each prompt.

        The text of a row depends on its prompt, its seed, `params` and the weights: not on the
        other rows, their order, the rank or the split (up to rounding: in bf16 two near-equal
        logits may change places when the shape of a batch does). An engine is free to work on the
        rows in any order and number.

        Args:
            prompts: int64 `[b, W]`, padded on the right; only the first P columns of a row are
                read.
            prompt_lengths: int64 `[b]`, P.
            sample_seeds: int64 `[b]`, the random stream of each row.
            params: how to generate.

        Returns:
            The responses, on `get_device()`; the same on all ranks of a model.

        Raises:
            UserError: a prompt that is empty, leaves no room for a response, or holds ids outside
            the vocabulary.
            RuntimeError: the model's logits are not finite.
        """


class MegatronGenerator(TextGenerator):
    """Decodes on the Megatron model that is being trained, with a cache of keys and values.

    All rows advance in step, one column at a time after the columns that every prompt has: a
    longer prompt is fed to the model (not generated) until its end. So each token keeps the
    position that it has in training. Rows that have ended are taken out of the batch whenever they
    are half of it.

    Every rank of a TP x PP x CP group calls `generate` with the same arguments; the data-parallel
    ranks are independent of each other. Tokens are chosen on one rank and sent to the others that
    hold parts of the same copy of the weights (TP x PP), so these cannot disagree.

    Sequences are not split while they grow: the context-parallel ranks share out the rows of a
    batch, each decodes its own as if it were alone, and all get the results.

    With expert parallelism the data-parallel ranks of an expert-parallel group hold each other's
    experts: they must call `generate` equally often, each with rows of its own, and advance in
    lockstep. A rank whose rows are done goes through the model with a stand-in until the last one
    is done.

    Args:
        model: model chunks of this pipeline stage, wrapped or not.
        tokenizer: NeMo tokenizer; its eos ends a text and pads it.
        max_sequence_length: longest prompt with response. A learned position embedding may limit
            it further.
    """

    def __init__(self, model: list[torch.nn.Module], tokenizer, max_sequence_length: int):
        self.model = list(model)
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.max_sequence_length = max_sequence_length
        for module in unwrap_model(self.model):
            if module.position_embedding_type == "learned_absolute":
                self.max_sequence_length = min(
                    self.max_sequence_length, module.max_sequence_length
                )
        self._end_conditions: dict[tuple[str, ...], EndConditions] = {}

    @torch.no_grad()
    def generate(
        self,
        prompts: Tensor,
        prompt_lengths: Tensor,
        sample_seeds: Tensor,
        params: GenerationParams,
    ) -> GenerationOutput:
        device = get_device()
        prompts, lengths = prompts.to(device), prompt_lengths.to(device)
        limits = self._length_limits(prompts, lengths, params)
        if params.end_strings not in self._end_conditions:
            self._end_conditions[params.end_strings] = EndConditions(
                self.tokenizer, params.end_strings
            )
        end = self._end_conditions[params.end_strings]

        def decode(*rows: Tensor) -> GenerationOutput:
            return self._decode(_Rows(*rows, params, end, self.vocab_size))

        inputs = prompts, lengths, limits, sample_seeds.to(device)
        if parallel_state.get_context_parallel_world_size() == 1:
            return decode(*inputs)
        return _share_out_rows(decode, inputs, pad_id=end.token_ids[0])

    def _decode(self, rows: "_Rows") -> GenerationOutput:
        """The responses of `rows`; all ranks of a TP x PP group call it."""
        context = StaticInferenceContext(rows.tokens.size(0), rows.tokens.size(1))
        with decoding_mode(self.model):
            while True:
                logits = self._forward(
                    rows.tokens[:, context.sequence_len_offset : rows.cursor], context
                )
                tokens, logprobs = self._share(
                    *(rows.choose(logits) if logits is not None else (None, None)), rows
                )
                failure = None
                try:
                    rows.append(tokens, logprobs)
                except RuntimeError as error:
                    failure = error
                done = rows.all_done()
                everybody_done = _on_all_expert_ranks(done, failure)
                if done:
                    break
                keep = rows.compact()
                if keep is not None:
                    for layer, memory in context.key_value_memory_dict.items():
                        context.key_value_memory_dict[layer] = tuple(
                            cache[:, keep] for cache in memory
                        )
                context.enable_decode_mode()
            while not everybody_done:
                self._forward(rows.tokens[:1, :1], StaticInferenceContext(1, 1))
                everybody_done = _on_all_expert_ranks(True)
        return rows.output()

    def _length_limits(self, prompts: Tensor, lengths: Tensor, params: GenerationParams) -> Tensor:
        """int64 `[b]`: longest R of each row. Raises `UserError` for prompts that cannot be
        answered.
        """
        shortest, longest = int(lengths.min()), int(lengths.max())
        if shortest < 1:
            raise UserError(
                f"the prompt in row {int(lengths.argmin())} is empty; a prompt needs at least one "
                "token."
            )
        if longest > prompts.size(1):
            raise UserError(
                f"a prompt length of {longest} exceeds the width of the prompts, "
                f"{prompts.size(1)}."
            )
        if longest >= self.max_sequence_length:
            raise UserError(
                f"a prompt of {longest} tokens (row {int(lengths.argmax())}) leaves no room for a "
                "response within the "
                f"{self.max_sequence_length} positions of the model; shorten it or raise "
                "model.encoder_seq_length."
            )
        inside = torch.arange(prompts.size(1), device=prompts.device) < lengths.unsqueeze(1)
        wrong = inside & ((prompts < 0) | (prompts >= self.vocab_size))
        if wrong.any():
            raise UserError(
                f"a prompt holds the id {int(prompts[wrong][0])}, outside the tokenizer's "
                "vocabulary of "
                f"{self.vocab_size} ids; was it tokenized with another tokenizer?"
            )
        return (lengths + params.max_length).clamp(max=self.max_sequence_length)

    def _forward(self, tokens: Tensor, context: StaticInferenceContext) -> Tensor | None:
        """Feed `tokens` `[b, n]` after those in the cache: float32 logits `[b, V]` of the last one
        on the last stage.

        All ranks of the pipeline call it; stages above the first take their input from the stage
        before.
        """
        rows, width = tokens.shape
        start = context.sequence_len_offset
        positions = torch.arange(start, start + width, device=tokens.device).expand_as(tokens)
        stage = parallel_state.get_pipeline_model_parallel_rank()
        group = parallel_state.get_pipeline_model_parallel_group()
        ranks = torch.distributed.get_process_group_ranks(group)
        for chunk, module in zip(self.model, unwrap_model(self.model), strict=True):
            if not module.pre_process:
                shape, dtype = (
                    (width, rows, module.config.hidden_size),
                    module.config.pipeline_dtype,
                )
                hidden = torch.empty(shape, dtype=dtype, device=tokens.device)
                torch.distributed.recv(hidden, src=ranks[stage - 1], group=group)
                module.set_input_tensor(hidden)
            output = chunk(
                tokens, positions, None, inference_context=context, runtime_gather_output=True
            )
            if not module.post_process:
                torch.distributed.send(
                    output.contiguous(), dst=ranks[(stage + 1) % len(ranks)], group=group
                )
        context.sequence_len_offset += width
        return output[:, -1, : self.vocab_size].float() if module.post_process else None

    def _share(
        self, tokens: Tensor | None, logprobs: Tensor | None, rows: "_Rows"
    ) -> tuple[Tensor, Tensor | None]:
        """Choices of the first tensor-parallel rank of the last stage, on every rank of the
        model.
        """
        group = parallel_state.get_tensor_and_pipeline_parallel_group()
        ranks = torch.distributed.get_process_group_ranks(group)
        if len(ranks) == 1:
            return tokens, logprobs
        source = ranks[-parallel_state.get_tensor_model_parallel_world_size()]
        if tokens is None:
            tokens = torch.empty(rows.tokens.size(0), dtype=torch.int64, device=rows.tokens.device)
        torch.distributed.broadcast(tokens, src=source, group=group)
        if rows.params.return_logprobs:
            if logprobs is None:
                logprobs = torch.empty(
                    rows.tokens.size(0), dtype=torch.float32, device=rows.tokens.device
                )
            torch.distributed.broadcast(logprobs, src=source, group=group)
        return tokens, logprobs


def _on_all_expert_ranks(done: bool, failure: RuntimeError | None = None) -> bool:
    """True if `done` is on all ranks of the expert-parallel group; they call it together.

    Raises:
        RuntimeError: the `failure` of this rank or of another one, on all of them: nobody waits
            for one that left.
    """
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        state = torch.tensor(-1 if failure else int(done), device=get_device())
        torch.distributed.all_reduce(
            state,
            op=torch.distributed.ReduceOp.MIN,
            group=parallel_state.get_expert_model_parallel_group(),
        )
        done = int(state) == 1
        if failure is None and int(state) < 0:
            failure = RuntimeError(
                "generation failed on another rank of this expert-parallel group; see its error."
            )
    if failure is not None:
        raise failure
    return done


def _share_out_rows(decode, inputs: tuple[Tensor, ...], pad_id: int) -> GenerationOutput:
    """`decode(*inputs)` with the rows split over the context-parallel ranks, which all call it;
    the same on each.

    Raises:
        RuntimeError: `decode` raised one on some rank; on all of them.
    """
    group, size = (
        parallel_state.get_context_parallel_group(),
        parallel_state.get_context_parallel_world_size(),
    )
    mine = torch.arange(len(inputs[0])).tensor_split(size)[
        parallel_state.get_context_parallel_rank()
    ]
    # A rank with no row of its own decodes a copy of the first: nobody may sit out if experts are
    # spread over ranks.
    rows = mine if len(mine) else torch.zeros(1, dtype=torch.int64)
    output, error = None, None
    try:
        output = decode(*(tensor[rows.to(tensor.device)] for tensor in inputs))
    except RuntimeError as failure:
        error = failure
    told = [None] * size
    width = 0 if output is None else output.response_tokens.size(1)
    torch.distributed.all_gather_object(
        told, (None if error is None else str(error), width), group=group
    )
    if error is not None:
        raise error
    for text, _ in told:
        if text is not None:
            raise RuntimeError(text)
    pad = max(width for _, width in told) - width
    kept = slice(len(mine))

    def gather(tensor: Tensor, **pad_options) -> Tensor:
        tensor = (
            torch.nn.functional.pad(tensor, (0, pad), **pad_options)
            if tensor.dim() > 1
            else tensor
        )
        return rebalance_nd_tensor(tensor[kept], group)

    return GenerationOutput(
        gather(output.response_tokens, value=pad_id),
        gather(output.response_lengths),
        gather(output.is_end),
        None if output.logprobs is None else gather(output.logprobs),
    )


class _Rows:
    """State of the rows in one call of `MegatronGenerator.generate`.

    Tensors have one entry per row that is still in the batch; `index` says which row of the caller
    it is. `cursor` is the column that is written next.
    """

    _PER_ROW = (
        "tokens prompt_lengths limits response_lengths is_end done index uniforms seen".split()
    )

    def __init__(
        self,
        prompts,
        lengths,
        limits,
        sample_seeds,
        params: GenerationParams,
        end: EndConditions,
        vocab_size: int,
    ):
        self.params = params
        self.end = end
        device = prompts.device
        width = int(limits.max())
        self.eos_id = end.token_ids[0]
        columns = torch.arange(width, device=device)
        padded = torch.nn.functional.pad(prompts, (0, max(0, width - prompts.size(1))))[:, :width]
        self.tokens = torch.where(columns < lengths.unsqueeze(1), padded, self.eos_id)
        self.prompt_lengths = lengths
        self.limits = limits
        self.response_lengths = limits.clone()
        self.is_end = torch.zeros_like(lengths, dtype=torch.bool)
        self.done = torch.zeros_like(self.is_end)
        self.cursor = int(lengths.min())
        self.index = torch.arange(prompts.size(0), device=device)
        self.uniforms = None
        if not params.use_greedy:
            self.uniforms = sample_uniforms(sample_seeds.to(device), params.max_length)
        self.seen = (
            seen_tokens(self.tokens, lengths, vocab_size)
            if params.repetition_penalty != 1.0
            else None
        )
        self.end_token_ids = torch.tensor(end.token_ids, device=device)
        self.logprobs = None
        if params.return_logprobs:
            self.logprobs = torch.zeros(prompts.size(0), width - 1, device=device)
        self._finished = GenerationOutput(
            self.tokens.clone(), self.response_lengths.clone(), self.is_end.clone(), self.logprobs
        )

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Next token int64 `[b]` of each row from `logits` `[b, V]`, and its log-prob if
        wanted.
        """
        params = self.params
        generated = (self.cursor - self.prompt_lengths).clamp(min=0, max=params.max_length - 1)
        tokens = choose_tokens(
            logits,
            uniforms=None
            if self.uniforms is None
            else self.uniforms.gather(1, generated.unsqueeze(1)).squeeze(1),
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            repetition_penalty=params.repetition_penalty,
            seen=self.seen,
            end_token_ids=self.end_token_ids,
            too_short=generated < params.min_length if params.min_length else None,
        )
        if not params.return_logprobs:
            return tokens, None
        temperature = 1.0 if params.use_greedy else params.temperature
        scores = (logits / temperature).log_softmax(dim=1)
        return tokens, scores.gather(1, tokens.clamp(min=0).unsqueeze(1)).squeeze(1)

    def append(self, tokens: Tensor, logprobs: Tensor | None) -> None:
        """Write column `cursor`: the chosen `tokens` `[b]`, or the prompt's where it goes on, or
        eos after an end.
        """
        cursor, generated = self.cursor, self.cursor - self.prompt_lengths
        if bool((tokens < 0).any()):
            raise RuntimeError(
                f"the model's logits at position {cursor - 1} are not finite: its weights hold "
                "NaN or infinity, or "
                "its activations overflow. Was the learning rate too high?"
            )
        active = (generated >= 0) & ~self.done
        self.tokens[:, cursor] = torch.where(active, tokens, self.tokens[:, cursor])
        if self.seen is not None:
            self.seen.scatter_(1, self.tokens[:, cursor : cursor + 1], True)
        if logprobs is not None:
            self.logprobs[self.index, cursor - 1] = torch.where(active, logprobs, 0.0)
        may_end = active & (generated >= self.params.min_length)
        ended = self.end.ended(
            self.tokens, torch.full_like(generated, cursor), may_end, first=self.prompt_lengths
        )
        self.response_lengths = torch.where(ended, cursor + 1, self.response_lengths)
        self.is_end |= ended
        self.done |= ended | (cursor + 1 >= self.limits)
        self.cursor += 1

    def all_done(self) -> bool:
        return bool(self.done.all())

    def _store(self, rows: Tensor) -> None:
        """Put the results of `rows` (bool or index) aside, under their numbers in the caller's
        batch.
        """
        index = self.index[rows]
        self._finished.response_tokens[index] = self.tokens[rows]
        self._finished.response_lengths[index] = self.response_lengths[rows]
        self._finished.is_end[index] = self.is_end[rows]

    def compact(self) -> Tensor | None:
        """Take the rows that are done out of the batch if they are half of it.

        Returns:
            Numbers of the rows that stay, or None if all do.
        """
        if 2 * int(self.done.sum()) < self.done.numel():
            return None
        self._store(self.done)
        keep = (~self.done).nonzero().squeeze(1)
        for name in self._PER_ROW:
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, value[keep])
        return keep

    def output(self) -> GenerationOutput:
        """Everything, cut to the longest R."""
        self._store(torch.ones_like(self.done))
        output = self._finished
        width = int(output.response_lengths.max())
        output.response_tokens = output.response_tokens[:, :width].contiguous()
        if output.logprobs is not None:
            output.logprobs = output.logprobs[:, : width - 1].contiguous()
        return output


@contextlib.contextmanager
def decoding_mode(model: list[torch.nn.Module]):
    """Inside, the chunks are in evaluation mode and do not split the sequence over TP or CP
    ranks.
    """
    names = ("sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings")
    modules = [module for chunk in model for module in chunk.modules()]
    owners = modules + list(
        {id(m.config): m.config for m in modules if hasattr(m, "config")}.values()
    )
    changed = [
        (owner, name) for owner in owners for name in names if getattr(owner, name, None) is True
    ]
    restore_context = _leave_context_parallelism(modules, owners)
    training = [chunk for chunk in model if chunk.training]
    for owner, name in changed:
        setattr(owner, name, False)
    for chunk in training:
        chunk.eval()
    try:
        yield
    finally:
        for chunk in training:
            chunk.train()
        for owner, name in changed:
            setattr(owner, name, True)
        restore_context()


def _leave_context_parallelism(modules: list[torch.nn.Module], owners: list):
    """Let each module compute as if there were one context-parallel rank; returns the function
    that undoes it.

    Args:
        modules: of the model.
        owners: these and their configurations.
    """
    configs = [owner for owner in owners if getattr(owner, "context_parallel_size", 1) > 1]
    if not configs:
        return lambda: None
    sizes = [config.context_parallel_size for config in configs]
    rotary = [
        (module, module.cp_group) for module in modules if isinstance(module, RotaryEmbedding)
    ]
    # Transformer Engine's attention.
    names = ("cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type")
    attention = [
        (module, [getattr(module, name) for name in names])
        for module in modules
        if hasattr(module, "set_context_parallel_group") and hasattr(module, "cp_comm_type")
    ]

    def set_all(sizes, rotary, attention):
        for config, size in zip(configs, sizes, strict=True):
            config.context_parallel_size = size
        for module, group in rotary:
            module.cp_group = group
        for module, settings in attention:
            module.set_context_parallel_group(*settings)
        RotaryEmbedding.forward.cache_clear()  # it remembers embeddings by length alone

    alone = [(module, [None, None, None, settings[-1]]) for module, settings in attention]
    set_all([1] * len(configs), [(module, None) for module, _ in rotary], alone)
    return lambda: set_all(sizes, rotary, attention)
