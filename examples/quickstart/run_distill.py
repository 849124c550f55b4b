# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Knowledge distillation on the quickstart's reviews: `python run_distill.py` (or `make distill`),
a few minutes on two cores.

    data and tokenizer -> SFT of a tiny GPT -> its DPO: the teacher, beside SFT of a smaller one:
    the student -> reviews by the teacher, with its logits -> distillation -> responses -> verdict

The student has half the teacher's width and depth, and sees no pair and no score, only what the
teacher finds probable. With `--on-policy` it learns that of its own responses, from the served
teacher; with `--ppo` only how probable the teacher finds each of its own tokens, as advantages of
PPO, beside as many updates of SFT on the teacher's reviews. Then student and teacher respond to
held-out prompts. Every phase after the first is one of the project's own commands in its own
process; see `RUN_DIR/<job>.log`.

Exit code: 0 if the student's gold score rose clearly (`outcome.py` says what is clear) to nearly
the teacher's, 1 if not, 2 if a job failed or the arguments make no sense, 128 + signal number if
it was stopped.
"""

import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import gold
import make_data
import reviews
import walkthrough
from commands import (
    data_prefix,
    from_scratch,
    nemo_file,
    on_cpu,
    optimizer,
    policy_training,
    schedule,
    script_job,
    training,
)
from jobs import Job
from narrator import Phase
from outcome import read_jsonl
from preferences import respond, responses_job, write_samples
from reviews import BATCH_SIZE, GOLD, MAX_RESPONSE, SEQ_LENGTH
from run_dpo import dpo_job
from walkthrough import Ending, Steps, Switch, Walk

from nemo_aligner.servers.ports import find_free_port

SMALL = {**reviews.ARCHITECTURE, "num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 128}
REVIEWS = 1000  # by the teacher
TOP_K = 20
SHARE = 0.8  # of the way to the teacher's gold score that the student must go
STEPS = (
    Steps("--steps", 120, "updates of the distillation, each on 64 reviews"),
    Steps("--dpo-steps", 60, "updates of the teacher's DPO, each on 32 pairs"),
    reviews.STEPS[0],
)


SWITCHES = (
    Switch("--on-policy", "the student learns from its own responses; the teacher is served"),
    Switch("--ppo", "as --on-policy, by PPO with the teacher's log-probs; beside SFT"),
)


def main(argv: list[str] | None = None) -> int:
    args = walkthrough.parse_args(argv, __doc__, "distill", STEPS, switches=SWITCHES)
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
    if args.on_policy or args.ppo:
        del phases["logits"]  # the server gives them
    if args.ppo:
        rewards = {"train_rollouts/rewards": "gold", "train_rollouts/teacher_kl": "KL"}
        title, shown = "PPO with the teacher's log-probs; SFT", "train_rollouts/teacher_kl"
        phases["distilled"] = Phase(title, args.steps, 60, shown, rewards)
    return walkthrough.run(args, phases, story, lambda: ending(args.run_dir))


def student_steps(args) -> int:
    """The student needs half the steps to know the language as well as it can."""
    return max(args.sft_steps // 2, 1)


def story(walk: Walk) -> None:
    """Run all phases; raises `JobFailed` when one of the commands fails."""
    run_dir, args = walk.run_dir, walk.args
    reviews.up_to_the_policy(walk)
    student = student_job(run_dir, args.seed, student_steps(args))
    walk.follow("dpo", dpo_job(run_dir, args.seed, args.dpo_steps), beside=(student,))
    prompts = run_dir / "data" / "prompts_distill.jsonl"
    lines = (run_dir / "data" / "prompts_train.jsonl").read_text(encoding="utf-8").splitlines(True)
    prompts.write_text("".join(lines[:REVIEWS]), encoding="utf-8")
    walk.follow("written", responses_job(run_dir, "written", "dpo", args.seed, prompts))
    policies = {"before": "student", "after": "distilled", "teacher": "dpo"}
    if args.ppo:
        port, policies["imitated"] = find_free_port(), "imitation"
        walk.follow(
            "distilled",
            policy_job(run_dir, args.seed, args.steps, port),
            servers=(teacher_job(run_dir, port),),
            beside=(imitation_job(run_dir, args.seed, args.steps),),
            detail=f"starting the teacher's server on port {port}, the policy and SFT",
        )
    elif args.on_policy:
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
    respond(walk, policies)
    walk.findings["teacher_gold"] = ("Gold score of the teacher", mean_gold(run_dir / "teacher"))
    if args.ppo:
        found = "Gold score after SFT on the teacher's reviews", mean_gold(run_dir / "imitated")
        walk.findings["imitation_gold"] = found
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


def teacher_job(run_dir: Path, port: int) -> Job:
    """The server of the teacher."""
    overrides = {
        **on_cpu(),
        "pretrained_checkpoint.restore_from_path": nemo_file(run_dir, "dpo"),
        "inference.host": "127.0.0.1",
        "inference.port": port,
        "inference.top_k": TOP_K,
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


def policy_job(run_dir: Path, seed: int, steps: int, port: int) -> Job:
    """The student learns from the served teacher alone how probable its own tokens should be; the
    gold scores are only measured.
    """
    folder = run_dir / "distilled"
    overrides = {
        **training(folder, seed, SEQ_LENGTH),
        **policy_training("trainer.ppo", steps),
        "trainer.ppo.val_check_interval": max(steps // 12, 1),
        **optimizer(lr=8e-3),
        "pretrained_checkpoint.restore_from_path": nemo_file(run_dir, "student"),
        "trainer.ppo.advantage_estimator": "teacher",
        "trainer.ppo.teacher_kl_coef": 1.0,
        "trainer.ppo.initial_policy_kl_penalty": 0.0,
        "trainer.ppo.reward_fn": f"{Path(gold.__file__).resolve()}:gold_scores",
        "trainer.ppo.reward_fn_workers": 1,
        "remote_teacher.port": port,
        "remote_teacher.init_timeout_s": 120,
        "model.global_batch_size": BATCH_SIZE,
        "model.micro_batch_size": BATCH_SIZE,
        "model.ppo.num_rollout_samples": BATCH_SIZE,
        "model.ppo.rollout_micro_batch_size": BATCH_SIZE,
        "model.ppo.num_val_samples": make_data.SIZES["prompts"]["validation"],
        "model.ppo.length_params.max_length": MAX_RESPONSE,
        "model.data.data_prefix": data_prefix(run_dir / "data", "prompts"),
    }
    return script_job("PPO actor", "train_gpt_ppo_actor.py", folder, overrides)


def imitation_job(run_dir: Path, seed: int, steps: int) -> Job:
    """Supervised training of the student on the teacher's reviews."""
    reviews_file, section = run_dir / "written" / "responses.jsonl", "model.data.train_ds"
    overrides = {
        **training(run_dir / "imitation", seed, SEQ_LENGTH),
        **optimizer(lr=8e-3),  # that of `policy_job`, to be compared with it
        "model.restore_from_path": nemo_file(run_dir, "student"),
        f"{section}.file_path": reviews_file,
        f"{section}.columns": {"input": "prompt", "output": "response"},
        f"{section}.prompt_template": "{input}{output}",  # a response begins with its space
        f"{section}.global_batch_size": BATCH_SIZE,
        f"{section}.micro_batch_size": BATCH_SIZE,
        "model.data.validation_ds.file_path": reviews_file,
        **schedule("trainer.sft", steps, steps),
    }
    return script_job("Imitation", "train_gpt_sft.py", run_dir / "imitation", overrides)


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
