"""`netacct accounts`: which accounts it shows, how it sums them, and what it says to nonsense."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from netacct.accounting.accounts import Account, State, encode
from netacct.accounting.accounts_file import AccountsFile
from netacct.cli import main
from netacct.model import Count, Direction

NOON = datetime(2025, 5, 9, 12, tzinfo=UTC)


def record(number: int, pod: str, namespace: str = "team-a", hours: float = 0.0, **changes: Any) -> Account:
    """An account of one hour that begins so many hours after noon, with ten to the `number` bytes from the internet."""
    kind, workload = ("Job", pod.rpartition("-")[0]) if "-" in pod else ("", "")
    start = (NOON + timedelta(hours=hours)).timestamp()
    values: dict[str, Any] = {
        "id": f"{number:016x}",
        "state": State.CLOSED,
        "node": "worker-3",
        "namespace": namespace,
        "pod": pod,
        "uid": f"uid-{pod}",
        "workload_kind": kind,
        "workload": workload,
        "labels": {},
        "ip": f"10.0.0.{number}",
        "sandbox": "",
        "start": start,
        "end": start + 3600,
        "seconds": 3600.0,
        "counts": {
            (Direction.RECEIVE, "internet"): Count(10**number, number),
            (Direction.TRANSMIT, "pod"): Count(7, 1),
        },
    }
    return Account(**values | changes)


RECORDS = [
    record(1, "train-0", labels={"experiment": "x", "seed": "1"}),
    record(2, "train-0", ip="fd00::2", labels={"experiment": "x", "seed": "1"}),
    record(3, "train-1", hours=2.0, labels={"experiment": "x", "seed": "2"}),
    record(4, "web", namespace="team-b", hours=4.0, state=State.INTERRUPTED),
    record(5, "eval-0", namespace="team-b", hours=6.0, workload_kind="CronJob"),
]
RUNNING = record(6, "train-9", hours=7.0, state=State.OPEN)


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    """The flags that name a configuration with some accounts behind it."""
    (tmp_path / "netacct.yaml").write_text(f"accounts_dir: {tmp_path / 'accounts'}\n")
    file = AccountsFile(tmp_path / "accounts")
    file.append([encode(one) for one in RECORDS])
    file.write_open([encode(RUNNING)])
    return ["--config.file", str(tmp_path / "netacct.yaml")]


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    """What `netacct accounts -o json` prints."""
    assert main(["accounts", *arguments, "-o", "json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    found: list[dict[str, Any]] = json.loads(printed.out)
    return found


@pytest.mark.parametrize(
    ("arguments", "numbers"),
    [
        ([], [1, 2, 3, 4, 5]),
        (["--open"], [1, 2, 3, 4, 5, 6]),
        (["-n", "team-b"], [4, 5]),
        (["--namespace", "team"], []),
        (["--workload", "train"], [1, 2, 3]),
        (["--workload", "job/train"], [1, 2, 3]),
        (["--workload", "Job/eval"], []),
        (["--workload", "CronJob/eval"], [5]),
        (["--pod", "train-1"], [3]),
        (["-l", "experiment=x"], [1, 2, 3]),
        (["-l", "experiment=x", "--label", "seed=2"], [3]),
        (["-l", "experiment="], []),
        (["--since", "2025-05-09T14:00:00Z"], [3, 4, 5]),
        (["--since", "2025-05-09T16:00:01+01:00"], [4, 5]),
        (["--since", "2025-05-09T15:00:01"], [4, 5]),
        (["--until", "2025-05-09T14:00:00Z"], [1, 2]),
        (["--until", "2025-05-09T14:00:00.001Z"], [1, 2, 3]),
        (["--since", "2025-05-09", "--until", "2025-05-10"], [1, 2, 3, 4, 5]),
        (["--until", "2025-05-09"], []),
        (["--since", "2w"], []),
        (["--until", "1s", "-n", "team-b"], [4, 5]),
    ],
)
def test_filters_choose(
    settings: list[str], capsys: pytest.CaptureFixture[str], arguments: list[str], numbers: list[int]
) -> None:
    """Each filter keeps what it names, several keep what all of them name, and times choose what lasted into them."""
    assert [int(one["id"], 16) for one in shown(capsys, *settings, *arguments)] == numbers


def test_json_has_the_records_of_the_file(settings: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed for programs is what the file says, field by field."""
    assert shown(capsys, *settings) == [json.loads(encode(one)) for one in RECORDS]


def test_traffic_limits_the_bytes_to_a_class(settings: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """With --traffic, a record is shown with the counts of that class only, also where it has none."""
    for one in shown(capsys, *settings, "--traffic", "pod"):
        assert (one["receive"], one["transmit"]) == ({}, {"pod": {"bytes": 7, "packets": 1}})


@pytest.mark.parametrize("by", ["lease", "namespace"])
def test_a_class_that_no_account_has_is_told(by: str, settings: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt class gives a warning that names the classes that there are; a right one gives none."""
    assert main(["accounts", *settings, "--by", by, "--traffic", "internet", "--traffic", "pdo"]) == 0
    expected = "netacct: warning: --traffic pdo: no account has that class; they have: internet, pod\n"
    assert capsys.readouterr().err == expected


def test_sums_by_workload(settings: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What belongs to one owner is added up, from the first start to the last end, by class and direction."""
    found = shown(capsys, *settings, "--by", "workload", "--open")
    assert [(one["namespace"], one["workload_kind"], one["workload"]) for one in found] == [
        ("team-a", "Job", "train"),
        ("team-b", "", ""),
        ("team-b", "CronJob", "eval"),
    ]
    assert found[0] == {
        "namespace": "team-a",
        "workload_kind": "Job",
        "workload": "train",
        "leases": 4,
        "incomplete": 1,
        "start": "2025-05-09T12:00:00.000Z",
        "end": "2025-05-09T20:00:00.000Z",
        "receive": {"internet": {"bytes": 1001110, "packets": 12}},
        "transmit": {"pod": {"bytes": 28, "packets": 4}},
    }


@pytest.mark.parametrize(("by", "leases"), [("pod", [2, 1, 1, 1]), ("namespace", [3, 2])])
def test_every_sum_has_all_bytes(
    settings: list[str], capsys: pytest.CaptureFixture[str], by: str, leases: list[int]
) -> None:
    """However accounts are summed, nothing is lost and nothing is in two sums."""
    found = shown(capsys, *settings, "--by", by)
    assert [one["leases"] for one in found] == leases
    assert sum(one["receive"]["internet"]["bytes"] for one in found) == 111110


def test_a_table_for_people(settings: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The table has owner, address, times, state and the bytes of each direction."""
    assert main(["accounts", *settings, "-n", "team-b"]) == 0
    hour = ["2025-05-09T16:00:00Z", "2025-05-09T17:00:00Z"]
    later = ["2025-05-09T18:00:00Z", "2025-05-09T19:00:00Z"]
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["NAMESPACE", "POD", "WORKLOAD", "ADDRESS", "START", "END", "STATE", "RECEIVED", "TRANSMITTED"],
        ["team-b", "web", "-", "10.0.0.4", *hour, "interrupted", "10000", "7"],
        ["team-b", "eval-0", "CronJob/eval", "10.0.0.5", *later, "closed", "100000", "7"],
    ]
    assert main(["accounts", *settings, "--by", "workload", "-n", "team-a"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "NAMESPACE  WORKLOAD   LEASES  INCOMPLETE  START                 END                   RECEIVED  TRANSMITTED",
        "team-a     Job/train       3           0  2025-05-09T12:00:00Z  2025-05-09T15:00:00Z      1110           21",
    ]


def test_files_of_other_nodes_need_no_configuration(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--file reads the named files instead, each account once."""
    file = str(tmp_path / "accounts" / "accounts.jsonl")
    other = tmp_path / "other.jsonl"
    other.write_text(encode(RUNNING) + "\n" + encode(RECORDS[0]) + "\n")
    found = shown(capsys, "--file", file, "--file", str(other), "--config.file", "/nowhere")
    assert [int(one["id"], 16) for one in found] == [1, 2, 3, 4, 5, 6]
    assert settings


def test_a_damaged_line_is_skipped_with_a_warning(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line that is no account costs no other, and is named on stderr."""
    file = tmp_path / "accounts" / "accounts.jsonl"
    file.write_bytes(b"\xff\xfe torn\n" + file.read_bytes() + b'{"id":"half')
    assert main(["accounts", *settings, "-o", "json"]) == 0
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)) == 5
    assert printed.err == f"netacct: warning: {file}: skipped 2 lines that are no accounts, the first is line 1\n"


def test_no_accounts_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where no agent has written anything, the list is empty, and a warning says where it looked."""
    (tmp_path / "netacct.yaml").write_text(f"accounts_dir: {tmp_path / 'none'}\n")
    assert main(["accounts", "--config.file", str(tmp_path / "netacct.yaml"), "-o", "json"]) == 0
    printed = capsys.readouterr()
    assert (printed.out, f"{tmp_path / 'none'} does not exist" in printed.err) == ("[]\n", True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--since", "yesterday"], "'yesterday' is no time, as in 2025-05-09T21:30:00Z"),
        (["--until", "2025-13-01"], "'2025-13-01' is no time"),
        (["--since", "5y"], "'5y' is no time"),
        (["--label", "experiment"], "'experiment' is no label, as in experiment=scaling-laws"),
        (["--workload", "Job/"], "'Job/' is no workload, as in train or Job/train"),
        (["--by", "node"], "invalid choice: 'node'"),
    ],
)
def test_nonsense_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong argument ends with exit code 2 and a message that quotes it and shows how to write it."""
    with pytest.raises(SystemExit) as ended:
        main(["accounts", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--since", "1h", "--until", "2h"], "--since must be before --until"),
        (["--open", "--file", "x"], "--open reads accounts_dir"),
    ],
)
def test_contradictions_are_named(
    settings: list[str], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Arguments that contradict each other end with exit code 2."""
    assert main(["accounts", *settings, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A file that was asked for and is not there ends with exit code 1 and its name."""
    assert main(["accounts", "--file", "/nowhere/accounts.jsonl"]) == 1
    assert "/nowhere/accounts.jsonl" in capsys.readouterr().err
