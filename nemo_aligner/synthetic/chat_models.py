# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What continues conversations: the built-in engine with a policy of this project
(`EngineChatModel`), or a server that speaks OpenAI's chat protocol (`ServedChatModel`).

A response depends on its conversation, its seed and the settings, not on what it is computed
together with; a server of others promises that as far as it honours seeds.
"""

import concurrent.futures
import dataclasses
import json
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from nemo_aligner.config.access import is_web_address, shown_url
from nemo_aligner.core.errors import UserError, one_line
from nemo_aligner.data.nlp.chat_records import Message
from nemo_aligner.parallel.collectives import on_rank_zero
from nemo_aligner.servers.web import TRY_AGAIN, NoReplyError, post_json

if TYPE_CHECKING:
    from nemo_aligner.generate.policy import Policy

FIRST_PAUSE_S = 1.0


@dataclasses.dataclass(frozen=True)
class Turn:
    """A conversation to continue, and the seed of the response's random stream."""

    messages: list[Message]
    seed: int


class ChatModel(Protocol):
    """Continues conversations.

    Attributes:
        settings: what a response depends on beside its conversation and its seed.
    """

    settings: dict[str, Any]

    def respond(
        self, turns: Sequence[Turn], temperature: float | None = None
    ) -> list[str | Exception]:
        """The response to each conversation, or its error, at this or the usual temperature."""


# --- servers ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How responses are sampled; None: as the server does by itself."""

    temperature: float | None = None  # 0 is greedy
    top_p: float | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()  # texts that end a response
    # top_k, repetition_penalty, min_tokens: servers of OpenAI do not know them
    top_k: int | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None

    def fields(self) -> dict[str, Any]:
        fields = {key: value for key, value in dataclasses.asdict(self).items() if value}
        if self.temperature is not None:
            fields["temperature"] = self.temperature
        return fields


class ServedChatModel:
    """A server with OpenAI's chat protocol.

    Args:
        url: of its completions, ".../v1/chat/completions".
        model: the name that it serves the model under; "": it has one.
        api_key: that it asks for, or None.
        timeout_s: of one request.
    """

    def __init__(
        self,
        url: str,
        model: str,
        sampling: Sampling,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        tries: int = 3,
        at_once: int = 32,
    ) -> None:
        if not is_web_address(url):
            raise UserError(
                f"{shown_url(url)} is no address of a server: it begins with http:// or https://, "
                "names a host, and holds no user or password, which a key takes the place of."
            )
        self.url, self.model, self.sampling = url, model, sampling
        self.settings = {"model": model or shown_url(url), **sampling.fields()}
        self.timeout_s, self.tries, self.at_once = timeout_s, tries, at_once
        self._api_key = api_key

    def respond(
        self, turns: Sequence[Turn], temperature: float | None = None
    ) -> list[str | Exception]:
        """The response to each conversation, or its error; the first rank asks."""

        def ask_all() -> list[str | Exception]:
            with concurrent.futures.ThreadPoolExecutor(self.at_once) as pool:
                return list(pool.map(lambda turn: self._respond(turn, temperature), turns))

        return on_rank_zero(ask_all)

    def _respond(self, turn: Turn, temperature: float | None) -> str | Exception:
        fields = {**self.sampling.fields(), "messages": turn.messages, "stream": False}
        if temperature is not None:
            fields["temperature"] = temperature
        if self.model:
            fields["model"] = self.model
        fields["seed"] = turn.seed % 2**31
        pause = FIRST_PAUSE_S
        for number in range(1, self.tries + 1):
            try:
                return self._ask(fields)
            except NoReplyError as error:
                if not error.may_pass or number == self.tries:
                    return error
            time.sleep(pause)
            pause *= 2
        raise AssertionError("there is at least one try")

    def _ask(self, fields: dict[str, Any]) -> str:
        content = post_json(
            self.url, fields, self._api_key, self.timeout_s, try_again=(*TRY_AGAIN, 500)
        )
        try:
            text = json.loads(content)["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError):
            shown = one_line(content[:200].decode("utf-8", "replace")) or "nothing"
            what = f"replied with something else than a chat completion: {shown}"
            raise NoReplyError(self.url, what) from None
        if text is not None and not isinstance(text, str):
            raise NoReplyError(self.url, f"replied with a message that is no text: {text!r}")
        return text or ""


def read_api_key(path: str | None, variable: str) -> str | None:
    """The key in the file `path`, else in an environment variable, else None; `UserError`: the
    file is unreadable or empty.
    """
    if path is None:
        return os.environ.get(variable) or None
    try:
        with open(path, encoding="utf-8") as file:
            key = file.read().strip()
    except (OSError, ValueError) as error:
        raise UserError(f"{path}, the file of the key, cannot be read: {error}.") from None
    if not key:
        raise UserError(f"{path}, the file of the key, is empty.")
    return key


# --- the built-in engine ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TextForm:
    """Formats of messages, as NeMo-Aligner's scripts take them; each holds {MESSAGE} once."""

    # user, assistant, system: the text of a message
    user: str = "{MESSAGE}"
    assistant: str = "{MESSAGE}"
    system: str | None = None
    # system message of a conversation without one; None: there is none
    system_default: str | None = None
    bos: str = ""  # before everything

    def __post_init__(self) -> None:
        for name in ("user", "assistant", "system"):
            form = getattr(self, name)
            if form is not None and form.count("{MESSAGE}") != 1:
                raise UserError(f"--{name}_format {form!r} must hold {{MESSAGE}} once.")
        if self.system is None and self.system_default is not None:
            raise UserError("--system_default_message needs --system_format.")

    def text(self, messages: Sequence[Message]) -> str:
        """The text of a conversation; `UserError`: a role that has no format."""
        if self.system_default is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system_default}, *messages]
        return self.bos + "".join(self._message(message) for message in messages)

    def _message(self, message: Message) -> str:
        form = getattr(self, message["role"], None)
        if form is None:
            raise UserError(
                f"there is no format for a message of the role {message['role']!r}; give "
                "--system_format."
            )
        text: str = form.replace("{MESSAGE}", message["content"])
        return text


class EngineChatModel:
    """A policy of this project, on all ranks of the job; they all call `respond` together.

    Args:
        policy: with the settings of the sampling.
        form: of conversations; None: the tokenizer's chat template.
        prefers_template: take the template, and the form where there is none.

    Raises:
        ConfigError: the tokenizer has no chat template, and there is no form.
    """

    def __init__(
        self, policy: "Policy", form: TextForm | None = None, prefers_template: bool = False
    ) -> None:
        from nemo_aligner.data.nlp.chat_template import ChatTemplate, own_chat_template

        if prefers_template and own_chat_template(policy.tokenizer) is not None:
            form = None
        self.template = None if form is not None else ChatTemplate(policy.tokenizer)
        self.form = form
        ends = () if self.template is None else self.template.end_strings
        self.policy = policy.with_end_strings(ends)
        self.settings = {
            "model": str(policy.path.resolve()),
            "precision": str(policy.generator.dtype),
            "positions": policy.generator.max_sequence_length,
            "params": dataclasses.asdict(self.policy.params),
            "form": None if form is None else [dataclasses.asdict(form), policy.add_bos],
        }

    def respond(
        self, turns: Sequence[Turn], temperature: float | None = None
    ) -> list[str | Exception]:
        """The response to each conversation; an error for one that leaves no room."""
        from nemo_aligner.generate.batch import Sample, generate_samples

        policy = self.policy
        if temperature is not None:
            policy = dataclasses.replace(
                policy, params=dataclasses.replace(policy.params, temperature=temperature)
            )
        room = policy.generator.max_sequence_length
        found: list[str | Exception] = []
        samples: list[Sample] = []
        for turn in turns:
            tokens = self._tokens(turn.messages)
            if len(tokens) < room:
                samples.append(Sample(len(samples), len(found), tokens, turn.seed))
                found.append("")
            else:
                found.append(
                    UserError(
                        f"the conversation has {len(tokens)} tokens, and the model {room} "
                        "positions for it and a response"
                    )
                )
        responses = generate_samples(policy, [""] * len(turns), samples) if samples else []
        for sample, response in zip(samples, responses, strict=True):
            found[sample.prompt] = self._without_end(response.response)
        return found

    def _tokens(self, messages: list[Message]) -> list[int]:
        if self.template is not None:
            return self.template.prompt_tokens(messages)
        from nemo_aligner.core.tokenizer import text_tokens

        assert self.form is not None
        text = self.form.text(messages)
        return text_tokens(self.policy.tokenizer, text, self.policy.add_bos)

    def _without_end(self, text: str) -> str:
        for end in self.policy.params.end_strings:
            if end and text.endswith(end):
                return text[: -len(end)]
        return text
