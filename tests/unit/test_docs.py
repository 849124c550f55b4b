# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""README, the pages of docs/ and their neighbours: every file and name that they mention exists,
links lead somewhere, figures stand in one place, and the site has all pages.
"""

import ast
import functools
import importlib
import re
import shlex
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from nemo_aligner.__main__ import TOOLS, job_modules, load_job
from nemo_aligner.config.checks import unknown_keys
from nemo_aligner.config.inert_keys import INERT
from nemo_aligner.config.schema import FREE, LIVE
from nemo_aligner.config.values import plain_dict
from nemo_aligner.core.errors import UserError
from nemo_aligner.utils import DOORS
from tests.cases import in_one_test
from tests.mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "nemo_aligner"
NAMES = "README", "CHANGELOG", "CONTRIBUTING", "SECURITY", "benchmarks/README"
NAMES += "benchmarks/figures", "examples/quickstart/README"
PAGES = [*(ROOT / f"{name}.md" for name in NAMES), *sorted((ROOT / "docs").glob("*.md"))]
every_page = in_one_test("page", PAGES)

# Folders in which a path of a page may lie, besides the page's own.
EXAMPLES = ("gpt", "cai", "data/steerlm")
FOLDERS = [ROOT, PACKAGE, *(ROOT / "examples/nlp" / name for name in EXAMPLES), ROOT / "conf"]
SUFFIXES = "py|yaml|yml|sbatch|md|txt|toml"
ROOMS = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
TOP_FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()} | ROOMS


def prose(page):
    """The text of a page without its blocks of code."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    return re.sub(r"(?m)^(?: {4}).*$", "", text)


def spans(page):
    return re.findall(r"`([^`\n]+)`", prose(page))


# --------------------------------------------------------------------------------- names and files


@functools.cache
def definitions(path):
    """Names that a file defines at its top, and `Class.member` of its classes."""
    return _names(ast.parse(path.read_text(encoding="utf-8")).body)


def _names(body, prefix=""):
    names = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(prefix + node.name)
        if isinstance(node, ast.ClassDef):
            names |= _names(node.body, f"{prefix}{node.name}.")
        if isinstance(node, ast.ImportFrom | ast.Import):
            names |= {prefix + (alias.asname or alias.name) for alias in node.names}
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {prefix + target.id for target in targets if isinstance(target, ast.Name)}
    return names


def find(path, page):
    """The file or folder that a page calls `path`, or None."""
    places = [folder / path for folder in (page.parent, *FOLDERS)]
    return next((place for place in places if place.exists()), None)


def problem(span, page):
    """What is wrong with a span of code that looks like a path or a dotted name; None: nothing."""
    if match := re.fullmatch(rf"([\w.\-/]+\.(?:{SUFFIXES}))(?::([\w.]+))?", span):
        path, name = match.groups()
        if path.startswith("path/to/"):
            return None
        file = find(path, page)
        if file is None:
            return f"there is no file {path}"
        if name and name not in definitions(file):
            return f"{path} does not define {name}"
    elif re.fullmatch(r"[\w\-]+(/[\w\-]+)*/?", span) and "/" in span:
        if span.partition("/")[0] in TOP_FOLDERS and find(span, page) is None:
            return f"there is no {span}"
    elif re.fullmatch(r"nemo_aligner(\.\w+)+", span):
        return missing_module(span)
    return None


def missing_module(dotted):
    """What is wrong with `nemo_aligner.room.module[.name]`; None: nothing."""
    if dotted.removeprefix("nemo_aligner.") in DOORS:
        return None
    parts, place = dotted.split(".")[1:], PACKAGE
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    if not parts:
        return None
    file = place / f"{parts[0]}.py"
    if not file.exists():
        file, parts = place / "__init__.py", ["", *parts]
    name = ".".join(parts[1:])
    return f"{dotted} does not exist" if name and name not in definitions(file) else None


@every_page
def test_files_and_names_exist(page):
    problems = [f"`{span}`: {wrong}" for span in spans(page) if (wrong := problem(span, page))]
    assert not problems, "\n".join(problems)


@in_one_test(
    "span",
    [
        "core/nowhere.py",
        "core/losses.py:no_such_loss",
        "core/types.py:Scores.no_such_field",
        "nemo_aligner/nowhere/",
        "nemo_aligner.core.nowhere",
        "nemo_aligner.core.losses.no_such_loss",
    ],
)
def test_names_that_do_not_exist_are_found(span):
    assert problem(span, ROOT / "README.md")


@every_page
def test_scripts_in_commands_exist(page):
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"(?:examples|benchmarks|scripts)/[\w/]+\.(?:py|sbatch)", text):
        assert (ROOT / path).exists(), path
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"(?m)^([\w-]+):", makefile))
    named = re.findall(r"\bmake ([a-z][\w-]+)\b(?=[` \n])", "\n".join(commands(text)))
    assert set(named) <= targets


def commands(text):
    """Indented lines and spans of code."""
    return re.findall(r"(?m)^ {4}(.*)$", text) + re.findall(r"`([^`\n]+)`", text)


@every_page
def test_commands_are_accepted(page):
    """Jobs know the keys, the parsers of tools the options, of each command in a block of code."""
    text = re.sub(r"\\\n *", " ", page.read_text(encoding="utf-8"))
    for line in re.findall(r"(?m)^ *(?:\$ |srun |torchrun .* -m )?nemo[-_]aligner (\w.*)$", text):
        refused = refusal(shlex.split(re.sub(r"\[(--.*?)\]", r"\1", line), comments=True))
        assert not refused, f"{line}: {refused}"


def refusal(words):
    """What is wrong with the words behind `nemo-aligner`; None: nothing."""
    jobs = job_modules()
    name = " ".join(words[:2]) if " ".join(words[:2]) in jobs else words[0]
    if name in jobs:
        config = load_job(name, jobs[name][0]).config_name
        other = [word for word in words[len(name.split()) :] if "=" not in word]
        return unknown_keys(settings(words), config) or set(other) - {"...", "-v", "KEY=VALUE"}
    if name not in TOOLS:
        return "no command"
    if name == "config":
        return "no job" if words[1] not in {job.split()[-1] for job in jobs} | set(TOOLS) else None
    if name == "report":
        return None
    parser = importlib.import_module(f"nemo_aligner.{TOOLS[name][0]}").parser()
    parse = parser.parse_args if name == "convert" else parser.parse_intermixed_args
    try:
        parse([word for word in words[1:] if word != "..."])
    except (UserError, SystemExit) as error:
        return str(error)
    return unknown_keys(settings(words), name) if name in LIVE else None


def settings(words):
    """`key=value` words as a nested dict."""
    found = [word.lstrip("+~") for word in words if "=" in word and not word.startswith("-")]
    return plain_dict(OmegaConf.from_dotlist(found))


WRONG = "train pppo", "train ppo trainer.ppo.reward_fun=a:b", "plan MODEL", "config gpt_ppo_actor"


@in_one_test("command", WRONG)
def test_commands_that_nothing_accepts_are_found(command):
    assert refusal(command.split())


SECTIONS = r"(?:model|trainer|exp_manager|inference|server|remote_\w+|pretrained_checkpoint)"


@every_page
def test_keys_exist(page):
    """Dotted keys, but where the page is about former ones."""
    if page.name in ("CHANGELOG.md", "migration.md"):
        return
    known = set().union(*(LIVE[config] | INERT[config].keys() for config in LIVE))
    known |= {".".join(key.split(".")[:n]) for key in known for n in range(1, 8)}
    named = re.findall(rf"(?<![\w./-])({SECTIONS}(?:\.\w+)+)(?=[=`\s])", page.read_text())
    below = tuple(f"{section}." for section in FREE)
    assert {key for key in named if key not in known and not key.startswith(below)} == set()


@every_page
def test_python_blocks_import_what_exists(page):
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("nemo_aligner"):
                for alias in node.names:
                    assert missing_module(f"{node.module}.{alias.name}") is None


@every_page
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), target


def anchors(page):
    headings = re.findall(r"(?m)^#+ (.*)$", prose(page))
    words = [re.sub(r"[^\w\- ]", "", heading).strip().lower() for heading in headings]
    return {each.replace(" ", "-") for each in words}


# ------------------------------------------------------------------------------------------- prose


@every_page
def test_lines_end_before_column_100(page):
    """Rows of tables cannot be cut."""
    lines = page.read_text(encoding="utf-8").splitlines()
    long = [line for line in lines if len(line) > 99 and not line.startswith("|")]
    assert not long, "\n".join(long)


@every_page
def test_a_response_is_called_response(page):
    words = re.sub(r"`[^`\n]+`", "", prose(page))
    assert not re.findall(r"(?i)\banswers?\b", words)


def test_readme_is_a_front_door():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 110
    for page in (ROOT / "docs").glob("*.md"):
        assert f"(docs/{page.name})" in text, f"README does not link docs/{page.name}"


def rows_of_tables(text):
    """Cells of every row of the tables in a text, headers included."""
    rows = [line for line in text.splitlines() if line.startswith("|") and line[1:4] != "---"]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_every_difference_is_told_from_both_sides():
    text = (ROOT / "docs/migration.md").read_text(encoding="utf-8")
    rows = rows_of_tables(text.split("\n## ")[1])
    headers = [row for row in rows if row[0] == "What"]
    differences = [row for row in rows if row[0] != "What"]
    assert len(differences) >= 35
    assert all(header == ["What", "Here", "NeMo-Aligner", "Why"] for header in headers)
    assert all(len(row) == 4 and row[0] and row[1] and row[2] for row in differences)


# ----------------------------------------------------------------------------------------- figures


def test_every_algorithm_has_a_command_and_a_test():
    """Each row of the comparison: a script with its configuration, which some test runs."""
    text = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    scripts = set()
    for command in re.findall(r"(?m)^\| \[.*\| `([^`]+)` \|$", text):
        (script,) = (ROOT / "examples/nlp").glob(f"*/{command.split()[0]}")
        configs = re.findall(r'config_name="(\w+)"', script.read_text(encoding="utf-8"))
        assert len(configs) == (script.parent.name == "gpt")  # others write data
        assert all((ROOT / "conf" / f"{config}.yaml").is_file() for config in configs)
        assert script.stem in tests, f"no test runs {script.name}"
        if script.parent.name == "gpt":
            scripts.add(script.name)
    trained = {path.name for path in (ROOT / "examples/nlp/gpt").glob("train_*.py")}
    assert scripts == trained


def test_readme_and_results_tell_of_the_same_run():
    """The quickstart's table in README is that of seed 0."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    told = {
        name.strip(): (before.strip(), after.strip())
        for name, before, after in re.findall(r"│ (.+?) │ (\S+) +│ (\S+) +│", readme)
    }
    results = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    rows = rows_of_tables(results)
    first = next(number for number, row in enumerate(rows) if row[0] == "`quickstart`")
    seed_0 = {row[2]: tuple(row[3].split(" → ")) for row in rows[first : first + 3]}
    assert told["validation reward"] == seed_0["validation reward"]
    assert told["gold score (-1 to 1)"] == seed_0["gold score"]
    assert told["KL to the reference, per token"] == seed_0["KL per token (`k1`)"]


def test_results_count_the_planted_faults():
    results = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    assert f"plants {len(MUTANTS)} faults" in results


@every_page
def test_no_placeholder_is_left_where_a_figure_belongs(page):
    words = r"\b(?:QUICKSTART|MEASURED|PYTHON\d+)_[A-Z]+\b|\b(?:TODO|XXX)\b|^[A-Z]+$"
    assert not re.findall(words, page.read_text(), re.MULTILINE)


def test_every_walkthrough_has_three_seeds():
    rows = rows_of_tables((ROOT / "docs/results.md").read_text(encoding="utf-8"))
    figures = {row[0].strip("`"): row[3:6] for row in rows}
    for target in ("quickstart", "rs", "dpo", "kto", "spin", "arithmetic"):
        assert all("→" in figure for figure in figures[target]), target


# -------------------------------------------------------------------------------------------- site


def test_the_site_has_every_page_and_every_room():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = _leaves(config["nav"])
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= listed
    rooms = ROOMS - {"utils", "metrics", "report", "conf", "__pycache__"}
    assert {f"api/{room}.md" for room in rooms} == {p for p in listed if p.startswith("api/")}


def _leaves(node):
    if isinstance(node, str):
        return {node}
    return set().union(*map(_leaves, node.values() if isinstance(node, dict) else node))


def test_the_workflow_runs_what_ci_runs():
    """The hosted workflow calls the commands of .ci/run and has no rights but to read."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    called = {step["run"] for step in steps if "run" in step}
    local = re.findall(r"(?m)^(?:exec )?(make \S+)$", (ROOT / ".ci/run").read_text())
    assert local and set(local) <= called
    assert workflow["permissions"] == {"contents": "read"}
    assert "secrets" not in (ROOT / ".github/workflows/ci.yml").read_text()
