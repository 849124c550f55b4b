# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Time and memory of `python -m nemo_aligner.convert`, in both directions, beside a copy of the
same files.

    OMP_NUM_THREADS=1 python benchmarks/convert_speed.py --folder /tmp/convert

A folder in the shape of Llama 3.2 1B with random weights is made in `--folder`, which needs room
for five times its size. Each conversion runs in a process of its own; time and resident memory
count from the end of its imports. Files that are mapped into memory count as far as they were
read. The copy writes to the disk as the conversions do (`fsync`). Rates are bytes of weights per
second; the ratio is that of the copy's time to the conversion's. Rounds alternate, and the best
of each counts.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

SHAPE = dict(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    tie_word_embeddings=True,
)
SHARD_BYTES = 1_000_000_000
CHILD = """
import resource, sys, time
from pathlib import Path
from nemo_aligner.convert import conversions as convert
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start, cpu = time.perf_counter(), time.process_time()
options = convert.Options(dtype=sys.argv[4], overwrite=True, progress=False)
{"to": convert.to_nemo, "from": convert.from_nemo}[sys.argv[1]](
    Path(sys.argv[2]), Path(sys.argv[3]), options
)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(time.perf_counter() - start, time.process_time() - cpu, (peak - before) * 1024)
"""


def make_folder(folder: Path, layers: int) -> None:
    """Write the model, a few tensors at a time."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = LlamaConfig(**SHAPE | {"num_hidden_layers": layers}, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {
            name: tuple(tensor.shape)
            for name, tensor in LlamaForCausalLM(config).named_parameters()
        }
    shards, size = [{}], 0
    for name, shape in shapes.items():
        tensor = torch.randn(shape, dtype=torch.bfloat16)
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            _flush(folder, shards, save_file)
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    _flush(folder, shards, save_file)
    index = {"metadata": {}, "weight_map": {}}
    for number, names in enumerate(shards[:-1]):
        index["weight_map"] |= dict.fromkeys(names, f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _flush(folder: Path, shards: list, save_file) -> None:
    """Write the last shard and begin another."""
    save_file(shards[-1], folder / f"model-{len(shards) - 1}.safetensors", {"format": "pt"})
    shards[-1] = list(shards[-1])
    shards.append({})


def copy(source: Path, target: Path) -> float:
    """Seconds of a copy of the weights, to the disk."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    start = time.perf_counter()
    for file in source.glob("*.safetensors"):
        with open(file, "rb") as reader, open(target / file.name, "wb") as writer:
            shutil.copyfileobj(reader, writer, 1 << 24)
            os.fsync(writer.fileno())
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    return seconds


def convert(direction: str, source: Path, target: Path, dtype: str) -> tuple[float, float, float]:
    """Seconds, CPU seconds and peak bytes of one conversion."""
    shutil.rmtree(target, ignore_errors=True)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, direction, str(source), str(target), dtype],
        check=True,
        capture_output=True,
        text=True,
    )
    seconds, cpu, peak = map(float, done.stdout.split()[-3:])
    return seconds, cpu, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--folder", type=Path, required=True, help="to work in; emptied at the end"
    )
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    hf, nemo, back = (args.folder / name for name in ("hf", "model.nemo", "back"))
    make_folder(hf, args.layers)
    sizes = [file.stat().st_size for file in hf.glob("*.safetensors")]
    total, shard = sum(sizes), max(sizes)
    # Megatron Core's largest tensor of one layer
    layer = SHAPE["hidden_size"] * SHAPE["intermediate_size"] * 2 * 2
    bound = 1.3 * shard + layer
    best: dict[str, tuple[float, float, float]] = {}

    def note(name: str, found: tuple[float, float, float]) -> None:
        best[name] = min(best.get(name, found), found)

    for _ in range(args.rounds):
        note("copy", (copy(hf, args.folder / "copied"), 0.0, 0.0))
        note("hf-to-nemo, file", convert("to", hf, nemo, "as-stored"))
        note("nemo-to-hf", convert("from", nemo, back, "as-stored"))
        nemo.unlink()
        note("hf-to-nemo, folder", convert("to", hf, args.folder / "nemo", "as-stored"))
        note("nemo-to-hf, folder", convert("from", args.folder / "nemo", back, "as-stored"))
    shutil.rmtree(args.folder)
    print(f"{total / 1e9:.2f} GB in {len(sizes)} files, the largest {shard / 1e9:.2f} GB")
    print(f"bound of memory: {bound / 1e9:.2f} GB\n")
    print("| | seconds | CPU seconds | GB/s | ratio to the copy | peak, GB |")
    print("|---|---|---|---|---|---|")
    for name, (seconds, cpu, peak) in best.items():
        print(
            f"| {name} | {seconds:.1f} | {cpu:.1f} | {total / seconds / 1e9:.2f} | "
            f"{best['copy'][0] / seconds:.2f} | {peak / 1e9:.2f} |"
        )


if __name__ == "__main__":
    main()
