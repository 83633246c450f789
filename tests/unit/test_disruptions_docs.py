"""The pages about disruptions and nightmares name tests that exist, and all tests that are made for them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE, NIGHTMARES = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("disruptions.md", "nightmares.md"))
ROWS = [line for line in PAGE.splitlines() if line.startswith("|") and not line.startswith(("| what happens", "|---"))]
REPORTED = [line for line in NIGHTMARES.partition("## What cannot")[0].splitlines() if line.startswith("| [")]
LINK = re.compile(r"\[([\w.-]+/[\w.-]+)#(\d+)\]\(https://github\.com/([\w.-]+/[\w.-]+)/(?:issues|pull)/(\d+)\)")
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE + NIGHTMARES)


def functions_in(file: str) -> set[str]:
    """The tests in a file, by its path in the repository."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED}))
def test_every_test_that_is_named_exists(file: str) -> None:
    """Each `file::name` of the pages is a test of this repository."""
    assert {name for named, name in NAMED if named == file} <= functions_in(file)


@pytest.mark.parametrize("name", ["disruptions", "rival", "nightmares"])
def test_every_disruption_that_is_tested_is_listed(name: str) -> None:
    """Each test of the files that belong to the pages is in one of their tables."""
    file = f"tests/kernel/test_{name}.py"
    assert {test for named, test in NAMED if named == file} == functions_in(file)


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_every_row_is_complete(row: str) -> None:
    """Each disturbance has what is done, what becomes of totals, a test, and a public report or a dash."""
    what, done, totals, test, report = (cell.strip() for cell in row.strip("|").split("|"))
    assert what
    assert done
    assert totals
    assert re.search(r"`tests/\S+::\w+`", test)
    links = LINK.findall(report)
    assert links or report.startswith("—")
    assert all((name, number) == (repository, page) for name, number, repository, page in links)


@pytest.mark.parametrize("row", REPORTED, ids=range(len(REPORTED)))
def test_every_nightmare_is_complete(row: str) -> None:
    """Each nightmare has a public report, what went wrong, what is done, and a test."""
    report, wrong, done, test = (cell.strip() for cell in row.strip("|").split("|"))
    links = LINK.findall(report)
    assert links
    assert all((name, number) == (repository, page) for name, number, repository, page in links)
    assert wrong
    assert done
    assert re.search(r"`tests/\S+::\w+`", test)
