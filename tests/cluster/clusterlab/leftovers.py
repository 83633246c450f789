"""What a harness killed by SIGKILL leaves behind: empty cgroups and a folder. The next cluster removes them."""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from pathlib import Path

from clusterlab import cgroups

PREFIX = "netacct-"
"""Then comes the process id of the harness, and letters where it has several clusters."""

_NAME = re.compile(rf"{PREFIX}(\d+)[a-z]*-(?:node\d+|cluster-.*)")


def sweep() -> None:
    """Remove what belongs to no process any more."""
    for root in cgroups.hierarchies():
        for folder in _dead(root):
            with contextlib.suppress(AssertionError):
                cgroups.remove(folder.name, patience=0)
    for folder in _dead(Path(tempfile.gettempdir())):
        shutil.rmtree(folder, ignore_errors=True)


def _dead(place: Path) -> list[Path]:
    found = ((folder, _NAME.fullmatch(folder.name)) for folder in place.glob(f"{PREFIX}*"))
    return [folder for folder, match in found if match and not Path("/proc", match[1]).exists()]
