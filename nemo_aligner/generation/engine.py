# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The engine that decodes on the Megatron model that is being trained.

Shapes: b samples, W width of the prompts, P prompt length, R total length (prompt and response), V
vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.utils import unwrap_model
from torch import Tensor

from nemo_aligner.core.errors import UserError
from nemo_aligner.core.tokenizer import Tokenizer
from nemo_aligner.generation.batch import DecodingBatch
from nemo_aligner.generation.end_conditions import EndConditions
from nemo_aligner.generation.interface import GenerationOutput, OnTokens, TextGenerator
from nemo_aligner.generation.params import GenerationParams
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import rebalance_nd_tensor
from nemo_aligner.parallel.device import get_device
from nemo_aligner.parallel.megatron_switches import decoding_mode


class MegatronGenerator(TextGenerator):
    """Decodes on the Megatron model that is being trained, with a cache of keys and values.

    All samples advance together, one column at a time after the columns that every prompt has: a
    longer prompt is fed to the model (not generated) until its end. So each token keeps the
    position that it has in training. Samples that have ended leave the batch whenever they are
    half of it.

    Every rank of a TP x PP x CP group calls `generate` with the same arguments; the data-parallel
    ranks are independent of each other. Tokens are chosen on one rank and sent to the others that
    hold parts of the same copy of the weights (TP x PP), so these cannot disagree.

    Sequences are not split while they grow: the samples of a batch are divided among the
    context-parallel ranks, each decodes its own as if it were alone, and all get the results.

    With expert parallelism the data-parallel ranks of an expert-parallel group hold each other's
    experts: they must call `generate` equally often, each with its own samples, and advance in
    lockstep. A rank whose samples are done passes a single dummy token through the model until
    the last rank is done.

    Args:
        model: model chunks of this pipeline stage, wrapped or not.
        tokenizer: NeMo tokenizer; its eos ends a response and pads the batch.
        max_sequence_length: longest prompt with response. A learned position embedding may limit
            it further.
    """

    def __init__(
        self, model: Sequence[torch.nn.Module], tokenizer: Tokenizer, max_sequence_length: int
    ) -> None:
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
        on_tokens: OnTokens | None = None,
    ) -> GenerationOutput:
        """See `TextGenerator.generate`; every rank of a TP x PP x CP group calls it.

        With context parallelism `on_tokens` sees the samples of its own rank alone, which rank 0
        numbers as the caller does.
        """
        device = get_device()
        prompts, lengths = prompts.to(device), prompt_lengths.to(device)
        limits = self._length_limits(prompts, lengths, params)
        if params.end_strings not in self._end_conditions:
            self._end_conditions[params.end_strings] = EndConditions(
                self.tokenizer, params.end_strings
            )
        end = self._end_conditions[params.end_strings]

        def decode(
            prompts: Tensor, lengths: Tensor, limits: Tensor, seeds: Tensor
        ) -> GenerationOutput:
            batch = DecodingBatch(prompts, lengths, limits, seeds, params, end, self.vocab_size)
            return self._decode(batch, on_tokens)

        inputs = prompts, lengths, limits, sample_seeds.to(device)
        if parallel_state.get_context_parallel_world_size() == 1:
            return decode(*inputs)
        return _divide_among_context_ranks(decode, inputs, pad_id=end.token_ids[0])

    def _decode(self, batch: DecodingBatch, on_tokens: OnTokens | None = None) -> GenerationOutput:
        """Generate the responses of a batch; all ranks of a TP x PP group call it."""
        context = StaticInferenceContext(batch.tokens.size(0), batch.tokens.size(1))
        with decoding_mode(self.model):
            while True:
                logits = self._forward(
                    batch.tokens[:, context.sequence_len_offset : batch.cursor], context
                )
                chosen = None if logits is None else batch.choose(logits)
                tokens, logprobs = self._broadcast_choice(chosen, batch)
                failure = None
                try:
                    new = batch.append(tokens, logprobs)
                    if on_tokens is not None and bool(new.any()):
                        on_tokens(batch.index[new], batch.tokens[new, batch.cursor - 1])
                except RuntimeError as error:
                    failure = error
                done = batch.all_done()
                everybody_done = _on_all_expert_ranks(done, failure)
                if done:
                    break
                keep = batch.compact()
                if keep is not None:
                    for layer, memory in context.key_value_memory_dict.items():
                        context.key_value_memory_dict[layer] = tuple(
                            cache[:, keep] for cache in memory
                        )
                context.enable_decode_mode()
            while not everybody_done:
                self._forward(batch.tokens[:1, :1], StaticInferenceContext(1, 1))
                everybody_done = _on_all_expert_ranks(True)
        return batch.output()

    def _length_limits(self, prompts: Tensor, lengths: Tensor, params: GenerationParams) -> Tensor:
        """int64 `[b]`: longest R of each sample.

        Raises:
            UserError: a prompt that no response can be generated to.
        """
        shortest, longest = int(lengths.min()), int(lengths.max())
        if shortest < 1:
            raise UserError(
                f"prompt {int(lengths.argmin())} of the batch is empty; a prompt needs at least "
                "one token."
            )
        if longest > prompts.size(1):
            raise UserError(
                f"a prompt length of {longest} exceeds the width of the prompts, "
                f"{prompts.size(1)}."
            )
        if longest >= self.max_sequence_length:
            raise UserError(
                f"prompt {int(lengths.argmax())} of the batch has {longest} tokens and leaves no "
                f"room for a response within the {self.max_sequence_length} positions of the "
                "model; shorten it or raise model.encoder_seq_length."
            )
        inside = torch.arange(prompts.size(1), device=prompts.device) < lengths.unsqueeze(1)
        wrong = inside & ((prompts < 0) | (prompts >= self.vocab_size))
        if wrong.any():
            raise UserError(
                f"a prompt holds the id {int(prompts[wrong][0])}, outside the tokenizer's "
                f"vocabulary of {self.vocab_size} ids; was it tokenized with another tokenizer?"
            )
        return (lengths + params.max_length).clamp(max=self.max_sequence_length)

    def _forward(self, tokens: Tensor, context: StaticInferenceContext) -> Tensor | None:
        """Feed `tokens` `[b, n]` to the model, after those in the cache.

        All ranks of the pipeline call it; each stage but the first receives its input from the
        stage before.

        Returns:
            float32 logits `[b, V]` of the last token on the last stage, None on the others.
        """
        samples, width = tokens.shape
        start = context.sequence_len_offset
        positions = torch.arange(start, start + width, device=tokens.device).expand_as(tokens)
        stage = parallel_state.get_pipeline_model_parallel_rank()
        group = parallel_state.get_pipeline_model_parallel_group()
        ranks = torch.distributed.get_process_group_ranks(group)
        for chunk, module in zip(self.model, unwrap_model(self.model), strict=True):
            if not module.pre_process:
                shape = (width, samples, module.config.hidden_size)
                dtype = module.config.pipeline_dtype
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

    def _broadcast_choice(
        self, chosen: tuple[Tensor, Tensor | None] | None, batch: DecodingBatch
    ) -> tuple[Tensor, Tensor | None]:
        """Send what the first tensor-parallel rank of the last stage chose to all TP x PP ranks.

        Args:
            chosen: what `DecodingBatch.choose` returns, on the last stage; None on the others.
        """
        if chosen is None:
            size, device = batch.tokens.size(0), batch.tokens.device
            tokens, logprobs = torch.empty(size, dtype=torch.int64, device=device), None
            if batch.params.return_logprobs:
                logprobs = torch.empty(size, dtype=torch.float32, device=device)
        else:
            tokens, logprobs = chosen
        group = parallel_state.get_tensor_and_pipeline_parallel_group()
        ranks = torch.distributed.get_process_group_ranks(group)
        if len(ranks) > 1:
            source = ranks[-parallel_state.get_tensor_model_parallel_world_size()]
            torch.distributed.broadcast(tokens, src=source, group=group)
            if logprobs is not None:
                torch.distributed.broadcast(logprobs, src=source, group=group)
        return tokens, logprobs


def _on_all_expert_ranks(done: bool, failure: RuntimeError | None = None) -> bool:
    """True if `done` is True on all ranks of the expert-parallel group, which all call it.

    Raises:
        RuntimeError: the `failure` of this rank or of another one, on all of them, so that no
            rank waits for one that left.
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


_Decode = Callable[[Tensor, Tensor, Tensor, Tensor], GenerationOutput]


def _divide_among_context_ranks(
    decode: _Decode, inputs: tuple[Tensor, Tensor, Tensor, Tensor], pad_id: int
) -> GenerationOutput:
    """Call `decode(*inputs)` with the samples divided among the context-parallel ranks.

    All of these call it, and all get the whole result.

    Raises:
        RuntimeError: `decode` raised one on some rank; on all of them.
    """
    group = parallel_state.get_context_parallel_group()
    size = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()
    own = torch.arange(len(inputs[0])).tensor_split(size)[rank]
    # A rank without samples of its own decodes a copy of the first: if experts are spread over
    # ranks, none may be absent.
    index = own if len(own) else torch.zeros(1, dtype=torch.int64)
    prompts, lengths, limits, seeds = (tensor[index.to(tensor.device)] for tensor in inputs)
    output, error = None, None
    try:
        output = decode(prompts, lengths, limits, seeds)
    except RuntimeError as failure:
        error = failure
    # By rank: the error message, and the width of the output.
    outcomes: list[tuple[str | None, int]] = [(None, 0)] * size
    width = 0 if output is None else output.response_tokens.size(1)
    torch.distributed.all_gather_object(
        outcomes, (None if error is None else str(error), width), group=group
    )
    messages = [message for message, _ in outcomes if message is not None]
    if output is None or messages:
        raise error or RuntimeError(messages[0])
    pad = max(width for _, width in outcomes) - width

    def gather(tensor: Tensor, pad_value: float = 0.0) -> Tensor:
        if tensor.dim() > 1:
            tensor = torch.nn.functional.pad(tensor, (0, pad), value=pad_value)
        return rebalance_nd_tensor(tensor[: len(own)], group)

    return GenerationOutput(
        gather(output.response_tokens, pad_id),
        gather(output.response_lengths),
        gather(output.is_end),
        None if output.logprobs is None else gather(output.logprobs),
    )
