"""Kubeconfigs and ServiceAccounts, by the kubernetes package's own loader, against a TLS server."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import eventually as until
from tlslab import OPENSSL, Authority, Server, kubeconfig

from netacct.errors import NetacctError
from netacct.identity import kube_api
from netacct.identity.https import EndedError, Exchange
from netacct.identity.kube_api import KubeApi

USER = {"token": "t1"}
"""Who has a token."""

pytestmark = pytest.mark.skipif(not OPENSSL, reason="the program openssl makes the certificates")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Who signs the API server's certificate and the clients'."""
    return Authority(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def server(authority: Authority) -> Iterator[Server]:
    """An API server that takes tokens."""
    running = Server(lambda _, reply: reply.json({}), authority.issue("apiserver", "IP:127.0.0.1"))
    yield running
    running.close()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Where the kubeconfig is."""
    return tmp_path / "kubeconfig"


def get(api: KubeApi, path: str = "/healthz") -> int:
    """The status of an answer."""
    exchange = Exchange()
    try:
        return api.get(exchange, path, 5).status
    finally:
        exchange.close()


def tokens(server: Server) -> list[str]:
    """The tokens that came."""
    return [request.headers.get("Authorization", "") for request in server.requests]


def refusal(config: Path, server: str, **user: Any) -> str:
    """Why a kubeconfig is not used."""
    with pytest.raises(NetacctError) as error:
        get(KubeApi(kubeconfig(config, server, **user)))
    return str(error.value)


def cluster(authority: Authority, **more: object) -> dict[str, object]:
    """The cluster's part of a kubeconfig."""
    return {"certificate-authority": authority.keys.certificate, **more}


def test_a_token_and_the_path_of_a_proxy(server: Server, authority: Authority, config: Path) -> None:
    """A token is sent to the server that the authority signed, below the path that the kubeconfig's URL has."""
    assert get(KubeApi(kubeconfig(config, f"{server.url}/k8s/", **USER, cluster=cluster(authority)))) == 200

    assert (server.requests[0].path, tokens(server)) == ("/k8s/healthz", ["Bearer t1"])


def test_inline_certificates(authority: Authority, config: Path) -> None:
    """Certificates in the kubeconfig itself are used like those in files."""

    def inline(path: str) -> str:
        return base64.b64encode(Path(path).read_bytes()).decode()

    client = authority.issue("agent")
    user = {"client-certificate-data": inline(client.certificate), "client-key-data": inline(client.key)}
    ca = {"certificate-authority-data": inline(authority.keys.certificate)}
    keys = authority.issue("apiserver", "IP:127.0.0.1")
    picky = Server(lambda _, reply: reply.json({}), keys, authority.keys.certificate)
    try:
        assert get(KubeApi(kubeconfig(config, picky.url, cluster=ca, **user))) == 200
        assert picky.requests[0].client == "agent"
    finally:
        picky.close()


@pytest.mark.parametrize("token", ["secret\nsecret", "secret\N{EURO SIGN}", "secret\0"])
def test_a_token_that_is_none_is_not_shown(server: Server, authority: Authority, config: Path, token: str) -> None:
    """A token that cannot go into a header is not sent, and not in the reason."""
    reason = refusal(config, server.url, token=token, cluster=cluster(authority))

    assert reason == f"{server.url} is not asked: the token is not one line of ASCII"
    assert server.requests == []


def test_another_server_name(authority: Authority, config: Path) -> None:
    """`tls-server-name` is the name that the certificate must have, whatever the address is."""
    named = Server(lambda _, reply: reply.json({}), authority.issue("named", "DNS:kubernetes.default"))
    try:
        good = cluster(authority, **{"tls-server-name": "kubernetes.default"})
        assert get(KubeApi(kubeconfig(config, named.url, cluster=good, **USER))) == 200
        assert "is not trusted" in refusal(config, named.url, cluster=cluster(authority), **USER)
    finally:
        named.close()


def test_a_token_file_that_rotates(
    server: Server, authority: Authority, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token that was refused is read again at once; one that was not, after a minute."""
    token = tmp_path / "token"
    token.write_text("t1\n")
    api = KubeApi(kubeconfig(config, server.url, tokenFile=str(token), cluster=cluster(authority)))
    get(api)
    token.write_text("t2\n")
    get(api)
    api.forget()
    get(api)
    token.write_text("t3\n")
    monkeypatch.setattr(kube_api, "FRESH_SECONDS", -1.0)
    get(api)

    assert tokens(server) == ["Bearer t1", "Bearer t1", "Bearer t2", "Bearer t3"]


def test_an_exec_plugin(server: Server, authority: Authority, config: Path, tmp_path: Path) -> None:
    """A program that prints credentials is run, and not for each request."""
    runs = tmp_path / "runs"
    script = tmp_path / "plugin.py"
    script.write_text(
        f"open({str(runs)!r}, 'a').write('.')\n"
        'print(\'{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential",'
        ' "status": {"token": "from-plugin"}}\')\n'
    )
    plugin = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": sys.executable,
        "args": [str(script)],
        "interactiveMode": "Never",
    }
    api = KubeApi(kubeconfig(config, server.url, exec=plugin, cluster=cluster(authority)))
    get(api)
    get(api)

    assert tokens(server) == ["Bearer from-plugin"] * 2
    assert runs.read_text() == "."


@pytest.fixture
def hanging(server: Server, authority: Authority, config: Path, tmp_path: Path) -> Iterator[KubeApi]:
    """An API server whose kubeconfig runs a program that never ends."""
    pids = tmp_path / "pids"
    args = ["-c", f"import os, time; open({str(pids)!r}, 'a').write(f'{{os.getpid()}} '); time.sleep(600)"]
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": sys.executable, "args": args}
    plugin["interactiveMode"] = "Never"
    yield KubeApi(kubeconfig(config, server.url, exec=plugin, cluster=cluster(authority)))
    until(lambda: _runs(pids))
    assert len(pids.read_text().split()) == 1, "one program is waited for, however often it is asked"
    os.kill(int(pids.read_text()), signal.SIGKILL)


def _runs(pids: Path) -> bool:
    """Whether the program of `hanging` has begun."""
    return pids.exists() and pids.read_text() != ""


def test_a_program_that_gives_no_credentials(hanging: KubeApi, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exec plugin that hangs is trouble with a reason, and no second one is run while it does."""
    monkeypatch.setattr(kube_api, "LOAD_SECONDS", 0.2)

    for _ in range(2):
        with pytest.raises(NetacctError, match=f"{config} gives no credentials within 0.2 s"):
            get(hanging)


def test_the_end_does_not_wait_for_a_program(hanging: KubeApi, tmp_path: Path) -> None:
    """Whoever ends the exchange ends the wait for an exec plugin, too."""
    exchange = Exchange()

    def end() -> None:
        until(lambda: _runs(tmp_path / "pids"))
        exchange.end()

    ending = threading.Thread(target=end)
    ending.start()
    with pytest.raises(EndedError):
        hanging.get(exchange, "/healthz", 600)
    ending.join()


@pytest.mark.parametrize("url", ["https://127.0.0.1:99999", "https://[::1", "https://127.0.0.1:x"])
def test_a_server_that_is_no_url(authority: Authority, config: Path, url: str) -> None:
    """A kubeconfig whose server cannot be one is named."""
    assert str(config) in refusal(config, url, **USER, cluster=cluster(authority))


def test_a_pipe_in_the_place_of_a_kubeconfig(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kubeconfig that cannot be read to its end is trouble like any other."""
    monkeypatch.setattr(kube_api, "LOAD_SECONDS", 0.2)
    os.mkfifo(config)

    with pytest.raises(NetacctError, match=f"{config} gives no credentials"):
        get(KubeApi(str(config)))
    config.open("w").close()


def test_a_service_account(
    server: Server, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` is the ServiceAccount of the pod: address by environment, token and authority by its files."""
    from kubernetes.config import incluster_config  # noqa: PLC0415 -- slow to import, and only here

    token = tmp_path / "token"
    token.write_text("t1")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", authority.keys.certificate)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
    api = KubeApi()
    get(api)
    token.write_text("t2")
    api.forget()
    get(api)

    assert [each.lower() for each in tokens(server)] == ["bearer t1", "bearer t2"]


def test_outside_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` without a ServiceAccount says what is missing."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    with pytest.raises(NetacctError, match=r"the ServiceAccount's files cannot be used .*Service host/port is not set"):
        get(KubeApi())


def test_what_is_refused(server: Server, authority: Authority, config: Path) -> None:
    """Credentials go to nobody unverified, in the clear, or by way of a proxy; each refusal names the file."""
    insecure = refusal(config, server.url, **USER, cluster={"insecure-skip-tls-verify": True})
    clear = refusal(config, "http://127.0.0.1:1", **USER)
    proxy = refusal(config, server.url, **USER, cluster=cluster(authority, **{"proxy-url": "http://127.0.0.1:1"}))

    assert "turns off the check" in insecure
    assert "credentials without TLS" in clear
    assert "names a proxy" in proxy
    assert all(str(config) in reason for reason in (insecure, clear, proxy))
    assert server.requests == []


def test_files_that_are_no_kubeconfig(config: Path) -> None:
    """A file that is missing, or is none, is named."""
    for text in (None, "", "a: [", "- 1\n"):
        if text is not None:
            config.write_text(text)
        with pytest.raises(NetacctError, match=f"{config} cannot be used to reach the API server"):
            get(KubeApi(str(config)))


def test_a_proxy_of_the_environment_is_not_asked(
    server: Server, authority: Authority, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HTTPS_PROXY is for others: the API server of a node is asked directly."""
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")

    assert get(KubeApi(kubeconfig(config, server.url, **USER, cluster=cluster(authority)))) == 200


def test_nobody_loads_the_package_before_it_asks() -> None:
    """All sources can be made without a single module of the kubernetes package."""
    code = """
import sys
from netacct.identity.apiserver import ApiServerSource
from netacct.identity.kubelet import Access, KubeletSource
ApiServerSource("/none"), KubeletSource(Access())
print([name for name in sys.modules if name.split(".")[0] in ("kubernetes", "pydantic", "urllib3")])
"""
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
