# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Certificates for tests of servers that encrypt."""

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificate(folder: Path, name: str = "server") -> tuple[str, str]:
    """Files of a certificate for this machine that signs itself, and of its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates")
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        "-subj /CN=localhost -addext subjectAltName=IP:127.0.0.1,DNS:localhost".split()
        + ["-out", str(certificate), "-keyout", str(key)],
        check=True,
        capture_output=True,
    )
    key.chmod(0o600)
    return str(certificate), str(key)
