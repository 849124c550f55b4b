# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The reward-model job: a reward model, or a function, behind one endpoint; and
the teacher of on-policy distillation.

See `servers/server_loop.py` for the threads and the end of the job, `servers/scoring.py` for the
path of a request, `servers/schema.py` for the endpoint's tensors. N is the number of samples of a
request, n that of one data-parallel rank's share, S the padded token length.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from nemo_aligner.config.access import server_token
from nemo_aligner.servers import schema
from nemo_aligner.servers.admission import Access
from nemo_aligner.servers.constants import ServerSignal
from nemo_aligner.servers.schema import Array, Arrays, RequestError
from nemo_aligner.servers.scoring import Scorer, batcher_options
from nemo_aligner.servers.server_loop import Frontend, ServerLoop


@dataclasses.dataclass
class RewardModelServer:
    """Serves one endpoint, `model_name`: sentences or tokens in, the reward [N, 1] of each sample
    out, or its attributes [N, A].

    Every rank of the job constructs it, with a model that is ready for inference, and calls
    `run_server`.

    Raises:
        ConfigError: there is no token although one is needed, or it or another file cannot be
            read.
    """

    NAME: ClassVar[str] = "reward server"

    # (tokens int64 [n, S], lengths int64 [n]) as one tuple -> rewards [n, 1] or [n], or [n, A];
    # every rank calls it with its data-parallel share of the samples
    infer_fn: Callable[..., Tensor | Array]
    # list of str -> (tokens int64 [N, S], lengths int64 [N])
    tokenize_func: Callable[[list[str]], tuple[Any, Any]]
    model_name: str  # name of the endpoint
    port: int  # of the endpoint
    # samples per data-parallel rank at which Triton does not wait any more, a number or several
    inference_micro_batch_size: int | list[int]
    model_forward_micro_batch_size: int  # samples of one forward pass per data-parallel rank
    # columns that no sample uses are cut, down to this multiple; None keeps them
    strip_sequence_length_to_multiple: int | None = None
    # how long Triton holds a request back for others that it hands over with it; each is scored by
    # itself
    max_queue_delay_microseconds: float = 0
    host: str = "127.0.0.1"  # address to listen on
    # vocab_size, max_length: bounds of the model for token ids and S; requests beyond are refused
    vocab_size: int | None = None
    max_length: int | None = None
    # `infer_fn` is called as (tokens, lengths, prompt_lengths int64 [n]), and a request that does
    # not say where its responses start is refused. Models score whole samples and do not need
    # them.
    needs_prompt_lengths: bool = False
    # `infer_fn` gives rewards of tokens, [n, S], NaN at tokens without one; the reward of a sample
    # is their sum
    per_token: bool = False
    attributes: int = 1  # A; above 1 for a model that does not merge them
    # of the model or function; a request that names another one is refused. None refuses none.
    tokenizer: Any = None
    # of the token that clients must bring; None: that in the environment, if there is one
    # (config/access.py). Needed if other machines can reach `host`.
    token_file: str | None = None
    max_request_mb: float = 64  # largest body of a request, in MiB
    # of a large request, so many samples per data-parallel rank are scored before other requests
    # have their turn, in their order; None: as many micro-batches as `servers/requests.py` says,
    # which suits a model
    slice_rows: int | None = None
    # frontend, tls_certificate, tls_key: section `server` of the configuration: "triton" or
    # "asgi", and files with which the latter encrypts
    frontend: str = "triton"
    tls_certificate: str | None = None
    tls_key: str | None = None

    def __post_init__(self) -> None:
        self._loop: ServerLoop | None = None
        self._access = Access(
            server_token(self.host, self.token_file, "inference"), int(self.max_request_mb * 2**20)
        )
        self._frontend = Frontend.read(self.frontend, self.tls_certificate, self.tls_key)
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
            host=self.host,
            port=int(self.port),
            endpoints=[(dataclasses.replace(self.endpoint(), name=self.model_name), self.infer)],
            operations={ServerSignal.FORWARD: self._scorer.forward},
            after_failure=lambda signal_: None,  # the model stays prepared for inference
            batcher=batcher_options(
                self.max_queue_delay_microseconds, self.inference_micro_batch_size
            ),
            control=self._scorer.control,
            access=self._access,
            frontend=self._frontend,
        )
        self._loop.run()

    def endpoint(self) -> schema.Endpoint:
        """What it serves, by its default name."""
        return schema.reward_model_endpoint(self.per_token, self.attributes)

    def run_subscriber_loop(self) -> None:
        """Follow rank 0 until the job ends: `run_server`, as ranks above 0 may call it."""
        self.run_server()

    def infer(self, **inputs: Array) -> Arrays:
        """Score a request: {"rewards": float32 [N, 1] or [N, A]}, with `per_token` also
        "token_rewards" float32 [N, S].

        In a running server it is the endpoint's handler. Without one every rank calls it, rank 0
        with the inputs; rank 0 gets the rewards, the others an empty dict.

        Args:
            inputs: `tokens` int64 [N, S] and `sequence_lengths` int64 [N, 1], or `sentences` bytes
                [N, 1]; optionally `prompt_lengths` int64 [N, 1] and `tokenizer` bytes [N, 1].

        Raises:
            UserError: on rank 0, naming the tensor that does not fit.
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
        if self.per_token:
            if rewards.shape != tokens.shape:
                raise RuntimeError(
                    f"the served reward gave numbers of shape {list(rewards.shape)} for tokens of "
                    f"shape {list(tokens.shape)}; it must give one number, or NaN, per token."
                )
            total = rewards.double().nansum(1, keepdim=True).float()
            return {"rewards": total, "token_rewards": rewards}
        if rewards.numel() != tokens.shape[0] * self.attributes:
            needed = "one number" if self.attributes == 1 else f"{self.attributes} numbers"
            raise RuntimeError(
                f"the served reward gave numbers of shape {list(rewards.shape)} for "
                f"{tokens.shape[0]} row(s); it must give {needed} per row. A model with several "
                "attributes gives one if it merges them: model.regression.merge_attributes=True."
            )
        return {"rewards": rewards.reshape(-1, self.attributes)}


# ---------------------------------------------------------- the teacher of on-policy distillation


@dataclasses.dataclass
class TeacherServer(RewardModelServer):
    """Serves one endpoint, `model_name`: tokens in, the K largest logits behind each of them out,
    and log-probs of the next ones.

    The attributes are those of the base class, of which `infer_fn` gives `Taught`.
    """

    NAME: ClassVar[str] = "teacher server"

    def endpoint(self) -> schema.Endpoint:
        return schema.teacher_endpoint()

    def infer(self, **inputs: Array) -> Arrays:
        """The largest logits of the samples of a request (`schema.teacher_endpoint`); see the base
        class.

        Args:
            inputs: `tokens` int64 [N, S] and `sequence_lengths` int64 [N, 1]; optionally
                `tokenizer` bytes [N, 1].
        """
        reply = super().infer(**inputs)
        if reply:
            reply["topk_token_ids"] = reply["topk_token_ids"].astype(np.int32)
        return reply

    def _score_rows(
        self, tokens: Tensor, lengths: Tensor, prompt_lengths: Tensor | None
    ) -> dict[str, Tensor]:
        """Logits and their tokens [n, S, K], log-sum-exp and log-probs [n, S], of this rank's
        samples.
        """
        found: Any = self.infer_fn((tokens, lengths))
        return {
            "topk_logits": found.logits,
            "topk_token_ids": found.token_ids,  # float32 holds every id below 2^24 exactly
            "log_sum_exp_logits": found.log_sum_exp,
            "log_probs": found.log_probs,
        }


def no_sentences(sentences: list[str]) -> tuple[Any, Any]:
    """In place of a tokenizer: a teacher is asked about tokens, so raise `RequestError`."""
    raise RequestError(
        f"{len(sentences)} 'sentences' came, but a teacher gives logits of tokens: send 'tokens' "
        "and 'sequence_lengths'."
    )
