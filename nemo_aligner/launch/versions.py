# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether the installed packages are those that this project runs with.

Imports nothing heavy: it runs before everything else.
"""

import functools
import sys
from importlib import metadata

from packaging.requirements import Requirement

from nemo_aligner.parallel.environment import is_rank_zero

DISTRIBUTION = "nemo-aligner-mcore"


def unsupported() -> list[str]:
    """What the packages of this environment violate of `setup.py`, as one requirement with the
    installed version each; empty without an installed `nemo-aligner-mcore`, whose metadata hold
    the requirements.
    """
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return []
    found = []
    for requirement in map(Requirement, lines):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue  # of an extra, or of another Python
        wanted = f"{requirement.name}{requirement.specifier}"
        try:
            installed = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            found.append(f"{wanted} (not installed)")
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            found.append(f"{wanted} (installed: {installed})")
    return found


@functools.cache
def warn_of_unsupported_versions() -> None:
    """Rank 0 says on stderr, in one line, which packages are not those that this project was
    tested with.
    """
    wrong = unsupported()
    if wrong and is_rank_zero():
        names = " ".join(f"'{entry.split(' (')[0]}'" for entry in wrong)
        print(
            f"WARNING: nemo_aligner needs {'; '.join(wrong)}. Remedy: pip install {names}",
            file=sys.stderr,
            flush=True,
        )
