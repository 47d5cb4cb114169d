"""Protobuf messages with every field set, for tests of codecs."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from millrace.wire.codec.transfer import layout_message
from support.kv_nodes import layout

M = TypeVar("M", bound=Message)

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32,
    FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
}


def filled(kind: type[M], *, unset: Collection[str] = (), oneof: str = "") -> M:
    """A message whose fields, and those of all messages within, have values of their own.

    Numbers ascend in the order of the fields. Repeated fields get two entries. `unset` names
    fields (`Message.field`) that stay empty; of a oneof the field `oneof` is set.
    """
    message = kind()
    _fill(message, itertools.count(2), frozenset(unset), oneof)
    return message


def _fill(message: Any, numbers: itertools.count[int], unset: frozenset[str], oneof: str) -> None:
    descriptor: Descriptor = message.DESCRIPTOR
    if descriptor.name == "KvLayout":  # checked when it is read
        message.CopyFrom(layout_message(layout(layers=2, layer_start=1, model_layers=4)))
        message.parts = 2
        message.head_start, message.head_count = 2, 2
        return
    for field in descriptor.fields:
        if f"{descriptor.name}.{field.name}" in unset:
            continue
        group = field.containing_oneof
        if group is not None and group.name != f"_{field.name}" and field.name != oneof:
            continue
        target = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _fill_map(target, field.message_type, numbers, unset)
        elif field.is_repeated:
            for _ in range(2):
                if field.message_type is None:
                    target.append(_value(field, numbers))
                else:
                    _fill(target.add(), numbers, unset, oneof)
        elif field.message_type is not None:
            target.SetInParent()
            _fill(target, numbers, unset, oneof)
        else:
            setattr(message, field.name, _value(field, numbers))


def _fill_map(
    target: Any, entry: Descriptor, numbers: itertools.count[int], unset: frozenset[str]
) -> None:
    key, value = entry.fields
    if value.message_type is None:
        target[_value(key, numbers)] = _value(value, numbers)
    else:
        for known in (1, next(numbers)):
            _fill(target[known], numbers, unset, "")


def _value(field: FieldDescriptor, numbers: itertools.count[int]) -> Any:
    number = next(numbers)
    if field.cpp_type in _INTEGERS:
        return number
    if field.enum_type is not None:
        _, *known = field.enum_type.values
        return known[number % len(known)].number
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return True
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return f"{field.name} {number}".encode()
        return f"{field.name} {number}"
    return number + 0.5  # exact as float32
