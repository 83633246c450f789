"""The host of etcd, kube-apiserver, kube-controller-manager and kube-scheduler."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from clusterlab import plan
from clusterlab.hosts import Fabric, Host, until
from clusterlab.pki import Pki

ETCD, API_SERVER, CONTROLLER_MANAGER, SCHEDULER = "etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"
_ETCD = "http://127.0.0.1:2379"
_SERVICES = ",".join(plan.SERVICES.values())
_AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata"}],
}
AUDIT_LOG = "/var/log/kube-apiserver-audit.log"
"""Where the API server writes a line of JSON for each request: who, from where, with which program."""


class ControlPlane(Host):
    """Everything of a cluster that is not on its nodes.

    Args:
        fabric: what joins the hosts.
        programs: the folder of the built programs.
        pki: the cluster's authority.
        routes: to the pods of each node.
    """

    def __init__(self, fabric: Fabric, programs: Path, pki: Pki, routes: Sequence[str]) -> None:
        self._programs = programs
        self._pki = pki
        pki.sign("admin", "/O=system:masters/CN=admin")
        pki.sign("controller-manager", "/CN=system:kube-controller-manager")
        pki.sign("scheduler", "/CN=system:kube-scheduler")
        pki.sign("proxy", "/CN=system:kube-proxy")
        address = plan.CONTROL_PLANE[4]
        own = (f"IP:{address}", "IP:127.0.0.1", f"IP:{plan.API_SERVICE[4]}", "DNS:kubernetes.default.svc")
        pki.sign("apiserver", "/CN=kube-apiserver", *own)
        super().__init__("cp", plan.CONTROL_PLANE, fabric, routes)

    def serve_first(self) -> None:
        """Start etcd and the API server, without waiting."""
        self.serve(
            ETCD,
            [
                str(self._programs / "etcd"),
                "--data-dir=/var/lib/etcd",
                "--unsafe-no-fsync",
                "--listen-peer-urls=http://127.0.0.1:2380",
                f"--listen-client-urls={_ETCD}",
                f"--advertise-client-urls={_ETCD}",
            ],
        )
        path = self._pki.path
        policy = self.folder / "audit.json"
        policy.write_text(json.dumps(_AUDIT), encoding="ascii")
        self.serve(
            API_SERVER,
            [
                str(self._programs / "kube-apiserver"),
                f"--etcd-servers={_ETCD}",
                f"--advertise-address={plan.CONTROL_PLANE[4]}",
                "--allow-privileged=true",
                f"--service-cluster-ip-range={_SERVICES}",
                "--authorization-mode=Node,RBAC",
                f"--client-ca-file={path('ca.crt')}",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-key-file={path('sa.pub')}",
                f"--service-account-signing-key-file={path('sa.key')}",
                f"--tls-cert-file={path('apiserver.crt')}",
                f"--tls-private-key-file={path('apiserver.key')}",
                f"--kubelet-client-certificate={path('admin.crt')}",
                f"--kubelet-client-key={path('admin.key')}",
                f"--audit-policy-file={policy}",
                f"--audit-log-path={AUDIT_LOG}",
                # else it resolves nodes' names
                "--kubelet-preferred-address-types=InternalIP",
            ],
        )

    def serve_rest(self, patience: float = 240.0) -> None:
        """Wait for the API server, then start the others: earlier, they would end for lack of RBAC."""
        self.wait_api(patience)
        self.serve(
            CONTROLLER_MANAGER,
            [
                str(self._programs / "kube-controller-manager"),
                f"--kubeconfig={self._pki.path('controller-manager.kubeconfig')}",
                "--leader-elect=false",
                "--use-service-account-credentials=true",
                f"--service-account-private-key-file={self._pki.path('sa.key')}",
                f"--root-ca-file={self._pki.path('ca.crt')}",
                "--allocate-node-cidrs=true",
                f"--cluster-cidr={','.join(plan.PODS.values())}",
                f"--service-cluster-ip-range={_SERVICES}",
                # a node that is gone is noticed soon: the tests of reboots wait for it
                "--node-monitor-grace-period=10s",
                "--node-monitor-period=1s",
            ],
        )
        self.serve(
            SCHEDULER,
            [
                str(self._programs / "kube-scheduler"),
                f"--kubeconfig={self._pki.path('scheduler.kubeconfig')}",
                "--leader-elect=false",
            ],
        )

    def wait_api(self, patience: float = 120.0) -> None:
        """Wait until the API server says that it is ready."""
        until(
            lambda: self.kubectl("get", "--raw", "/readyz", check=False).returncode == 0,
            patience,
            lambda: f"the API server is not ready: {self.read_log(API_SERVER)}",
        )

    def kubectl(
        self, *arguments: str, text: str | None = None, check: bool = True, timeout: float = 300.0
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl as cluster administrator."""
        command = [str(self._programs / "kubectl"), f"--kubeconfig={self._pki.path('admin.kubeconfig')}"]
        return self.run([*command, *arguments], text, check=check, timeout=timeout)


def manifest_text(manifest: object) -> str:
    """Objects as what `kubectl apply -f -` reads: one, or a list of them."""
    items = manifest if isinstance(manifest, list) else [manifest]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
