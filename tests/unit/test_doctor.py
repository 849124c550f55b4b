# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m nemo_aligner.doctor`: what each check says of what it finds, and the command."""

import errno
import importlib
import os
import re
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest

from nemo_aligner import doctor
from nemo_aligner.doctor import MISSING, OK, WARNING, Finding, summary
from nemo_aligner.launch import start_up
from nemo_aligner.servers import triton_environment

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
MB, GB = 2**20, 2**30


def says(finding, status, words=""):
    """Whether a finding has this status, these words, and a remedy if one is needed."""
    assert finding.status == status, finding
    assert re.search(words, finding.line()), finding
    assert bool(finding.remedy) == (status != OK), finding
    assert "\n" not in finding.line()


# ---------------------------------------------------------------------------------------- packages


LINUX = "Linux", "x86_64"
UNLIMITED = doctor.resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("check", "given", "status", "words"),
    [
        (doctor.python, [(3, 9, 18)], MISSING, ""),
        (doctor.python, [(3, 10, 0)], OK, ""),
        (doctor.python, [(3, 12, 9)], OK, ""),
        (doctor.python, [(3, 13, 0)], MISSING, ""),
        (doctor.c_library, [*LINUX, ("glibc", "2.100")], OK, ""),
        (doctor.c_library, [*LINUX, ("glibc", "2.31")], MISSING, ""),
        (doctor.c_library, [*LINUX, ("", "")], MISSING, ""),  # musl
        (doctor.c_library, ["Darwin", "x86_64", ("", "")], MISSING, ""),
        (doctor.clock, (2026, 0.001), OK, "2026"),
        (doctor.clock, (1970, 0.0), WARNING, "1970"),
        (doctor.clock, (2026, -3600.0), WARNING, "-3600.00 s"),
        (doctor.memory, [0], WARNING, ""),
        (doctor.memory, [GB // 2], MISSING, ""),
        (doctor.memory, [2 * GB], WARNING, ""),
        (doctor.memory, [9 * GB], OK, ""),
        (doctor.cores, [1], WARNING, ""),
        (doctor.open_files, [(1024, 524288)], OK, ""),
        (doctor.open_files, [(512, 524288)], WARNING, ""),
        (doctor.open_files, [(64, 64)], MISSING, ""),
        (doctor.open_files, [(UNLIMITED, UNLIMITED)], OK, ""),
    ],
)
def test_what_a_value_means(check, given, status, words):
    says(check(*given), status, words)


def test_pythons_are_those_of_setup_py():
    first, end = (".".join(map(str, version)) for version in doctor.PYTHONS)
    assert f'python_requires=">={first},<{end}"' in (ROOT / "setup.py").read_text()


def test_libpython(monkeypatch):
    monkeypatch.setattr(triton_environment, "find_libpython", lambda: None)
    says(doctor.libpython(), MISSING, r"shared library libpython.*\. Use a Python built with")
    monkeypatch.setattr(triton_environment, "find_libpython", lambda: "/opt/lib")
    says(doctor.libpython(), OK, "/opt/lib")


def test_the_c_library_is_that_of_the_installed_wheel():
    from importlib import metadata

    wheel = metadata.distribution("nvidia-pytriton").read_text("WHEEL")
    assert "manylinux_{}_{}_".format(*doctor.GLIBC) in wheel


@pytest.fixture
def faked(monkeypatch):
    """Packages with these versions; a module that is an error does not import."""

    def fake(modules, installed):
        def import_module(name):
            if isinstance(modules.get(name), Exception):
                raise modules[name]
            return modules.get(name)

        monkeypatch.setattr(importlib, "import_module", import_module)
        monkeypatch.setattr(start_up, "installed_version", installed.get)

    return fake


BROKEN = OSError("/transformer_engine/libtransformer_engine.so: undefined symbol\nmore")
TORCH = "torch<2.14,>=2.6"


@pytest.mark.parametrize(
    ("error", "installed", "wrong", "status", "words"),
    [
        (ImportError(), None, "not installed", MISSING, f"not installed. pip install '{TORCH}'"),
        (OSError("no"), "2.13.0", "", MISSING, r"not import \(OSError: no\).*--force"),
        (BROKEN, "2.13.0", "", MISSING, "undefined symbol.*that fits this torch.*pip uninstall"),
        (None, "2.5.0", "installed: 2.5.0", WARNING, f"2.5.0;.*pip install '{TORCH}'"),
        (None, "2.13.0", "", OK, "2.13.0"),
    ],
)
def test_a_package(faked, error, installed, wrong, status, words):
    faked({"torch": error}, {"torch": installed})
    wrong = {"torch": f"{TORCH} ({wrong})"} if wrong else {}
    says(doctor.imported("torch", wrong), status, words)


def test_requirements_without_a_line_of_their_own(monkeypatch):
    found = {"numpy<3": "installed: 3.1", "psutil>=5.9": "not installed"}
    found["rich>=13"] = "installed: 1"
    monkeypatch.setattr(start_up, "unsupported", lambda: found)
    missing, other = doctor.others(doctor.unsupported())
    says(missing, MISSING, "psutil +not installed. pip install 'psutil>=5.9'")
    says(other, WARNING, "rich +installed: 1. pip install 'rich>=13'")
    (fine,) = doctor.others({"numpy": "numpy<3 (installed: 3.1)"})
    says(fine, OK)


def test_an_installation_without_metadata(monkeypatch):
    monkeypatch.setattr(start_up, "DISTRIBUTION", "not-installed-at-all")
    (finding,) = doctor.others(doctor.unsupported())
    says(finding, WARNING, "not-installed-at-all is not installed.*pip install .")


def fake_torch(build, names=(), error=None):
    def is_available():
        if error:
            raise error
        return bool(names)

    device = types.SimpleNamespace(is_available=is_available, get_device_name=names.__getitem__)
    device.device_count = lambda: len(names)
    return types.SimpleNamespace(version=types.SimpleNamespace(cuda=build), cuda=device)


@pytest.mark.parametrize(
    ("torch", "gpu_there", "status", "words"),
    [
        (fake_torch("13.0", ("H200", "H200")), True, OK, "13.0, 2 x H200"),
        (fake_torch(None), False, OK, "on the CPU"),
        (None, False, OK, "on the CPU"),
        (fake_torch(None), True, WARNING, "build of torch with CUDA"),
        (fake_torch("13.0", error=RuntimeError("x")), True, WARNING, "new enough for CUDA 13"),
    ],
)
def test_cuda(monkeypatch, torch, gpu_there, status, words):
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: name if gpu_there else None)
    gpus = doctor.gpu_names(torch) if torch else []
    says(doctor.cuda(torch, gpus), status, words)


def test_transformer_engine_and_apex(monkeypatch, faked):
    says(doctor.transformer_engine(gpu=False), OK, "not needed")
    there = []
    find_spec = lambda name: True if name in there else None  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    says(doctor.transformer_engine(gpu=True), WARNING, "not installed")
    says(doctor.apex(), OK, "not installed")
    there += ["transformer_engine", "fused_weight_gradient_mlp_cuda"]
    faked({"transformer_engine.pytorch": ImportError("undefined symbol")}, {})
    says(doctor.transformer_engine(gpu=True), MISSING, "undefined symbol")
    faked({}, {"transformer-engine": "2.10.0"})
    says(doctor.transformer_engine(gpu=True), OK, "2.10.0")
    says(doctor.apex(), OK, " installed")


# ----------------------------------------------------------------------------------------- machine


def test_ports(monkeypatch):
    says(doctor.ports(), OK, r"127.0.0.1:\d+ is free")

    def refuse(*_args, **_options):
        raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))

    monkeypatch.setattr(socket, "create_connection", refuse)
    says(doctor.ports(), MISSING, "Cannot assign requested address")


@pytest.mark.parametrize(
    ("addresses", "status"),
    [(["127.0.0.1", "::1"], OK), (["10.0.0.1"], WARNING), (socket.gaierror(-2, "no"), WARNING)],
)
def test_localhost(monkeypatch, addresses, status):
    def getaddrinfo(_host, _port):
        if isinstance(addresses, Exception):
            raise addresses
        return [(None, None, None, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    says(doctor.name_of_this_machine(), status)


@pytest.mark.parametrize(("free", "status"), [(10 * MB, MISSING), (GB, WARNING), (80 * GB, OK)])
def test_disk(monkeypatch, tmp_path, free, status):
    found = types.SimpleNamespace(total=100 * GB, free=free)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _path: found)
    says(doctor.disk("runs", tmp_path, "Name another one"), status, "100.00 GiB")
    assert not list(tmp_path.iterdir())


def test_folders_that_cannot_be_written(monkeypatch, tmp_path):
    def refuse(dir):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    says(doctor.disk("runs", tmp_path / "none", "Name another one"), MISSING, "No such file")
    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    says(doctor.disk("runs", tmp_path, "Name another one"), MISSING, "Read-only file system")


def test_temporary_folders(monkeypatch, tmp_path):
    (finding,) = doctor.temporary_folders()
    assert finding.status in (OK, WARNING)
    monkeypatch.setattr(doctor.tempfile, "gettempdir", lambda: f"{tmp_path}/{'long' * 10}")
    assert "/tmp" in list(doctor.temporary_folders())[-1].text
    blocks = {"f_blocks": 9 * GB, "f_bfree": 8 * GB, "f_bavail": 8 * GB, "f_frsize": 1}
    flags = types.SimpleNamespace(f_flag=os.ST_NOEXEC, **blocks)
    monkeypatch.setattr(os, "statvfs", lambda _path: flags)
    says(list(doctor.temporary_folders())[-1], MISSING, "noexec.*TMPDIR")

    def none():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(doctor.tempfile, "gettempdir", none)
    (finding,) = doctor.temporary_folders()
    says(finding, MISSING, "No usable temporary directory")


def test_a_jump_of_the_clock_is_measured(monkeypatch):
    times = iter([1000.0, 1060.0])
    monkeypatch.setattr(doctor.time, "time", lambda: next(times))
    assert doctor.measure_clocks()[1] == pytest.approx(60, abs=5)


def test_the_control_group_limits_memory(monkeypatch, tmp_path):
    assert doctor.available_memory() > 0
    monkeypatch.setattr(doctor, "MEMORY_LIMIT", tmp_path / "memory.max")
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert doctor.available_memory() == 3000
    (tmp_path / "memory.max").write_text("max\n")
    assert doctor.available_memory() > 5000


# ----------------------------------------------------------------------------------------- command


def test_summary():
    ok, warned = Finding(OK, "a", "b"), Finding(WARNING, "c", "d", "e")
    missing = Finding(MISSING, "f", "g", "h")
    assert summary([ok]) == "All jobs can run here."
    assert summary([ok, warned]) == "All jobs can run here (warnings: c)."
    assert summary([ok, warned, missing]) == "Jobs cannot run here: see f."


def run(tmp_path, *command):
    command = [sys.executable, *command, tmp_path / "runs"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    options = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, env=environment, **options)
    lines = done.stdout.splitlines()
    assert lines[-2] == ""
    return done, dict(zip([line[9:29].strip() for line in lines], lines, strict=True))


def test_the_command_on_this_machine(tmp_path):
    done, lines = run(tmp_path, "-m", "nemo_aligner.doctor")
    missing = [line for line in lines.values() if line.startswith("missing")]
    assert done.returncode == bool(missing), done.stdout
    assert not any(line.startswith("missing") for name, line in lines.items() if "/" not in name)
    assert done.stderr == ""
    assert str(tmp_path) in lines["folder of the runs"]
    assert len(lines) >= 20


def test_the_command_runs_without_any_package(tmp_path):
    done, lines = run(tmp_path, "-S", "-m", "nemo_aligner.doctor")  # -S: no site-packages
    assert done.returncode == 1, done.stderr
    for name in ("numpy", "torch", "megatron-core", "nvidia-pytriton", "packaging"):
        assert lines[name].startswith("missing") and "pip install" in lines[name]
    assert lines["Python"].startswith("ok") and "cores" in lines
    assert done.stderr == ""
    assert "Jobs cannot run here: see " in done.stdout
