"""The process around the agent: its queue, its threads, its signals.

The main thread is the worker and the only one that touches the agent's state. Sources, the address watcher, HTTP
connections and the control socket run in threads of their own; all they do to the worker is to put a message into its
queue, and, where they need an answer, to wait for it with a deadline. Signal handlers do the same, so that a signal
never interrupts a commit.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import netacct
from netacct import clock, log, policy_file
from netacct.agent import Agent
from netacct.config import Config
from netacct.control import Command, ControlServer, sole_writer
from netacct.errors import NetacctError, UsageError
from netacct.export.endpoints import MetricsEndpoint, routes
from netacct.export.listen import ListenAddress
from netacct.export.native import View, registries
from netacct.export.pages import landing
from netacct.export.server import Server
from netacct.identity.ranges import OwnAddresses
from netacct.identity.source import Health, Replace, SourceEvent, Update
from netacct.log import Repeats
from netacct.model import Address
from netacct.once import make_agent, make_datapath
from netacct.policy import Policy
from netacct.sources import FoundRanges, Sources
from netacct.systemd import Notifier

LIVE_SECONDS = 60.0
"""The worker is alive when it came round within this time; its longest step is waiting for the xtables lock."""

IDLE_SECONDS = 5.0
"""The worker comes round at least so often, to tell the watchdog."""

SCRAPE_SECONDS = 3.0
"""A scrape waits so long for the worker, if it has the time; a reading takes milliseconds, a held lock seconds."""

PAUSE_SECONDS = 5.0
"""How long the worker leaves its own work alone after something failed that nobody foresaw."""

TROUBLE_SECONDS = 300.0
"""The same trouble is logged again after so long."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """An HTTP thread wants a View, and waits until `until` for it (or for the exception that came instead)."""

    until: float
    reply: queue.SimpleQueue[View | Exception] = field(default_factory=queue.SimpleQueue)


@dataclass(frozen=True, slots=True)
class Signalled:
    """SIGTERM, SIGINT or SIGHUP came."""

    number: int


Message: TypeAlias = Scrape | Command | Replace | Update | FoundRanges | Signalled | frozenset[Address]


class Service:
    """Runs an agent until it is told to stop.

    Args:
        load: reads the configuration anew; called at start and at SIGHUP. Raises ConfigError.
    """

    def __init__(self, load: Callable[[], Config]) -> None:
        self._load = load
        self._config = load()
        self._queue: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._notifier = Notifier.from_environment()
        self._sources = Sources(self._config, self._queue.put)
        self._round = clock.now()
        self._stopping = False
        self._not_before = 0.0
        self._repeats = Repeats(TROUBLE_SECONDS)
        self._agent: Agent
        self._log = log.get()

    def run(self) -> int:
        """The life of the process; returns the exit code. Raises NetacctError where it cannot start."""
        log.configure(self._config.log.level, self._config.log.format)
        with sole_writer(Path(self._config.state_dir)), self._signals():
            begin = time.monotonic()
            self._log.info("starting", version=netacct.__version__, pid=os.getpid(), policy=self._config.policy)
            self._notifier.status("reading the store and installing rules")
            self._agent = make_agent(self._config, make_datapath(self._config))
            with contextlib.ExitStack() as stack:
                self._start(stack)
                self._log.info("ready", start_seconds=round(time.monotonic() - begin, 3), status=self._agent.status())
                self._notifier.ready(self._agent.status())
                self._loop()
                self._notifier.stopping()
            self._agent.stop()
            self._log.info("stopped; rules stay and go on counting" if not self._agent.paused else "stopped")
        return 0

    def _start(self, stack: contextlib.ExitStack) -> None:
        """Start everything and leave with `stack` how to stop it. A port that is taken is found before rules change."""
        server = self._server()
        server.start()
        stack.callback(server.stop)
        watcher = OwnAddresses()
        own = watcher.start(self._queue.put)
        stack.callback(watcher.stop)
        stack.callback(self._stop_sources)
        self._agent.found_ranges(self._sources.start())
        found = self._agent.start(own, self._first_events(), self._health)
        if found:
            self._log.info("rules brought up to date", differences=len(found), first=found[0])
        control = ControlServer(Path(self._config.state_dir), self._queue.put)
        control.start()
        stack.callback(control.stop)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM, SIGINT and SIGHUP become messages."""
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        before = {number: signal.getsignal(number) for number in numbers}
        for number in numbers:
            signal.signal(number, lambda caught, _frame: self._queue.put(Signalled(caught)))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop_sources(self) -> None:
        self._sources.stop()

    def _health(self) -> Mapping[str, Health]:
        return self._sources.health()

    def _first_events(self) -> list[SourceEvent]:
        """What the sources said while they started; anything else stays in the queue."""
        events: list[SourceEvent] = []
        others: list[Message] = []
        with contextlib.suppress(queue.Empty):
            while True:
                message = self._queue.get_nowait()
                if isinstance(message, Replace | Update):
                    events.append(message)
                else:
                    others.append(message)
        for message in others:
            self._queue.put(message)
        return events

    def _server(self) -> Server:
        web = self._config.web
        metrics = MetricsEndpoint(registries(self._view, self._warn))
        page = landing(netacct.__version__, web.telemetry_path)
        paths = routes(metrics, self._not_live, self._agent.not_ready, page, web.telemetry_path)
        return Server([ListenAddress(*address) for address in web.listen_address], paths, self._warn)

    def _warn(self, event: str, /, **fields: object) -> None:
        self._log.warning(event, **fields)

    def _view(self, seconds: float) -> View:
        """Called by HTTP threads: the worker's view, or the last one with its age when the worker has no time."""
        patience = min(seconds, SCRAPE_SECONDS)
        scrape = Scrape(clock.now() + patience)
        self._queue.put(scrape)
        try:
            answer = scrape.reply.get(timeout=patience)
        except queue.Empty:
            stale = self._agent.stale_view()
            if stale is None:
                raise NetacctError("the worker is busy and has no earlier reading") from None
            return stale
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _not_live(self) -> list[str]:
        age = clock.now() - self._round
        return [f"the worker has not come round for {age:.0f} s"] if age > LIVE_SECONDS else []

    def _loop(self) -> None:
        status = ""
        while not self._stopping:
            self._round = clock.now()
            self._notifier.watchdog()
            if status != self._agent.status():
                status = self._agent.status()
                self._notifier.status(status)
            wait = min(max(self._due() - self._round, 0.0), IDLE_SECONDS)
            with contextlib.suppress(queue.Empty):
                message = self._queue.get(timeout=wait)
                self._survive(type(message).__name__, partial(self._handle, message))
            if self._due() <= clock.now():
                self._survive("tick", self._agent.tick)

    def _due(self) -> float:
        return max(self._agent.due(), self._not_before)

    def _survive(self, what: str, step: Callable[[], None]) -> None:
        """What fails in a way that nobody foresaw must not end the accounting of a node, nor keep it busy."""
        try:
            step()
        except Exception:  # noqa: BLE001 -- see above
            self._not_before = clock.now() + PAUSE_SECONDS
            if self._repeats.due(what):
                self._log.exception("the worker failed at something", what=what)

    def _handle(self, message: Message) -> None:
        if isinstance(message, Scrape):
            if clock.now() < message.until:  # else nobody waits for it any more
                _answer(message.reply, self._agent.view)
        elif isinstance(message, Command):
            _answer(message.reply, lambda: self._command(message))
        elif isinstance(message, Replace | Update):
            self._agent.observe([message])
        elif isinstance(message, FoundRanges):
            self._agent.found_ranges(message.networks)
        elif isinstance(message, Signalled):
            if message.number == signal.SIGHUP:
                self._reload()
            else:
                self._stopping = True
        else:
            self._agent.own_addresses(message)

    def _command(self, command: Command) -> Any:
        match command.name:
            case "pods":
                return self._agent.pods()
            case "apply":
                return self._agent.apply()
            case "remove":
                if not self._agent.paused:
                    self._agent.pause()
                return []
            case "differences":
                return self._agent.differences()
        raise UsageError(f"the agent knows no command {command.name!r}")

    def _reload(self) -> None:
        """Take a new configuration, or keep the old one whole."""
        self._notifier.reloading()
        try:
            config = self._load()
            policy = policy_file.load(config.policy)
            self._agent.reconfigure(config, policy)
        except NetacctError as error:
            self._log.error("reload refused, the configuration before stays in force", error=str(error))
            self._agent.reload_failed()
        else:
            self._take(config, policy)
        self._notifier.ready(self._agent.status())

    def _take(self, config: Config, policy: Policy) -> None:
        log.configure(config.log.level, config.log.format)
        for key in _fixed(self._config, config):
            self._log.warning("this change needs a restart", key=key)
        self._config = config
        self._sources.stop()  # also where nothing changed: a reload is how to make them look
        self._sources = Sources(config, self._queue.put)
        self._queue.put(FoundRanges(self._sources.start()))
        self._log.info("reloaded", policy=policy.name, policy_hash=policy.hash)


def _fixed(old: Config, new: Config) -> list[str]:
    """The changed keys that a running agent cannot follow."""
    pairs = {
        "state_dir": (old.state_dir, new.state_dir),
        "web": (old.web, new.web),
        "datapath": (old.datapath, new.datapath),
    }
    return [key for key, (was, now) in pairs.items() if was != now]


def _answer(reply: queue.SimpleQueue[Any], work: Callable[[], Any]) -> None:
    try:
        reply.put(work())
    except Exception as error:
        reply.put(error)
        if not isinstance(error, NetacctError):
            raise
