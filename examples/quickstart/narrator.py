# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Shows the progress of a walk-through: bars on a terminal, plain lines elsewhere."""

import time
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table


@dataclass
class Phase:
    """One phase of the run and its progress.

    Attributes:
        total: number of steps.
        planned_seconds: estimate of its duration until its own speed is known.
        step_key: a metrics record with this key reports a finished step.
        headline: metrics to show, as key -> word.
    """

    title: str
    total: int
    planned_seconds: float
    step_key: str = ""
    headline: dict[str, str] = field(default_factory=dict)
    steps: set[int] = field(default_factory=set)
    values: dict[str, float] = field(default_factory=dict)
    started: float | None = None
    first_step: float | None = None
    finished: float | None = None

    def add(self, records: list[dict], now: float) -> None:
        """Update from new metrics records."""
        for record in records:
            if self.step_key in record:
                self.first_step = self.first_step or now
                self.steps.add(record["step"])
            self.values.update(
                {key: record[key] for key in self.headline if record.get(key) is not None}
            )

    def seconds_left(self, now: float) -> float:
        """Estimate from the speed since the first step (start-up excluded), before that from the
        plan.
        """
        if self.finished is not None:
            return 0.0
        done = len(self.steps)
        if done >= 2 and now > self.first_step:
            return (now - self.first_step) / (done - 1) * max(self.total - done, 0)
        return max(
            self.planned_seconds - (now - self.started if self.started is not None else 0.0), 0.0
        )

    def describe(self) -> str:
        """`reward 1.23, KL 0.04`"""
        return ", ".join(
            f"{word} {self.values[key]:.3g}"
            for key, word in self.headline.items()
            if key in self.values
        )


class Narrator:
    """Shows a list of phases that run one after another.

    On a terminal there is one bar per phase. Elsewhere a line is printed when a phase starts,
    about `lines_per_phase` times in between, and when it ends, so that a log file stays readable.
    """

    def __init__(
        self,
        phases: list[Phase],
        console: Console | None = None,
        lines_per_phase: int = 5,
        clock=time.monotonic,
    ):
        self.phases = phases
        self.console = console or Console()
        if not self.console.is_terminal:
            self.console.width = max(self.console.width, 120)
        self._lines_per_phase = lines_per_phase
        self._clock = clock
        self._printed_steps = 0
        self._progress = None
        self._tasks = []
        if self.console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.completed}/{task.total}"),
                TextColumn("{task.fields[left]}"),
                TextColumn("{task.fields[text]}"),
                console=self.console,
            )

    def __enter__(self) -> "Narrator":
        if self._progress:
            self._tasks = [
                self._progress.add_task(
                    f"[dim]{escape(phase.title)}[/]",
                    total=phase.total,
                    start=False,
                    left="",
                    text="",
                )
                for phase in self.phases
            ]
            self._progress.start()
        return self

    def __exit__(self, *exc_info) -> None:
        if self._progress:
            self._progress.stop()

    def say(self, text: str) -> None:
        """Print a line outside the bars."""
        self.console.print(escape(text), highlight=False)

    def start(self, phase: Phase, detail: str = "") -> None:
        phase.started = self._clock()
        self._printed_steps = 0
        if self._progress:
            task = self._tasks[self.phases.index(phase)]
            self._progress.update(
                task, description=f"[bold]{escape(phase.title)}[/]", text=escape(detail)
            )
        else:
            colon = f": {detail}" if detail else ""
            self.say(
                f"{self._name(phase)}{colon} (about {self._run_left()} until the end of the run)"
            )

    def update(self, phase: Phase, records: list[dict]) -> None:
        """Show the progress of the running phase with its new metrics records."""
        now = self._clock()
        phase.add(records, now)
        done = len(phase.steps)
        if self._progress:
            left = f"{clock_text(phase.seconds_left(now))} left, run {self._run_left()}"
            fields = {"text": escape(phase.describe())} if phase.values else {}
            self._progress.update(
                self._tasks[self.phases.index(phase)], completed=done, left=left, **fields
            )
        elif done < phase.total and done - self._printed_steps >= max(
            phase.total // self._lines_per_phase, 1
        ):
            self._printed_steps = done
            left = clock_text(phase.seconds_left(now))
            self.say(
                f"{self._name(phase)}: {done}/{phase.total}, {phase.describe()}, {left} left, run "
                f"{self._run_left()}"
            )

    def finish(self, phase: Phase, detail: str = "") -> None:
        phase.finished = self._clock()
        took = clock_text(phase.finished - phase.started)
        text = ", ".join(part for part in (phase.describe(), detail) if part)
        if self._progress:
            task = self._tasks[self.phases.index(phase)]
            title = f"[green]{escape(phase.title)}[/]"
            self._progress.update(
                task,
                description=title,
                completed=phase.total,
                left=f"took {took}",
                text=escape(text),
            )
        else:
            self.say(f"{self._name(phase)}: done in {took}{'; ' + text if text else ''}")

    def table(self, title: str, header: list[str], rows: list[list[str]]) -> None:
        """Print a table; cells are plain text."""
        table = Table(
            title=title,
            title_justify="left",
            show_lines=any(len(cell) > 40 for row in rows for cell in row),
        )
        for name in header:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*map(escape, row))
        self.console.print(table)

    def _name(self, phase: Phase) -> str:
        return f"[{self.phases.index(phase) + 1}/{len(self.phases)}] {phase.title}"

    def _run_left(self) -> str:
        now = self._clock()
        return clock_text(sum(phase.seconds_left(now) for phase in self.phases))


def clock_text(seconds: float) -> str:
    """75 -> `1:15`"""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
