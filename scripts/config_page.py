# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes docs/config.md from the keys themselves (`nemo_aligner/config/keys/` and `jobs/`):

    python scripts/config_page.py

A test compares the page with what this script writes.
"""

import importlib
import pkgutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nemo_aligner.config import jobs
from nemo_aligner.config.fields import ABSENT, Key, Section, meanings
from nemo_aligner.config.jobs import JOBS
from nemo_aligner.config.schema import scalar

PAGE = Path(__file__).resolve().parents[1] / "docs" / "config.md"
# Modules below nemo_aligner/config/, with their headings; None: what their docstrings say.
MODULES = {
    "keys.common": "Every job",
    "keys.model": "Model",
    "keys.data": "Data",
    "keys.rollouts": "Jobs that generate",
    **{f"jobs.{module.name}": None for module in pkgutil.iter_modules(jobs.__path__)},
}
INTRODUCTION = """# Configuration keys

<!-- Written by scripts/config_page.py from the keys themselves; do not edit. -->

A script composes a YAML file of `conf/` with Hydra, and any key can be set in a copy of it or on
the command line:

    python examples/nlp/gpt/train_gpt_ppo_actor.py trainer.ppo.max_steps=100 \\
        model.tensor_model_parallel_size=2

A YAML file shows the keys that are set most often. `nemo-aligner config ppo` prints all keys of a
job with their defaults and meaning. `key=`, `+key=` and `++key=` mean the same. The configuration
is checked before anything is built:

* An **unknown key** is an error that names the nearest known key, if one is near, and where the
  YAML file has it.
* A key of NeMo or NeMo-Aligner **without effect here** is accepted; one warning lists all such
  keys that ask for something. A second one lists what NeMo-Aligner's commands and YAML files say
  that means something else here. [From NeMo-Aligner](migration.md) has both lists. A `.nemo`
  file's own configuration may hold any key.
* **Values that cannot work**, alone or together, are an error that says what to change: a key that
  would change the model if it were ignored (`fp8`, `headscale`, `moe_grouped_gemm`, ...) too. The
  constructor of every model checks its keys, also those of a checkpoint.
* A switch is `True` or `False` (Hydra reads `off` and `None` as text), and `null` is refused where
  a value is needed.

Below, `<algo>` is `ppo`, `rs`, `reinforce`, `rm`, `sft`, `dpo`, `kto`, `spin` or
`knowledge_distillation`. Architecture and parallel sizes come from the checkpoint: null means "as
in the checkpoint", a value overrides it, and the default shown is that of a model without one. The
keys are those of NeMo-Aligner; **new** marks keys that it does not have."""


def places() -> dict[type, dict[str, dict[str, list[Key]]]]:
    """Where each section stands: dotted name -> field -> its keys in all jobs."""
    found: dict[type, dict[str, dict[str, list[Key]]]] = {}
    for job in JOBS.values():
        for key in job.keys.values():
            *shown, field = key.name.split(".")
            if job.algo in shown[1:2]:
                shown[1] = "<algo>"
            for each in key.section.__mro__:
                fields = found.setdefault(each, {}).setdefault(".".join(shown), {})
                fields.setdefault(field, []).append(key)
    return found


def cell(value: Any) -> str:
    """A default, as YAML."""
    if value is ABSENT:
        return ""
    text = scalar(value)
    return f"`{text}`" if any(mark in text for mark in "${<[\\|") else text


def default(keys: Sequence[Key]) -> str:
    """The default of a key in all jobs, or that it depends on the job."""
    of_checkpoint = {cell(key.fallback) for key in keys if key.fallback is not ABSENT}
    given = {cell(key.default) for key in keys if key.default is not ABSENT}
    shown = (given - {"null"} if of_checkpoint else given) | of_checkpoint
    shown = {text for text in shown if "{model.data.train_ds." not in text} or shown
    text = " or ".join(sorted(shown, key=lambda text: (text != "null", text)))
    return text if len(shown) <= 2 and len(text) < 80 else "by job"


def rows(section: type, keys: dict[str, list[Key]]) -> Iterator[str]:
    for names, meaning in meanings(section).items():
        defaults = [default(keys.get(name, [])) for name in names]
        shown = ", ".join(each or "unset" for each in defaults) if any(defaults) else ""
        line = f"| {', '.join(f'`{name}`' for name in names)} | {shown} | {meaning} |"
        yield line.replace("\\|", "|").replace("<|", "<\\|").replace("|>", "\\|>")


def sections() -> Iterator[str]:
    where = places()
    for name, title in MODULES.items():
        module = importlib.import_module(f"nemo_aligner.config.{name}")
        yield f"## {title or str(module.__doc__).rstrip('.')}"
        for section in vars(module).values():
            is_own = getattr(section, "__module__", "") == module.__name__
            if not (is_own and isinstance(section, type) and issubclass(section, Section)):
                continue
            names = where.get(section, {})
            keys: dict[str, list[Key]] = {}
            for fields in names.values():
                for name, each in fields.items():
                    keys.setdefault(name, []).extend(each)
            lines = list(rows(section, keys))
            if not lines:
                continue
            stands = ", ".join(f"`{name}`" for name in names if name) or "the top level"
            about = str(section.__doc__).partition("\n")[0].rstrip(".")
            yield f"### {about}"
            yield "\n".join([f"| Key in {stands} | Default | Meaning |", "|---|---|---|", *lines])


def page() -> str:
    return "\n\n".join([INTRODUCTION, *sections()]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
