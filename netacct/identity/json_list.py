"""Reads a Kubernetes list (PodList and its like) item by item: a list of 200,000 pods has a gigabyte, a pod 10 kB."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

ITEM_LIMIT = 8 << 20
"""Characters of one item: etcd takes no object of more than 1.5 MiB."""

_SPACE = " \t\n\r"


class JsonList:
    """One list, `{"kind": …, "metadata": {…}, "items": [ … ]}`, whose keys may come in any order.

    Args:
        chunks: the bytes of the document, in pieces of any size.

    Attributes:
        fields: the members of the document other than `items`; complete when all items were read.
    """

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self.fields: dict[str, Any] = {}
        self._chunks = iter(chunks)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder = json.JSONDecoder()
        self._text, self._at = "", 0

    def items(self) -> Iterator[Any]:
        """The items, each once. Raises ValueError where this is no list of Kubernetes, or cut off.

        Also at the end: what a proxy or an API server says instead of a list would be a list of nothing.
        """
        yield from self._members()
        kind = self.fields.get("kind")
        if not isinstance(kind, str) or not kind.endswith("List"):
            raise ValueError(f"is no list of Kubernetes: its kind is {kind!r:.40}")
        if self.fields.get("items") is not None:
            raise ValueError("is no list of Kubernetes: its items are no array")

    def _members(self) -> Iterator[Any]:
        self._expect("{")
        if self._skip("}"):
            return
        while True:
            key = self._value()
            self._expect(":")
            if key == "items" and self._skip("["):
                yield from self._elements()
            elif isinstance(key, str):
                self.fields[key] = self._value()
            if self._skip("}"):
                return
            self._expect(",")

    @property
    def resource_version(self) -> str:
        """`metadata.resourceVersion`; "" where the list has none."""
        metadata = self.fields.get("metadata")
        version = metadata.get("resourceVersion") if isinstance(metadata, Mapping) else None
        return version if isinstance(version, str) else ""

    def _elements(self) -> Iterator[Any]:
        if self._skip("]"):
            return
        while True:
            yield self._value()
            if self._skip("]"):
                return
            self._expect(",")

    def _value(self) -> Any:
        """The next value, whole."""
        self._peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except (ValueError, RecursionError):
                end = len(self._text)
            if end < len(self._text):  # what ends with the text may go on, as a number does
                self._at = end
                return value
            if len(self._text) - self._at > ITEM_LIMIT or not self._more():
                raise ValueError("is not JSON, or cut off")

    def _peek(self) -> str:
        """The next character that is no space."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in _SPACE:
                    return self._text[self._at]
                self._at += 1
            if not self._more():
                raise ValueError("is empty, or cut off")

    def _skip(self, character: str) -> bool:
        found = self._peek() == character
        self._at += found
        return found

    def _expect(self, character: str) -> None:
        if not self._skip(character):
            raise ValueError(f"is no list of Kubernetes: {self._text[self._at :][:20]!r} instead of {character!r}")

    def _more(self) -> bool:
        """Read on: as much again as is waiting, so that a long item is not tried at each of its pieces."""
        waiting = self._text[self._at :]
        pieces, size = [waiting], 0
        for chunk in self._chunks:
            pieces.append(self._utf8.decode(chunk))
            size += len(pieces[-1])
            if size and size >= len(waiting):
                break
        self._text, self._at = "".join(pieces), 0
        return size > 0
