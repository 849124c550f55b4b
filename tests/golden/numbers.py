# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What a job leaves, as numbers: read, stored, compared. Not with functions of the package."""

import hashlib
import itertools
import json
import math
import re
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

FOLDER = Path(__file__).parent / "numbers"
MACHINE, KIND = "machine", ("vendor_id", "cpu family", "model")
TIMED = re.compile(r"step|time|(timers|speed)/.*|.*_time|train/generate")
# Bounds of deviations. Beyond the first, checksums do not count, nor which of two rewards is the
# larger where a policy is its own reference, so that both are 0 but for rounding.
SAME_MACHINE, ELSEWHERE, BETWEEN_SPLITS = 0.0, 1e-6, 1e-5
# Ten times `ELSEWHERE` for what cancels, such as rewards, which are differences of log-probs of
# whole responses, up to fifty times as large; and for sums over all weights after several updates.
CANCELS = re.compile(
    "(rewards|values|advantages)_|margin|kl|correlation|distance|variance|ratio_max|grad_norm"
    "|actor_loss|train_optim/loss|sum, norm"
)
UNEQUAL = r".* sha256|(dpo.*|spin): train/acc"
LEFT_OUT = {
    SAME_MACHINE: re.compile("(?!)"),
    ELSEWHERE: re.compile(UNEQUAL),
    # what padding is computed; samples of the first rank's share
    BETWEEN_SPLITS: re.compile(rf"{UNEQUAL}|.*: tokens/.*|spin: train_samples.*"),
}


def machine() -> str:
    """The kind of CPU, torch, Megatron Core: where these are the same, numbers are, to the bit."""
    about = Path("/proc/cpuinfo").read_text()
    kind = [re.search(rf"^{key}\s*: (.*)", about, re.M) for key in KIND]
    words = [found[1] for found in kind if found]
    versions = [torch.__version__, version("megatron-core")]
    return " ".join([*words, torch.backends.cpu.get_cpu_capability(), *versions])


def numbers_of(folder: Path, prefix: str = "") -> dict:
    """The values of each metric, in their order; hashes of the samples; of each `.nemo`, a
    checksum, the norm, and a sum in which each place has a weight.
    """
    found: dict = {}
    for record in _lines(folder / "metrics.jsonl"):
        for name in filter(lambda name: not TIMED.fullmatch(name), record):
            found.setdefault(prefix + name, []).append(record[name])
    for file in sorted(folder.glob("*_samples.jsonl")):
        texts = sorted([sample["prompt"], sample["response"]] for sample in _lines(file))
        found[prefix + file.name] = hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]
    for file in sorted(folder.glob("checkpoints/*.nemo")):
        digest, total, squares = hashlib.sha256(), 0.0, 0.0
        for name, weight in sorted(read_weights(file).items()):
            values = weight.float().numpy().ravel()
            digest.update(name.encode() + values.tobytes())
            exact = values.astype(np.float64)
            total += float((exact * (1 + np.arange(exact.size) % 7)).sum())
            squares += float((exact**2).sum())
        found[f"{prefix}{file.name} sha256"] = digest.hexdigest()[:16]
        found[f"{prefix}{file.name} sum, norm"] = [total, math.sqrt(squares)]
    return found


def _lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def read_weights(nemo: Path) -> dict[str, torch.Tensor]:
    """All tensors of a `.nemo`, each as a whole, by their names in it."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(nemo) as tar:
            tar.extractall(folder, filter="data")
        reader = checkpoint.FileSystemReader(f"{folder}/model_weights")
        entries = reader.read_metadata().state_dict_metadata.items()
        tensors = [(n, e) for n, e in entries if isinstance(e, TensorStorageMetadata)]
        found = {name: torch.empty(e.size, dtype=e.properties.dtype) for name, e in tensors}
        checkpoint.load(found, storage_reader=reader, no_dist=True)
    return found


def differences(job: str, expected: dict, found: dict, bound: float) -> list[str]:
    """A line for each metric that differs by more than `bound`, about the value that does most."""
    lines = []
    for name in dict.fromkeys([*expected, *found]):
        if name == MACHINE or LEFT_OUT[bound].fullmatch(f"{job}: {name}"):
            continue
        pairs = list(itertools.zip_longest(*(_values(each, name) for each in (expected, found))))
        sizes = [_deviation(*pair) for pair in pairs]
        worst = max(range(len(pairs)), key=sizes.__getitem__)
        if sizes[worst] > bound * (10 if bound == ELSEWHERE and CANCELS.search(name) else 1):
            where = f"{name}, value {worst + 1} of {len(pairs)}"
            lines.append(f"{where}: {pairs[worst][0]} -> {pairs[worst][1]} ({sizes[worst]:.1e})")
    return lines


def _values(numbers: dict, name: str) -> list:
    value = numbers.get(name, "missing")
    return value if isinstance(value, list) else [value]


def _deviation(a, b) -> float:
    """|a - b| in units of |a|, or of 1 if that is more; infinite if one of them is NaN."""
    if a == b or (a != a and b != b):
        return 0.0
    numbers = isinstance(a, (int, float)) and isinstance(b, (int, float))
    deviation = abs(a - b) / max(1.0, abs(a)) if numbers else math.inf
    return math.inf if math.isnan(deviation) else deviation


def stored(job: str) -> dict:
    """Numbers of a job by split."""
    file = FOLDER / f"{job}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def store(job: str, splits: dict) -> None:
    """Write the numbers of a job, one a line."""
    parts = []
    for split, numbers in splits.items():
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in numbers.items()]
        parts.append(f"{json.dumps(split)}: {{\n" + ",\n".join(lines) + "\n}")
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{job}.json").write_text("{\n" + ",\n".join(parts) + "\n}\n")
