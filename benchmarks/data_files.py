# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Time and memory of opening a data file: the first start, which reads and tokenizes every record,
and the second.

    OMP_NUM_THREADS=1 python benchmarks/data_files.py --folder /tmp/data

Files of prompts with responses are written in `--folder`, which needs room for about four times
`--megabytes`. Each start runs in a process of its own, builds the SFT dataset and reads 1000
random examples; with `--tokenize` it counts the tokens of every example, as for packed sequences.
Seconds are of the CPU, and they and the memory count from the end of the imports. The memory is
the peak of what is resident: mapped files count as far as they were read.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

CHILD = """
import random, sys, time
from pathlib import Path
import datasets.table, pyarrow.parquet  # imports are not counted
from nemo.collections.common.tokenizers import AutoTokenizer
from nemo_aligner.data.nlp.sft import SFTDataset

def peak():  # getrusage would count the process that started this one
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

tokenizer = AutoTokenizer(pretrained_model_name=sys.argv[2])
tokenizer.text_to_ids("x")
before, start = peak(), time.process_time()
dataset = SFTDataset([sys.argv[1]], tokenizer, 4096, keep_lengths=sys.argv[3] == "tokenize")
seconds, opened = time.process_time() - start, peak() - before
for index in random.Random(0).sample(range(len(dataset)), 1000):
    dataset[index]
print(len(dataset), seconds, opened, peak() - before)
"""


def make_tokenizer(folder: Path, texts: list[str]) -> None:
    """A byte-level BPE of 2000 tokens, in Hugging Face's form."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(["<end>"])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def examples(megabytes: int):
    """Prompts with responses, about `megabytes` of them."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(3000)]
    size = 0
    while size < megabytes * 1_000_000:
        texts = [" ".join(rng.choices(words, k=rng.randint(20, 120))) for _ in range(2)]
        size += sum(map(len, texts)) + 27
        yield {"input": texts[0], "output": texts[1]}


def make_files(folder: Path, megabytes: int) -> dict[str, Path]:
    """The same examples as jsonl, gzip, and parquet in a single row group."""
    import gzip

    import pyarrow as pa
    import pyarrow.parquet as pq

    names = {kind: folder / f"{megabytes}.{kind}" for kind in ("jsonl", "jsonl.gz", "parquet")}
    rows = list(examples(megabytes))
    with names["jsonl"].open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    with names["jsonl"].open("rb") as source, gzip.open(names["jsonl.gz"], "wb", 1) as target:
        shutil.copyfileobj(source, target)
    pq.write_table(pa.Table.from_pylist(rows), names["parquet"], row_group_size=len(rows))
    return names


def start(path: Path, tokenizer: Path, how: str) -> list[float]:
    """What one start prints: examples, seconds, and the peak in KiB before and after reading."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, str(path), str(tokenizer), how],
        check=True,
        capture_output=True,
        text=True,
    )
    return [float(number) for number in done.stdout.split()[-4:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--folder", type=Path, required=True, help="to work in; emptied at the end"
    )
    parser.add_argument("--megabytes", type=int, nargs="+", default=[50, 400])
    parser.add_argument("--tokenize", action="store_true")
    args = parser.parse_args()
    shutil.rmtree(args.folder, ignore_errors=True)
    tokenizer = args.folder / "tokenizer"
    make_tokenizer(tokenizer, [row["input"] for row in examples(1)])
    os.environ["HF_DATASETS_CACHE"] = str(args.folder / "cache")
    print("| file | MB | examples | start | CPU seconds | MB of memory | after 1000 are read |")
    print("|---|---|---|---|---|---|---|")
    for megabytes in args.megabytes:
        for kind, path in make_files(args.folder, megabytes).items():
            for which in ("first", "second"):
                how = "tokenize" if args.tokenize else ""
                count, seconds, *peaks = start(path, tokenizer, how)
                memory = " | ".join(f"{kib * 1024 / 1e6:.0f}" for kib in peaks)
                print(
                    f"| {kind} | {path.stat().st_size / 1e6:.0f} | {count:.0f} | {which} | "
                    f"{seconds:.1f} | {memory} |",
                    flush=True,
                )
            path.unlink()
    shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
