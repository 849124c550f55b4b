# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Errors that a user caused and can mend: each message names the offending value and the remedy."""


class UserError(ValueError):
    """Bad input (a value, file or address given by the user)."""


class ConfigError(UserError):
    """A configuration key or a combination of values that cannot work."""
