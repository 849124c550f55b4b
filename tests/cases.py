# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Cases of a test: many small ones as one test, and those that `make test` leaves out."""

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest


def rows(text: str) -> list[list[str]]:
    """Cases of a table of text: a line each, whose further lines are indented, with ` -> ` between
    the arguments.
    """
    lines = re.split(r"\n(?! )", text.strip())
    return [[part.strip() for part in " ".join(line.split()).split("->")] for line in lines]


def in_one_test(names: str, cases: Iterable[Any]) -> Callable[[Callable[..., None]], Any]:
    """`pytest.mark.parametrize` for checks that are much shorter than what pytest does for a test:
    one test, and all faults in one message. The function may take fixtures, too.
    """
    arguments, cases = [name.strip() for name in names.split(",")], list(cases)

    def decorate(check: Callable[..., None]) -> Any:
        parameters = inspect.signature(check).parameters

        def test(**fixtures: Any) -> None:
            faults = []
            for case in cases:
                values = case if len(arguments) > 1 else [case]
                try:
                    check(**dict(zip(arguments, values, strict=True)), **fixtures)
                except Exception as error:
                    name = getattr(case, "name", case)
                    faults.append(f"{name}: {type(error).__name__}: {error}")
            assert cases and not faults, "\n".join(faults)

        functools.update_wrapper(test, check)
        del test.__wrapped__
        others = [each for name, each in parameters.items() if name not in arguments]
        test.__signature__ = inspect.Signature(others)
        return test

    return decorate


@contextlib.contextmanager
def says(kind: type[BaseException], *words: str, but: Sequence[str] = ()) -> Iterator[None]:
    """`pytest.raises` of an error whose message has all the words, which are no patterns, and none
    of `but`.
    """
    with pytest.raises(kind) as caught:
        yield
    said = str(caught.value)
    assert [word for word in words if word not in said] == [], said
    assert [word for word in but if word in said] == [], said


def some_of(
    names: str | tuple[str, ...],
    cases: Iterable[Any],
    keep: int | Sequence[Any] = 1,
    **options: Any,
) -> Any:
    """`pytest.mark.parametrize`, of which `make test` leaves cases out; `make test-full` runs all.

    Args:
        keep: what `make test` runs: so many of the first cases, or those whose first argument is
            one of these.
    """
    marked, several, left_out = [], not isinstance(names, str) or "," in names, 0
    for number, case in enumerate(cases):
        if not hasattr(case, "marks"):
            case = pytest.param(*(case if several else [case]))
        is_kept = number < keep if isinstance(keep, int) else case.values[0] in keep
        marks = [*case.marks] if is_kept else [*case.marks, pytest.mark.full]
        marked.append(pytest.param(*case.values, marks=marks, id=case.id))
        left_out += not is_kept
    assert 0 < left_out < len(marked), f"{names}: {left_out} of {len(marked)} cases are left out"
    return pytest.mark.parametrize(names, marked, **options)
