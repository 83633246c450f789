"""The pages: that what they link to is there, and that each can be found from the README."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *(ROOT / name for name in ("monitoring/README.md", "rules/README.md")),
        *(ROOT / "docs").rglob("*.md"),
    ]
)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    """The page without code, which may hold what looks like a link or a heading."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)


def links(page: Path) -> list[tuple[Path, str]]:
    """What the page links to in this repository: file and anchor, "" for none."""
    found = []
    for target in _LINK.findall(re.sub(r"`[^`\n]*`", "code", prose(page))):
        if "://" not in target and not target.startswith("mailto:"):
            path, _, anchor = target.partition("#")
            found.append(((page.parent / path).resolve() if path else page, anchor))
    return found


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of the page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    shown = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in shown}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link of a page names a file of this repository, and a heading that is there."""
    for target, anchor in links(page):
        assert target.exists(), f"{page.name} links to {target}"
        assert target.is_relative_to(ROOT)
        assert not anchor or anchor in anchors(target), f"{page.name} links to #{anchor} of {target.name}"


def test_every_page_is_found_from_the_readme() -> None:
    """Each page is linked from the README's table, or from a page that is."""
    table = prose(ROOT / "README.md").partition("## Documentation")[2]
    first = {(ROOT / path.partition("#")[0]).resolve() for path in _LINK.findall(table)}
    second = {target for page in first if page.suffix == ".md" for target, _ in links(page)}
    assert set(PAGES) - first - second - {ROOT / "README.md"} == set()


def test_what_contributing_names_is_there() -> None:
    """Every file and folder in the first column of CONTRIBUTING's tables exists, in the folder named before it."""
    tables = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Where things are")[2]
    for row in re.findall(r"^\| (`.*?) \|", tables, re.MULTILINE):
        folder = ROOT
        for name in re.findall(r"`([^`]+)`", row):
            found = [path for place in (ROOT, ROOT / "netacct", folder) for path in place.glob(name)]
            assert found, f"CONTRIBUTING names {name}"
            folder = found[0].parent


def test_the_readme_names_each_page_once() -> None:
    """The README's table has one row, and one link, for a page."""
    table = prose(ROOT / "README.md").partition("## Documentation")[2]
    named = _LINK.findall(table)
    assert len(named) == len(set(named))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_has_a_place_to_be_filled(page: Path) -> None:
    """No page has a mark that says that something is to come."""
    assert not re.search(r"\b(TODO|TBD|FIXME|XXX|[A-Z]+-SAMPLE)\b", page.read_text(encoding="utf-8"))
