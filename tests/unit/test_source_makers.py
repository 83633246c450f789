"""Which sources a configuration gets, who is asked beside whom, and what is shown of those that are not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from netacct import clock, config, source_makers
from netacct.config import Config
from netacct.config_keys import AUTO_SOURCES
from netacct.identity.source import Health, Replace, SourceEvent
from netacct.sources import Sources


def configured(tmp_path: Path, identity: str) -> Config:
    """A configuration with these identity keys, and nothing of this machine in reach."""
    nowhere = tmp_path / "nowhere"
    path = tmp_path / "netacct.yaml"
    path.write_text(
        f"identity: {{{identity}, file: {{path: {tmp_path}/pods.yaml}}, cni: {{directories: [{nowhere}]}}}}\n"
        f"ranges: {{providers: []}}\ncluster_ranges: {{providers: []}}\n"
    )
    return config.load(str(path))


def test_auto_is_every_source_but_those_that_somebody_must_want(tmp_path: Path) -> None:
    """All sources of `auto` are made, in the order of trust but for those who hear the others, who come last."""
    made = source_makers.make(configured(tmp_path, "sources: auto"))
    assert set(made.by_name) == set(AUTO_SOURCES)
    assert list(made.by_name)[-2:] == ["azure-cni", "aws-cni"]
    assert [source.name for source in made.polled] == ["kubelet", "cri"]
    assert made.host_pods is None


def test_a_list_is_just_these(tmp_path: Path) -> None:
    """Of a list each source is made, and no other."""
    made = source_makers.make(configured(tmp_path, "sources: [cni, veth]"))
    assert list(made.by_name) == ["cni", "veth"]
    assert ([hearer.name for hearer in made.hearers], made.polled) == (["veth"], [])


class Better:
    """A source of which only the health matters."""

    name = "better"

    def __init__(self, health: Health) -> None:
        self.health = health

    def healthy(self) -> Health:
        """As it was made."""
        return self.health

    def start(self, emit: object) -> None:
        """Not asked for here."""

    def stop(self) -> None:
        """Not asked for here."""


@pytest.mark.parametrize(
    ("health", "auto", "needed"),
    [
        (Health(up=True), True, False),
        (Health(up=True), False, True),
        (Health(up=False, present=False), True, True),
        (Health(up=False, reason="not asked yet", present=True), True, False),
    ],
    ids=["up", "named", "absent", "about-to-answer"],
)
def test_who_asks_stands_back_for_who_is_told(health: Health, *, auto: bool, needed: bool) -> None:
    """With `auto` nobody is asked while a better source is up, or may be in a moment; whom somebody named is asked."""
    assert source_makers._unless(auto, Better(health))() is needed


def test_a_better_source_that_stays_down_is_stood_in_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is there and does not answer is waited for ten seconds, not for ever."""
    needed = source_makers._unless(True, Better(Health(up=False, present=True)))
    now = clock.now()
    monkeypatch.setattr(clock, "now", lambda: now + source_makers.FIRST_ANSWER_SECONDS)
    assert needed()


def test_a_source_that_is_not_named_takes_its_word_back(tmp_path: Path) -> None:
    """At the start every source that was not made says that it knows nothing: an earlier life may have had it."""
    said: list[SourceEvent] = []
    sources = Sources(configured(tmp_path, "sources: [file]"), said.append)  # type: ignore[arg-type]  # no ranges here
    sources.start()
    try:
        silent = {event.source for event in said if isinstance(event, Replace) and not event.observations}
        assert silent == set(source_makers.NAMES)  # `file` itself has an empty file
        assert set(sources.health()) == {"file"}
    finally:
        sources.stop()


def test_what_is_not_on_this_node_is_shown_only_where_it_was_named(tmp_path: Path) -> None:
    """A named source that is absent is down; one of `auto` is left out."""
    named = Sources(configured(tmp_path, "sources: [kubelet]"), lambda _: None)
    assert not named.health()["kubelet"].up
    assert "kubelet" not in Sources(configured(tmp_path, "sources: auto"), lambda _: None).health()
