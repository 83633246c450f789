"""What the doctor says: findings, made from a catalogue that fixes each one's name, weight and advice. Pure.

Names are a contract with alerts and scripts: one is never reused for something else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

Severity: TypeAlias = Literal["error", "warning", "info"]

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
"""The gravest first. `error`: counting does not work, or numbers are wrong. `warning`: some traffic is missing or in
the wrong class, or soon will be. `info`: good to know; nothing to do at once."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is in the way.

    name:     stable, kebab-case; a key of `CATALOGUE`.
    what:     what was found here, with names and numbers.
    why, do:  why it matters, and what to do.
    where:    the file, interface, chain or process that it is about.
    """

    name: str
    severity: Severity
    what: str
    why: str
    do: str
    where: str


class Advice(NamedTuple):
    """What is always the same about a finding. `severity` is the usual one; a check may weigh a case differently."""

    severity: Severity
    why: str
    do: str


CATALOGUE: dict[str, Advice] = {
    "configuration-invalid": Advice(
        "error",
        "The agent does not start with this file, and a running one keeps the configuration before.",
        "Correct the line; `netacct check` shows every error and what is allowed.",
    ),
    "kernel-feature-missing": Advice(
        "error",
        "The rules need it; without it they cannot be installed and nothing is counted.",
        "Install the kernel's package of extra modules, or let `datapath: auto` take the datapath that can be had.",
    ),
    "datapath-unavailable": Advice(
        "error",
        "The agent cannot write or compare rules.",
        "Install what the message names: libxtables, libip4tc and libip6tc come with the iptables package.",
    ),
    "host-netfilter-blind": Advice(
        "error",
        "Packets that eBPF or Open vSwitch forward never meet our rules, and where rules are forbidden none can be "
        "made: numbers would be low, and look right.",
        "Count by the platform's own means there; or route through the host's stack (Cilium: bpf.hostLegacyRouting). "
        "`datapath: iptables` or `nftables` installs rules nevertheless.",
    ),
    "datapath-chosen": Advice(
        "info",
        "It tells where rules and counters are. `auto` takes the backend of Kubernetes' rules, for packets then pass "
        "no tables that are not there already.",
        "Nothing; `datapath` in the configuration forces the other one.",
    ),
    "datapath-outdated": Advice(
        "info",
        "Counting is right as it is, but not where Kubernetes filters.",
        "`netacct rules apply`, or a restart of the agent, moves the node over; totals go on, and what is sent in the "
        "fraction of a second between the two is not counted.",
    ),
    "datapath-left-over": Advice(
        "warning",
        "Each packet passes both, and one of them is booked by nobody.",
        "Restart the agent, or run `netacct rules apply` where none runs: it takes away what the totals do not know.",
    ),
    "capability-missing": Advice(
        "error",
        "Legacy tables need CAP_NET_RAW, and all of netfilter needs CAP_NET_ADMIN.",
        "Grant both, in the unit's CapabilityBoundingSet or the container's securityContext.",
    ),
    "pod-namespace": Advice(
        "error",
        "Rules in a pod's own network namespace count only that pod.",
        "Set hostNetwork: true, or run netacct on the host.",
    ),
    "agent-in-other-namespace": Advice(
        "error",
        "The agent counts in that namespace and not in this one; what is said here is about this one.",
        "Run this command in the agent's namespace (`nsenter -t PID -n`), or take PrivateNetwork= out of its unit.",
    ),
    "agent-not-answering": Advice(
        "error",
        "A stuck agent books nothing and repairs nothing, though the kernel goes on counting.",
        "Look into its log; restart it: no count is lost.",
    ),
    "control-socket-stale": Advice(
        "warning",
        "An agent ended without cleaning up, by a crash or SIGKILL.",
        "Start the agent: it replaces the socket, and books what was counted meanwhile.",
    ),
    "rules-without-agent": Advice(
        "warning",
        "The kernel counts, but nobody books it to pods, serves it, or repairs the rules.",
        "Start the agent, or take the rules away with `netacct rules remove`.",
    ),
    "accounting-paused": Advice(
        "warning",
        "Nothing is counted, and the totals stand still; the agent installs nothing by itself.",
        "`netacct rules apply` has it go on, and so does a restart of the agent.",
    ),
    "nothing-counts": Advice(
        "warning",
        "What pods send and receive now is counted by nobody.",
        "Start the agent. Where netacct shall stay off, set `enabled: false`, or remove the state directory.",
    ),
    "rules-not-in-place": Advice(
        "error",
        "Traffic that misses a rule or a set is not counted.",
        "A running agent repairs this within seconds; if it stays, look into its log. Else: `netacct rules apply`.",
    ),
    "rules-shadowed": Advice(
        "error",
        "That rule can end a packet's way through the chain before it is counted.",
        "A running agent moves its rules up, but yields to a rival that does the same: make that program append its "
        "rule, or insert it after ours.",
    ),
    "drops-before-counting": Advice(
        "info",
        "What it drops was sent, but is never counted.",
        "Nothing, where that is meant; else give the chain a priority above -150 (mangle).",
    ),
    "saved-with-our-rules": Advice(
        "error",
        "Such a file is loaded whole or not at all, and with ours it often is not: at boot their sets are not there, "
        "nft cannot read all that it prints, and a running agent lets nobody write to its tables. Then the node has "
        "no firewall.",
        "Take them out of the file, with all rules that lead to them, or save it again while they are away: `netacct "
        "rules remove`, save, `netacct rules apply`.",
    ),
    "legacy-and-nft-mixed": Advice(
        "warning",
        "Programs that use different backends do not see each other's rules, and each packet passes both.",
        "Find out who uses the other backend (`iptables-legacy-save`, `iptables-nft-save`), and set it to the host's.",
    ),
    "host-uses-nftables": Advice(
        "info",
        "netacct's rules are in legacy tables while Kubernetes writes to nftables: both count right, each packet "
        "passes both, and `iptables` shows a warning about legacy tables.",
        "Nothing; it is harmless.",
    ),
    "mark-collision": Advice(
        "info",
        "Two programs that write the same bits of a packet's mark break each other's routing or policy. Counting "
        "does not need marks.",
        "Leave marks.mode at auto, which keeps them off here; or give the policy a mask that nobody uses.",
    ),
    "strict-reverse-path": Advice(
        "info",
        "With src_valid_mark the kernel looks up the way back by the packet's mark; strict rp_filter drops a marked "
        "packet that enters again where a routing rule sends its mark elsewhere.",
        "Set rp_filter to 2 (loose) there, or marks.mode to off.",
    ),
    "xtables-lock-held": Advice(
        "warning",
        "While it is held nobody who keeps to it can change rules: not netacct, not kube-proxy, not the CNI plugin.",
        "Find out what that process waits for; end it if it hangs.",
    ),
    "xtables-lock-unusable": Advice(
        "error",
        "Without the shared lock, changes of two programs at once can undo each other, so netacct makes none.",
        "Make the file and its directory writable (ReadWritePaths= in the unit, a mount in the container), and let "
        "XTABLES_LOCKFILE name the file that all programs share.",
    ),
    "bridge-without-netfilter": Advice(
        "warning",
        "What two pods on this bridge send to each other does not pass the rules, and is not counted.",
        "Load br_netfilter and set net.bridge.bridge-nf-call-iptables and -ip6tables to 1, as kubeadm wants it too.",
    ),
    "ipvs": Advice(
        "warning",
        "Service addresses are the node's own and are forwarded from INPUT: traffic to services shows as `node`.",
        "Use kube-proxy in mode iptables or nftables, or read `node` as `node and service` here.",
    ),
    "tproxy": Advice(
        "warning",
        "What it redirects is delivered to a process of this node, and shows as the pod's traffic to `node`.",
        "Read `node` as `node and proxied` here; the proxy's own connections are the host's.",
    ),
    "flowtable": Advice(
        "warning",
        "Connections in a flowtable pass no rules after their first packets, so most of their bytes are not counted.",
        "Take the interfaces of pods out of the flowtable, or its rule away.",
    ),
    "tunnel-not-in-policy": Advice(
        "warning",
        "Its outer packets are booked to the host by their destination, and pods' bytes show a second time there "
        "instead of as `tunnel`.",
        "Add the port to tunnel.udp, or the protocol to tunnel.protocols, of the policy.",
    ),
    "no-local-range": Advice(
        "warning",
        "Without the addresses of this node's pods no pod is counted, only the host.",
        "Set local_ranges, or name the pods in the pods file.",
    ),
    "local-ranges-not-read": Advice(
        "warning",
        "An address of a pod that only this provider knows is not counted before a source names its owner.",
        "Let this node reach what the provider asks (with AWS, IMDSv2 must be on); or take it out of ranges.providers, "
        "and set local_ranges.",
    ),
    "host-pods-not-told-apart": Advice(
        "warning",
        "`host_pods: cgroup` is set, but hostNetwork pods stay with the host; where the kernel cannot match sockets by "
        "cgroup, no rules are installed at all.",
        "Mount the cgroup v2 tree whole (in a container: the host's), or install the kernel's package of extra "
        "modules; or set `host_pods: off`.",
    ),
    "cluster-ranges-unknown": Advice(
        "info",
        "Pods and services elsewhere in the cluster, and other nodes, show as `private` or by the CIDR they lie in.",
        "Write the cluster's CIDRs into the classes of the policy. Where pods and nodes share a subnet, no CIDR tells "
        "them apart: give the policy a class `cluster`.",
    ),
    "masquerade-between-nodes": Advice(
        "warning",
        "What a pod sends to a pod of another node arrives with this node's address: there it is received from `node`, "
        "not from `pod`, and nothing there can know better.",
        "Set ipMasq: false, and let an ip-masq-agent, or a rule of your own, masquerade only what leaves the cluster.",
    ),
    "state-directory-unusable": Advice(
        "error",
        "Totals cannot be stored, and a restart of the agent loses or refuses them.",
        "Make it a directory that root can write (RuntimeDirectory= in the unit).",
    ),
    "state-directory-open": Advice(
        "warning",
        "Others than root could reach the control socket, or replace the stored totals.",
        "`chown root` and `chmod 0700` it.",
    ),
    "state-directory-full": Advice(
        "warning",
        "The next checkpoint fails; a crash would then lose what was booked since the last one.",
        "Make room, or set state_dir to another file system.",
    ),
    "clock-not-set": Advice(
        "warning",
        "When a pod was made is told by the wall clock; with a wrong one, late bytes go to `unattributed`.",
        "Set the clock, and let it be kept by NTP.",
    ),
    "could-not-look": Advice(
        "info",
        "What the doctor did not see may be wrong.",
        "Run it as root, on the host, with the capabilities of the agent.",
    ),
}


def finding(name: str, what: str, where: str, severity: Severity | None = None) -> Finding:
    """A finding of the catalogue; KeyError for a name that is not in it."""
    advice = CATALOGUE[name]
    return Finding(name, severity or advice.severity, what, advice.why, advice.do, where)
