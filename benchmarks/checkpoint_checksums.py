# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What the checksums of a checkpoint cost: share of a save, and of the load that compares them.

    OMP_NUM_THREADS=1 python benchmarks/checkpoint_checksums.py --folder /tmp/checkpoints

A model with random weights and its optimizer are saved and loaded as a job does it, in one
process. Seconds are CPU seconds of the process: of saves with checksums and, in turns, of saves in
which they are not computed; those of the checksums alone are measured around each block. Beside
it, the same for a file that is written as fast as possible, with checksums of whole tensors and of
the blocks that a checkpoint has. `--folder` needs room for three times the checkpoint.
"""

import argparse
import contextlib
import io
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

MODEL = {
    "num_layers": 8,
    "hidden_size": 768,
    "ffn_hidden_size": 3072,
    "num_attention_heads": 12,
    "max_position_embeddings": 128,
    "encoder_seq_length": 128,
    "make_vocab_size_divisible_by": 8,
    "tokenizer": {"library": "huggingface"},
    "precision": 32,
    "micro_batch_size": 1,
    "global_batch_size": 1,
    "seed": 1,
    "optim": {"name": "distributed_fused_adam", "lr": 1e-4, "sched": {"warmup_steps": 1}},
}


class NoHash:
    """In place of a hash; computes nothing."""

    def __init__(self, data: bytes = b"") -> None:
        pass

    def update(self, data: Any) -> None:
        pass

    def hexdigest(self) -> str:
        return "0" * 32


class TimedHash:
    """A hash that adds up the CPU seconds that it takes."""

    seconds = 0.0
    make: Any = None

    def __init__(self, data: bytes = b"") -> None:
        self.inner = TimedHash.make(data)

    def update(self, data: Any) -> None:
        start = time.thread_time()
        self.inner.update(data)
        TimedHash.seconds += time.thread_time() - start

    def hexdigest(self) -> str:
        return self.inner.hexdigest()


def plain_writes(folder: Path, rounds: int) -> None:
    """Print the least CPU seconds in which tensors of 9 MB, 0.45 GB together, are written to a
    file: without checksums, with those of whole tensors, and by blocks (`checksums._Stream`).
    """
    from nemo_aligner.checkpoint import checksums

    tensors = [memoryview(torch.rand(2359296).numpy()).cast("B") for _ in range(48)]
    found: dict[str, list[float]] = {"no checksums": [], "whole tensors": [], "blocks": []}
    path = folder / "plain"
    for _ in range(rounds):
        for kind, seconds in found.items():
            start = time.process_time()
            with contextlib.ExitStack() as stack:
                stream = stack.enter_context(checksums._Stream(path, lambda error: None))
                raw = stream if kind == "blocks" else stack.enter_context(path.open("wb", 0))
                file = stack.enter_context(io.BufferedWriter(raw, 1 << 20))
                for tensor in tensors:
                    if kind == "whole tensors":
                        stream.hash.update(tensor)
                    file.write(tensor)
            seconds.append(time.process_time() - start)
            path.unlink()
    print("a file of 0.45 GB: " + ", ".join(f"{k} {min(v):.3f} s" for k, v in found.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    import countdown
    import xxhash

    from nemo_aligner.checkpoint import checksums
    from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
    from nemo_aligner.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel

    TimedHash.make = xxhash.xxh3_128
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    cfg = OmegaConf.create(MODEL)
    countdown.write_tokenizer(options.folder / "tokenizer")
    cfg.tokenizer.type = str(options.folder / "tokenizer")
    model = MegatronGPTModel(cfg)
    optimizer, scheduler = model.setup_megatron_optimization(max_steps=10)
    callback = CheckpointCallback(options.folder, model, optimizer, scheduler, name="x")
    plain_writes(options.folder, options.rounds)
    saves: dict[Any, list[float]] = {NoHash: [], TimedHash.make: [], TimedHash: []}
    shares, loads, compares = [], [], []
    for step in range(3 * options.rounds):
        kind = list(saves)[step % 3]
        TimedHash.seconds = 0.0
        checksums.xxhash.xxh3_128 = kind
        start = time.process_time()
        folder = callback.custom_save({"step": step}, trainer_state={"step": step})
        saves[kind].append(time.process_time() - start)
        checksums.xxhash.xxh3_128 = TimedHash.make
        if kind is NoHash:
            continue
        if kind is TimedHash:
            shares.append(TimedHash.seconds / saves[kind][-1])
        start = time.process_time()
        callback.load_latest()
        loads.append(time.process_time() - start)
        start = time.process_time()
        checksums.check_files_together(folder)
        compares.append(time.process_time() - start)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    median = statistics.median
    print(f"checkpoint of {size / 1e9:.2f} GB, {torch.get_num_threads()} thread(s)")
    print(
        f"save {median(saves[TimedHash.make]):.2f} s (least {min(saves[TimedHash.make]):.2f}), "
        f"without checksums {median(saves[NoHash]):.2f} s (least {min(saves[NoHash]):.2f}); "
        f"checksums {100 * median(shares):.1f} % of a save"
    )
    print(f"load {median(loads):.2f} s, of which comparing {median(compares):.2f} s")
    shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
