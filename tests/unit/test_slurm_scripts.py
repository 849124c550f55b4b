# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The SLURM scripts: the commands that they start are jobs that would start.

The scripts run as they stand, with programs in the place of SLURM's that write down what they are
called with.
"""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from nemo_aligner.config.checks import check_config
from nemo_aligner.config.defaults import CONF
from nemo_aligner.core.endings import RUN_AGAIN, ExitCode
from tests.functional.jobs import ROOT

SCRIPTS = ROOT / "scripts" / "slurm"
RECIPE = ROOT / "examples" / "recipes" / "ultrafeedback" / "run.sh"
NODES = {"0": ["node1", "node2"], "1": ["node3", "node4"]}
PROGRAMS = {
    "scontrol": (
        "import os, sys\n"
        "if sys.argv[1] == 'requeue':\n"
        "    open(os.environ['CALLS'] + '.requeued', 'a').write(sys.argv[2])\n"
        "else:\n"
        "    print(*sys.argv[-1].split(','), sep='\\n')\n"
    ),
    # The job that ends first ends the others, so each waits until all are there.
    "srun": (
        "import json, os, sys, time\n"
        "call = {'words': sys.argv[1:], 'address': os.environ['MASTER_ADDR'],"
        " 'token': os.environ['NEMO_ALIGNER_TOKEN']}\n"
        "with open(os.environ['CALLS'], 'a') as file:\n"
        "    file.write(json.dumps(call) + '\\n')\n"
        "while len(open(os.environ['CALLS']).readlines()) < int(os.environ['JOBS']):\n"
        "    time.sleep(0.01)\n"
        "if 'train_gpt_' in ' '.join(sys.argv):\n"
        "    sys.exit(int(os.environ.get('ACTOR_CODE', 0)))\n"
        "time.sleep(60 * ('ACTOR_CODE' in os.environ))\n"  # a server serves until SIGTERM
    ),
    # The script is run in the place of its submission.
    "sbatch": "import os, sys; os.execvp('bash', ['bash', sys.argv[-1]])",
}


@pytest.fixture
def submit(tmp_path, monkeypatch):
    """`submit(script, jobs, **variables)`: {script of a job: (its overrides, MASTER_ADDR)}."""
    monkeypatch.chdir(tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, code in PROGRAMS.items():
        file = programs / name
        file.write_text(f"#!{sys.executable}\n{code}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)

    def run(script, jobs, **variables):
        calls = tmp_path / "calls.jsonl"
        env = os.environ | variables
        env |= {"PATH": f"{programs}:{env['PATH']}", "CALLS": str(calls), "JOBS": str(jobs)}
        env |= {"SLURM_SUBMIT_DIR": str(tmp_path), "REPO": str(ROOT), "PYTHON": "python"}
        for group, nodes in NODES.items():
            env[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"] = ",".join(nodes)
            env[f"SLURM_JOB_NUM_NODES_HET_GROUP_{group}"] = str(len(nodes))
        subprocess.run(["bash", str(script)], env=env, cwd=tmp_path, check=True, timeout=60)
        started, tokens = {}, set()
        for line in calls.read_text().splitlines():
            call = json.loads(line)
            words = call["words"]
            assert call["token"] not in " ".join(words)
            tokens.add(call["token"])
            at = words.index("-u") + 1
            started[words[at].rpartition("/")[2]] = (words[at + 1 :], call["address"])
        # The configuration is checked as in the jobs.
        (token,) = tokens
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


GIVEN = {
    "RM_NEMO": "rm.nemo",
    "SFT_NEMO": "sft.nemo",
    "TRAIN_DATA": "train.jsonl",
    "VALID_DATA": "validation.jsonl",
    "ACTOR_ARGS": "model.seed=7 model.micro_batch_size=2",
}


def test_ppo(submit):
    jobs = submit(SCRIPTS / "ppo.sbatch", 2, **GIVEN, CRITIC_ARGS="model.seed=8")
    overrides, address = jobs["serve_ppo_critic.py"]
    critic = checked("gpt_ppo_critic", overrides)
    assert (address, critic.model.seed, critic.trainer.num_nodes) == ("node1", 8, 2)
    overrides, address = jobs["train_gpt_ppo_actor.py"]
    actor = checked("gpt_ppo_actor", overrides)
    assert (address, actor.model.seed, actor.model.micro_batch_size) == ("node3", 7, 2)
    assert actor.remote_critic_rm.critic.ip == "node1"
    assert actor.remote_critic_rm.critic.port == critic.trainer.ppo.port
    assert actor.model.global_batch_size == critic.model.global_batch_size
    assert actor.model.data.data_prefix.train == ["train.jsonl"]


def test_rejection_sampling(submit):
    jobs = submit(
        SCRIPTS / "rs.sbatch", 3, **GIVEN, SERVER_ARGS="model.forward_micro_batch_size=3"
    )
    server = checked("inference_rm", jobs["serve_reward_model.py"][0])
    overrides, address = jobs["train_gpt_rs_actor.py"]
    actor = checked("gpt_rs_actor", overrides)
    assert (address, actor.model.seed, server.model.forward_micro_batch_size) == ("node3", 7, 3)
    assert list(actor.remote_rm.reward_model.ip) == ["node1", "node2"]
    assert actor.remote_rm.reward_model.port == server.inference.port


@pytest.mark.parametrize("script, jobs", [("ppo.sbatch", 2), ("rs.sbatch", 3)])
def test_a_job_that_can_continue_is_queued_again(submit, tmp_path, script, jobs):
    """Ten minutes before its end, or when it is pre-empted, the actor saves; then the script asks
    for another turn, but not for ever.
    """
    lines = (SCRIPTS / script).read_text().splitlines()
    assert lines.count("#SBATCH --signal=USR1@600 --requeue") == 2  # of both sets of nodes
    requeued = tmp_path / "calls.jsonl.requeued"
    variables = {**GIVEN, "SLURM_JOB_ID": "7"}
    for code, restarts, again in [
        *((code, "1", True) for code in RUN_AGAIN),
        (137, "1", True),  # a rank was killed
        (ExitCode.FAILED, "1", False),
        (ExitCode.USER_ERROR, "1", False),
        (ExitCode.TIME, "10", False),
    ]:
        (tmp_path / "calls.jsonl").unlink(missing_ok=True)
        requeued.unlink(missing_ok=True)
        with pytest.raises(subprocess.CalledProcessError) as ended:
            submit(
                SCRIPTS / script,
                jobs,
                **variables,
                ACTOR_CODE=str(int(code)),
                SLURM_RESTART_COUNT=restarts,
            )
        assert ended.value.returncode == code
        assert (requeued.read_text() if requeued.exists() else None) == ("7" if again else None)


def test_a_variable_that_is_missing_is_named(submit, capfd):
    with pytest.raises(subprocess.CalledProcessError):
        submit(SCRIPTS / "ppo.sbatch", 2, SFT_NEMO="sft.nemo")
    assert "set RM_NEMO to the reward model" in capfd.readouterr().err


def test_the_recipe_has_the_same_settings_on_a_cluster(submit):
    """But for batches of passes without gradient, and the number of samples of a micro-batch."""
    jobs = submit(RECIPE, 2, MODEL="base", STAGES="ppo_slurm", OUT="out")
    actor = checked("gpt_ppo_actor", jobs["train_gpt_ppo_actor.py"][0])
    critic = checked("gpt_ppo_critic", jobs["serve_ppo_critic.py"][0])
    assert actor.model.global_batch_size == critic.model.global_batch_size == 64
    assert actor.model.encoder_seq_length == critic.model.encoder_seq_length == 2048
    assert (actor.trainer.ppo.max_steps, critic.trainer.ppo.max_steps) == (500, 2000)
    assert actor.model.ppo.num_rollout_samples == 256
    assert actor.pretrained_checkpoint.restore_from_path.startswith("out/sft/")
    assert critic.pretrained_checkpoint.restore_from_path.startswith("out/rm/")
    assert actor.model.save_hf is True
