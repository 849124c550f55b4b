# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""PPO from nothing on a laptop: `python run.py` (or `make quickstart`), a few minutes on two cores, no download.

    data and tokenizer -> SFT of a tiny GPT -> reward model -> critic server + PPO actor -> what changed

Every phase after the first is one of the project's own scripts in its own process, as on a cluster. What a job wrote
is in `RUN_DIR/<job>.log` and `RUN_DIR/<job>/`. This file only chooses sizes, starts the jobs, and tells what happens.

Exit code: 0 if the validation reward and the gold score rose clearly (`outcome.py` says what is clear), 1 if not, 2 if
a job failed or the arguments make no sense, 128 + signal number if it was stopped.
"""

import argparse
import json
import sys
import time
from datetime import datetime
from pathlib import Path

import make_data
from jobs import Interrupted, Job, JobFailed, Jobs
from narrator import Narrator, Phase, clock_text
from outcome import NoOutcome, Outcome, read_outcome

from nemo_aligner.utils.ports import find_free_port

SCRIPTS = Path(__file__).resolve().parents[1] / "nlp" / "gpt"
SEQ_LENGTH = 56  # the longest prompt has about 20 tokens
MAX_ANSWER = 32  # reviews of the grammar have at most 30 tokens with the end
ROLLOUT_SIZE = 128
BATCH_SIZE = 64  # of every optimizer step; a rollout makes two

ARCHITECTURE = {  # Llama-like, 0.2 million parameters
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 256,
    "num_attention_heads": 4,
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "position_embedding_type": "rope",
    "bias": False,
    "share_embeddings_and_output_weights": False,
}


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    started = time.monotonic()
    phases = {
        "data": Phase("Data and tokenizer", 1, 2),
        "sft": Phase("Supervised fine-tuning", args.sft_steps, 40, "train/loss", {"train/loss": "loss"}),
        "rm": Phase("Reward model", args.rm_steps, 20, "train/loss", {"train/loss": "loss", "train/acc": "accuracy"}),
        "ppo": Phase(
            "PPO with a served critic",
            args.steps,
            50,
            "train_rollouts/rewards",
            {"train_rollouts/rewards": "reward", "train_rollouts/init_policy_kl": "KL"},
        ),
    }
    narrator = Narrator(list(phases.values()))
    narrator.say(f"Everything goes to {args.run_dir} (seed {args.seed}).")
    try:
        with Jobs() as jobs, narrator:
            run_phases(args, phases, narrator, jobs)
    except JobFailed as failure:
        narrator.say(f"\n{failure.job.name} failed. The last lines of {failure.job.log_path}:\n")
        narrator.say("\n".join(failure.job.last_lines()))
        narrator.say(f"\n{failure}")
        return 2
    except Interrupted as interruption:
        narrator.say(f"\n{interruption}; all jobs have been stopped. What was written stays in {args.run_dir}.")
        return 128 + interruption.signum
    return conclude(args.run_dir, narrator, jobs.peak_memory, time.monotonic() - started)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, help="new or empty folder; default runs/quickstart-<time>")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=50, help=f"PPO steps, each a rollout of {ROLLOUT_SIZE} answers")
    parser.add_argument("--sft-steps", type=int, default=300)
    parser.add_argument("--rm-steps", type=int, default=100)
    args = parser.parse_args(argv)
    for name in ("steps", "sft_steps", "rm_steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1")
    if args.seed < 0:
        parser.error(f"--seed is {args.seed}; it must not be negative")
    if args.run_dir is None:
        args.run_dir = Path("runs") / f"quickstart-{datetime.now():%Y%m%d-%H%M%S}"
    args.run_dir = args.run_dir.absolute()
    if args.run_dir.exists() and (not args.run_dir.is_dir() or any(args.run_dir.iterdir())):
        # The scripts would resume what they find there instead of starting anew.
        parser.error(f"--run-dir {args.run_dir} is not empty; name a new folder, or remove it")
    args.run_dir.mkdir(parents=True, exist_ok=True)
    return args


def run_phases(args: argparse.Namespace, phases: dict[str, Phase], narrator: Narrator, jobs: Jobs) -> None:
    """The whole story. Raises `JobFailed` when one of the scripts fails."""
    run_dir = args.run_dir

    narrator.start(phases["data"])
    make_data.make_data(run_dir / "data", args.seed)
    narrator.finish(
        phases["data"], f"{make_data.SIZES['sft']['train']} reviews, {make_data.SIZES['pairs']['train']} pairs"
    )

    for phase, job in (
        (phases["sft"], sft_job(run_dir, args.seed, args.sft_steps)),
        (phases["rm"], reward_model_job(run_dir, args.seed, args.rm_steps)),
    ):
        narrator.start(phase, "starting")
        jobs.start(job)
        jobs.follow(job, lambda records, phase=phase: narrator.update(phase, records))
        narrator.finish(phase)

    port = find_free_port()
    critic = critic_job(run_dir, args.seed, args.steps, port)
    actor = actor_job(run_dir, args.seed, args.steps, port)
    narrator.start(phases["ppo"], f"starting the critic server on port {port} and the actor")
    jobs.start(critic)
    jobs.start(actor)  # waits for the server
    jobs.follow(actor, lambda records: narrator.update(phases["ppo"], records), companions=(critic,))
    narrator.finish(phases["ppo"])


# ------------------------------------------------------------------------------------------------------------ commands


def sft_job(run_dir: Path, seed: int, steps: int) -> Job:
    """A tiny GPT learns the language from random weights, kind and unkind reviews alike."""
    overrides = {
        **common(run_dir / "sft", "sft", seed),
        **{f"model.{key}": value for key, value in ARCHITECTURE.items()},
        **optimizer(lr=3e-3, warmup=20),
        "model.restore_from_path": None,
        "exp_manager.checkpoint_callback_params.save_nemo_on_train_end": True,
        "model.tokenizer.library": "huggingface",
        "model.tokenizer.type": run_dir / "data" / "tokenizer",
        "model.data.train_ds.file_path": run_dir / "data" / "sft_train.jsonl",
        "model.data.train_ds.global_batch_size": BATCH_SIZE,
        "model.data.train_ds.micro_batch_size": BATCH_SIZE,
        "model.data.validation_ds.file_path": run_dir / "data" / "sft_validation.jsonl",
        **supervised("trainer.sft", steps),
    }
    return script_job("SFT", "train_gpt_sft.py", run_dir / "sft", overrides, threads=2)


def reward_model_job(run_dir: Path, seed: int, steps: int) -> Job:
    """The SFT model with a new head learns from pairs which review is kinder; it never sees the gold score."""
    overrides = {
        **common(run_dir / "rm", "rm", seed),
        **optimizer(lr=1e-3),
        "pretrained_checkpoint.restore_from_path": run_dir / "sft" / "checkpoints" / "sft.nemo",
        "model.global_batch_size": BATCH_SIZE // 2,  # pairs
        "model.micro_batch_size": BATCH_SIZE // 2,
        "model.force_head_dtype": "float32",
        "model.data.data_prefix": data_prefix(run_dir, "pairs"),
        # PPO asks for the reward at the end of the answer, which is the end-of-text token: train it there too.
        "++model.data.append_eod": True,
        **supervised("trainer.rm", steps),
    }
    return script_job("Reward model", "train_reward_model.py", run_dir / "rm", overrides, threads=2)


def critic_job(run_dir: Path, seed: int, steps: int, port: int) -> Job:
    """The server that gives rewards and values and trains the critic; it starts from the reward model."""
    overrides = {
        **common(run_dir / "critic", "critic", seed),
        **optimizer(lr=1e-3),
        "pretrained_checkpoint.restore_from_path": run_dir / "rm" / "checkpoints" / "rm.nemo",
        "trainer.ppo.host": "127.0.0.1",
        "trainer.ppo.port": port,
        "trainer.ppo.combine_rm_and_critic_server": True,
        "trainer.ppo.max_steps": steps * (ROLLOUT_SIZE // BATCH_SIZE),
        "trainer.ppo.strip_sequence_length_to_multiple": 8,
        "model.global_batch_size": BATCH_SIZE,
        "model.micro_batch_size": BATCH_SIZE,
        "model.loss_clip_val": 1.0,  # rewards of this reward model span about -3 to 3
    }
    return script_job("Critic server", "serve_ppo_critic.py", run_dir / "critic", overrides)


def actor_job(run_dir: Path, seed: int, steps: int, port: int) -> Job:
    """PPO from the SFT model, with the served critic."""
    overrides = {
        **common(run_dir / "ppo_actor", "ppo_actor", seed),
        **optimizer(lr=5e-4),
        "pretrained_checkpoint.restore_from_path": run_dir / "sft" / "checkpoints" / "sft.nemo",
        "remote_critic_rm.reward_model.port": port,
        "remote_critic_rm.critic.port": port,
        "remote_critic_rm.init_timeout_s": 120,
        "trainer.ppo.max_steps": steps,
        "trainer.ppo.max_epochs": 1 + steps * ROLLOUT_SIZE // make_data.SIZES["prompts"]["train"],
        "trainer.ppo.run_init_validation": True,
        "trainer.ppo.val_check_interval": max(steps // 5, 1),
        "trainer.ppo.save_interval": steps,
        # Strong, for the reward model is easy to fool: without it the grammar of the answers falls apart.
        "trainer.ppo.initial_policy_kl_penalty": 0.15,
        "model.global_batch_size": BATCH_SIZE,
        "model.micro_batch_size": BATCH_SIZE,
        "model.ppo.num_rollout_samples": ROLLOUT_SIZE,
        "model.ppo.rollout_micro_batch_size": ROLLOUT_SIZE,
        "model.ppo.num_val_samples": make_data.SIZES["prompts"]["validation"],
        "model.ppo.length_params.max_length": MAX_ANSWER,
        "model.data.data_prefix": data_prefix(run_dir, "prompts"),
    }
    return script_job("PPO actor", "train_gpt_ppo_actor.py", run_dir / "ppo_actor", overrides)


def common(log_dir: Path, name: str, seed: int) -> dict:
    """What all four scripts are told."""
    return {
        "trainer.devices": 1,
        "trainer.accelerator": "cpu",
        "trainer.precision": 32,
        "exp_manager.explicit_log_dir": log_dir,
        "exp_manager.name": name,
        "exp_manager.checkpoint_callback_params.save_top_k": 1,
        "model.encoder_seq_length": SEQ_LENGTH,
        "model.seed": seed + 1,
    }


def optimizer(lr: float, warmup: int = 10) -> dict:
    """A cosine from `lr` down to a tenth over the whole job."""
    return {
        "model.optim.lr": lr,
        "model.optim.weight_decay": 0.01,
        "model.optim.sched.warmup_steps": warmup,
        "model.optim.sched.constant_steps": 0,
        "model.optim.sched.min_lr": lr / 10,
    }


def supervised(section: str, steps: int) -> dict:
    """Run for `steps` steps however many epochs that makes; validate and save at the end only."""
    return {
        f"{section}.max_steps": steps,
        f"{section}.max_epochs": 100,
        f"{section}.val_check_interval": steps,
        f"{section}.save_interval": steps,
    }


def data_prefix(run_dir: Path, kind: str) -> dict:
    train, validation = (str(run_dir / "data" / f"{kind}_{split}.jsonl") for split in ("train", "validation"))
    return {"train": [train], "validation": [validation], "test": [validation]}


def script_job(name: str, script: str, folder: Path, overrides: dict, threads: int = 1) -> Job:
    """One of the project's scripts with Hydra overrides. Actor and critic work at once: a core for each is enough."""
    command = [
        sys.executable,
        str(SCRIPTS / script),
        *(f"{key}={hydra_value(value)}" for key, value in overrides.items()),
    ]
    return Job(name, command, folder, env={"OMP_NUM_THREADS": str(threads)})


def hydra_value(value) -> str:
    """`value` in Hydra's override grammar; text is quoted, so that any path is safe."""
    if value is None:
        return "null"
    if isinstance(value, bool | int | float):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{hydra_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(hydra_value, value)) + "]"
    return "'" + str(value).replace("'", "\\'") + "'"


# ------------------------------------------------------------------------------------------------------------- the end


def conclude(run_dir: Path, narrator: Narrator, peak_memory: int, seconds: float) -> int:
    """Say what changed, write `summary.json` and `report.html`, and judge."""
    from nemo_aligner.report import write_report  # here: the narrator speaks at once

    try:
        outcome = read_outcome(run_dir / "ppo_actor")
    except NoOutcome as error:
        narrator.say(f"\nNo result: {error}.")
        return 2
    tell(outcome, narrator)
    summary = {**outcome.to_dict(), "seconds": seconds, "peak_memory_bytes": peak_memory}
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    narrator.say(f"\nReport: {write_report(run_dir)}")
    narrator.say(f"Took {clock_text(seconds)} minutes and at most {peak_memory / 2**30:.2f} GiB of memory.")
    if outcome.learned:
        narrator.say("The policy has learned: the reward and the gold score rose clearly.")
        return 0
    for name, rise in (("validation reward", outcome.reward), ("gold score", outcome.gold)):
        if not rise.clear:
            narrator.say(
                f"Not learned: the {name} rose by {rise.after - rise.before:.3f}, clear is {rise.needed:.3f}."
            )
    return 1


def tell(outcome: Outcome, narrator: Narrator) -> None:
    """Two tables: the numbers, and five prompts with their answers."""
    reward, gold = outcome.reward, outcome.gold
    rows = [
        ["validation reward", *numbers(reward.before, reward.after, reward.needed)],
        ["gold score (-1 to 1)", *numbers(gold.before, gold.after, gold.needed)],
        ["answers that end by themselves", *numbers(outcome.ended_before, outcome.ended_after), ""],
        ["KL to the reference, per token", *numbers(outcome.kl_first, outcome.kl_last), ""],
    ]
    header = ["", f"step {outcome.first_step}", f"step {outcome.last_step}", "rise that counts as clear"]
    narrator.table(f"Before and after PPO, {outcome.num_samples} validation prompts", header, rows)
    rows = [
        [
            pair["prompt"],
            f"{pair['before'].strip()}\n(gold {pair['gold_before']:+.2f}, reward {pair['reward_before']:+.2f})",
            f"{pair['after'].strip()}\n(gold {pair['gold_after']:+.2f}, reward {pair['reward_after']:+.2f})",
        ]
        for pair in outcome.pairs[:5]
    ]
    narrator.table("Five prompts", ["prompt", "answer before", "answer after"], rows)


def numbers(*values: float | None) -> list[str]:
    return ["not logged" if value is None else f"{value:.3f}" for value in values]


if __name__ == "__main__":
    sys.exit(main())
