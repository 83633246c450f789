"""The hand-written lines against prometheus_client's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from netacct.export.exposition import Row, Rows, encode

OPENMETRICS = "application/openmetrics-text;version=1.0.0"
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
ACCEPTS = [
    "",
    "*/*",
    "text/plain;version=0.0.4",
    "text/plain;version=1.0.0;escaping=allow-utf-8",
    OPENMETRICS,
    f"{OPENMETRICS};escaping=allow-utf-8",
    f"{OPENMETRICS};escaping=dots",
    f"{OPENMETRICS};escaping=values",
    PROMETHEUS_3,
]


class Page(Collector):
    """A collector that gives what it was given."""

    def __init__(self, *metrics: Metric) -> None:
        self.metrics = metrics

    def collect(self) -> tuple[Metric, ...]:
        """The metrics."""
        return self.metrics


def family(rows: list[Row]) -> Rows:
    """A counter with the labels of a workload metric."""
    labels = ("namespace", "workload_kind", "workload", "traffic")
    return Rows("netacct_workload_receive_bytes_total", "counter", 'Bytes.\n"Quoted\\"', labels, "bytes", rows)


values = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ['"', "\\", "\n", ""]
)
numbers = st.integers(0, 2**64) | st.floats() | st.sampled_from([999999, 1000000, 1000000.5, 2**53 + 1])
rows = st.lists(st.tuples(st.tuples(values, values, values, values), numbers), max_size=8)


@pytest.mark.parametrize("accept", ACCEPTS)
@given(rows=rows)
def test_the_page_is_byte_for_byte_prometheus_clients(accept: str, rows: list[Row]) -> None:
    """Whatever labels, values and format: `encode` writes what the library's encoder writes for the same samples."""
    page = Page(
        family(rows),
        Rows("netacct_leases", "gauge", "Leases.", (), "", [((), 3)]),
        Rows("netacct_build_info", "info", "Build.", ("version",), "", [(("0.1",), 1.0)]),
        GaugeMetricFamily("other", "Of somebody else.", value=1.5),
    )
    encoder, content_type = choose_encoder(accept)
    assert encode(page, accept) == (encoder(page), content_type)


def test_openmetrics_parses_and_ends_with_eof() -> None:
    """The OpenMetrics page is accepted by a parser, escapes come back as they were, and it ends with `# EOF`."""
    odd = ('quo"te', "back\\slash", "new\nline", "naïve-日本")
    page, content_type = encode(Page(family([(odd, 5)])), OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert page.endswith(b"\n# EOF\n")
    assert page.count(b"# EOF") == 1
    [parsed] = text_string_to_metric_families(page.decode())  # type: ignore[no-untyped-call]  # it has no annotations
    assert parsed.unit == "bytes"
    assert tuple(parsed.samples[0].labels[name] for name in family([]).labels) == odd


@pytest.mark.parametrize("version", ["abc", "1.0.0x", "1.x", "..", "-"])
def test_a_version_that_is_no_number_gets_the_plain_format(version: str) -> None:
    """prometheus_client raises for some of these; the client gets a page all the same."""
    page, content_type = encode(Page(family([])), f"application/openmetrics-text;version={version}")
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert page.startswith(b"# HELP")


def test_a_row_of_another_width_is_refused() -> None:
    """A row with a label value too few fails when the family is made, not when the page is written."""
    with pytest.raises(ValueError, match="netacct_workload_receive_bytes_total"):
        family([(("team-a",), 1)])


def test_families_of_the_library_pass_through() -> None:
    """The process metrics, which are not ours, are on the page as the library writes them."""
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    page, _ = encode(registry, "")
    assert b"process_resident_memory_bytes " in page


def test_rows_have_no_attributes_but_their_own() -> None:
    """Only `samples` is made at the first look; a misspelt attribute is an AttributeError."""
    assert len(family([(("a", "b", "c", "d"), 1)]).samples) == 1
    with pytest.raises(AttributeError):
        family([]).sample  # noqa: B018 - looking is the test
