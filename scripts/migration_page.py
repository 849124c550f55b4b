# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes docs/migration.md from the lists that the code itself uses:

    python scripts/migration_page.py

A section of the page is a function of `SECTIONS`, which returns Markdown. A test compares the page
with what this script writes.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from nemo_aligner.checkpoint.forms import FORMS
from nemo_aligner.compat.stand_ins import OTHER_SCRIPTS, SCRIPTS, STAND_INS
from nemo_aligner.config.data_rules import DATA_IMPLS, OTHER_DATA_IMPLS
from nemo_aligner.config.inert_keys import INERT, ONLY
from nemo_aligner.config.old_forms import LATER, OLD_FORMS
from nemo_aligner.config.optim_rules import (
    OPTIMIZERS,
    OTHER_OPTIMIZERS,
    OTHER_SCHEDULES,
    SCHEDULES,
)
from nemo_aligner.config.schema import CONFIG_NAMES
from nemo_aligner.core.changed_calls import CHANGED_CALLS
from nemo_aligner.core.estimators import PREFERENCE_LOSSES
from nemo_aligner.core.retired import RETIRED
from nemo_aligner.models.nlp.gpt.retired_hooks import RETIRED_HOOKS
from nemo_aligner.models.nlp.gpt.tokenizers import LIBRARIES
from nemo_aligner.servers import schema
from nemo_aligner.servers.served_model import ADDITIONS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "migration.md"
# What NeMo-Aligner documents, and what happens to it here; test_documented_commands.py runs them.
COMMANDS = ROOT / "tests" / "unit" / "documented_commands.txt"
INTRODUCTION = """# From NeMo-Aligner

<!-- Written by scripts/migration_page.py from the lists that the code uses; do not edit. -->

What happens to the scripts, commands, YAML keys, names, checkpoints and clients of NeMo-Aligner
0.7.0. Where numbers differ on purpose, see [Differences from NeMo-Aligner](differences.md)."""


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in row) + " |"
        for row in lines
    )


def code(names: Iterable[object]) -> str:
    """Names as code, one after the other."""
    return ", ".join(f"`{name}`" for name in names)


def scripts() -> str:
    """Which scripts run as they are."""
    rows = [
        (
            f"`{script}`",
            "runs as it is" if not names else "runs as it is with `python -m nemo_aligner.compat`",
            code(names) or "none",
        )
        for script, names in SCRIPTS.items()
    ]
    others = [(name, script) for name, script in OTHER_SCRIPTS.items()]
    return f"""## Scripts

{
        table(
            (
                "Script of NeMo-Aligner",
                "Here",
                "Names of NeMo's removed collection that it imports",
            ),
            rows,
        )
    }

The steps of a script (`init_using_ptl`, `init_peft`, `add_custom_checkpoint_callback`, ...) keep
their names and their order; `nemo_aligner/launch/script_steps.py` has them. NeMo's own
`exp_manager` may be called; its checkpoint callback says where checkpoints go and which are kept,
and this package writes and finds them. `exp_manager=null` works where the script itself allows it,
which `train_gpt_rs_actor.py` does not: it reads `cfg.exp_manager.get(...)`. A script without the
decorator `user_errors_end_the_job` ends an error of a user with a traceback, which this package's
own scripts do not.

NeMo 3 has no `nemo.collections.nlp`. `python -m nemo_aligner.compat script.py key=value ...` runs
a script in which these modules can be imported; nothing else differs, and no normal import of
this package changes anything. Under torchrun: `torchrun --nproc_per_node=2 -m
nemo_aligner.compat script.py ...`. Otherwise remove or replace the import lines:

{
        table(
            ("Module of NeMo", "Name", "Stands in"),
            [
                (
                    f"`{module}`",
                    f"`{name}`",
                    f"`{own.partition(':')[2]}` of `{own.partition(':')[0]}`",
                )
                for module, names in STAND_INS.items()
                for name, own in names.items()
            ],
        )
    }

They call NeMo's `exp_manager`, which writes TensorBoard files but no `metrics.jsonl`. Their
configuration is checked as that of this package's own scripts in `examples/nlp/gpt`, with the
warnings below about keys and forms, where they call `load_and_override_model_config`. An unknown
key is not refused there but gets a warning, since a script of your own may read it. Whether actor
and critic resume from the same step is compared by `PPOTrainer.fit`.

Scripts of algorithms that this package does not have:

{table(("Algorithm", "Script"), others)}"""


def commands() -> str:
    """The forms of a command line, and each documented command."""
    forms = [(old.form, code(old.jobs), old.happens) for old in OLD_FORMS]
    later = [(f"`{key}`", f"`{job}`", remedy) for (job, key), (_, remedy) in LATER.items()]
    return f"""## Commands

`key=value`, `+key=`, `++key=`, `~key`, `--config-path`, `--config-name` and `--config-dir` mean
what they meant. `python script.py trainer.devices=N` starts the other processes itself; torchrun,
srun and mpirun work as well.

The commands that NeMo-Aligner documents for PPO, rejection sampling, SFT and reward models:

{table(("Where", "Script", "Here"), documented_commands())}

These forms are accepted with a warning:

{table(("Form", "Jobs", "What happens"), forms)}

Refused at the start, so far:

{table(("Key", "Job", "Instead"), later)}"""


def documented_commands() -> list[tuple[str, str, str]]:
    """(where, script, outcome) of each command of `COMMANDS`."""
    rows = []
    for block in COMMANDS.read_text(encoding="utf-8").split("\n== ")[1:]:
        lines = block.splitlines()
        where, script = lines[0].split()
        outcomes = [line[3:] for line in lines if line.startswith("-> ")]
        notes = [text.removeprefix("note: ") for text in outcomes[1:]]
        warns = f"; warnings about {code(notes)}" if notes else ""
        rows.append((f"`{where}`", f"`{script}`", outcomes[0] + warns))
    return rows


def yaml_keys() -> str:
    """Keys without effect, and keys of which only some values are accepted."""
    by_reason: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for config in CONFIG_NAMES:
        for key, inert in sorted(INERT[config].items()):
            by_reason[inert.reason][key].add(config)
    rows = []
    for reason, keys in by_reason.items():
        files: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for key, configs in sorted(keys.items()):
            files[tuple(name for name in CONFIG_NAMES if name in configs)].append(key)
        for configs, names in files.items():
            where = "all" if len(configs) == len(CONFIG_NAMES) else code(configs)
            rows.append((code(names), where, reason))
    values = [
        (
            f"`{key}`",
            ", ".join(f"`{v}`" if v != "" else "(empty)" for v in accepted) or "no value",
            remedy,
        )
        for key, (accepted, remedy) in ONLY.items()
    ]
    return f"""## YAML keys

NeMo-Aligner's keys are accepted; missing ones have the defaults of [Configuration](config.md). A
key that nobody knows is refused with the nearest known one (in other scripts than this package's
own: a warning).

Keys without effect. You get a warning if yours has a value that did something in NeMo-Aligner:

{table(("Keys", "YAML files", "Why"), rows)}

Keys of which only these values are accepted:

{table(("Key", "Values", "Otherwise"), values)}"""


def names() -> str:
    """Python names and calls."""
    retired = [
        (f"`{module}`", f"`{name}`", instead)
        for module, entries in RETIRED.items()
        for name, instead in entries.items()
    ]
    changed = [
        (f"`{where.partition(':')[2]}`", f"`{where.partition(':')[0]}`", instead)
        for where, instead in CHANGED_CALLS.items()
    ]
    hooks = [(f"`{name}`", instead) for name, instead in RETIRED_HOOKS.items()]
    return f"""## Names

Every public function, class and method of NeMo-Aligner's modules for PPO, rejection sampling, SFT
and reward models can be imported at its path, and its calls bind as they did
(`tests/unit/nemo_aligner_names.txt` is the list, with the arguments), except for those below.

Names that can be imported, with a warning, but cannot be used:

{table(("Module", "Name", "Instead"), retired)}

Calls that need another form:

{table(("Name", "Module", "Here"), changed)}

Methods of models that nothing calls. A class that overrides one is refused when it is defined:

{table(("Method", "Instead"), hooks)}

Optimizer and schedule are Megatron Core's: `optimizer.step()` takes no closure and
`scheduler.step(increment=1)` counts updates. Not here: `package_info`, `testing`, and the modules
of the algorithms named under Scripts."""


def recipes() -> str:
    """Optimizers, schedules, losses and forms of data by name."""
    optimizers = [(code(OPTIMIZERS), "supported")]
    optimizers.append((code(OTHER_OPTIMIZERS), "refused: Megatron Core has Adam and SGD only"))
    schedules = [(f"`{name}`", code(kind.keys)) for name, kind in SCHEDULES.items()]
    no_schedules = [(f"`{name}`", f"refused: {why}") for name, why in OTHER_SCHEDULES.items()]
    data = [(f"`{name}`", holds) for name, holds in DATA_IMPLS.items()]
    no_data = [(f"`{name}`", f"refused: {remedy}") for name, remedy in OTHER_DATA_IMPLS.items()]
    return f"""## Optimizers, schedules, losses, data

{table(("`model.optim.name`", "Here"), optimizers)}

`model.optim.sched.name`:

{table(("Schedule", "Keys that it reads"), schedules + no_schedules)}

`model.regression.loss_func` of pairs with labels: {code(PREFERENCE_LOSSES)}.

`model.data.data_impl`:

{table(("Form", "A file holds"), data + no_data)}"""


def checkpoints() -> str:
    """Forms of checkpoints and tokenizers."""
    rows = [
        (form.name, form.holds, "loads" if form.loads else f"refused: {form.remedy}")
        for form in FORMS.values()
    ]
    rows.append(
        (
            "training checkpoint of NeMo-Aligner (folder or .ckpt)",
            "a folder of a job",
            "refused: start from its .nemo in another folder",
        )
    )
    rows.append(
        (
            "training checkpoint of this package, written by a script of NeMo-Aligner",
            "a folder of a job",
            "resumes, at any split",
        )
    )
    libraries = [
        (f"`{name}`", f"`{each.reads}`", each.note)
        if each.reads
        else (f"`{name}`", "none", f"refused: {each.note}")
        for name, each in LIBRARIES.items()
    ]
    return f"""## Checkpoints

{table(("Form", "Recognised by", "Here"), rows)}

`model.tokenizer.library`:

{table(("Library", "Keys that it reads", "Note"), libraries)}"""


def servers() -> str:
    """Endpoints with their tensors."""
    endpoints = (
        schema.critic_infer_endpoint(True),
        schema.critic_train_endpoint(),
        schema.critic_save_endpoint(),
        schema.critic_status_endpoint(),
        schema.reward_model_endpoint(),
    )

    def tensors(specs: Iterable[schema.TensorSpec]) -> str:
        kinds = {np.bytes_: "bytes"}
        return ", ".join(
            f"`{spec.name}` {kinds.get(spec.dtype) or np.dtype(spec.dtype).name}"
            + (" (optional)" if spec.optional else "")
            for spec in specs
        )

    rows = [(f"`{each.name}`", tensors(each.inputs), tensors(each.outputs)) for each in endpoints]
    missing = [
        (f"{each.kind} `{each.name}`", each.without + (", with a warning" if each.warns else ""))
        for each in ADDITIONS
    ]
    return f"""## Servers

NeMo-Aligner's clients work with these servers as they are: what it does not send is optional.

{table(("Endpoint", "Inputs", "Outputs"), rows)}

Clients of this package read what a server lists and send no more. Of a critic of NeMo-Aligner, or
a server written with PyTriton, which have less:

{table(("Missing", "What the client does"), missing)}"""


SECTIONS: tuple[Callable[[], str], ...] = (
    scripts,
    commands,
    yaml_keys,
    recipes,
    names,
    checkpoints,
    servers,
)


def page() -> str:
    """The whole page."""
    return "\n\n".join([INTRODUCTION, *(section() for section in SECTIONS)]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"written: {PAGE}")
