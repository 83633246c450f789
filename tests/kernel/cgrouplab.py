"""Cgroups as a kubelet makes them for pods, in the real v2 tree, and processes in them that do what a test says."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support import PATIENCE

from netacct.identity.host_pods import tree_root
from netacct.model import Address, cgroup_key

LEVEL = 4
"""Of the pods' cgroups: the lab's own, kubepods, burstable, the pod."""

_WORKER = """
import json, os, socket, struct, sys
root, names = sys.argv[1], {"socket": socket, "struct": struct, "os": os}
def move(cgroup):
    with open(cgroup + "/cgroup.procs", "w") as procs:
        procs.write(str(os.getpid()))
names["move"] = move
move(root)
for line in sys.stdin:
    names["result"] = None
    exec(json.loads(line), names)
    print(json.dumps(names["result"]), flush=True)
"""


@dataclass
class Worker:
    """A process in a cgroup and in the namespace of the thread that started it."""

    process: subprocess.Popen[str]

    def do(self, code: str) -> Any:
        """Run statements there, which may use `socket`, `struct`, `os` and `move(cgroup)`; returns their `result`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the worker has failed"
        return json.loads(answer)

    def end(self) -> None:
        """Let it end, and its sockets with it."""
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate(timeout=PATIENCE)


@dataclass
class Cgroups:
    """A kubelet's part of the tree, of the test's own."""

    root: Path
    workers: list[Worker] = field(default_factory=list)
    pauses: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def pod(self, uid: str) -> Address:
        """Make a pod's cgroup with that of a container in it; returns the key of its counters.

        A process pauses in it, as in a pod's sandbox: empty cgroups are what any systemd around may tidy away.
        """
        pause = self.pauses[uid] = subprocess.Popen(["sleep", "600"])
        (self._path(uid) / "container").mkdir(parents=True)
        (self._path(uid) / "container" / "cgroup.procs").write_text(str(pause.pid), encoding="ascii")
        return cgroup_key(self._path(uid).stat().st_ino)

    def container(self, uid: str) -> str:
        """The path of the container's cgroup."""
        return str(self._path(uid) / "container")

    def path(self, uid: str) -> str:
        """The path of the pod's cgroup below the root of the tree."""
        return str(self._path(uid)).removeprefix(tree_root())

    def worker(self, uid: str = "") -> Worker:
        """Start a process in the pod's container; in the lab's own cgroup, which is no pod's, without uid."""
        where = self.container(uid) if uid else str(self.root)
        made = Worker(
            subprocess.Popen(
                [sys.executable, "-c", _WORKER, where], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        )
        self.workers.append(made)
        return made

    def end(self, uid: str) -> None:
        """End the pod: its cgroups go, which needs its workers to have ended."""
        _kill(self.pauses.pop(uid))
        for path in (self._path(uid) / "container", self._path(uid)):
            path.rmdir()

    def _path(self, uid: str) -> Path:
        return self.root / "kubepods" / "burstable" / f"pod{uid}"


def _kill(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.wait(PATIENCE)


@contextlib.contextmanager
def cgroups() -> Iterator[Cgroups]:
    """A lab; everything of it is gone afterwards."""
    made = Cgroups(Path(tree_root()) / f"netacct-test-{uuid.uuid4()}")
    (made.root / "kubepods" / "burstable").mkdir(parents=True)
    try:
        yield made
    finally:
        for worker in made.workers:
            _kill(worker.process)
            worker.process.communicate()
        for pause in made.pauses.values():
            _kill(pause)
        for path, _, _ in os.walk(made.root, topdown=False):
            Path(path).rmdir()
