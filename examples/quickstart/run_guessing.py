# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""PPO on a game of several turns: `python run_guessing.py` (or `make guessing`), a few minutes on
two cores.

    games without a plan -> SFT of a tiny GPT -> critic server + PPO actor -> verdict

The policy is to find a secret digit within four guesses. After each one the game
(`examples/environments/guessing.py`), an environment in processes of the actor's job, says `more`
or `less`; the only reward is 1 for the right digit. SFT sees games with guesses at random, so at
first the policy does not use the hints. The measure is the share of games won, of 512 that are
sampled at temperature 1 as in training. Every phase after the first is one of the project's own
scripts in its own process, as on a cluster; see `RUN_DIR/<job>.log`.

With `--estimator grpo` (or rloo) there is no critic and no server at all: the policy plays several
games at a time, and the advantage of a game is its reward compared with those of the others.
"""

import sys
from pathlib import Path

import guessing_data
import walkthrough
from jobs import Job
from outcome import Score
from run_arithmetic import ESTIMATOR, ROLLOUT_SIZE, phases_of, policy_job, ppo_story, sft_job
from walkthrough import Ending, Option, Walk

GAME = Path(__file__).resolve().parents[1] / "environments" / "guessing.py"
MAX_RESPONSE = 3  # a digit and its mark
RESPONSES = 16  # to each prompt, for estimators that compare them
# Of 100 games, 30 more are won.
MIN_RISE = 0.3
STEPS = (
    Option("--steps", 80, f"PPO steps, each a rollout of {ROLLOUT_SIZE} games"),
    Option("--sft-steps", 60, "enough to guess in the right form"),
)
WON = Score(
    "won", "share of games won", lambda sample: float(sample["reward"]), MIN_RISE, form=".0f"
)


def main(argv: list[str] | None = None) -> int:
    args = walkthrough.parse_args(argv, __doc__, "guessing", (*STEPS, ESTIMATOR))
    names = {"rewards": "won", "turns": "guesses", "init_policy_kl": "KL"}
    shown = {f"train_rollouts/{key}": name for key, name in names.items()}
    phases = phases_of(args, "Games and tokenizer", 15, "PPO with an environment", 120, shown)
    return walkthrough.run(args, phases, story, lambda: Ending("ppo_actor", "PPO", (WON,)))


def story(walk: Walk) -> None:
    """Run all phases; raises `JobFailed` when one of the scripts fails."""

    def write_data() -> str:
        guessing_data.make_data(walk.run_dir / "data", walk.args.seed)
        return f"{guessing_data.NUM_GAMES} games without a plan"

    sft = sft_job(walk.run_dir, walk.args.seed, walk.args.sft_steps, warmup=10)
    ppo_story(walk, write_data, sft, actor_job, RESPONSES, {})


def actor_job(run_dir: Path, seed: int, steps: int, advantages: dict) -> Job:
    """PPO from the SFT model, with the game as its environment.

    Args:
        advantages: settings of how rewards become advantages.
    """
    overrides = {
        "remote_critic_rm.combine_rm_and_critic_server": False,
        "trainer.ppo.initial_policy_kl_penalty": 0.01,
        "model.ppo.length_params.max_length": MAX_RESPONSE,
        "model.ppo.sampling_params.end_strings": ["!"],
        # A guess without its mark is no accident of the length: it is to become unlikely.
        "model.ppo.train_on_truncated": True,
        "model.ppo.environment.path": f"{GAME}:GuessingGame",
        "model.ppo.environment.workers": 1,  # a reply takes microseconds
        **advantages,
    }
    return policy_job(run_dir, seed, steps, overrides)


if __name__ == "__main__":
    sys.exit(main())
