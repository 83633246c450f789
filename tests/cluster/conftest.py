"""The cluster of the session. Tests make namespaces of their own in it, and leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from clusterlab import prerequisites
from clusterlab.cluster import Cluster


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
