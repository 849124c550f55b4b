# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Methods that one thread at a time may run."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


def lock_method(lock_name: str) -> Callable[[Method], Method]:
    """Decorator: run the method while holding the lock named by e.g. "self.lock"."""
    attribute = lock_name.removeprefix("self.")

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def locked(self: object, *args: Any, **kwargs: Any) -> Any:
            with getattr(self, attribute):
                return method(self, *args, **kwargs)

        return locked  # type: ignore[return-value]

    return decorate
