# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""NeMo-Aligner's public names can be imported, and its calls mean here what they meant there.

`nemo_aligner_names.txt` has one line per function, method and class without methods of its modules
for PPO, rejection sampling, SFT and reward models, at 0.7.0 and at its last revision:
`module:name` and the arguments.
"""

import ast
import importlib
import inspect
from pathlib import Path

from nemo_aligner.core.retired import RETIRED
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import RETIRED_HOOKS
from tests.cases import in_one_test
from tests.unit.test_migration_page import generator

CHANGED_CALLS = generator().CHANGED_CALLS
NAMES = Path(__file__).parent / "nemo_aligner_names.txt"
FACTS = [line.partition(" ")[::2] for line in NAMES.read_text().splitlines()]
WHERE = {where for where, _ in FACTS}
WHERE |= {where.rpartition(".")[0] for where in WHERE if "." in where.partition(":")[2]}


def is_retired(where: str) -> bool:
    """Whether a name, or the class that it belongs to, is in `RETIRED`."""
    module, _, name = where.partition(":")
    return name.partition(".")[0] in RETIRED.get(module, {})


def find(where: str):
    """The object of `module:name`, as it stands in its class."""
    module, _, name = where.partition(":")
    owner, _, last = name.rpartition(".")
    holder = importlib.import_module(module)
    holder = getattr(holder, owner) if owner else holder
    return inspect.getattr_static(holder, last) if owner else getattr(holder, last)


def test_the_list_is_whole():
    assert len(FACTS) > 310 and len(WHERE) > 350
    assert len({where.partition(":")[0] for where in WHERE}) == 31


@in_one_test("where", sorted(WHERE))
def test_name_is_there(where):
    assert is_retired(where) or where in CHANGED_CALLS or find(where) is not None


BINDING = [(w, text) for w, text in FACTS if "(" in text and not is_retired(w)]
CALLS = [(w, text) for w, text in BINDING if "property" not in text and "*args" not in text]


@in_one_test("where, text", CALLS)
def test_old_call_binds_each_argument_to_its_name(where, text):
    kind, _, arguments = text.partition("(")
    theirs = ast.parse(f"def f({arguments}: pass").body[0].args
    names = [argument.arg for argument in theirs.args]
    required = names[: len(names) - len(theirs.defaults)]
    by_name = {argument.arg: argument.arg for argument in theirs.kwonlyargs}
    in_class = "." in where.partition(":")[2] and "staticmethod" not in kind
    if in_class:
        names, required = names[1:], required[1:]  # self or cls

    try:
        ours = find(where)
    except AttributeError:
        assert where in CHANGED_CALLS
        return
    assert isinstance(ours, staticmethod) == ("staticmethod" in kind)
    ours = getattr(ours, "__func__", ours)
    if getattr(ours, "also_takes", None) == tuple(names):
        return
    signature = inspect.signature(ours.method if hasattr(ours, "method") else ours)
    parameters = list(signature.parameters.values())[int(in_class) :]
    signature = signature.replace(parameters=parameters)

    def wrong() -> str:
        by_order = signature.bind(*names, **by_name)  # every argument's value is its name
        for name, value in by_order.arguments.items():
            packed = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
            if not packed and name != value:
                return f"{value} arrives as {name}"
        signature.bind(**{name: name for name in names}, **by_name)
        signature.bind(*required, **by_name)
        return ""

    try:
        problem = wrong()
    except TypeError as error:
        problem = str(error)
    if where in CHANGED_CALLS:
        assert problem, f"{where} binds; remove it from CHANGED_CALLS"
    else:
        assert not problem, f"{where}{signature}: {problem}"


def test_changed_calls_and_retired_names_are_nemo_aligners():
    assert CHANGED_CALLS.keys() <= WHERE
    retired = {f"{module}:{name}" for module, entries in RETIRED.items() for name in entries}
    assert retired <= WHERE
    methods = {where.rpartition(".")[2] for where in WHERE}
    assert RETIRED_HOOKS.keys() <= methods
