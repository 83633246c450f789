"""Reads the files and command lines that name cluster ranges: the edge of `cluster_flannel`, `_cni`, `_kubernetes`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from netacct import plainfile
from netacct.identity import cluster_cni, cluster_flannel, cluster_kubernetes, ranges_cni
from netacct.identity.cluster import Reading, reading
from netacct.identity.cluster_processes import Programs, configuration
from netacct.identity.cni_cache import CONFIGURATION
from netacct.policy import Prefix

SIZE_LIMIT = 1 << 20
"""Bytes of one file; kube-proxy's and the kubelet's have a few thousand."""

KUBELET = "/var/lib/kubelet/config.yaml"
KUBE_PROXY = ("/var/lib/kube-proxy/config.conf", "/var/lib/kube-proxy-config/config")
"""Where kubeadm, kind and EKS keep them; for an agent that cannot see processes, but these files."""

K3S = tuple(f"/etc/rancher/{name}/config.yaml" for name in ("k3s", "rke2"))
K3S_FOLDERS = tuple(f"{path}.d" for path in K3S)
KUBELET_FOLDERS = tuple(f"/var/lib/rancher/{name}/agent/etc/kubelet.conf.d" for name in ("k3s", "rke2"))
MICROK8S = "/var/snap/microk8s/current/args"

Part: TypeAlias = tuple[list[Prefix], list[str]]


class Files:
    """What files and programs say.

    Args:
        providers: those of `flannel`, `cni` and `kubernetes` that are asked for.
        directories: where the container runtime reads its CNI configuration.
        root: a directory that stands for /, for tests.
        proc: where proc(5) is mounted.
    """

    def __init__(
        self,
        providers: Iterable[str],
        directories: Sequence[str] = CONFIGURATION,
        root: str = "",
        proc: str = "/proc",
    ) -> None:
        self._root, self._proc = root, proc
        self._directories = tuple(root + directory for directory in directories)
        self._programs = Programs(proc)
        self._paths: set[str] = set()
        known: dict[str, Callable[[], Iterator[Reading]]] = {
            "flannel": self._flannel,
            "cni": self._cni,
            "kubernetes": self._kubernetes,
        }
        self._kinds = [known[name] for name in providers if name in known]

    def look(self) -> list[Reading]:
        """What they say now, each kind once."""
        self._paths = set()
        return [found for kind in self._kinds for found in kind()]

    @property
    def paths(self) -> frozenset[str]:
        """Every file that the last look asked for, also those that were not there."""
        return frozenset(self._paths)

    def _flannel(self) -> Iterator[Reading]:
        parts = [*self._texts([cluster_flannel.SUBNET_FILE], cluster_flannel.parse_subnet_file)]
        parts += self._texts(cluster_flannel.CONFIGURATION, cluster_flannel.parse_configuration)
        yield reading("flannel", parts)

    def _cni(self) -> Iterator[Reading]:
        paths = [path.removeprefix(self._root) for path in ranges_cni.read(self._directories).files]
        yield reading("CNI configuration", self._texts(paths, cluster_cni.parse))

    def _kubernetes(self) -> Iterator[Reading]:
        programs = self._programs.look()
        for name in cluster_kubernetes.FLAGS:
            parts: list[Part] = []
            for one in programs:
                if one.name == name:
                    where = f"the command line of {name}"
                    parts.append(cluster_kubernetes.parse_flags(name, one.arguments, where))
            parts += self._texts(
                [f"{MICROK8S}/{name}"],
                lambda text, path: cluster_kubernetes.parse_flags(name, text.split(), path),  # noqa: B023 -- used at once
            )
            if name in cluster_kubernetes.MEMBERS:
                parts += self._configurations(name)
            yield reading(name, parts)
        yield reading("k3s", self._documents("k3s", [*K3S, *self._listed(K3S_FOLDERS, ".yaml")]))

    def _configurations(self, name: str) -> Iterator[Part]:
        """What the configuration files of a program say: those that it names, else those in the usual places."""
        named = False
        for one in self._programs.look():
            path = cluster_kubernetes.flags(one.arguments).get("config", "")
            if one.name == name and path:
                named = True
                for place in configuration(one, self._proc, self._root):
                    data = self._bytes(place)
                    if isinstance(data, bytes):
                        yield cluster_kubernetes.parse_configuration(name, data, path)
                        break
        if name == "kubelet":
            yield from self._documents(name, [*([] if named else [KUBELET]), *self._listed(KUBELET_FOLDERS, ".conf")])
        elif not named:
            yield from self._documents(name, KUBE_PROXY)

    def _documents(self, program: str, paths: Iterable[str]) -> Iterator[Part]:
        def parse(text: str, path: str) -> Part:
            return cluster_kubernetes.parse_configuration(program, text.encode(), path)

        return self._texts(paths, parse)

    def _texts(self, paths: Iterable[str], parse: Callable[[str, str], Part]) -> Iterator[Part]:
        """What a parser says of each file that is there."""
        for path in paths:
            data = self._bytes(self._root + path)
            if isinstance(data, bytes):
                yield parse(data.decode("utf-8", "replace"), path)
            elif data:
                yield [], [f"{path} cannot be read: {data}"]

    def _bytes(self, path: str) -> bytes | str:
        """The content of a regular file; or why there is none, "" where the file is missing."""
        self._paths.add(path)
        try:
            data = plainfile.read(path, SIZE_LIMIT)
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except OSError as error:
            return error.strerror or str(error)
        return "it is no regular file" if data is None else data

    def _listed(self, folders: Iterable[str], suffix: str) -> list[str]:
        found: list[Path] = []
        for folder in folders:
            directory = Path(self._root + folder)
            found += sorted(path for path in directory.glob(f"*{suffix}") if directory.is_dir())
        return [str(path).removeprefix(self._root) for path in found]
