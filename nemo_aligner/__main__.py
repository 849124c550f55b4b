# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The command `nemo-aligner`, which is `python -m nemo_aligner`: all jobs and tools by their
names. It imports nothing heavy before it knows which one is asked for.
"""

import ast
import difflib
import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_aligner import jobs
from nemo_aligner.core.endings import ExitCode, interruptible

# The module of each tool, whose `main` gets the words behind its name; what the tool does.
TOOLS = {
    "convert": ("convert.__main__", "Convert checkpoints from and to Hugging Face's form."),
    "generate": ("generate.__main__", "Talk to a policy, or have it respond to a file."),
    "evaluate": ("evaluate.__main__", "Score policies, and compare them."),
    "inspect": ("inspection", "Show data as a model will see them."),
    "plan": ("plan.__main__", "Say how much memory a job takes, and a split to start with."),
    "report": ("report.__main__", "Write a page about a run."),
    "doctor": ("doctor", "Say whether jobs can run on this machine."),
    "config": ("", "Print every key of a job with its default and meaning."),
}
GROUPS = ["train", "serve", "logits"]  # of jobs, as --help lists them
HELP = {"-h", "--help"}
JOB_HELP = """
One process per device: with trainer.devices=N the command starts them itself; torchrun and srun
work as well. The same command resumes a training from the last checkpoint in
exp_manager.explicit_log_dir.

KEY=VALUE sets a key; `nemo-aligner config {}` prints all of them. -v shows the configuration and
what libraries say. The other options are Hydra's: --config-dir, --config-name, --cfg job and so on
(--hydra-help).
"""


def job_modules() -> dict[str, tuple[str, str]]:
    """Of each job by its name, such as `train ppo`: its module, which is not imported, and what
    the job does.
    """
    found = {}
    for module in pkgutil.iter_modules(jobs.__path__):
        tree = ast.parse((Path(jobs.__path__[0]) / f"{module.name}.py").read_text("utf-8"))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.decorator_list:  # `job_main`
                text = (ast.get_docstring(node) or "").partition("\n")[0]
                found[node.name.replace("_", " ")] = module.name, text
    return dict(sorted(found.items(), key=lambda job: (GROUPS.index(job[0].split()[0]), job[0])))


def load_job(name: str, module: str) -> Any:
    """The function of a job."""
    loaded = importlib.import_module(f"nemo_aligner.jobs.{module}")
    return getattr(loaded, name.replace(" ", "_"))


def usage(prefix: str = "") -> str:
    """What `--help` prints, about the jobs and tools whose names begin with `prefix`."""
    texts = {name: text for name, (_, text) in {**job_modules(), **TOOLS}.items()}
    lines = [f"  {name:16} {text}" for name, text in texts.items() if name.startswith(prefix)]
    head = "usage: nemo-aligner COMMAND ...   (COMMAND --help says more)"
    return "\n".join([head, "", *lines])


def run_job(name: str, module: str, arguments: list[str]) -> None:
    """Start a job, or print its help."""
    from nemo_aligner.config.defaults import CONF
    from nemo_aligner.launch.command_line import hydra_runner
    from nemo_aligner.launch.start_up import VERBOSE

    job = load_job(name, module)
    if not HELP.isdisjoint(arguments):
        print(f"{inspect.getdoc(job)}\n{JOB_HELP.format(name.split()[-1])}")
        return
    if "-v" in arguments:
        os.environ[VERBOSE] = "1"  # the ranks that this process starts inherit it
        arguments = [word for word in arguments if word != "-v"]
    hydra_runner(str(CONF), job.config_name)(job)(arguments=arguments)


def show_config(words: list[str], modules: Mapping[str, tuple[str, str]]) -> int | None:
    """Print the configuration of the job, or of the tool, that `words` name."""
    from nemo_aligner.config.schema import explained

    names = {name.split()[-1]: name for name in modules}
    kinds = [*names, "generate", "evaluate"]
    if not HELP.isdisjoint(words):
        print(f"usage: nemo-aligner config NAME   (one of {', '.join(kinds)})")
        return None
    if len(words) != 1 or words[0] not in kinds:
        near = difflib.get_close_matches(words[0], kinds) if words else []
        advice = f" Did you mean {near[0]}?" if near else ""
        print(f"ERROR: name one of {', '.join(kinds)}.{advice}", file=sys.stderr)
        return ExitCode.USER_ERROR
    name = words[0]
    if name in names:
        name = load_job(names[name], modules[names[name]][0]).config_name
    print(explained(name))
    return None


@interruptible()
def main(argv: list[str] | None = None) -> int | None:
    """Run what the command line names; returns an exit code, None for 0."""
    argv = sys.argv[1:] if argv is None else argv
    modules = job_modules()
    for length in (1, 2):
        name, rest = " ".join(argv[:length]), argv[length:]
        if name in modules:
            run_job(name, modules[name][0], rest)
            return None
        if name == "config":
            return show_config(rest, modules)
        if name in TOOLS:
            tool = importlib.import_module(f"nemo_aligner.{TOOLS[name][0]}")
            return tool.main(argv if name == "inspect" else rest)
    words = [word for word in argv[:2] if word not in HELP]
    if words in ([], ["train"], ["serve"]):
        print(usage(" ".join(words)))
        return None
    name = " ".join(words[:2] if words[-1].isalnum() else words[:1])
    names = [*modules, *TOOLS]
    near = [each for each in names if words[0] in each.split()[1:]]  # its group is left out
    near += [*difflib.get_close_matches(name, names), *difflib.get_close_matches(words[0], names)]
    advice = f" Did you mean {near[0]}?" if near else ""
    print(f"ERROR: {name} is no command.{advice} See nemo-aligner --help.", file=sys.stderr)
    return ExitCode.USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
