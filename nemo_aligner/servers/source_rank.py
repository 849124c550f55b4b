# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests that one rank sends and all ranks wait for: the answer reaches every rank, and so does
every error.
"""

import time

import numpy as np
import torch
import torch.distributed as dist

from nemo_aligner.core.errors import ServerRequestError, UserError
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.device import get_device
from nemo_aligner.servers.futures import FutureResult

# Ranks that wait for another rank's answer hear from it this often, so no collective times out...
HEARTBEAT_S = 30.0
# ...and when all ranks wait for answers of their own, for a failure of one should end the others
# soon.
JOINT_HEARTBEAT_S = 10.0


def await_on_source(pending, src: int, group) -> dict:
    """The answer that rank `src` waits for, on every rank of `group`.

    Args:
        pending: on `src` an object with `done(timeout_s)` and `result()`, such as `PendingAnswer`,
            or an exception of the attempt to send; ignored elsewhere.
        group: process group; None without one (a single process).

    Raises:
        ServerRequestError: on every rank, with the remote traceback.
    """
    alone = group is None or dist.get_world_size(group) == 1
    is_source = alone or dist.get_rank() == src
    while True:
        state, answer = _poll(pending, HEARTBEAT_S) if is_source else ("pending", None)
        if not alone:
            box = [(state, answer)]
            dist.broadcast_object_list(box, src=src, group=group)
            state, answer = box[0]
        if state == "done":
            return answer
        if state == "failed":
            raise ServerRequestError(answer)


def _poll(pending, timeout_s: float) -> tuple:
    """("done", answer), ("failed", what is wrong) or, after `timeout_s`, ("pending", None)."""
    try:
        if isinstance(pending, Exception):
            raise pending
        return ("done", pending.result()) if pending.done(timeout_s) else ("pending", None)
    except Exception as error:  # whatever it is: the other ranks must not wait for ever
        return "failed", str(readable_error(error))


def wait_for_all(pending) -> None:
    """Return once every rank has its answers; every rank of the job calls it.

    Ranks may wait for different numbers of answers, and for a different time: nobody goes on to a
    collective of the job, where a time limit runs, before all can. When one rank's request fails,
    all ranks hear of it here.

    Args:
        pending: what this rank waits for, the `pending` of its futures; may be empty.

    Raises:
        ServerRequestError: the same on all ranks, that of the lowest rank whose request failed.
    """
    left = list(pending)
    while True:
        deadline = time.monotonic() + JOINT_HEARTBEAT_S
        failure = None
        while left and failure is None:
            state, answer = _poll(left[0], max(deadline - time.monotonic(), 0.0))
            if state == "pending":
                break
            if state == "failed":
                failure = answer
            left.pop(0)
        outcomes = [(failure, not left)]
        if dist.is_initialized() and dist.get_world_size() > 1:
            outcomes = [None] * dist.get_world_size()
            dist.all_gather_object(outcomes, (failure, not left))
        for text, _ in outcomes:
            if text is not None:
                raise ServerRequestError(text)
        if all(finished for _, finished in outcomes):
            return


def get_future_result(future, *keys):
    """Arrays `keys` of the answer, as tensors on this rank's device, on every rank of the
    model-parallel group.

    Args:
        future: `PendingAnswer` on the group's source rank, ignored elsewhere.

    Returns:
        One tensor, or a list of them for several keys.
    """
    src, group = (
        parallel_state.get_model_parallel_src_rank(),
        parallel_state.get_model_parallel_group(),
    )
    answer = await_on_source(future, src, group)
    tensors = [torch.from_numpy(np.array(answer[key])).to(get_device()) for key in keys]
    return tensors[0] if len(tensors) == 1 else tensors


def try_on_source(send):
    """What `send()` returns, or the exception it raises, on the model-parallel source rank; None
    elsewhere.

    The other ranks learn of an exception when all ask for the result: one rank alone must not
    leave the others there.
    """
    if parallel_state.get_rank() != parallel_state.get_model_parallel_src_rank():
        return None
    return outcome_or_error(send)


def outcome_or_error(send):
    """What `send()` returns, or the exception it raises as one that users can read."""
    try:
        return send()
    except Exception as error:
        return readable_error(error)


def readable_error(error: Exception) -> Exception:
    """`error`, or one that names its type if its message alone says little."""
    return (
        error
        if isinstance(error, (ServerRequestError, UserError))
        else ServerRequestError(repr(error))
    )


class RankZeroFuture(FutureResult):
    """An answer that global rank 0 waits for; `result()` ends on all ranks together. It can be
    called again.
    """

    def __init__(self, pending):
        self._pending = pending
        self._outcome = None
        self.pending = () if pending is None else (pending,)

    def result(self):
        """The answer, by tensor name."""
        if self._outcome is None:
            try:
                self._outcome = await_on_source(
                    self._pending, 0, dist.group.WORLD if dist.is_initialized() else None
                )
            except ServerRequestError as error:
                self._outcome = error
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome
