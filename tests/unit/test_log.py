"""What log lines look like, and which are written."""

from __future__ import annotations

import io
import json
import logging
import os
import re
from pathlib import Path
from typing import TextIO

import pytest

from netacct import log


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        """Yes."""
        return True


def journal(path: Path) -> tuple[TextIO, dict[str, str]]:
    """A file that stands for the journal's socket, and the environment that systemd would set for it."""
    stream = path.open("w+", encoding="utf-8")
    stat = os.fstat(stream.fileno())
    return stream, {"JOURNAL_STREAM": f"{stat.st_dev}:{stat.st_ino}"}


def test_logfmt_by_default() -> None:
    """Away from a terminal a line is logfmt: time in UTC, level, message, then the values with quotes where needed."""
    stream = io.StringIO()
    log.configure("info", "auto", stream, {})
    log.get(family=4).info("rules applied", rules=12, name='a "b" c', ok=True)
    pattern = (
        r'ts=\d{4}-\d\d-\d\dT[0-9:.]+Z level=info msg="rules applied" family=4 rules=12 name="a \\"b\\" c" ok=true\n'
    )
    assert re.fullmatch(pattern, stream.getvalue())


def test_an_event_is_one_line() -> None:
    """Line ends in values and exceptions do not break the line in logfmt and JSON."""
    for style in ("logfmt", "json"):
        stream = io.StringIO()
        log.configure("info", style, stream, {})
        try:
            int("two\nlines")
        except ValueError:
            log.get().error("failed", found="x\ny", exc_info=True)
        assert stream.getvalue().count("\n") == 1
        assert "ValueError" in stream.getvalue()


def test_control_characters_are_escaped() -> None:
    """What a file or a server wrote into a name reaches no terminal as a command."""
    stream = io.StringIO()
    log.configure("info", "logfmt", stream, {})
    log.get().info("hello", pod="a\x1b[31m\rb\x9bc")
    assert stream.getvalue().endswith("pod=a\\x1b[31m\\x0db\\x9bc\n")


def test_json_on_request() -> None:
    """With json a line is one object with the same keys."""
    stream = io.StringIO()
    log.configure("info", "json", stream, {})
    log.get().warning("retry", seconds=1.5)
    line = json.loads(stream.getvalue())
    assert line.pop("ts").endswith("Z")
    assert line == {"level": "warning", "msg": "retry", "seconds": 1.5}


def test_console_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal gets the readable form, in colour but for NO_COLOR, unless logfmt was asked for."""
    for style, environ, expected in (
        ("auto", None, "\x1b["),
        ("auto", "1", "[info     ] ready"),
        ("logfmt", None, "level=info msg=ready"),
    ):
        monkeypatch.delenv("NO_COLOR", raising=False)
        if environ:
            monkeypatch.setenv("NO_COLOR", environ)
        stream = Terminal()
        log.configure("info", style, stream, {})
        log.get().info("ready")
        assert expected in stream.getvalue()


def test_the_journal_gets_priorities_and_no_time(tmp_path: Path) -> None:
    """Where stderr is the journal each line begins with its syslog priority and leaves the time to the journal."""
    stream, environ = journal(tmp_path / "journal")
    with stream:
        log.configure("debug", "auto", stream, environ)
        logger = log.get()
        logger.debug("a")
        logger.info("b", n=1)
        logger.warning("c")
        logger.error("d")
        logger.critical("e")
        stream.seek(0)
        assert stream.read().splitlines() == [
            "<7>level=debug msg=a",
            "<6>level=info msg=b n=1",
            "<4>level=warning msg=c",
            "<3>level=error msg=d",
            "<2>level=critical msg=e",
        ]


def test_json_in_the_journal_has_priorities_too(tmp_path: Path) -> None:
    """The priority stands before the object."""
    stream, environ = journal(tmp_path / "journal")
    with stream:
        log.configure("info", "json", stream, environ)
        log.get().warning("c")
        stream.seek(0)
        assert stream.read() == '<4>{"level": "warning", "msg": "c"}\n'


def test_another_stream_is_not_the_journal(tmp_path: Path) -> None:
    """JOURNAL_STREAM counts only for the file that it names, as when stderr was redirected since."""
    stream, environ = journal(tmp_path / "journal")
    with stream, (tmp_path / "other").open("w") as other:
        assert log.is_journal(stream, environ)
        assert not log.is_journal(other, environ)
        assert not log.is_journal(stream, {})
        assert not log.is_journal(io.StringIO(), environ)


def test_levels_filter_and_can_change() -> None:
    """A line below the level is not written, and a logger that exists follows a new level."""
    stream = io.StringIO()
    log.configure("warning", "logfmt", stream, {})
    logger = log.get()
    logger.info("hidden")
    log.configure("debug", "logfmt", stream, {})
    logger.debug("shown")
    assert "hidden" not in stream.getvalue()
    assert "msg=shown" in stream.getvalue()


def test_libraries_are_heard_from_warning_on() -> None:
    """What a library logs by the standard library comes out once, in our format, from warning on."""
    stream = io.StringIO()
    log.configure("debug", "logfmt", stream, {})
    log.configure("debug", "logfmt", stream, {})
    logging.getLogger("some.library").info("chatter")
    logging.getLogger("some.library").warning("trouble with %s", "x")
    assert re.fullmatch(r'ts=\S+ level=warning msg="trouble with x" library=some.library\n', stream.getvalue())


def test_a_closed_stream_stops_nothing() -> None:
    """When nobody reads the log any more, lines are lost and the program goes on."""
    stream = io.StringIO()
    log.configure("info", "logfmt", stream, {})
    stream.close()
    log.get().error("lost")
    reader, writer = os.pipe()
    os.close(reader)
    broken = os.fdopen(writer, "w", buffering=1)
    log.configure("info", "logfmt", broken, {})
    log.get().error("lost")
    with pytest.raises(BrokenPipeError):
        broken.close()


def test_repeats_pass_once_per_interval_and_key() -> None:
    """A key passes, then not until the interval is over, or it was forgotten; other keys are apart."""
    now = 0.0
    repeats = log.Repeats(10, clock=lambda: now)
    assert [repeats.due("a"), repeats.due("a"), repeats.due("b")] == [True, False, True]
    now = 9.9
    assert not repeats.due("a")
    now = 10.0
    assert [repeats.due("a"), repeats.due("a")] == [True, False]
    repeats.forget("a")
    assert repeats.due("a")


def test_repeats_remember_a_bounded_number_of_keys() -> None:
    """The oldest key makes room, and is let through again."""
    repeats = log.Repeats(10, clock=lambda: 0.0, keys=2)
    assert [repeats.due(key) for key in "abc"] == [True] * 3
    assert [repeats.due("c"), repeats.due("a")] == [False, True]
