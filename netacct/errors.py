"""Everything that netacct raises on purpose.

    NetacctError                exit 1
      UsageError                exit 2    the command line itself is wrong
      PermissionRefusedError    exit 77   not root, or a capability is missing
      ConfigError               exit 78   a file that the user wrote; names file, key, what was found, what is allowed
      DatapathError             exit 1    the kernel, or a tool on the way to it, refused
        LockTimeoutError                  somebody held the xtables lock for too long
        MissingFeatureError               this kernel, or this machine, lacks something that is named
      StoreError                exit 1    the state directory cannot be used

Exit codes follow sysexits.h (BSD) where it has a number for the case.
"""

from __future__ import annotations

EX_FAILURE = 1
EX_USAGE = 2
EX_NOPERM = 77
EX_CONFIG = 78


class NetacctError(Exception):
    """Anything that netacct itself reports; carries the exit code for the command line."""

    exit_code = EX_FAILURE


class UsageError(NetacctError):
    """The command line is wrong."""

    exit_code = EX_USAGE


class PermissionRefusedError(NetacctError):
    """The kernel or a file says no: root or a capability is missing."""

    exit_code = EX_NOPERM


class ConfigError(NetacctError):
    """A file that the user wrote has something wrong in it.

    Args:
        file: its path, as the user would name it.
        key: the dotted path of the key (`classes.storage.cidrs[2]`), or "" for the file as a whole.
        found: what is there and why that is wrong, in words.
        allowed: what may stand there instead, in words, or "".
        line: the 1-based line, where it is known.

    Attributes:
        more: how many other errors were found with this one, and are not told with it.
    """

    exit_code = EX_CONFIG

    def __init__(self, file: str, key: str, found: str, allowed: str = "", line: int | None = None) -> None:
        self.file, self.key, self.found, self.allowed, self.line = file, key, found, allowed, line
        self.more = 0
        where = file if line is None else f"{file}:{line}"
        parts = [where, key, found] if key else [where, found]
        super().__init__(": ".join(parts) + (f" (allowed: {allowed})" if allowed else ""))

    def __str__(self) -> str:
        """The message, and where there are more of them."""
        return super().__str__() + (f"; and {self.more} more: `netacct check`" if self.more else "")


class DatapathError(NetacctError):
    """The kernel side failed; says what was attempted and what the kernel answered."""


class LockTimeoutError(DatapathError):
    """Another program held the xtables lock until our patience ended."""


class MissingFeatureError(DatapathError):
    """A kernel feature, module or program that this datapath needs is not there; names it."""


class StoreError(NetacctError):
    """The state directory or the file in it cannot be used."""
