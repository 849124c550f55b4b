# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Write the data set and tokenizer of two-digit sums, without a download:
`python arithmetic_data.py --out DIR [--seed 0]`.

    DIR/sft_{train,validation}.jsonl       {"input": "12+34=", "output": "46"}
    DIR/prompts_{train,validation}.jsonl   {"text": "12+34="}
    DIR/tokenizer/                         Hugging Face fast tokenizer, one token per character,
                                           end = <|endoftext|>

The 8100 sums of two numbers from 10 to 99 are split once: a sum of a validation file occurs in no
training file, nor does the same sum with its numbers swapped. The same seed writes the same bytes.
"""

import random
from pathlib import Path

from make_data import END_OF_TEXT, run_script, save_tokenizer, write_jsonl

NUMBERS = range(10, 100)
NUM_VALIDATION = 512
CHARACTERS = "0123456789+="
UNKNOWN = "<|unknown|>"


def make_data(out: Path, seed: int) -> None:
    """Write all files of the data set under `out`."""
    out.mkdir(parents=True, exist_ok=True)
    for split, sums in split_sums(random.Random(seed)).items():
        prompts = [f"{a}+{b}=" for a, b in sums]
        results = [str(a + b) for a, b in sums]
        sft = [{"input": prompt, "output": result} for prompt, result in zip(prompts, results)]
        write_jsonl(out / f"sft_{split}.jsonl", sft)
        write_jsonl(out / f"prompts_{split}.jsonl", [{"text": prompt} for prompt in prompts])
    save_tokenizer(character_tokenizer(), out / "tokenizer")


def split_sums(rng: random.Random) -> dict[str, list[tuple[int, int]]]:
    """`train` and `validation`, each in shuffled order; a sum and its swapped twin are always in
    the same split.
    """
    pairs = [(a, b) for a in NUMBERS for b in NUMBERS if a <= b]
    rng.shuffle(pairs)
    splits: dict[str, list[tuple[int, int]]] = {"validation": [], "train": []}
    for a, b in pairs:
        twins = [(a, b)] if a == b else [(a, b), (b, a)]
        fits = len(splits["validation"]) + len(twins) <= NUM_VALIDATION
        splits["validation" if fits else "train"] += twins
    for sums in splits.values():
        rng.shuffle(sums)
    return splits


def character_tokenizer():
    """A `tokenizers.Tokenizer` of `CHARACTERS` and the end of text; any other character becomes
    `UNKNOWN`.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {
        token: number for number, token in enumerate([END_OF_TEXT, UNKNOWN, *CHARACTERS])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.add_special_tokens([END_OF_TEXT, UNKNOWN])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


if __name__ == "__main__":
    run_script(__doc__, make_data)
