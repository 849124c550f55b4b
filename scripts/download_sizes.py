# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What an installation downloads, by package; docs/jobs.md has the sums.

    python scripts/download_sizes.py requirements/py311.lock 'torch==2.13.0' --top 12

Asks pip which files it would fetch into an empty environment and an index for their sizes; nothing
is installed. A requirement after the lock is added, such as the PyTorch of a machine.
"""

import argparse
import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from urllib.parse import unquote, urlparse


def files(requirements: list[str]) -> dict[str, str]:
    """The address of the file of each package."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
    command += ["--quiet", "--report", "-", *requirements]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return {
        f"{item['metadata']['name']} {item['metadata']['version']}": item["download_info"]["url"]
        for item in json.loads(done.stdout)["install"]
    }


def size(url: str) -> int:
    """Bytes of a file."""
    parts = urlparse(url)
    if parts.scheme == "file":
        return Path(unquote(parts.path)).stat().st_size
    request = urllib.request.Request(url, method="HEAD")
    with urllib.request.urlopen(request, timeout=60) as reply:
        return int(reply.headers["Content-Length"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("lock", type=Path, help="a file of exact versions, as in requirements/")
    parser.add_argument("requirements", nargs="*", help="packages beside it, such as a PyTorch")
    parser.add_argument("--top", type=int, default=12, help="packages to list (%(default)s)")
    args = parser.parse_args()
    # Without hashes: pip would ask for one of the added requirements too.
    lines = [line.split(" \\")[0] for line in args.lock.read_text().splitlines() if "==" in line]
    found = {name: size(url) for name, url in files([*lines, *args.requirements]).items()}
    ranked = sorted(found.items(), key=lambda item: -item[1])
    print(f"{sum(found.values()) / 1e6:.0f} MB in {len(found)} packages")
    for name, count in ranked[: args.top]:
        print(f"| {name} | {count / 1e6:.0f} |")


if __name__ == "__main__":
    main()
