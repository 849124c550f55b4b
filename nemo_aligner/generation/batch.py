# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The samples of a batch while they are decoded: prompts, tokens so far, and which are done.

Shapes: b samples, W width of the prompts, P prompt length, R total length (prompt and response), V
vocabulary.
"""

import torch
from torch import Tensor

from nemo_aligner.generation.end_conditions import EndConditions
from nemo_aligner.generation.interface import GenerationOutput
from nemo_aligner.generation.params import GenerationParams
from nemo_aligner.generation.sampling import choose_tokens, sample_uniforms, seen_tokens


class DecodingBatch:
    """The samples of one call of `MegatronGenerator.generate`, while they are decoded.

    Tensors have one entry per sample that is still in the batch; `index` is its place in the
    caller's batch. `cursor` is the column that is written next.

    Args:
        prompts: int64 `[b, W]`, padded on the right.
        lengths: int64 `[b]`, P.
        limits: int64 `[b]`, longest R of each sample.
        sample_seeds: int64 `[b]`, seeds of the samples' random streams.
        params: how to generate.
        end: when a response has ended.
        vocab_size: number of ids.
    """

    _PER_SAMPLE = (
        "tokens prompt_lengths limits response_lengths is_end done index uniforms seen".split()
    )

    def __init__(
        self,
        prompts: Tensor,
        lengths: Tensor,
        limits: Tensor,
        sample_seeds: Tensor,
        params: GenerationParams,
        end: EndConditions,
        vocab_size: int,
    ) -> None:
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
        self.uniforms: Tensor | None = None
        if not params.use_greedy:
            self.uniforms = sample_uniforms(sample_seeds.to(device), params.max_length)
        self.seen: Tensor | None = None
        if params.repetition_penalty != 1.0:
            self.seen = seen_tokens(self.tokens, lengths, vocab_size)
        self.end_token_ids = torch.tensor(end.token_ids, device=device)
        self.logprobs: Tensor | None = None
        if params.return_logprobs:
            self.logprobs = torch.zeros(prompts.size(0), width - 1, device=device)
        self._finished = GenerationOutput(
            self.tokens.clone(), self.response_lengths.clone(), self.is_end.clone(), self.logprobs
        )

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Choose the next token, int64 `[b]`, from `logits` `[b, V]`.

        Returns:
            The tokens, and their log-probs `[b]` if `params.return_logprobs`.
        """
        params = self.params
        generated = (self.cursor - self.prompt_lengths).clamp(min=0, max=params.max_length - 1)
        uniforms = None
        if self.uniforms is not None:
            uniforms = self.uniforms.gather(1, generated.unsqueeze(1)).squeeze(1)
        tokens = choose_tokens(
            logits,
            uniforms=uniforms,
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

    def append(self, tokens: Tensor, logprobs: Tensor | None) -> Tensor:
        """Write column `cursor` and advance it.

        Where a prompt continues, the column keeps its token; after an end it keeps eos; elsewhere
        it takes the chosen `tokens` `[b]`.

        Returns:
            bool `[b]`, True for the samples that took theirs.

        Raises:
            RuntimeError: the model's logits are not finite.
        """
        cursor, generated = self.cursor, self.cursor - self.prompt_lengths
        if bool((tokens < 0).any()):
            raise RuntimeError(
                f"the model's logits at position {cursor - 1} are not finite: its weights hold "
                "NaN or infinity, or its activations overflow. Was the learning rate too high?"
            )
        active = (generated >= 0) & ~self.done
        self.tokens[:, cursor] = torch.where(active, tokens, self.tokens[:, cursor])
        if self.seen is not None:
            self.seen.scatter_(1, self.tokens[:, cursor : cursor + 1], True)
        if logprobs is not None and self.logprobs is not None:
            self.logprobs[self.index, cursor - 1] = torch.where(active, logprobs, 0.0)
        may_end = active & (generated >= self.params.min_length)
        ended = self.end.ended(
            self.tokens, torch.full_like(generated, cursor), may_end, first=self.prompt_lengths
        )
        self.response_lengths = torch.where(ended, cursor + 1, self.response_lengths)
        self.is_end |= ended
        self.done |= ended | (cursor + 1 >= self.limits)
        self.cursor += 1
        return active

    def all_done(self) -> bool:
        """True once every response has ended."""
        return bool(self.done.all())

    def _store(self, which: Tensor) -> None:
        """Store the results of the samples `which` (bool `[b]`) at their places in the output."""
        index = self.index[which]
        self._finished.response_tokens[index] = self.tokens[which]
        self._finished.response_lengths[index] = self.response_lengths[which]
        self._finished.is_end[index] = self.is_end[which]

    def compact(self) -> Tensor | None:
        """Remove the samples that are done from the batch if they are half of it.

        Returns:
            Indices of the samples that stay, or None if all do.
        """
        if 2 * int(self.done.sum()) < self.done.numel():
            return None
        self._store(self.done)
        keep = (~self.done).nonzero().squeeze(1)
        for name in self._PER_SAMPLE:
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, value[keep])
        return keep

    def output(self) -> GenerationOutput:
        """All samples, cut to the longest R."""
        self._store(torch.ones_like(self.done))
        output = self._finished
        width = int(output.response_lengths.max())
        output.response_tokens = output.response_tokens[:, :width].contiguous()
        if output.logprobs is not None:
            output.logprobs = output.logprobs[:, : width - 1].contiguous()
        return output
