# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line: `nemo-aligner evaluate POLICY [OTHER] --reward REWARD ...`."""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from nemo_aligner.checkpoint.forms import hub_folder
from nemo_aligner.config.values import leaves, plain_dict
from nemo_aligner.core.errors import UserError
from nemo_aligner.generate.responses import (
    Response,
    check_writable,
    read_prompts,
    read_responses,
    replaced,
    write_records,
)
from nemo_aligner.generate.settings import CommandParser, compose_settings
from nemo_aligner.launch.endings import user_errors_end_the_job
from nemo_aligner.parallel.environment import is_rank_zero

if TYPE_CHECKING:
    from nemo_aligner.data.nlp.sources import Record

DESCRIPTION = """\
Say how good the responses of a policy are, and how often it beats another one.

Each source is a policy (a .nemo file or folder, a checkpoint folder of a job, or the folder of a
job: its newest checkpoint) that responds to --prompts now, or a .jsonl file of responses that
nemo-aligner generate wrote. --reward is a reward model (the same forms as a policy) or a
Python function, path/to/file.py:function, as rejection sampling and PPO use it.

examples:
  mean reward of a policy on a file of prompts:
    nemo-aligner evaluate results/gpt_ppo_actor --prompts val.jsonl --reward rm.nemo
  exact match: the mean of a function that gives 0 or 1:
    nemo-aligner evaluate ppo.nemo --prompts val.jsonl \\
        --reward examples/rewards/arithmetic.py:exact_answer sampling_params.use_greedy=True
  win rate of PPO over SFT under a reward model, also at equal length:
    nemo-aligner evaluate ppo.nemo sft.nemo --prompts val.jsonl --reward rm.nemo
  the same from two files of responses:
    nemo-aligner evaluate ppo.jsonl sft.jsonl --reward rm.nemo
  on two ranks, each model split over both:
    ... trainer.devices=2 model.tensor_model_parallel_size=2

It prints a table and writes evaluation.html, metrics.json, scores.jsonl (each response with its
reward) and the responses of policies to --out.
"""
RESPONSES = "responses_{}.jsonl"  # of the source with this number


def parser() -> CommandParser:
    result = CommandParser(
        prog="nemo-aligner evaluate",
        usage="%(prog)s SOURCE [SOURCE] --reward REWARD [--prompts FILE] [--out FOLDER] "
        "[key=value ...]",
        description=DESCRIPTION,
        epilog="Every setting is explained in docs/config.md.",
    )
    result.add_argument("--reward", help="reward model, or path/to/file.py:function")
    result.add_argument("--prompts", metavar="FILE", help="jsonl, lines as for PPO")
    result.add_argument(
        "--out",
        metavar="FOLDER",
        default="results/evaluate",
        help="folder to write to (default %(default)s)",
    )
    result.add_argument(
        "--chat",
        action="store_true",
        help="put each text into the chat template, as a user's message",
    )
    result.add_argument("--system", metavar="TEXT", help="system message, with --chat")
    return result


@user_errors_end_the_job
def main(argv: list[str] | None = None) -> None:
    args, sources, settings = parser().split(argv)
    if not 1 <= len(sources) <= 2:
        raise UserError(
            f"one source or two are needed, not {len(sources)}: a policy or a .jsonl file of "
            "responses; --help shows examples."
        )
    if args.reward is None:
        raise UserError(
            "--reward is missing: name a reward model or a function, path/to/file.py:function."
        )
    if args.system is not None and not args.chat:
        raise UserError("--system is a part of a chat: add --chat.")
    cfg = compose_settings("evaluate", settings)

    from nemo_aligner.config.checks import check_config

    policies = [source for source in sources if not source.endswith((".jsonl", ".json"))]
    check_sources(sources, policies, args)
    prompts = read_prompts(args.prompts) if policies else []
    check_writable(Path(args.out) / "evaluation.html")
    check_config(cfg, "evaluate")
    files = {source: read_responses(source) for source in sources if source not in policies}
    evaluate(cfg, sources, files, prompts, args)


def evaluate(
    cfg: DictConfig,
    sources: Sequence[str],
    files: Mapping[str, list[Response]],
    prompts: "Sequence[Record]",
    args: argparse.Namespace,
) -> None:
    """Get the responses, but for those in `files`, score them, show the numbers; on all ranks."""
    from nemo_aligner.evaluate import rewards as by
    from nemo_aligner.evaluate.results import Scored, check_pairs, measure, render, tables
    from nemo_aligner.report.elements import columns

    names = list(sources)
    if len(set(names)) < len(names):
        names = [f"{source} ({number})" for number, source in enumerate(sources, start=1)]
    if len(files) == 2:  # before a model is loaded
        check_pairs([*files.values()], names)
    by_function = re.search(r"\.py(:\w*)?$", args.reward) is not None
    if by_function and prompts:
        samples = [Response("", "", columns=prompt) for prompt in prompts]
        by.function_rewards(args.reward, [samples], cfg.inference, check=True)
    out, responses = Path(args.out), [files.get(source, []) for source in sources]
    rewards = None
    if not by_function or prompts:
        from nemo_aligner.generate.batch import respond
        from nemo_aligner.generate.policy import ChatForm, load_policy, quiet_logs
        from nemo_aligner.launch.processes import resolve_and_create_trainer
        from nemo_aligner.parallel.device import clear_memory

        quiet_logs()
        form = ChatForm(args.chat, args.system)
        # First, so that a mistake ends the command before a policy has generated.
        rm_cfg = None if by_function else by.reward_model_settings(args.reward, cfg)
        trainer = resolve_and_create_trainer(cfg)
        for number, source in enumerate(sources):
            if source not in files:
                own_cfg = cfg.copy()
                own_cfg.pretrained_checkpoint.restore_from_path = source
                policy = load_policy(own_cfg, trainer)
                responses[number] = respond(policy, prompts, form, args.prompts)
                policy.generator.model.clear()
                del policy  # its memory is free for the next model
                clear_memory()
                if is_rank_zero():
                    lines = (response.line for response in responses[number])
                    write_records(out / RESPONSES.format(number + 1), lines)
        if rm_cfg is not None:
            rewards = by.model_rewards(rm_cfg, trainer, responses)
    if not is_rank_zero():
        return
    if len(sources) == 2:
        check_pairs(responses, names)
    if rewards is None:
        rewards = by.function_rewards(args.reward, responses, cfg.inference)
    sides = [Scored(*each) for each in zip(names, responses, rewards, strict=True)]
    results = measure(sides, **cfg.bootstrap)
    for rows in tables(results):
        print(f"{columns(rows)}\n")
    facts = {"reward": args.reward, "prompts": args.prompts or "those of the responses"}
    settings = plain_dict(cfg, resolve=True)
    percent = f"{100 * cfg.bootstrap.confidence:g}% of {cfg.bootstrap.resamples} resamples"
    shown = facts | {"intervals": percent} | {key: str(v) for key, v in leaves(settings)}
    with replaced(out / "evaluation.html") as file:
        file.write(render(results, sides, [*shown.items()]))
    with replaced(out / "metrics.json") as file:
        json.dump(results | facts | {"settings": settings}, file, indent=1)
    own = (
        (response.line, {"source": side.name, "reward": reward})
        for side in sides
        for response, reward in zip(side.responses, side.rewards, strict=True)
    )
    write_records(out / "scores.jsonl", (score | line | score for line, score in own))
    print(f"{out / 'evaluation.html'}, metrics.json, scores.jsonl")


def check_sources(
    sources: Sequence[str], policies: Sequence[str], args: argparse.Namespace
) -> None:
    """`UserError`: a source does not exist or would be replaced by a policy's responses, or
    prompts are missing or not needed.
    """
    given = [Path(source).resolve() for source in sources if source not in policies]
    for number, source in enumerate(sources, start=1):
        place = Path(args.out) / RESPONSES.format(number)
        if source in policies and place.resolve() in given:
            raise UserError(f"{place} is a source and would be replaced; give another --out.")
        is_there = source not in policies or Path(source).expanduser().exists()
        if not is_there and hub_folder(source, "the policy") is None:
            raise UserError(
                f"{source} does not exist; name a policy (a .nemo file or folder, or the folder "
                "of a job) or a .jsonl file of responses that nemo-aligner generate wrote."
            )
    if policies and args.prompts is None:
        raise UserError(
            f"{policies[0]} is a policy, so --prompts FILE must give the prompts that it is to "
            "respond to."
        )
    if args.prompts is not None and not policies:
        raise UserError(
            f"--prompts {args.prompts} is not used: {' and '.join(sources)} hold responses "
            "already; leave it out."
        )


if __name__ == "__main__":
    main()
