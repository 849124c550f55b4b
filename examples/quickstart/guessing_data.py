# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Write the data set and tokenizer of the guessing game, without a download:
`python guessing_data.py --out DIR [--seed 0]`.

    DIR/sft_{train,validation}.jsonl       {"input": "?", "output": "3!more5!less4!"}
    DIR/prompts_{train,validation}.jsonl   {"text": "?"}
    DIR/tokenizer/                         Hugging Face fast tokenizer, one token per digit, mark
                                           and hint, end = <|endoftext|>

The games are played without a plan: each guess is any digit, whatever the hints were. So what SFT
learns from them is to guess in the right form, and no more. The same seed writes the same bytes.
"""

import random
import sys
from pathlib import Path

from make_data import END_OF_TEXT, run_script, save_tokenizer, write_jsonl

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "environments"))

from guessing import DIGITS, END_OF_GUESS, LESS, MORE, GuessingGame  # noqa: E402

PROMPT = "?"
NUM_GAMES, NUM_VALIDATION = 4096, 512
UNKNOWN = "<|unknown|>"


def make_data(out: Path, seed: int) -> None:
    """Write all files of the data set under `out`."""
    out.mkdir(parents=True, exist_ok=True)
    random.seed(seed)  # of the game too
    for split, count in (("train", NUM_GAMES), ("validation", NUM_VALIDATION)):
        games = [{"input": PROMPT, "output": play()} for _ in range(count)]
        write_jsonl(out / f"sft_{split}.jsonl", games)
        write_jsonl(out / f"prompts_{split}.jsonl", [{"text": PROMPT}] * count)
    save_tokenizer(word_tokenizer(), out / "tokenizer")


def play() -> str:
    """A game with a guess at random in each turn."""
    game, told, done = GuessingGame(), "", False
    state = game.reset(PROMPT)
    while not done:
        guess = f"{random.choice(DIGITS)}{END_OF_GUESS}"
        hint, _, done = game.step(state, guess)
        told += guess + hint
    return told


def word_tokenizer():
    """A `tokenizers.Tokenizer` of the digits, the marks, the hints and the end of text; anything
    else becomes `UNKNOWN`.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    words = [END_OF_TEXT, UNKNOWN, PROMPT, END_OF_GUESS, MORE, LESS, *map(str, DIGITS)]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNKNOWN)
    )
    tokenizer.add_special_tokens([END_OF_TEXT, UNKNOWN])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex(rf"{MORE}|{LESS}|[\s\S]"), behavior="isolated"
    )
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


if __name__ == "__main__":
    run_script(__doc__, make_data)
