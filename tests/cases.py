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


def first_of(names: str, cases: Iterable[Any], ids: Any = None, indirect: bool = False) -> Any:
    """`pytest.mark.parametrize`; `make test` runs the first case, `make test-full` all of them."""
    single = "," not in names
    first, *others = cases
    marked = [
        pytest.param(*([case] if single else case), marks=pytest.mark.full) for case in others
    ]
    return pytest.mark.parametrize(names, [first, *marked], ids=ids, indirect=indirect)
