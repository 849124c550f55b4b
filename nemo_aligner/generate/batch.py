# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Responses of a policy to a file of prompts, on all ranks. Random streams depend on the seed, the
line of the prompt and the response's number: responses are the same for any split.
"""

import dataclasses
import sys
from collections.abc import Sequence

import torch
from nemo.utils import logging
from tqdm import tqdm

from nemo_aligner.core.errors import UserError
from nemo_aligner.core.tensors import sample_seeds
from nemo_aligner.core.tokenizer import response_text, tokenizer_fingerprint
from nemo_aligner.data.nlp.fields import CONVERSATIONS
from nemo_aligner.data.nlp.sources import Record
from nemo_aligner.generate.policy import ChatForm, Policy, prompt_text
from nemo_aligner.generate.responses import Response
from nemo_aligner.generation.batch import padded
from nemo_aligner.parallel import parallel_state


@dataclasses.dataclass(frozen=True)
class Sample:
    place: int  # in the output
    prompt: int  # number of its prompt
    tokens: list[int]  # of its prompt
    seed: int  # of its random stream


def respond(
    policy: Policy, prompts: Sequence[Record], form: ChatForm, source: str
) -> list[Response]:
    """The responses to `prompts`, in order; all ranks call it with the same prompts and get all.
    `UserError`: a prompt without tokens, or one that leaves no room for a response.
    """
    records = [form.record(prompt, policy.encoder.form) for prompt in prompts]
    tokens = tokenize(policy, records, source)
    for used in filter(None, map(policy.encoder.form_of, records)):
        policy = policy.with_end_strings(used.end_strings)
    texts = []
    for prompt, ids in zip(prompts, tokens, strict=True):
        text = prompt_text(prompt)
        texts.append(policy.tokenizer.ids_to_text(ids) if text is None else text)
    # Seeds are those of a rollout at step 0 (`algorithms.rollouts.repeat_prompts`): more responses
    # leave the first ones what they were.
    count = policy.responses_per_prompt
    first = sample_seeds(policy.seed, 0, torch.arange(len(tokens)))
    seeds = [first] + [sample_seeds(policy.seed, n, first) for n in range(1, count)]
    samples = [
        Sample(number * count + n, number, ids, int(seeds[n][number]))
        for number, ids in enumerate(tokens)
        for n in range(count)
    ]
    responses = generate_samples(policy, texts, samples)
    of_prompt = ("text", "prompt", *CONVERSATIONS)
    for sample, response in zip(samples, responses, strict=True):
        columns = prompts[sample.prompt].items()
        response.columns.update({k: v for k, v in columns if k not in of_prompt})
    return responses


def generate_samples(
    policy: Policy, prompts: Sequence[str], samples: Sequence[Sample]
) -> list[Response]:
    """The responses of `samples`, by their places, with the texts of `prompts` by number; all
    ranks call it, with the same samples, and all get the responses.
    """
    pad_id, batches = policy.tokenizer.eos_id, deal(samples, policy.micro_batch_size)
    dealt = [sample for batch in batches for sample in batch]
    inputs = (
        (
            padded([sample.tokens for sample in batch], torch.device("cpu"), pad_id),
            torch.tensor([len(sample.tokens) for sample in batch]),
            torch.tensor([sample.seed for sample in batch]),
        )
        for batch in batches
    )
    params = dataclasses.replace(policy.params, return_logprobs=True)
    fingerprint = tokenizer_fingerprint(policy.tokenizer)
    own: dict[int, Response] = {}
    silent = parallel_state.get_rank() != 0 or not sys.stderr.isatty()
    with tqdm(total=len(dealt), desc="responses", disable=silent, dynamic_ncols=True) as progress:
        for numbers, output in policy.generator.stream(inputs, params, policy.micro_batch_size):
            assert output.logprobs is not None
            rows = zip(
                numbers,
                output.response_tokens.tolist(),
                output.response_lengths.tolist(),
                output.is_end.tolist(),
                output.logprobs.double().sum(1).tolist(),
                strict=True,
            )
            for number, tokens, end, is_end, logprob_sum in rows:
                sample = dealt[number]
                response = tokens[len(sample.tokens) : end]
                own[sample.place] = Response(
                    prompt=prompts[sample.prompt],
                    response=response_text(policy.tokenizer, response),
                    length=len(response),
                    is_end=is_end,
                    logprob_sum=logprob_sum,
                    prompt_tokens=sample.tokens,
                    response_tokens=response,
                    tokenizer=fingerprint,
                )
            progress.update(len(numbers))
    is_source = parallel_state.get_model_parallel_src_rank() == parallel_state.get_rank()
    by_place: dict[int, Response] = {}
    for part in policy.group.gather_objects(own if is_source else {}):
        by_place |= part
    return [by_place[place] for place in range(len(samples))]


def tokenize(policy: Policy, prompts: Sequence[Record], source: str) -> list[list[int]]:
    """`UserError`: a prompt without tokens, or one that leaves no room for a response."""
    tokens = []
    for number, prompt in enumerate(prompts, start=1):
        try:
            tokens.append(policy.encoder.prompt(prompt))
        except UserError as error:
            raise UserError(f"{source}, prompt {number}: {error}") from None
        if not tokens[-1]:
            raise UserError(f"{source}: prompt {number} has no tokens; remove it.")
    room = policy.generator.max_sequence_length
    long = [number for number, ids in enumerate(tokens, start=1) if len(ids) >= room]
    if long:
        raise UserError(
            f"{source}: {len(long)} of {len(tokens)} prompts leave no room for a response within "
            f"the {room} positions of the model; the first is prompt {long[0]} with "
            f"{len(tokens[long[0] - 1])} tokens. Shorten or remove them, or raise "
            "model.encoder_seq_length if the model can do more."
        )
    tight = sum(len(ids) + policy.params.max_length > room for ids in tokens)
    if tight and parallel_state.get_rank() == 0:
        logging.warning(
            f"{tight} of {len(tokens)} prompts leave less than length_params.max_length="
            f"{policy.params.max_length} of the model's {room} positions: their responses are cut "
            "there."
        )
    return tokens


def deal(samples: Sequence[Sample], micro_batch_size: int) -> list[list[Sample]]:
    """This data-parallel rank's micro-batches, of prompts of similar length. Every rank gets as
    many, perhaps with copies: ranks that hold each other's experts must generate together.
    """
    ordered = sorted(samples, key=lambda sample: (len(sample.tokens), sample.place))
    batches = [
        ordered[start : start + micro_batch_size]
        for start in range(0, len(ordered), micro_batch_size)
    ]
    size = parallel_state.get_data_parallel_world_size()
    batches += [batches[-1]] * (-len(batches) % size)
    return batches[parallel_state.get_data_parallel_rank() :: size]
