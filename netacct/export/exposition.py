"""Writes a registry in the text format or in OpenMetrics, as the Accept header wants it.

prometheus_client decides the format and writes every family that is not ours. The lines of our own families, which can
be thousands, are written here: byte for byte what prometheus_client would write (a test compares), at about a sixth of
its price. It looks at each name and label name of each sample anew, we once for each family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from prometheus_client import generate_latest
from prometheus_client.core import Metric, Sample
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Row: TypeAlias = tuple[tuple[str, ...], float]
"""One sample: label values, in the order of the family's labels, and the value."""

Encoder: TypeAlias = Callable[[Collector], bytes]

_EOF = b"# EOF\n"
_NAMES_AS_THEY_ARE = (openmetrics.UNDERSCORES, openmetrics.ALLOWUTF8)
"""The escaping schemes that leave a name of letters, digits and underscores alone. The others rewrite every name."""


class Rows(Metric):
    """A family whose samples are kept as rows, because making Sample objects costs as much as writing them.

    `samples` is there for whoever asks (`name[]`, tests), made at the first look. The names need no escaping. Raises
    ValueError where a row has not one value for each label.
    """

    def __init__(self, name: str, kind: str, text: str, labels: Sequence[str], unit: str, rows: Iterable[Row]) -> None:
        super().__init__(name.removesuffix("_total").removesuffix("_info"), text, kind, unit)
        del self.samples
        self.sample_name = name
        self.labels = tuple(labels)
        self.rows = tuple(rows)
        if any(len(values) != len(self.labels) for values, _ in self.rows):
            raise ValueError(f"{name}: a sample has not one value for each of {self.labels}")

    def __getattr__(self, name: str) -> list[Sample]:
        if name != "samples":
            raise AttributeError(name)
        named = ((dict(zip(self.labels, values, strict=True)), value) for values, value in self.rows)
        self.samples = [Sample(self.sample_name, labels, value) for labels, value in named]
        return self.samples


def encode(registry: Collector, accept: str) -> tuple[bytes, str]:
    """The page, and its Content-Type.

    Args:
        registry: what to collect.
        accept: the Accept header of the request, or "".
    """
    encoder, content_type = _choose(accept)
    by_hand = getattr(encoder, "keywords", {}).get("escaping", openmetrics.UNDERSCORES) in _NAMES_AS_THEY_ARE
    seen: dict[tuple[tuple[str, ...], tuple[str, ...]], str] = {}
    chunks = []
    for metric in registry.collect():
        if by_hand and isinstance(metric, Rows):
            chunks.append(_encode_one(encoder, Metric(metric.name, metric.documentation, metric.type, metric.unit)))
            chunks.append(_lines(metric, seen).encode())
        else:
            chunks.append(_encode_one(encoder, metric))
    if _is_openmetrics(content_type):
        chunks.append(_EOF)
    return b"".join(chunks), content_type


def _choose(accept: str) -> tuple[Encoder, str]:
    """prometheus_client's choice; the plain text format where it chokes on a version that is no number."""
    try:
        encoder, content_type = choose_encoder(accept)
    except (TypeError, ValueError):
        return generate_latest, CONTENT_TYPE_PLAIN_0_0_4
    return encoder, content_type


def _is_openmetrics(content_type: str) -> bool:
    return content_type.startswith("application/openmetrics-text")


class _One:
    """A collector of one family."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)


def _encode_one(encoder: Encoder, metric: Metric) -> bytes:
    return encoder(_One(metric)).removesuffix(_EOF)


def _lines(metric: Rows, seen: dict[tuple[tuple[str, ...], tuple[str, ...]], str]) -> str:
    """The sample lines. `seen` keeps label sets already written on this page: most come four times."""
    name, labels = metric.sample_name, metric.labels
    order = sorted(range(len(labels)), key=labels.__getitem__)
    out = []
    for values, value in metric.rows:
        key = (labels, values)
        text = seen.get(key)
        if text is None:
            text = seen[key] = _label_text(labels, values, order)
        number = floatToGoString(value)  # type: ignore[no-untyped-call]  # it has no annotations
        out.append(f"{name}{text} {number}\n")
    return "".join(out)


def _label_text(labels: Sequence[str], values: Sequence[str], order: Sequence[int]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{labels[i]}="{_escape(values[i])}"' for i in order) + "}"


def _escape(value: str) -> str:
    """A label value as both formats write it (OpenMetrics 1.0, section "ABNF": escaped-char)."""
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
