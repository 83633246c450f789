"""The process around the agent: its queue, its threads, its signals.

The main thread is the worker and the only one that touches the agent's state. Sources, the address watcher, HTTP
connections and the control socket run in threads of their own; all they do to the worker is to put a message into its
queue, and, where they need an answer, to wait for it with a deadline. Signal handlers do the same, so that a signal
never interrupts a commit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import netacct
from netacct import clock, log, policy_file, yamlfile
from netacct.accounting.store import Store
from netacct.agent import Agent, plan_from_files
from netacct.books import Books
from netacct.config import Config
from netacct.control import Command, ControlServer, sole_writer
from netacct.errors import ConfigError, NetacctError, UsageError
from netacct.export.endpoints import MetricsEndpoint, routes
from netacct.export.listen import ListenAddress
from netacct.export.native import View, registries
from netacct.export.pages import landing
from netacct.export.server import Server
from netacct.identity import pods_file
from netacct.identity.file import FileSource
from netacct.identity.ranges import OwnAddresses, own_addresses
from netacct.identity.source import Health, Replace, Source, SourceEvent, Update
from netacct.kernel.base import Datapath
from netacct.model import Address
from netacct.policy import Policy
from netacct.systemd import Notifier

LIVE_SECONDS = 60.0
"""The worker is alive when it came round within this time; its longest step is waiting for the xtables lock."""

IDLE_SECONDS = 5.0
"""The worker comes round at least so often, to tell the watchdog."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """An HTTP thread wants a View, and waits for it (or for the exception that came instead)."""

    reply: queue.SimpleQueue[View | Exception] = field(default_factory=queue.SimpleQueue)


@dataclass(frozen=True, slots=True)
class Signalled:
    """SIGTERM, SIGINT or SIGHUP came."""

    number: int


Message: TypeAlias = Scrape | Command | Replace | Update | Signalled | frozenset[Address]


def make_datapath(config: Config) -> Datapath:
    """The datapath that the configuration names. `auto` is iptables, the only one of this version."""
    del config
    from netacct.kernel.iptables import IptablesDatapath  # noqa: PLC0415 -- commands without a kernel shall not pay

    return IptablesDatapath()


def make_agent(config: Config, datapath: Datapath) -> Agent:
    """An agent with its books loaded from the state directory."""
    policy = policy_file.load(config.policy)
    books = Books(Store(Path(config.state_dir)), config, config.identity.sources)
    return Agent(config, policy, datapath, books)


def apply_once(config: Config) -> list[str]:
    """Install or repair without an agent running, and book what was counted meanwhile; the caller is sole writer."""
    config = dataclasses.replace(config, enabled=True)
    datapath = make_datapath(config)
    agent = make_agent(config, datapath)
    datapath.adopt(plan_from_files(config))
    found = datapath.verify()
    _start_once(agent, config)
    agent.stop()
    return found


def remove_once(config: Config) -> list[str]:
    """Book the last values and take everything away, without an agent running; the caller is sole writer."""
    config = dataclasses.replace(config, enabled=False)
    _start_once(make_agent(config, make_datapath(config)), config)
    return []


def _start_once(agent: Agent, config: Config) -> None:
    path = config.identity.file.path
    events: list[SourceEvent] = []
    if FileSource.name in config.identity.sources and os.path.exists(path):  # noqa: PTH110 -- a plain string
        seen_at = clock.now()
        events = [Replace(FileSource.name, pods_file.parse(yamlfile.read(path), path, seen_at), seen_at)]
    agent.start(own_addresses(), events, dict)


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
        self._sources: list[Source] = []
        self._round = clock.now()
        self._stopping = False
        self._agent: Agent
        self._log = log.get()

    def run(self) -> int:
        """The life of the process; returns the exit code. Raises NetacctError where it cannot start."""
        log.configure(self._config.log.level, self._config.log.format)
        with sole_writer(Path(self._config.state_dir)), self._signals():
            begin = time.monotonic()
            self._log.info("starting", version=netacct.__version__, config=self._config.policy, pid=os.getpid())
            self._notifier.status("reading the store and installing rules")
            self._agent = make_agent(self._config, make_datapath(self._config))
            watcher = OwnAddresses()
            own = watcher.start(self._queue.put)
            self._sources = self._start_sources(self._config)
            control = ControlServer(Path(self._config.state_dir), self._queue.put)
            server = self._server()
            try:
                self._agent.start(own, self._first_events(), self._health)
                server.start()
                control.start()
                self._log.info("ready", start_seconds=round(time.monotonic() - begin, 3), status=self._agent.status())
                self._notifier.ready(self._agent.status())
                self._loop()
            finally:
                self._notifier.stopping()
                server.stop()
                control.stop()
                watcher.stop()
                for source in self._sources:
                    source.stop()
            self._agent.stop()
            self._log.info("stopped; rules stay and go on counting")
        return 0

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

    def _start_sources(self, config: Config) -> list[Source]:
        names = config.identity.sources
        sources: list[Source] = [FileSource(config.identity.file.path) for name in names if name == FileSource.name]
        for source in sources:
            source.start(self._queue.put)
        return sources

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

    def _health(self) -> Mapping[str, Health]:
        return {source.name: source.healthy() for source in self._sources}

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
        scrape = Scrape()
        self._queue.put(scrape)
        try:
            answer = scrape.reply.get(timeout=seconds)
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
        while not self._stopping:
            self._round = clock.now()
            self._notifier.watchdog()
            wait = min(max(self._agent.due() - self._round, 0.0), IDLE_SECONDS)
            try:
                message = self._queue.get(timeout=wait)
            except queue.Empty:
                self._agent.tick(clock.now())
                continue
            try:
                self._handle(message)
            except Exception:  # noqa: BLE001 -- one bad message must not end the accounting of a node
                self._log.exception("a message could not be handled", message=type(message).__name__)
            if self._agent.due() <= clock.now():
                self._agent.tick(clock.now())

    def _handle(self, message: Message) -> None:
        if isinstance(message, Scrape):
            _answer(message.reply, self._agent.view)
        elif isinstance(message, Command):
            _answer(message.reply, lambda: self._command(message))
        elif isinstance(message, Replace | Update):
            self._agent.observe([message])
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
                if self._agent.paused:
                    self._agent.resume()
                    return ["rules were removed"]
                return self._agent.repair()
            case "remove":
                if not self._agent.paused:
                    self._agent.pause()
                return []
            case "differences":
                return self._agent.differences()
            case "status":
                return self._agent.status()
        raise UsageError(f"the agent knows no command {command.name!r}")

    def _reload(self) -> None:
        """Take a new configuration, or keep the old one whole."""
        self._notifier.reloading()
        try:
            config = self._load()
            policy = policy_file.load(config.policy)
        except ConfigError as error:
            self._log.error("reload refused, the configuration before stays in force", error=str(error))
            self._agent.reload_failed()
        else:
            self._take(config, policy)
        self._notifier.ready(self._agent.status())

    def _take(self, config: Config, policy: Policy) -> None:
        for key in _fixed(self._config, config):
            self._log.warning("this change needs a restart", key=key)
        log.configure(config.log.level, config.log.format)
        if config.identity != self._config.identity:
            for source in self._sources:
                source.stop()
            self._sources = self._start_sources(config)
        try:
            self._agent.reconfigure(config, policy)
        except NetacctError as error:
            self._log.error("the new configuration is in force, but the kernel is not there yet", error=str(error))
        self._config = config
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
