"""The process around the agent: its queue, its threads, its signals.

The main thread is the worker and the only one that touches the agent's state. Sources, the address watcher, HTTP
connections and the control socket run in threads of their own; all they do to the worker is to put a message into its
queue, and, where they need an answer, to wait for it with a deadline. So do signals, which therefore never interrupt
a commit.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import netacct
from netacct import choosing, clock, log, marking
from netacct.agent import Agent
from netacct.config import DEFAULT_PATH, Config
from netacct.control import Command, ControlServer, WriterLock, sole_writer
from netacct.errors import ConfigError, NetacctError, UsageError
from netacct.export.endpoints import MetricsEndpoint, routes
from netacct.export.listen import ListenAddress
from netacct.export.native import View, registries
from netacct.export.pages import landing
from netacct.export.server import Server
from netacct.holding import Holding
from netacct.identity.ranges import OwnAddresses
from netacct.identity.ranges_providers import FoundRanges
from netacct.identity.source import Health, Replace, SourceEvent, Update
from netacct.kernel import rdma
from netacct.list_files import ListFiles
from netacct.log import Repeats
from netacct.model import Address
from netacct.moving import OpenDatapath
from netacct.once import load_policy, make_agent, make_datapath
from netacct.policy import Policy, is_path
from netacct.signals import Signalled, signals
from netacct.sources import FoundCluster, Sources
from netacct.systemd import Notifier
from netacct.watch import FileWatch, Mark

LIVE_SECONDS = 60.0
"""The worker is alive when it came round within this time; its longest step is waiting for the xtables lock."""

IDLE_SECONDS = 5.0
"""The worker comes round at least so often, to tell the watchdog; sooner where that is shorter."""

HELD_UP_SECONDS = 0.5
"""The worker that wakes up so much later than it meant to was not alone: the process, or the machine, stood still."""

MOMENT_SECONDS = 0.1
"""So long it then waits for sources, which have just woken up too, to tell what they have missed."""

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
class FilesChanged:
    """Configuration, policy or lists have changed."""

    paths: frozenset[str]


Request: TypeAlias = Scrape | Command | FoundRanges | FoundCluster | Signalled | FilesChanged | frozenset[Address]

Message: TypeAlias = Request | SourceEvent


class Service:
    """Runs an agent until it is told to stop.

    Args:
        load: reads the configuration anew; called at start, at SIGHUP and when a file changed. Raises ConfigError.
        path: the configuration file that it reads.
    """

    def __init__(self, load: Callable[[], Config], path: str = DEFAULT_PATH) -> None:
        self._load, self._path = load, path
        self._queue: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._requests: deque[Request] = deque()  # taken from the queue, and not yet handled
        self._files = FileWatch(lambda paths: self._queue.put(FilesChanged(paths)))
        self._followed: frozenset[str] = frozenset()
        self._mark = self._files.mark()
        self._config = load()
        self._notifier = Notifier.from_environment()
        self._idle = min(IDLE_SECONDS, (self._notifier.watchdog_seconds or 2 * IDLE_SECONDS) / 2)
        self._sources = Sources(self._config, self._queue.put)
        self._round = clock.now()
        self._stopping, self._exit_code = False, 0
        self._not_before = 0.0
        self._repeats = Repeats(TROUBLE_SECONDS)
        self._agent: Agent
        self._holding: Holding | None = None
        self._datapath: OpenDatapath
        self._log = log.get()

    def run(self) -> int:
        """The life of the process; returns the exit code. Raises NetacctError where it cannot start."""
        log.configure(self._config.log.level, self._config.log.format)
        with sole_writer(Path(self._config.state_dir)) as lock, signals(self._queue.put):
            begin = time.monotonic()
            self._log.info("starting", version=netacct.__version__, pid=os.getpid(), policy=self._config.policy)
            self._notifier.status("reading the store and installing rules")
            lists = ListFiles(self._config.state_dir)
            self._datapath = make_datapath(self._config)
            self._agent = make_agent(self._config, self._datapath, lists)
            self._follow(self._config, lists, self._mark)
            if lists.stale:
                self._agent.reload_failed()
            with contextlib.ExitStack() as stack:
                self._start(stack, lock)
                self._log.info("ready", start_seconds=round(time.monotonic() - begin, 3), status=self._agent.status())
                self._notifier.ready(self._agent.status())
                self._loop()
                self._notifier.stopping()
            self._agent.stop()
            self._log.info("stopped; rules stay and go on counting" if not self._agent.paused else "stopped")
        return self._exit_code

    def _start(self, stack: contextlib.ExitStack, lock: WriterLock) -> None:
        """Start everything and leave with `stack` how to stop it. A port that is taken is found before rules change."""
        server = self._server()
        server.start()
        stack.callback(server.stop)
        watcher = OwnAddresses()
        own = watcher.start(self._queue.put)
        stack.callback(watcher.stop)
        stack.callback(lambda: self._sources.stop())  # noqa: PLW0108 -- those of then
        self._files.start()
        stack.callback(self._files.stop)
        self._agent.found_ranges(self._sources.start().networks)
        self._agent.found_cluster(self._sources.start_cluster())
        found = self._agent.start(own, self._receive(0.0), self._health)
        if found:
            self._log.info("rules brought up to date", differences=len(found), first=found[0])
        control = ControlServer(Path(self._config.state_dir), self._queue.put)
        control.start()
        stack.callback(control.stop)
        self._holding = Holding(lock, control)

    def _health(self) -> Mapping[str, Health]:
        return self._sources.health()

    def _server(self) -> Server:
        web = self._config.web
        metrics = MetricsEndpoint(registries(self._view, self._warn, rdma.read))
        page = landing(netacct.__version__, web.telemetry_path)
        paths = routes(metrics, self._not_live, self._not_ready, page, web.telemetry_path)
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

    def _not_ready(self) -> list[str]:
        return [*self._agent.not_ready(), *(self._holding.troubles if self._holding else ())]

    def _loop(self) -> None:
        status = ""
        while not self._stopping:
            self._round = clock.now()
            self._notifier.watchdog()
            if status != self._agent.status():
                status = self._agent.status()
                self._notifier.status(status)
            self._work(min(max(self._due() - self._round, 0.0), self._idle))
            if self._due() <= clock.now():
                self._survive("tick", self._agent.tick)
            if self._agent.waiting:
                self._sources.hurry()
            if self._holding and self._holding.due <= clock.now():
                self._survive("looking after lock and socket", self._holding.look)

    def _work(self, wait: float) -> None:
        """Wait for something to do; take in all that sources have said by now, then do one thing that was asked for.

        So a reading is never booked with older news than there are, and an address that changed hands while the worker
        was held up is seen to have done both, losing its old holder and getting the new one.
        """
        wait = 0.0 if self._requests else wait
        late = clock.now() + wait + HELD_UP_SECONDS
        events = self._receive(wait)
        if clock.now() > late:
            time.sleep(MOMENT_SECONDS)
            events += self._receive(0.0)
        if events:
            self._survive("observing", partial(self._agent.observe, events))
        if self._requests:
            request = self._requests.popleft()
            self._survive(type(request).__name__, partial(self._handle, request))

    def _receive(self, wait: float) -> list[SourceEvent]:
        """Empty the queue, after waiting for something in it: what sources said; anything else joins `_requests`."""
        events: list[SourceEvent] = []
        with contextlib.suppress(queue.Empty):
            message = self._queue.get(timeout=wait)
            while True:
                if isinstance(message, Replace | Update):
                    events.append(message)
                else:
                    self._requests.append(message)
                message = self._queue.get_nowait()
        return events

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

    def _handle(self, message: Request) -> None:
        if isinstance(message, Scrape):
            if clock.now() < message.until:  # else nobody waits for it any more
                _answer(message.reply, self._agent.view)
        elif isinstance(message, Command):
            _answer(message.reply, lambda: self._command(message))
        elif isinstance(message, FoundRanges):
            self._agent.found_ranges(message.networks)
        elif isinstance(message, FoundCluster):
            self._agent.found_cluster(message.facts)
        elif isinstance(message, Signalled):
            if message.number == signal.SIGHUP:
                self._reload(asked=True)
            else:
                self._stopping = True
        elif isinstance(message, FilesChanged):
            self._log.info("files changed", files=", ".join(sorted(message.paths)))
            self._reload(asked=False)
        else:
            self._agent.own_addresses(message)

    def _command(self, command: Command) -> Any:
        match command.name:
            case "pods":
                return self._agent.pods()
            case "apply":
                return [*self._choose_anew(self._config), *self._agent.apply()]
            case "remove":
                was_paused = self._agent.paused
                self._agent.pause()  # also then: an earlier removal may have failed, and still be tried again
                return [] if was_paused else ["removed"]
            case "differences":
                return self._agent.differences()
        raise UsageError(f"the agent knows no command {command.name!r}")

    def _choose_anew(self, config: Config) -> list[str]:
        """Move to the datapath that suits now; returns that in words, where it is another. Raises DatapathError."""
        if not config.enabled:
            return []
        choice, datapath = choosing.choose(config)
        before = self._datapath
        if choice.name == before.name:
            datapath.close()
            return []
        choosing.announce(choice)
        try:
            self._agent.move(datapath)
        except NetacctError:
            datapath.close()
            raise
        self._datapath = datapath
        before.close()
        return [f"moved from {before.name} to {datapath.name}"]

    def _reload(self, *, asked: bool) -> None:
        """Take a new configuration, or keep the old one whole. `asked`: somebody wants it, whatever has changed."""
        self._notifier.reloading()
        try:
            self._read_anew(asked=asked)
        except Exception:  # that nobody foresaw
            self._agent.reload_failed()
            raise
        finally:
            self._notifier.ready(self._agent.status())

    def _read_anew(self, *, asked: bool) -> None:
        mark, lists = self._files.mark(), ListFiles(self._config.state_dir)
        config: Config | None = None
        try:
            config = self._load()
            if not asked and _is_in_file(self._config) and not _is_in_file(config):
                # A full disk leaves an empty file, and so does, for a moment, whoever writes one.
                raise ConfigError(self._path, "", "says nothing any more", "any key; SIGHUP to have all defaults")
            policy, named = load_policy(config, lists)
            if self._must_choose(config):
                marking.of_agent(config, policy)  # for what `reconfigure` refuses, nothing shall have moved
                self._choose_anew(config)
            self._agent.reconfigure(config, policy)
        except (NetacctError, OSError) as error:  # who lacks descriptors has not reloaded either
            self._log.error("reload refused, the configuration before stays in force", error=str(error))
            self._agent.reload_failed()
            self._follow(config or self._config, lists, mark, self._followed)
        else:
            self._follow(config, lists, mark, frozenset() if named else self._followed)
            self._take(config, policy, asked or config != self._config)
            if named:
                lists.keep()
            if lists.stale or not named:
                self._agent.reload_failed()

    def _must_choose(self, config: Config) -> bool:
        """Whether the datapath, or whether one may count here at all, is to be decided anew."""
        asks = choosing.asked(config)
        begins = config.enabled and not self._config.enabled  # nobody has judged yet what rules would see
        return begins or asks != choosing.asked(self._config) or asks not in ("auto", self._datapath.name)

    def _follow(self, config: Config, lists: ListFiles, mark: Mark, more: frozenset[str] = frozenset()) -> None:
        """Follow the files that make the configuration and policy, also those that have an error now."""
        policy = {config.policy} if is_path(config.policy) else set()
        self._followed = frozenset({self._path} | policy | lists.asked | more)
        self._files.follow(self._followed, mark)

    def _take(self, config: Config, policy: Policy, restart: bool) -> None:
        log.configure(config.log.level, config.log.format)
        for key in _fixed(self._config, config):
            self._log.warning("this change needs a restart", key=key)
        self._config = config
        if restart:  # also where nothing changed, if asked: a reload is how to make them look
            self._restart_sources(config)
        self._log.info("reloaded", policy=policy.name, policy_hash=policy.hash)

    def _restart_sources(self, config: Config) -> None:
        try:
            earlier, self._sources = self._sources, Sources(config, self._queue.put)
            earlier.stop()
            self._queue.put(self._sources.start(earlier))
            self._queue.put(FoundCluster(self._sources.start_cluster()))
        except Exception:  # noqa: BLE001 -- whatever it was (no descriptors, no threads), half of them do not run now
            self._log.exception("the sources cannot be started anew: this process ends, for another one to do that")
            self._stopping, self._exit_code = True, 1


def _is_in_file(config: Config) -> bool:
    """Whether a file says anything of it."""
    return any(origin != "default" and not origin.startswith("--") for origin in config.origins.values())


def _fixed(old: Config, new: Config) -> list[str]:
    """The changed keys that a running agent cannot follow."""
    pairs = {"state_dir": (old.state_dir, new.state_dir), "web": (old.web, new.web)}
    return [key for key, (was, now) in pairs.items() if was != now]


def _answer(reply: queue.SimpleQueue[Any], work: Callable[[], Any]) -> None:
    try:
        reply.put(work())
    except Exception as error:
        reply.put(error)
        if not isinstance(error, NetacctError):
            raise
