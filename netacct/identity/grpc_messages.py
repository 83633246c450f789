"""The protobuf messages that netacct reads and writes, from a table of field numbers: no generated code, no compiler.

Each table has the fields that are used here and no others: protobuf skips what it has no field for, which is nearly
everything that a pod consists of (https://protobuf.dev/programming-guides/proto3/#unknowns). Enumerations are numbers
on the wire, and so they are here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto
    from google.protobuf.message import Message

Field: TypeAlias = tuple[str, int, str]
"""Name, number, and type: a scalar of protobuf, `labels` for any map<string, string>, or a message of the same table.

A `*` before it says that the field is repeated.
"""

Table: TypeAlias = Mapping[str, tuple[Field, ...]]
"""The fields of each message."""

PODS_API: Table = {
    # kubernetes/kubelet, pkg/apis/pods/v1alpha1/api.proto. There `pod` is the bytes of a Pod, which is the same on the
    # wire as a Pod.
    "WatchPodsRequest": (),
    "WatchPodsEvent": (("type", 1, "int32"), ("pod", 2, "Pod")),
    # kubernetes/api, core/v1/generated.proto
    "Pod": (("metadata", 1, "ObjectMeta"), ("spec", 2, "PodSpec"), ("status", 3, "PodStatus")),
    "PodSpec": (("hostNetwork", 11, "bool"),),
    "PodStatus": (("phase", 1, "string"), ("podIP", 6, "string"), ("startTime", 7, "Time"), ("podIPs", 12, "*PodIP")),
    "PodIP": (("ip", 1, "string"),),
    # kubernetes/apimachinery, pkg/apis/meta/v1/generated.proto
    "ObjectMeta": (
        ("name", 1, "string"),
        ("namespace", 3, "string"),
        ("uid", 5, "string"),
        ("creationTimestamp", 8, "Time"),
        ("labels", 11, "labels"),
        ("annotations", 12, "labels"),
        ("ownerReferences", 13, "*OwnerReference"),
    ),
    "OwnerReference": (("kind", 1, "string"), ("name", 3, "string"), ("controller", 6, "bool")),
    "Time": (("seconds", 1, "int64"),),
}
"""What the kubelet's Pods API (KEP-4188) says."""

CRI: Table = {
    # kubernetes/cri-api, pkg/apis/runtime/v1/api.proto
    "ListPodSandboxRequest": (("filter", 1, "PodSandboxFilter"),),
    "PodSandboxFilter": (("state", 2, "PodSandboxStateValue"),),
    "PodSandboxStateValue": (("state", 1, "int32"),),
    "ListPodSandboxResponse": (("items", 1, "*PodSandbox"),),
    "PodSandbox": (
        ("id", 1, "string"),
        ("metadata", 2, "PodSandboxMetadata"),
        ("state", 3, "int32"),
        ("created_at", 4, "int64"),
        ("labels", 5, "labels"),
    ),
    "PodSandboxMetadata": (("name", 1, "string"), ("uid", 2, "string"), ("namespace", 3, "string")),
    "PodSandboxStatusRequest": (("pod_sandbox_id", 1, "string"),),
    "PodSandboxStatusResponse": (("status", 1, "PodSandboxStatus"),),
    "PodSandboxStatus": (
        ("state", 3, "int32"),
        ("network", 5, "PodSandboxNetworkStatus"),
        ("linux", 6, "LinuxPodSandboxStatus"),
    ),
    "PodSandboxNetworkStatus": (("ip", 1, "string"), ("additional_ips", 2, "*PodIP")),
    "PodIP": (("ip", 1, "string"),),
    "LinuxPodSandboxStatus": (("namespaces", 1, "Namespace"),),
    "Namespace": (("options", 2, "NamespaceOption"),),
    "NamespaceOption": (("network", 1, "int32"),),
}
"""What container runtimes say by CRI v1."""

_SCALARS = {"int64": 3, "int32": 5, "bool": 8, "string": 9}
"""FieldDescriptorProto.Type (google/protobuf/descriptor.proto)."""

_MESSAGE, _OPTIONAL, _REPEATED = 11, 1, 3
"""FieldDescriptorProto.Type and Label."""


def classes(table: Table) -> dict[str, type[Message]]:
    """A class for each message of the table. Imports protobuf."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # noqa: PLC0415 -- 3 MB, if needed

    file = descriptor_pb2.FileDescriptorProto(name="netacct.proto", package="netacct", syntax="proto3")
    for name, fields in table.items():
        message = file.message_type.add(name=name)
        for field in fields:
            _add(message, *field)
    pool = descriptor_pool.DescriptorPool()  # of its own: messages of the same names live in others
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"netacct.{name}")) for name in table}


@functools.cache
def pods_api() -> dict[str, type[Any]]:
    """The classes of PODS_API, made once."""
    return classes(PODS_API)


@functools.cache
def cri() -> dict[str, type[Any]]:
    """The classes of CRI, made once."""
    return classes(CRI)


def decode(message: type[Any], data: bytes) -> Any:
    """The message that these bytes encode. Raises ValueError where they encode none."""
    try:
        return message.FromString(data)
    except Exception as error:
        from google.protobuf.message import DecodeError  # noqa: PLC0415 -- as above; and costs more than a pod if asked first

        if isinstance(error, DecodeError):
            raise ValueError(f"no {message.__name__}") from error  # noqa: TRY004 -- no type of Python's is wrong here
        raise


def _add(message: DescriptorProto, name: str, number: int, kind: str) -> FieldDescriptorProto:
    """Add a field to the description of a message."""
    repeated = kind.startswith("*") or kind == "labels"
    kind = kind.removeprefix("*")
    field = message.field.add(name=name, number=number)
    field.label = _REPEATED if repeated else _OPTIONAL  # type: ignore[assignment]  # a number is as good
    if kind in _SCALARS:
        field.type = _SCALARS[kind]  # type: ignore[assignment]  # as above
        return field
    field.type = _MESSAGE  # type: ignore[assignment]  # as above
    field.type_name = kind
    if kind == "labels":  # a map is a repeated message of key and value, called after the field
        field.type_name = f"{name.capitalize()}Entry"
        entry = message.nested_type.add(name=field.type_name)
        entry.options.map_entry = True
        _add(entry, "key", 1, "string")
        _add(entry, "value", 2, "string")
    return field
