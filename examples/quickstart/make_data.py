# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Write the quickstart's data set and tokenizer, in a second and without a download:
`python make_data.py --out DIR [--seed 0]`.

    DIR/sft_{train,validation}.jsonl       {"input": prompt, "output": review}, half of them good
    DIR/pairs_{train,validation}.jsonl     neighbouring lines: {"text": prompt + better},
                                           {"text": prompt + worse}
    DIR/prompts_{train,validation}.jsonl   {"text": prompt}
    DIR/preferences_{train,validation}.jsonl  {"prompt": prompt, "chosen": better,
                                              "rejected": worse}
    DIR/thumbs_{train,validation}.jsonl    {"prompt": prompt, "response": review,
                                           "preference": "chosen" or "rejected"}
    DIR/labels_{train,validation}.jsonl    {"text": prompt + review, "label": [gold score]}
    DIR/tokenizer/                         Hugging Face fast tokenizer, byte-level BPE,
                                           end = <|endoftext|>

No film of a validation file occurs in any training file. The same seed writes the same bytes.

A prompt never ends with a space; the review follows after one. The tokenizer splits words before
spaces, so prompt and response have the same tokens whether they are tokenized together or apart:
`prompt` + ` response`.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import grammar
from gold import gold_score

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 512
SIZES = {
    "sft": {"train": 6000, "validation": 256},
    "pairs": {"train": 4000, "validation": 256},
    "prompts": {"train": 6000, "validation": 128},
    "labels": {"train": 4000, "validation": 256},
    "preferences": {"train": 4000, "validation": 256},
    "thumbs": {"train": 6000, "validation": 256},
}


def run_script(doc: str | None, make: Callable[[Path, int], None]) -> None:
    """What `python make_data.py --out DIR [--seed 0]` does, and scripts like it."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write, made if missing")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    make(args.out, args.seed)


def make_data(out: Path, seed: int) -> None:
    """Write all files of the data set under `out`."""
    out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    films = grammar.all_prompts()
    rng.shuffle(films)
    num_validation = max(sizes["validation"] for sizes in SIZES.values())
    split_films = {"validation": films[:num_validation], "train": films[num_validation:]}
    makers = {
        "sft": sft_lines,
        "pairs": pair_lines,
        "prompts": prompt_lines,
        "labels": label_lines,
        "preferences": preference_lines,
        "thumbs": thumb_lines,
    }
    for kind, maker in makers.items():
        for split, size in SIZES[kind].items():
            lines = maker(rng, rng.sample(split_films[split], size))
            write_jsonl(out / f"{kind}_{split}.jsonl", lines)
    train_tokenizer(read_texts(out / "sft_train.jsonl"), out / "tokenizer")


def sft_lines(rng: random.Random, prompts: list[str]) -> list[dict[str, str]]:
    """One review per film; exactly every other one is in a good mood (in shuffled order)."""
    moods = [index % 2 == 0 for index in range(len(prompts))]
    rng.shuffle(moods)
    return [
        {"input": prompt, "output": grammar.review(rng, good)}
        for prompt, good in zip(prompts, moods)
    ]


def pair_lines(rng: random.Random, prompts: list[str]) -> list[dict[str, str]]:
    """Two reviews per film, the kinder one first. Moods are random, so many pairs differ little:
    the gold scores only have to differ.
    """
    pairs = preference_lines(rng, prompts)
    return [
        {"text": pair["prompt"] + pair[name]} for pair in pairs for name in ("chosen", "rejected")
    ]


def preference_lines(rng: random.Random, prompts: list[str]) -> list[dict[str, str]]:
    """The same pairs with the prompt apart."""
    lines = []
    for prompt in prompts:
        better = worse = ""
        while gold_score(better) == gold_score(worse):
            reviews = [grammar.review(rng, rng.random() < 0.5) for _ in range(2)]
            better, worse = sorted(reviews, key=gold_score, reverse=True)
        lines.append({"prompt": prompt, "chosen": f" {better}", "rejected": f" {worse}"})
    return lines


def thumb_lines(rng: random.Random, prompts: list[str]) -> list[dict[str, str]]:
    """One review per film; of every second pair the kinder one, which is liked; else the other."""
    names = ("chosen", "rejected")
    return [
        {"prompt": pair["prompt"], "response": pair[name], "preference": name}
        for pair, name in zip(preference_lines(rng, prompts), names * (len(prompts) // 2))
    ]


def prompt_lines(rng: random.Random, prompts: list[str]) -> list[dict[str, str]]:
    """Prompts alone; `rng` is unused, because the films are shuffled already."""
    return [{"text": prompt} for prompt in prompts]


def label_lines(rng: random.Random, prompts: list[str]) -> list[dict]:
    """One review per film with its gold score; moods are random."""
    reviews = [grammar.review(rng, rng.random() < 0.5) for _ in prompts]
    return [
        {"text": f"{prompt} {review}", "label": [gold_score(review)]}
        for prompt, review in zip(prompts, reviews)
    ]


def write_jsonl(path: Path, lines: Iterable[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def read_texts(sft_path: Path) -> list[str]:
    lines = map(json.loads, sft_path.read_text(encoding="utf-8").splitlines())
    return [f"{line['input']} {line['output']}" for line in lines]


def train_tokenizer(texts: Iterable[str], out: Path) -> None:
    """Train a byte-level BPE, which round-trips any text, and save it with `save_tokenizer`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    # Splits before each space, so that no token spans the boundary of prompt and review.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    save_tokenizer(tokenizer, out)


def save_tokenizer(tokenizer, out: Path) -> None:
    """Save a `tokenizers.Tokenizer` that knows `END_OF_TEXT` as the folder of a Hugging Face fast
    tokenizer.
    """
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
    }
    (out / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    run_script(__doc__, make_data)
