# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`mpirun -n N python script.py`, as NeMo-Aligner documents it (parallel/environment.py)."""

import pytest

from nemo_aligner.config.parallel_rules import count_ranks
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.parallel.environment import adopt_mpi_ranks, has_mpi_ranks


def mpi(rank, ranks, local_rank, here, **more):
    sizes = {"RANK": rank, "SIZE": ranks, "LOCAL_RANK": local_rank, "LOCAL_SIZE": here}
    return {f"OMPI_COMM_WORLD_{name}": str(x) for name, x in sizes.items()} | more


def test_processes_of_one_node_get_their_ranks_and_one_port():
    jobs = []
    for job in ("prterun-7@1", "prterun-8@1"):
        envs = [mpi(rank, 8, rank, 8, PMIX_NAMESPACE=job) for rank in range(8)]
        for env in envs:
            adopt_mpi_ranks(env)
        assert [env["RANK"] for env in envs] == [str(rank) for rank in range(8)]
        assert [env["LOCAL_RANK"] for env in envs] == [str(rank) for rank in range(8)]
        assert {env["NODE_RANK"] for env in envs} == {"0"}
        assert {count_ranks(8, 1, env=env) for env in envs} == {8}
        (address,) = {(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in envs}
        assert address[0] == "127.0.0.1" and 20000 <= int(address[1]) < 30000
        jobs.append(address)
    assert jobs[0] != jobs[1]


def test_processes_of_several_nodes_need_an_address():
    with pytest.raises(ConfigError, match="16 processes, 8 of them on this node.*-x MASTER_ADDR"):
        adopt_mpi_ranks(mpi(11, 16, 3, 8))
    env = mpi(11, 16, 3, 8, MASTER_ADDR="node0", MASTER_PORT="29500")
    adopt_mpi_ranks(env)
    assert (env["RANK"], env["LOCAL_RANK"], env["NODE_RANK"]) == ("11", "3", "1")
    assert env["MASTER_ADDR"] == "node0" and has_mpi_ranks(env)


@pytest.mark.parametrize("env", [{}, {"RANK": "1", "WORLD_SIZE": "2"}, {"SLURM_PROCID": "3"}])
def test_other_launchers_are_left_alone(env):
    before = dict(env)
    adopt_mpi_ranks(env)
    assert env == before and not has_mpi_ranks(env)
    env |= mpi(5, 8, 5, 8) | {"RANK": "1"}  # torchrun below mpirun
    adopt_mpi_ranks(env)
    assert env["RANK"] == "1" and not has_mpi_ranks(env)
    env |= {"RANK": "5", "TORCHELASTIC_RUN_ID": "none"}  # the same rank by chance
    assert not has_mpi_ranks(env)
