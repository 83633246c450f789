"""Reads list files for a policy, and keeps a copy of each that was good, for the day when the file is not.

Whoever downloads a list may be killed half way, or store the login page of a proxy under its name. A running agent, and
one that is restarted on that day, shall go on with the list of yesterday and say so. The copies are in the state
directory, compressed; like the totals they live until the node boots.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import zlib
from pathlib import Path

from netacct import log, plainfile
from netacct.errors import ConfigError
from netacct.policy_lists import Listed, Published, Selection, parse, select

SIZE_LIMIT = 16 << 20
"""Bytes; the largest list, Azure's, has some 5 MB. Reading one takes six times as much memory, of 256 MiB in all."""

_COPIES = "lists"


class ListFiles:
    """The list files of one policy, each read once. For one loading of the policy; then throw it away.

    Args:
        state_dir: where copies of good lists are; None for none: then only the files themselves count.

    Attributes:
        asked: the paths of all files that the policy named, good or not.
        stale: for each file that is not good, why; its last good copy was taken instead.
    """

    def __init__(self, state_dir: str | None = None) -> None:
        self._copies = None if state_dir is None else Path(state_dir) / _COPIES
        self._read: dict[tuple[str, str], tuple[bytes, Published]] = {}
        self.asked: set[str] = set()
        self.stale: dict[str, ConfigError] = {}

    def take(self, wanted: Selection) -> tuple[Listed, ...]:
        """What the policy wants, of the file or else of its last good copy. Raises ConfigError where neither has it."""
        self.asked.add(wanted.path)
        try:
            return select(self._published(wanted), wanted)
        except ConfigError as error:
            listed = self._of_copy(wanted)
            if listed is None:
                raise
            self.stale[wanted.path] = error
            return listed

    def keep(self) -> None:
        """To be called when the policy is in force: copy the files that were good, log those that were not.

        A disk that is full costs the copy only.
        """
        for path, error in self.stale.items():
            log.get().error("list refused, its last good copy is in force", file=path, error=str(error))
        if self._copies is None:
            return
        for (kind, path), (data, _published) in self._read.items():
            if path in self.stale:
                continue
            try:
                self._copy(self._copies, kind, path, data)
            except OSError as error:
                log.get().warning("no copy of a list could be kept", file=path, error=str(error))

    def _published(self, wanted: Selection) -> Published:
        key = (wanted.format, wanted.path)
        if key not in self._read:
            data = read(wanted.path)
            self._read[key] = (data, parse(data, wanted.path, wanted.format))
        return self._read[key][1]

    def _of_copy(self, wanted: Selection) -> tuple[Listed, ...] | None:
        """The same of the last good copy; None where there is none, or where it lacks what is wanted."""
        if self._copies is None:
            return None
        with contextlib.suppress(OSError, EOFError, zlib.error, ConfigError):
            data = gzip.decompress(self._copies.joinpath(_name(wanted.format, wanted.path)).read_bytes())
            return select(parse(data, wanted.path, wanted.format), wanted)
        return None

    @staticmethod
    def _copy(folder: Path, kind: str, path: str, data: bytes) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        target, fresh = folder / _name(kind, path), gzip.compress(data, 1, mtime=0)
        if not target.exists() or target.read_bytes() != fresh:
            draft = target.with_suffix(".new")
            draft.write_bytes(fresh)
            draft.replace(target)


def read(path: str) -> bytes:
    """A list file's content. Raises ConfigError where it cannot be read, is no file, or is too large."""
    try:
        data = plainfile.read(path, SIZE_LIMIT + 1)
    except OSError as error:
        raise ConfigError(path, "", f"cannot be read: {error.strerror}") from error
    if data is None:
        raise ConfigError(path, "", "is not a regular file")
    if len(data) > SIZE_LIMIT:
        raise ConfigError(path, "", f"larger than {SIZE_LIMIT >> 20} MiB")
    return data


def _name(kind: str, path: str) -> str:
    """The name of the copy of a file."""
    absolute = os.path.abspath(path)  # noqa: PTH100 -- resolve() would follow links, which may be swapped
    return f"{kind}-{hashlib.sha256(absolute.encode()).hexdigest()[:32]}.gz"
