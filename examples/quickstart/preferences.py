# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Kinder reviews without a reward model: what `run_dpo.py`, `run_kto.py` and `run_spin.py`
share.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from walkthrough import Ending, Option, Walk

GENERATE = [sys.executable, "-m", "nemo_aligner.generate"]


@dataclass(frozen=True)
class Algorithm:
    """How the SFT policy learns which reviews are kinder.

    Attributes:
        name: of its script (`train_gpt_<name>.py`), its section and its folder.
        short, title: as the walk-through calls it.
        steps: how many updates.
        data: kind of its files (`make_data.py`).
        batch_size: samples of an update.
        shown: metrics beside the progress, with their names.
        held_out: metric on the held-out samples, with its name.
        settings: overrides that name the data and say how long to train, by the folder of the run
            and the number of updates; None: those of a job with `model.data.data_prefix`.
    """

    name: str
    short: str
    title: str
    steps: Option
    data: str
    batch_size: int
    shown: dict[str, str]
    held_out: tuple[str, str]
    settings: Callable[[Path, int], dict] | None = None


def main(argv: list[str] | None, doc: str | None, algorithm: Algorithm) -> int:
    args = walkthrough.parse_args(argv, doc, algorithm.name, (algorithm.steps, reviews.STEPS[0]))
    args.rm_steps = 1  # of a phase that this walk-through does not have
    phases = {name: phase for name, phase in reviews.phases(args).items() if name != "rm"}
    shown = {"train/loss": "loss", **algorithm.shown}
    phases[algorithm.name] = Phase(algorithm.title, args.steps, 60, "train/loss", shown)
    phases["responses"] = Phase("Responses before and after", 1, 15)
    return walkthrough.run(
        args,
        phases,
        story_of(algorithm),
        lambda: Ending(algorithm.name, algorithm.short, (GOLD,)),
    )


def story_of(algorithm: Algorithm) -> Callable[[Walk], None]:
    """Runs all phases; raises `JobFailed` when one of the commands fails."""

    def story(walk: Walk) -> None:
        run_dir, args = walk.run_dir, walk.args
        folder = run_dir / algorithm.name
        reviews.up_to_the_policy(walk)

        def on_held_out() -> str:
            metric, name = algorithm.held_out
            value = first_and_last(folder, metric)[1] or 0.0
            key = f"{algorithm.name}_{name.replace(' ', '_')}"
            walk.findings[key] = (f"{algorithm.short}: {name} on held-out {algorithm.data}", value)
            return f"held-out {name} {value:.3f}"

        job = training_job(algorithm, run_dir, args.seed, args.steps)
        walk.follow(algorithm.name, job, result=on_held_out)
        respond(walk, {"before": "sft", "after": algorithm.name})
        write_samples(folder, args.steps)

    return story


def training_job(algorithm: Algorithm, run_dir: Path, seed: int, steps: int) -> Job:
    """The SFT model learns which review is kinder."""
    name = algorithm.name
    overrides = {
        **training(run_dir / name, seed, SEQ_LENGTH),
        **optimizer(lr=5e-4),
        "pretrained_checkpoint.restore_from_path": nemo_file(run_dir, "sft"),
        "model.global_batch_size": algorithm.batch_size,
        "model.micro_batch_size": algorithm.batch_size,
    }
    if algorithm.settings is not None:
        overrides |= algorithm.settings(run_dir, steps)
    else:
        overrides["model.data.data_prefix"] = data_prefix(run_dir / "data", algorithm.data)
        overrides["model.data.append_eod"] = True
        overrides |= schedule(f"trainer.{name}", steps, steps)
    return script_job(
        algorithm.short, f"train_gpt_{name}.py", run_dir / name, overrides, threads=2
    )


def respond(walk: Walk, policies: dict[str, str]) -> None:
    """The phase "responses": the policy of each folder responds to the validation prompts."""
    job, *beside = (
        responses_job(walk.run_dir, name, policy, walk.args.seed)
        for name, policy in policies.items()
    )
    walk.follow("responses", job, beside=tuple(beside))


def write_samples(folder: Path, steps: int) -> None:
    """The responses before and after `steps` updates, as a job that validates writes them."""
    samples = [
        {**sample, "step": step}
        for step, name in ((0, "before"), (steps, "after"))
        for sample in read_jsonl(folder.parent / name / "responses.jsonl")
    ]
    text = "".join(json.dumps(sample) + "\n" for sample in samples)
    (folder / "val_samples.jsonl").write_text(text, encoding="utf-8")


def responses_job(
    run_dir: Path,
    name: str,
    policy: str,
    seed: int,
    prompts: Path | None = None,
    more: dict[str, Any] | None = None,
) -> Job:
    """One sampled response of a policy to each prompt; None: to the validation prompts. `more`:
    settings of the command.
    """
    folder = run_dir / name
    prompts = prompts or run_dir / "data" / "prompts_validation.jsonl"
    folder.mkdir()
    settings = {
        **on_cpu(),
        "length_params.max_length": MAX_RESPONSE,
        "micro_batch_size": BATCH_SIZE,
        "model.seed": seed + 1,
        **(more or {}),
    }
    command = [*GENERATE, str(nemo_file(run_dir, policy))]
    command += ["--prompts", str(prompts)]
    command += ["--out", str(folder / "responses.jsonl")]
    command += [f"{key}={hydra_value(value)}" for key, value in settings.items()]
    return Job(f"Responses {name}", command, folder, env={"OMP_NUM_THREADS": "1"})
