# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A user's own functions, which run in the ranks of a job: `path/to/file.py:function`."""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from nemo_aligner.core.errors import ConfigError
from nemo_aligner.servers.reward_worker import LoadError, load_named


def own_function(named: str | None, key: str, parameters: Sequence[str]) -> Callable | None:
    """The function that the value `named` of `key` names; None where it is None.

    Args:
        named: path/to/file.py:function of a file that exists.
        parameters: names that it is called with; its result has the shape of the first one.

    Raises:
        ConfigError: there is no such function, or it cannot be called in this way; when it is
            called: what it returns is no tensor of that shape, or has no gradient to pass on.
    """
    if named is None:
        return None
    path, _, name = named.rpartition(":")
    called = f"{name}({', '.join(f'{each}=...' for each in parameters)})"
    import_path = list(sys.path)
    try:
        function = load_named(os.path.abspath(path), name, "function", inspect.isfunction)
        inspect.signature(function).bind(**dict.fromkeys(parameters))
        if inspect.iscoroutinefunction(function):
            raise TypeError("it is async")
    except LoadError as error:
        raise ConfigError(f"{key}={named}: {error}") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}={named}: {error}. It is called as {called}.") from None
    finally:  # what is beside the file must not hide modules that this rank imports later
        folder = os.path.dirname(os.path.abspath(path))
        sys.path[:] = import_path if folder in import_path else [*import_path, folder]

    @functools.wraps(function)
    def checked(**arguments: Any) -> Tensor:
        result, like = function(**arguments), arguments[parameters[0]]
        is_tensor = isinstance(result, Tensor)
        if not is_tensor or result.shape != like.shape:
            found = f"shape {list(result.shape)}" if is_tensor else f"type {type(result).__name__}"
            raise ConfigError(
                f"{key}={named} returns the {found}; it must return a tensor of the shape of "
                f"{parameters[0]}, {list(like.shape)}."
            )
        if like.requires_grad and not result.requires_grad:
            raise ConfigError(
                f"{key}={named} returns a tensor without gradient; compute it from "
                f"{parameters[0]}, without detach() or no_grad()."
            )
        return result

    return checked
