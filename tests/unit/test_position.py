"""When our rules are moved before those of a rival, and when they give way. Without a kernel and without a clock."""

from __future__ import annotations

import pytest

from netacct.kernel.position import Position, Rival
from netacct.model import Family

RIVAL = Rival(4, "FORWARD", "-j ACCEPT", 1)
WAITS = (10.0, 20.0)
AGE = 600.0


def rival(hook: str = "FORWARD", jump: str = "-j ACCEPT", family: Family = 4) -> Rival:
    """A rival at the head of a hook."""
    return Rival(family, hook, jump, 1)


def fight(position: Position, moves: int, at: float = 0.0, against: Rival = RIVAL) -> float:
    """Move so often, each time as early as is allowed; returns when the rival came again."""
    for number in range(moves):
        at += WAITS[number - 1] if number else 0.0
        assert position.look(4, [against], at) == {}
        position.moved(4, at)
    return at + 0.1


def test_a_first_rival_is_overtaken_at_once() -> None:
    """A rule ahead of ours that nobody moved against yet holds nothing, and is no shadow."""
    position = Position()
    assert position.look(4, [RIVAL], 0.0) == {}
    assert position.shadows() == []


@pytest.mark.parametrize("moves", [1, 2])
def test_moves_become_rarer(moves: int) -> None:
    """After a move our rules stay where they are for a time that doubles, and the rival is named meanwhile."""
    position = Position()
    again = fight(position, moves)
    wait = WAITS[moves - 1]
    assert position.look(4, [RIVAL], again + wait - 0.2) == {"FORWARD": {"-j ACCEPT"}}
    assert position.shadows() == [RIVAL]
    assert not position.has_yielded(RIVAL)
    assert position.look(4, [RIVAL], again + wait) == {}
    assert position.shadows() == []


def test_the_fourth_move_is_not_made() -> None:
    """A rival that comes again after three moves in ten minutes is yielded to, until the first of them is that old."""
    position = Position()
    again = fight(position, 3)
    for at in (again, again + 100, AGE - 0.1):
        assert position.look(4, [RIVAL], at) == {"FORWARD": {"-j ACCEPT"}}
        assert position.has_yielded(RIVAL)
    assert position.look(4, [RIVAL], AGE) == {}
    assert not position.has_yielded(RIVAL)


def test_three_moves_are_no_defeat_yet() -> None:
    """As long as the rival does not come again nothing is shadowed, and the moves are remembered."""
    position = Position()
    again = fight(position, 3)
    position.look(4, [], again)
    assert position.shadows() == []
    position.look(4, [RIVAL], again + 50)
    assert position.has_yielded(RIVAL)


def test_a_rival_that_gives_way_is_forgiven() -> None:
    """When the rules that we yielded to are gone or behind ours, the next that come are overtaken at once."""
    position = Position()
    again = fight(position, 3)
    position.look(4, [RIVAL], again)
    assert position.look(4, [], again + 1) == {}
    assert position.look(4, [RIVAL], again + 2) == {}


def test_a_rival_that_deletes_our_rules_is_not_forgiven() -> None:
    """Where our rules are absent and would come behind the rival, they are to be put back behind it, and no move."""
    position = Position()
    again = fight(position, 3)
    position.look(4, [RIVAL], again)
    absent = Rival(4, "FORWARD", "-j ACCEPT", 1, hooked=False)
    assert position.look(4, [absent], again + 1) == {"FORWARD": {"-j ACCEPT"}}
    assert position.shadows() == []  # what is wrong is that they are absent


def test_putting_absent_rules_back_is_no_move() -> None:
    """However often others delete our rules, they come back, and in the first place."""
    position = Position()
    for at in range(0, 60, 10):
        assert position.look(4, [Rival(4, "FORWARD", "-j ACCEPT", 1, hooked=False)], float(at)) == {}
        position.moved(4, float(at))


def test_rivals_are_told_apart_by_place_and_target() -> None:
    """What is yielded in one hook of one family holds no rule in another; the number of the rule does not matter."""
    position = Position()
    again = fight(position, 3)
    later = Rival(4, "FORWARD", "-j ACCEPT", 7)
    assert position.look(4, [later, rival("INPUT")], again) == {"FORWARD": {"-j ACCEPT"}}
    assert position.look(6, [rival(family=6)], again) == {}
    assert position.shadows() == [later]
    assert str(position.shadows()[0]) == (
        "IPv4: hook FORWARD: our rules are behind rule 7 (-j ACCEPT), which can end traversal"
    )


def test_in_a_held_hook_everybody_ahead_is_a_shadow() -> None:
    """A newcomer in a hook where we yield to another stays ahead as well, and is named."""
    position = Position()
    again = fight(position, 3)
    newcomer = rival(jump="-j DROP")
    assert position.look(4, [newcomer, RIVAL], again) == {"FORWARD": {"-j ACCEPT"}}
    assert position.shadows() == [newcomer, RIVAL]
    position.moved(4, again)
    assert position.look(4, [newcomer], again + 1) == {}, "no move was made against it"


def test_moves_are_forgotten_on_request() -> None:
    """After `forget` the rival is overtaken at once, as if it had never come."""
    position = Position()
    again = fight(position, 3)
    position.look(4, [RIVAL], again)
    position.forget()
    assert position.shadows() == []
    assert position.look(4, [RIVAL], again) == {}
