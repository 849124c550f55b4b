# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The SLURM scripts: the commands that they start are jobs that would start.

The scripts run as they stand, with programs in the place of SLURM's that write down what they are
called with.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from nemo_aligner.__main__ import job_modules
from nemo_aligner.config.checks import check_config
from nemo_aligner.config.defaults import CONF
from nemo_aligner.core.endings import ExitCode
from tests.cases import some_of
from tests.functional.jobs import ROOT

pytestmark = pytest.mark.slow

SCRIPTS = ROOT / "scripts" / "slurm"
RECIPE = ROOT / "examples" / "recipes" / "ultrafeedback" / "run.sh"
NODES = (["node1", "node2"], ["node3", "node4"], ["node5"])  # of each set
PROGRAMS = {
    "scontrol": """
import os, sys
if sys.argv[1] == "requeue":
    open(os.environ["CALLS"] + ".requeued", "a").write(sys.argv[2])
else:
    print(*sys.argv[-1].split(","), sep="\\n")
""",
    # The job that ends first ends the others, so each waits until all are there; a server serves
    # until SIGTERM.
    "srun": """
import json, os, sys, time
call = {"words": sys.argv[1:], "address": os.environ["MASTER_ADDR"]}
call["token"] = os.environ["NEMO_ALIGNER_TOKEN"]
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps(call) + "\\n")
while len(open(os.environ["CALLS"]).readlines()) < int(os.environ["JOBS"]):
    time.sleep(0.01)
if "train" in sys.argv:
    sys.exit(int(os.environ.get("ACTOR_CODE", 0)))
time.sleep(60 * ("ACTOR_CODE" in os.environ))
""",
    # The script is run in the place of its submission.
    "sbatch": "import os, sys; os.execvp('bash', ['bash', *sys.argv[1:]])",
}


@pytest.fixture
def submit(tmp_path, monkeypatch):
    """`submit(words, jobs, **variables)`: {name of a job: (its overrides, MASTER_ADDR, ranks)}."""
    monkeypatch.chdir(tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, code in PROGRAMS.items():
        file = programs / name
        file.write_text(f"#!{sys.executable}\n{code}\n")
        file.chmod(0o700)

    def run(words, jobs, sets=2, **variables):
        calls = tmp_path / "calls.jsonl"
        env = os.environ | variables
        env |= {"PATH": f"{programs}:{env['PATH']}", "CALLS": str(calls), "JOBS": str(jobs)}
        env |= {"SLURM_SUBMIT_DIR": str(tmp_path), "REPO": str(ROOT), "PYTHON": "python"}
        names = [f"_HET_GROUP_{group}" for group in range(sets)] if sets > 1 else [""]
        for name, nodes in zip(names, NODES):
            env[f"SLURM_JOB_NODELIST{name}"] = ",".join(nodes)
        subprocess.run(["bash", *map(str, words)], env=env, cwd=tmp_path, check=True, timeout=60)
        started = {}
        calls = [json.loads(line) for line in calls.read_text().splitlines()]
        (token,) = {call["token"] for call in calls}
        for call in calls:
            words = call["words"]
            assert token not in " ".join(words)
            name = words[(at := words.index("nemo_aligner") + 1)]
            if name in ("serve", "train"):
                name += f" {words[(at := at + 1)]}"
            ranks = next(int(word.partition("=")[2]) for word in words if "--ntasks=" in word)
            started[name] = (words[at + 1 :], call["address"], ranks)
        # The configuration is checked as in the jobs.
        monkeypatch.setenv("NEMO_ALIGNER_TOKEN", token)
        assert len(token) == 64
        return started

    return run


def checked(config_name, overrides):
    """The configuration of a job that would start on nodes of 8 GPUs, with files where it looks
    for them.
    """
    for word in overrides:
        _, _, path = word.partition("=")
        if word.partition("=")[0].endswith(("restore_from_path", "rm_model_file")):
            Path(path).mkdir(parents=True, exist_ok=True)
    with initialize_config_dir(str(CONF), version_base=None):
        cfg = compose(config_name, overrides)
    check_config(cfg, config_name, visible_devices=8, env={})
    return cfg


DATA = "model.data.data_prefix={train: [train.jsonl], validation: [validation.jsonl]}"
POLICY = ["pretrained_checkpoint.restore_from_path=sft.nemo", DATA, "model.seed=7"]
REWARD = ["reward", "rm_model_file=rm.nemo", "model.forward_micro_batch_size=3"]
CRITIC = ["critic", "pretrained_checkpoint.restore_from_path=rm.nemo", "model.seed=8"]
PAIR, JOB = SCRIPTS / "pair.sbatch", SCRIPTS / "job.sbatch"


def test_ppo(submit):
    jobs = submit([PAIR, *CRITIC, "--", "ppo", *POLICY], 2)
    overrides, address, ranks = jobs["serve critic"]
    critic = checked("gpt_ppo_critic", overrides)
    assert (address, critic.model.seed, critic.trainer.num_nodes, ranks) == ("node1", 8, 2, 16)
    overrides, address, ranks = jobs["train ppo"]
    actor = checked("gpt_ppo_actor", overrides)
    assert (address, actor.model.seed, ranks) == ("node3", 7, 16)
    assert actor.remote_critic_rm.critic.ip == "node1"
    assert actor.remote_critic_rm.critic.port == critic.trainer.ppo.port
    assert actor.model.global_batch_size == critic.model.global_batch_size
    assert actor.model.data.data_prefix.train == ["train.jsonl"]


def test_ppo_with_rewards_from_their_own_servers(submit):
    jobs = submit([PAIR, *CRITIC, "--", *REWARD, "--", "ppo", *POLICY], 4, sets=3)
    overrides, address, _ = jobs["train ppo"]
    remote = checked("gpt_ppo_actor", overrides).remote_critic_rm
    critic = checked("gpt_ppo_critic", jobs["serve critic"][0])
    assert not remote.combine_rm_and_critic_server
    assert not critic.trainer.ppo.combine_rm_and_critic_server
    server = checked("inference_rm", jobs["serve reward"][0])
    assert (address, remote.critic.ip) == ("node5", "node1")
    assert list(remote.reward_model.ip) == ["node3", "node4"]
    assert remote.reward_model.port == server.inference.port != remote.critic.port


@some_of(
    "job, config_name, section",
    [
        ("rs", "gpt_rs_actor", "remote_rm.reward_model"),
        ("reinforce", "gpt_reinforce_actor", "remote_rm.reward_model"),
        ("distill", "gpt_knowledge_distillation", "remote_teacher"),
    ],
)
def test_a_fleet_of_servers(submit, job, config_name, section):
    teacher = ["teacher", "pretrained_checkpoint.restore_from_path=teacher.nemo"]
    settings = ["on_policy.fraction=1", "outside_top_k=bucket", "sft_loss_weight=0"]
    fraction = [f"model.knowledge_distillation.{setting}" for setting in settings]
    words = [*(teacher if job == "distill" else REWARD), "--", job, *POLICY]
    jobs = submit([PAIR, *words, *(fraction if job == "distill" else [])], 3)
    name = "inference_teacher" if job == "distill" else "inference_rm"
    overrides, address, ranks = jobs[f"serve {words[0]}"]
    server = checked(name, overrides)
    assert (address in NODES[0], ranks, server.trainer.num_nodes) == (True, 8, 1)
    overrides, address, _ = jobs[f"train {job}"]
    remote = OmegaConf.select(checked(config_name, overrides), section)
    assert address == "node3" and remote.port == server.inference.port
    assert list(remote.get("ip") or remote.host) == NODES[0]


def test_a_function_is_served_by_one_process(submit):
    jobs = submit([PAIR, *REWARD, "inference.reward_fn=r.py:f", "--", "rs", *POLICY], 3)
    assert jobs["serve reward"][2] == 1 and jobs["train rs"][2] == 16


@some_of("name", sorted(name for name in job_modules() if "serve" not in name), keep=4)
def test_a_job_alone(submit, name):
    """Every job that needs no server starts from the one template."""
    jobs = submit([JOB, name.split()[-1], "model.seed=7"], 1, sets=1)
    overrides, address, ranks = jobs[name]
    assert (address, ranks) == ("node1", 16)
    assert overrides[:2] == ["trainer.num_nodes=2", "trainer.devices=8"]
    assert overrides[-1] == "model.seed=7"
    folders = [word for word in overrides if word.startswith("exp_manager.explicit_log_dir=")]
    assert len(folders) == (name != "logits")


@some_of(
    "words, jobs, ends",
    [([PAIR, *CRITIC, "--", "ppo", *POLICY], 2, 2), ([JOB, "dpo", *POLICY], 1, 1)],
    ids=["pair", "job"],
)
def test_a_job_that_can_continue_is_queued_again(submit, tmp_path, words, jobs, ends):
    """Ten minutes before its end, or when it is pre-empted, the actor saves; then the script asks
    for another turn, but not for ever.
    """
    lines = words[0].read_text().splitlines()
    assert lines.count("#SBATCH --signal=USR1@600 --requeue") == ends  # of each set of nodes
    requeued = tmp_path / "calls.jsonl.requeued"
    for code, restarts, again in [
        (ExitCode.TIME, "1", True),
        (ExitCode.PRE_EMPTED, "1", True),
        (ExitCode.LOST_PEER, "1", True),
        (137, "1", True),  # a rank was killed
        (ExitCode.FAILED, "1", False),
        (ExitCode.USER_ERROR, "1", False),
        (ExitCode.TIME, "10", False),
    ]:
        (tmp_path / "calls.jsonl").unlink(missing_ok=True)
        requeued.unlink(missing_ok=True)
        given = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": restarts}
        with pytest.raises(subprocess.CalledProcessError) as ended:
            submit(words, jobs, sets=jobs, **given, ACTOR_CODE=str(int(code)))
        assert ended.value.returncode == code
        assert (requeued.read_text() if requeued.exists() else None) == ("7" if again else None)


@pytest.mark.parametrize(
    "words, sets, said",
    [
        ([JOB], 1, "error: name a job"),
        ([PAIR, *CRITIC, "--"], 2, "error: name a job"),
        ([JOB, *CRITIC, "--", "ppo"], 1, "there is no set of nodes for ppo"),
        ([PAIR, "critics", "--", "ppo"], 2, "error: critics is no server; use critic, reward or"),
    ],
)
def test_what_is_missing_is_named(submit, capfd, words, sets, said):
    with pytest.raises(subprocess.CalledProcessError):
        submit(words, 1, sets=sets, ACTOR_CODE="0")
    assert said in capfd.readouterr().err


def test_the_recipe_has_the_same_settings_on_a_cluster(submit):
    """But for batches of passes without gradient, and the number of samples of a micro-batch."""
    jobs = submit([RECIPE], 2, MODEL="base", STAGES="ppo_slurm", OUT="out")
    actor = checked("gpt_ppo_actor", jobs["train ppo"][0])
    critic = checked("gpt_ppo_critic", jobs["serve critic"][0])
    assert actor.model.global_batch_size == critic.model.global_batch_size == 64
    assert actor.model.encoder_seq_length == critic.model.encoder_seq_length == 2048
    assert (actor.trainer.ppo.max_steps, critic.trainer.ppo.max_steps) == (500, 2000)
    assert actor.model.ppo.num_rollout_samples == 256
    assert actor.pretrained_checkpoint.restore_from_path.startswith("out/sft/")
    assert critic.pretrained_checkpoint.restore_from_path.startswith("out/rm/")
    assert actor.model.save_hf is True
