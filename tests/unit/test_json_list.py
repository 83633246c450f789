"""Lists of Kubernetes are read item by item, whatever the pieces in which they come."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netacct.identity import json_list
from netacct.identity.json_list import JsonList

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
documents = st.builds(
    lambda items, before, after: {"kind": "PodList", **before, "items": items, **after},
    st.lists(values, max_size=5),
    st.dictionaries(st.sampled_from(["apiVersion", "extra"]), values, max_size=2),
    st.dictionaries(st.just("metadata"), st.just({"resourceVersion": "12"}), max_size=1),
)


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    """The data, `size` bytes at a time."""
    return (data[at : at + size] for at in range(0, len(data), size))


@given(document=documents, size=st.integers(1, 40), ascii_only=st.booleans())
def test_it_reads_what_json_reads(document: dict[str, Any], size: int, ascii_only: bool) -> None:
    """Items and fields are those of the whole document, cut anywhere, also inside of a character."""
    listed = JsonList(pieces(json.dumps(document, ensure_ascii=ascii_only).encode(), size))

    assert list(listed.items()) == document["items"]
    assert listed.fields == {key: value for key, value in document.items() if key != "items"}
    assert listed.resource_version == ("12" if "metadata" in document else "")


@given(document=documents, data=st.data(), size=st.integers(1, 40))
def test_what_is_cut_off_is_never_whole(document: dict[str, Any], data: st.DataObject, size: int) -> None:
    """A document that ends before its end raises ValueError, wherever that is."""
    whole = json.dumps(document).encode()
    kept = data.draw(st.integers(0, len(whole) - 1))

    with pytest.raises(ValueError, match="cut off"):
        list(JsonList(pieces(whole[:kept], size)).items())


@pytest.mark.parametrize(
    "text", ["[]", "null", "<html>", '{"items" 1}', '{"items": [1 2]}', '{"items": [}', '{"kind": "a" "b": 1}', "{,}"]
)
def test_what_is_no_list(text: str) -> None:
    """Anything else raises ValueError."""
    with pytest.raises(ValueError, match="is no"):
        list(JsonList([text.encode()]).items())


@pytest.mark.parametrize("document", [{}, {"kind": "Status", "code": 503}, {"kind": ["PodList"]}, {"kind": None}])
def test_what_says_no_list_is_none(document: dict[str, Any]) -> None:
    """A document without items of another kind, which a list of nothing would look like, raises ValueError."""
    with pytest.raises(ValueError, match="its kind is"):
        list(JsonList([json.dumps(document).encode()]).items())


@pytest.mark.parametrize("items", ["x", {"a": 1}, 7, False])
def test_items_that_are_no_array(items: object) -> None:
    """A list whose items are something else than an array or null raises ValueError."""
    with pytest.raises(ValueError, match="items are no array"):
        list(JsonList([json.dumps({"kind": "PodList", "items": items}).encode()]).items())


@pytest.mark.parametrize("items", ["", ',"items": null', ',"items": []', ' , "items" : [ ] '])
def test_a_list_of_nothing(items: str) -> None:
    """Go writes an empty list as null, an empty array, or not at all."""
    text = f'{{"kind":"PodList"{items}}} \n'
    assert list(JsonList([text.encode()]).items()) == []


def test_an_item_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """An item that goes on and on is no item: memory has a bound."""
    monkeypatch.setattr(json_list, "ITEM_LIMIT", 10_000)

    def endless() -> Iterator[bytes]:
        yield b'{"items": ["'
        while True:
            yield b"x" * 1000

    with pytest.raises(ValueError, match="cut off"):
        list(JsonList(endless()).items())


def test_what_nests_too_deep() -> None:
    """A document that would exhaust the stack is no list."""
    with pytest.raises(ValueError, match="is no"):
        list(JsonList([b'{"items": [' + b"[" * 200_000]).items())


def test_memory_is_that_of_an_item() -> None:
    """Of a list of 110 pods of 10 kB each, never more than a part is held at once."""
    pod = {"metadata": {"name": "p", "annotations": {"a": "x" * 10_000}}}
    document = json.dumps({"kind": "PodList", "metadata": {}, "items": [pod] * 110}).encode()
    tracemalloc.start()

    count = sum(1 for _ in JsonList(pieces(document, 65536)).items())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert count == 110
    assert peak < len(document) / 2
