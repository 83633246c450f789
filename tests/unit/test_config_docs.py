"""Every key and flag is documented, and what the documentation shows is true."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from netacct import config, yamlfile
from netacct.cli import COMMANDS, parser
from netacct.identity import pods_file

DOCS = Path(__file__).parents[2] / "docs"
CONFIGURATION = (DOCS / "configuration.md").read_text()
COMMANDS_PAGE = (DOCS / "commands.md").read_text()


def documented_keys() -> dict[str, str]:
    """The table of keys: each with its default as shown."""
    section = CONFIGURATION.split("## Keys")[1].split("## Flags")[0]
    rows = re.findall(r"^\| `([a-z_.]+)` \| [^|]* \| ([^|]*) \|", section, re.MULTILINE)
    return {key: default.strip().strip("`") for key, default in rows}


def options(top: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Each command line (`netacct rules show`) with each of its flags, through all subcommands."""
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from options(sub)
        for flag in action.option_strings:
            yield top.prog, flag


def test_every_key_is_documented() -> None:
    """The table has each key, in the code's order, and no other."""
    assert tuple(documented_keys()) == config.keys()


@pytest.mark.parametrize("key", config.keys())
def test_the_documented_default_is_the_default(key: str, tmp_path: Path) -> None:
    """Writing the default that the table shows changes nothing."""
    shown = documented_keys()[key]
    path = tmp_path / "netacct.yaml"
    text = "".join(f"{'  ' * depth}{name}:\n" for depth, name in enumerate(key.split(".")))
    path.write_text(text.rstrip() + " " + {"none": "[]"}.get(shown, shown) + "\n")
    assert config.load(str(path)) == config.load(_empty(tmp_path))


def test_the_documented_file_is_all_defaults(tmp_path: Path) -> None:
    """The file that writes the defaults out is valid, has every key, and changes nothing."""
    text = CONFIGURATION.split("```yaml\n")[1].split("```")[0]
    path = tmp_path / "netacct.yaml"
    path.write_text(text)
    loaded = config.load(str(path))
    assert loaded == config.load(_empty(tmp_path))
    assert "default" not in {setting.origin for setting in config.effective(loaded)}


def test_the_documented_pods_file_is_valid() -> None:
    """The example of a pods file is read, with the addresses that it shows."""
    text = CONFIGURATION.split("```yaml\n")[2].split("```")[0]
    observations = pods_file.parse(text.encode(), "docs", 0.0)
    assert len(observations) == 2 + 16 + 1
    assert f"up to {pods_file.CIDR_LIMIT} addresses" in CONFIGURATION
    assert f"{pods_file.TOTAL_LIMIT} in the whole file" in CONFIGURATION
    assert f"up to {yamlfile.SIZE_LIMIT >> 20} MiB" in CONFIGURATION
    assert all(phase in CONFIGURATION for phase in pods_file.PHASES)


def test_every_command_and_flag_is_documented() -> None:
    """Each command has a section, and each flag of any command is on the commands' page."""
    assert [name for name in COMMANDS if f"## netacct {name}\n" not in COMMANDS_PAGE] == []
    assert [
        pair
        for pair in options(parser())
        if not re.search(rf"`{re.escape(pair[1])}[ `]", COMMANDS_PAGE) and pair[1] not in ("-h", "--help", "--version")
    ] == []
    for flag in config.FLAGS.values():
        assert f"`{flag} " in CONFIGURATION


def _empty(directory: Path) -> str:
    path = directory / "empty.yaml"
    path.write_text("")
    return str(path)
