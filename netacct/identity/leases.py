"""Who holds which address, and since when: the observations of all sources, merged into one book of leases.

Goal
    One address, at most one holder, and the holder is right: bytes follow the address, so a wrong holder is a wrong
    bill. The book is a value with methods. It does no I/O, knows no clock, and may be called from the agent's worker
    thread only.

Tensions
    *Sources lie late, in different orders, and about different things.* A source tells facts ("this sandbox holds this
    address"), the book keeps them as claims, and one rule picks the holder from the claims: **the newest sandbox
    wins**. So it does not matter in which order two sources, or two events, arrive.

    *A lease must not end before its last bytes are read*, yet only the book knows that it ends. Therefore two steps:
    `observe` and `replace` note claims at once, but change no lease; `pending` says what would change;
    `commit(at)` changes it. Between the two the agent takes a reading, at `at`.

    *A pod can come and go between two commits.* Its bytes are in the kernel all the same, so it gets a lease that
    opens and closes in one commit, for the ledger to bind them to.

    *A commit may be late*: a pod can be gone, and its heir have sent, long before the reading. So a lease closes when
    its last source says that it left, and no later than its heir's sandbox was made (nobody gives an address away
    twice), however late the reading. What was counted after that is not its own.

Decisions
    - Identity is (ip, uid, sandbox). A source that knows no sandbox id (`""`) speaks of the newest one of that uid.
    - A claim lasts as long as one source that vouched for it still does: "gone" takes back the word of the source that
      says it, and nobody else's. A source that lags can so keep a dead holder for a while, which costs nothing: a dead
      sandbox sends nothing, and the next holder is newer. The reverse, one source's error ending a lease that others
      see alive, would cost bytes.
    - Between equals (two sandboxes of unknown age above all) who holds the address keeps it until released; then the
      one seen last gets it.
    - A sandbox of known age loses its address to a newer one for good, whatever a lagging source repeats, and in
      whatever order the two were heard of. Of unknown age, it gets it back: a file that lists a tenant means it.
    - A source that names no sandbox tells when the *pod* started, which may be long before its sandbox was made. So
      such a claim is known to be older than another's sandbox only where it was seen before that was made.
    - A source that goes away keeps its word: silence is not "gone". One that comes back, or that an operator removed
      from the configuration, is brought up to date with `replace`.
    - Where sources disagree about a pod's names or labels, the one that stands first in `priority` is believed. Of
      several creation times the latest is, for good: pods start before their sandboxes.
    - Owner and labels that it does not tell come from the others (`Names`), whatever address they spoke of, and stay
      known. Told late, they change a lease that has closed, too: it was this pod's all the same.

Invariants
    I1  At most one open lease per address, and it belongs to a claim that somebody vouches for.
    I2  No open lease is older than another standing claim of its address, but for claims that lost it to a newer one.
    I3  Only a "gone" of the same (ip, uid, sandbox) by a source that vouched for it releases, and only a younger one
        than that source's last word: doubled and reordered events change nothing.
    I4  An owner, once known, is known for as long as a lease is remembered.
    I5  What is kept of the past is bounded: closed leases and withdrawn words for `keep` seconds, or as long as
        a source still repeats the claim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from netacct.identity.claims import Claim, Word, uid_of
from netacct.identity.names import Names
from netacct.model import UNBOUNDED, Address, Lease, Observation

KEEP = 600.0
"""Seconds for which closed leases and withdrawn words are remembered: several times any late binding."""


class Open(NamedTuple):
    """An address gets a holder."""

    lease: Lease


class Close(NamedTuple):
    """A holder loses its address; its lease has `closed` set."""

    lease: Lease


class Update(NamedTuple):
    """The holder stays; what is known of it changed. Of a closed lease, the owner or the labels became known."""

    lease: Lease
    old: Lease

    @property
    def moves_bytes(self) -> bool:
        """Whether bytes from now on go to other series than before."""
        return self.lease.pod != self.old.pod


Change: TypeAlias = Open | Close | Update


def needs_reading(changes: Iterable[Change]) -> bool:
    """Whether the counters must be read before these changes are committed."""
    return any(not isinstance(change, Update) or change.moves_bytes for change in changes)


class LeaseBook:
    """The book. `leases` is what an earlier book's `state()` gave; its open leases stand until their sources speak."""

    def __init__(self, priority: Sequence[str] = (), leases: Iterable[Lease] = (), *, keep: float = KEEP) -> None:
        self.prefer(priority)
        self._keep = keep
        self._names = Names()
        self._claims: dict[Address, list[Claim]] = {}
        self._open: dict[Address, Lease] = {}
        self._closed: dict[Address, list[Lease]] = {}
        self._withdrawn: dict[tuple[str, Address, str, str], float] = {}
        self._brief: list[Lease] = []  # of pods that came and went since the last commit; `closed` is when they left
        self._left: dict[Address, float] = {}  # when the holders left that are gone since the last commit
        self._touched: set[Address] = set()
        for lease in sorted(leases, key=lambda lease: lease.opened):
            self._restore(lease)

    def prefer(self, priority: Sequence[str]) -> None:
        """Where sources disagree from now on, believe the one that stands first."""
        self._priority = {source: rank for rank, source in enumerate(priority)}

    def observe(self, observations: Iterable[Observation]) -> None:
        """Note what a source says. Changes no lease before `commit`."""
        said = tuple(observations)
        self._learn(said)
        for seen in said:
            self._touched.add(seen.ip)
            if seen.present:
                self._vouch(seen)
            else:
                self._withdraw(seen.source, seen.ip, uid_of(seen.pod), seen.sandbox, seen.seen_at)

    def replace(self, source: str, observations: Iterable[Observation], seen_at: float) -> None:
        """Note a full list of what `source` sees at `seen_at`: it takes back its word for everything else."""
        said = tuple(observations)
        listed = [seen for seen in said if seen.present]
        names: dict[Address, list[tuple[str, str]]] = {}
        for seen in listed:
            names.setdefault(seen.ip, []).append((uid_of(seen.pod), seen.sandbox))
        for claim in [claim for claims in self._claims.values() for claim in claims if source in claim.words]:
            if not any(claim.is_of(*name) for name in names.get(claim.ip, ())):
                self._touched.add(claim.ip)
                self._withdraw(source, claim.ip, claim.uid, claim.sandbox, seen_at)
        self._learn(seen for seen in said if not seen.present)
        self.observe(listed)

    def pending(self) -> tuple[Change, ...]:
        """What `commit` would change now, in its order. Times that only `commit` knows are 0."""
        return self._changes(0.0)

    def commit(self, at: float) -> tuple[Change, ...]:
        """Make the pending changes at time `at`, which is when the counters were read, and return them.

        They come as closings, then brief leases (an opening and a closing each), then openings and updates; what closes
        under a name that only now is known is updated first. Leases open at `at`; they close then or earlier.
        """
        changes, brief = self._changes(at), self._brief_leases(at)
        for change in changes:
            ip = change.lease.ip
            if isinstance(change, Close):
                self._closed.setdefault(ip, []).append(change.lease)
                if self._open.get(ip) == replace(change.lease, closed=None):
                    del self._open[ip]
            elif isinstance(change, Update) and change.lease.closed is not None:
                past = self._closed[ip]
                past[past.index(change.old)] = change.lease
            elif change.lease not in brief:
                self._open[ip] = change.lease
        self._brief.clear()
        self._left.clear()
        self._touched.clear()
        if changes:
            self._forget(at - self._keep)
        return changes

    def open_leases(self) -> tuple[Lease, ...]:
        """Every lease that lasts."""
        return tuple(self._open.values())

    def closed_since(self, since: float) -> tuple[Lease, ...]:
        """Leases that closed at `since` or later, as far as they are remembered."""
        return tuple(lease for lease in self._past() if lease.closed is not None and lease.closed >= since)

    def leases_since(self, since: float) -> tuple[Lease, ...]:
        """What a ledger needs to settle an interval that began at `since`: open leases and `closed_since`."""
        return self.open_leases() + self.closed_since(since)

    def lease_of(self, ip: Address) -> Lease | None:
        """The open lease of an address."""
        return self._open.get(ip)

    def state(self) -> tuple[Lease, ...]:
        """All leases that the book remembers, for a store; `LeaseBook(priority, leases)` takes them back."""
        return self.open_leases() + tuple(self._past())

    def _past(self) -> Iterator[Lease]:
        for leases in self._closed.values():
            yield from leases

    def _restore(self, lease: Lease) -> None:
        self._names.note(uid_of(lease.pod), len(self._priority) + 1, lease.opened, lease.pod)
        if lease.closed is not None:
            self._closed.setdefault(lease.ip, []).append(lease)
            return
        word = Word(lease.pod, lease.opened)
        words = dict.fromkeys(lease.sources, word)
        claim = Claim(lease.ip, uid_of(lease.pod), lease.sandbox, words, lease.created, lease.opened)
        self._claims.setdefault(lease.ip, []).append(claim)
        self._open[lease.ip] = lease

    def _learn(self, observations: Iterable[Observation]) -> None:
        """Note owners and labels, also of pods that have ended."""
        named = {
            uid_of(seen.pod)
            for seen in observations
            if self._names.note(uid_of(seen.pod), self._rank(seen.source), seen.seen_at, seen.pod)
        }
        if named:
            self._touched |= {claim.ip for claims in self._claims.values() for claim in claims if claim.uid in named}
            self._touched |= {lease.ip for lease in self._past() if uid_of(lease.pod) in named}

    def _vouch(self, seen: Observation) -> None:
        names = [(seen.source, seen.ip, uid_of(seen.pod), sandbox) for sandbox in (seen.sandbox, "")]
        withdrawn = max(self._withdrawn.get(name, UNBOUNDED) for name in names)
        claims = self._claims.setdefault(seen.ip, [])
        matching = [claim for claim in claims if claim.is_of(uid_of(seen.pod), seen.sandbox)]
        if matching:
            claim = max(matching, key=lambda claim: (claim.sandbox == seen.sandbox, claim.created, claim.seen_at))
            claim.sandbox = claim.sandbox or seen.sandbox
        else:
            claim = self._new_claim(seen.ip, uid_of(seen.pod), seen.sandbox)
            claims.append(claim)
        claim.learn(seen.created, seen.seen_at)
        if matching and withdrawn >= seen.seen_at:
            return
        word = claim.words.get(seen.source)
        if word is None or word.seen_at <= seen.seen_at:
            claim.words[seen.source] = Word(seen.pod, seen.seen_at)
        if withdrawn >= seen.seen_at:
            self._drop(claim, withdrawn)  # its end overtook its begin

    def _new_claim(self, ip: Address, uid: str, sandbox: str) -> Claim:
        """A claim that remembers what was known of it before, if it was gone for a moment only."""
        claim = Claim(ip, uid, sandbox)
        for lease in (*self._leases_of(ip), *self._briefs_of(ip)):
            if claim.held(lease):
                claim.learn(lease.created, lease.opened)
        if self._holds(claim):
            self._left.pop(ip, None)
        return claim

    def _briefs_of(self, ip: Address) -> list[Lease]:
        return [lease for lease in self._brief if lease.ip == ip]

    def _leases_of(self, ip: Address) -> list[Lease]:
        """All that are remembered of an address."""
        past = self._closed.get(ip, [])
        return [*past, self._open[ip]] if ip in self._open else past

    def _withdraw(self, source: str, ip: Address, uid: str, sandbox: str, seen_at: float) -> None:
        key = (source, ip, uid, sandbox)
        self._withdrawn[key] = max(seen_at, self._withdrawn.get(key, UNBOUNDED))
        for claim in [claim for claim in self._claims.get(ip, ()) if claim.is_of(uid, sandbox)]:
            word = claim.words.get(source)
            if word is None or word.seen_at > seen_at:
                continue
            if len(claim.words) == 1:
                self._drop(claim, seen_at)
            else:
                del claim.words[source]

    def _drop(self, claim: Claim, at: float) -> None:
        """Remove a claim; if it would have held its address but never got a lease, remember it as a brief one."""
        if self._holds(claim):
            self._left[claim.ip] = at
        elif self._holder(claim.ip) is claim and not self._had_lease(claim):
            self._brief = [lease for lease in self._brief if lease.ip != claim.ip or not claim.held(lease)]
            self._brief.append(replace(self._lease(claim, claim.since), closed=at))
        claims = self._claims[claim.ip]
        claims.remove(claim)
        if not claims:
            del self._claims[claim.ip]

    def _holder(self, ip: Address) -> Claim | None:
        """The claim that shall hold `ip`: the newest one that never lost it; among equals the present holder."""
        standing = [claim for claim in self._claims.get(ip, ()) if not self._lost(claim)]
        if not standing:
            return None
        return max(standing, key=lambda claim: (claim.created, self._holds(claim), claim.seen_at, claim.uid))

    def _holds(self, claim: Claim) -> bool:
        lease = self._open.get(claim.ip)
        return lease is not None and claim.held(lease)

    def _had_lease(self, claim: Claim) -> bool:
        return self._holds(claim) or any(claim.held(lease) for lease in self._closed.get(claim.ip, ()))

    def _lost(self, claim: Claim) -> bool:
        """Whether a sandbox of known age cannot have the address any more, because a newer one had it since."""
        if claim.created == UNBOUNDED:
            return False
        others = (*self._leases_of(claim.ip), *self._briefs_of(claim.ip))
        return any(
            lease.created > claim.created
            and not claim.held(lease)
            and (bool(claim.sandbox) or claim.since < lease.created)
            for lease in others
        )

    def _rank(self, source: str) -> int:
        return self._priority.get(source, len(self._priority))

    def _named(self, lease: Lease) -> Lease:
        """The lease with what is known by now of its pod."""
        pod = self._names.fill(uid_of(lease.pod), lease.pod)
        return lease if pod == lease.pod else replace(lease, pod=pod)

    def _lease(self, claim: Claim, opened: float) -> Lease:
        source = min(claim.words, key=lambda source: (self._rank(source), source))
        pod = self._names.fill(claim.uid, claim.words[source].pod)
        return Lease(claim.ip, pod, claim.sandbox, claim.created, opened, sources=frozenset(claim.words))

    def _changes(self, at: float) -> tuple[Change, ...]:
        closings: list[Change] = []
        others: list[Change] = []
        for ip in sorted(self._touched):
            old, claim = self._open.get(ip), self._holder(ip)
            if old is not None and claim is not None and self._holds(claim):
                new = self._lease(claim, old.opened)
                others += [Update(new, old)] if new != old else []
                continue
            if old is not None:
                closing = self._named(old)
                closings += [Update(closing, old)] if closing != old else []
                closings.append(Close(replace(closing, closed=self._end(old, self._left.get(ip, at), at))))
            others += [Open(self._lease(claim, at))] if claim is not None else []
        for lease in self._brief_leases(at):
            closings += [Open(lease), Close(replace(lease, closed=lease.opened))]
        past = [lease for ip in sorted(self._touched) for lease in self._closed.get(ip, ()) if not lease.pod.workload]
        others += [Update(named, lease) for lease in past if (named := self._named(lease)) != lease]
        return (*closings, *others)

    def _brief_leases(self, at: float) -> list[Lease]:
        """The brief leases, open still: each closes when it opens. Who holds the address again was not brief."""
        leases: list[Lease] = []
        for brief in self._brief:
            claim = self._holder(brief.ip)
            if claim is None or not claim.held(brief):
                end = self._end(replace(brief, opened=UNBOUNDED), brief.closed or at, at)
                leases.append(replace(self._named(brief), opened=end, closed=None))
        return leases

    def _end(self, lease: Lease, left: float, at: float) -> float:
        """When a lease ends that was told to have left at `left`: no later than when a sandbox after it was made."""
        claim = self._holder(lease.ip)
        heirs = self._briefs_of(lease.ip) + ([self._lease(claim, at)] if claim else [])
        made = [heir.created for heir in heirs if heir.sandbox and heir.created > lease.created]
        return max(lease.opened, min([at, left, *made]))

    def _forget(self, before: float) -> None:
        self._withdrawn = {key: seen_at for key, seen_at in self._withdrawn.items() if seen_at >= before}
        for ip, leases in list(self._closed.items()):
            claims = self._claims.get(ip, ())
            kept = [
                lease
                for lease in leases
                if (lease.closed or 0.0) >= before or any(claim.held(lease) for claim in claims)
            ]
            if kept:
                self._closed[ip] = kept
            else:
                del self._closed[ip]
        if self._names.has_excess(len(self._claims) + len(self._closed)):
            claimed = {claim.uid for claims in self._claims.values() for claim in claims}
            self._names.keep(claimed | {uid_of(lease.pod) for lease in self._past()})
