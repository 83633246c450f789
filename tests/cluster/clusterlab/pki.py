"""The cluster's certificates and kubeconfigs, by openssl(1); kubernetes.io, "PKI certificates", says who needs what."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from clusterlab import plan

_DAYS = "30"
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc")


class Pki:
    """A certificate authority in a folder, and what it signed: NAME.crt, NAME.key, NAME.kubeconfig."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self._openssl("req", "-x509", *_KEY, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=ca", "-days", _DAYS)
        # the key that signs service accounts' tokens
        self._openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "sa.key")
        self._openssl("ec", "-in", "sa.key", "-pubout", "-out", "sa.pub")

    def sign(self, name: str, subject: str, *alternatives: str) -> None:
        """Make a key and a certificate for clients and servers; alternatives as `IP:…` and `DNS:…`."""
        self._openssl("req", *_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", subject)
        names = ",".join(alternatives) or f"DNS:{name}"
        extensions = self.folder / f"{name}.ext"
        extensions.write_text(
            f"subjectAltName={names}\nextendedKeyUsage=clientAuth,serverAuth\nbasicConstraints=CA:FALSE\n",
            encoding="ascii",
        )
        signed = ("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial")
        self._openssl(*signed, "-days", _DAYS, "-out", f"{name}.crt", "-extfile", str(extensions))
        self._kubeconfig(name)

    def path(self, name: str) -> str:
        """The absolute path of a file, which is the same in every host."""
        return str(self.folder / name)

    def _kubeconfig(self, name: str) -> None:
        server = f"https://{plan.CONTROL_PLANE[4]}:{plan.API_PORT}"
        user = {"client-certificate": self.path(f"{name}.crt"), "client-key": self.path(f"{name}.key")}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": server, "certificate-authority": self.path("ca.crt")}}],
            "users": [{"name": "u", "user": user}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        self.folder.joinpath(f"{name}.kubeconfig").write_text(json.dumps(document), encoding="ascii")

    def _openssl(self, *arguments: str) -> None:
        done = subprocess.run(
            ["openssl", *arguments], cwd=self.folder, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, f"openssl {' '.join(arguments)}: {done.stderr}"
