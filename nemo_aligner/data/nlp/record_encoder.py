# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""From records to the tokens of prompts, of whole samples and of pairs, and the form of
conversations that `model.data` asks for. Imports nothing heavy.
"""

import bisect
import functools
import importlib.metadata
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_aligner.checkpoint.file_references import check_not_outside
from nemo_aligner.config.data_rules import (
    FROM_TOKENIZER,
    KEPT_FORM,
    check_chat,
    holds_tokens,
    line_ends,
)
from nemo_aligner.core.errors import ConfigError, UserError
from nemo_aligner.core.tokenizer import Tokenizer, begins_with_bos, own_chat_template
from nemo_aligner.data.nlp.fields import (
    NO_FORM,
    Encoded,
    EqualPairError,
    Record,
    check_text,
    conversation_field,
    holds_conversation,
    missing,
)
from nemo_aligner.data.nlp.records import CHUNK_ID, DataFile, data_paths, first_record

if TYPE_CHECKING:
    from nemo_aligner.data.nlp.chat_records import ConversationForm

# Tokens that stand for no character (bos, eos, SentencePiece's leading space), at most.
EXTRA_TOKENS = 8


class TextEncoder:
    """Tokenizes a text without a template; tokens stay as they are. `data_cfg`: `model.data`."""

    def __init__(self, tokenizer: Tokenizer, data_cfg: Mapping[str, Any] | None = None) -> None:
        data_cfg = data_cfg or {}
        self.tokenizer = tokenizer
        self.add_bos = begins_with_bos(tokenizer, data_cfg.get("add_bos"), "model.data.add_bos")
        self.bos: list[Any] = [tokenizer.bos_id] if self.add_bos else []
        self.append_eod = bool(data_cfg.get("append_eod"))
        self.fix_text: Callable[[str], str] | None = None
        if data_cfg.get("apply_ftfy"):
            try:
                from ftfy import fix_text
            except ImportError:
                raise ConfigError(
                    "model.data.apply_ftfy=True needs the package ftfy: pip install ftfy."
                ) from None
            self.fix_text = fix_text

    def __call__(self, text: str | np.ndarray) -> list[int]:
        if not isinstance(text, str):
            return [int(token) for token in text]
        return self.without_end(text) + [self.tokenizer.eos_id] * self.append_eod

    def without_end(self, text: str) -> list[int]:
        """The tokens of a text that goes on, so without `append_eod`."""
        text = self.fix_text(text) if self.fix_text else text
        tokens = list(self.tokenizer.text_to_ids(text))
        return tokens if tokens[:1] == self.bos else self.bos + tokens

    def length(self, text: str | np.ndarray, limit: int) -> int:
        """Number of tokens: exact if above `limit`, else possibly an upper bound, as a short ASCII
        text surely fits. `UserError`: tokens that the tokenizer does not have.
        """
        if not isinstance(text, str):
            size = self.tokenizer.vocab_size
            if not len(text):
                raise UserError("it has no tokens.")
            if int(text.min()) < 0 or int(text.max()) >= size:
                raise UserError(
                    f"tokens from {text.min()} to {text.max()}, but the tokenizer has {size}: the "
                    "data were made with another one. Tokenize them with the model's tokenizer."
                )
            return len(text)
        if text.isascii() and len(text) + EXTRA_TOKENS <= limit:
            return len(text) + EXTRA_TOKENS
        return len(self(text))


def common_length(first: Any, second: Any) -> int:
    """How many characters of texts, or tokens of lists or arrays, two begin with in common."""
    one, other = (x.tolist() if isinstance(x, np.ndarray) else x for x in (first, second))
    shorter = range(min(len(one), len(other)))
    return bisect.bisect_left(shorter, True, key=lambda n: one[: n + 1] != other[: n + 1])


def plain_texts(record: Record, *fields: str, allow_blank: bool = False) -> list[str]:
    """Fields that must be texts, as there is no form for conversations."""
    for field in fields:
        if isinstance(record.get(field), list):
            raise UserError(f"field '{field}' holds a conversation. {NO_FORM}")
    check_text(record, *fields, allow_blank=allow_blank)
    return [record[field] for field in fields]


SURE = 1 << 30  # characters that a pair has in common whose prompt is known


class RecordEncoder:
    """Tokenizes records; every method raises `UserError` for one that it cannot use.

    Without a form for conversations a prompt is the field `text`, or a text in `prompt`; a sample
    is `text`; a pair is `chosen` and `rejected`, which continue `prompt` if there is one, else
    begin with it, up to the last `prompt_end` that both share. Texts stay as they are. In a form
    all are conversations; in one that nobody has asked for only records that hold messages.

    `form` None: `chat_form`'s; False: none, unless a subclass sets it. A length is exact above
    `limit`, else possibly an upper bound.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        data_cfg: Mapping[str, Any] | None = None,
        form: Any = None,
    ) -> None:
        self.encode_text = TextEncoder(tokenizer, data_cfg)
        self.form: Any = chat_form(data_cfg, tokenizer) if form is None else form
        data_cfg = data_cfg or {}
        self.template = data_cfg.get("chat_template")
        self.prompt_end = line_ends(data_cfg.get("prompt_end") or "")
        self.allow_empty_prompt = bool(data_cfg.get("allow_empty_prompt"))

    def depends_on(self) -> list[Any]:
        texts, form = self.encode_text, None if self.form is None else self.form.state
        ftfy = "" if texts.fix_text is None else importlib.metadata.version("ftfy")
        return [texts.add_bos, texts.append_eod, ftfy, form, self.prompt_end]

    def form_of(self, record: Record) -> "ConversationForm | None":
        """The form that a record is written in; None: its texts stay as they are."""
        if self.form is None or not self.form.default:
            return self.form
        if not holds_conversation(record):
            return None
        say_default(self.form.default)
        return self.form

    def prompt(self, record: Record) -> list[int]:
        """The tokens of a prompt, at least one."""
        text = self._prompt_text(record)
        if text is not None:
            tokens = self.encode_text(text)
            if not tokens:
                raise UserError("the prompt is empty, and no bos token stands before it.")
            return tokens
        return self.form.prompt(self._fixed(record))

    def prompt_length(self, record: Record, limit: int) -> int:
        text = self._prompt_text(record)
        return len(self.prompt(record)) if text is None else self.encode_text.length(text, limit)

    def begins(self, record: Record) -> bool:
        """Whether a token stands before the response to an empty prompt."""
        return self.encode_text.add_bos or not (self.form_of(record) is None or "text" in record)

    def prompt_is_empty(self, record: Record, *responses: str) -> bool:
        """Whether a prompt says nothing: one for rollouts, or that of the fields `responses`."""
        text: str | np.ndarray | None = None
        if not responses:
            text = self._prompt_text(record)
        elif self.form_of(record) is None:
            text = self._parts(record, *responses)[0]
        if text is None:
            from nemo_aligner.data.nlp.chat_records import speaks_to_assistant

            return not speaks_to_assistant(record)
        return isinstance(text, str) and not text.strip()

    def sample(self, record: Record) -> list[int]:
        text = self._text(record, has_conversation=False)
        if text is not None:
            return self.encode_text(text)
        return self.form.sample(self._fixed(record))

    def sample_length(self, record: Record, limit: int) -> int:
        text = self._text(record, has_conversation=False)
        return len(self.sample(record)) if text is None else self.encode_text.length(text, limit)

    def pair(self, record: Record) -> tuple[Encoded, Encoded]:
        """Both samples of a pair that stands in one record, the better one first; what follows
        `prompt` is the response, or the assistant's messages from the first that differs.
        """
        form = self.form_of(record)
        if form is not None:
            return form.pair(self._fixed(record))
        prompt, *responses = self._pair_texts(record)
        chosen, rejected = (self._continued(prompt, text) for text in responses)
        return chosen, rejected

    def with_response(self, record: Record) -> Encoded:
        form = self.form_of(record)
        if form is not None:
            return form.response(self._fixed(record))
        return self._continued(*self._parts(record, "response"))

    def _continued(self, prompt: str, response: str) -> Encoded:
        """The tokens of both texts, and which of them are of the response: from the first one that
        the prompt alone does not begin with, for a tokenizer may join both texts in one token.
        """
        tokens = self.encode_text(prompt + response)
        first = common_length(self.encode_text.without_end(prompt), tokens)
        return Encoded(tokens, [n >= first for n in range(len(tokens))])

    def response_length(self, record: Record, limit: int) -> int:
        if self.form_of(record) is not None:
            return len(self.with_response(record).tokens)
        return self.encode_text.length("".join(self._parts(record, "response")), limit)

    def pair_length(self, record: Record, limit: int) -> int:
        """Tokens of the longer sample of a pair, which is refused if both have the same tokens."""
        texts = None if self.form_of(record) is not None else self._pair_texts(record)
        if texts is None or self._may_be_the_same(*texts[1:]):  # to encode all would take long
            chosen, rejected = (sample.tokens for sample in self.pair(record))
            if chosen == rejected:
                raise EqualPairError(
                    "have the same tokens (the tokenizer or the template leaves out the rest)"
                )
            return max(len(chosen), len(rejected))
        prompt, *responses = texts
        return max(self.encode_text.length(prompt + text, limit) for text in responses)

    def in_common(self, first: Record, second: Record) -> int:
        """How many characters (or tokens) two samples begin with in common; `SURE` if the prompt
        is known to be the same, `UserError` if not to be.
        """
        one, other = (self._text(record, has_conversation=False) for record in (first, second))
        if one is not None and other is not None:
            if not self.prompt_end or not (isinstance(one, str) and isinstance(other, str)):
                return common_length(one, other)
            self._split([one, other], "the two lines")
            return SURE
        why = "one is a conversation, the other a text"
        if one is None and other is None:
            from nemo_aligner.data.nlp.chat_records import other_prompt

            why = other_prompt(first, second)
        if why:
            raise UserError(f"{why}.")
        return SURE

    def pair_in_common(self, record: Record) -> int:
        if self.form_of(record) is not None:
            return SURE
        prompt, first, second = self._pair_texts(record)
        return SURE if prompt.strip() else common_length(first, second)

    def _parts(self, record: Record, *fields: str, whole: bool = False) -> list[str]:
        texts = plain_texts(record, *fields)
        if record.get("prompt") is not None:
            return plain_texts(record, "prompt", allow_blank=True) + texts
        if self.prompt_end:
            return self._split(texts, " and ".join(map(repr, fields)))
        if whole or self.allow_empty_prompt:
            return ["", *texts]
        raise missing(
            ["prompt"],
            record,
            "(Where the texts begin with their prompts, model.data.prompt_end says how these end: "
            "'\\n\\nAssistant:'. model.data.allow_empty_prompt=True: there are none.)",
        )

    def _split(self, texts: Sequence[str], what: str) -> list[str]:
        """What texts begin with, up to the last shared `prompt_end`, and how each goes on."""
        shared = texts[0][: common_length(texts[0], texts[-1])]
        place = shared.rfind(self.prompt_end) + len(self.prompt_end)
        if self.prompt_end not in shared or not all(text[place:].strip() for text in texts):
            raise UserError(
                f"{what} have no beginning in common that ends with model.data.prompt_end="
                f"{self.prompt_end!r}, with a response behind it."
            )
        return [shared[:place], *(text[place:] for text in texts)]

    def _pair_texts(self, record: Record) -> list[str]:
        """What both texts of a pair begin with, and how they go on, the better one first."""
        parts = self._parts(record, "chosen", "rejected", whole=True)
        if parts[1] == parts[2]:
            raise EqualPairError
        return parts

    def _may_be_the_same(self, first: str, second: str) -> bool:
        fix = self.encode_text.fix_text or str
        first, second = fix(first), fix(second)
        heads = [_letters(text[:64]) for text in (first, second)]  # most differ in them already
        common = min(map(len, heads))
        return heads[0][:common] == heads[1][:common] and _letters(first) == _letters(second)

    def _prompt_text(self, record: Record) -> str | np.ndarray | None:
        prompt = record.get("prompt")
        if self.form_of(record) is None and "text" not in record and prompt is not None:
            return plain_texts(record, "prompt", allow_blank=True)[0]
        text = self._text(record, has_conversation=prompt is not None, allow_blank=True)
        if self.prompt_end and isinstance(text, str):
            if self.prompt_end not in text:
                raise UserError(f"model.data.prompt_end={self.prompt_end!r} is not in 'text'.")
            text = text[: text.rfind(self.prompt_end)] + self.prompt_end
        return text

    def _text(
        self, record: Record, has_conversation: bool, allow_blank: bool = False
    ) -> str | np.ndarray | None:
        """The field `text`; None for a conversation, which goes before it in a form."""
        if self.form_of(record) is not None:
            if has_conversation or conversation_field(record) or "text" not in record:
                return None
            if self.template:
                raise UserError(
                    f"model.data.chat_template={self.template} is for conversations, but the line "
                    "has a text in field 'text', which stays as it is. Give messages (or prompt, "
                    "for a user's message), or set model.data.chat_template=null."
                )
        text = record.get("text")
        is_text = isinstance(text, str) and (allow_blank or text.strip())
        if not (is_text or isinstance(text, np.ndarray)):
            check_text(record, "text", allow_blank=allow_blank)
        return text

    def _fixed(self, record: Record) -> Record:
        fix = self.encode_text.fix_text

        def fixed(value: Any) -> Any:
            if isinstance(value, list):
                return [fixed(item) for item in value]
            if isinstance(value, dict):
                return {key: fixed(item) for key, item in value.items()}
            return fix(value) if fix and isinstance(value, str) else value

        return record if fix is None else fixed(record)


def _letters(text: str) -> str:
    """Letters and digits without case and accents: what tokenizers keep apart."""
    return re.sub(r"[\W_]+", "", unicodedata.normalize("NFKD", text).casefold())


# --- the form of conversations ---

DEFAULT_FORM = "conversations are written in {}, as model.data.chat_template is not set"


def chat_form(
    data_cfg: Mapping[str, Any] | None, tokenizer: Tokenizer
) -> "ConversationForm | None":
    """The form that `model.data` asks for; else, for conversations alone, the checkpoint's or the
    tokenizer's chat template, or None. `ConfigError`: two, or one that the tokenizer cannot use.
    """
    data_cfg = data_cfg or {}
    check_chat(data_cfg)
    is_default = not (data_cfg.get("chat") or data_cfg.get("chat_template"))
    options, name = data_cfg.get("chat_template_kwargs"), "the tokenizer's chat template"
    kept = getattr(tokenizer, KEPT_FORM, None)
    if is_default and kept and not (options and kept.get("chat")):  # those are of no such format
        name = "NeMo's chat format" if kept.get("chat") else "a chat template"
        name += " that the checkpoint keeps"
        check_not_outside("model.data.chat_template", kept.get("chat_template"))
        data_cfg = {**data_cfg, **kept}
        options = options or kept.get("chat_template_kwargs")
    if data_cfg.get("chat"):
        from nemo_aligner.data.nlp.nemo_chat import NEMO_TOKENS, ChatTokens, NeMoChat

        given = data_cfg.get("chat_prompt_tokens")
        marks = ChatTokens.of(given) if given else NEMO_TOKENS
        form: ConversationForm = NeMoChat(tokenizer, marks)
    else:
        template = data_cfg.get("chat_template")
        if not (template or options) and own_chat_template(tokenizer) is None:
            return None
        from nemo_aligner.data.nlp.chat_template import ChatTemplate

        source, date = str(template or FROM_TOKENIZER), data_cfg.get("chat_date")
        form = ChatTemplate(tokenizer, source, options, date)
    if is_default:
        form.default = DEFAULT_FORM.format(name)
    return form


@functools.cache
def say_default(text: str) -> None:
    """Say, once, that conversations get a form that nobody has asked for."""
    from nemo.utils import logging  # heavy

    logging.info(text)


def chat_end_strings(data_cfg: Mapping[str, Any] | None, tokenizer: Tokenizer) -> tuple[str, ...]:
    """What ends a response, besides the eos token; the form that nobody has asked for does only
    where a training file begins with a conversation.
    """
    form = chat_form(data_cfg, tokenizer)
    if form is None or form.default and not _trains_on_conversations(data_cfg or {}):
        return ()
    return form.end_strings


def begins_with_conversation(file: DataFile, section: Mapping[str, Any]) -> bool:
    """Whether the first record of a data file of `section` is a conversation."""
    first = first_record(file, section)
    label_key = section.get("label_key")
    if label_key is None:
        return holds_conversation(first)
    return conversation_field(first) is not None and label_key not in first


def _trains_on_conversations(data_cfg: Mapping[str, Any]) -> bool:
    files, section = data_cfg.get("data_prefix"), data_cfg
    if isinstance(files, Mapping):
        files = files.get("train")
    if data_cfg.get("train_ds"):
        section = data_cfg["train_ds"]
        files = section.get("file_path")
    if not files or holds_tokens(str(data_cfg.get("data_impl"))):
        return False
    paths, _weights = data_paths(files, "model.data")
    first = (file._replace(path=file.path.replace(CHUNK_ID, "0")) for file in paths)
    return any(begins_with_conversation(file, section) for file in first)
