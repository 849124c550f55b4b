# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What continues conversations: the built-in engine with a policy of this project
(`EngineChatModel`), or a server that speaks OpenAI's chat protocol (`ServedChatModel`); and the
options of NeMo-Aligner's scripts for constitutional AI that say which.

A response depends on its conversation, its seed and the settings, not on what it is computed
together with; a server of others promises that as far as it honours seeds.
"""

import argparse
import concurrent.futures
import dataclasses
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from nemo_aligner.config.access import is_web_address, shown_url
from nemo_aligner.core.errors import UserError
from nemo_aligner.data.nlp.chat_records import Message
from nemo_aligner.generate.settings import RESTORE_KEY, CommandParser, compose_settings
from nemo_aligner.parallel.collectives import on_rank_zero
from nemo_aligner.servers.web import TRY_AGAIN, NoReplyError, chat_text, post_json
from nemo_aligner.servers.worker import BadValueError

if TYPE_CHECKING:
    from nemo_aligner.core.tokenizer import Tokenizer
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
            return chat_text(content)
        except BadValueError as error:
            raise NoReplyError(self.url, f"replied with {error}") from None


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
        from nemo_aligner.core.tokenizer import own_chat_template
        from nemo_aligner.data.nlp.chat_template import ChatTemplate

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


KEY_VARIABLE = "OPENAI_API_KEY"
BOOLEAN = ("True", "False")


class ModelParser(CommandParser):
    """A parser of options and of `key=value` words for the engine, in any order."""

    def __init__(self, description: str | None, **defaults: Any) -> None:
        super().__init__(description=description)
        _add_model(self)
        _add_sampling(self, defaults)
        _add_format(self, defaults)

    def read(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """The options; `words` are settings. `UserError`: a word that is none."""
        args, others, _ = self.split(argv)
        if others:
            self.error(f"{' '.join(others)}: neither an option nor key=value")
        return args


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the model that responds")
    group.add_argument("--model", metavar="NEMO", help="a policy: the built-in engine generates")
    group.add_argument("--url", help="of a server, .../v1/chat/completions")
    group.add_argument("--host", default="localhost", help="of a server, in place of --url")
    group.add_argument("--port", type=int, default=5656, help="of a server, in place of --url")
    group.add_argument("--served-model", default="", help="name under which it is served")
    group.add_argument("--api-key-file", help=f"key of the server (default: {KEY_VARIABLE})")
    group.add_argument("--timeout-s", type=float, default=600.0, help="of a request (%(default)s)")
    group.add_argument("--tries", type=int, default=3, help="of a request (%(default)s)")
    group.add_argument(
        "--skip-failed", action="store_true", help="leave out what the model does not respond to"
    )


def _add_sampling(parser: argparse.ArgumentParser, defaults: dict[str, Any]) -> None:
    """Options without a default here are sent to a server only if they are given."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--greedy", choices=BOOLEAN, default=defaults["greedy"])
    group.add_argument("--temperature", type=float, default=1.0)
    group.add_argument("--top_p", type=float, default=defaults["top_p"])
    group.add_argument("--top_k", type=int, help=f"(engine: {defaults['top_k']})")
    penalty = defaults["repetition_penalty"]
    group.add_argument("--repetition_penalty", type=float, help=f"(engine: {penalty})")
    group.add_argument("--min_tokens_to_generate", type=int, help="(engine: 1)")
    group.add_argument("--tokens_to_generate", type=int, default=1024)
    group.add_argument("--end_strings", nargs="*", default=defaults["end_strings"])
    group.add_argument("--add_bos", choices=BOOLEAN, help="(engine: as the tokenizer does)")
    group.add_argument("--all_probs", choices=BOOLEAN, default="False", help="has no effect")
    parser.set_defaults(
        engine_top_k=defaults["top_k"],
        engine_repetition_penalty=penalty,
        engine_min_tokens_to_generate=1,
    )


def _add_format(parser: argparse.ArgumentParser, defaults: dict[str, Any]) -> None:
    group = parser.add_argument_group("the text of a conversation")
    names = ("user_format", "assistant_format", "system_format", "system_default_message")
    for name in (*names, "bos_token", "eos_token"):
        group.add_argument(f"--{name}", default=defaults.get(name))
    group.add_argument("--response_extract_pattern", help="has no effect: responses come alone")


def unescaped(text: str) -> str:
    """A text of the command line, whose backslash and n mean a new line."""
    return text.encode("latin-1", "backslashreplace").decode("unicode_escape")


def text_form(args: argparse.Namespace) -> TextForm:
    """The formats that the options give."""

    def given(name: str) -> str | None:
        value = getattr(args, name)
        return None if value is None else unescaped(value)

    return TextForm(
        user=given("user_format") or "{MESSAGE}",
        assistant=given("assistant_format") or "{MESSAGE}",
        system=given("system_format"),
        system_default=given("system_default_message"),
        bos=given("bos_token") or "",
    )


@dataclasses.dataclass(frozen=True)
class OpenModel:
    """A model that is ready."""

    model: ChatModel  # that responds
    policy: "Policy | None" = None  # of the engine, or None

    @property
    def tokenizer(self) -> "Tokenizer | None":
        return None if self.policy is None else self.policy.tokenizer


def open_model(
    args: argparse.Namespace,
    path: str | None,
    form: TextForm | None,
    trainer: Any,
    prefers_template: bool = False,
) -> OpenModel:
    """The policy at `path`, or without one the server that the options name; all ranks call it.

    Args:
        form, prefers_template: of the texts for the engine, as for `EngineChatModel`.
        trainer: of the job (`engine_trainer`); None without an engine.
    """
    end_strings = tuple(map(unescaped, args.end_strings or ()))
    if path is not None:
        from nemo_aligner.generate.policy import load_policy

        policy = load_policy(engine_settings(args, path), trainer)
        return OpenModel(EngineChatModel(policy, form, prefers_template), policy)
    url = args.url or f"http://{args.host}:{args.port}/v1/chat/completions"
    sampling = Sampling(
        temperature=0.0 if args.greedy == "True" else args.temperature,
        top_p=args.top_p,
        max_tokens=args.tokens_to_generate,
        stop=end_strings,
        top_k=args.top_k,
        repetition_penalty=args.repetition_penalty,
        min_tokens=args.min_tokens_to_generate,
    )
    key = read_api_key(args.api_key_file, KEY_VARIABLE)
    return OpenModel(
        ServedChatModel(
            url, args.served_model, sampling, key, args.timeout_s, args.tries, args.batch_size
        )
    )


def engine_settings(args: argparse.Namespace, path: str) -> Any:
    """The configuration (conf/generate.yaml) that the options ask for; `ConfigError`: none."""
    from nemo_aligner.config.checks import check_config

    def of_engine(name: str) -> Any:
        value = getattr(args, name)
        return getattr(args, f"engine_{name}") if value is None else value

    cfg = compose_settings("generate", args.words)
    cfg.pretrained_checkpoint.restore_from_path = path
    cfg.model.seed = args.seed
    cfg.length_params = {
        "max_length": args.tokens_to_generate,
        "min_length": of_engine("min_tokens_to_generate"),
    }
    cfg.sampling_params = {
        "use_greedy": args.greedy == "True",
        "temperature": args.temperature,
        "top_k": of_engine("top_k"),
        "top_p": args.top_p,
        "repetition_penalty": of_engine("repetition_penalty"),
        "add_BOS": None if args.add_bos is None else args.add_bos == "True",
        "end_strings": list(map(unescaped, args.end_strings or ())),
    }
    check_config(cfg, "generate")
    return cfg


def engine_trainer(args: argparse.Namespace, *paths: str | None) -> Any:
    """The Lightning trainer of a job of the engine; None if no policy is named."""
    used = [path for path in paths if path is not None]
    if not used:
        if args.words:
            raise UserError(
                f"{' '.join(args.words)}: settings of the engine, which needs --model "
                f"({RESTORE_KEY})."
            )
        return None
    cfg = None
    for path in used:  # all, so that a mistake ends the command before anything is generated
        cfg = engine_settings(args, path)
    from nemo_aligner.generate.policy import quiet_logs
    from nemo_aligner.launch.processes import resolve_and_create_trainer

    quiet_logs()
    return resolve_and_create_trainer(cfg)


def check_files(**paths: str | None) -> None:
    """Raise `UserError` unless the files that options name exist."""
    for option, path in paths.items():
        if path is not None and not os.path.exists(os.path.expanduser(path)):
            raise UserError(f"--{option.replace('_', '-')} {path} does not exist.")
