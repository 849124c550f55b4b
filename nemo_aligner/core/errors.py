# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Errors that end a job with one message and no traceback: those that a user caused (the message
names the value and the remedy), those that came from a server, and those of alarms.
"""


class UserError(ValueError):
    """Bad input (a value, file or address given by the user)."""


class ConfigError(UserError):
    """A configuration key or a combination of values that cannot work."""


class DamagedFileError(UserError):
    """A file of a checkpoint or a `.nemo` is not what was written."""


class SaveError(UserError):
    """A checkpoint or a `.nemo` could not be written; raised by all ranks together."""


class ServerRequestError(RuntimeError):
    """A request failed on the server, or no response arrived; the message carries the remote
    traceback.
    """


class LostPeerError(ServerRequestError):
    """A process that this job needs has ended, or does not return in the configured time."""


class ServerJobError(RuntimeError):
    """A server job cannot continue: a rank failed alone."""


class AlarmError(RuntimeError):
    """An alarm ends the run; raised by all ranks together."""


class NonFiniteError(AlarmError):
    """A loss, a gradient, a reward or a value is NaN or infinite."""


class ReplicaError(AlarmError):
    """Weights that must be equal on several ranks are not."""


class PolicyReferenceError(AlarmError):
    """Policy and reference differ before the first update."""
