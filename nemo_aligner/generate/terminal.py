# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A conversation in the terminal: rank 0 reads and prints, all ranks generate."""

import contextlib
import dataclasses
import importlib
import io
import signal
import sys

import torch
from torch import Tensor

from nemo_aligner.core.errors import UserError
from nemo_aligner.core.tensors import sample_seeds
from nemo_aligner.core.tokenizer import response_text
from nemo_aligner.data.nlp.sources import Record
from nemo_aligner.generate.policy import ChatForm, Policy
from nemo_aligner.generation.text import TextStream
from nemo_aligner.parallel import parallel_state

NEW, EXIT = "/new", "/exit"


def converse(policy: Policy, form: ChatForm) -> None:
    """Respond to each line of the standard input until it ends or says `/exit`; all ranks call it.
    With a chat template the conversation goes on from line to line, and `/new` starts another one;
    else each line is a prompt of its own. A prompt that cannot be used gets a message.
    """
    conversation = policy.encoder.form
    chat = form.resolve(conversation)
    if chat and conversation is not None:
        policy = policy.with_end_strings(conversation.end_strings)
    first = parallel_state.get_rank() == 0
    if first:
        _greet(policy, chat)
    # Ctrl-C is for rank 0, which leaves the terminal as it was and ends the job.
    signal.signal(signal.SIGINT, signal.default_int_handler if first else signal.SIG_IGN)
    messages = form.opening()
    turn = 0
    while (line := policy.group.gather_objects(_read_line() if first else None)[0]) is not None:
        if line.strip() == EXIT:
            break
        if line.strip() == NEW:
            messages = form.opening()
            continue
        if not line.strip():
            continue
        asked = [*messages, {"role": "user", "content": line}]
        try:
            prompt = {"messages": asked} if chat else {"text": line}
            response = _respond(policy, prompt, turn, first)
        except UserError as error:
            if first:
                print(f"({error})", file=sys.stderr, flush=True)
            continue
        turn += 1
        if chat:
            messages = [*asked, {"role": "assistant", "content": response}]


def _greet(policy: Policy, chat: bool) -> None:
    kind = "in the chat template" if chat else "each line is a prompt of its own"
    commands = f"{NEW} starts a new conversation, {EXIT} ends it" if chat else f"{EXIT} ends it"
    print(f"{policy.path}: {kind}; {commands}.", file=sys.stderr, flush=True)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # bytes that are no text end nothing
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # arrows and history at the prompt


def _read_line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _respond(policy: Policy, asked: Record, turn: int, show: bool) -> str:
    """A response to `asked`, a text or messages, printed as it comes if `show`; all ranks call it.
    `turn` is its number: a question may get another response later. `UserError`: the prompt has no
    tokens, or leaves no room; on all ranks.
    """
    tokenizer, room = policy.tokenizer, policy.generator.max_sequence_length
    tokens = policy.encoder.prompt(asked)
    if not 0 < len(tokens) < room:
        remedy = "shorten it" if "text" in asked else f"start a new conversation with {NEW}"
        raise UserError(
            f"the prompt has {len(tokens)} tokens; the model has {room} positions for prompt and "
            f"response: {remedy}"
        )
    stream = TextStream(tokenizer)

    def print_tokens(_places: Tensor, tokens: Tensor) -> None:
        print(stream.push(int(tokens[0])), end="", flush=True)

    output = policy.generator.generate(
        torch.tensor([tokens]),
        torch.tensor([len(tokens)]),
        sample_seeds(policy.seed, 0, torch.tensor([turn])),
        dataclasses.replace(policy.params, return_logprobs=False),
        on_tokens=print_tokens if show else None,
    )
    if show:
        print(stream.finish(), flush=True)
    length = int(output.response_lengths[0])
    return response_text(tokenizer, output.response_tokens[0, len(tokens) : length].tolist())
