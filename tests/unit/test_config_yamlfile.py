"""YAML that users write, read with its places kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from netacct import yamlfile
from netacct.errors import ConfigError
from netacct.model import Network
from netacct.yamlfile import Node, duration, parse


def value_of(text: str) -> Node:
    """The node of key `k` in a document."""
    return parse(text.encode(), "f.yaml").mapping()["k"]


def test_places_are_kept() -> None:
    """Each value knows its file, its dotted key and the line of its key or item."""
    root = parse(b"# head\na:\n  b:\n    - 1\n    - {c: 2}\n", "x.yaml")
    node = root.mapping()["a"].mapping()["b"].sequence()[1].mapping()["c"]
    assert (node.file, node.key, node.line, node.value) == ("x.yaml", "a.b[1].c", 5, "2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2", "f.yaml:2: a: is given twice, first in line 1"),
        ("a: &x 1\nb: *x", "f.yaml:2: b: aliases are not supported"),
        ("a: !!python/object:os.system x", "f.yaml:1: a: the tag .*os.system is not supported"),
        ("a: !!binary aGk=", "f.yaml:1: a: the tag .* is not supported"),
        ("<<: {a: 1}", "f.yaml:1: <<: merge keys"),
        ("? [a]\n: 1", "f.yaml:1: has a key that is not a string"),
        ("a: b: c", "f.yaml:1: is not valid YAML"),
        ("a: 1\n---\nb: 1", "f.yaml:2: is not valid YAML"),
        ("\x01", "f.yaml: is not valid YAML"),
        ("[" * 40 + "]" * 40, "nested too deeply"),
        ("[" * 100_000, "not valid YAML|nested too deeply"),
        ("- " * 100_000 + "x", "not valid YAML|nested too deeply"),
    ],
)
@pytest.mark.parametrize("loader", ["CSafeLoader", "SafeLoader"])
def test_what_is_not_plain_data_is_refused(
    monkeypatch: pytest.MonkeyPatch, loader: str, text: str, message: str
) -> None:
    """Duplicates, aliases, tags, merges, odd keys, bad syntax and depth are refused, with libyaml and without."""
    if not hasattr(yaml, loader):
        pytest.skip("this PyYAML was built without libyaml")
    monkeypatch.setattr(yamlfile, "_LOADER", getattr(yaml, loader))
    with pytest.raises(ConfigError, match=message):
        parse(text.encode(), "f.yaml")


def test_bytes_that_are_not_text_are_refused() -> None:
    """A binary file is named as such, with the first bad byte."""
    with pytest.raises(ConfigError, match=r"f\.yaml: is not UTF-8 text \(byte 3\)"):
        parse(b"a: \xff", "f.yaml")


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    """A file over the limit is refused before it is parsed."""
    path = tmp_path / "huge.yaml"
    with path.open("wb") as file:
        file.truncate(yamlfile.SIZE_LIMIT + 1)
    with pytest.raises(ConfigError, match="larger than 8 MiB"):
        yamlfile.load(str(path))


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    """A missing file and a directory are ConfigErrors that carry the operating system's reason."""
    with pytest.raises(ConfigError, match="cannot be read: No such file") as missing:
        yamlfile.load(str(tmp_path / "none.yaml"))
    assert isinstance(missing.value.__cause__, FileNotFoundError)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        yamlfile.load(str(tmp_path))


def test_a_pipe_is_read_only_where_a_shell_made_it(tmp_path: Path) -> None:
    """A pipe in the place of a file is refused at once; one below /dev, as `<(…)` gives it, is read to its end."""
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ConfigError, match="cannot be read: it is no regular file"):
        yamlfile.read(str(tmp_path / "pipe.yaml"))
    out, into = os.pipe()
    with os.fdopen(out, "rb"):
        os.write(into, b"enabled: false")
        os.close(into)
        assert yamlfile.read(f"/dev/fd/{out}") == b"enabled: false"


def test_json_is_read_as_well() -> None:
    """A JSON document gives the same values as YAML."""
    root = parse(b'{"a": ["x\\/y", 1, true, null]}', "f.json")
    assert [item.value for item in root.mapping()["a"].sequence()] == ["x/y", "1", "true", None]


def test_strings_keep_their_spelling() -> None:
    """A scalar that YAML would take for a boolean or an octal number is still the string as written."""
    assert [value_of(f"k: {text}").string() for text in ("on", "010", "1:30", "2024-01-01", "'null'")] == [
        "on",
        "010",
        "1:30",
        "2024-01-01",
        "null",
    ]


@pytest.mark.parametrize("text", ["", "null", "[a]", "{a: 1}"])
def test_what_is_no_scalar_is_no_string(text: str) -> None:
    """Nothing, a list and a mapping are refused where a string is expected."""
    with pytest.raises(ConfigError, match="where a string is expected"):
        value_of(f"k: {text}").string()


def test_booleans() -> None:
    """The words of YAML 1.1 are booleans in any case, but not in quotes."""
    assert [value_of(f"k: {t}").boolean() for t in ("on", "True", "yes")] == [True] * 3
    assert [value_of(f"k: {t}").boolean() for t in ("off", "FALSE", "no")] == [False] * 3
    for text in ("'on'", "1", "", "maybe", "[on]"):
        with pytest.raises(ConfigError, match="is not a boolean"):
            value_of(f"k: {text}").boolean()


def test_a_wrong_boolean_names_every_word_that_is_one() -> None:
    """The message about a wrong boolean lists all six words, and that none of them is quoted."""
    with pytest.raises(ConfigError, match=r"allowed: true, false, on, off, yes, no, without quotes"):
        value_of("k: maybe").boolean()


@pytest.mark.parametrize("text", ["[fd00::]", "[fd00:: ]", "[::1]", "[10.0.0.0/8, ::/0]", "\n- fd00::", "fd00::"])
def test_an_address_whose_colons_yaml_takes_is_told_to_be_quoted(text: str) -> None:
    """An IPv6 address that YAML cannot read bare at its place gets an error that asks for quotes."""

    def networks() -> list[Network]:
        return [item.network() for item in value_of(f"k: {text}").sequence()]

    with pytest.raises(ConfigError, match=r"in quotes, as in \"fd00::\""):
        networks()


@pytest.mark.parametrize("text", ["[fd00::1]", "[fd00::/64]", "\n- fd00::/64", "\n- ::/0", '["fd00::"]', "['::1']"])
def test_an_address_whose_colons_yaml_leaves_is_read(text: str) -> None:
    """An IPv6 address with something behind its last colon, or in quotes, is read as it stands."""
    assert value_of(f"k: {text}").sequence()[0].network().version == 6


def test_integers() -> None:
    """Decimal and hexadecimal numbers within both limits are read; anything else is refused."""
    assert [value_of(f"k: {t}").integer(0, 31) for t in ("0", "31", "0x1f")] == [0, 31, 31]
    for text in ("32", "-1", "0x" + "f" * 5000):
        with pytest.raises(ConfigError, match="out of range"):
            value_of(f"k: {text}").integer(0, 31)
    for text in ("'1'", "1.0", "010", "x", "", "1e3"):
        with pytest.raises(ConfigError, match="not a whole number"):
            value_of(f"k: {text}").integer(0, 31)


def test_durations() -> None:
    """Every unit is read, a bare number is seconds, and both limits are allowed values."""
    texts = {"500ms": 0.5, "120s": 120, "5m": 300, "1h": 3600, "1d": 86400, "90": 90, "1.5m": 90, "0": 0}
    assert {text: value_of(f"k: {text}").seconds(0, 86400) for text in texts} == texts
    for text in ("2d", "1000000h"):
        with pytest.raises(ConfigError, match="out of range"):
            value_of(f"k: {text}").seconds(0, 86400)
    for text in ("5y", "-1s", "1 h", "", "s", "1h30m", "nan", "[1]"):
        with pytest.raises(ConfigError, match="is not a duration"):
            value_of(f"k: '{text}'" if text != "[1]" else "k: [1]").seconds(0, 86400)


@pytest.mark.parametrize("seconds", [0, 0.5, 1, 90, 120, 300, 3600, 5400, 86400, 31536000])
def test_durations_are_written_as_they_are_read(seconds: float) -> None:
    """What `duration` writes is read back as the same number of seconds."""
    assert value_of(f"k: {duration(seconds)}").seconds(0, 1e9) == seconds


def test_networks() -> None:
    """CIDRs and addresses of both families are read; host bits, masks, zones and words are refused."""
    assert [str(value_of(f"k: {t}").network()) for t in ("10.0.0.0/8", "10.1.2.3", "fd00::/64", "FD00::1")] == [
        "10.0.0.0/8",
        "10.1.2.3/32",
        "fd00::/64",
        "fd00::1/128",
    ]
    for text, message in {
        "10.0.0.1/8": r"host bits set \(allowed: 10.0.0.0/8\)",
        "fd00::1/64": r"host bits set \(allowed: fd00::/64\)",
        "10.0.0.0/255.0.0.0": "no prefix length",
        "10.0.0.0/33": "no address and no CIDR",
        "fe80::1%eth0": "has a zone",
        "example": "no address and no CIDR",
    }.items():
        with pytest.raises(ConfigError, match=message):
            value_of(f"k: {text}").network()


def test_an_unknown_key_names_the_nearest() -> None:
    """A misspelt key is refused with the key that it resembles, and all that are allowed."""
    root = parse(b"a:\n  retenton: 1\n", "f.yaml")
    with pytest.raises(
        ConfigError, match=r"f.yaml:2: a.retenton: unknown key, did you mean 'retention'\? \(allowed: pods, ret"
    ):
        root.mapping()["a"].mapping(("retention", "pods"))


def test_nothing_is_an_empty_mapping_and_list() -> None:
    """A key without a value, and an empty document, read as an empty mapping or list."""
    assert parse(b"# only a comment\n", "f").mapping() == {}
    assert value_of("k:").sequence() == ()
    for read in (value_of("k: [1]").mapping, value_of("k: {a: 1}").sequence):
        with pytest.raises(ConfigError, match="is expected"):
            read()
