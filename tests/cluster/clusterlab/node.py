"""A node: containerd, kubelet and kube-proxy on a host, pods by ptp, host-local and portmap, an agent if asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from clusterlab import cgroups, plan
from clusterlab.hosts import Fabric, Host, until
from clusterlab.pki import Pki
from clusterlab.truth import Truth

CONTAINERD, KUBELET, KUBE_PROXY = "containerd", "kubelet", "kube-proxy"
PLUGINS = "/usr/lib/cni"
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
STATIC_PODS = "/etc/kubernetes/manifests"
RECEIVERS = "receivers"
"""The service `traffic serve`, where a test asked for it."""

_CONTAINERD = """\
version = 3
[plugins."io.containerd.cri.v1.runtime"]
  # without CAP_SYS_RESOURCE runc cannot give the sandbox its oom score
  restrict_oom_score_adj = true
[plugins."io.containerd.cri.v1.runtime".cni]
  bin_dirs = ["{plugins}"]
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{sandbox}"
"""


class Node(Host):
    """Node `number` of a cluster, from 1; its pods' counters are in `truth`.

    Args:
        number: which one.
        prefix: of the names of its cgroups, so that several clusters can be there at once.
        fabric: what joins the hosts.
        programs: the folder of the built programs.
        pki: the cluster's authority.
        routes: to the pods of other nodes, and by default.
        sandbox: the image of sandboxes.
    """

    def __init__(
        self, number: int, prefix: str, fabric: Fabric, programs: Path, pki: Pki, routes: list[str], sandbox: str
    ) -> None:
        self.number = number
        self.pod_ranges = plan.pods(number)
        self.cgroup = f"{prefix}-node{number}"
        self._programs = programs
        self._pki = pki
        self._sandbox = sandbox
        self.truth = Truth(f"node{number}")
        name, addresses = f"node{number}", plan.host(number)
        pki.sign(
            name,
            f"/O=system:nodes/CN=system:node:{name}",
            f"DNS:{name}",
            "IP:127.0.0.1",
            *(f"IP:{address}" for address in addresses.values()),
        )
        cgroups.make(self.cgroup)
        super().__init__(name, addresses, fabric, routes)
        self._configure()
        self._ready_network()

    def own_addresses(self) -> frozenset[str]:
        """What belongs to the node itself: on the fabric, and in its pod ranges."""
        return frozenset({*self.addresses.values(), *plan.pod_gateway(self.number).values()})

    def serve_runtime(self, archive: Path) -> None:
        """Start containerd and import an image."""
        path = {"PATH": f"{self._programs}:/usr/sbin:/usr/bin:/sbin:/bin"}
        configuration = str(self.folder / "containerd.toml")
        self.serve(CONTAINERD, [str(self._programs / "containerd"), "-c", configuration], **path)
        self.import_image(archive)

    def import_image(self, archive: Path, patience: float = 180.0) -> None:
        """Import an archive of `docker save` for the kubelet's pods; waits for containerd."""
        said = ""

        def imported() -> bool:
            nonlocal said
            done = self.run(self.ctr("images", "import", "--local", str(archive)), check=False)
            said = done.stderr
            return done.returncode == 0

        until(imported, patience, lambda: f"{self.name}: no image: {said} {self.read_log(CONTAINERD)}")

    def ctr(self, *arguments: str) -> list[str]:
        """A command of containerd's own client."""
        return [str(self._programs / "ctr"), "--address", CONTAINERD_SOCKET, "-n", "k8s.io", *arguments]

    def serve_kubelet(self) -> None:
        """Start the kubelet and kube-proxy."""
        self.serve(
            KUBELET,
            [
                str(self._programs / "kubelet"),
                f"--config={self.folder / 'kubelet.json'}",
                f"--kubeconfig={self._pki.path(self.name + '.kubeconfig')}",
                f"--hostname-override={self.name}",
                f"--node-ip={','.join(self.addresses.values())}",
                "--cert-dir=/var/lib/kubelet/pki",
            ],
        )
        self.serve(KUBE_PROXY, [str(self._programs / "kube-proxy"), f"--config={self.folder / 'kube-proxy.json'}"])

    def set_proxy_mode(self, mode: str) -> None:
        """Let kube-proxy work by `iptables` or `nftables`; restarts it if it runs."""
        document = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": mode,
            "clusterCIDR": ",".join(plan.PODS.values()),
            "clientConnection": {"kubeconfig": self._pki.path("proxy.kubeconfig")},
            # the limit of conntrack is not this network namespace's to set
            "conntrack": {"maxPerCore": 0},
            "hostnameOverride": self.name,
        }
        running = self.runs(KUBE_PROXY)
        if running:  # it ends by itself when the file changes, sooner or later
            self.stop(KUBE_PROXY)
        self.folder.joinpath("kube-proxy.json").write_text(json.dumps(document), encoding="ascii")
        if running:
            self.start(KUBE_PROXY)

    def set_iptables(self, variant: str) -> None:
        """Let `iptables` be `nft` (Debian's default) or `legacy`, as update-alternatives(1) does; a change reboots."""
        if self.run(["readlink", "/etc/alternatives/iptables"]).stdout.strip() == f"/usr/sbin/iptables-{variant}":
            return
        for tool in ("iptables", "ip6tables"):
            for suffix in ("", "-save", "-restore"):
                self.run(["ln", "-sf", f"/usr/sbin/{tool}-{variant}{suffix}", f"/etc/alternatives/{tool}{suffix}"])
        self.reboot()

    def _power_off(self) -> None:
        super()._power_off()
        cgroups.remove(self.cgroup)
        cgroups.make(self.cgroup)

    def _power_on(self, services: Sequence[str]) -> None:
        self._ready_network()
        if CONTAINERD in services:  # a kubelet without it ends, and nobody starts it again here
            self.start(CONTAINERD)
            until(self._runtime_answers, 120, lambda: f"{self.name}: no containerd: {self.read_log(CONTAINERD)}")
        super()._power_on([service for service in services if service != CONTAINERD])

    def _runtime_answers(self) -> bool:
        return self.run(self.ctr("version"), check=False).returncode == 0

    def kill(self) -> None:
        """End it with everything inside, its cgroups too."""
        self.truth.leave()
        super().kill()

    def remove(self) -> None:
        """End it, and let nothing of it remain."""
        self.kill()
        self.truth.close()
        cgroups.remove(self.cgroup)

    def _ready_network(self) -> None:
        """What is not on disk: masquerading as by an ip-masq-agent, no route to pods that are gone, pods' counters."""
        for family, program in ((4, "iptables"), (6, "ip6tables")):
            way = ["-s", self.pod_ranges[family], "-d", plan.INTERNET_RANGES[family]]  # type: ignore[index] # 4 or 6
            self.run([program, "-w", "-t", "nat", "-A", "POSTROUTING", *way, "-j", "MASQUERADE"])
        # as Calico has it: what is sent to a pod that is gone would else go round by the default route
        self.batch(*(f"route add unreachable {pods}" for pods in self.pod_ranges.values()))
        self.truth.follow(self.path("/"))

    def _configure(self) -> None:
        text = _CONTAINERD.format(plugins=PLUGINS, sandbox=self._sandbox)
        self.folder.joinpath("containerd.toml").write_text(text, encoding="ascii")
        self.folder.joinpath("kubelet.json").write_text(json.dumps(self._kubelet()), encoding="ascii")
        ipam = {
            "type": "host-local",
            "ranges": [[{"subnet": subnet}] for subnet in self.pod_ranges.values()],
            "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
        }
        network = {
            "cniVersion": "1.0.0",
            "name": "pods",
            "plugins": [
                # ipMasq of ptp would masquerade between nodes as well
                {"type": "ptp", "ipMasq": False, "ipam": ipam},
                {"type": "portmap", "capabilities": {"portMappings": True}},
            ],
        }
        self.run(["mkdir", "-p", "/etc/cni/net.d", STATIC_PODS])
        self.write("/etc/cni/net.d/10-pods.conflist", json.dumps(network))

    def _kubelet(self) -> dict[str, object]:
        certificate = self._pki.path(self.name)
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "failCgroupV1": False,
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.cgroup}",
            "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
            "authentication": {
                "anonymous": {"enabled": False},
                "x509": {"clientCAFile": self._pki.path("ca.crt")},
                "webhook": {"enabled": True},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": f"{certificate}.crt",
            "tlsPrivateKeyFile": f"{certificate}.key",
            "failSwapOn": False,
            # it tells every two seconds that it lives; the control plane gives it ten
            "nodeLeaseDurationSeconds": 8,
            "staticPodPath": STATIC_PODS,
            # the machine's resolv.conf may be a link into its /run
            "resolvConf": "",
            "clusterDomain": "cluster.local",
            "evictionHard": {"memory.available": "50Mi"},
            "imageGCHighThresholdPercent": 100,
        }
