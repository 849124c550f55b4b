# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Knowledge distillation on the quickstart's reviews: `python run_distill.py` (or `make distill`),
a few minutes on two cores.

    data and tokenizer -> SFT of a tiny GPT -> its DPO: the teacher, beside SFT of a smaller one:
    the student -> reviews by the teacher, with its logits -> distillation -> responses -> verdict

The student has half the teacher's width and depth, and sees no pair and no score, only what the
teacher finds probable. With `--on-policy` it learns that of its own responses, from the served
teacher. Then student and teacher respond to held-out prompts. Every phase after the first is one
of the project's own commands in its own process; see `RUN_DIR/<job>.log`.
"""

import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import reviews
import walkthrough
from commands import from_scratch, nemo_file, on_cpu, optimizer, schedule, script_job, training
from jobs import Job
from narrator import Phase
from outcome import read_jsonl
from preferences import respond, responses_job, training_job, write_samples
from reviews import BATCH_SIZE, GOLD, MAX_RESPONSE, SEQ_LENGTH
from run_dpo import DPO
from walkthrough import Ending, Option, Walk

from nemo_aligner.servers.ports import find_free_port

SMALL = {**reviews.ARCHITECTURE, "num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 128}
REVIEWS = 1000  # by the teacher
TOP_K = 20
SHARE = 0.8  # of the way to the teacher's gold score that the student must go
STEPS = (
    Option("--steps", 120, "updates of the distillation, each on 64 reviews"),
    Option("--dpo-steps", 60, "updates of the teacher's DPO, each on 32 pairs"),
    reviews.STEPS[0],
)
ON_POLICY = Option("--on-policy", False, "learn from own responses; the teacher is served")


def main(argv: list[str] | None = None) -> int:
    args = walkthrough.parse_args(argv, __doc__, "distill", (*STEPS, ON_POLICY))
    args.rm_steps = 1  # of a phase that this walk-through does not have
    phases = {name: phase for name, phase in reviews.phases(args).items() if name != "rm"}
    pairs = {"train/loss": "loss", "train/acc": "accuracy", "train/margin": "margin"}
    kl = {"train/loss": "loss", "train/kd_loss": "KL"}
    phases |= {
        "dpo": Phase(
            "DPO makes the teacher kind; SFT of the student",
            args.dpo_steps,
            25,
            "train/loss",
            pairs,
        ),
        "written": Phase("Reviews by the teacher", 1, 9),
        "logits": Phase("Logits of the teacher", 1, 7),
        "distilled": Phase("Knowledge distillation", args.steps, 10, "train/loss", kl),
        "responses": Phase("Responses before and after, and of the teacher", 1, 15),
    }
    if args.on_policy:
        del phases["logits"]  # the server gives them
    return walkthrough.run(args, phases, story, lambda: ending(args.run_dir))


def student_steps(args) -> int:
    """The student needs half the steps to know the language as well as it can."""
    return max(args.sft_steps // 2, 1)


def story(walk: Walk) -> None:
    """Run all phases; raises `JobFailed` when one of the commands fails."""
    run_dir, args = walk.run_dir, walk.args
    reviews.up_to_the_policy(walk)
    student = student_job(run_dir, args.seed, student_steps(args))
    teacher = training_job(DPO, run_dir, args.seed, args.dpo_steps)
    walk.follow("dpo", teacher, beside=(student,))
    prompts = run_dir / "data" / "prompts_distill.jsonl"
    lines = (run_dir / "data" / "prompts_train.jsonl").read_text(encoding="utf-8").splitlines(True)
    prompts.write_text("".join(lines[:REVIEWS]), encoding="utf-8")
    walk.follow("written", responses_job(run_dir, "written", "dpo", args.seed, prompts))
    if args.on_policy:
        port = find_free_port()
        walk.follow(
            "distilled",
            distillation_job(run_dir, args.seed, args.steps, on_policy(run_dir, port)),
            servers=(teacher_job(run_dir, port),),
            detail=f"starting the teacher's server on port {port} and the student",
        )
    else:
        walk.follow("logits", logits_job(run_dir))
        data = {"model.data.data_prefix": [str(run_dir / "logits" / "reviews.jsonl")]}
        walk.follow("distilled", distillation_job(run_dir, args.seed, args.steps, data))
    respond(walk, {"before": "student", "after": "distilled", "teacher": "dpo"})
    walk.findings["teacher_gold"] = ("Gold score of the teacher", mean_gold(run_dir / "teacher"))
    write_samples(run_dir / "distilled", args.steps)


def ending(run_dir: Path) -> Ending:
    """The student's gold score must go most of the way to the teacher's."""
    way = mean_gold(run_dir / "teacher") - mean_gold(run_dir / "before")
    score = replace(GOLD, min_rise=max(GOLD.min_rise, SHARE * way))
    return Ending("distilled", "distillation", (score,))


def mean_gold(folder: Path) -> float:
    """Gold score of the responses in a folder."""
    return fmean(map(GOLD.of, read_jsonl(folder / "responses.jsonl")))


def student_job(run_dir: Path, seed: int, steps: int) -> Job:
    """A smaller GPT learns the language, kind and unkind reviews alike, from random weights."""
    overrides = {
        **training(run_dir / "student", seed, SEQ_LENGTH),
        **from_scratch(run_dir / "data", SMALL, BATCH_SIZE, steps),
        **optimizer(lr=3e-3, warmup=20),
    }
    return script_job("Student", "train_gpt_sft.py", run_dir / "student", overrides)


def logits_job(run_dir: Path) -> Job:
    """The teacher's largest logits at each token of its own reviews."""
    folder = run_dir / "logits"
    folder.mkdir()
    overrides = {
        **on_cpu(),
        "pretrained_checkpoint.restore_from_path": nemo_file(run_dir, "dpo"),
        "data.data.file_path": run_dir / "written" / "responses.jsonl",
        "data.data.columns": {"input": "prompt", "output": "response"},
        "data.data.prompt_template": "{input}{output}",  # a response begins with its space
        "top_k": TOP_K,
        "output_path": folder / "reviews.jsonl",
        "model.global_batch_size": BATCH_SIZE,
        "model.micro_batch_size": BATCH_SIZE,
    }
    script = "../synthetic_data_gen/compute_topk_logits.py"
    return script_job("Logits", script, folder, overrides)


def teacher_job(run_dir: Path, port: int, teacher: str = "dpo", top_k: int = TOP_K) -> Job:
    """The server of the policy that the job `teacher` has trained."""
    overrides = {
        **on_cpu(),
        "pretrained_checkpoint.restore_from_path": nemo_file(run_dir, teacher),
        "inference.host": "127.0.0.1",
        "inference.port": port,
        "inference.top_k": top_k,
        "model.micro_batch_size": BATCH_SIZE,
    }
    return script_job("Teacher server", "serve_teacher.py", run_dir / "teacher_server", overrides)


def on_policy(run_dir: Path, port: int) -> dict:
    """The student's settings for its own responses, to the prompts of the teacher's reviews."""
    own = "model.knowledge_distillation.on_policy"
    return {
        f"{own}.fraction": 1.0,
        f"{own}.length_params.max_length": MAX_RESPONSE,
        "remote_teacher.port": port,
        "remote_teacher.init_timeout_s": 120,
        "model.data.data_prefix": [str(run_dir / "written" / "responses.jsonl")],
    }


def distillation_job(run_dir: Path, seed: int, steps: int, data: dict) -> Job:
    """The student learns what the teacher finds probable of `data`."""
    folder = run_dir / "distilled"
    overrides = {
        **training(folder, seed, SEQ_LENGTH),
        **optimizer(lr=3e-3),
        "pretrained_checkpoint.restore_from_path": nemo_file(run_dir, "student"),
        "model.knowledge_distillation.outside_top_k": "bucket",
        "model.global_batch_size": BATCH_SIZE,
        "model.micro_batch_size": BATCH_SIZE,
        **data,
        "model.data.splits_string": "95,5,0",
        "model.data.validation_drop_last": False,
        **schedule("trainer.knowledge_distillation", steps, steps),
    }
    script = "train_gpt_knowledge_distillation.py"
    return script_job("Distillation", script, folder, overrides)


if __name__ == "__main__":
    sys.exit(main())
