# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The toy language of the quickstart: prompts that name a film, and reviews of two to four short
sentences.

Every opinion sentence is good or bad, so the sentiment of a review is known exactly (`gold.py`).
"""

import itertools
import random

GENRES = "drama comedy thriller western mystery musical romance fable".split()
ADJECTIVES = """Silent Golden Broken Hidden Last Red Frozen Little Distant Wild Lonely Paper Second
    Burning Quiet Blue""".split()
NOUNS = """Harbor Garden River Letter Winter Summer Mirror Road Island Forest Bridge Crown Train
    Shadow Window Song""".split()
DIRECTORS = "Rossi Tanaka Weber Novak Silva Okoye Dubois Larsen Moreno Haas Singh Baker".split()

GOOD_ADJECTIVES = "superb moving funny charming clever lovely gripping brilliant".split()
BAD_ADJECTIVES = "awful boring clumsy dull messy weak tired empty".split()
GOOD_VERBS = "loved enjoyed admired".split()
BAD_VERBS = "hated disliked regretted".split()
ASPECTS = "plot ending cast script score pace hero villain".split()
DEGREES = "very truly quite so".split()
PLACES = "Paris Lagos Lima Oslo".split()

GOOD_WORDS = frozenset(GOOD_ADJECTIVES + GOOD_VERBS)
BAD_WORDS = frozenset(BAD_ADJECTIVES + BAD_VERBS)

# How often an opinion sentence agrees with the mood of its review; the others make reviews mixed,
# as people write them.
MOOD_STRENGTH = 0.8


def all_prompts() -> list[str]:
    """Every prompt of the language, in a fixed order (about 25 thousand)."""
    films = itertools.product(ADJECTIVES, NOUNS, GENRES, DIRECTORS)
    return [
        f"{adjective} {noun}, a {genre} by {director}:"
        for adjective, noun, genre, director in films
    ]


def opinion(rng: random.Random, good: bool) -> str:
    """One sentence with exactly one sentiment word."""
    adjective = rng.choice(GOOD_ADJECTIVES if good else BAD_ADJECTIVES)
    verb = rng.choice(GOOD_VERBS if good else BAD_VERBS)
    aspect = rng.choice(ASPECTS)
    return rng.choice(
        [
            f"The {aspect} is {rng.choice(DEGREES)} {adjective}.",
            f"I {verb} the {aspect}.",
            f"This is one {adjective} {aspect}.",
        ]
    )


def fact(rng: random.Random) -> str:
    """One sentence without sentiment."""
    return rng.choice(
        [
            f"It runs for {rng.choice(['two', 'three'])} hours.",
            f"It is set in {rng.choice(PLACES)}.",
        ]
    )


def review(rng: random.Random, good: bool) -> str:
    """A review in the given mood: two or three opinions, sometimes a fact in between."""
    sentences = [
        opinion(rng, good == (rng.random() < MOOD_STRENGTH)) for _ in range(rng.randint(2, 3))
    ]
    if rng.random() < 0.3:
        sentences.insert(rng.randint(0, len(sentences)), fact(rng))
    return " ".join(sentences)
