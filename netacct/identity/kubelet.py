"""The source `kubelet`: the pods of this node from the kubelet's HTTPS port, `GET /pods`.

The answer is a v1.PodList (kubernetes, pkg/kubelet/server/server.go, getPods): no selectors, no watch, no pages, so it
is polled. Whoever asks needs `get` on `nodes/pods`, which kubelets know since 1.33 (KEP-2862). Older ones want
`nodes/proxy` for it, which is as much as root on the node, and which nobody should be given for this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from netacct import plainfile
from netacct.errors import NetacctError
from netacct.identity import https, kube_pod
from netacct.identity.https import Answer, EndedError, Exchange, Server
from netacct.identity.json_list import JsonList
from netacct.identity.node import AUTO, node_name
from netacct.identity.polling import INTERVAL, AbsentError, Poller
from netacct.identity.source import Health, SourceEvent
from netacct.model import Observation

SOURCE = "kubelet"

PORT = 10250

OWN_CERTIFICATES = (
    "/var/lib/kubelet/pki/kubelet-server-current.pem",
    "/var/lib/kubelet/pki/kubelet.crt",
    "/var/lib/k0s/kubelet/pki/kubelet-server-current.pem",
    "/var/lib/k0s/kubelet/pki/kubelet.crt",
    "/var/lib/rancher/k3s/agent/serving-kubelet.crt",
    "/var/lib/rancher/rke2/agent/serving-kubelet.crt",
)
"""Where a kubelet keeps what it serves: signed by the cluster (serverTLSBootstrap), else made by itself."""

SECONDS = 20.0
"""By which the whole answer must be there."""

SIZE_LIMIT = 64 << 20
"""Bytes of an answer; 110 pods have 0.5 to 2 MB."""

_TOKEN_SIZE = 1 << 16

_GRANT = (
    "grant `get` on `nodes/pods`, which kubelets know since 1.33; with an older one use the sources cri and cni "
    "instead; never grant nodes/proxy, which is root on the node"
)


@dataclass(frozen=True, slots=True)
class Access:
    """How to ask the kubelet. Files are read anew at each question, because they rotate.

    Args:
        url: `https://HOST[:PORT]`; `auto` is this machine's port 10250.
        ca_file: who signed its certificate (PEM), which then must be for the host of `url`, or, where that is `auto`,
            for the node's name. `auto`: the one certificate that the kubelet keeps in its own directory, for any name.
        certificate_file: the client's certificate (PEM), which may hold the key as well.
        key_file: its key; "" where `certificate_file` holds it.
        token_file: a bearer token, as an alternative; costs the API server a TokenReview every two minutes.
        node: the node's name in Kubernetes, or `auto`.
    """

    url: str = AUTO
    ca_file: str = AUTO
    certificate_file: str = ""
    key_file: str = ""
    token_file: str = ""
    node: str = AUTO

    def server(self) -> Server:
        """Whom to ask, with the certificates of now. Raises NetacctError where a file cannot be used."""
        parts = urlsplit("" if self.url == AUTO else self.url)
        address, port = parts.hostname or "127.0.0.1", parts.port or PORT
        own = next(iter(filter(_exists, OWN_CERTIFICATES)), "") if self.ca_file == AUTO else ""
        if self.ca_file == AUTO and not own:
            raise NetacctError(f"{OWN_CERTIFICATES[0]} and the like are not there: set identity.kubelet.ca_file")
        context = https.trust(own or self.ca_file, self.certificate_file, self.key_file)
        if own:
            return https.pinned(Server(address, port, "", context), https.first_certificate(own))
        return Server(address, port, parts.hostname or node_name(self.node), context)

    def headers(self) -> dict[str, str]:
        """With the token of now. Raises NetacctError where its file cannot be read."""
        headers = {"Accept": "application/json", "User-Agent": "netacct"}
        if self.token_file:
            try:
                token = (plainfile.read(self.token_file, _TOKEN_SIZE) or b"").decode("ascii").strip()
            except (OSError, ValueError) as error:
                raise NetacctError(f"{self.token_file} holds no token: {error}") from error
            if not token or not token.isprintable():
                raise NetacctError(f"{self.token_file} holds no token: one line of text is expected")
            headers["Authorization"] = f"Bearer {token}"
        return headers


class KubeletSource:
    """Asks the kubelet for its pods every so often.

    Args:
        access: how.
        needed: False while a better source is up.
        interval: seconds between two questions.
        labels: the keys of the pod labels to keep.
        networks: the secondary networks whose addresses count (see `multus`).
    """

    name = SOURCE

    def __init__(
        self,
        access: Access,
        needed: Callable[[], bool] = lambda: True,
        interval: float = INTERVAL,
        labels: Collection[str] = (),
        networks: Collection[str] = (),
    ) -> None:
        self._access, self._labels, self._networks = access, frozenset(labels), frozenset(networks)
        self._exchange = Exchange()
        self._poller = Poller(self.name, self._ask, needed, interval)

    def start(self, emit: Callable[[SourceEvent], None]) -> None:
        """Begin to ask, in a thread."""
        self._poller.start(emit)

    def stop(self) -> None:
        """End the thread, also while the kubelet is slow to answer. Idempotent; a stopped source starts no more."""
        self._exchange.end()
        self._poller.stop()

    def hurry(self) -> None:
        """Somebody's bytes have no owner: ask soon. From any thread."""
        self._poller.hurry()

    def healthy(self) -> Health:
        """Whether the last question was answered, and how long ago the last answer came."""
        return self._poller.healthy()

    def _ask(self, at: float) -> tuple[Observation, ...]:
        if not (self._access.certificate_file or self._access.token_file):
            raise AbsentError("nobody gave it a certificate or a token for the kubelet (identity.kubelet)")
        deadline = time.monotonic() + SECONDS
        server = self._access.server()
        try:
            answer = self._exchange.get(server, "/pods", self._access.headers(), SECONDS)
            if answer.status != 200:
                raise NetacctError(_refusal(server, answer))
            listed = JsonList(answer.chunks(deadline, SIZE_LIMIT))
            try:
                return kube_pod.observations(self.name, list(_pods(listed, self._networks)), at, self._labels)
            except ValueError as error:
                raise NetacctError(f"what {server} answers {error}") from error
        except EndedError as error:
            raise AbsentError("stopped") from error
        finally:
            self._exchange.close()


def _pods(listed: JsonList, networks: Collection[str]) -> Iterator[kube_pod.KubePod]:
    for item in listed.items():
        pod = kube_pod.from_json(item, networks) if isinstance(item, dict) else None
        if pod is not None:
            yield pod


def _refusal(server: Server, answer: Answer) -> str:
    """What a status other than 200 means for who runs this."""
    said = f"{server} answers {answer.status}: {answer.text()}"
    if answer.status == 401:
        return f"{said}; it does not know who asks: the certificate or token is not, or no longer, one of this cluster"
    if answer.status == 403:
        return f"{said}; {_GRANT}"
    return said


def _exists(path: str) -> bool:
    return Path(path).exists()
