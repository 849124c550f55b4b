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

from nemo_aligner.compat.stand_ins import OTHER_SCRIPTS, SCRIPTS, STAND_INS
from nemo_aligner.config.inert_keys import INERT, ONLY
from nemo_aligner.config.schema import CONFIG_NAMES
from nemo_aligner.core.changed_calls import CHANGED_CALLS
from nemo_aligner.core.retired import RETIRED
from nemo_aligner.models.nlp.gpt.retired_hooks import RETIRED_HOOKS
from nemo_aligner.servers import schema

PAGE = Path(__file__).resolve().parents[1] / "docs" / "migration.md"
INTRODUCTION = """# From NeMo-Aligner

<!-- Written by scripts/migration_page.py from the lists that the code uses; do not edit. -->

What happens to the scripts, commands, YAML keys, names, checkpoints and clients of NeMo-Aligner
0.7.0. Where numbers differ on purpose, see [Differences from NeMo-Aligner](differences.md)."""


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines
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
and this package writes them. A script without the decorator `user_errors_end_the_job` ends an
error of a user with a traceback, which this package's own scripts do not.

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

Scripts of algorithms that this package does not have:

{table(("Algorithm", "Script"), others)}"""


def commands() -> str:
    """The forms of a command line."""
    return """## Commands

`key=value`, `+key=`, `++key=`, `~key`, `--config-path`, `--config-name` and `--config-dir` mean
what they meant. `python script.py trainer.devices=N` starts the other processes itself; torchrun
and srun work as well. `mpirun` is not needed."""


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
        (f"`{key}`", code(accepted) or "none", remedy) for key, (accepted, remedy) in ONLY.items()
    ]
    return f"""## YAML keys

NeMo-Aligner's keys are accepted; missing ones have the defaults of [Configuration](config.md). A
key that nobody knows is refused with the nearest known one.

Keys without effect; a value that used to change something is worth a warning:

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

Names that can be imported, with a warning, and not used:

{table(("Module", "Name", "Instead"), retired)}

Calls that need another form:

{table(("Name", "Module", "Here"), changed)}

Methods of models that nothing calls. A class that overrides one is refused when it is defined:

{table(("Method", "Instead"), hooks)}

Optimizer and schedule are Megatron Core's: `optimizer.step()` takes no closure and
`scheduler.step(increment=1)` counts updates. Not here: `package_info`, `testing`, and the modules
of the algorithms named under Scripts."""


def checkpoints() -> str:
    """Forms of checkpoints."""
    rows = [
        ("`.nemo`, a tar file or a folder, with a distributed checkpoint", "loads"),
        (
            "training checkpoint of NeMo-Aligner (to resume a job)",
            "refused: start from its `.nemo` in another folder",
        ),
        (
            "training checkpoint of this package, written by a script of NeMo-Aligner",
            "resumes, at any split",
        ),
    ]
    return f"## Checkpoints\n\n{table(('Form', 'Here'), rows)}"


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
    return f"""## Servers

NeMo-Aligner's clients work with these servers as they are: what it does not send is optional.

{table(("Endpoint", "Inputs", "Outputs"), rows)}"""


SECTIONS: tuple[Callable[[], str], ...] = (
    scripts,
    commands,
    yaml_keys,
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
