# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What the walk-throughs share: arguments, the course of a run, and the verdict at its end."""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from jobs import Interrupted, Job, JobFailed, Jobs
from narrator import Narrator, Phase, clock_text
from outcome import NoOutcome, Outcome, Score, read_outcome

EXIT_CODES = """\
Exit code: 0 if every score rose clearly (outcome.py says what is clear), 1 if not, 2 if a job
failed or the arguments make no sense, 128 + signal number if it was stopped.
"""


@dataclass(frozen=True)
class Option:
    """An argument: a number of steps, one of several names, or a switch.

    Attributes:
        default: a number from 1 up; the names, of which the first is the default; or False.
    """

    option: str  # --steps
    default: int | tuple[str, ...]
    help: str = ""


GPU = Option("--gpu", False, "run each job on a GPU in bf16, in place of the CPU in fp32")
ON_GPU = ("trainer.accelerator=gpu", "trainer.precision=bf16")  # the last of two overrides counts


def parse_args(
    argv: list[str] | None, doc: str | None, name: str, options: Sequence[Option]
) -> argparse.Namespace:
    """`run_dir` (created if missing), `seed`, `gpu`, and a value per entry of `options`; exits
    with 2 if they make no sense.
    """
    parser = argparse.ArgumentParser(
        description=doc, epilog=EXIT_CODES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--run-dir", type=Path, help=f"new or empty folder; default runs/{name}-<time>"
    )
    parser.add_argument("--seed", type=int, default=0)
    for each in (*options, GPU):
        kind: dict[str, Any] = {"type": int, "default": each.default}
        if each.default is False:
            kind = {"action": "store_true"}
        elif isinstance(each.default, tuple):
            kind = {"choices": each.default, "default": each.default[0]}
        parser.add_argument(each.option, help=each.help, **kind)
    args = parser.parse_args(argv)
    for each in options:
        value = getattr(args, each.option.removeprefix("--").replace("-", "_"))
        if type(value) is int and value < 1:
            parser.error(f"{each.option} is {value}; it must be at least 1")
    if args.seed < 0:
        parser.error(f"--seed is {args.seed}; it must not be negative")
    if args.run_dir is None:
        args.run_dir = Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    args.run_dir = args.run_dir.absolute()
    if args.run_dir.exists() and (not args.run_dir.is_dir() or any(args.run_dir.iterdir())):
        # The scripts would resume what they find there.
        parser.error(f"--run-dir {args.run_dir} is not empty; name a new folder, or remove it")
    args.run_dir.mkdir(parents=True, exist_ok=True)
    return args


@dataclass
class Walk:
    """A running walk-through.

    Attributes:
        findings: (description, value) by the key in summary.json.
    """

    args: argparse.Namespace
    phases: dict[str, Phase]
    narrator: Narrator
    jobs: Jobs
    findings: dict[str, tuple[str, float]] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        return self.args.run_dir

    def do(self, phase: str, work: Callable[[], str]) -> None:
        """Run a phase in this process; `work()` returns a description of its result."""
        self.narrator.start(self.phases[phase])
        self.narrator.finish(self.phases[phase], work())

    def follow(
        self,
        phase: str,
        job: Job,
        servers: tuple[Job, ...] = (),
        detail: str = "starting",
        result: Callable = str,
        beside: tuple[Job, ...] = (),
    ) -> None:
        """Run a phase that is a job.

        Args:
            servers: started first; the job needs them until it ends.
            detail: what the phase shows at its start.
            result: returns a description of the result once the job has ended.
            beside: started with the job, which does not need them; the phase ends with the last.

        Raises:
            JobFailed: one of them failed.
        """
        self.narrator.start(self.phases[phase], detail)
        if self.args.gpu:
            for each in (*servers, job, *beside):
                each.command += ON_GPU
        for server in servers:
            self.jobs.start(server)
        for each in (job, *beside):
            self.jobs.start(each)
        self.jobs.follow(
            job,
            lambda records: self.narrator.update(self.phases[phase], records),
            companions=servers,
        )
        for each in beside:
            self.jobs.follow(each, lambda records: None)
        self.narrator.finish(self.phases[phase], result())


@dataclass(frozen=True)
class Ending:
    """The basis of the verdict.

    Attributes:
        actor: folder of the job that trained the policy.
    """

    actor: str
    algorithm: str
    scores: tuple[Score, ...]


def run(
    args: argparse.Namespace,
    phases: dict[str, Phase],
    story: Callable[[Walk], None],
    ending: Callable[[], Ending],
) -> int:
    """Run all phases and give the verdict; returns the exit code. No child process survives.

    Args:
        story: runs the phases.
        ending: called after them, when all files are written.
    """
    started = time.monotonic()
    narrator = Narrator(list(phases.values()))
    narrator.say(f"Everything goes to {args.run_dir} (seed {args.seed}).")
    try:
        with Jobs() as jobs, narrator:
            walk = Walk(args, phases, narrator, jobs)
            story(walk)
    except JobFailed as failure:
        narrator.say(f"\n{failure.job.name} failed. The last lines of {failure.job.log_path}:\n")
        narrator.say("\n".join(failure.job.last_lines()))
        narrator.say(f"\n{failure}")
        return 2
    except Interrupted as interruption:
        narrator.say(
            f"\n{interruption}; all jobs have been stopped. What was written stays in "
            f"{args.run_dir}."
        )
        return 128 + interruption.signum
    return conclude(walk, ending(), time.monotonic() - started)


def conclude(walk: Walk, ending: Ending, seconds: float) -> int:
    """Say what changed, write `summary.json` and `report.html`, and give the verdict."""
    from nemo_aligner.report import write_report  # here, so that a walk-through starts at once

    narrator, run_dir, peak_memory = walk.narrator, walk.run_dir, walk.jobs.peak_memory
    try:
        outcome = read_outcome(run_dir / ending.actor, ending.scores)
    except NoOutcome as error:
        narrator.say(f"\nNo result: {error}.")
        return 2
    tell(outcome, ending, narrator)
    findings = {key: value for key, (_, value) in walk.findings.items()}
    summary = {
        **outcome.to_dict(),
        **findings,
        "seconds": seconds,
        "peak_memory_bytes": peak_memory,
    }
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    for description, value in walk.findings.values():
        narrator.say(f"{description}: {value:.3f}")
    narrator.say(f"\nReport: {write_report(run_dir)}")
    narrator.say(
        f"Took {clock_text(seconds)} minutes and at most {peak_memory / 2**30:.2f} GiB of memory."
    )
    if outcome.learned:
        names = " and ".join(f"the {score.name}" for score in ending.scores)
        narrator.say(f"The policy has learned: {names} rose clearly.")
        return 0
    for score in ending.scores:
        rise = outcome.rises[score.key]
        if not rise.clear:
            narrator.say(
                f"Not learned: the {score.name} rose by {rise.after - rise.before:.3f}, clear is "
                f"{rise.needed:.3f}."
            )
    return 1


def tell(outcome: Outcome, ending: Ending, narrator: Narrator) -> None:
    """Print two tables: the scores, and five prompts with their responses."""
    rows = []
    for score in ending.scores:
        rise = outcome.rises[score.key]
        rows.append(
            [
                f"{score.name} {score.scale}".strip(),
                *_numbers(rise.before, rise.after, rise.needed),
            ]
        )
    for name, before, after in (
        ("responses that end by themselves", outcome.ended_before, outcome.ended_after),
        ("KL to the reference, per token", outcome.kl_first, outcome.kl_last),
    ):
        if before is not None:
            rows.append([name, *_numbers(before, after), ""])
    header = [
        "",
        f"step {outcome.first_step}",
        f"step {outcome.last_step}",
        "rise that counts as clear",
    ]
    title = f"Before and after {ending.algorithm}, {outcome.num_samples} validation prompts"
    narrator.table(title, header, rows)

    def cell(pair: dict, when: str) -> str:
        values = (
            f"{score.key} {pair[f'{score.key}_{when}']:{score.form}}" for score in ending.scores
        )
        return f"{pair[when].strip()}\n({', '.join(values)})"

    rows = [
        [pair["prompt"], cell(pair, "before"), cell(pair, "after")] for pair in outcome.pairs[:5]
    ]
    narrator.table("Five prompts", ["prompt", "response before", "response after"], rows)


def _numbers(*values: float) -> list[str]:
    return [f"{value:.3f}" for value in values]
