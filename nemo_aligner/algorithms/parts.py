# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The door for parts that a user wrote: NeMo-Aligner's interface of each is enough, and what it
lacks of `core/interfaces.py` is added; a complete part comes back as it is.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from nemo.utils import logging
from torch import Tensor

from nemo_aligner.core.errors import SaveError, ServerRequestError, UserError, cause_of
from nemo_aligner.core.interfaces import Critic, Logger, PendingScores
from nemo_aligner.core.types import Rollout, Scores
from nemo_aligner.parallel.device import get_device
from nemo_aligner.servers.futures import OtherFuture, await_on_source, wait_for_all


class _Completed:
    def __init__(self, part: Any, added: Mapping[str, Any]):
        self._part, self._added = part, added

    def __getattr__(self, name: str) -> Any:
        return self._added[name] if name in self._added else getattr(self._part, name)


def _takes(function: Callable[..., Any], argument: str) -> bool:
    parameters = inspect.signature(function).parameters
    return argument in parameters or any(p.kind == p.VAR_KEYWORD for p in parameters.values())


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """In place of a method that a part need not have."""


# --------------------------------------------------------------------------------- remote models


class _RankZeroOutcome(OtherFuture):
    """What a user's future gives on rank 0, on every rank; there may be none on the others."""

    def result(self) -> Any:
        own = SimpleNamespace(done=self.done, result=super().result)
        wait_for_all([own])  # each rank asks its own: there may be collectives in it
        return await_on_source(own, 0, dist.group.WORLD if dist.is_initialized() else None)


def scores_of(infer: Callable[[Rollout], Any]) -> Callable[[Rollout], PendingScores]:
    """`infer_rm` or `infer_rm_critic`; its future need not have `scores()`: see `_read_scores`."""

    def ask(rollout: Rollout) -> PendingScores:
        future: Any = infer(rollout)
        if hasattr(future, "scores"):
            return cast(PendingScores, future)
        return OtherFuture(future, lambda got: _read_scores(got, rollout))

    return ask


def _read_scores(got: Any, rollout: Rollout) -> Scores:
    """Scores from rewards `[b]` or `[b, 1]`, or from these and values `[b, S-1]`."""
    is_pair = isinstance(got, (tuple, list)) and hasattr(got[0], "shape")
    rewards, values = got if is_pair else (got, None)
    rewards = torch.as_tensor(rewards, device=get_device()).float().flatten()
    samples, width = rollout["response_tokens"].shape
    if len(rewards) != samples:
        raise UserError(f"the client gave {len(rewards)} rewards for {samples} responses.")
    if values is not None:  # of the responses' own width, or of a wider batch
        values = torch.as_tensor(values, device=get_device()).float()[:, : width - 1]
        values = torch.nn.functional.pad(values, (0, width - 1 - values.shape[1]))
    return Scores(rewards, values)


def complete_critic(client: Any) -> Critic:
    """A critic client, of which `infer_rm_critic`, `train(data)` and `save()` are enough."""

    def warn(*_args: Any) -> None:
        logging.warning(
            f"{type(client).__name__} has no check_status; when you restart one job, see to it "
            "that the other one loads the checkpoint of the same step."
        )

    added = {
        "train": lambda data: _RankZeroOutcome(client.train(data), _read_loss),
        "save": lambda actor_step=None: _RankZeroOutcome(client.save(), _nothing),
        "check_status": warn,
    }
    return cast(Critic, client if hasattr(client, "check_status") else _Completed(client, added))


def _read_loss(got: Any) -> float | None:
    loss = got.get("loss_mean") if isinstance(got, Mapping) else got
    return None if loss is None else float(torch.as_tensor(loss).flatten()[0])


# ------------------------------------------------------------------------------ models, and others


def log_probs(compute: Callable[..., Tensor], tokens: Tensor, lengths: Tensor) -> Tensor:
    """A model's `get_inference_log_probs` or `get_init_policy_logprobs`, maybe without lengths."""
    if _takes(compute, "response_lengths"):
        return compute(tokens, response_lengths=lengths)
    return compute(tokens)


def complete_outputs(logger: Any, callback: Any) -> tuple[Logger, Any]:
    """What every trainer writes with. Enough are a logger without `log_samples`, and a
    `CheckpointWriter` with `custom_save(monitor_candidates, is_train_end)` alone, whose
    checkpoints are complete when that returns, and are not known afterwards.
    """
    if not hasattr(logger, "log_samples"):
        logger = _Completed(logger, {"log_samples": _nothing})
    optional: dict[str, Any] = {
        name: _nothing for name in ("check_save", "finish_save", "finish_export")
    }
    optional |= {"is_saving": False, "saved_at": lambda counter: {}}
    added = {name: value for name, value in optional.items() if not hasattr(callback, name)}
    if callback is not None and not _takes(callback.custom_save, "trainer_state"):
        added["custom_save"] = functools.partial(_save, callback)
    return logger, _Completed(callback, added) if added else callback


def _save(
    callback: Any, monitor_candidates: Mapping[str, Any], is_train_end: bool, trainer_state: Any
) -> None:
    """Call `callback` as NeMo-Aligner does, with tensors; an error of one rank is all's."""
    numbers = {k: v for k, v in monitor_candidates.items() if isinstance(v, (int, float, Tensor))}
    candidates = {name: torch.as_tensor(number) for name, number in numbers.items()}
    failed = []
    try:
        callback.custom_save(monitor_candidates=candidates, is_train_end=is_train_end)
    except Exception as error:
        failed = [ServerRequestError(cause_of(error))]
    try:
        wait_for_all(failed)
    except ServerRequestError as error:
        raise SaveError(f"{type(callback).__name__}.custom_save: {error}") from None
