"""Whatever a list file holds, reading it ends in a list or in a ConfigError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netacct.errors import ConfigError
from netacct.policy_lists import FORMATS, Published, Selection, parse, select
from netacct.yamlfile import Node

FIXTURES = Path(__file__).parents[1] / "fixtures/lists"
LISTS = {
    "aws": json.loads((FIXTURES / "ip-ranges.json").read_text()),
    "google": json.loads((FIXTURES / "cloud.json").read_text()),
    "azure": json.loads((FIXTURES / "ServiceTags_Public.json").read_text()),
}
WORDS = sorted({word for document in LISTS.values() for word in json.dumps(document).split('"')[1::2]})

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(WORDS)
documents = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(WORDS) | st.text(), inner),
    max_leaves=20,
)
formats = st.sampled_from(sorted(FORMATS))


def everything(kind: str) -> Selection:
    """A selection of all that a list has."""
    return Selection(kind, "list", Node("p.yaml", "classes.a.list", 2, None), {}, {}, {})


def attempt(data: bytes, kind: str) -> Published | None:
    """Read a list and take everything of it; None where it is refused."""
    try:
        published = parse(data, "list", kind)
        taken = select(published, everything(kind))
    except ConfigError:
        return None
    assert all(listed.network.prefixlen > 0 for listed in taken)
    return published


@given(data=st.binary(), kind=formats)
def test_any_bytes(data: bytes, kind: str) -> None:
    """No bytes crash it."""
    attempt(data, kind)


@given(document=documents, kind=formats)
def test_any_json(document: Any, kind: str) -> None:
    """No JSON crashes it, also where the keys are those of a list."""
    attempt(json.dumps(document).encode(), kind)


@given(data=st.data(), kind=formats)
def test_a_truncated_list_is_refused(data: st.DataObject, kind: str) -> None:
    """A list that is cut anywhere before its last bracket is refused, and never taken in part."""
    text = json.dumps(LISTS[kind]).encode()
    assert attempt(text[: data.draw(st.integers(0, len(text) - 1))], kind) is None


@given(data=st.data(), kind=formats, value=documents)
def test_one_wrong_value(data: st.DataObject, kind: str, value: Any) -> None:
    """Any value in any place of a good list gives a list or an error."""
    document = json.loads(json.dumps(LISTS[kind]))
    item: Any = document
    while True:
        keys = sorted(item) if isinstance(item, dict) else range(len(item))
        if not keys:
            break
        key = data.draw(st.sampled_from(list(keys)))
        if not isinstance(item[key], dict | list) or data.draw(st.integers(0, 3)) == 0:
            item[key] = value
            break
        item = item[key]
    attempt(json.dumps(document).encode(), kind)


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_the_good_lists_are_taken(kind: str) -> None:
    """What the tests above damage is good before."""
    assert attempt(json.dumps(LISTS[kind]).encode(), kind) is not None
