# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""tests/promises.md names, for each promise of the pages, the tests that hold it: it has what the
pages have, and `make test` runs these tests.
"""

import ast
import functools
import re

from tests.unit.test_docs import ROOT, rows_of_tables

WHOLE_JOBS = "Whole jobs"  # a section of its own: what no row of a page says
LEFT_OUT = re.compile(r"\bmark\.(full|chaos|gpu|skip|skipif)\b")


def sections(path: str) -> dict[str, str]:
    """Texts under the headings of a file; that of its beginning is ""."""
    parts = re.split(r"(?m)^## (.*)\n", (ROOT / path).read_text(encoding="utf-8"))
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def first_cells(text: str, header: str) -> list[str]:
    cells = [re.sub(r"\*\*|`", "", row[0]) for row in rows_of_tables(text)]
    assert header in cells
    return [cell for cell in cells if cell != header]


def of_readme(parts: dict[str, str]) -> list[str]:
    """The commands of its block, and the snippet behind them."""
    commands = re.findall(r"(?m)^ {4}(nemo-aligner \w+ \w+)", parts["Use"])
    return commands + parts["Use"].count("```python") * ["the Python snippet"]


def of_reliability(parts: dict[str, str]) -> list[str]:
    promised = re.findall(r"(?m)^\* \*\*(.+?)\.\*\*", parts["What is promised"])
    return promised + first_cells(parts["Faults"], "Fault")


def of_parallelism(parts: dict[str, str]) -> list[str]:
    """The axes, the paragraphs that begin in bold, and the defects to their first comma or so."""
    text, defects = parts[""].split("**Defects of Megatron Core that this project avoids**")
    axes = first_cells(text.partition("\n**")[0], "Axis")
    paragraphs = re.findall(r"(?m)^\*\*(.+?)\.?\*\*", text)
    return axes + paragraphs + re.findall(r"(?m)^\* ([^,;.(]*[^,;.( ])", defects)


def of_differences(parts: dict[str, str]) -> list[str]:
    return first_cells(parts["Differences"], "What")


PAGES = {"README.md": of_readme, "docs/troubleshooting.md": of_reliability}
PAGES |= {"docs/parallelism.md": of_parallelism, "docs/migration.md": of_differences}


def table() -> dict[str, list[list[str]]]:
    """[promise, tests] of each section of the table."""
    found = {name: rows_of_tables(text) for name, text in sections("tests/promises.md").items()}
    assert found.pop("") == []
    return {name: rows[1:] for name, rows in found.items()}


def test_the_table_has_the_promises_of_the_pages():
    rows = table()
    assert rows.keys() == {*PAGES, WHOLE_JOBS}
    for page, promises in PAGES.items():
        written, listed = promises(sections(page)), [promise for promise, _ in rows[page]]
        missing, unknown = set(written) - set(listed), set(listed) - set(written)
        said = f"{page}: without a test {missing}; not there {unknown}"
        assert not missing and not unknown, said
        assert len(written) == len(listed) == len(set(listed)), f"{page}: a promise stands twice"


def test_make_test_runs_the_tests_of_the_table():
    rows = [(row[0], test) for row in sum(table().values(), []) for test in row[1].split(", ")]
    wrong = [f"{promise}: {test}: {why}" for promise, test in rows if (why := why_not(test))]
    assert not wrong, "\n".join(wrong)


def test_a_test_that_make_test_leaves_out_holds_no_promise():
    for test, why in (
        ("unit/test_nowhere.py::test_x", "there is no such file"),
        ("unit/test_losses.py::test_x", "there is no such test"),
        ("gpu/test_one_gpu.py::test_x", "make test does not run this folder"),
        ("functional/test_own_model.py::test_the_page_holds", "pytest.mark.full"),
        ("chaos/test_soak.py::test_a_long_run_holds_what_a_short_one_does", "pytest.mark.chaos"),
        ("unit/test_packaging.py::test_files_open_with_the_licence_header", "it may be skipped"),
    ):
        assert str(why_not(test)).startswith(why), test


@functools.cache
def module(file: str) -> list[ast.stmt]:
    return ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8")).body


def why_not(test: str) -> str | None:
    """Why `make test` runs no case of a test on a machine like any other; None: it runs one."""
    file, _, name = test.partition("::")
    if not (ROOT / "tests" / file).is_file():
        return "there is no such file"
    folders = re.search(r"(?m)^ALL_TESTS := (.*)$", (ROOT / "Makefile").read_text())[1].split()
    if f"tests/{file.partition('/')[0]}" not in folders:
        return "make test does not run this folder"
    named = {
        each.targets[0].id: each.value
        for each in module(file)
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name)
    }
    tests = [each for each in module(file) if getattr(each, "name", None) == name]
    if not tests:
        return "there is no such test"
    of_module = named.get("pytestmark", ast.List([]))
    marks = [*tests[0].decorator_list, *getattr(of_module, "elts", [of_module])]
    marks = [named.get(mark.id, mark) if isinstance(mark, ast.Name) else mark for mark in marks]
    if left_out := [ast.unparse(mark) for mark in marks if leaves_out(mark)]:
        return left_out[0]
    return "it may be skipped" if "pytest.skip(" in ast.unparse(tests[0]) else None


def leaves_out(mark: ast.expr) -> bool:
    """Whether a mark leaves out a test; of the cases of a parametrized one, all."""
    if isinstance(mark, ast.Call) and ast.unparse(mark.func).endswith(".parametrize"):
        cases = getattr(mark.args[1], "elts", [])
        return bool(cases) and all(LEFT_OUT.search(ast.unparse(case)) for case in cases)
    return bool(LEFT_OUT.search(ast.unparse(mark)))
