# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The teacher's job of on-policy distillation: its largest logits behind each token of the samples
that a student sends.

N is the number of samples of a request, n that of one data-parallel rank's share, S the padded
token length, K the number of logits.
"""

import dataclasses
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from nemo_aligner.algorithms.reward_server import RewardModelServer
from nemo_aligner.servers import schema
from nemo_aligner.servers.schema import Array, Arrays, RequestError


@dataclasses.dataclass
class TeacherServer(RewardModelServer):
    """Serves one endpoint, `model_name`: tokens in, the K largest logits behind each of them out.

    The attributes are those of the base class, of which `infer_fn` gives `TopLogits`.
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
        """Logits and their tokens [n, S, K], and log-sum-exp [n, S], of this rank's samples."""
        found: Any = self.infer_fn((tokens, lengths))
        return {
            "topk_logits": found.logits,
            "topk_token_ids": found.token_ids,  # float32 holds every id below 2^24 exactly
            "log_sum_exp_logits": found.log_sum_exp,
        }


def no_sentences(sentences: list[str]) -> tuple[Any, Any]:
    """In place of a tokenizer: a teacher is asked about tokens, so raise `RequestError`."""
    raise RequestError(
        f"{len(sentences)} 'sentences' came, but a teacher gives logits of tokens: send 'tokens' "
        "and 'sequence_lengths'."
    )
