# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""PPO with a teacher in place of rewards: `python run_teacher.py` (or `make teacher`), a few
minutes on two cores.

    two-digit sums -> SFT of a tiny GPT: the teacher, beside short SFT of a narrower one: the
    student -> responses by the teacher -> PPO of the student with the served teacher, beside SFT
    on the teacher's responses -> verdict

The student responds to sums itself, and how probable the teacher finds each of its tokens is the
advantage of that token; no reward says what is right. SFT learns from as many responses, all of
them the teacher's and none seen twice. The measure is that of `run_arithmetic.py`. Every phase
after the first is one of the project's own commands in its own process; see `RUN_DIR/<job>.log`.
"""

import math
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import arithmetic_data
import walkthrough
from commands import nemo_file, optimizer, schedule, script_job, training
from jobs import Job
from narrator import Phase
from outcome import read_jsonl
from preferences import responses_job
from run_arithmetic import (
    ARCHITECTURE,
    BATCH_SIZE,
    MAX_RESPONSE,
    SEQ_LENGTH,
    actor_job,
    exact_responses,
    sft_job,
)
from run_distill import teacher_job
from walkthrough import Ending, Option, Walk

from nemo_aligner.servers.ports import find_free_port

NARROW = {**ARCHITECTURE, "hidden_size": 64, "ffn_hidden_size": 256}
# Many small updates on a rollout, each of which goes less far where it went wrong.
LEARNING_RATE, PPO_EPOCHS = 5e-4, 4
SFT_LEARNING_RATE = 2e-3  # beside it, one update on each batch
SHARE = 0.9  # of the way to the teacher's share of exact responses that the student must go
CLEAR = 0.1  # rise of a share of 512 responses, three standard errors
STEPS = (
    Option("--steps", 160, f"updates of PPO and of SFT beside it, each on {BATCH_SIZE} responses"),
    Option("--sft-steps", 240, "of the student before that; it must be right now and then"),
    Option("--teacher-steps", 240, "of SFT of the teacher; the fewer, the more it errs"),
)


def main(argv: list[str] | None = None) -> int:
    args = walkthrough.parse_args(argv, __doc__, "teacher", STEPS)
    loss = {"train/loss": "loss"}
    shown = {"train_rollouts/rewards": "exact", "train_rollouts/teacher_kl": "KL"}
    title, step = "PPO with the teacher's log-probs; SFT", "train_rollouts/rewards"
    phases = {
        "data": Phase("Sums and tokenizer", 1, 1),
        "sft": Phase("SFT of teacher and student", args.teacher_steps, 90, "train/loss", loss),
        "written": Phase("Responses by the teacher", 1, 40),
        "ppo": Phase(title, args.steps, 150, step, shown),
        "responses": Phase("Responses after SFT, and by the teacher", 1, 12),
    }
    return walkthrough.run(args, phases, story, lambda: ending(args.run_dir))


def story(walk: Walk) -> None:
    """Run all phases; raises `JobFailed` when one of the commands fails."""
    run_dir, args = walk.run_dir, walk.args
    data, prompts = run_dir / "data", run_dir / "data" / "prompts_teacher.jsonl"

    def write_data() -> str:
        arithmetic_data.make_data(data, args.seed)
        lines = (data / "prompts_train.jsonl").read_text().splitlines(True)
        wanted = args.steps * BATCH_SIZE
        lines *= math.ceil(wanted / len(lines))
        prompts.write_text("".join(lines[:wanted]))
        return f"{wanted} prompts for the teacher"

    walk.do("data", write_data)
    teacher = sft_job(run_dir, args.seed, args.teacher_steps, "teacher")
    student = sft_job(run_dir, args.seed, args.sft_steps, "student", NARROW)
    walk.follow("sft", teacher, beside=(student,))
    walk.follow("written", responses(walk, "written", "teacher", prompts))
    port = find_free_port()
    server = teacher_job(run_dir, port, "teacher", top_k=1)  # it gives log-probs of all tokens
    walk.follow(
        "ppo",
        actor_job(run_dir, args.seed, args.steps, advantages(run_dir, port)),
        servers=(server,),
        beside=(imitation_job(run_dir, args.seed, args.steps),),
        detail=f"starting the teacher's server on port {port}, the policy and SFT",
    )
    others = {"imitated": "imitation", "taught_by": "teacher"}
    first, second = (responses(walk, name, policy) for name, policy in others.items())
    walk.follow("responses", first, beside=(second,))
    titles = ("after SFT on the teacher's responses", "of the teacher")
    for name, title in zip(others, titles):
        walk.findings[f"{name}_exact"] = f"Share of exact responses {title}", exact(run_dir, name)


def responses(walk: Walk, name: str, policy: str, prompts: Path | None = None) -> Job:
    """The job in which a policy responds to the held-out sums, or to those in `prompts`."""
    settings = {"length_params.max_length": MAX_RESPONSE, "micro_batch_size": 512}
    return responses_job(walk.run_dir, name, policy, walk.args.seed, prompts, settings)


def exact(run_dir: Path, name: str) -> float:
    """Share of exact responses in a folder of `responses`."""
    score = exact_responses(run_dir / "data").of
    return fmean(map(score, read_jsonl(run_dir / name / "responses.jsonl")))


def ending(run_dir: Path) -> Ending:
    """The student's share of exact responses must go most of the way to the teacher's."""
    score = exact_responses(run_dir / "data")
    samples = read_jsonl(run_dir / "ppo_actor" / "val_samples.jsonl")
    before = fmean(score.of(sample) for sample in samples if sample["step"] == 0)
    way = exact(run_dir, "taught_by") - before
    needed = max(CLEAR, SHARE * way)
    return Ending("ppo_actor", "PPO", (replace(score, min_rise=needed),))


def advantages(run_dir: Path, port: int) -> dict:
    """The actor's settings: the teacher alone says what is learned; the reward function only
    measures.
    """
    return {
        **optimizer(lr=LEARNING_RATE),
        "pretrained_checkpoint.restore_from_path": nemo_file(run_dir, "student"),
        "remote_teacher.port": port,
        "remote_teacher.init_timeout_s": 120,
        "trainer.ppo.advantage_estimator": "teacher",
        "trainer.ppo.teacher_kl_coef": 1.0,
        "trainer.ppo.advantage_clip": 0.3,  # a few digits that the teacher excludes say no more
        "trainer.ppo.initial_policy_kl_penalty": 0.0,
        "trainer.ppo.ppo_epochs": PPO_EPOCHS,
        "model.ppo.train_on_truncated": True,  # a missing end is what the teacher corrects
        "model.ppo.num_rollout_samples": BATCH_SIZE,
    }


def imitation_job(run_dir: Path, seed: int, steps: int) -> Job:
    """Supervised training of the student on the teacher's responses."""
    written, section = run_dir / "written" / "responses.jsonl", "model.data.train_ds"
    overrides = {
        **training(run_dir / "imitation", seed, SEQ_LENGTH),
        **optimizer(lr=SFT_LEARNING_RATE),
        "model.restore_from_path": nemo_file(run_dir, "student"),
        f"{section}.file_path": written,
        f"{section}.columns": {"input": "prompt", "output": "response"},
        f"{section}.prompt_template": "{input}{output}",
        f"{section}.global_batch_size": BATCH_SIZE,
        f"{section}.micro_batch_size": BATCH_SIZE,
        "model.data.validation_ds.file_path": run_dir / "data" / "sft_validation.jsonl",
        "model.data.validation_ds.columns": {"input": "input", "output": "output"},
        **schedule("trainer.sft", steps, steps),
    }
    return script_job("SFT beside it", "train_gpt_sft.py", run_dir / "imitation", overrides)


if __name__ == "__main__":
    sys.exit(main())
