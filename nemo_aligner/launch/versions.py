# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether the installed packages are those that this project runs with.

Imports nothing heavy: it runs before everything else.
"""

import functools
import platform
import sys
from importlib import metadata

from nemo_aligner.parallel.environment import is_rank_zero

DISTRIBUTION = "nemo-aligner-mcore"


def unsupported() -> dict[str, str]:
    """What the packages of this environment violate of `setup.py`: each requirement, and what is
    there instead. Empty without an installed `nemo-aligner-mcore`, whose metadata hold the
    requirements.
    """
    # Here: whoever looks for missing packages (nemo_aligner/doctor/) may import this module.
    from packaging.requirements import Requirement
    from packaging.version import InvalidVersion

    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return {}
    found = {}
    for requirement in map(Requirement, lines):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue  # of an extra, or of another Python
        extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
        installed = installed_version(requirement.name)
        try:
            fits = installed and requirement.specifier.contains(installed, prereleases=True)
        except InvalidVersion:
            fits = False
        if not fits:
            there = f"installed: {installed}" if installed else "not installed"
            found[f"{requirement.name}{extras}{requirement.specifier}"] = there
    return found


def installed_version(name: str) -> str | None:
    """Version of an installed package; None also where only remains of one are left."""
    try:
        return metadata.version(name)
    except (metadata.PackageNotFoundError, KeyError, TypeError):
        return None


def versions() -> dict[str, str]:
    """What a run depends on, for its record."""
    names = (DISTRIBUTION, "torch", "megatron-core", "nemo_toolkit", "transformer-engine")
    found = {name: installed_version(name) for name in names}
    python = f"{platform.python_version()} on {platform.platform()}"
    return {"python": python} | {name: text for name, text in found.items() if text}


@functools.cache
def warn_of_unsupported_versions() -> None:
    """Rank 0 says on stderr, in one line, which packages are not those that this project was
    tested with.
    """
    wrong = unsupported()
    if wrong and is_rank_zero():
        needs = "; ".join(f"{wanted} ({there})" for wanted, there in wrong.items())
        names = " ".join(f"'{wanted}'" for wanted in wrong)
        print(
            f"WARNING: nemo_aligner needs {needs}. Remedy: pip install {names}",
            file=sys.stderr,
            flush=True,
        )
