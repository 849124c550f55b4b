# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What the checksums of a checkpoint cost: share of a save, and of the load that compares them.

    OMP_NUM_THREADS=1 python benchmarks/checkpoint_checksums.py --folder /tmp/checkpoints

A model with random weights and its optimizer are saved and loaded as a job does it, in one
process. Seconds are those of the wall clock; those of the checksums are measured inside the save,
around each block that is written. `--folder` needs room for three times the checkpoint.
"""

import argparse
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


class TimedHash:
    """A hash that adds up the seconds that it takes."""

    seconds = 0.0
    make: Any = None

    def __init__(self, data: bytes = b"") -> None:
        self.inner = TimedHash.make(data)

    def update(self, data: Any) -> None:
        start = time.perf_counter()
        self.inner.update(data)
        TimedHash.seconds += time.perf_counter() - start

    def hexdigest(self) -> str:
        return self.inner.hexdigest()


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
    shares, saves, loads, compares = [], [], [], []
    for step in range(options.rounds):
        TimedHash.seconds = 0.0
        checksums.xxhash.xxh3_128 = TimedHash
        start = time.perf_counter()
        folder = callback.custom_save({"step": step}, trainer_state={"step": step})
        saves.append(time.perf_counter() - start)
        shares.append(TimedHash.seconds / saves[-1])
        checksums.xxhash.xxh3_128 = TimedHash.make
        start = time.perf_counter()
        callback.load_latest()
        loads.append(time.perf_counter() - start)
        start = time.perf_counter()
        checksums.check_files_together(folder)
        compares.append(time.perf_counter() - start)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    median = statistics.median
    print(f"checkpoint of {size / 1e9:.2f} GB, {torch.get_num_threads()} thread(s)")
    print(f"save {median(saves):.2f} s, of which checksums {100 * median(shares):.1f} %")
    print(f"load {median(loads):.2f} s, of which comparing {median(compares):.2f} s")
    shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
