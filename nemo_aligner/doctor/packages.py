# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Python, the packages of `setup.py`, CUDA, and what jobs on GPUs use beside them."""

import importlib
import importlib.util
import logging
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from types import ModuleType

from nemo_aligner.core.errors import UserError
from nemo_aligner.doctor import MISSING, OK, WARNING, Finding
from nemo_aligner.launch import start_up
from nemo_aligner.servers.ports import check_libpython

PYTHONS = ((3, 10), (3, 13))  # the first, and the first that is too new; as in setup.py
GLIBC = (2, 35)  # of the wheels of PyTriton 0.7
# Packages with a line of their own, by the imported module; later ones import earlier ones.
IMPORTED = {
    "numpy": "numpy",
    "torch": "torch",
    "megatron-core": "megatron.core",
    "nvidia-pytriton": "pytriton",
}
MAKE = "Install Python 3.10, 3.11 or 3.12 and name it: make PYTHON=python3.11"


def find() -> Iterator[Finding]:
    """All findings, in the order in which they depend on each other."""
    yield python(sys.version_info[:3])
    yield libpython()
    yield c_library(platform.system(), platform.machine(), platform.libc_ver())
    wrong = unsupported()
    for package in IMPORTED:
        yield imported(package, wrong)
    yield from others(wrong)
    torch = sys.modules.get("torch")
    gpus = gpu_names(torch) if torch is not None else []
    yield cuda(torch, gpus)
    yield transformer_engine(bool(gpus))
    yield apex()


def python(version: tuple[int, ...]) -> Finding:
    """Whether packages exist for this Python."""
    text = f"{'.'.join(map(str, version))} ({sys.executable})"
    if PYTHONS[0] <= version < PYTHONS[1]:
        return Finding(OK, "Python", text)
    return Finding(MISSING, "Python", f"{text}; 3.10 to 3.12 are needed", MAKE)


def libpython() -> Finding:
    """Whether Triton's process for a model can load this Python."""
    try:
        return Finding(OK, "libpython", check_libpython())
    except UserError as error:
        text, _, remedy = str(error).partition(". ")
        return Finding(MISSING, "libpython", text, remedy)


def c_library(system: str, machine: str, libc: tuple[str, str]) -> Finding:
    """Whether PyTriton has a wheel for this system and C library (empty: not known)."""
    text = f"{system} {machine}, {libc[0] or 'C library'} {libc[1] or 'not known'}"
    needed = f"PyTriton has wheels for Linux with glibc {GLIBC[0]}.{GLIBC[1]} or later"
    numbers = tuple(int(number) for number in re.findall(r"\d+", libc[1])[:2])
    if system == "Linux" and libc[0] == "glibc" and numbers >= GLIBC:
        return Finding(OK, "system", text)
    remedy = "Use Ubuntu 22.04, Debian 12 or newer, or a container (Dockerfile)"
    return Finding(MISSING, "system", f"{text}; {needed}", remedy)


def unsupported() -> dict[str, str]:
    """By package: "numpy" -> "numpy<3 (installed: 3.1)"; without `packaging` that one alone."""
    try:
        found = start_up.unsupported()
    except ImportError:
        return {"packaging": "packaging (not installed)"}
    return {
        re.match(r"[\w.-]+", wanted).group(): f"{wanted} ({there})"  # type: ignore[union-attr]
        for wanted, there in found.items()
    }


def imported(package: str, wrong: dict[str, str]) -> Finding:
    """Whether a package is there, can be imported and has the right version."""
    wanted = wrong.get(package, package).split(" (")[0]
    version = start_up.installed_version(package)
    try:
        # What libraries say at their import, as of a missing CUDA, has a finding of its own here.
        logging.disable(logging.WARNING)
        importlib.import_module(IMPORTED[package])
    except Exception as error:  # whatever a package that is broken raises
        there = f"{version} does not import ({_first_line(error)})" if version else "not installed"
        if isinstance(error, OSError) and "transformer_engine" in str(error):
            return Finding(MISSING, package, there, BROKEN_ENGINE)
        again = "--force-reinstall " * bool(version)
        return Finding(MISSING, package, there, f"pip install {again}'{wanted}'")
    finally:
        logging.disable(logging.NOTSET)
    if package in wrong:
        text = f"{version}; the tests ran with {wanted}"
        return Finding(WARNING, package, text, f"pip install '{wanted}'")
    return Finding(OK, package, version or "without a version")


def others(wrong: dict[str, str]) -> Iterator[Finding]:
    """The other requirements of `setup.py`: what is missing or has another version."""
    rest = {name: text for name, text in wrong.items() if name not in IMPORTED}
    for name, text in rest.items():
        wanted, _, there = text.removesuffix(")").partition(" (")
        status = MISSING if there == "not installed" else WARNING
        yield Finding(status, name, there, f"pip install '{wanted}'")
    if not rest and start_up.installed_version(start_up.DISTRIBUTION) is None:
        text = f"{start_up.DISTRIBUTION} is not installed, so its requirements are not known"
        yield Finding(WARNING, "other packages", text, "pip install . in the repository")
    elif not rest:
        yield Finding(OK, "other packages", "as setup.py asks")


def gpu_names(torch: ModuleType) -> list[str]:
    try:
        if not torch.cuda.is_available():
            return []
        return [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    except Exception:  # a driver that does not fit
        return []


def cuda(torch: ModuleType | None, gpus: list[str]) -> Finding:
    """Whether torch can use the GPUs of this machine."""
    if gpus:
        return Finding(OK, "CUDA", f"{torch.version.cuda}, {len(gpus)} x {gpus[0]}")  # type: ignore[union-attr]
    if not (os.path.exists("/dev/nvidiactl") or shutil.which("nvidia-smi")):
        return Finding(OK, "CUDA", "no NVIDIA GPU: jobs run on the CPU")
    build = torch.version.cuda if torch is not None else None
    text = "torch cannot use this machine's GPU: jobs run on the CPU"
    if build is None:
        return Finding(WARNING, "CUDA", text, "Install a build of torch with CUDA")
    remedy = f"See that nvidia-smi lists it and that its driver is new enough for CUDA {build}"
    return Finding(WARNING, "CUDA", text, remedy)


BROKEN_ENGINE = (
    "Install the release of Transformer Engine that fits this torch (docs/jobs.md), or remove "
    "it: pip uninstall transformer-engine"
)


def transformer_engine(gpu: bool) -> Finding:
    subject, remedy = "Transformer Engine", "pip install --no-build-isolation '.[gpu]'"
    if not gpu:
        return Finding(OK, subject, "not needed without a GPU")
    if importlib.util.find_spec("transformer_engine") is None:
        text = "not installed: jobs use PyTorch's layers, as on a CPU"
        return Finding(WARNING, subject, text, remedy)
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:
        # A job takes it where it is installed.
        return Finding(MISSING, subject, f"does not import ({_first_line(error)})", BROKEN_ENGINE)
    return Finding(OK, subject, start_up.installed_version("transformer-engine") or "there")


def apex() -> Finding:
    """Whether the one kernel of it that jobs can use is there."""
    there = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    text = "only model.gradient_accumulation_fusion uses it"
    return Finding(OK, "apex", f"{'installed' if there else 'not installed'}; {text}")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
