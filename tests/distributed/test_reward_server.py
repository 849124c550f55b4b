# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`RewardModelServer` over two ranks, without a server: which rank scores which samples, who gets
the rewards.
"""

import numpy as np

from nemo_aligner.parallel import parallel_state
from nemo_aligner.servers.server_loop import batcher_options
from tests.distributed.launcher import run_ranks
from tests.unit.test_reward_server import last_token, make_server


def score_on_ranks():
    """On each rank: what `infer` gives for requests of 1, 3 and 5 rows, and the rows that this
    rank's model saw.
    """
    parallel_state.initialize(tensor_model_parallel_size=1)
    seen = []

    def infer_fn(inputs):
        seen.append(inputs[0].shape[0])
        return last_token(inputs)

    server = make_server(infer_fn)
    assert batcher_options(0, [3])["preferred_batch_size"] == [3 * 2]
    answers = []
    for rows in (1, 3, 5):
        tokens = np.arange(4 * rows).reshape(rows, 4)
        request = {"tokens": tokens, "sequence_lengths": np.full((rows, 1), 4)}
        answers.append(server.infer(**(request if parallel_state.get_rank() == 0 else {})))
    try:
        server.infer(tokens=tokens)
        error = ""
    except Exception as exception:
        error = str(exception)
    return answers, seen, error


def test_two_ranks_without_a_server():
    """Rows are shared out over data-parallel ranks and come back in order; an error reaches every
    rank.
    """
    results = run_ranks(score_on_ranks, 2, 100)
    (answers, _, _), (nothing, _, _) = results
    assert nothing == [{}, {}, {}]
    for rows, answer in zip((1, 3, 5), answers):
        assert answer["rewards"].tolist() == [[4.0 * row + 3] for row in range(rows)]
    for _, seen_here, error in results:
        assert seen_here == [1, 2, 4] and "'sequence_lengths' is missing" in error
