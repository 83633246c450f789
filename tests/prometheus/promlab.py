"""A real Prometheus in a private network namespace, and questions to it, for tests and for the extrapolation bench."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

from netacct.demo.netns import Namespace

ROOT = Path(__file__).resolve().parents[2]
_TOOLS = ROOT / ".tools" / "usr" / "bin"
_START = 90.0  # seconds for a process to answer
_STOP = 60.0  # seconds for a process to end when it was asked to


class LabError(Exception):
    """A process did not start, ended, or answered with an error; says which, with the end of its log."""


class Vector(NamedTuple):
    """One series of an answer: its labels, and its values in the order of time (one, for an instant query)."""

    labels: Mapping[str, str]
    values: tuple[float, ...]


def find_tool(name: str) -> str | None:
    """Where `prometheus` or `promtool` is: what `make setup` unpacked, else on PATH, else None."""
    return shutil.which(name, path=os.pathsep.join([str(_TOOLS), os.environ.get("PATH", os.defpath)]))


def missing(*tools: str) -> str:
    """Why tests that run these programs as root must be skipped; empty where they can run."""
    if os.geteuid():
        return "network namespaces need root"
    lacking = [name for name in tools if find_tool(name) is None]
    return f"{' and '.join(lacking)} missing (make setup unpacks Debian's package prometheus)" if lacking else ""


class Process:
    """A child in a namespace that ends when this process does.

    Args:
        space: where it runs.
        command: its command line.
        log: where its output goes.
    """

    def __init__(self, space: Namespace, command: list[str], log: Path) -> None:
        self._log = log
        # pdeathsig: when the test is killed, nobody else would stop the child
        guard = ["setpriv", "--pdeathsig", "TERM", "--"]
        environment = {**os.environ, "XTABLES_LOCKFILE": str(log.with_suffix(".lock"))}
        with space.entered(), log.open("wb") as output:
            self._process = subprocess.Popen(
                guard + command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
            )

    def wait_until(self, done: Callable[[], bool], what: str) -> None:
        """Wait for a condition; an OSError counts as "not yet". Raises LabError when the process ends or time is up."""
        end = time.monotonic() + _START
        while True:
            if self._process.poll() is not None:
                raise LabError(f"it ended with exit code {self._process.returncode}:\n{self._tail()}")
            try:
                if done():
                    return
            except OSError:
                pass
            if time.monotonic() > end:
                raise LabError(f"not {what} after {_START:.0f} s:\n{self._tail()}")
            time.sleep(0.05)

    def stop(self) -> None:
        """End it: asked first, then made to."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:])


class Prometheus:
    """A server on a loopback port of a namespace.

    Args:
        space: the namespace.
        folder: for its configuration, data and log; holds the data already where something was imported.
        config: prometheus.yml.
        port: TCP port on 127.0.0.1.
        flags: more of its command line.
    """

    def __init__(self, space: Namespace, folder: Path, config: str, port: int, *flags: str) -> None:
        binary = find_tool("prometheus")
        if binary is None:
            raise LabError("there is no prometheus here")
        self._space, self._port = space, port
        folder.mkdir(parents=True, exist_ok=True)
        folder.joinpath("prometheus.yml").write_text(config, encoding="ascii")
        command = [
            binary,
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
            *flags,
        ]
        self._process = Process(space, command, folder / "prometheus.log")

    def wait_ready(self) -> None:
        """Return when it answers queries."""
        self._process.wait_until(lambda: bool(fetch(self._space, self._port, "/-/ready")), "ready")

    def instant(self, query: str, at: float) -> list[Vector]:
        """The answer to an instant query. Raises LabError with Prometheus' own words when it is not valid."""
        return _vectors(self._ask("query", query=query, time=f"{at:.3f}"))

    def scalar(self, query: str, at: float) -> float | None:
        """The answer to an instant query of at most one series: its value, or None."""
        found = self.instant(query, at)
        if len(found) > 1:
            raise LabError(f"{len(found)} series answer {query}")
        return found[0].values[0] if found else None

    def over_time(self, query: str, start: float, end: float, step: float) -> list[Vector]:
        """The answer to a range query."""
        return _vectors(self._ask("query_range", query=query, start=f"{start:.3f}", end=f"{end:.3f}", step=str(step)))

    def stop(self) -> None:
        """End it."""
        self._process.stop()

    def _ask(self, path: str, **parameters: str) -> dict[str, Any]:
        answer = json.loads(fetch(self._space, self._port, f"/api/v1/{path}", urlencode(parameters)))
        if answer["status"] != "success":
            raise LabError(f"{parameters['query']}: {answer['error']}")
        data: dict[str, Any] = answer["data"]
        return data


def fetch(space: Namespace, port: int, path: str, form: str | None = None) -> str:
    """The body of a page on a namespace's loopback; with `form`, of a POST. Raises OSError where it is not served."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.sock = space.socket(socket.AF_INET, socket.SOCK_STREAM)
    headers = {"Content-Type": "application/x-www-form-urlencoded"} if form is not None else {}
    try:
        connection.sock.settimeout(60)
        connection.sock.connect(("127.0.0.1", port))
        connection.request("GET" if form is None else "POST", path, body=form, headers=headers)
        answer = connection.getresponse()
        body = answer.read().decode()
    except http.client.HTTPException as error:
        raise OSError(str(error)) from error
    finally:
        connection.close()
    if answer.status not in (200, 400, 422):  # the last two are answers too: Prometheus says what is wrong with a query
        raise OSError(f"{path}: HTTP {answer.status}")
    return body


def _vectors(data: Mapping[str, Any]) -> list[Vector]:
    """The series of an answer, without their times (prometheus.io, "HTTP API", expression query result formats)."""
    if data["resultType"] == "scalar":
        return [Vector({}, (float(data["result"][1]),))]
    return [
        Vector(series["metric"], tuple(float(value) for _, value in series.get("values") or [series["value"]]))
        for series in data["result"]
    ]
