"""The cluster of the session. Tests make namespaces of their own in it, and leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from clusterlab import prerequisites
from clusterlab.cluster import Cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test here a quarter of an hour, with what it is the first to need: the cluster, or a run in it."""
    for item in items:
        if item.get_closest_marker("cluster") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two nodes, kube-proxy by iptables, an agent on each node; skips with the reason where none can run."""
    try:
        prerequisites.require()
    except prerequisites.MissingError as error:
        pytest.skip(f"no cluster here: {error}")
    with Cluster() as made:
        for agent in made.agents:
            agent.start()
        yield made


@pytest.fixture(autouse=True)
def _mended(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test stopped, and did not start again because it failed, is no trouble for the next one."""
    yield
    if "cluster" in request.fixturenames:
        made: Cluster = request.getfixturevalue("cluster")
        made.mend()
