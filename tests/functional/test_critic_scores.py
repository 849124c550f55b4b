# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Values and rewards of a combined critic server (serve_ppo_critic.py) against the models called
directly.

Expected numbers come from the same models in this process, called on one unpadded row at a time.
"""

import concurrent.futures

import numpy as np
import pytest
import torch

from nemo_aligner.servers.ports import find_free_port
from tests.functional.jobs import assert_ended_well, wait_until_serving
from tests.functional.test_ppo_job import critic, inputs  # noqa: F401  (a fixture)
from tests.functional.test_reward_server import TEXTS, TOLERANCE, ask, direct, make_rows, request
from tests.tiny_models import tiny_config

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def models(inputs, tiny_tokenizer_dir):  # noqa: F811
    """(reward model, critic) with the weights of rm.nemo."""
    from nemo_aligner.models.nlp.gpt.megatron_gpt_critic import MegatronGPTCriticModel
    from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel

    built = []
    for cls in (MegatronGPTRewardModel, MegatronGPTCriticModel):
        model = cls(
            tiny_config(tiny_tokenizer_dir, output_sequence=False, force_head_dtype="float32")
        )
        model.load_nemo_weights(str(inputs / "rm.nemo"))
        model.prepare_for_inference()
        built.append(model)
    return built


def assert_values(answer: np.ndarray, value_model, rows: list[torch.Tensor], width: int) -> None:
    """Values [N, width]; what stands behind the end of a row does not matter."""
    assert answer.shape == (len(rows), width) and answer.dtype == np.float32
    for values, row in zip(answer, rows):
        expected = value_model.infer((row[None], torch.tensor([len(row)]))).numpy()[0]
        np.testing.assert_allclose(values[: len(row)], expected, **TOLERANCE)


def assert_scores_are_direct(port: int, models) -> None:
    """For requests of several sizes and widths, for sentences, and for many of them at once."""
    reward_model, value_model = models

    def one(case):
        count, longest, width, fill = case
        rows = make_rows(count, seed=count, longest=longest)
        return rows, width or longest, ask(port, "critic_infer", **request(rows, width, fill))

    cases = [
        (1, 1, None, None),
        (3, 9, 11, 4),
        (9, 17, 48, 5),
        (5, 30, None, None),
        (2, 48, 48, None),
        (4, 8, 8, None),
    ]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        results = [one(case) for case in cases] + list(pool.map(one, cases * 2))
    for rows, width, answer in results:
        np.testing.assert_allclose(answer["rewards"], direct(reward_model, rows), **TOLERANCE)
        assert_values(answer["values"], value_model, rows, width)

    rows = [torch.tensor(reward_model.tokenizer.text_to_ids(text)) for text in TEXTS]
    answer = ask(port, "critic_infer", sentences=[[text.encode()] for text in TEXTS])
    np.testing.assert_allclose(answer["rewards"], direct(reward_model, rows), **TOLERANCE)
    assert_values(answer["values"], value_model, rows, max(map(len, rows)))


@pytest.mark.full
@pytest.mark.parametrize(
    "launcher, ranks, tp, strip",
    [
        ("python", 1, 1, 4),
        pytest.param("torchrun", 2, 1, 4, marks=pytest.mark.full),
        pytest.param("python", 2, 2, 5, marks=pytest.mark.full),
    ],
    ids=["one-rank", "dp2-strip", "tp2-strip"],
)
def test_scores_equal_the_models_called_directly(
    inputs,  # noqa: F811
    models,
    tmp_path,
    launcher,
    ranks,
    tp,
    strip,
):
    port = find_free_port()
    extra = [
        f"++model.tensor_model_parallel_size={tp}",
        f"trainer.ppo.strip_sequence_length_to_multiple={strip}",
    ]
    with critic(inputs, tmp_path / "critic", port, ranks, launcher, *extra) as server:
        wait_until_serving(server)
        assert_scores_are_direct(port, models)
        assert_ended_well(server, server.stop())
