"""The comparisons by which nf_tables finds the class of an address, where CIDRs are few. Pure.

On the packet path a rule that does not match costs 4 ns, whatever the length of its prefix, and going to another chain
12. So chains are wide, and what is far from all CIDRs falls through the first one. The tree of halves that xtables has
(`classify.tree`) costs a packet to the internet 40 ns more here, and one to a pod elsewhere 70.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from netacct.kernel import classify
from netacct.kernel.classify import Branch, Node, Probe, Step
from netacct.model import Network

WIDTH = 5
"""So many comparisons of prefixes stand in a chain."""

_DEEPEST = 8
"""So many chains of a tree lead from one to the next; the kernel allows 16 in all (NFT_JUMP_STACK_SIZE)."""


def tree(steps: Sequence[Step], default: str, within: Network, deepest: int = _DEEPEST) -> tuple[Node, ...]:
    """The same decision as the steps one after the other, in which an address meets few of them.

    What a chain has no room for is cut into as many parts as it has, where the prefixes lie furthest from each other;
    each part becomes the branch of what its prefixes have in common.

    Args:
        steps: as `nft_many.decide` gives them.
        default: the class of what no step takes; the last node is always a step with an empty probe.
        within: where the addresses lie that get here; at first the whole address space.
        deepest: so many chains may lead on from this one.
    """
    chosen = classify.relevant(steps, default, within)
    inside = [step.probe.network for step in chosen if step.probe.network is not None]
    if len(inside) <= WIDTH or not deepest:
        return tuple(chosen)
    around = [step for step in chosen if step.probe.network is None]
    parts = classify.parts(_outermost(inside), WIDTH)
    return (*(_branch(chosen, default, part, deepest - 1) for part in parts), *around)


def _branch(steps: Sequence[Step], default: str, network: Network, deepest: int) -> Node:
    nodes = tree(steps, default, network, deepest)
    only = nodes[0]
    return Step(only.traffic, Probe(network)) if len(nodes) == 1 and isinstance(only, Step) else Branch(network, nodes)


def _outermost(networks: Iterable[Network]) -> list[Network]:
    """Those that do not lie in another of them."""
    found: list[Network] = []
    for network in sorted(networks, key=lambda network: (int(network.network_address), network.prefixlen)):
        if not found or not classify.contains(found[-1], network):
            found.append(network)
    return found
