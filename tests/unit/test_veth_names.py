"""Host-side names of pods' interfaces, as each CNI makes them."""

from __future__ import annotations

import pytest

from netacct.identity.veth import digest


@pytest.mark.parametrize(
    ("name", "namespace", "pod"),
    [
        ("cali7f94ce7c295", "default", "podA"),  # Calico's own test vector
        ("enib5faff8a083", "kube-system", "coredns-57ff979f67-qqbdh"),  # the AWS VPC CNI's
        ("eni9571956a6cc", "kube-system", "coredns-57ff979f67-8ns9b"),
    ],
)
def test_the_names_are_those_of_the_cnis(name: str, namespace: str, pod: str) -> None:
    """The hash of a pod's name ends the interface name that the CNI's own tests expect for it."""
    assert name.endswith(digest(namespace, pod))
