# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The served teacher as an object of the student's job: the largest logits behind each token of
its samples.

Every rank constructs a client and calls the same methods; only the source rank of each
model-parallel group talks to the servers (fleet.py).

Shapes: b samples of a data-parallel rank, S padded length, K logits.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor

from nemo_aligner.config.server_rules import read_teacher
from nemo_aligner.core.tokenizer import tokenizer_fingerprint
from nemo_aligner.parallel import parallel_state
from nemo_aligner.servers import schema
from nemo_aligner.servers.futures import (
    FutureResult,
    PendingReply,
    await_on_source,
    try_on_source,
    wait_for_all,
)
from nemo_aligner.servers.payloads import scoring_payload
from nemo_aligner.servers.reward_client import (
    complete_section,
    connect,
    make_communicator,
    send_to_fleets,
)

SETTING = "remote_teacher"


class TeacherLogits(NamedTuple):
    """What a teacher says of samples."""

    # float32 [b, S, K], the largest logits behind each token, less the largest
    topk_logits: Tensor
    topk_token_ids: Tensor  # int64 [b, S, K]
    log_sum_exp_logits: Tensor  # float32 [b, S], of all logits less the largest


class PendingLogits(FutureResult[TeacherLogits]):
    """Logits on their way; `reply` counts on the source rank of the model-parallel group."""

    def __init__(self, reply: PendingReply | Exception | None, width: int):
        self._reply, self._width = reply, width
        self.pending = () if reply is None else (reply,)

    def result(self) -> TeacherLogits:
        """Wait for the logits, on the CPU, on every rank; `ServerRequestError` on every rank."""
        (reply,) = await_on_source(
            self._reply,
            parallel_state.get_model_parallel_src_rank(),
            parallel_state.get_model_parallel_group(),
        ).values()
        # Requests are wider than their samples.
        columns = {name: _cpu(reply[name][:, : self._width]) for name in TeacherLogits._fields}
        columns["topk_token_ids"] = columns["topk_token_ids"].long()
        return TeacherLogits(**columns)


def _cpu(array: schema.Array) -> Tensor:
    return torch.from_numpy(np.array(array))


class RemoteTeacherClient:
    """A served teacher (`serve_teacher.py`), on one server or several. Every rank constructs it,
    together.

    Args:
        cfg: `remote_teacher`: `host`, `port`, `name`, `init_timeout_s`, `inference_timeout_s`,
            `token_file`, `tls_ca_file`. Missing keys have the defaults of the YAML file.
        tokenizer: of the student; a server with another one refuses its samples.
        max_length: longest sample of the student, to which widths of requests may be rounded up.

    Raises:
        ConfigError: the section cannot work.
        ServerUnreachableError: no server within `init_timeout_s`.
        ServerRequestError: the teacher has another tokenizer, or gives no logits.
    """

    def __init__(self, cfg: DictConfig, tokenizer: object, max_length: int | None = None):
        cfg = complete_section(cfg, SETTING)
        self.fingerprint, self.max_length = tokenizer_fingerprint(tokenizer), max_length
        self.communicator = make_communicator(cfg, SETTING)
        self._fleets = connect([read_teacher(cfg)], schema.teacher_endpoint(), self.communicator)
        try:
            # Before a student has generated anything: as long as its longest response, for which
            # the teacher's context may be too short.
            longest = max_length or 1
            self.logits(torch.zeros(1, longest, dtype=torch.int64), torch.tensor([longest]))
        except Exception:
            self.close()
            raise

    def logits(self, tokens: Tensor, lengths: Tensor) -> TeacherLogits:
        """The teacher's logits behind each token; every rank of the job calls it.

        Args:
            tokens: int64 [b, S], this data-parallel rank's samples, padded on the right.
            lengths: int64 [b], at least 1; some sample has S tokens.

        Raises:
            ServerRequestError: on every rank, with the cause.
        """
        samples: Any = {"response_tokens": tokens, "response_lengths": lengths}
        make_payload = functools.partial(
            scoring_payload, samples, None, self.fingerprint, self.max_length
        )
        reply = try_on_source(lambda: send_to_fleets(self._fleets, make_payload()))
        future = PendingLogits(reply, tokens.size(1))
        wait_for_all(future.pending)
        return future.result()

    def close(self) -> None:
        self.communicator.close()
