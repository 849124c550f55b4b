# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A conversation in the terminal: rank 0 reads and prints, all ranks generate."""

import contextlib
import dataclasses
import importlib
import io
import os
import signal
import sys

import torch
from torch import Tensor

from nemo_aligner.core.errors import UserError
from nemo_aligner.core.tensors import sample_seeds
from nemo_aligner.core.tokenizer import Tokenizer, response_text
from nemo_aligner.data.nlp.sources import Record
from nemo_aligner.generate.policy import ChatForm, Policy
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
    tokenizer, tokens = policy.tokenizer, policy.encoder.prompt(asked)
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


_INCOMPLETE = "\ufffd"  # what the bytes of half a character decode to


class TextStream:
    """Cuts the text of a growing response into pieces that can be shown at once; joined, they are
    `response_text` of all tokens. All are decoded each time, and what may still change is held
    back.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.shown = ""

    def push(self, token: int) -> str:
        """The text that can be shown once `token` has come; may be empty."""
        self.ids.append(token)
        return self._advance(response_text(self.tokenizer, self.ids).rstrip(_INCOMPLETE))

    def finish(self) -> str:
        text = response_text(self.tokenizer, self.ids)
        # A tokenizer that changed its mind about what is shown: what follows the common part.
        self.shown = os.path.commonprefix([self.shown, text])
        return self._advance(text)

    def _advance(self, text: str) -> str:
        if not text.startswith(self.shown):  # the end of the text is not settled yet
            return ""
        piece, self.shown = text[len(self.shown) :], text
        return piece
