# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A game of several turns: guess a secret digit from hints.

    model.ppo.environment.path=examples/environments/guessing.py:GuessingGame

The policy says a digit and an exclamation mark (the text that ends its turn); the game says `more`
or `less` than that, until the guess is right or the guesses are used up. The reward of the last
guess is 1 if it is right; what is no guess ends the game with 0. Whoever halves what is left needs
no more than four guesses for the digits from 1 to 9; a policy that does not read the hints wins 4
games of 9 at best.
"""

import random
import re

GUESSES = 4
DIGITS = range(1, 10)
MORE, LESS, END_OF_GUESS = "more", "less", "!"


class GuessingGame:
    """Holds no state of its own: that of a game is what `reset` returns."""

    def reset(self, prompt: str) -> dict:
        """A new game; the prompt plays no role.

        Python's `random` has a stream of its own in each conversation, so that a run that is
        repeated, or resumed, draws the same secrets.
        """
        return {"secret": random.choice(DIGITS), "guesses": 0}

    def step(self, state: dict, response: str) -> tuple[str, float, bool]:
        """The hint after a guess, the reward of the guess, and whether the game is over."""
        state["guesses"] += 1
        guess = re.fullmatch(rf"\s*([{DIGITS[0]}-{DIGITS[-1]}]){END_OF_GUESS}\s*", response)
        if guess is None:
            return "", 0.0, True
        digit = int(guess[1])
        if digit == state["secret"] or state["guesses"] == GUESSES:
            return "", float(digit == state["secret"]), True
        return MORE if digit < state["secret"] else LESS, 0.0, False
