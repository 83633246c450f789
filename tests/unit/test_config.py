"""The configuration file, flags over it and defaults under it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from netacct import choosing, config
from netacct.config import Config, effective, examine, load
from netacct.config_keys import AUTO_SOURCES, Listen, listen_address, telemetry_path
from netacct.errors import EX_CONFIG, ConfigError


def _write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


ARCHITECTURE = """
enabled: true
policy: default
datapath: auto
local_ranges: [10.244.1.0/24, "fd00:10:244:1::/64"]
ranges: {providers: auto}
marks: {mode: auto}
identity: {sources: auto, file: {path: /etc/netacct/pods.yaml}, late_binding: 120s}
metrics: {pods: on, workloads: on, packets: on, retention: 5m, zero_first: 60s, max_pod_series: 500}
state_dir: /run/netacct
accounts_dir: /var/lib/netacct
web: {listen_address: [":19112"], telemetry_path: /metrics}
log: {level: info, format: logfmt}
"""


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    """An empty file, and one that writes the defaults out, give the same values but for where they come from."""
    empty = load(_write(tmp_path / "empty.yaml", ""))
    written = load(_write(tmp_path / "full.yaml", ARCHITECTURE))
    same = dataclasses.replace(written, local_ranges=(), log=empty.log)
    assert same == empty
    assert (empty.identity.sources, empty.identity.late_binding) == (AUTO_SOURCES, 120.0)
    assert (empty.metrics.retention, empty.metrics.zero_first, empty.metrics.max_pod_series) == (300.0, 60.0, 500)
    assert (empty.web.listen_address, empty.log.format) == ((Listen("", 19112),), "auto")
    assert [str(network) for network in written.local_ranges] == ["10.244.1.0/24", "fd00:10:244:1::/64"]


def test_the_default_file_may_be_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the default file all defaults hold, but a file that was named must be there."""
    missing = str(tmp_path / "netacct.yaml")
    monkeypatch.setattr(config, "DEFAULT_PATH", missing)
    assert load().policy == "default"
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load(missing)


def test_a_default_file_that_cannot_be_read_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only a missing default file is forgiven; here it is a directory."""
    monkeypatch.setattr(config, "DEFAULT_PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load()


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    """A flag replaces the file's value, and the effective list tells flag, file with line, and default apart."""
    path = _write(tmp_path / "c.yaml", "log:\n  level: warning\n  format: json\nweb: {listen_address: [':1']}\n")
    loaded = load(path, {"log.level": "debug", "web.listen_address": ["[::1]:0", "127.0.0.1:2"]})
    assert (loaded.log.level, loaded.log.format) == ("debug", "json")
    assert loaded.web.listen_address == (Listen("::1", 0), Listen("127.0.0.1", 2))
    origins = {setting.key: setting.origin for setting in effective(loaded)}
    assert origins["log.level"] == "--log.level"
    assert origins["log.format"] == f"{path}:3"
    assert origins["web.listen_address"] == "--web.listen-address"
    assert origins["policy"] == "default"


def test_the_effective_list_is_plain(tmp_path: Path) -> None:
    """Every key is listed once, with values as a person would write them."""
    path = _write(tmp_path / "c.yaml", "local_ranges: [10.0.0.0/24]\nmetrics: {pods: off, retention: 90}\n")
    settings = {setting.key: setting.value for setting in effective(load(path))}
    assert list(settings) == list(config.keys())
    assert settings["local_ranges"] == ["10.0.0.0/24"]
    assert settings["metrics.pods"] is False
    assert settings["metrics.retention"] == "90s"
    assert settings["web.listen_address"] == [":19112"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("polcy: x", r"c.yaml:1: polcy: unknown key, did you mean 'policy'\?"),
        ("\nmetrics: {\n  retenton: 5m}", r"c.yaml:3: metrics.retenton: unknown key, did you mean 'retention'\?"),
        ("identity: {file: {paths: x}}", r"identity.file.paths: unknown key, did you mean 'path'\?"),
        ("log: debug", "c.yaml:1: log: 'debug' where a mapping is expected"),
        ("- a", "c.yaml:1: a list where a mapping is expected"),
        ("policy: a\npolicy: b", "c.yaml:2: policy: is given twice"),
        ("enabled: 1", "enabled: '1' is not a boolean"),
        ("policy: ''", "policy: '' is not a valid value"),
        ("datapath: nftable", r"'nftable'.*\(allowed: auto, iptables, nftables\)"),
        ("datapath: bpf", "datapath: 'bpf' is not a valid value"),
        ("ranges: {providers: [gcp]}", r"providers\[0\]: 'gcp' is not a valid value .*auto, .*cni, gce, .*rtnetlink"),
        ("ranges: {metadata: {url: 'http://metadata'}}", r"'http://metadata' is not a valid value .*auto, or http"),
        ("ranges: {providers: all}", "providers: 'all' is not a valid value"),
        ("identity: {cni: {directories: [results]}}", r"directories\[0\]: 'results' is not a valid value"),
        ("ranges: {cni: {directories: [/a, /a]}}", r"directories\[1\]: '/a' is listed twice"),
        ("identity: {sources: [file, file]}", r"sources\[1\]: 'file' is listed twice"),
        ("identity: {sources: [kubelets]}", r"'kubelets' is not a valid value \(allowed: auto, .*, veth, apiserver\)"),
        (
            "identity: {kubelet: {url: 'http://127.0.0.1:10250'}}",
            r"kubelet.url: 'http.* not .* \(allowed: auto, or https",
        ),
        ("identity: {kubelet: {url: 'https://n:99999'}}", r"kubelet.url: 'https://n:99999' is not a valid value"),
        ("identity: {kubelet: {url: 'https://[12345]'}}", r"kubelet.url: 'https://\[12345\]' is not a valid value"),
        ("identity: {kubelet: {key_file: /k}}", r"kubelet.key_file: there is no .* \(allowed: with certificate_file\)"),
        ("identity: {late_binding: 2h}", "late_binding: 2h is out of range"),
        ("identity: {file: {path: pods.yaml}}", r"'pods.yaml' is not a valid value \(allowed: an absolute path\)"),
        ("marks: {mode: maybe}", "'maybe' is not a valid value"),
        ("metrics: {pods: 'on'}", "the string 'on' is not a boolean"),
        ("metrics: {max_pod_series: 0}", "0 is out of range"),
        ("metrics: {labels: [a b]}", r"labels\[0\]: 'a b' is not a valid value"),
        (
            "metrics: {by_label: 'a b'}",
            r"by_label: 'a b' is not a valid value \(allowed: a label key of Kubernetes, or",
        ),
        ("metrics: {max_label_series: 0}", "0 is out of range"),
        ("local_ranges: [10.0.0.1/8]", r"host bits set \(allowed: 10.0.0.0/8\)"),
        ("local_ranges: [0.0.0.0/0]", r"local_ranges\[0\]: 0.0.0.0/0 holds"),
        ("local_ranges: 10.0.0.0/8", "where a list is expected"),
        ("web: {listen_address: []}", "listen_address: is empty"),
        ("web: {listen_address: ['1.2.3:80']}", r"listen_address\[0\]: '1.2.3:80' is not a valid value"),
        ("web: {telemetry_path: /livez}", "telemetry_path: '/livez' is not a valid value"),
        ("web: {telemetry_path: /-/ready}", "telemetry_path: '/-/ready' is not a valid value .*are taken"),
        ("log: {level: trace}", r"'trace' is not a valid value \(allowed: debug, info, warning, error\)"),
        ("log: {format: xml}", "'xml' is not a valid value"),
        ("state_dir:", "state_dir: nothing where a string is expected"),
    ],
)
def test_each_mistake_is_named(tmp_path: Path, text: str, message: str) -> None:
    """A mistake is a ConfigError (exit 78) with line, dotted key, what was found and what is allowed."""
    with pytest.raises(ConfigError, match=message) as caught:
        load(_write(tmp_path / "c.yaml", text))
    assert caught.value.exit_code == EX_CONFIG


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("metrics: {by_label: experiment}", ("experiment",)),
        ("metrics: {labels: [team, experiment], by_label: experiment}", ("team", "experiment")),
        ("metrics: {labels: [team], by_label: ''}", ("team",)),
        ("", ()),
    ],
)
def test_sources_tell_the_labels_that_are_used(tmp_path: Path, text: str, labels: tuple[str, ...]) -> None:
    """What sources keep of a pod's labels are those for pod info and the one to sum by, each once."""
    assert load(_write(tmp_path / "c.yaml", text)).metrics.pod_labels == labels


@pytest.mark.parametrize(
    ("written", "found"),
    [("./p.yaml", "etc/p.yaml"), ("p.json", "etc/p.json"), ("../rules/p", "rules/p"), ("/a/p.yaml", "/a/p.yaml")],
)
def test_a_policy_path_is_relative_to_the_file_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, found: str
) -> None:
    """A relative path of a policy begins at the configuration's directory, however that is named and from anywhere."""
    (tmp_path / "etc").mkdir()
    path = _write(tmp_path / "etc" / "c.yaml", f"policy: {written}\n")
    assert load(path).policy == str(tmp_path / found)
    monkeypatch.chdir(tmp_path / "etc")
    assert load("c.yaml").policy == str(tmp_path / found)


def test_an_invalid_value_keeps_its_place(tmp_path: Path) -> None:
    """What is invalid is listed with file and line, not as if nobody had written it."""
    found, _ = examine(_write(tmp_path / "c.yaml", "policy: default\ndatapath: bpf\n"))
    origins = {setting.key: setting.origin for setting in effective(found)}
    assert origins["datapath"] == f"{tmp_path}/c.yaml:2 (invalid; the default is shown)"


def test_all_mistakes_are_found_at_once(tmp_path: Path) -> None:
    """`examine` returns every error in the file's order, and defaults where they stand."""
    path = _write(tmp_path / "c.yaml", "polcy: x\ndatapath: bpf\nlog: {level: loud}\nmetrics: {pods: off}\n")
    found, errors = examine(path)
    assert [error.key for error in errors] == ["polcy", "datapath", "log.level"]
    assert (found.datapath, found.log.level, found.metrics.pods) == ("auto", "info", False)
    with pytest.raises(ConfigError, match=r"c.yaml:1: polcy: .*; and 2 more: `netacct check`$"):
        load(path)


def test_equal_values_are_equal_wherever_they_come_from(tmp_path: Path) -> None:
    """Two configurations with the same values are equal, so that a reload sees only real changes."""
    assert load(_write(tmp_path / "a.yaml", "policy: default")) == load(_write(tmp_path / "b.yaml", "\n"))
    assert isinstance(load(_write(tmp_path / "a.yaml", "")), Config)


@pytest.mark.parametrize(
    ("text", "listen"),
    [
        (":19112", Listen("", 19112)),
        ("127.0.0.1:0", Listen("127.0.0.1", 0)),
        ("[::1]:65535", Listen("::1", 65535)),
        ("[FD00:0::1]:1", Listen("fd00::1", 1)),
        ("localhost:9100", Listen("localhost", 9100)),
    ],
)
def test_listen_addresses(text: str, listen: Listen) -> None:
    """Addresses of both families, names and bare ports are read, and written back in a form that is read again."""
    assert listen_address(text) == listen
    assert listen_address(str(listen)) == listen


@pytest.mark.parametrize(
    "text",
    ["", "19112", ":65536", "::1:80", "[::1]", "[1.2.3.4]:1", "300.1.1.1:1", "a b:1", ":-1", "a..b:1", f"{'a' * 64}:1"],
)
def test_bad_listen_addresses(text: str) -> None:
    """What names no address and port is refused."""
    with pytest.raises(ValueError, match=r".*"):
        listen_address(text)


@pytest.mark.parametrize("text", ["", "metrics", "/", "/a b", "/a?b", "/readyz", "//"])
def test_bad_telemetry_paths(text: str) -> None:
    """A path that no URL has, or that health and the front page need, is refused."""
    with pytest.raises(ValueError, match=r".*"):
        telemetry_path(text)


@pytest.mark.parametrize(("datapath", "asked"), [("auto", "nftables"), ("nftables", "nftables")])
def test_host_pods_need_nftables(tmp_path: Path, datapath: str, asked: str) -> None:
    """Where hostNetwork pods shall be told apart, nftables is what counts, unless iptables is named: an error."""
    path = _write(tmp_path / "netacct.yaml", f"datapath: {datapath}\nhost_pods: cgroup\n")
    assert choosing.asked(load(path)) == asked
    with pytest.raises(ConfigError, match=r"netacct.yaml:2: host_pods: iptables cannot tell hostNetwork pods apart"):
        load(_write(tmp_path / "netacct.yaml", "datapath: iptables\nhost_pods: cgroup\n"))
