# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""DPO on the quickstart's pairs of reviews: `python run_dpo.py` (or `make dpo`), a few minutes on
two cores.

    data and tokenizer -> SFT of a tiny GPT -> DPO -> responses of both policies -> verdict

The policy sees pairs of reviews, the kinder one first, and neither a reward model nor a score.
Then the policies before and after respond to held-out prompts. Every phase after the first is one
of the project's own commands in its own process; see `RUN_DIR/<job>.log`.

Exit code: 0 if the gold score rose clearly (`outcome.py` says what is clear), 1 if not, 2 if a job
failed or the arguments make no sense, 128 + signal number if it was stopped.
"""

import json
import sys
from pathlib import Path

import reviews
import walkthrough
from commands import (
    data_prefix,
    hydra_value,
    nemo_file,
    on_cpu,
    optimizer,
    schedule,
    script_job,
    training,
)
from jobs import Job
from narrator import Phase
from outcome import first_and_last, read_jsonl
from reviews import BATCH_SIZE, GOLD, MAX_RESPONSE, SEQ_LENGTH
from walkthrough import Ending, Steps, Walk

GENERATE = [sys.executable, "-m", "nemo_aligner.generate"]
STEPS = (Steps("--steps", 100, "updates of DPO, each on 32 pairs"), reviews.STEPS[0])


def main(argv: list[str] | None = None) -> int:
    args = walkthrough.parse_args(argv, __doc__, "dpo", STEPS)
    shown = {"train/loss": "loss", "train/acc": "accuracy", "train/margin": "margin"}
    args.rm_steps = 1  # of a phase that this walk-through does not have
    phases = {name: phase for name, phase in reviews.phases(args).items() if name != "rm"}
    phases["dpo"] = Phase("Direct preference optimization", args.steps, 60, "train/loss", shown)
    phases["before"] = Phase("Responses of the SFT policy", 1, 10)
    phases["after"] = Phase("Responses of the trained policy", 1, 10)
    return walkthrough.run(args, phases, story, lambda: Ending("dpo", "DPO", (GOLD,)))


def story(walk: Walk) -> None:
    """Run all phases; raises `JobFailed` when one of the commands fails."""
    run_dir, args = walk.run_dir, walk.args
    reviews.up_to_the_policy(walk)

    def held_out_accuracy() -> str:
        accuracy = first_and_last(run_dir / "dpo", "validation/acc")[1]
        walk.findings["dpo_accuracy"] = ("DPO: accuracy on held-out pairs", accuracy or 0.0)
        return f"held-out accuracy {accuracy:.3f}"

    walk.follow("dpo", dpo_job(run_dir, args.seed, args.steps), result=held_out_accuracy)
    for phase, policy in (("before", "sft"), ("after", "dpo")):
        walk.follow(phase, responses_job(run_dir, phase, policy, args.seed))
    lines = [
        {**sample, "step": step}
        for step, phase in ((0, "before"), (args.steps, "after"))
        for sample in read_jsonl(run_dir / phase / "responses.jsonl")
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run_dir / "dpo" / "val_samples.jsonl").write_text(text, encoding="utf-8")


def dpo_job(run_dir: Path, seed: int, steps: int) -> Job:
    """The SFT model learns from pairs which review is kinder."""
    overrides = {
        **training(run_dir / "dpo", seed, SEQ_LENGTH),
        **optimizer(lr=5e-4),
        "pretrained_checkpoint.restore_from_path": nemo_file(run_dir, "sft"),
        "model.global_batch_size": BATCH_SIZE // 2,  # pairs
        "model.micro_batch_size": BATCH_SIZE // 2,
        "model.data.data_prefix": data_prefix(run_dir / "data", "preferences"),
        "++model.data.append_eod": True,
        **schedule("trainer.dpo", steps, steps),
    }
    return script_job("DPO", "train_gpt_dpo.py", run_dir / "dpo", overrides, threads=2)


def responses_job(
    run_dir: Path, name: str, policy: str, seed: int, prompts: Path | None = None
) -> Job:
    """One sampled response of a policy to each prompt; None: to the validation prompts."""
    folder = run_dir / name
    prompts = prompts or run_dir / "data" / "prompts_validation.jsonl"
    folder.mkdir()
    settings = {
        **on_cpu(),
        "length_params.max_length": MAX_RESPONSE,
        "micro_batch_size": BATCH_SIZE,
        "model.seed": seed + 1,
    }
    command = [*GENERATE, str(nemo_file(run_dir, policy))]
    command += ["--prompts", str(prompts)]
    command += ["--out", str(folder / "responses.jsonl")]
    command += [f"{key}={hydra_value(value)}" for key, value in settings.items()]
    return Job(f"Responses {name}", command, folder, env={"OMP_NUM_THREADS": "2"})


if __name__ == "__main__":
    sys.exit(main())
