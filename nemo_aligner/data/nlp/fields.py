# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Records: the source of them, their fields and which columns of a file hold these
(`model.data.columns`), checks of what they hold, and hints of columns that look like them.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nemo_aligner.config.data_rules import line_ends, plain_columns
from nemo_aligner.core.errors import UserError

Record = dict[str, Any]
ALL_COLUMNS = "**"  # the name of all others, as in servers/worker.py, which imports nothing
CONVERSATIONS, PAIR = ("messages", "conversations"), ("chosen", "rejected")
BESIDE = ("system", "tools", "chat_template_kwargs", "mask", "type")  # fields of a conversation
A_SAMPLE = ("text", "prompt", *CONVERSATIONS, *BESIDE)
NO_FORM = (
    "A conversation needs a form, and the tokenizer has no chat template: set "
    "model.data.chat_template to the file of one, or model.data.chat=True. (SFT reads a file as "
    "its first line says: give texts and conversations in files of their own.)"
)


class RecordSource:
    """The rows of one data file, or of one saved dataset.

    Attributes:
        path: of the file or folder that the user gave; for messages.
        unit: what messages call a row: "line", "row", "document" or "record".
        files: whose content decides what the rows are.
        rows: what the rows are made of, where their places are numbers from 0.
    """

    unit: str
    rows: Sequence[Any]

    def __init__(self, path: Path, files: list[Path]) -> None:
        self.path, self.files = path, files

    def __getitem__(self, at: int) -> Record:
        """The row at a place that `scan` gave, read from disk."""
        raise NotImplementedError

    def scan(self) -> Iterator[tuple[int, int, Record]]:
        """All rows in order, each with its place and its number as messages give it."""
        for number in range(len(self.rows)):
            yield number, number, self[number]


class Encoded(NamedTuple):
    tokens: list[int]  # S ids, up to the end of the last of the assistant's turns
    # S values, True for the assistant's tokens, their end-of-turn tokens included
    is_response: list[bool]


class EqualPairError(UserError):
    def __init__(self, how: str = "are equal") -> None:
        super().__init__(f"'chosen' and 'rejected' {how}, so there is nothing to prefer.")


def check_text(record: Record, *fields: str, allow_blank: bool = False) -> None:
    """Raise `UserError` unless a record has text in `fields`, by default not only blanks."""
    if any(field not in record for field in fields):
        talks = "messages" in record or "conversations" in record
        raise missing(fields, record, NO_FORM if talks else "")
    for field in fields:
        check_kind(record[field], str, f"field '{field}'")
        if not (allow_blank or record[field].strip()):
            raise UserError(f"field '{field}' is empty.")


def conversation_field(record: Record) -> str | None:
    return next((field for field in CONVERSATIONS if record.get(field) is not None), None)


def holds_conversation(record: Record) -> bool:
    """Whether a record holds messages, and not just texts."""
    if any(isinstance(record.get(field), list) for field in ("prompt", "response", *PAIR)):
        return True
    return "text" not in record and conversation_field(record) is not None


def holds_pair(record: Record) -> bool:
    return "chosen" in record or "rejected" in record


def by_our_names(record: Record) -> Record:
    """A record with the fields `chosen` and `rejected`; NeMo-Aligner's hold one message each."""
    record = dict(record)
    for field in PAIR:
        value = record.pop(f"{field}_response", None)
        if value is not None:
            record[field] = [value] if isinstance(value, dict) else value
    return record


# --- columns ---

_IN_BRACES = re.compile(r"\{([^{}]+)\}")
_PROMPTS = ("instruction", "question", "query", "problem", "prompt", "input")
_RESPONSES = ("completion", "response", "output", "answer", "solution")
CONTINUE_PROMPT = {"chosen", "rejected", "response", "preference"}
# field -> usual names of its column in other layouts
OTHER_NAMES = {
    **dict.fromkeys(("prompt", "input"), _PROMPTS),
    **dict.fromkeys(("response", "output"), _RESPONSES),
    "preference": ("label",),
    "label": ("labels", "preference_strength"),
}
# Fields with the prompt, and arguments that a reward function has anyway.
NOT_COLUMNS = ("text", "prompt", "messages", "prompts", "responses", "lengths")


class Columns:
    """Makes records from the rows of a file; `sources` are the columns that are read, the
    outermost of nested ones.

    Args:
        fields: `model.data.columns` (docs/data.md), from the name of a field to where its value
            is; None or empty: rows are records as they are. `ConfigError`: another form.
    """

    def __init__(self, fields: Mapping[str, Any] | None = None) -> None:
        self.fields = plain_columns(fields)
        self.sources: set[str] = set()
        for given in self.fields.values():
            for form in [given] if isinstance(given, str) else given:
                inner = [name.rpartition("?")[2] for name in _IN_BRACES.findall(form)] or [form]
                self.sources |= {*inner, *(column.split(".")[0] for column in inner)}

    def __call__(self, row: Record) -> Record:
        """`row` with the fields; its other columns stay. `UserError`: one cannot be made."""
        if not self.fields:
            return row
        return row | {name: self._value(name, form, row) for name, form in self.fields.items()}

    def _value(self, name: str, form: str | list[str], row: Record) -> Any:
        if isinstance(form, list):
            return [self._value(name, part, row) for part in form]
        if not _IN_BRACES.search(form):
            return self._column(name, form, row)

        def text(match: re.Match[str]) -> str:
            before, optional, column = match[1].rpartition("?")
            try:
                value = self._column(name, column, row)
            except UserError:
                if not optional:
                    raise
                value = None
            if optional and (value is None or isinstance(value, str) and not value.strip()):
                return ""
            check_kind(value, str, f"column '{column}' (columns.{name})")
            return before + value

        return _IN_BRACES.sub(text, line_ends(form))

    def _column(self, name: str, column: str, row: Record) -> Any:
        if column in row:
            return row[column]
        value: Any = row
        for key in column.split("."):
            if isinstance(value, Mapping) and key in value:
                value = value[key]
            elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
                value = value[int(key)]
            else:
                raise UserError(
                    f"there is no column '{column}' (columns.{name}); there are {sorted(row)}."
                )
        return value


def other_name(field: str, names: Iterable[str]) -> str | None:
    names = set(names)
    return next((name for name in OTHER_NAMES.get(field, ()) if name in names), None)


def prompt_hint(field: str, record: Record, names: Iterable[str], is_empty: bool = True) -> str:
    """How to read the one of the columns `names` that looks like the prompt, in `field`; empty:
    none does, or the record has a prompt that Alpaca's instruction is not left out of.
    """
    like = other_name(field, names)
    given = map(record.get, (field, "text", "messages", "conversations"))
    prompt = "".join(str(value) for value in given if value is not None).strip()
    if prompt and not is_empty and (like != "instruction" or str(record[like]) in prompt):
        return ""
    form = f"'{{{like}}}{{\\n\\n?{field}}}'" if field in record else like
    column = f'model.data.columns="{{{field}: {form}}}"'
    return f" '{like}' looks like the prompt: {column} reads it." if like else ""


def missing(fields: Sequence[str], record: Record, more: str = "") -> UserError:
    """The error of a record without some of `fields`, with the columns that look like them."""
    absent = [field for field in fields if record.get(field) is None]
    what = f"field{'s' * (len(absent) > 1)} {' and '.join(map(repr, absent))}"
    what += f" {'are' if len(absent) > 1 else 'is'} missing; the line has {sorted(record)}."
    also = CONTINUE_PROMPT.intersection(absent) and {"prompt"}.difference(record)
    likely = {field: other_name(field, record) for field in (*also, *absent)}
    columns = ", ".join(f"{field}: {name}" for field, name in likely.items() if name)
    line = f'model.data.columns="{{{columns}}}" reads what looks like them.' if columns else ""
    return UserError(" ".join(filter(None, (what, more, line))))


def is_number(value: Any) -> bool:
    """Whether a value of a record is a finite number (of float32)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 3e38


def check_kind(value: Any, kind: type, what: str) -> None:
    if not isinstance(value, kind):
        needed = "text" if kind is str else "an object"
        found = "null" if value is None else type(value).__name__
        raise UserError(f"{what} must be {needed}, not {found}.")


def columns_asked(record: Mapping[str, Any], asked: Sequence[str]) -> dict[str, Any]:
    """The columns of a prompt's record that a function asks for (`RewardFunction.columns`)."""
    columns: dict[str, Any] = {}
    for name in asked:
        if name == ALL_COLUMNS:
            columns |= {n: record[n] for n in record if n not in (*asked, *NOT_COLUMNS)}
        elif name in record:
            columns[name] = record[name]
        else:
            raise UserError(
                f"there is no column '{name}', which the reward function asks for, but "
                f"{sorted(record)}: add it, or name another one in model.data.columns."
            )
    return columns
