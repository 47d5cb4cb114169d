"""Every decoder of the wire on any message that protobuf accepts: a value, or a MillraceError."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.core.errors import MillraceError
from millrace.transfer.kvp.messages import KvpMessage
from millrace.transfer.ring.messages import RingMessage
from millrace.transfer.transport.peers import PeerMetadata
from millrace.wire import codec
from millrace.wire.codec.derive import Codec, Oneof
from millrace.wire.pb import common_pb2, decode_pb2, gang_pb2, kvp_pb2, scheduler_pb2, transfer_pb2

FILES = (common_pb2, decode_pb2, gang_pb2, kvp_pb2, scheduler_pb2, transfer_pb2)
MESSAGES = {
    name: GetMessageClass(descriptor)
    for file in FILES
    for name, descriptor in file.DESCRIPTOR.message_types_by_name.items()
}


def decoders() -> Iterator[Any]:
    """Yields (name, message's class, decode) of every public codec of a message."""
    for module_info in pkgutil.iter_modules(codec.__path__):
        module = importlib.import_module(f"{codec.__name__}.{module_info.name}")
        for name, value in vars(module).items():
            if isinstance(value, Codec | Oneof) and not name.startswith("_"):
                made = _message_of(value)
                if made is not None:
                    yield pytest.param(made, value.decode, id=f"{module_info.name}.{name}")


def _message_of(value: Any) -> type[Message] | None:
    """Returns the class of the messages that a codec decodes: it says so when it gets another."""
    for made in MESSAGES.values():
        try:
            value.decode(made())
        except (AttributeError, ValueError, TypeError):
            continue
        except MillraceError:
            return made
        return made
    return None


_SCALARS = {
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(0, 20),
}


@st.composite
def filled(draw: st.DrawFn, descriptor: Descriptor, depth: int = 3) -> Message:
    """Draws a message of any fields, with any values that their types can hold."""
    made = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if not draw(st.booleans()):
            continue
        count = draw(st.integers(0, 3)) if field.is_repeated else 1
        for _ in range(count):
            _add(draw, made, field, depth)
    return made


def _add(draw: st.DrawFn, made: Message, field: FieldDescriptor, depth: int) -> None:
    holder = getattr(made, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        if value.message_type is None:
            holder[draw(_scalar(key))] = draw(_scalar(value))
        elif depth:
            holder[draw(_scalar(key))].CopyFrom(draw(filled(value.message_type, depth - 1)))
    elif field.message_type is not None:
        if depth:
            value = draw(filled(field.message_type, depth - 1))
            holder.append(value) if field.is_repeated else holder.CopyFrom(value)
    elif field.is_repeated:
        holder.append(draw(_scalar(field)))
    else:
        setattr(made, field.name, draw(_scalar(field)))


def _scalar(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=12)
    if field.type == FieldDescriptor.TYPE_STRING:
        return st.text(max_size=6)
    return _SCALARS[field.cpp_type]


DECODERS = list(decoders())


def test_the_messages_of_peers_are_among_them() -> None:
    ids = {one.id for one in DECODERS}
    assert ids >= {"transfer.HANDSHAKE", "transfer.HISTORY", "group.JOIN", "kvp.HOLD"}
    assert ids >= {"instance.REPORTS", "instance.COMMANDS", "request_spec.SPEC"}


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@pytest.mark.parametrize(("message", "decode"), DECODERS)
@given(data=st.data())
def test_any_message_is_decoded_or_refused(message, decode, data) -> None:
    made = data.draw(filled(message.DESCRIPTOR))
    try:
        decode(made)
    except MillraceError as error:
        assert str(error)


@pytest.mark.parametrize("decode", [RingMessage.decode, KvpMessage.decode, PeerMetadata.decode])
@given(payload=st.binary(max_size=80), channel=st.integers(0, 8), kind=st.integers(0, 8))
def test_any_notification_is_decoded_or_refused(decode, payload, channel, kind) -> None:
    for one in (payload, bytes([channel, kind]) + payload):
        try:
            decode(one)
        except MillraceError as error:
            assert str(error)
