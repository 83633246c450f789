"""What `rules show` prints of an nftables layout."""

from __future__ import annotations

from netacct.kernel.nft_render import shortened

RULESET = "table ip netacct {\n\tset tx-pod {\n\t\telements = { a counter, b counter, c counter }\n\t}\n}\n"


def test_long_sets_are_cut_short_for_people() -> None:
    """Of a set with more elements than a person wants to see, the first and their number are shown."""
    assert "\t\telements = { a counter, b counter, … }  # 3 in all\n" in shortened(RULESET, most=2)


def test_short_sets_stay_whole() -> None:
    """A set with few elements, and everything that is no set, is shown as it is."""
    assert shortened(RULESET, most=3) == RULESET
