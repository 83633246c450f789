"""docs/policies.md and rules/README.md against the code."""

import re
import shutil
from pathlib import Path

import pytest

from netacct.list_files import SIZE_LIMIT
from netacct.policy_file import BUILTIN, CLASSES_LIMIT, PORTS_LIMIT, RESERVED, load, shipped
from netacct.policy_lists import FORMATS, PREFIXES_LIMIT

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/policies.md").read_text()
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_load(tmp_path: Path, number: int) -> None:
    """Every example on the page is a policy that loads, with the lists that it names beside it."""
    shutil.copytree(ROOT / "tests/fixtures/lists", tmp_path / "lists")
    file = tmp_path / "example.yaml"
    file.write_text(EXAMPLES[number])
    assert load(str(file)).classes


def test_page_has_examples() -> None:
    """The page's examples are found at all."""
    assert len(EXAMPLES) >= 5


@pytest.mark.parametrize("cidr", BUILTIN["private"])
def test_page_lists_private(cidr: str) -> None:
    """Each CIDR of the built-in list stands in the table of what `private` covers."""
    table = PAGE.split("## What `private` covers")[1].split("```")[0]
    assert re.search(rf"(?<![0-9a-f:.]){re.escape(cidr)}\b", table)


def test_page_states_the_limits() -> None:
    """Reserved names and the limits are on the page."""
    assert all(f"`{name}`" in PAGE for name in RESERVED)
    assert f"At most {CLASSES_LIMIT} classes" in PAGE
    assert f"at most {PORTS_LIMIT} |" in PAGE
    assert f"A list may be {SIZE_LIMIT >> 20} MiB, and one selection may take {PREFIXES_LIMIT:,} prefixes" in PAGE


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_listed(name: str) -> None:
    """Each format of a cloud's list has a row that says what file it is."""
    assert re.search(rf"^\| `{name}` \| \[", PAGE, re.MULTILINE)


@pytest.mark.parametrize("name", shipped())
def test_shipped_are_listed(name: str) -> None:
    """Each shipped policy is named on the page and has a row in rules/README.md."""
    assert f"`{name}`" in PAGE
    assert f"| `{name}` |" in (ROOT / "rules/README.md").read_text()
