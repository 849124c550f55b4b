# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line: `nemo-aligner plan MODEL --gpus N --memory 80GB`."""

import argparse
import functools
import json
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import indent
from typing import Any

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from nemo_aligner.config.values import plain_dict
from nemo_aligner.core.errors import UserError
from nemo_aligner.launch.start_up import warn_of_unsupported_versions
from nemo_aligner.plan.jobs import JOBS, chosen_jobs, job_config, knows
from nemo_aligner.plan.memory import PARTS, Parts, sum_of
from nemo_aligner.plan.parameters import ONE_RANK, count_weights
from nemo_aligner.plan.splits import Candidate, JobInput, Machine, Planned, make_plan, split_keys
from nemo_aligner.report.elements import columns

Plain = dict[str, Any]  # by the names of the JSON
GIB = 2**30
SHOWN = 8  # candidates in the text


def gib(size: float) -> str:
    """Bytes for a reader."""
    return f"{size / GIB:.2f}" if size < 10 * GIB else f"{size / GIB:.1f}"


def split_text(c: Plain) -> str:
    """Such as `TP2 PP1 CP1 DP4`."""
    experts = f" EP{c['ep']}" if c["ep"] > 1 else ""
    return f"TP{c['tp']} PP{c['pp']} CP{c['cp']}{experts} DP{c['dp']}"


def notes(c: Plain) -> str:
    """What a candidate changes, in words."""
    words = [f"recompute {c['recompute']}"] if c["recompute"] else []
    for key, value in c["changes"].items():
        if "micro_batch_size" in key and "val_" not in key:
            words.append(f"{key.rpartition('.')[2].removesuffix('_micro_batch_size')} {value}")
    return ", ".join(words)


def table(rows: list[list[str]]) -> str:
    """The first and the last column begin on the left."""
    return indent(columns(rows, (0, len(rows[0]) - 1)), "  ")


def memory_table(phases: Mapping[str, Parts]) -> str:
    """Kinds of memory by phase, in GiB, of the rank that needs most."""
    rows = [["GiB on the GPU", *phases, ""]]
    for part in PARTS:
        values = [parts.get(part, 0.0) for parts in phases.values()]
        if any(values):
            rows.append([part, *map(gib, values), ""])
    return table([*rows, ["sum", *(gib(sum_of(parts)) for parts in phases.values()), ""]])


def plan_text(plan: Plain, show_all: bool) -> str:
    """What `plan_values` gives, for a reader; `show_all`: all candidates, not the best alone."""
    parts = [
        f"{gib(plan['memory'])} GiB per GPU, of which {gib(plan['limit'])} GiB are planned with "
        "(--reserve)."
    ]
    jobs = plan["jobs"]
    if plan["shared"]:
        together = gib(sum(job["recommended"]["peak"] for job in jobs))
        parts.append(f"{len(jobs)} jobs share one GPU: {together} GiB together.")
    for job in jobs:
        c, weights, trained = job["recommended"], job["weights"], job["trained"]
        adapters = f", of which {trained / 1e6:.3f} million are trained" * (trained < weights)
        host = "  Host memory: no copies of weights."
        if c["host_per_node"]:
            kinds = ", ".join(f"{name} {gib(size)}" for name, size in c["host"].items())
            of_node = gib(c["host_per_node"])
            host = f"  Host memory per node: {of_node} GiB (GiB per rank: {kinds})."
        count = len(job["candidates"]) if show_all else SHOWN
        left_out = len(job["candidates"]) - count
        rows = [["split", "peak GiB", "in", "fits", "cost", "with"]]
        for each in job["candidates"][:count]:
            fits = ("yes", f"{each['cost']:.2f}") if each["fits"] else ("no", "-")
            shape = split_text(each), gib(each["peak"]), each["tightest"]
            rows.append([*shape, *fits, notes(each)])
        words = (f"      {shlex.quote(word)}" for word in job["overrides"])
        parts += [
            "",
            f"{job['job'].upper()}: {weights / 1e9:.3f} billion weights{adapters}, "
            f"{c['gpus']} GPU{'s' if c['gpus'] > 1 else ''}, {split_text(c)}"
            + (f", {notes(c)}" if notes(c) else ""),
            "",
            memory_table(c["phases"]),
            "",
            f"  All GPUs of the job together: {gib(c['total'])} GiB.",
            host,
            "",
            table(rows),
            *([f"  ... and {left_out} more (--all)"] if left_out > 0 else []),
            "",
            " \\\n".join([f"  python {job['script']}", *words]),
        ]
    return "\n".join(parts)


def plan_values(plan: list[Planned], machine: Machine, shared: bool) -> Plain:
    """The whole plan as plain values; sizes in bytes."""
    jobs = []
    for job in plan:
        item, chosen = job.item, job.chosen
        weights = count_weights(item.architecture(tp=1))
        keys = {
            item.job.config.restore_key: item.path,
            **split_keys(chosen.split, machine.gpus_per_node),
            **chosen.changes,
        }
        given = [text for text in item.overrides if text.lstrip("+").partition("=")[0] not in keys]
        jobs.append(
            {
                "job": item.job.name,
                "script": item.job.script,
                "weights": weights.total,
                "trained": weights.trained.total,
                "recommended": candidate_values(chosen, job.limit),
                "overrides": [*(f"{key}={value}" for key, value in keys.items()), *given],
                "candidates": [candidate_values(each, job.limit) for each in job.candidates],
            }
        )
    return {"memory": machine.memory, "limit": machine.usable, "shared": shared, "jobs": jobs}


def candidate_values(c: Candidate, limit: float) -> Plain:
    of_memory = ("peak", "tightest", "stage", "phases", "host")
    return {
        "gpus": c.split.ranks,
        **{name: getattr(c.split, name) for name in ("tp", "pp", "cp", "ep", "dp")},
        "recompute": c.workload.recompute,
        **{name: getattr(c, name) for name in ("changes", "cost", "total", "host_per_node")},
        **{name: getattr(c.memory, name) for name in of_memory},
        "fits": c.memory.peak <= limit,
    }


RESERVE_PERCENT = 10.0


def read_memory(text: str) -> float:
    """Bytes that a text such as `80GB` means; `UserError` if it means no size."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(|[gm](?:i?b)?)\s*", text, re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise UserError(f"--memory={text} is no size of memory; give one such as 80GB or 24GiB.")
    return float(match[1]) * (2**20 if match[2][:1].lower() == "m" else GIB)


def read_model(path: Path) -> tuple[dict[str, Any], int]:
    """A model's configuration, and the ids of its tokenizer or rows of its table: of a `.nemo` (or
    folder), or a YAML file with a `model` section and its `override_vocab_size`.
    """
    if path.suffix in (".yaml", ".yml"):
        if not path.exists():
            raise UserError(f"{path} does not exist; give the path of a model.")
        try:
            tree = OmegaConf.load(path)
        except YAMLError as error:
            raise UserError(f"{path} is not YAML: {error}") from error
        section = tree.get("model", tree) if isinstance(tree, DictConfig) else None
        if not isinstance(section, DictConfig):
            raise UserError(f"{path} has no section model with keys of a model.")
        model = plain_dict(section)
        rows = model.get("override_vocab_size")
        if not rows:
            raise UserError(
                f"{path} has no override_vocab_size; a YAML file needs it, because no tokenizer "
                "is read: give the ids of the vocabulary."
            )
        return model, int(rows)
    # Here, not at the top: they take seconds.
    from nemo_aligner.checkpoint.sources import open_source
    from nemo_aligner.models.nlp.gpt.tokenizers import build_tokenizer

    cfg = open_source(path, "MODEL").config()
    model = plain_dict(cfg)
    rows = model.get("override_vocab_size")
    return model, int(rows) if rows else build_tokenizer(cfg.tokenizer).vocab_size


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="nemo-aligner plan",
        description="Say how much memory a job takes on each GPU, and with which split to start.",
    )
    add = result.add_argument
    add(
        "model",
        type=Path,
        metavar="MODEL",
        help="Hugging Face folder, .nemo file or folder, or YAML file with a model section",
    )
    add("overrides", nargs="*", metavar="KEY=VALUE", help="of the jobs that have the key")
    add("--gpus", type=int, required=True, help="of all jobs together")
    add("--memory", required=True, help="of one GPU, such as 80GB")
    add("--job", choices=tuple(JOBS), default="ppo", help="default: ppo")
    add(
        "--critic-model",
        type=Path,
        metavar="MODEL",
        help="model of the critic, reward server or teacher, where it is another than MODEL",
    )
    add(
        "--critic",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override of the critic, reward server or teacher alone; may be repeated",
    )
    add("--gpus-per-node", type=int, default=8, help="default: 8")
    add(
        "--reserve",
        type=float,
        default=RESERVE_PERCENT,
        metavar="PERCENT",
        help=f"of a GPU's memory to keep free; default: {RESERVE_PERCENT:g}",
    )
    add("--all", action="store_true", help="show every candidate")
    add("--json", action="store_true", help="print JSON, sizes in bytes")
    return result


def read_inputs(args: argparse.Namespace) -> list[JobInput]:
    """The jobs to be planned; `UserError`: a model or an override cannot be read."""
    read = functools.cache(read_model)
    inputs: list[JobInput] = []
    jobs = chosen_jobs(args.job, args.overrides)
    if len(jobs) == 1 and (args.critic or args.critic_model):
        raise UserError(
            "--critic and --critic-model are for jobs with a server: --job ppo, rs and reinforce, "
            "and distill with model.knowledge_distillation.on_policy.fraction."
        )
    for text in [*args.overrides, *args.critic]:
        key = text.partition("=")[0].lstrip("+~")
        if key in split_keys(ONE_RANK, 1):
            raise UserError(
                f"{text}: the plan chooses {key}; see all of its candidates with --all."
            )
    for number, job in enumerate(jobs):
        path = args.critic_model if number and args.critic_model else args.model
        model, vocab_size = read(path)
        if inputs:  # a server reads the samples that the actor sends
            width = inputs[0].cfg["model"]["encoder_seq_length"]
            longest = model.get("encoder_seq_length") or width
            model = {**model, "encoder_seq_length": min(width, longest)}
        texts = [text for text in args.overrides if knows(job, text)]
        texts = [*(text for text in job.needs if text not in texts), *texts]
        texts += args.critic if number else []
        cfg = job_config(job, model, texts, str(path))
        inputs.append(JobInput(job, str(path), cfg, vocab_size, texts))
    return inputs


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_intermixed_args(argv)
    warn_of_unsupported_versions()
    try:
        if args.gpus < 1 or args.gpus_per_node < 1:
            raise UserError(
                f"--gpus={args.gpus} and --gpus-per-node={args.gpus_per_node} must be at least 1."
            )
        if not 0 <= args.reserve < 100:
            raise UserError(f"--reserve={args.reserve:g} must be from 0 to below 100 (percent).")
        memory = read_memory(args.memory)
        machine = Machine(memory, memory * (1 - args.reserve / 100), args.gpus_per_node)
        plan = make_plan(read_inputs(args), args.gpus, machine)
        values = plan_values(plan, machine, shared=len(plan) > 1 and args.gpus == 1)
        print(json.dumps(values, indent=2) if args.json else plan_text(values, args.all))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
