# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Write `requirements/*.lock`: the exact versions, with hashes, that `make` installs.

    python scripts/locks.py              after a change of setup.py: keeps what still fits
    python scripts/locks.py --upgrade    everything as new as setup.py allows

For each Python there are two: `py311.lock` is what users install, `py311-dev.lock` has the extras
`test`, `dev` and `docs` as well. `uv` resolves them, for Linux with glibc 2.35 (PyTriton's wheels
ask for it); no other interpreter needs to be there.

PyTorch is in none, nor are the CUDA libraries that it brings: which build of it a machine gets is
the machine's choice (`TORCH` in the Makefile). Nor is the extra `gpu`, which is compiled against
that build.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "requirements"
PYTHONS = ("3.10", "3.11", "3.12")
DEV_EXTRAS = ("test", "dev", "docs")
PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)", re.MULTILINE)
HEADER = "# Written by `make lock`. PyTorch and the CUDA libraries that it brings are left out.\n"
# PyTorch and its requirements for CUDA; triton, where nothing else asks for it. NeMo asks for
# cuda-bindings everywhere.
LEFT_OUT = re.compile(
    r"torch==|nvidia-(?!pytriton)|cuda-toolkit==|triton==[^#]*# via torch$", re.DOTALL
)


def lock_file(python: str, dev: bool = False) -> Path:
    """The lock of a Python version such as "3.11"."""
    return FOLDER / f"py{python.replace('.', '')}{'-dev' if dev else ''}.lock"


def pins(text: str) -> dict[str, str]:
    """The version of each package in a lock."""
    return dict(PIN.findall(text))


def compile_lock(python: str, dev: bool, upgrade: bool) -> str:
    """The text of a new lock; that of developers has the versions of that of users."""
    command = [
        *(sys.executable, "-m", "uv", "pip", "compile", "--quiet", "setup.py"),
        *("--python-version", python, "--python-platform", "x86_64-manylinux_2_35"),
        *("--generate-hashes", "--no-header", "--annotation-style", "line"),
    ]
    if dev:
        command += [part for extra in DEV_EXTRAS for part in ("--extra", extra)]
        command += ["--constraint", str(lock_file(python))]
    if upgrade:
        command += ["--upgrade"]
    with tempfile.TemporaryDirectory() as folder:
        new = Path(folder) / "new.lock"  # begins as the old one, whose versions are kept
        if lock_file(python, dev).exists():
            shutil.copy(lock_file(python, dev), new)
        subprocess.run([*command, "--output-file", str(new)], cwd=ROOT, check=True)
        entries = re.split(r"(?m)^(?=[a-z])", new.read_text())[1:]
    return HEADER + "".join(entry for entry in entries if not LEFT_OUT.match(entry.strip()))


def changes(before: str, after: str) -> list[str]:
    """What differs between two locks, a line each."""
    old, new = pins(before), pins(after)
    return [
        f"{name} {old.get(name, '(new)')} -> {new.get(name, '(gone)')}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write requirements/*.lock.")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    args = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    for python in PYTHONS:
        for dev in (False, True):
            file = lock_file(python, dev)
            before = file.read_text() if file.exists() else ""
            after = compile_lock(python, dev, args.upgrade)
            file.write_text(after)
            print(f"{file.relative_to(ROOT)}: {len(pins(after))} packages")
            if before:
                print("".join(f"    {line}\n" for line in changes(before, after)), end="")


if __name__ == "__main__":
    main()
