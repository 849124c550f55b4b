# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A user's own functions, which run in the ranks of a job: `path/to/file.py:function`."""

import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

from nemo_aligner.core.errors import ConfigError
from nemo_aligner.servers.reward_worker import LoadError, load_named


def own_function(named: str | None, key: str, parameters: Sequence[str]) -> Callable | None:
    """The function that the value `named` of `key` names; None where it is None.

    Args:
        named: path/to/file.py:function of a file that exists.
        parameters: names that it is called with.

    Raises:
        ConfigError: there is no such function, or it cannot be called in this way.
    """
    if named is None:
        return None
    path, _, name = named.rpartition(":")
    try:
        function = load_named(os.path.abspath(path), name, "function", inspect.isfunction)
        inspect.signature(function).bind(**dict.fromkeys(parameters))
    except (LoadError, TypeError, ValueError) as error:
        called = f"{name}({', '.join(f'{each}=...' for each in parameters)})"
        raise ConfigError(f"{key}={named}: {error}. It is called as {called}.") from None
    found: Callable[..., Any] = function
    return found
