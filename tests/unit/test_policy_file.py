"""Reading policies: what is understood, and that everything doubtful is refused by file, line, key and remedy."""

import ipaddress
from pathlib import Path

import pytest

from netacct.errors import ConfigError
from netacct.policy import MarkTable, Policy, TrafficClass, Tunnel
from netacct.policy_file import BUILTIN, CLASSES_LIMIT, load, shipped

MARKS = "\nmarks: {mask: 0x1f, values: {%s}}\n"


def read(tmp_path: Path, text: str | bytes, name: str = "p.yaml") -> Policy:
    """The policy in a file with this text."""
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load(str(path))


def classes(text: str) -> str:
    """A policy with one more class, `a`, in flow style."""
    return "classes:\n  a: " + text + "\n"


def found(policy: Policy) -> dict[str, str]:
    """The class of each CIDR, as text."""
    return {str(prefix.network): prefix.traffic for prefix in policy.prefixes}


REFUSED = [
    pytest.param(classes("{cidrs: [10.0.0.1/8]}"), 2, "classes.a.cidrs[0]", "host bits", "10.0.0.0/8", id="host bits"),
    pytest.param(
        classes("{cidrs: ['fd00::1/64']}"), 2, "classes.a.cidrs[0]", "host bits", "fd00::/64", id="host bits 6"
    ),
    pytest.param(
        classes("{cidrs: [10.0.0.0/33]}"),
        2,
        "classes.a.cidrs[0]",
        "10.0.0.0/33",
        "a CIDR such as",
        id="length beyond 32",
    ),
    pytest.param(
        classes("{cidrs: [10.0.0.0/64]}"),
        2,
        "classes.a.cidrs[0]",
        "10.0.0.0/64",
        "a CIDR such as",
        id="length of family 6",
    ),
    pytest.param(
        classes("{cidrs: ['fd00::/129']}"),
        2,
        "classes.a.cidrs[0]",
        "fd00::/129",
        "a CIDR such as",
        id="length beyond 128",
    ),
    pytest.param(
        classes("{cidrs: [10.0.0.0/-1]}"),
        2,
        "classes.a.cidrs[0]",
        "10.0.0.0/-1",
        "a CIDR such as",
        id="negative length",
    ),
    pytest.param(
        classes("{cidrs: [10.0.0/8]}"), 2, "classes.a.cidrs[0]", "10.0.0/8", "a CIDR such as", id="three octets"
    ),
    pytest.param(
        classes("{cidrs: [10.0.0.0/255.0.0.0]}"), 2, "classes.a.cidrs[0]", "prefix length", "/8", id="netmask"
    ),
    pytest.param(classes("{cidrs: ['fe80::%eth0/64']}"), 2, "classes.a.cidrs[0]", "fe80::%eth0", "", id="zone index"),
    pytest.param(classes("{cidrs: [storage]}"), 2, "classes.a.cidrs[0]", "'storage'", "a CIDR such as", id="a word"),
    pytest.param(classes("{cidrs: [10]}"), 2, "classes.a.cidrs[0]", "'10'", "a CIDR such as", id="a number"),
    pytest.param(classes("{cidrs: [~]}"), 2, "classes.a.cidrs[0]", "nothing", "a CIDR such as", id="null CIDR"),
    pytest.param(
        classes("{cidrs: [[10.0.0.0/8]]}"), 2, "classes.a.cidrs[0]", "a list", "a CIDR such as", id="list in list"
    ),
    pytest.param(classes("{cidrs: 10.0.0.0/8}"), 2, "classes.a.cidrs", "list is expected", "", id="CIDR not in a list"),
    pytest.param(
        classes("{cidrs: ['::ffff:10.0.0.0/104']}"), 2, "classes.a.cidrs[0]", "IPv4", "10.0.0.0/8", id="IPv4-mapped"
    ),
    pytest.param(
        classes("\n    cidrs:\n      - 10.0.0.0/8\n      - 10.0.0.0/8"),
        5,
        "classes.a.cidrs[1]",
        "this class already, line 4",
        "once",
        id="CIDR twice in a class",
    ),
    pytest.param(
        "classes:\n  a: {cidrs: [10.0.0.0/8]}\n  b:\n    cidrs: [10.0.0.0/8]\n",
        4,
        "classes.b.cidrs[0]",
        "class 'a' already, line 2",
        "one class",
        id="CIDR in two classes",
    ),
    pytest.param(
        "classes:\n  a: {builtin: private}\n  b: {builtin: private}\n",
        3,
        "classes.b.builtin",
        "class 'a' already, line 2",
        "each list once",
        id="list in two classes",
    ),
    pytest.param(classes("{builtin: privat}"), 2, "classes.a.builtin", "'privat'", "private", id="unknown list"),
    pytest.param(classes("{}"), 2, "classes.a", "empty", "pod, node, service", id="empty class"),
    pytest.param(classes("{cidrs: []}"), 2, "classes.a", "empty", "builtin: private", id="class with no CIDR"),
    pytest.param(classes(""), 2, "classes.a", "empty", "cidrs", id="class of nothing"),
    pytest.param(classes("{zone: z}"), 2, "classes.a", "empty", "cidrs", id="class with a zone only"),
    pytest.param(classes("[10.0.0.0/8]"), 2, "classes.a", "a list", "", id="class is a list"),
    pytest.param("classes:\n  A: {cidrs: [10.0.0.0/8]}\n", 2, "classes.A", "'A'", "lower-case letter", id="capital"),
    pytest.param("classes:\n  a_b: {}\n", 2, "classes.a_b", "'a_b'", "a-z, 0-9 and -", id="underscore"),
    pytest.param("classes:\n  1a: {}\n", 2, "classes.1a", "'1a'", "letter", id="starts with a digit"),
    pytest.param("classes:\n  abcdefghijklmnop: {}\n", 2, "classes.abcdefghijklmnop", "class name", "14", id="16 long"),
    pytest.param('classes:\n  "a\\n": {}\n', 2, "classes.a\n", "class name", "letter", id="trailing newline"),
    pytest.param(
        "classes:\n  tunnel: {cidrs: [10.0.0.0/8]}\n", 2, "classes.tunnel", "reserved", "any name", id="tunnel"
    ),
    pytest.param("classes:\n  unclassified: {}\n", 2, "classes.unclassified", "reserved", "", id="unclassified"),
    pytest.param("classes:\n  unattributed: {}\n", 2, "classes.unattributed", "reserved", "", id="unattributed"),
    pytest.param("classes:\n  [a]: {}\n", 2, "classes", "not a string", "", id="class name is a list"),
    pytest.param(classes("{cidr: [10.0.0.0/8]}"), 2, "classes.a.cidr", "did you mean 'cidrs'", "zone", id="near key"),
    pytest.param("clases: {}\n", 1, "clases", "did you mean 'classes'", "tunnel", id="near key at the top"),
    pytest.param("classes: {}\nqqq: 1\n", 2, "qqq", "unknown key", "classes, default", id="key like none"),
    pytest.param("classes: {}\nclasses: {}\n", 2, "classes", "twice, first in line 1", "", id="key twice"),
    pytest.param("classes:\n  pod: {}\n  pod: {}\n", 3, "classes.pod", "twice, first in line 2", "", id="class twice"),
    pytest.param("default: internet\n", 1, "", "classes is missing", "class names", id="no classes"),
    pytest.param("classes: []\n", 1, "classes", "a list", "", id="classes is a list"),
    pytest.param(classes("{cidrs: [10.0.0.0/8], zone: a b}"), 2, "classes.a.zone", "'a b'", "letters", id="bad zone"),
    pytest.param(classes("{cidrs: [10.0.0.0/8], region: }"), 2, "classes.a.region", "nothing", "", id="no region"),
    pytest.param("classes: {}\ndefault: Internet\n", 2, "default", "'Internet'", "lower-case", id="bad default"),
    pytest.param("classes: {}\ndefault: tunnel\n", 2, "default", "reserved", "any name", id="reserved default"),
    pytest.param("classes: {}\ndefault: intrenet\n", 2, "default", "did you mean 'internet'", "pod", id="near default"),
    pytest.param("classes: {}\ndefault:\n", 2, "default", "nothing", "", id="default of nothing"),
    pytest.param("classes: {}\ntunnel: {tcp: [1]}\n", 2, "tunnel.tcp", "unknown key", "udp", id="tunnel key"),
    pytest.param("classes: {}\ntunnel: {udp: [0]}\n", 2, "tunnel.udp[0]", "0 is out", "1 to 65535", id="port 0"),
    pytest.param("classes: {}\ntunnel: {udp: [65536]}\n", 2, "tunnel.udp[0]", "65536", "1 to 65535", id="port beyond"),
    pytest.param(
        "classes: {}\ntunnel: {udp: [vxlan]}\n", 2, "tunnel.udp[0]", "'vxlan'", "whole number", id="port name"
    ),
    pytest.param(
        "classes: {}\ntunnel: {udp: ['4789']}\n", 2, "tunnel.udp[0]", "string", "whole number", id="port quoted"
    ),
    pytest.param(
        "classes: {}\ntunnel: {udp: [true]}\n", 2, "tunnel.udp[0]", "'true'", "whole number", id="port boolean"
    ),
    pytest.param("classes: {}\ntunnel: {udp: 4789}\n", 2, "tunnel.udp", "list is expected", "", id="ports no list"),
    pytest.param("classes: {}\ntunnel:\n  udp: [7, 7]\n", 3, "tunnel.udp[1]", "twice", "once", id="port twice"),
    pytest.param(
        f"classes: {{}}\ntunnel: {{udp: {list(range(1, 17))}}}\n",
        2,
        "tunnel.udp",
        "16 ports",
        "at most 15",
        id="16 ports",
    ),
    pytest.param(
        "classes: {}\ntunnel: {protocols: [256]}\n", 2, "tunnel.protocols[0]", "256", "255", id="protocol 256"
    ),
    pytest.param("classes: {}\ntunnel: {protocols: [17]}\n", 2, "tunnel.protocols[0]", "UDP", "47", id="protocol UDP"),
    pytest.param("classes: {}\ntunnel: {protocols: [6]}\n", 2, "tunnel.protocols[0]", "TCP", "47", id="protocol TCP"),
    pytest.param(
        "classes: {}\ntunnel: {protocols: [4, 4]}\n", 2, "tunnel.protocols[1]", "twice", "", id="protocol twice"
    ),
    pytest.param(
        "classes: {}" + MARKS % "pod: 0x20", 2, "marks.values.pod", "outside the mask 0x1f", "inside", id="mark"
    ),
    pytest.param("classes: {}" + MARKS % "pod: 0", 2, "marks.values.pod", "0 is out of range", "from 1", id="mark 0"),
    pytest.param("classes: {}" + MARKS % "pod: -1", 2, "marks.values.pod", "-1", "from 1", id="mark below 0"),
    pytest.param("classes: {}" + MARKS % "pod: x", 2, "marks.values.pod", "'x'", "whole number", id="mark no number"),
    pytest.param(
        "classes: {}" + MARKS % "pod: 1, node: 1", 2, "marks.values.node", "'pod'", "of its own", id="mark twice"
    ),
    pytest.param(
        "classes: {}" + MARKS % "tunnel: 1", 2, "marks.values.tunnel", "tunnel cannot", "pod", id="tunnel mark"
    ),
    pytest.param(
        "classes: {}" + MARKS % "nod: 1", 2, "marks.values.nod", "mean 'node'", "internet", id="mark of no class"
    ),
    pytest.param("classes: {}\nmarks: {mask: 0, values: {}}\n", 2, "marks.mask", "0", "from 1", id="mask 0"),
    pytest.param(
        "classes: {}\nmarks: {mask: 0x100000000, values: {}}\n",
        2,
        "marks.mask",
        "out of range",
        "4294967295",
        id="mask 33",
    ),
    pytest.param(
        "classes: {}\nmarks: {mask: 0x1f}\n", 2, "marks", "values is missing", "both", id="mask without values"
    ),
    pytest.param(
        "classes: {}\nmarks: {values: {pod: 1}}\n", 2, "marks", "mask is missing", "both", id="values, no mask"
    ),
    pytest.param("classes: {}\nmarks: {msk: 1}\n", 2, "marks.msk", "mean 'mask'", "values", id="key in marks"),
    pytest.param("", 1, "", "empty", "classes", id="empty file"),
    pytest.param("# only a comment\n", 1, "", "empty", "classes", id="only a comment"),
    pytest.param("- a\n", 1, "", "a list where a mapping", "", id="a list"),
    pytest.param("hello\n", 1, "", "'hello' where a mapping", "", id="a word"),
    pytest.param("classes: {\n", 2, "", "not valid YAML", "", id="no YAML"),
    pytest.param("classes:\n\tpod: {}\n", 2, "", "not valid YAML", "", id="tab"),
    pytest.param("a: 1\n--- \nb: 2\n", 2, "", "not valid YAML", "", id="two documents"),
    pytest.param("classes: {}\n\0", None, "", "not valid YAML", "", id="NUL"),
    pytest.param(b"classes: {}\n# \xff\xfe\n", None, "", "UTF-8", "", id="not UTF-8"),
    pytest.param(bytes(range(256)) * 64, None, "", "UTF-8", "", id="binary"),
    pytest.param("[" * 100_000, None, "", "", "", id="100,000 brackets"),
    pytest.param("x" * (9 << 20), None, "", "larger than 8 MiB", "", id="huge"),
    pytest.param(
        "a: &a [x,x]\nb: &b [*a,*a]\nclasses: [*b,*b]\n", None, "b[0]", "aliases", "", id="aliases that multiply"
    ),
    pytest.param("classes: &c\n  pod: *c\n", None, "classes.pod", "aliases", "", id="an alias of itself"),
    pytest.param("classes: !!python/object:os.system {}\n", 1, "classes", "tag", "plain", id="a Python object"),
]


@pytest.mark.parametrize(("text", "line", "key", "says", "allowed"), REFUSED)
def test_refuses(tmp_path: Path, text: str | bytes, line: int | None, key: str, says: str, allowed: str) -> None:
    """A doubtful file is refused with exit code 78, naming file, line, key, what was found and what is allowed."""
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    error = caught.value
    assert error.exit_code == 78
    assert error.file == str(tmp_path / "p.yaml")
    assert line is None or error.line == line
    assert error.key == key
    assert says in error.found
    assert allowed in error.allowed
    assert str(error).startswith(error.file if error.line is None else f"{error.file}:{error.line}: ")
    assert error.found in str(error)


@pytest.mark.parametrize("name", ["azur", "", "..", "default\0", "README.md", "x y"])
def test_unknown_name(name: str) -> None:
    """A name that is not shipped is refused with the names that are."""
    with pytest.raises(ConfigError) as caught:
        load(name)
    assert caught.value.exit_code == 78
    assert "default, gke, openai-7500" in str(caught.value)


def test_near_name() -> None:
    """A misspelt name of a shipped policy gets the nearest one in the message."""
    with pytest.raises(ConfigError, match="did you mean 'azure'"):
        load("azur")


@pytest.mark.parametrize("name", ["nowhere/p", "p.yaml", "p.yml", "p.json"])
def test_path_without_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What has a slash or a YAML or JSON suffix is a path, and one that is not there is refused by that path."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load(name)


def test_directory(tmp_path: Path) -> None:
    """A directory is refused as unreadable."""
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(str(tmp_path))


@pytest.mark.parametrize("name", ["aws", "azure", "default", "gke", "openai-7500"])
def test_shipped(name: str) -> None:
    """Every shipped policy loads, and gives each of its classes the documented mark value inside 0x1f."""
    policy = load(name)
    assert policy.name == name
    assert policy.default == "internet"
    assert policy.marks is not None
    assert policy.marks.mask == 0x1F
    common = {"pod": 1, "node": 2, "service": 3, "private": 4, "internet": 5}
    assert policy.marks.values.items() >= common.items()
    assert set(policy.marks.values) == {item.name for item in policy.classes}


def test_shipped_names() -> None:
    """The list of shipped policies is exactly the five."""
    assert shipped() == ("aws", "azure", "default", "gke", "openai-7500")


def test_full_example(tmp_path: Path) -> None:
    """The example of the reference is read as it is meant, with the built-in list around the written CIDRs."""
    policy = read(
        tmp_path,
        """
classes:
  pod: {cidrs: [10.244.0.0/16, "fd00:10:244::/56"]}
  storage: {cidrs: [198.51.100.0/24], zone: eu-1a, region: eu-1}
  private: {builtin: private}
default: internet
tunnel: {udp: [4789], protocols: []}
marks: {mask: 0x1f, values: {pod: 1, storage: 0x6}}
""",
        "site.yaml",
    )
    assert policy.name == "site"
    assert policy.classes == (
        TrafficClass("pod"),
        TrafficClass("storage", "eu-1a", "eu-1"),
        TrafficClass("private"),
        TrafficClass("node"),
        TrafficClass("service"),
        TrafficClass("internet"),
    )
    assert found(policy) == dict.fromkeys(BUILTIN["private"], "private") | {
        "10.244.0.0/16": "pod",
        "fd00:10:244::/56": "pod",
        "198.51.100.0/24": "storage",
    }
    origins = {str(prefix.network): prefix.origin for prefix in policy.prefixes}
    assert origins["198.51.100.0/24"] == "site.yaml:4"
    assert origins["10.0.0.0/8"] == "site.yaml:5 (built-in private)"
    assert policy.default_origin == "site.yaml:6"
    assert policy.tunnel == Tunnel(udp=(4789,), protocols=())
    assert policy.marks == MarkTable(0x1F, {"pod": 1, "storage": 6})


def test_smallest(tmp_path: Path) -> None:
    """`pod`, `node`, `service` and the default class exist without being named, and nothing else has to be said."""
    policy = read(tmp_path, "classes: {}\n")
    assert [item.name for item in policy.classes] == ["pod", "node", "service", "internet"]
    assert (policy.prefixes, policy.tunnel, policy.marks, policy.default_origin) == ((), Tunnel(), None, "")


@pytest.mark.parametrize("name", ["pod", "node", "service"])
def test_may_be_empty(tmp_path: Path, name: str) -> None:
    """`pod`, `node` and `service` may be there with nothing in them."""
    assert read(tmp_path, f"classes:\n  {name}:\n").prefixes == ()


@pytest.mark.parametrize("text", ["classes: {}\ndefault: world\n", "classes: {world: {}}\ndefault: world\n"])
def test_default_needs_no_cidr(tmp_path: Path, text: str) -> None:
    """The default class may have no CIDR, whether it is listed or not."""
    assert read(tmp_path, text).default == "world"


def test_single_address(tmp_path: Path) -> None:
    """An address without a prefix length is a CIDR of that address alone."""
    policy = read(tmp_path, classes("{cidrs: [198.51.100.7, '2001:db8::7', '2001:db8::/128']}"))
    assert found(policy) == {"198.51.100.7/32": "a", "2001:db8::7/128": "a", "2001:db8::/128": "a"}


def test_written_beats_builtin(tmp_path: Path) -> None:
    """A CIDR of the built-in list that is written in another class belongs to that class, and the rest stays."""
    policy = read(tmp_path, "classes:\n  lab: {cidrs: [10.0.0.0/8]}\n  private: {builtin: private}\n")
    assert found(policy) == dict.fromkeys(BUILTIN["private"], "private") | {"10.0.0.0/8": "lab"}


def test_builtin_and_cidrs(tmp_path: Path) -> None:
    """A class may take a list and CIDRs of its own, also one that is in the list."""
    policy = read(tmp_path, "classes:\n  private: {builtin: private, cidrs: [168.63.129.16/32, 10.0.0.0/8]}\n")
    assert found(policy) == dict.fromkeys((*BUILTIN["private"], "168.63.129.16/32"), "private")


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_builtin_lists_are_canonical(name: str) -> None:
    """Every CIDR of a built-in list is in canonical form and there once."""
    nets = [ipaddress.ip_network(cidr) for cidr in BUILTIN[name]]
    assert [str(net) for net in nets] == list(BUILTIN[name])
    assert len(set(nets)) == len(nets)


def test_json(tmp_path: Path) -> None:
    """JSON is read too, with tabs."""
    assert found(read(tmp_path, '{\n\t"classes": {"pod": {"cidrs": ["10.0.0.0/8"]}}\n}\n', "p.json")) == {
        "10.0.0.0/8": "pod"
    }


def test_too_many_classes(tmp_path: Path) -> None:
    """More classes than the kernel's memory should hold counters for are refused, and as many as fit are not."""
    lines = [f"  c{number}: {{cidrs: [10.0.{number}.0/24]}}\n" for number in range(CLASSES_LIMIT + 1)]
    assert len(read(tmp_path, "classes:\n" + "".join(lines[:-1])).prefixes) == CLASSES_LIMIT
    with pytest.raises(ConfigError, match="65 classes"):
        read(tmp_path, "classes:\n" + "".join(lines))


BASE = "classes: {a: {cidrs: [10.0.0.0/8, 11.0.0.0/8], zone: z}, b: {cidrs: [12.0.0.0/8]}}\n"


@pytest.mark.parametrize(
    "text",
    [
        "# comment\nclasses:\n  b: {cidrs: [12.0.0.0/8]}\n  a: {zone: 'z', cidrs: [11.0.0.0/8, \"10.0.0.0/8\"]}\n",
        BASE + "default: internet\n",
        BASE + "tunnel: {udp: [51820, 4789, 0x17c1, 8472]}\n",
    ],
)
def test_hash_ignores_spelling(tmp_path: Path, text: str) -> None:
    """Comments, order, quotes and what would be the default anyway do not change the hash."""
    assert read(tmp_path, text).hash == read(tmp_path, BASE).hash


@pytest.mark.parametrize(
    "text",
    [
        BASE.replace("12.0.0.0/8", "12.0.0.0/9"),
        BASE.replace("zone: z", "zone: y"),
        BASE.replace("zone: z", "region: z"),
        BASE.replace("b: {", "c: {"),
        BASE + "default: world\n",
        BASE + "tunnel: {udp: [4789]}\n",
        BASE + "marks: {mask: 1, values: {a: 1}}\n",
        BASE + "marks: {mask: 1, values: {b: 1}}\n",
        BASE + "marks: {mask: 3, values: {a: 1}}\n",
    ],
)
def test_hash_changes_with_meaning(tmp_path: Path, text: str) -> None:
    """Every change of meaning changes the hash."""
    changed = read(tmp_path, text).hash
    assert changed != read(tmp_path, BASE).hash
    assert len(changed) == 12
    assert int(changed, 16) >= 0
