# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""How long a PPO actor and its critic, started at the same moment, take until the first step is
done, and where the time goes.

    python benchmarks/startup.py

The models are tiny (2 layers, width 32): what is measured is start-up. A part ends when its line
appears in the log of its job, and the last one with the first record of a step in the metrics.
OMP_NUM_THREADS is not set for the jobs: they choose the number of their threads themselves.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import countdown
import measure

from nemo_aligner.launch.start_up import VERBOSE
from nemo_aligner.servers.ports import find_free_port

SCRIPTS = Path(__file__).resolve().parents[1] / "examples/nlp/gpt"
LENGTH, PROMPTS = 48, 16
MODEL = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "encoder_seq_length": LENGTH,
    "max_position_embeddings": LENGTH,
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "position_embedding_type": "rope",
    "bias": False,
    "share_embeddings_and_output_weights": False,
    "precision": 32,
}
COMMON = {
    "trainer.accelerator": "cpu",
    "trainer.precision": 32,
    "model.encoder_seq_length": LENGTH,
    "model.micro_batch_size": 2,
    "model.global_batch_size": 4,
}
CRITIC = {
    **COMMON,
    "trainer.ppo.host": "127.0.0.1",
    "trainer.ppo.max_steps": 100,
    "pretrained_checkpoint.restore_from_path": "rm.nemo",
    "exp_manager.explicit_log_dir": "critic",
}
ACTOR = {
    **COMMON,
    "trainer.ppo.max_steps": 1,
    "trainer.ppo.val_check_interval": 0,
    "trainer.ppo.save_interval": 0,
    "trainer.ppo.initial_policy_kl_penalty": 0.05,
    "remote_critic_rm.critic.ip": "127.0.0.1",
    "pretrained_checkpoint.restore_from_path": "policy.nemo",
    "exp_manager.explicit_log_dir": "actor",
    "exp_manager.create_checkpoint_callback": False,
    "model.ppo.num_rollout_samples": 8,
    "model.ppo.rollout_micro_batch_size": 4,
    "model.ppo.num_val_samples": 4,
    "model.ppo.val_rollout_micro_batch_size": 2,
    "model.ppo.length_params.max_length": 12,
    "model.data.data_prefix": "{train: [p.jsonl], validation: [p.jsonl], test: [p.jsonl]}",
}
# The parts of a start: the job, the part, and what its log or its metrics hold when it is over.
PARTS = (
    ("critic", "imports", "critic.log", "*** configuration ***"),
    ("critic", "model and optimizer", "critic.log", "critic server: starting"),
    ("critic", "Triton", "critic.log", "critic server: serving"),
    ("actor", "imports", "actor.log", "*** configuration ***"),
    ("actor", "model and optimizer", "actor.log", "learning rate decay style"),
    ("actor", "wait for the critic", "actor.log", "connected: critic_save"),
    ("actor", "first step", "actor/metrics.jsonl", "train_rollouts/rewards"),
)


def write_inputs(folder: Path) -> None:
    """A policy, a reward model and prompts."""
    from omegaconf import OmegaConf

    from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
    from nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model import MegatronGPTRewardModel

    countdown.write_tokenizer(folder / "tokenizer", 257)
    names = {"library": "huggingface", "type": str(folder / "tokenizer")}
    config = OmegaConf.create({**MODEL, "micro_batch_size": 2, "tokenizer": names})
    MegatronGPTModel(config).save_to(str(folder / "policy.nemo"))
    config.output_sequence = False
    MegatronGPTRewardModel(config).save_to(str(folder / "rm.nemo"))
    lines = [json.dumps({"text": f"w1 w{i + 2}"}) + "\n" for i in range(PROMPTS)]
    (folder / "p.jsonl").write_text("".join(lines))


def start(script: str, log: Path, overrides: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    """Start a job in the folder of its log."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    command = [sys.executable, str(SCRIPTS / script), *(f"{k}={v}" for k, v in overrides.items())]
    with log.open("wb") as out:
        return subprocess.Popen(
            command,
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**environment, VERBOSE: "1", "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"},
        )


def start_both(inputs: Path, limit_s: float) -> dict[tuple[str, str], dict[str, float]]:
    """Start both jobs once, and stop them after the first step.

    Returns:
        For each part of `PARTS`, the seconds from the start of the jobs to its end ("end_s"), and
        the CPU seconds of its job until then ("cpu_s"); for ("", "") the share of the machine's
        cores that everybody else kept busy meanwhile ("others").
    """
    with tempfile.TemporaryDirectory() as name:
        folder, port, jobs = Path(name), find_free_port(), {}
        for file in inputs.iterdir():
            (folder / file.name).symlink_to(file)
        began, busy = time.monotonic(), measure.busy_seconds()
        critic = {**CRITIC, "trainer.ppo.port": port}
        actor = {**ACTOR, "remote_critic_rm.critic.port": port}
        try:
            jobs["critic"] = start("serve_ppo_critic.py", folder / "critic.log", critic)
            jobs["actor"] = start("train_gpt_ppo_actor.py", folder / "actor.log", actor)
            ends: dict[tuple[str, str], dict[str, float]] = {}
            while len(ends) < len(PARTS):
                time.sleep(0.05)
                now = time.monotonic() - began
                for job, part, file, text in PARTS:
                    path = folder / file
                    if (job, part) in ends or not path.exists():
                        continue
                    if text in path.read_text(errors="replace"):
                        cpu = measure.tree_cpu_seconds(jobs[job].pid)
                        ends[job, part] = {"end_s": now, "cpu_s": cpu}
                missing = [part for part in PARTS if part[:2] not in ends]
                ended = [name for name, job in jobs.items() if job.poll() is not None]
                if missing and (ended or now > limit_s):
                    log = (folder / missing[0][2]).with_suffix(".log").read_text()[-3000:]
                    raise RuntimeError(f"{now:.0f} s, {ended} ended, without {missing}:\n{log}")
            capacity = (time.monotonic() - began) * (os.cpu_count() or 1)
            own = sum(measure.tree_cpu_seconds(job.pid) for job in jobs.values())
            others = max(measure.busy_seconds() - busy - own, 0.0) / capacity
            ends["", ""] = {"others": others}
            return ends
        finally:
            for job in jobs.values():
                job.terminate()
            for job in jobs.values():
                job.wait(30)


def main() -> None:
    parser = measure.arguments(__doc__, repeats=3)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds until one run fails")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_inputs(Path(name))
        runs = [start_both(Path(name), args.limit) for _ in range(args.repeats)]
    rows = []
    before: dict[str, tuple[float, float]] = {}
    for job, part, _file, _text in PARTS:
        end, cpu = (
            statistics.median(r[job, part][key] for r in runs) for key in ("end_s", "cpu_s")
        )
        started, used = before.get(job, (0.0, 0.0))
        before[job] = end, cpu
        row = {"clock s": end - started, "CPU s": cpu - used, "over after, s": end}
        rows.append({"job": job, "part": part, **{k: round(v, 1) for k, v in row.items()}})
    busy = statistics.median(run["", ""]["others"] for run in runs)
    rows.append({"job": "others", "part": f"{busy:.0%} of the cores"})
    title = "Start of an actor and its critic, until the first step is done"
    measure.report("startup", title, rows, args.json)


if __name__ == "__main__":
    main()
