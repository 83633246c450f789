"""RDMA adapters' own counters, from a copied sysfs tree."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from netacct.export.native import rdma_metrics
from netacct.kernel import rdma
from netacct.kernel.rdma import PortBytes
from netacct.model import Direction

RECEIVE, TRANSMIT = Direction.RECEIVE, Direction.TRANSMIT


def port(root: Path, device: str, number: str, files: Mapping[str, str | bytes]) -> None:
    """One port of an adapter, as the kernel shows it below /sys/class/infiniband (there a link to the device)."""
    target = root / "devices" / device
    for name, content in files.items():
        file = target / "ports" / number / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    link = root / "class" / device
    link.parent.mkdir(exist_ok=True)
    if not link.exists():
        link.symlink_to(target)


def read(root: Path) -> tuple[PortBytes, ...]:
    """What is read of the tree."""
    return rdma.read(str(root / "class"))


def test_data_counters_are_in_words_of_four_bytes(tmp_path: Path) -> None:
    """port_rcv_data and port_xmit_data are multiplied by four, for each port of each adapter, in order."""
    words = {"counters/port_rcv_data": "250\n", "counters/port_xmit_data": "4611686018427387904\n"}
    port(tmp_path, "mlx5_1", "1", words)
    port(tmp_path, "mlx5_0", "10", {"counters/port_rcv_data": "1\n"})
    port(tmp_path, "mlx5_0", "2", {"counters/port_rcv_data": "0\n"})
    assert read(tmp_path) == (
        PortBytes("mlx5_0", "2", RECEIVE, 0),
        PortBytes("mlx5_0", "10", RECEIVE, 4),
        PortBytes("mlx5_1", "1", RECEIVE, 1000),
        PortBytes("mlx5_1", "1", TRANSMIT, 1 << 64),
    )


def test_efa_counts_bytes(tmp_path: Path) -> None:
    """An adapter without port counters is read from hw_counters, which are in bytes."""
    port(tmp_path, "efa_0", "1", {"hw_counters/rx_bytes": "1001\n", "hw_counters/tx_bytes": "7\n"})
    assert read(tmp_path) == (PortBytes("efa_0", "1", RECEIVE, 1001), PortBytes("efa_0", "1", TRANSMIT, 7))


def test_port_counters_go_before_hw_counters(tmp_path: Path) -> None:
    """Where a port has both kinds, only one is told."""
    port(tmp_path, "d", "1", {"counters/port_rcv_data": "2\n", "hw_counters/rx_bytes": "5\n"})
    assert read(tmp_path) == (PortBytes("d", "1", RECEIVE, 8),)


@pytest.mark.parametrize("content", ["", "N/A (no PMA)\n", "-1\n", "0x10\n", "4294967295\n", "9" * 5000, b"\xff\xfe"])
def test_what_is_no_count_is_left_out(tmp_path: Path, content: str | bytes) -> None:
    """Garbage, and the value at which a 32-bit counter stops, cost the port's one direction only."""
    port(tmp_path, "d", "1", {"counters/port_rcv_data": content, "counters/port_xmit_data": "3\n"})
    assert read(tmp_path) == (PortBytes("d", "1", TRANSMIT, 12),)


def test_a_file_that_fails_is_left_out(tmp_path: Path) -> None:
    """A counter that is a directory, and an adapter without ports, are no error."""
    port(tmp_path, "d", "1", {"counters/port_rcv_data/x": "", "counters/port_xmit_data": "1\n"})
    (tmp_path / "class" / "bare").mkdir()
    (tmp_path / "class" / "file").write_text("")
    assert read(tmp_path) == (PortBytes("d", "1", TRANSMIT, 4),)


def test_without_adapters_there_is_nothing(tmp_path: Path) -> None:
    """No /sys/class/infiniband, no ports, and no metric."""
    assert read(tmp_path) == ()
    assert rdma_metrics(lambda: read(tmp_path)) == []


def test_ports_become_metrics(tmp_path: Path) -> None:
    """Each direction is a family with a sample for each port that has it."""
    port(tmp_path, "mlx5_0", "1", {"counters/port_rcv_data": "250\n"})
    (metric,) = rdma_metrics(lambda: read(tmp_path))
    (sample,) = metric.samples
    assert (sample.name, sample.labels, sample.value) == (
        "netacct_rdma_receive_bytes_total",
        {"device": "mlx5_0", "port": "1"},
        1000,
    )
