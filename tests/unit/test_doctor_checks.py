"""The doctor's judgement on facts that need no kernel, or that the kernels under test cannot show."""

from __future__ import annotations

import gzip
import ipaddress
import json
import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from netacct.cli import doctor as command
from netacct.doctor import checks
from netacct.doctor.checks.kernel import YEAR_2025
from netacct.doctor.facts import (
    Agent,
    Datapath,
    Facts,
    Fault,
    Holder,
    InterfaceNetwork,
    Link,
    NftChain,
    Process,
    Rules,
    Settings,
)
from netacct.doctor.facts import XtablesLock as Lock
from netacct.doctor.finding import CATALOGUE, SEVERITIES, finding
from netacct.doctor.look import kernel, links, nft, process
from netacct.kernel import marks, modules
from netacct.kernel.marks_route import action_writer
from netacct.kernel.modules import Modules
from netacct.kernel.netlink import attribute, attributes, nested
from netacct.policy import Tunnel

FIXTURES = Path(__file__).parents[1] / "fixtures" / "doctor"
CONFIG = (FIXTURES / "kernel-config.txt").read_text()
NEEDED = modules.NEEDED["iptables"]
PAGE = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()


def names(facts: Facts) -> list[str]:
    """The names of what the checks find."""
    return [item.name for item in checks.examine(facts)]


def test_no_facts_are_no_findings() -> None:
    """Facts of a clean namespace, which are the defaults, lead to nothing."""
    assert checks.examine(Facts()) == []


def test_a_kernel_with_everything_built_in_lacks_nothing() -> None:
    """A recorded kernel configuration that has all options satisfies every need, without any module loaded."""
    assert names(Facts(modules=Modules(config=modules.options(CONFIG)))) == []


@pytest.mark.parametrize("module", sorted(NEEDED))
def test_an_option_that_is_not_set_is_a_missing_feature(module: str) -> None:
    """Without its option each needed module is named, unless /proc shows that it is there."""
    lacking = {key: value for key, value in modules.options(CONFIG).items() if key not in NEEDED[module]}
    (item,) = checks.examine(Facts(modules=Modules(config=lacking)))
    assert (item.name, item.what) == ("kernel-feature-missing", f"this kernel has no {module}")
    assert names(Facts(modules=Modules(active=frozenset((module,)), config=lacking))) == []


def test_a_module_tree_without_legacy_tables_is_a_missing_feature() -> None:
    """A distribution's modules without ip_tables lack four of them; with those built in, none."""
    installed = modules.module_names((FIXTURES / "modules.dep.txt").read_text())
    (item,) = checks.examine(Facts(modules=Modules(installed=installed, builtin=frozenset())))
    assert item.what == "this kernel has no ip_tables, ip6_tables, iptable_mangle, ip6table_mangle"
    builtin = modules.module_names(
        "kernel/net/ipv4/netfilter/ip_tables.ko\nkernel/net/ipv4/netfilter/iptable_mangle.ko\n"
        "kernel/net/ipv6/netfilter/ip6_tables.ko\nkernel/net/ipv6/netfilter/ip6table_mangle.ko\n"
    )
    assert names(Facts(modules=Modules(installed=installed, builtin=builtin))) == []


def test_only_modules_of_the_chosen_datapath_are_missed() -> None:
    """A kernel without legacy tables lacks nothing for nftables; where none can be had both datapaths' are named."""
    bare = Modules(installed=frozenset(("nf_tables",)), builtin=frozenset())
    assert names(Facts(modules=bare, datapath=Datapath("nftables"))) == []
    assert names(Facts(modules=bare, datapath=Datapath("iptables"))) == ["kernel-feature-missing"]
    (item,) = checks.examine(Facts(modules=Modules(installed=frozenset(), builtin=frozenset()), datapath=Datapath("")))
    assert item.what == f"this kernel has no {', '.join(NEEDED)}, nf_tables"


def test_what_counts_is_said_wherever_something_does() -> None:
    """One datapath that is chosen, one that is not, one without another that can be had, and both: each by its name."""
    for datapath, found in (
        (Datapath("nftables", "why", installed=("nftables",)), [("datapath-chosen", "nftables counts: why")]),
        (
            Datapath("nftables", "why", installed=("iptables",)),
            [("datapath-outdated", "iptables counts, and nftables would be chosen now: why")],
        ),
        (Datapath("", installed=("iptables",)), [("datapath-outdated", "iptables counts, and none can be had")]),
        (
            Datapath("nftables", installed=("iptables", "nftables")),
            [
                (
                    "datapath-left-over",
                    "both iptables and nftables have rules or counters of netacct; nftables is chosen",
                )
            ],
        ),
        (Datapath("nftables", "why"), []),
    ):
        assert [(item.name, item.what) for item in checks.examine(Facts(datapath=datapath))] == found


@pytest.mark.parametrize(("installed", "found"), [("iptables", ["host-uses-nftables"]), ("nftables", [])])
def test_the_hint_in_nftables_matters_to_legacy_rules_only(installed: str, found: list[str]) -> None:
    """The kubelet's chains in nftables are no finding where our rules are there, too."""
    hint = NftChain("ip", "mangle", "KUBE-IPTABLES-HINT")
    facts = Facts(datapath=Datapath(installed, installed=(installed,)), rules=Rules(installed=True), nft_chains=(hint,))
    assert [name for name in names(facts) if name == "host-uses-nftables"] == found


def test_a_module_that_is_configured_but_not_installed_is_missing() -> None:
    """`=m` in the configuration does not help where the file is not in the module tree; `=y` does."""
    config = dict.fromkeys((option for options in NEEDED.values() for option in options), "m")
    tree = frozenset(NEEDED) - {"xt_set"}
    assert names(Facts(modules=Modules(installed=tree, config=config))) == ["kernel-feature-missing"]
    assert names(Facts(modules=Modules(installed=tree, config=config | {"NETFILTER_XT_SET": "y"}))) == []


@pytest.mark.parametrize(
    ("known", "missing"),
    [
        (Modules(config={"NFT_SOCKET": "m"}), "SOCK_CGROUP_DATA"),
        (Modules(config={"SOCK_CGROUP_DATA": "y"}), "nft_socket"),
        (Modules(config={}), "nft_socket, SOCK_CGROUP_DATA"),
        (Modules(installed=frozenset(NEEDED), builtin=frozenset()), "nft_socket"),
        (Modules(config={"NFT_SOCKET": "y", "SOCK_CGROUP_DATA": "y"}), ""),
        (Modules(active=frozenset({"nft_socket"})), ""),
        (Modules(), ""),
    ],
)
def test_a_kernel_that_cannot_tell_host_pods_apart_is_named(known: Modules, missing: str) -> None:
    """What `host_pods: cgroup` needs is missed where it is certainly not there, and only where that is asked for."""
    facts = Facts(modules=known, datapath=Datapath("nftables"), settings=Settings(host_pods=True))
    found = [item for item in checks.examine(facts) if item.name == "host-pods-not-told-apart"]
    wanted = [("error", f"this kernel has no {missing}")] if missing else []
    assert [(item.severity, item.what) for item in found] == wanted
    assert "host-pods-not-told-apart" not in names(replace(facts, settings=Settings(), cgroups=""))


def test_modules_are_read_below_a_root(tmp_path: Path) -> None:
    """Without a module tree and a configuration nothing is claimed about what is not loaded."""
    found = modules.look(tmp_path)
    assert (found.builtin, found.installed, found.config) == (None, None, None)
    assert modules.loaded("xt_set 20480 2 - Live 0x0\nip_set 61440 1 xt_set, Live 0x0\n") == {"xt_set", "ip_set"}


def test_a_configuration_that_cannot_be_unpacked_tells_nothing(tmp_path: Path) -> None:
    """A cut or foreign /proc/config.gz, as containers get bound over it, is as good as none."""
    (tmp_path / "proc").mkdir()
    for content in (b"", b"CONFIG_NF_TABLES=y\n", gzip.compress(b"CONFIG_NF_TABLES=y\n")[:-4]):
        (tmp_path / "proc/config.gz").write_bytes(content)
        assert not modules.look(tmp_path).config
    (tmp_path / "proc/config.gz").write_bytes(gzip.compress(b"CONFIG_NF_TABLES=y\n"))
    assert modules.look(tmp_path).config == {"NF_TABLES": "y"}


def test_services_of_ipvs_are_counted() -> None:
    """Each virtual service counts once, of any protocol and family, and their servers do not."""
    assert kernel.count_services((FIXTURES / "ip_vs.txt").read_text()) == 4
    assert kernel.count_services("") == 0
    (item,) = checks.examine(Facts(virtual_services=4))
    assert (item.name, item.what) == ("ipvs", "4 virtual services")


@pytest.mark.parametrize(("users", "found"), [(2, ["flowtable"]), (0, [])])
def test_a_flowtable_counts_when_rules_use_it(users: int, found: list[str]) -> None:
    """A flowtable in the kernel's layout is found with its name, unless no rule puts connections into it."""
    message = memoryview(
        attribute(1, b"fw4\0")
        + attribute(2, b"ft\0")
        + nested(3, attribute(1, struct.pack(">I", 0)), attribute(2, struct.pack(">i", 0)))
        + attribute(4, struct.pack(">I", users))
    )
    table = nft.parse_flowtable("inet", message)
    assert (table.table, table.name, table.users) == ("fw4", "ft", users)
    assert names(Facts(flowtables=(table,))) == found


def link_message(name: str, kind: str, data: bytes = b"", flags: int = 0x1043) -> bytes:
    """An RTM_NEWLINK message as rtnetlink sends it."""
    info = nested(18, attribute(1, kind.encode() + b"\0"), *([attribute(2, data)] if data else []))
    return struct.pack("=BxHiII", 0, 1, 7, flags, 0) + attribute(3, name.encode() + b"\0") + info


@pytest.mark.parametrize(
    ("kind", "data", "what"),
    [
        ("geneve", attribute(5, struct.pack(">H", 6082)), "genev_sys (geneve) uses UDP port 6082"),
        ("geneve", attribute(5, struct.pack(">H", 6081)), ""),
        ("vxlan", attribute(15, struct.pack(">H", 4790)), "genev_sys (vxlan) uses UDP port 4790"),
        ("gre", b"", "genev_sys (gre) uses IP protocol 47"),
        ("sit", b"", ""),
        ("veth", b"", ""),
    ],
)
def test_tunnels_are_held_against_the_policy(kind: str, data: bytes, what: str) -> None:
    """Ports and protocols of tunnels in the kernel's layout are found where the policy has not got them."""
    link = links.parse_link(link_message("genev_sys", kind, data))
    assert (link.number, link.name, link.kind, link.up) == (7, "genev_sys", kind, True)
    facts = Facts(links=(link,), settings=Settings(tunnel=Tunnel(protocols=(4, 41))))
    found = [item.what for item in checks.examine(facts)]
    assert [words.partition(", which")[0] for words in found] == ([what] if what else [])
    assert names(replace(facts, links=(link._replace(up=False),))) == []


def test_the_port_of_wireguard_is_read_from_its_own_answer() -> None:
    """The first message of the answer about a device has the port; those with more peers have none."""
    header = struct.pack("=BBxx", 0, 1)
    first = (
        header + attribute(1, struct.pack("=I", 9)) + attribute(2, b"wg0\0") + attribute(6, struct.pack("=H", 51871))
    )
    more = header + attribute(2, b"wg0\0") + nested(8, b"")
    assert links.parse_port([first, more]) == 51871
    assert links.parse_port([more]) == 0
    assert names(Facts(links=(Link(9, "cilium_wg0", "wireguard", port=51871),))) == ["tunnel-not-in-policy"]
    assert names(Facts(links=(Link(9, "wg0", "wireguard", port=51820), Link(10, "wg1", "wireguard")))) == []


def test_families_of_generic_netlink_are_known_by_name() -> None:
    """CTRL_CMD_NEWFAMILY messages give the number of each family."""
    message = struct.pack("=BBxx", 1, 2) + attribute(2, b"wireguard\0") + attribute(1, struct.pack("=H", 31))
    assert links.family_ids([message]) == {"wireguard": 31}


def test_a_tc_action_that_sets_marks_collides() -> None:
    """A skbedit action in the kernel's layout is an owner of the bits that it sets, and marks are off for it."""
    options = nested(2, attribute(2, struct.pack("=I", 3) + bytes(16)), attribute(5, struct.pack("=I", 0x2)))
    writer = action_writer(dict(attributes(memoryview(attribute(1, b"skbedit\0") + options))))
    user = marks.Finding("tc action", writer.where, writer.bits & 0x1F, "sets")
    (item,) = checks.examine(Facts(settings=Settings(mask=0x1F), mark_users=(user,)))
    assert (item.name, item.severity, item.where) == ("mark-collision", "info", "tc action skbedit index 3")
    assert item.what.endswith("; so marks are off")
    assert names(Facts(settings=Settings(mask=0x1F, marks="off"), mark_users=(user,))) == []


def test_strict_reverse_paths_weigh_more_where_a_rule_routes_by_our_mark() -> None:
    """It is good to know at first, and a warning where a routing rule selects by bits that we set."""
    sysctls = {"net.ipv4.conf.all.src_valid_mark": 1, "net.ipv4.conf.eth0.rp_filter": 1}
    facts = Facts(settings=Settings(mask=1, marks="on"), sysctls=sysctls, links=(Link(2, "eth0", ""),))
    assert [(item.name, item.severity) for item in checks.examine(facts)] == [("strict-reverse-path", "info")]
    user = marks.Finding("ip rule", "ip rule priority 9 fwmark 0x1/0x1", 1, "selects")
    found = {item.name: item.severity for item in checks.examine(replace(facts, mark_users=(user,)))}
    assert found == {"strict-reverse-path": "warning", "mark-collision": "info"}
    loose = {**sysctls, "net.ipv4.conf.all.rp_filter": 2}
    assert names(replace(facts, sysctls=loose)) == []
    assert names(replace(facts, settings=Settings(mask=0))) == []


@pytest.mark.parametrize(
    ("sysctls", "calls", "found"),
    [
        ({}, (False, False), ["bridge-without-netfilter"]),
        ({"net.bridge.bridge-nf-call-iptables": 1}, (False, False), ["bridge-without-netfilter"]),
        ({"net.bridge.bridge-nf-call-ip6tables": 1}, (True, False), []),
        ({}, (True, True), []),
    ],
)
def test_a_bridge_must_show_both_families(sysctls: dict[str, int], calls: tuple[bool, bool], found: list[str]) -> None:
    """A dual-stack bridge needs both settings, of the namespace or of its own; without the module there is neither."""
    nets = [ipaddress.ip_network(cidr) for cidr in ("10.244.1.0/24", "fd00:1::/64")]
    facts = Facts(
        settings=Settings(local=tuple(nets)),
        links=(Link(3, "cni0", "bridge", calls=calls), Link(4, "veth1", "veth", master=3)),
        networks=tuple(InterfaceNetwork(3, net) for net in nets),
        sysctls=sysctls,
    )
    assert names(facts) == found
    assert names(replace(facts, links=facts.links[:1])) == []


def test_process_and_clock_are_judged() -> None:
    """A missing library and a clock from before this program are found."""
    assert names(Facts(rules=Rules(unavailable="libip4tc is missing"))) == ["datapath-unavailable"]
    assert names(Facts(wall_clock=YEAR_2025 - 1)) == ["clock-not-set"]
    assert names(Facts(wall_clock=YEAR_2025)) == []
    assert names(Facts(process=Process(kubernetes=True, initial_namespace=True))) == []


def test_long_lists_of_differences_are_cut() -> None:
    """Three differences are quoted, the others counted."""
    rules = Rules(installed=True, differences=tuple(f"chain {number} is missing" for number in range(9)))
    (item,) = checks.examine(
        Facts(agent=Agent(1), rules=rules, settings=Settings(local=(ipaddress.ip_network("10.0.0.0/24"),)))
    )
    assert item.what == (
        "chain 0 is missing; chain 1 is missing; chain 2 is missing; and 6 more (`netacct rules diff`)"
    )


def test_a_holder_that_is_gone_is_said_to_be() -> None:
    """A lock that a child inherited is reported under the pid that took it."""
    (item,) = checks.examine(Facts(lock=Lock(holder=Holder(7, "", 0.5, None, 0))))
    assert item.what == ("process 7 (gone; a child of it has the lock) has held /run/xtables.lock for at least 0.5 s")


@pytest.mark.parametrize(("name", "severity"), [("iptables", "error"), ("nftables", "info"), ("", "error")])
def test_a_lock_that_nobody_needs_is_no_error(name: str, severity: str) -> None:
    """Without a usable xtables lock only the datapath that writes legacy tables cannot work."""
    (item,) = checks.examine(Facts(lock=Lock(problem="it is not a file"), datapath=Datapath(name=name)))
    assert (item.name, item.severity) == ("xtables-lock-unusable", severity)


def test_what_was_not_seen_is_said() -> None:
    """Each reader that failed is a finding with its reason."""
    (item,) = checks.examine(Facts(unread=(Fault("nftables", "no answer"),)))
    assert (item.name, item.where, item.what) == ("could-not-look", "nftables", "nftables: no answer")


def test_locks_are_read_from_proc() -> None:
    """Holder and waiters of one file are told from other files and other kinds of locks; a foreign pid is 0."""
    text = (
        "1: FLOCK  ADVISORY  WRITE 812 00:1a:77 0 EOF\n"
        "1: -> FLOCK  ADVISORY  WRITE 813 00:1a:77 0 EOF\n"
        "1: -> FLOCK  ADVISORY  WRITE 814 00:1a:77 0 EOF\n"
        "2: POSIX  ADVISORY  WRITE 900 00:1a:78 0 EOF\n"
        "3: FLOCK  ADVISORY  WRITE -1 00:1a:79 0 EOF\n"
    )
    assert process.find_flock(text, "00:1a:77") == (812, 2)
    assert process.find_flock(text, "00:1a:78") is None
    assert process.find_flock(text, "00:1a:79") == (0, 0)


def test_a_command_with_brackets_does_not_confuse() -> None:
    """Command and start time are read around a name that has blanks and brackets in it."""
    text = "42 (a) b (c) S 1 42 42 0 -1 4194560 100 0 0 0 1 2 0 0 20 0 1 0 98765 1 2 3\n"
    assert process.parse_stat(text) == ("a) b (c", 98765)


def test_the_page_has_every_finding_as_it_is() -> None:
    """Name, severity, reason and advice on the page are those of the catalogue, and there is no other row."""
    rows = re.findall(r"^\| `([a-z-]+)` \| (\w+) \| [^|]+ \| ([^|]+) \| ([^|]+) \| [^|]+ \|$", PAGE, re.MULTILINE)
    assert rows == [(name, *advice) for name, advice in CATALOGUE.items()]
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", name) for name in CATALOGUE)


def test_the_configuration_of_node_problem_detector_calls_the_command() -> None:
    """The plugin's configuration on the page is JSON, and its arguments are those of the command."""
    document = json.loads(PAGE.split("```json\n")[1].split("```")[0])
    (rule,) = document["rules"]
    assert rule["args"] == ["doctor", "-o", "npd"]
    assert rule["condition"] == document["conditions"][0]["type"]
    assert document["pluginConfig"]["max_output_length"] == command.NPD_WIDTH


def test_findings_sort_by_severity_and_have_the_weight_of_the_catalogue() -> None:
    """Errors come first, then warnings; a check may give another weight than the usual one."""
    facts = Facts(
        unread=(Fault("a", "b"),), virtual_services=1, process=Process(missing=("CAP_NET_RAW",)), wall_clock=0.0
    )
    assert [item.severity for item in checks.examine(facts)] == ["error", "warning", "warning", "info"]
    assert finding("ipvs", "", "", "info").severity == "info"
    assert {advice.severity for advice in CATALOGUE.values()} == set(SEVERITIES)
