# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The JobSet for Kubernetes: the commands in it are jobs that would start, and they find each
other.
"""

import yaml
from hydra import compose, initialize_config_dir

from nemo_aligner.config.checks import check_config
from nemo_aligner.config.defaults import CONF
from tests.functional.jobs import ROOT

CONFIG_NAMES = {"serve critic": "gpt_ppo_critic", "train ppo": "gpt_ppo_actor"}


def roles(jobset):
    """Of each: its name, the specification of its job, and its container."""
    for role in jobset["spec"]["replicatedJobs"]:
        job = role["template"]["spec"]
        (container,) = job["template"]["spec"]["containers"]
        yield role["name"], job, container


def test_its_commands_are_jobs(monkeypatch, tmp_path):
    text = (ROOT / "scripts" / "kubernetes" / "ppo.yaml").read_text()
    jobset = yaml.safe_load(text.replace("/data", str(tmp_path)))
    for name in ("sft.nemo", "rm.nemo"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("NEMO_ALIGNER_TOKEN", 64 * "0")
    found = {}
    for role, job, container in roles(jobset):
        assert job["parallelism"] == job["completions"]
        words = container["command"][container["command"].index("nemo_aligner") + 1 :]
        config_name = CONFIG_NAMES[" ".join(words)]
        with initialize_config_dir(str(CONF), version_base=None):
            cfg = compose(config_name, overrides=[f"++{word}" for word in container["args"]])
        check_config(cfg, config_name, visible_devices=8, env={})
        found[role] = cfg
        nodes = [word for word in container["command"] if word.startswith("--nnodes=")]
        assert cfg.trainer.num_nodes == job["parallelism"]
        assert nodes == [f"--nnodes={job['parallelism']}"] * (job["parallelism"] > 1)
        gpus = container["resources"]["limits"]["nvidia.com/gpu"]
        assert cfg.trainer.devices == gpus
    critic, actor = found["critic"], found["actor"]
    name, domain = jobset["metadata"]["name"], jobset["spec"]["network"]["subdomain"]
    assert actor.remote_critic_rm.critic.ip == f"{name}-critic-0-0.{domain}"
    assert actor.remote_critic_rm.critic.port == critic.trainer.ppo.port
    for role, _job, container in roles(jobset):
        (port,) = (port["containerPort"] for port in container["ports"])
        if role == "critic":
            assert port == critic.trainer.ppo.port
            assert f"127.0.0.1:{port}/v2/health/ready" in str(container["readinessProbe"])
        else:
            command = container["command"]
            assert f"--master-addr={name}-actor-0-0.{domain}" in command
            assert f"--master-port={port}" in command
