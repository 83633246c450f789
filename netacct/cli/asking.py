"""Asking the running agent, which goes on with what it has read while the file on disk is broken."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netacct import config as configurations
from netacct.cli import flags
from netacct.errors import ConfigError

if TYPE_CHECKING:
    from netacct.config import Config


def ask_agent(args: argparse.Namespace, command: str) -> tuple[Config, Any]:
    """The configuration as far as it can be read, and the agent's answer; None where no agent runs.

    Without an agent nobody knows better than the file: then the Config has no error.

    Args:
        args: of a command with the flags of `common`.
        command: what the agent shall do or tell.

    Raises:
        ConfigError: the file has an error, and no agent runs where it puts the state directory.
        NetacctError: the agent's own.
    """
    from netacct.control import NoAgentError, ask  # noqa: PLC0415 -- other commands start faster without it

    config, errors = configurations.examine(args.config_file, flags(args))
    if errors:
        config = replace(config, state_dir=_state_dir(config, args.config_file or configurations.DEFAULT_PATH, errors))
    try:
        answer = ask(Path(config.state_dir), command)
    except NoAgentError:
        if errors:
            raise configurations.first_of(errors) from None
        return config, None
    if errors:
        first = configurations.first_of(errors)
        sys.stderr.write(f"netacct: warning: {first}; the running agent goes on with the configuration before\n")
    return config, answer


def _state_dir(config: Config, path: str, errors: list[ConfigError]) -> str:
    """Where the state directory is by a file that has errors. Raises the first of them where that is not certain."""
    origin = config.origins["state_dir"]
    if origin.endswith(configurations.INVALID):
        raise configurations.first_of(errors)
    if origin != "default":
        return config.state_dir
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError):
        raise configurations.first_of(errors) from None
    if "state_dir" not in text:
        return config.state_dir
    written = re.search(
        r"^state_dir:[ \t]+(/[^\s\"'#]+)[ \t]*(?:#.*)?$", text, re.MULTILINE
    )  # no YAML, but this line is
    if written is None:
        raise configurations.first_of(errors)
    return written[1]
