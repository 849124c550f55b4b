# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The keys of all jobs as tables, taken from `jobs.py`.

* `LIVE[name]`: dotted keys that have an effect in the jobs of configuration `name`. Keys of NeMo
  and NeMo-Aligner that no longer act are in `inert_keys.py`.
* `FREE`: prefixes below which any key goes.
* `ARCHITECTURE_KEYS`, `FLAGS`, `REQUIRED`: keys of section `model` whose null means "as in the
  checkpoint", keys whose value is True or False, and other keys that must have a value.
"""

from nemo_aligner.config.jobs import JOBS

# Of the commands that use a trained policy, with the page of docs/ that explains their keys.
COMMAND_PAGES = {
    "generate": "generate_evaluate",
    "evaluate": "generate_evaluate",
    "compute_topk_logits": "distillation",
    "inference_teacher": "distillation",
}
COMMAND_NAMES = tuple(COMMAND_PAGES)
CONFIG_NAMES = tuple(name for name in JOBS if name not in COMMAND_PAGES)

_OF_JOB = {
    name: {key.name: key for key in job.keys.values() if key.acts} for name, job in JOBS.items()
}
_ALL = {key.name: key for keys in _OF_JOB.values() for key in keys.values()}

LIVE = {name: frozenset(keys) for name, keys in _OF_JOB.items()}
FREE = tuple(name for name, key in _ALL.items() if key.free)
FLAGS = frozenset(name for name, key in _ALL.items() if key.kind is bool)
REQUIRED = {
    name: frozenset(key.name for key in keys.values() if not key.nullable and key.kind is not bool)
    for name, keys in _OF_JOB.items()
}
ARCHITECTURE_KEYS = tuple(
    sorted(name.removeprefix("model.") for name, key in _ALL.items() if key.of_checkpoint)
)


def dotted(prefix: str, names: str) -> set[str]:
    """Dotted keys: `dotted("a.b", "c d.e")` is `{"a.b.c", "a.b.d.e"}`."""
    return {f"{prefix}.{name}" for name in names.split()}
