# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The reward-model job: a reward model, or a function, behind one endpoint; and the teacher of
on-policy distillation. See servers/server_loop.py, scoring.py and schema.py (tensors). N samples
of a request, n of one data-parallel rank's share, S padded token length.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from nemo_aligner.servers import schema
from nemo_aligner.servers.constants import ServerSignal
from nemo_aligner.servers.schema import Array, Arrays
from nemo_aligner.servers.scoring import Scorer
from nemo_aligner.servers.server_loop import ServerLoop, read_front


@dataclasses.dataclass
class RewardModelServer:
    """Serves one endpoint, `model_name`: sentences or tokens in, the reward [N, 1] of each sample
    out, or its attributes [N, A]. Every rank of the job constructs it and calls `run_server`.

    Raises:
        ConfigError: a token that is needed is missing, or a file cannot be read.
    """

    NAME: ClassVar[str] = "reward server"

    # (tokens int64 [n, S], lengths int64 [n]) as one tuple -> rewards [n, 1] or [n], or [n, A];
    # every rank calls it with its data-parallel share of the samples
    infer_fn: Callable[..., Tensor | Array]
    tokenize_func: Callable[[list[str]], tuple[Any, Any]]  # see `Scorer`, as all with its names
    model_name: str  # name of the endpoint
    port: int  # of the endpoint
    inference_micro_batch_size: int | list[int]  # see `batcher_options`
    model_forward_micro_batch_size: int  # samples of one forward pass per data-parallel rank
    strip_sequence_length_to_multiple: int | None = None
    max_queue_delay_microseconds: float = 0  # see `batcher_options`
    host: str = "127.0.0.1"  # address to listen on
    vocab_size: int | None = None
    max_length: int | None = None
    # `infer_fn` is called as (tokens, lengths, prompt_lengths int64 [n]), and a request that does
    # not say where its responses start is refused
    needs_prompt_lengths: bool = False
    # `infer_fn` gives rewards of tokens, [n, S], NaN at tokens without one; the reward of a sample
    # is their sum
    per_token: bool = False
    attributes: int = 1  # A; above 1 for a model that does not merge them
    tokenizer: Any = None
    # of the token that clients must bring; None: that in the environment, if there is one
    # (config/access.py). Needed if other machines can reach `host`.
    token_file: str | None = None
    max_request_mb: float = 64  # largest body of a request, in MiB
    slice_rows: int | None = None
    # section `server` of the configuration
    frontend: str = "triton"
    tls_certificate: str | None = None
    tls_key: str | None = None

    def __post_init__(self) -> None:
        self._loop: ServerLoop | None = None
        self._make_front = read_front(self, self, "inference")
        self._scorer = Scorer(
            self._score_rows,
            self.tokenize_func,
            self.model_forward_micro_batch_size,
            self.strip_sequence_length_to_multiple,
            self.vocab_size,
            self.max_length,
            self.needs_prompt_lengths,
            self.tokenizer,
            slice_rows=self.slice_rows,
        )

    def run_server(self) -> None:
        """Serve until SIGTERM or SIGINT reaches any rank; every rank calls it."""
        self._loop = ServerLoop(
            name=self.NAME,
            endpoints=[(dataclasses.replace(self.endpoint(), name=self.model_name), self.infer)],
            operations={ServerSignal.FORWARD: self._scorer.forward},
            after_failure=lambda signal_: None,  # the model stays prepared for inference
            control=self._scorer.control,
            make_front=self._make_front,
        )
        self._loop.run()

    def run_subscriber_loop(self) -> None:
        """`run_server`, as ranks above 0 may call it."""
        self.run_server()

    def endpoint(self) -> schema.Endpoint:
        return schema.reward_model_endpoint(self.per_token, self.attributes)

    def infer(self, **inputs: Array) -> Arrays:
        """Score a request, the tensors of `reward_model_endpoint`: {"rewards": float32 [N, 1] or
        [N, A]}, with `per_token` also "token_rewards" float32 [N, S]. `UserError`, on rank 0:
        names the tensor that does not fit.

        In a running server it is the endpoint's handler. Without one every rank calls it, rank 0
        with the inputs; rank 0 gets the rewards, the others an empty dict.
        """
        if self._loop is None:
            return self._scorer.run(inputs)
        return self._scorer.reply_to(inputs, self._loop)

    def _score_rows(
        self, tokens: Tensor, lengths: Tensor, prompt_lengths: Tensor | None
    ) -> dict[str, Tensor]:
        """Rewards [n, 1], or attributes [n, A], of this rank's samples; of tokens [n, S]."""
        if self.needs_prompt_lengths:
            rewards = self.infer_fn(tokens, lengths, prompt_lengths)
        else:
            rewards = self.infer_fn((tokens, lengths))
        rewards = torch.as_tensor(rewards)
        needed = "one number" if self.attributes == 1 else f"{self.attributes} numbers"
        fits = rewards.numel() == len(tokens) * self.attributes
        if self.per_token:
            fits, needed = rewards.shape == tokens.shape, "a number or NaN per token,"
        if not fits:
            raise RuntimeError(
                f"the served reward gave numbers of shape {list(rewards.shape)} for tokens "
                f"{list(tokens.shape)}; it must give {needed} per row. (Several attributes are "
                "merged with model.regression.merge_attributes=True.)"
            )
        if self.per_token:
            total = rewards.double().nansum(1, keepdim=True).float()
            return {"rewards": total, "token_rewards": rewards}
        return {"rewards": rewards.reshape(-1, self.attributes)}


# ---------------------------------------------------------- the teacher of on-policy distillation


@dataclasses.dataclass
class TeacherServer(RewardModelServer):
    """Serves one endpoint, `model_name`: tokens in, the K largest logits behind each of them out,
    and log-probs of the next ones. `infer_fn` gives `Taught`.
    """

    NAME: ClassVar[str] = "teacher server"

    def endpoint(self) -> schema.Endpoint:
        return schema.teacher_endpoint()

    def infer(self, **inputs: Array) -> Arrays:
        reply = super().infer(**inputs)
        if reply:
            reply["topk_token_ids"] = reply["topk_token_ids"].astype(np.int32)
        return reply

    def _score_rows(
        self, tokens: Tensor, lengths: Tensor, prompt_lengths: Tensor | None
    ) -> dict[str, Tensor]:
        """Logits and their tokens [n, S, K], log-sum-exp and log-probs [n, S]."""
        found: Any = self.infer_fn((tokens, lengths))
        return {
            "topk_logits": found.logits,
            "topk_token_ids": found.token_ids,  # float32 holds every id below 2^24 exactly
            "log_sum_exp_logits": found.log_sum_exp,
            "log_probs": found.log_probs,
        }
