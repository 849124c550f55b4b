# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Options of a command line that say which model responds, and how: those of NeMo-Aligner's
scripts for constitutional AI, over the built-in engine or a server with OpenAI's chat protocol.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_aligner.core.errors import UserError
from nemo_aligner.generate.settings import RESTORE_KEY, compose_settings, is_setting
from nemo_aligner.synthetic.chat_models import (
    ChatModel,
    EngineChatModel,
    Sampling,
    ServedChatModel,
    TextForm,
    read_api_key,
)
from nemo_aligner.synthetic.command_line import DataParser

if TYPE_CHECKING:
    from nemo_aligner.core.tokenizer import Tokenizer
    from nemo_aligner.generate.policy import Policy

KEY_VARIABLE = "OPENAI_API_KEY"
BOOLEAN = ("True", "False")


class ModelParser(DataParser):
    """A parser of options and of `key=value` words for the engine, in any order."""

    def __init__(self, description: str | None, **defaults: Any) -> None:
        super().__init__(description)
        self.add_argument(
            "words", nargs="*", metavar="key=value", help="of the engine, as of generate"
        )
        _add_model(self)
        _add_sampling(self, defaults)
        _add_format(self, defaults)

    def read(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """The options; `words` are settings. `UserError`: a word that is none."""
        args = self.parse_intermixed_args(argv)
        others = [word for word in args.words if not is_setting(word)]
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


@dataclass(frozen=True)
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
