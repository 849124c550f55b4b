# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Scripts that make the calls of NeMo-Aligner's scripts (other_scripts/), as jobs of two ranks:
the same numbers as this package's own scripts.
"""

from pathlib import Path

import pytest

from nemo_aligner.checkpoint.folders import complete_checkpoints
from tests.functional.test_ppo_job import TRITON, run_pair, single  # noqa: F401

pytestmark = [pytest.mark.timeout(900), pytest.mark.full]

OTHERS = Path(__file__).parent / "other_scripts"
TENSOR_PARALLEL = "++model.tensor_model_parallel_size=2"


def run_others(inputs, folder, of_critic, of_actor) -> str:
    """Critic and actor of two ranks to the end; returns the log of the actor."""
    scripts = [OTHERS / f"ppo_{side}.py" for side in ("critic", "actor")]
    own = [TRITON, *of_critic], of_actor, 2
    return run_pair(inputs, folder, *own, scripts=map(str, scripts))[1].log


def last_state(folder):
    """Counters and metrics of the newest checkpoint."""
    return complete_checkpoints(folder / "checkpoints")[-1][1]


def test_ppo_at_two_ranks_gives_the_numbers_of_our_scripts_and_resumes(inputs, single, tmp_path):  # noqa: F811
    """Actor on TP 2 against a critic on DP 2, then the other way round."""
    warned_of = "+trainer.ppo.a_key_of_its_own=1"
    log = run_others(inputs, tmp_path, [], [TENSOR_PARALLEL, warned_of])
    assert log.count("This package reads none of these keys:") == 1  # on rank 0
    assert log.count("trainer.ppo.a_key_of_its_own") == 1
    for job in ("actor", "critic"):
        assert last_state(tmp_path / job)["trainer"] == last_state(single / job)["trainer"]
    metrics, expected = (last_state(run / "actor")["metrics"] for run in (tmp_path, single))
    assert {"train_critic_loss", "train_actor_loss", "train_init_policy_kl"} <= {*expected}
    for name in (name for name in expected if not name.endswith(("_per_s", "_time"))):
        found = pytest.approx(expected[name], rel=1e-4, abs=1e-5, nan_ok=True)
        assert metrics[name] == found, name

    more = ["trainer.ppo.max_steps=6", "trainer.ppo.val_check_interval=3"]
    run_others(inputs, tmp_path, [TENSOR_PARALLEL], more)
    assert last_state(tmp_path / "actor")["trainer"]["step"] == 6
