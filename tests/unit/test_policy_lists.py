"""Classes from the lists that clouds publish: what is taken, who wins, and what is refused."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from ipaddress import IPv4Network, ip_address
from pathlib import Path
from typing import Any

import pytest

from netacct import policy_lists
from netacct.errors import ConfigError
from netacct.explain import explain
from netacct.kernel import plan
from netacct.list_files import SIZE_LIMIT
from netacct.policy import Policy, classify
from netacct.policy_file import load

FIXTURES = Path(__file__).parents[1] / "fixtures/lists"
AWS = "format: aws, file: lists/ip-ranges.json"
CLOUD = "format: google, file: lists/cloud.json"
GOOG = "format: google, file: lists/goog.json"
AZURE = "format: azure, file: lists/ServiceTags_Public.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the lists, for a policy beside them."""
    shutil.copytree(FIXTURES, tmp_path / "lists")
    return tmp_path


def read(folder: Path, classes: Mapping[str, str]) -> Policy:
    """The policy with these classes, each in flow style."""
    file = folder / "p.yaml"
    file.write_text("classes:\n" + "".join(f"  {name}: {{{text}}}\n" for name, text in classes.items()))
    return load(str(file))


def taken(folder: Path, selection: str) -> set[str]:
    """The CIDRs of a class that is this selection."""
    return {str(prefix.network) for prefix in read(folder, {"a": f"list: {{{selection}}}"}).prefixes}


def found(policy: Policy) -> dict[str, str]:
    """The class of each CIDR, as text."""
    return {str(prefix.network): prefix.traffic for prefix in policy.prefixes}


def refused(folder: Path, classes: Mapping[str, str]) -> ConfigError:
    """The error that these classes are."""
    with pytest.raises(ConfigError) as caught:
        read(folder, classes)
    return caught.value


TAKEN = [
    pytest.param(f"{AWS}, services: [S3], regions: [eu-west-1]", "198.51.100.0/25 2001:db8:a:100::/56", id="aws both"),
    pytest.param(f"{AWS}, services: [ROUTE53, EC2]", "192.0.2.0/28 203.0.113.0/25", id="aws services"),
    pytest.param(f"{AWS}, regions: [GLOBAL]", "192.0.2.0/28", id="aws region"),
    pytest.param(
        AWS,
        "198.51.100.0/25 198.51.100.128/25 203.0.113.0/24 203.0.113.0/25 192.0.2.0/28 "
        "2001:db8:a::/48 2001:db8:a:100::/56 2001:db8:b::/48",
        id="aws all",
    ),
    pytest.param(f"{CLOUD}, regions: [europe-west4]", "203.0.113.0/26 2001:db8:c::/48", id="google scope"),
    pytest.param(
        f"{CLOUD}, services: [Google Cloud], regions: [global, us-central1]",
        "203.0.113.64/26 203.0.113.128/26",
        id="google both",
    ),
    pytest.param(GOOG, "203.0.113.0/24 203.0.113.128/26 2001:db8::/36", id="goog.json"),
    pytest.param(f"{AZURE}, tags: [Storage.WestEurope]", "192.0.2.0/26 2001:db8:d:100::/56", id="azure tag"),
    pytest.param(f"{AZURE}, tags: [Storage.EastUS, Sql.WestEurope]", "192.0.2.128/26 192.0.2.64/27", id="azure tags"),
    pytest.param(f"{AZURE}, services: [AzureStorage], regions: [eastus]", "192.0.2.128/26", id="azure both"),
    pytest.param(
        f"{AZURE}, services: [AzureCloud]", "192.0.2.0/25 192.0.2.128/25 2001:db8:d::/48", id="azure all of it"
    ),
]


@pytest.mark.parametrize(("selection", "cidrs"), TAKEN)
def test_selections(folder: Path, selection: str, cidrs: str) -> None:
    """Services, regions and tags take what the list says has them, of both families, each prefix once."""
    assert taken(folder, selection) == set(cidrs.split())


def test_several_lists_and_cidrs_make_one_class(folder: Path) -> None:
    """A class joins its own CIDRs and any number of lists; what they have in common is merged."""
    lists = f"[{{{AWS}, services: [S3]}}, {{{AWS}, regions: [us-east-1]}}, {{{CLOUD}, regions: [global]}}]"
    policy = read(folder, {"a": f"cidrs: [198.51.100.0/25, 10.0.0.0/8], list: {lists}"})
    assert set(found(policy)) == {
        "10.0.0.0/8",
        "198.51.100.0/25",
        "198.51.100.128/25",
        "203.0.113.128/26",
        "2001:db8:a:100::/56",
        "2001:db8:b::/48",
    }


def test_a_written_cidr_beats_the_same_of_a_list(folder: Path) -> None:
    """A CIDR that the policy has itself belongs to its class, whichever class takes it from a list."""
    policy = read(folder, {"s3": f"list: {{{AWS}, services: [S3]}}", "mine": "cidrs: [198.51.100.0/25]"})
    assert found(policy)["198.51.100.0/25"] == "mine"
    assert found(policy)["198.51.100.128/25"] == "s3"


def test_a_list_beats_a_built_in_one(folder: Path) -> None:
    """A prefix of a cloud's list that the built-in list has too belongs to the cloud's class."""
    rewrite(folder / "lists/goog.json", ("prefixes", 0, "ipv4Prefix"), "10.0.0.0/8")
    policy = read(folder, {"private": "builtin: private", "g": f"list: {{{GOOG}}}"})
    assert found(policy)["10.0.0.0/8"] == "g"


NARROWER = [
    pytest.param(f"{AWS}, services: [S3]", AWS, "198.51.100.0/25", id="aws: a service, all"),
    pytest.param(f"{AWS}, services: [S3]", f"{AWS}, services: [AMAZON]", "198.51.100.0/25", id="aws: of AMAZON"),
    pytest.param(f"{AWS}, regions: [us-east-1]", AWS, "198.51.100.128/25", id="aws: a region, all"),
    pytest.param(
        f"{AWS}, services: [S3], regions: [eu-west-1]", f"{AWS}, services: [S3]", "198.51.100.0/25", id="aws: both, one"
    ),
    pytest.param(CLOUD, GOOG, "203.0.113.128/26", id="google: cloud.json, goog.json"),
    pytest.param(f"{CLOUD}, regions: [global]", CLOUD, "203.0.113.128/26", id="google: a region, all"),
    pytest.param(f"{AZURE}, tags: [Storage.WestEurope]", f"{AZURE}, tags: [Storage]", "192.0.2.0/26", id="azure: tags"),
    pytest.param(
        f"{AZURE}, tags: [AzureCloud.westeurope]", f"{AZURE}, tags: [AzureCloud]", "192.0.2.0/25", id="azure: region"
    ),
    pytest.param(
        f"{AZURE}, tags: [Storage.EastUS]", f"{AZURE}, services: [AzureStorage]", "192.0.2.128/26", id="azure: tag"
    ),
]


@pytest.mark.parametrize(("narrow", "wide", "cidr"), NARROWER)
@pytest.mark.parametrize("order", [("narrow", "wide"), ("wide", "narrow")])
def test_the_narrower_selection_wins(folder: Path, narrow: str, wide: str, cidr: str, order: tuple[str, str]) -> None:
    """Of two classes that take one prefix, the one that asked by more of service and region has it, in any order."""
    texts = {"narrow": f"list: {{{narrow}}}", "wide": f"list: {{{wide}}}"}
    policy = read(folder, {name: texts[name] for name in order})
    assert found(policy)[cidr] == "narrow"


def test_equally_narrow_selections_are_an_error(folder: Path) -> None:
    """A prefix that two classes take alike is refused, naming both with line, file, service and region."""
    error = refused(
        folder,
        {"a": f"list: {{{AWS}, services: [S3]}}", "b": f"list: {{{AWS}, regions: [eu-west-1]}}"},
    )
    assert (error.line, error.key) == (3, "classes.b.list")
    assert "198.51.100.0/25 is in lists of class 'a', p.yaml:2 (" in error.found
    assert "of class 'b', p.yaml:3 (" in error.found
    assert "ip-ranges.json: S3, eu-west-1)" in error.found
    assert "more narrowly" in error.allowed


def test_a_tie_below_a_narrower_third_is_none(folder: Path) -> None:
    """Where a third class asked more narrowly, it does not matter that two others tie."""
    wide = f"list: {{{AWS}, services: [S3]}}"
    narrow = f"list: {{{AWS}, services: [S3], regions: [eu-west-1]}}"
    west = f"list: {{{AWS}, regions: [eu-west-1]}}"
    written = "cidrs: [198.51.100.128/25, '2001:db8:a:100::/56']"
    assert found(read(folder, {"a": wide, "b": west, "c": narrow, "d": written}))["198.51.100.0/25"] == "c"


def test_explain_names_file_service_and_region(folder: Path) -> None:
    """What decided is told with the policy's line, the list's path, and the service and region (or tag) there."""
    policy = read(
        folder,
        {
            "s3": f"list: {{{AWS}, services: [S3]}}",
            "aws": f"list: {{{AWS}}}",
            "az": f"list: {{{AZURE}, tags: [Storage.EastUS]}}",
        },
    )
    facts = explain(policy, "198.51.100.1")
    assert facts["line"] == f"p.yaml:2 ({folder}/lists/ip-ranges.json: S3, eu-west-1)"
    assert explain(policy, "203.0.113.200")["line"].endswith("ip-ranges.json: AMAZON, eu-west-1)")
    assert explain(policy, "192.0.2.129")["line"].endswith("ServiceTags_Public.json: Storage.EastUS)")


def test_the_hash_is_of_the_prefixes(folder: Path) -> None:
    """Another prefix in the list is another policy; another date or order in it is the same."""
    classes = {"a": f"list: {{{AWS}, services: [S3]}}"}
    before = read(folder, classes).hash
    file = folder / "lists/ip-ranges.json"
    document = json.loads(file.read_text())
    document["syncToken"], document["prefixes"] = "1700000001", document["prefixes"][::-1]
    file.write_text(json.dumps(document))
    assert read(folder, classes).hash == before
    rewrite(file, ("ipv6_prefixes", 2, "ipv6_prefix"), "2001:db8:b::/49")
    assert read(folder, classes).hash != before


def rewrite(file: Path, path: tuple[str | int, ...], value: Any) -> None:
    """Change one value inside of a JSON file; the last of `path` is its key."""
    document = json.loads(file.read_text())
    item = document
    for step in path[:-1]:
        item = item[step]
    item[path[-1]] = value
    file.write_text(json.dumps(document))


POLICY_ERRORS = [
    pytest.param("format: awz, file: x", "format", "'awz' is not the format of a list, did you mean 'aws'?", "azure"),
    pytest.param("file: x", "", "the key format is missing", "both"),
    pytest.param("format: aws", "", "the key file is missing", "both"),
    pytest.param("format: aws, file: ''", "file", "is not a path", "absolute"),
    pytest.param('format: aws, file: "a\\0b"', "file", "is not a path", "absolute"),
    pytest.param("format: aws, file: x, service: [S3]", "service", "did you mean 'services'?", "regions"),
    pytest.param(f"{AWS}, services: []", "services", "an empty list selects nothing", "without the key"),
    pytest.param(f"{AWS}, services: S3", "services", "where a list is expected", ""),
    pytest.param(f"{AWS}, services: [S3, S3]", "services[1]", "'S3' is given twice", "once"),
    pytest.param(f"{AWS}, tags: [S3]", "tags", "format aws has no tags", "services"),
    pytest.param(
        f"{AZURE}, tags: [Storage], regions: [eastus]", "tags", "names service and region already", "tags, or"
    ),
    pytest.param(f"{AWS}, services: [s4]", "services[0]", "has no service 's4', did you mean 'S3'?", "AMAZON, EC2, R"),
    pytest.param(f"{AWS}, regions: [eu_west_1]", "regions[0]", "did you mean 'eu-west-1'?", "GLOBAL, eu-west-1, us"),
    pytest.param(f"{AZURE}, tags: [storage.westeurope]", "tags[0]", "did you mean 'Storage.WestEurope'?", "AzureCloud"),
    pytest.param(f"{GOOG}, services: [Google Cloud]", "services[0]", "tells no services apart", "leave out services"),
    pytest.param(f"{AWS}, services: [ROUTE53], regions: [eu-west-1]", "", "has nothing of these services in these", ""),
]


@pytest.mark.parametrize(("selection", "key", "message", "allowed"), POLICY_ERRORS)
def test_errors_of_the_policy(folder: Path, selection: str, key: str, message: str, allowed: str) -> None:
    """What is wrong with a selection is told at the policy's line and key, with the nearest name and what there is."""
    error = refused(folder, {"a": f"list: {{{selection}}}"})
    assert error.file == str(folder / "p.yaml")
    assert error.line == 2
    assert error.key == ("classes.a.list" + (f".{key}" if key else ""))
    assert message in error.found
    assert allowed in error.allowed


def test_an_empty_sequence_of_lists_is_an_error(folder: Path) -> None:
    """`list: []` is a list that somebody forgot to fill in."""
    assert "no list is named" in refused(folder, {"a": "list: []"}).found


def test_of_many_names_the_nearest_are_shown(folder: Path) -> None:
    """Where a list offers thousands of names, a message has the nearest ones and their number."""
    file = folder / "lists/ServiceTags_Public.json"
    document = json.loads(file.read_text())
    document["values"] += [{**document["values"][2], "name": f"Other.Region{n}"} for n in range(200)]
    file.write_text(json.dumps(document))
    error = refused(folder, {"a": f"list: {{{AZURE}, tags: [Storage.WestUrope]}}"})
    assert "did you mean 'Storage.WestEurope'?" in error.found
    assert error.allowed.startswith("one of its 206 tags, such as Storage.WestEurope, Storage.EastUS")


FILE_ERRORS = [
    pytest.param(b"", "", "is empty", id="empty"),
    pytest.param(b"<html>Sign in</html>", "", "is not JSON, or cut short", id="a login page"),
    pytest.param(b"\xff\xfe\xfd", "", "UTF-8", id="bytes"),
    pytest.param(b"[" * 100_000, "", "is not a list that a cloud publishes", id="depth"),
    pytest.param(b'{"syncToken": ' + b"9" * 5000 + b"}", "", "is not a list that a cloud publishes", id="digits"),
    pytest.param(b"[]", "", "a list where a mapping is expected", id="a sequence"),
    pytest.param(b"7", "", "a number where a mapping is expected", id="a number"),
    pytest.param(b"{}", "prefixes", "nothing where a list is expected", id="a mapping"),
    pytest.param(b'{"prefixes": [], "ipv6_prefixes": []}', "", "has no prefixes", id="no prefixes"),
    pytest.param(b'{"prefixes": [7], "ipv6_prefixes": []}', "prefixes[0]", "a number where a mapping", id="item"),
    pytest.param(
        b'{"prefixes": [{"ip_prefix": "192.0.2.0/24", "service": 1}], "ipv6_prefixes": []}',
        "prefixes[0].service",
        "a number where a string",
        id="service",
    ),
    pytest.param(
        b'{"prefixes": [{"ip_prefix": "192.0.2.0/24", "service": "\\ud800"}], "ipv6_prefixes": []}',
        "prefixes[0].service",
        "characters that no name has",
        id="half a character",
    ),
    pytest.param(
        (FIXTURES / "cloud.json").read_bytes(), "prefixes[0].ip_prefix", "it looks like format google", id="Google's"
    ),
    pytest.param(
        (FIXTURES / "ServiceTags_Public.json").read_bytes(), "prefixes", "it looks like format azure", id="Azure's"
    ),
]


@pytest.mark.parametrize(("content", "key", "message"), FILE_ERRORS)
def test_errors_of_the_file(folder: Path, content: bytes, key: str, message: str) -> None:
    """A file that is no such list is refused by name, with the place in it and what was found."""
    file = folder / "lists/ip-ranges.json"
    file.write_bytes(content)
    error = refused(folder, {"a": f"list: {{{AWS}}}"})
    assert (error.file, error.key, error.exit_code) == (str(file), key, 78)
    assert message in error.found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("192.0.2.1/24", "has host bits set"),
        ("192.0.2.0/33", "is no CIDR"),
        ("192.0.2.0/255.255.255.0", "is no CIDR"),
        ("fe80::%eth0/64", "is no CIDR"),
        ("s3.example", "is no CIDR"),
        ("0.0.0.0/0", "the whole internet"),
        ("::/0", "the whole internet"),
        ("::ffff:192.0.2.0/120", "IPv6 clothes"),
    ],
)
def test_errors_of_a_prefix(folder: Path, text: str, message: str) -> None:
    """A prefix that cannot be meant damns the list, and is named."""
    rewrite(folder / "lists/ip-ranges.json", ("prefixes", 1, "ip_prefix"), text)
    error = refused(folder, {"a": f"list: {{{AWS}, services: [S3]}}"})
    assert error.key == "prefixes[1].ip_prefix"
    assert message in error.found


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Path.exists, "cannot be read: No such file"),
        (Path.mkdir, "cannot be read: Is a directory"),
        (lambda file: file.symlink_to("/dev/zero"), "is not a regular file"),
        (lambda file: file.symlink_to(file), "cannot be read: Too many levels"),
    ],
    ids=["missing", "directory", "device", "loop"],
)
def test_errors_of_reading(folder: Path, make: Any, message: str) -> None:
    """A file that is not there, or is no file, is refused by its path."""
    file = folder / "lists/ip-ranges.json"
    file.unlink()
    make(file)
    error = refused(folder, {"a": f"list: {{{AWS}}}"})
    assert error.file == str(file)
    assert message in error.found


def test_a_missing_list_is_not_called_a_policy(folder: Path) -> None:
    """Only an error of the policy's own file is told where the configuration names the policy."""
    (folder / "lists/ip-ranges.json").unlink()
    policy = folder / "p.yaml"
    policy.write_text(f"classes:\n  a: {{list: {{{AWS}}}}}\n")
    for file in (folder / "lists/ip-ranges.json", policy):
        with pytest.raises(ConfigError, match="cannot be read: No such file") as caught:
            load(str(policy), named_at="c.yaml:7")
        assert (caught.value.file, caught.value.line) == (("c.yaml", 7) if file == policy else (str(file), None))
        policy.unlink(missing_ok=True)


def test_a_huge_file_is_refused(folder: Path) -> None:
    """A file beyond the limit is not parsed."""
    file = folder / "lists/ip-ranges.json"
    with file.open("wb") as opened:
        opened.truncate(SIZE_LIMIT + 1)
    assert "larger than 16 MiB" in refused(folder, {"a": f"list: {{{AWS}}}"}).found


def test_too_many_prefixes_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A selection that takes more prefixes of a list than the limit is an error at the policy's line."""
    selection = {"a": f"list: {{{AWS}}}"}
    number = len(read(folder, selection).prefixes)
    monkeypatch.setattr(policy_lists, "PREFIXES_LIMIT", number)
    assert len(read(folder, selection).prefixes) == number
    monkeypatch.setattr(policy_lists, "PREFIXES_LIMIT", number - 1)
    error = refused(folder, selection)
    assert error.key == "classes.a.list"
    assert error.found.startswith(f"{number} prefixes of {folder}/lists/")


def test_ten_thousand_prefixes(folder: Path) -> None:
    """Of ten thousand nested and repeated prefixes in two classes, the plan gives each address the longest one's."""
    chance = random.Random(7)
    nets = list({random_network(chance) for _ in range(5400)})[:5000]
    rows = [{"ip_prefix": str(net), "region": "r", "network_border_group": "r"} for net in nets]
    items = [{**row, "service": "AMAZON"} for row in rows] + [
        {**row, "service": chance.choice(("S3", "EC2"))} for row in rows
    ]
    (folder / "lists/ip-ranges.json").write_text(json.dumps({"prefixes": items, "ipv6_prefixes": []}))
    policy = read(
        folder,
        {"s3": f"list: {{{AWS}, services: [S3]}}", "aws": f"list: {{{AWS}}}", "private": "builtin: private"},
    )
    services = {item["ip_prefix"]: item["service"] for item in items}
    classes = found(policy)
    assert {cidr: {"S3": "s3", "EC2": "aws"}[service] for cidr, service in services.items()}.items() <= classes.items()
    (made, _) = plan.build(policy, (), (), None).families
    for net in chance.sample(nets, 40):
        address = (int(net.network_address) + chance.randrange(net.num_addresses)).to_bytes(4, "big")
        assert planned(made, address) == classify(policy, address).traffic


def random_network(chance: random.Random) -> IPv4Network:
    """A network of a cloud's size, somewhere in 16.0.0.0/5."""
    length = chance.randint(14, 28)
    address = (16 << 24) + (chance.getrandbits(27) >> 32 - length << 32 - length)
    return IPv4Network((address, length))


def planned(family: plan.FamilyPlan, address: bytes) -> str:
    """The class that the plan's layers give to an address."""
    parsed = ip_address(address)
    for layer in family.layers:
        for group in layer:
            if any(parsed in network for network in group.networks):
                return group.traffic
    return "internet"
