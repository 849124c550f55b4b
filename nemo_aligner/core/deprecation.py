# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Marks functions that a later version will not have."""

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def deprecated_in_version(
    version: str, message: str | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: a call warns (`DeprecationWarning`) that `version` will remove the function.

    Args:
        message: what to use in its place.
    """

    def decorator(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            text = f"{function.__name__} is deprecated; version {version} will not have it."
            warnings.warn(f"{text} {message or ''}".strip(), DeprecationWarning, stacklevel=2)
            return function(*args, **kwargs)

        return run

    return decorator


def surpress_user_warnings(f: Callable[P, R]) -> Callable[P, R]:
    """Decorator, spelled as in NeMo-Aligner: a call shows no `UserWarning`."""

    @functools.wraps(f)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return f(*args, **kwargs)

    return run
