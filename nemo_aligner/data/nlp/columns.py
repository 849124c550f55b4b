# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`model.data.columns`: which columns of a data file hold the fields that a job reads."""

import re
from collections.abc import Mapping
from typing import Any

from nemo_aligner.config.data_rules import plain_columns
from nemo_aligner.core.errors import UserError
from nemo_aligner.data.nlp.json_lines import Record

_IN_BRACES = re.compile(r"\{([^{}]+)\}")


class Columns:
    """Makes records from the rows of a file.

    Args:
        fields: from the name of a field to where its value is: the name of a column ("question");
            a path into nested columns ("info.post", "summaries.0.text"); a text with columns in
            braces ("{prompt}\\n\\nAssistant: {response}"), which must hold text; or a list of
            them, which gives a list of values. None or empty: rows are records as they are.

    Raises:
        ConfigError: another form.
    """

    def __init__(self, fields: Mapping[str, Any] | None = None) -> None:
        self.fields = plain_columns(fields)

    def __call__(self, row: Record) -> Record:
        """`row` with the fields; its other columns stay.

        Raises:
            UserError: a column is missing, or a text is needed and it holds something else.
        """
        if not self.fields:
            return row
        return row | {name: self._value(name, form, row) for name, form in self.fields.items()}

    def _value(self, name: str, form: str | list[str], row: Record) -> Any:
        if isinstance(form, list):
            return [self._value(name, part, row) for part in form]
        if not _IN_BRACES.search(form):
            return self._column(name, form, row)

        def text(match: re.Match[str]) -> str:
            value = self._column(name, match[1], row)
            if not isinstance(value, str):
                raise UserError(
                    f"column '{match[1]}' (columns.{name}) must be text, not {kind_of(value)}."
                )
            return value

        return _IN_BRACES.sub(text, form)

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


def kind_of(value: Any) -> str:
    """What messages call the type of a value of a record."""
    return "null" if value is None else type(value).__name__
