"""How to reach the API server of Kubernetes, and as whom: what the kubernetes package makes of a kubeconfig.

Its loader knows all that a kubeconfig may say (files, inline data, exec plugins, OIDC), and the files of a pod's own
ServiceAccount. The requests are ours (https.py): its clients cannot be interrupted, and decode objects at 67 kB a pod.
Importing it costs 33 MB, so that is done when the first request is made.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from netacct.errors import NetacctError
from netacct.identity import https
from netacct.identity.apart import Apart
from netacct.identity.https import Answer, EndedError, Exchange, Server

IN_CLUSTER = "auto"
"""Instead of a path: the ServiceAccount of the pod that this runs in."""

FRESH_SECONDS = 60.0
"""Credentials are loaded again after so long: tokens and certificates rotate, and exec plugins cost a process."""

LOAD_SECONDS = 30.0
"""So long may that take: an exec plugin asks somebody, too."""


class _Loaded(NamedTuple):
    at: float
    server: Server
    prefix: str
    token: str


class KubeApi:
    """One API server, for one thread at a time.

    Args:
        kubeconfig: path of one, or `auto`.
    """

    def __init__(self, kubeconfig: str = IN_CLUSTER) -> None:
        self._kubeconfig = kubeconfig
        self._loaded: _Loaded | None = None
        self._loading: Apart[_Loaded] | None = None

    def get(self, exchange: Exchange, target: str, seconds: float) -> Answer:
        """Ask for `target` (path and query), and return when the answer's head is there, which may be a refusal.

        Args:
            exchange: what the request is made by, and can be ended by.
            target: as `/api/v1/pods?limit=1`.
            seconds: how long to wait for the head; loading credentials before it is not part of it.

        Raises:
            NetacctError: the kubeconfig cannot be used.
            UnreachableError: no head came.
            EndedError: the exchange was ended.
        """
        loaded = self._loaded
        if loaded is None or time.monotonic() - loaded.at > FRESH_SECONDS:
            loaded = self._loaded = self._load(exchange)
        headers = {"Accept": "application/json", "User-Agent": "netacct"}
        if loaded.token:
            headers["Authorization"] = loaded.token
        return exchange.get(loaded.server, loaded.prefix + target, headers, seconds)

    def forget(self) -> None:
        """Load the credentials anew before the next request: these were refused."""
        self._loaded = None

    def _load(self, exchange: Exchange) -> _Loaded:
        """The credentials of now. Raises NetacctError; where they take too long, they are waited for the next time."""
        loading = self._loading = self._loading or Apart(partial(_load, self._kubeconfig), "kubeconfig")
        try:
            loaded = loading.wait(LOAD_SECONDS, exchange.has_ended)
        except TimeoutError:
            raise NetacctError(
                f"{self._kubeconfig} gives no credentials within {LOAD_SECONDS:g} s: what does it run?"
            ) from None
        except InterruptedError:
            raise EndedError("ended") from None
        except Exception:
            self._loading = None
            raise
        self._loading = None
        return loaded


def _load(kubeconfig: str) -> _Loaded:
    try:
        found = _configuration(kubeconfig)
        token = str(found.get_api_key_with_prefix("BearerToken") or "").strip()
    except NetacctError:
        raise
    except Exception as error:  # the package has no type of its own for most of what a kubeconfig can have wrong
        where = "the ServiceAccount's files" if kubeconfig == IN_CLUSTER else kubeconfig
        why = str(error) or type(error).__name__
        raise NetacctError(f"{where} cannot be used to reach the API server: {why}") from error
    try:
        parts = urlsplit(str(found.host))
        port = parts.port
    except ValueError as error:
        raise NetacctError(f"{kubeconfig} names the server {found.host}: {error}") from error
    if not found.verify_ssl:
        raise NetacctError(
            f"{kubeconfig} turns off the check of the API server's certificate: netacct does not do that"
        )
    if parts.scheme == "https":
        context = https.trust(found.ssl_ca_cert or "", found.cert_file or "", found.key_file or "")
        server = Server(parts.hostname or "", port or 443, found.tls_server_name or parts.hostname or "", context)
    elif token or found.cert_file:
        raise NetacctError(f"{kubeconfig} would send credentials without TLS, to {found.host}")
    else:
        server = Server(parts.hostname or "", port or 80)
    return _Loaded(time.monotonic(), server, parts.path.rstrip("/"), token)


def _configuration(kubeconfig: str) -> Any:
    """The package's own Configuration, filled in by its loaders."""
    from kubernetes.client import Configuration  # noqa: PLC0415 -- 33 MB: only where an API server is asked
    from kubernetes.config import load_incluster_config, load_kube_config  # noqa: PLC0415 -- as above

    found = Configuration(proxy="", no_proxy="")  # else it takes one from the environment
    if kubeconfig == IN_CLUSTER:
        load_incluster_config(client_configuration=found)
    else:
        load_kube_config(config_file=kubeconfig, client_configuration=found, persist_config=False)
    if found.proxy:
        raise NetacctError(f"{kubeconfig} names a proxy: netacct asks the API server itself or not at all")
    return found
