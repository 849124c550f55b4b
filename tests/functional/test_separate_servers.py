# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""PPO with separate critic and reward servers gives the numbers of one server for both."""

import pytest

from nemo_aligner.servers.ports import find_free_port
from tests.functional.jobs import (
    assert_ended_well,
    read_metrics,
    reward_server,
)
from tests.functional.test_ppo_job import (  # noqa: F401  (two fixtures)
    COMPARED,
    actor,
    critic,
    inputs,
    single,
)

# Several processes of ten seconds' start each; their own limits are shorter.
pytestmark = pytest.mark.timeout(600)

CRITIC_ALONE = "trainer.ppo.combine_rm_and_critic_server=False"


def separate(port: int, ip: str = "127.0.0.1") -> list[str]:
    """The actor's overrides for a reward server of its own at `port`."""
    return [
        "remote_critic_rm.combine_rm_and_critic_server=False",
        f"remote_critic_rm.reward_model.ip={ip}",
        f"remote_critic_rm.reward_model.port={port}",
    ]


@pytest.mark.full  # tests/functional/test_fleet.py has separate servers in `make test`
@pytest.mark.parametrize(
    "critic_split, reward_split, actor_split",
    [
        ((1, "python"), (1, "python"), (1, "python")),
        ((1, "torchrun"), (2, "python"), (2, "torchrun")),  # data-parallel reward server and actor
    ],
    ids=["one-rank-each", "reward-dp2-actor-dp2"],
)
def test_separate_servers_give_the_numbers_of_one(
    inputs,  # noqa: F811
    single,  # noqa: F811
    tmp_path,
    critic_split,
    reward_split,
    actor_split,
):
    ports = find_free_port(), find_free_port()
    with (
        critic(inputs, tmp_path, ports[0], *critic_split, CRITIC_ALONE) as critic_job,
        reward_server(inputs / "rm.nemo", tmp_path, ports[1], *reward_split) as reward_job,
        actor(inputs, tmp_path, ports[0], *actor_split, *separate(ports[1])) as job,
    ):
        assert_ended_well(job, job.wait(240))
        assert_ended_well(critic_job, critic_job.stop())
        assert_ended_well(reward_job, reward_job.stop())
    for key in COMPARED:
        expected, values = (
            read_metrics(single / "actor", key),
            read_metrics(tmp_path / "actor", key),
        )
        assert len(expected) >= 3 and values == pytest.approx(expected, rel=1e-4, abs=1e-5), key
