# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes the second part of docs/migration.md from the lists that the code itself uses:

    python scripts/migration_page.py

The first part, up to the line `MARK`, is written by hand. A section of the second is a function of
`SECTIONS`, which returns Markdown. A test compares the page with what this script writes.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from nemo_aligner.checkpoint.forms import FORMS
from nemo_aligner.compat import STAND_INS
from nemo_aligner.config.data_rules import DATA_IMPLS, OTHER_DATA_IMPLS
from nemo_aligner.config.inert_keys import INERT, LATER, OLD_FORMS, ONLY
from nemo_aligner.config.optim_rules import (
    OPTIMIZERS,
    OTHER_OPTIMIZERS,
    OTHER_SCHEDULES,
    SCHEDULES,
)
from nemo_aligner.core.estimators import PREFERENCE_LOSSES
from nemo_aligner.core.retired import RETIRED
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import RETIRED_HOOKS
from nemo_aligner.models.nlp.gpt.tokenizers import LIBRARIES
from nemo_aligner.servers import schema
from nemo_aligner.servers.served_model import ADDITIONS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "migration.md"
# What NeMo-Aligner documents, and what happens to it here; test_documented_commands.py runs them.
COMMANDS = ROOT / "tests" / "unit" / "documented_commands.txt"
# Scripts of NeMo-Aligner 0.7.0, and the names that each imports from the removed collection.
SCRIPTS: dict[str, tuple[str, ...]] = {
    "train_gpt_ppo_actor.py": (),
    "serve_ppo_critic.py": (),
    "train_gpt_rs_actor.py": (),
    "train_gpt_reinforce_actor.py": (),
    "train_reward_model.py": (),
    "train_gpt_dpo.py": (),
    "train_gpt_kto.py": (),
    "train_gpt_spin.py": (),
    "train_gpt_sft.py": (
        "get_prompt_template_example",
        "MegatronPretrainingBatchSampler",
        "MegatronGPTModel",
        "MegatronTrainerBuilder",
    ),
    "train_steerlm2.py": (
        "get_prompt_template_example",
        "MegatronPretrainingBatchSampler",
        "MegatronGPTModel",
        "MegatronTrainerBuilder",
    ),
    "serve_reward_model.py": ("NLPDDPStrategy",),
}
# Its other scripts, by algorithm; paths below its folder examples/.
_GPT = "nlp/gpt/"
OTHER_SCRIPTS: dict[str, tuple[str, ...]] = {
    "packed pairs of DPO": ("nlp/data/dpo/prepare_packed_dpo_dataset.py",),
    "knowledge distillation": (
        f"{_GPT}train_gpt_knowledge_distillation.py",
        "nlp/synthetic_data_gen/compute_topk_logits.py",
    ),
    "DRaFT+ (images)": (
        "mm/stable_diffusion/train_sd_draftp.py",
        "mm/stable_diffusion/train_sdxl_draftp.py",
        "mm/stable_diffusion/anneal_sdxl.py",
        "mm/clip/train_reward_model.py",
        "mm/clip/test_reward_model.py",
    ),
}
# Its scripts that write data: those that this package has by the same path and arguments, those
# that import nothing of NeMo, and those that import classes of its removed collection without a
# stand-in.
OWN_DATA_SCRIPTS = (
    "nlp/cai/generate_rl_cai_dataset.py",
    "nlp/cai/generate_sl_cai_dataset.py",
    "nlp/data/steerlm/attribute_annotate.py",
    "nlp/data/steerlm/preprocess_helpsteer_data.py",
    "nlp/data/steerlm/preprocess_helpsteer2_data.py",
    "nlp/data/steerlm/preprocess_openassistant_data.py",
    "nlp/data/steerlm/process_to_regression_format.py",
)
FREE_DATA_SCRIPTS = (
    "nlp/cai/process_anthropic_hh_using_chat_prompt.py",
    "nlp/data/kto/preprocess_anthropichh_data.py",
    "nlp/data/steerlm/common.py",
)
BOUND_DATA_SCRIPTS = ("nlp/cai/cai_utils.py", "nlp/data/sft/remove_long_dialogues.py")
_OWN_VALUE = "an inner constant of a server; the address and port are keys of the configuration"
# Modules of NeMo-Aligner that cannot be imported, and constants (`module:NAME`): what they were.
NOT_HERE: dict[str, str] = {
    "nemo_aligner.data.mm": "data sets of images",
    "nemo_aligner.models.mm": "models of images",
    "nemo_aligner.data.nlp.scripts": "a script that changes special tokens of SteerLM's data",
    "nemo_aligner.data.nlp.tests": "tests",
    "nemo_aligner.utils.tests": "tests",
    "nemo_aligner.testing": "helpers of tests",
    "nemo_aligner.package_info": "the version; use nemo_aligner.__version__",
    "nemo_aligner.algorithms.critic_server_trainer:ENDPOINT_BIND_ADDRESS": _OWN_VALUE,
    "nemo_aligner.algorithms.critic_server_trainer:MAX_BATCH": _OWN_VALUE,
    "nemo_aligner.algorithms.reward_server:ENDPOINT_BIND_ADDRESS": _OWN_VALUE,
    "nemo_aligner.algorithms.reward_server:MAX_BATCH": _OWN_VALUE,
    "nemo_aligner.algorithms.supervised:IMAGE_CAPTION_KEY": "a metric of image models",
    "nemo_aligner.utils.trt_llm:HAVE_TRTLLM": "whether TensorRT-LLM is there; it is not used",
}
_INTERFACE = "nemo_aligner.models.alignable_interface"
_CLIENTS = "nemo_aligner.models.nlp.gpt.reward_critic_clients"
_DATASETS = "nemo_aligner.data.nlp.datasets"
_ENCODE = "`dataset.encode(text)` returns the token ids alone, not with their number"
# Calls (`module:name`) that need another form here.
CHANGED_CALLS: dict[str, str] = {
    f"{_DATASETS}:DPOModelDataset.__init__": (
        "there is no argument `pad_chosen_rejected_to_max`; items are padded to `seq_length`"
    ),
    f"{_DATASETS}:DPOModelDataset.convert": (
        "conversations get the form that `model.data.chat` or `model.data.chat_template` asks for"
    ),
    f"{_DATASETS}:DPOModelDataset.encode": _ENCODE,
    f"{_DATASETS}:KTOModelDataset.encode": _ENCODE,
    f"{_DATASETS}:RLHFDataset.encode": _ENCODE,
    f"{_DATASETS}:RewardModelDataset.encode": _ENCODE,
    f"{_INTERFACE}:AlignableGenerativeInterface.get_init_policy_logprobs": (
        "it belongs to `PolicyWithReference`, the interface of a policy for PPO"
    ),
    f"{_CLIENTS}:RemoteGPTRMCriticClient.train": (
        "the argument is called `rollout_batch`; by position nothing changes"
    ),
    f"{_CLIENTS}:SaveFuture.__init__": "`RemoteGPTRMCriticClient.save` makes it; do not build one",
}
MARK = "<!-- Written by scripts/migration_page.py from here on; do not edit. -->"


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(escaped(cell) for cell in row) + " |" for row in lines)


def escaped(cell: str) -> str:
    """A cell whose text between backticks stays as it is."""
    pieces = cell.replace("|", "\\|").split("`")
    pieces[::2] = [piece.replace("<", "&lt;") for piece in pieces[::2]]
    return "`".join(pieces)


def code(names: Iterable[object]) -> str:
    """Names as code, one after the other."""
    return ", ".join(f"`{name}`" for name in names)


def grouped(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Rows that differ in their first cell only, as one with all these cells."""
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for first, *others in rows:
        groups[tuple(others)].append(first)
    return [(", ".join(firsts), *others) for others, firsts in groups.items()]


def some_of(names: Iterable[str], every: Iterable[str]) -> str:
    """Names in words: all, all but a few, or each."""
    named, left = list(names), [name for name in every if name not in names]
    few = f"all but {code(left)}" if len(left) < len(named) else code(named)
    return few if left else "all"


def scripts() -> str:
    """Which scripts run as they are."""
    rows = grouped(
        (
            f"`{script}`",
            "runs as it is" if not names else "runs as it is with `python -m nemo_aligner.compat`",
            code(names) or "none",
        )
        for script, names in SCRIPTS.items()
    )
    others = [(name, ", ".join(scripts)) for name, scripts in OTHER_SCRIPTS.items()]
    data = [
        (", ".join(OWN_DATA_SCRIPTS), "this package's scripts of the same path and arguments"),
        (", ".join(FREE_DATA_SCRIPTS), "nothing of NeMo: they run from NeMo-Aligner's repository"),
        (
            ", ".join(BOUND_DATA_SCRIPTS),
            "NeMo 2.0 to 2.4: its text generation server or its chat data set",
        ),
    ]
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
`exp_manager` may be called: its checkpoint callback says where checkpoints go and which are kept.
`exp_manager=null` works where the script itself allows it, which `train_gpt_rs_actor.py` does not.

NeMo 3 has no `nemo.collections.nlp`. `python -m nemo_aligner.compat script.py key=value ...` runs
a script in which these names can be imported; otherwise replace the import lines:

{
        table(
            ("Name", "Module of NeMo", "Module here"),
            grouped(
                (
                    f"`{name}`" + ("" if own_name == name else f" (here `{own_name}`)"),
                    f"`{module}`",
                    f"`{own_module}`",
                )
                for module, names in STAND_INS.items()
                for name, own in names.items()
                for own_module, own_name in [own.split(":")]
            ),
        )
    }

They call NeMo's `exp_manager`, which writes TensorBoard files but no `metrics.jsonl`. Their
configuration is checked where they call `load_and_override_model_config`; an unknown key gets a
warning, since a script of your own may read it.

NeMo-Aligner's last revision has `pytorch_lightning` in `serve_reward_model.py`, whose trainer
takes no `NLPDDPStrategy`: write `lightning.pytorch` there, as in 0.7.0.

Its other scripts do not run with this package (paths below NeMo-Aligner's `examples`); of
distillation it has its own, with their paths and keys:

{table(("Algorithm", "Scripts"), others)}

Its scripts that write data are not here:

{table(("Scripts", "What they need"), data)}"""


def commands() -> str:
    """The forms of a command line, and each documented command."""
    documented = documented_commands()
    told = grouped(row for row in documented if row[-1] != "accepted")
    every = [config for config, keys in INERT.items() if keys]
    forms = [(old.form, some_of(old.jobs, every), old.happens) for old in OLD_FORMS]
    later = grouped((f"`{key}`", f"`{job}`", remedy) for (job, key), (_, remedy) in LATER.items())
    return f"""## Commands

`key=value`, `+key=`, `++key=`, `~key`, `--config-path`, `--config-name` and `--config-dir` mean
what they meant. `python script.py trainer.devices=N` starts the other processes itself; torchrun,
srun and mpirun work as well.

Of the {len(documented)} commands that NeMo-Aligner documents and tests,
{sum(row[-1] == "accepted" for row in documented)} are accepted as they are. The others:

{table(("Where", "Script", "Here"), told)}

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
    configurations = [name for name, keys in INERT.items() if keys]
    for config in configurations:
        for key, inert in sorted(INERT[config].items()):
            by_reason[of_any_job(inert.reason)][of_any_set(key)].add(config)
    rows = []
    for reason, keys in by_reason.items():
        files: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for key, configs in sorted(keys.items()):
            files[tuple(name for name in configurations if name in configs)].append(key)
        for configs, names in files.items():
            rows.append((code(names), some_of(configs, configurations), reason))
    values = grouped(
        (
            f"`{key}`",
            ", ".join(f"`{v}`" if v != "" else "(empty)" for v in accepted) or "no value",
            remedy,
        )
        for key, (accepted, remedy) in ONLY.items()
    )
    return f"""## YAML keys

NeMo-Aligner's keys are accepted; missing ones have the defaults of [Configuration](config.md). A
key that nobody knows is refused with the nearest known one (in other scripts than this package's
own: a warning).

Keys without effect; `<algorithm>` is that of the file, such as `ppo`, and `<set>` is `train_ds`,
`validation_ds` or `test_ds`. You get a warning if yours has a value that did something in
NeMo-Aligner:

{table(("Keys", "YAML files", "Why"), rows)}

Keys of which only these values are accepted:

{table(("Key", "Values", "Otherwise"), values)}"""


def of_any_job(text: str) -> str:
    """Keys of an algorithm's section under one name."""
    return re.sub(r"(?<=\.)(ppo|rs|reinforce|spin)(?=\.)", "<algorithm>", text)


def of_any_set(key: str) -> str:
    """Such a key, and one of the three sets of data."""
    return re.sub(r"(?<=\.)(train|validation|test)_ds(?=\.)", "<set>", of_any_job(key))


def names() -> str:
    """Python names and calls."""
    retired = grouped(
        (f"`{name}`", f"`{module}`", instead)
        for module, entries in RETIRED.items()
        for name, instead in entries.items()
    )
    changed = grouped(
        (f"`{where.partition(':')[2]}`", f"`{where.partition(':')[0]}`", instead)
        for where, instead in CHANGED_CALLS.items()
    )
    hooks = grouped((f"`{name}`", instead) for name, instead in RETIRED_HOOKS.items())
    absent = grouped(
        (f"`{name.removeprefix('nemo_aligner.')}`", what) for name, what in NOT_HERE.items()
    )
    return f"""## Names

Every public function, class and method of NeMo-Aligner's modules for PPO, rejection sampling, SFT
and reward models can be imported at its path, and its calls bind as they did
(`tests/unit/nemo_aligner_names.txt` is the list, with the arguments), except for those below.

Names that can be imported, with a warning, but cannot be used:

{table(("Name", "Module", "Instead"), retired)}

Calls that need another form:

{table(("Name", "Module", "Here"), changed)}

Methods of models that nothing calls. A class that overrides one is refused when it is defined:

{table(("Method", "Instead"), hooks)}

Optimizer and schedule are Megatron Core's: `optimizer.step()` takes no closure and
`scheduler.step(increment=1)` counts updates.

Modules and constants (after the colon) that are not here:

{table(("Below nemo_aligner", "It is"), absent)}"""


def recipes() -> str:
    """Optimizers, schedules, losses and forms of data by name."""
    optimizers = [(code(OPTIMIZERS), "supported")]
    optimizers.append((code(OTHER_OPTIMIZERS), "refused: Megatron Core has Adam and SGD only"))
    schedules = grouped((f"`{name}`", code(kind.keys)) for name, kind in SCHEDULES.items())
    no_schedules = [(f"`{name}`", f"refused: {why}") for name, why in OTHER_SCHEDULES.items()]
    data = [(f"`{name}`", holds) for name, holds in DATA_IMPLS.items()]
    no_data = [(f"`{name}`", f"refused: {remedy}") for name, remedy in OTHER_DATA_IMPLS.items()]
    return f"""## Optimizers, schedules, losses, data

{table(("`model.optim.name`", "Here"), optimizers)}

`model.optim.sched.name`:

{table(("Schedule", "Keys that it reads"), schedules + no_schedules)}

`model.regression.loss_func`: `regression`, the mean squared error, or for pairs with labels
{code(PREFERENCE_LOSSES)}.

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
            "in the folder of a job with exp_manager.resume_if_exists, or in "
            "exp_manager.resume_from_checkpoint",
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
    libraries = grouped(
        (f"`{name}`", f"`{each.reads}`", each.note)
        if each.reads
        else (f"`{name}`", "none", f"refused: {each.note}")
        for name, each in LIBRARIES.items()
    )
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
        schema.critic_resume_endpoint(),
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

NeMo-Aligner's clients work with these servers as they are: what it does not send is optional. They
know no lease and cut no requests: a critic that they train and save has
`trainer.ppo.require_lease=False`, and a larger `trainer.ppo.max_request_mb` if their updates have
more than 64 MiB. They know no token either: they use a server on their own machine, or through a
tunnel.

{table(("Endpoint", "Inputs", "Outputs"), rows)}

Clients of this package read what a server lists and send no more. Of a critic of NeMo-Aligner, or
a server written with PyTriton, which have less:

{table(("Missing", "What the client does"), missing)}"""


SECTIONS = (
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
    by_hand = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    return by_hand + "\n\n".join([MARK, *(section() for section in SECTIONS)]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"written: {PAGE}")
