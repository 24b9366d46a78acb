"""The messages of Chakra's execution traces, by the field numbers that the format has (MLCommons, schema of version 0.0.4).

A file is a GlobalMetadata and then Nodes, each after its length as a varint. Only the fields that are used here are declared;
protobuf keeps the others when it reads them. Attributes hold one value of a oneof.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from autosac.errors import UsageError

VERSION = "0.0.4"
METADATA, MEMORY_LOAD, MEMORY_STORE, COMPUTE, SEND, RECV, COLLECTIVE = range(1, 8)
NODE_TYPES = {
    METADATA: "metadata",
    MEMORY_LOAD: "memory load",
    MEMORY_STORE: "memory store",
    COMPUTE: "compute",
    SEND: "send",
    RECV: "receive",
    COLLECTIVE: "collective",
}
COLLECTIVES = {"all_reduce": 0, "all_gather": 2, "broadcast": 5, "all_to_all": 6, "reduce_scatter": 7, "barrier": 9}

_PACKAGE = "ChakraProtoMsg"
_REPEATED = "*"
_FIELDS: dict[str, tuple[tuple[str, int, str], ...]] = {
    "BoolList": (("values", 1, "bool*"),),
    "AttributeProto": (
        ("name", 1, "string"),
        ("double_val", 3, "double"),
        ("float_val", 5, "float"),
        ("int32_val", 7, "int32"),
        ("int64_val", 9, "int64"),
        ("uint32_val", 11, "uint32"),
        ("uint64_val", 13, "uint64"),
        ("bool_val", 27, "bool"),
        ("bool_list", 28, "BoolList"),
        ("string_val", 29, "string"),
    ),
    "GlobalMetadata": (("version", 1, "string"), ("attr", 2, "AttributeProto*")),
    "IOInfo": (("values", 1, "string"), ("shapes", 2, "string"), ("types", 3, "string")),
    "Node": (
        ("id", 1, "uint64"),
        ("name", 2, "string"),
        ("type", 3, "int32"),  # on the wire an enumeration is an int32
        ("ctrl_deps", 4, "uint64*"),
        ("data_deps", 5, "uint64*"),
        ("start_time_micros", 6, "uint64"),
        ("duration_micros", 7, "uint64"),
        ("inputs", 8, "IOInfo"),
        ("outputs", 9, "IOInfo"),
        ("attr", 10, "AttributeProto*"),
    ),
}


class Messages(NamedTuple):
    """The classes of the messages."""

    GlobalMetadata: Any
    Node: Any
    AttributeProto: Any
    IOInfo: Any


@cache
def messages() -> Messages:
    """The classes. UsageError if protobuf is not installed."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError as e:
        raise UsageError("Chakra's traces need protobuf: pip install autosac[chakra]") from e
    proto: Any = descriptor_pb2
    file = proto.FileDescriptorProto(name="et_def.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        if name == "AttributeProto":
            message.oneof_decl.add(name="value")
        for field, number, kind in fields:
            _declare(proto.FieldDescriptorProto, message, field, number, kind)
    pool: Any = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = (pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in Messages._fields)
    return Messages(*map(message_factory.GetMessageClass, found))


def _declare(proto: Any, message: Any, name: str, number: int, kind: str) -> None:
    repeated, kind = kind.endswith(_REPEATED), kind.rstrip(_REPEATED)
    field = message.field.add(name=name, number=number)
    field.label = proto.LABEL_REPEATED if repeated else proto.LABEL_OPTIONAL
    if kind in _FIELDS:
        field.type, field.type_name = proto.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    else:
        field.type = getattr(proto, f"TYPE_{kind.upper()}")
    if message.name == "AttributeProto" and name != "name":
        field.oneof_index = 0


def attribute(name: str, value: bool | int | float | str, kind: str = "") -> Any:
    """An attribute; `kind` (such as "uint64") in place of what its type suggests: bool, int64, double, string."""
    kind = kind or {bool: "bool", int: "int64", float: "double", str: "string"}[type(value)]
    return messages().AttributeProto(name=name, **{f"{kind}_val": value})


def attributes(message: Any) -> dict[str, Any]:
    """The attributes of a message by name; lists, and what is not known here, are left out."""
    found: dict[str, Any] = {}
    for each in message.attr:
        kind = each.WhichOneof("value")
        if kind is not None and kind.endswith("_val"):
            found[each.name] = getattr(each, kind)
    return found


def packed(message: Any) -> bytes:
    """The message after its length."""
    from google.protobuf import proto

    buffer = io.BytesIO()
    proto.serialize_length_prefixed(message, buffer)
    return buffer.getvalue()


def unpacked(content: bytes) -> Iterator[Any]:
    """The messages of a file, the metadata first. ValueError if it is damaged or cut off."""
    from google.protobuf import proto
    from google.protobuf.message import DecodeError

    kinds, buffer = messages(), io.BytesIO(content)
    kind = kinds.GlobalMetadata
    try:
        while buffer.tell() < len(content):
            message = proto.parse_length_prefixed(kind, buffer)
            if message is None:
                raise ValueError("it is cut off")
            yield message
            kind = kinds.Node
    except DecodeError as e:
        raise ValueError(f"it does not hold a {kind.DESCRIPTOR.name}: {e}") from e
