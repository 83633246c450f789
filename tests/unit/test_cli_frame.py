"""The command line's frame: parsing, exit codes, tables, check and version."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import netacct
from netacct import cli
from netacct.cli import common, configuration, main, output
from netacct.errors import ConfigError, NetacctError, PermissionRefusedError


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A directory with a configuration that names a pods file beside it."""
    (tmp_path / "pods.yaml").write_text("pods: [{namespace: a, name: b, ips: [10.0.0.0/30]}]\n")
    (tmp_path / "netacct.yaml").write_text(
        f"identity: {{file: {{path: {tmp_path}/pods.yaml}}}}\nlog: {{level: error}}\n"
    )
    return tmp_path


def run_raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    """The exit code of a command that raises."""

    def run(_args: argparse.Namespace) -> int:
        raise error

    def parser() -> argparse.ArgumentParser:
        made = argparse.ArgumentParser()
        made.set_defaults(run=run)
        return made

    monkeypatch.setattr(cli, "parser", parser)
    return main([])


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (NetacctError("no luck"), 1, "netacct: error: no luck\n"),
        (PermissionRefusedError("not root"), 77, "netacct: error: not root\n"),
        (ConfigError("f", "k", "bad", line=3), 78, "netacct: error: f:3: k: bad\n"),
        (FileNotFoundError(2, "No such file", "x"), 1, "netacct: error: x: No such file\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_exit_codes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    message: str,
) -> None:
    """An error ends in its exit code and one line on stderr; Ctrl-C says nothing."""
    assert run_raising(monkeypatch, error) == code
    assert capsys.readouterr() == ("", message)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["check", "--log.level", "loud"],
        ["check", "--web.listen-address", "19112"],
        ["check", "--web.telemetry-path", "metrics"],
        ["check", "--config", "x"],
        ["--config.file", "x", "check"],
    ],
)
def test_a_wrong_command_line_is_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """No command, an unknown one, bad values, abbreviated flags, and flags before the command exit with 2."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: netacct" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["show", "apply --dry-run", "remove --dry-run"])
def test_input_for_a_tool_is_no_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Who asks for both at once would get what no JSON parser takes, and is told so."""
    assert main(["rules", *command.split(), "--format", "nft", "-o", "json"]) == 2
    assert "exclude each other" in capsys.readouterr().err


def test_flags_reach_the_configuration(files: Path) -> None:
    """Each common flag sets its key, and a repeated listen address adds up."""
    parser = argparse.ArgumentParser()
    common(parser)
    given = "--log.level debug --log.format json --web.telemetry-path /m --web.listen-address :1"
    arguments = [*given.split(), "--web.listen-address", "[::1]:2", "--config.file", str(files / "netacct.yaml")]
    config = configuration(parser.parse_args(arguments))
    assert (config.log.level, config.log.format, config.web.telemetry_path) == ("debug", "json", "/m")
    assert list(map(str, config.web.listen_address)) == [":1", "[::1]:2"]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`version` prints the package's version, as JSON too, and `--version` the same number."""
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith(f"netacct {netacct.__version__} (python ")
    assert main(["version", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == netacct.__version__
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"netacct {netacct.__version__}\n"


def test_check_shows_values_and_where_they_come_from(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`check` lists each key with value and origin, and sums up policy and pods file."""
    path = files / "netacct.yaml"
    assert main(["check", "--config.file", str(path), "--log.format", "json"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["log.level", "error", f"{path}:2"] in lines
    assert ["log.format", "json", "--log.format"] in lines
    assert ["metrics.retention", "5m", "default"] in lines
    assert lines[-1] == ["pods", "file:", f"{files}/pods.yaml,", "1", "pods,", "4", "addresses"]


def test_check_reports_every_error(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Errors in configuration, policy and pods file are all reported, with exit code 78."""
    (files / "pods.yaml").write_text("pods: [{namespace: a}]\n")
    path = files / "netacct.yaml"
    path.write_text(path.read_text() + f"polcy: x\npolicy: {files}/none.yaml\n")
    assert main(["check", "--config.file", str(path)]) == 78
    errors = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[2] for line in errors] == [f"{path}:3", f"{path}:4", f"{files}/pods.yaml:1"]
    assert main(["check", "--config.file", str(path), "-o", "json"]) == 78
    found = json.loads(capsys.readouterr().out)
    assert (found["valid"], found["policy"], found["pods"]) == (False, None, None)
    assert (found["errors"][0]["line"], found["errors"][0]["key"]) == (3, "polcy")


def test_check_waits_for_no_pipe(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe in the place of the pods file is an error of `check`, instead of something to wait for."""
    (files / "pods.yaml").unlink()
    os.mkfifo(files / "pods.yaml")
    assert main(["check", "--config.file", str(files / "netacct.yaml")]) == 78
    assert f"{files}/pods.yaml: cannot be read: it is no regular file" in capsys.readouterr().err


@pytest.mark.parametrize(("policy", "found"), [("defalt", "no policy of that name"), ("./no.yaml", "cannot be read")])
def test_check_says_where_a_missing_policy_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: str, found: str
) -> None:
    """A policy that is not there is an error of the configuration's line that names it."""
    path = tmp_path / "netacct.yaml"
    path.write_text(f"enabled: true\npolicy: {policy}\n")
    assert main(["check", "--config.file", str(path)]) == 78
    error = capsys.readouterr().err
    assert f"{path}:2: policy: " in error
    assert found in error


def test_check_json(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As JSON, `check` gives settings with plain values, and no errors."""
    assert main(["check", "--config.file", str(files / "netacct.yaml"), "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["valid"], found["errors"]) == (True, [])
    assert {"key": "metrics.pods", "value": True, "origin": "default"} in found["settings"]
    assert found["pods"] == {"file": f"{files}/pods.yaml", "pods": 1, "addresses": 4}


def test_check_gives_each_item_of_a_list_a_line(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table of `check` stays as wide as its longest item, however many a list has."""
    path = files / "netacct.yaml"
    path.write_text(path.read_text() + "local_ranges: [10.0.0.0/24, 10.0.1.0/24]\n")
    assert main(["check", "--config.file", str(path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    at = lines.index(["local_ranges", "10.0.0.0/24", f"{path}:3"])
    assert lines[at + 1] == ["10.0.1.0/24"]


def test_a_full_disk_is_one_line(files: Path) -> None:
    """Output that cannot be written ends in one line on stderr and exit code 1."""
    command = [sys.executable, "-m", "netacct", "check", "--config.file", str(files / "netacct.yaml")]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (1, b"netacct: error: No space left on device\n")


def test_a_wrong_flag_names_what_is_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    """A path that is taken, and a port that cannot be, are told with what may stand there instead."""
    for arguments, words in (
        (["--web.telemetry-path", "/livez"], "'/livez' is not a valid value (allowed: a path like /metrics; "),
        (["--web.listen-address", ":99999"], "with a port from 1 to 65535"),
    ):
        with pytest.raises(SystemExit):
            main(["check", *arguments])
        assert words in capsys.readouterr().err


def test_as_many_items_as_there_is_room() -> None:
    """A list in a cell shows what fits, the first in any case, and counts the rest."""
    assert output.some([], 10) == ""
    assert output.some(["10.0.0.1", "10.0.0.2"], 17) == "10.0.0.1,10.0.0.2"
    assert output.some(["10.0.0.1", "10.0.0.2", "10.0.0.3"], 17) == "10.0.0.1,10.0.0.2 and 1 more"
    assert output.some(["2001:db8::1", "2001:db8::2"], 5) == "2001:db8::1 and 1 more"


def test_a_reader_that_leaves_is_no_error(files: Path) -> None:
    """With its output closed early, as by `head`, a command ends quietly as a shell would tell of SIGPIPE."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "netacct", "check", "--config.file", str(files / "netacct.yaml")]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_what_the_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    """In a Latin-1 locale, other letters of a path are escaped, and so is a byte that is no letter in any."""
    for name in ("日本.yaml".encode(), b"x\xff.yaml"):
        path = tmp_path / os.fsdecode(name)
        path.write_text("log: {level: debug}\n")
        command = [sys.executable, "-m", "netacct", "check", "--config.file", str(path)]
        environment = {**os.environ, "PYTHONIOENCODING": "latin-1:strict"}
        done = subprocess.run(command, env=environment, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
        assert rb"\u65e5\u672c.yaml:1" in done.stdout or rb"x\udcff.yaml:1" in done.stdout


@pytest.mark.parametrize(
    ("closed", "arguments", "code"),
    [(1, ["version"], 0), (2, ["check", "--config.file", "/none"], 78), (2, ["nonsense"], 2)],
)
def test_closed_standard_files_are_no_error(closed: int, arguments: list[str], code: int) -> None:
    """Without stdout or stderr (`>&-`) a command has its usual exit code, and tells nobody."""
    command = [sys.executable, "-m", "netacct", *arguments]
    done = subprocess.run(["sh", "-c", f'exec "$@" {closed}>&-', "sh", *command], capture_output=True, check=False)
    assert (done.returncode, (done.stdout, done.stderr)[closed - 1]) == (code, b"")


def test_nothing_of_ours_takes_the_number_of_a_closed_standard_file() -> None:
    """A file that a command opens is none of the first three, where libraries write their complaints."""
    code = "from netacct.cli import main; main(['version']); f = open('/dev/null'); raise SystemExit(f.fileno() != 3)"
    script = 'exec "$@" <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", script, "sh", sys.executable, "-c", code], check=False).returncode == 0


def test_the_command_line_loads_nothing_heavy() -> None:
    """Building the parser and running `version` imports neither structlog, pyroute2, iptc, sqlite3 nor asyncio."""
    code = (
        "import sys; from netacct.cli import main; main(['version'])\n"
        "print(sorted({'structlog', 'pyroute2', 'iptc', 'sqlite3', 'asyncio', 'prometheus_client'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_tables_line_up() -> None:
    """Columns are as wide as their widest cell, numbers to the right, and no line ends in blanks."""
    rows = [("a", 5, "x"), ("long", 1234, "")]
    assert output.table(("NAME", "BYTES", "NOTE"), rows, frozenset({1})) == (
        "NAME  BYTES  NOTE\na         5  x\nlong   1234\n"
    )
