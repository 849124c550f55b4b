# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Results of a long command by number, in a file that grows in any order: stopped, the same
command computes what is missing.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_aligner.core.errors import UserError
from nemo_aligner.data.nlp.growing_files import append_lines, complete_lines
from nemo_aligner.parallel.collectives import on_rank_zero

Result = dict[str, Any]
NUMBER, SKIPPED = "number", "skipped"


class Progress:
    """The results of a command; all ranks of a job hold the same, and call each method together.

    Args:
        path: of the file, jsonl. A result is an object with its number; one with the field
            `skipped`, the reason, has nothing else to give.
        count: how many results there will be.
        expected: from a number to fields that its result must have: of this command.

    Raises:
        UserError: the file holds results of something else.
    """

    def __init__(
        self, path: Path, count: int, expected: Callable[[int], Mapping[str, Any]]
    ) -> None:
        self.path, self.count, self._expected = path, count, expected
        self._found: dict[int, Result] = on_rank_zero(self._read)

    def _read(self) -> dict[int, Result]:
        found: dict[int, Result] = {}

        def check(line: int, text: bytes) -> None:
            try:
                result = json.loads(text)
                number = result[NUMBER]
                same = 0 <= number < self.count and all(
                    result.get(key) == value for key, value in self._expected(number).items()
                )
            except (ValueError, KeyError, TypeError, AttributeError):
                same = False
            if not same:
                raise UserError(
                    f"{self.path}, line {line + 1}: it is no result of this command: the prompts, "
                    "the model, the seed or another setting were different. Give another output, "
                    "or remove the file to start afresh."
                )
            found[number] = result

        complete_lines(self.path, check)
        return found

    @property
    def missing(self) -> list[int]:
        return [number for number in range(self.count) if number not in self._found]

    def add(self, results: Sequence[Result]) -> None:
        """Keep results, in the file too; `SaveError` on all ranks if it cannot be written."""
        lines = [json.dumps(result, ensure_ascii=False) + "\n" for result in results]
        on_rank_zero(lambda: append_lines(self.path, lines))
        self._found |= {result[NUMBER]: result for result in results}

    def results(self) -> list[Result]:
        """All results in the order of their numbers, without those that were skipped."""
        whole = [self._found[number] for number in sorted(self._found)]
        return [result for result in whole if SKIPPED not in result]
