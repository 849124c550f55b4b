# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Cases of a test: many small ones as one test, and those that `make test` leaves out."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest


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
                    faults.append(f"{case}: {type(error).__name__}: {error}")
            assert cases and not faults, "\n".join(faults)

        functools.update_wrapper(test, check)
        del test.__wrapped__
        others = [each for name, each in parameters.items() if name not in arguments]
        test.__signature__ = inspect.Signature(others)
        return test

    return decorate


def first_of(
    names: str | tuple[str, ...], cases: Iterable[Any], keep: int = 1, **options: Any
) -> Any:
    """`pytest.mark.parametrize`; `make test` runs the first cases, as many as `keep`,
    `make test-full` all of them.
    """
    marked, several = [], not isinstance(names, str) or "," in names
    for number, case in enumerate(cases):
        if not hasattr(case, "marks"):
            case = pytest.param(*(case if several else [case]))
        more = [pytest.mark.full] if number >= keep else []
        marked.append(pytest.param(*case.values, marks=[*case.marks, *more], id=case.id))
    return pytest.mark.parametrize(names, marked, **options)
