"""Derives the translation between a dataclass or named tuple and a message from their fields.

`derive` compiles one encoder and one decoder per pair, as `dataclasses` compiles `__init__`: the
result is as fast as the same code written by hand. Fields are matched by name.

| Python | message |
|---|---|
| number, str, bool, bytes | the same |
| dataclass, named tuple | message, derived in turn |
| `tuple[A, B]` | message with two fields, in order |
| `tuple[T, ...]`, `Sequence[T]` | repeated; inside another: a message with one repeated field |
| `Mapping[K, V]` | map |
| str | enum (`EnumWords`); an unspecified one is "" where that is the default, else refused |
| `T or None` | absent, or the zero of a field without presence |
| a default | absent, where the field has presence |
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, Generic, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from millrace.wire.codec.enums import EnumWords

D = TypeVar("D")
M = TypeVar("M", bound=Message)
V = TypeVar("V")
W = TypeVar("W")


@dataclasses.dataclass(frozen=True, slots=True)
class Codec(Generic[D, W]):
    """Encodes values of `kind` as messages (or an enum's numbers), and decodes them.

    Both raise MessageError for a value that an enum lacks.
    """

    kind: type[D]
    encode: Callable[[D], W]
    decode: Callable[[W], D]


class Oneof(Generic[V, M]):
    """Encodes values as the field of `message`'s oneof `kind` that carries their class."""

    def __init__(self, message: type[M], codecs: Mapping[str, Codec[Any, Any]]) -> None:
        self._message = message
        self._by_name = {name: codec.decode for name, codec in codecs.items()}
        self._by_kind = {codec.kind: (name, codec.encode) for name, codec in codecs.items()}

    def name(self, value: V) -> str:
        """Returns the name of the field that carries the value."""
        return self._by_kind[type(value)][0]

    def encode(self, value: V) -> M:
        name, encode = self._by_kind[type(value)]
        return self._message(**{name: encode(value)})

    def decode(self, message: M) -> V | None:
        """Decodes the field that is set; None when it is none of the known fields."""
        name = message.WhichOneof("kind")
        if name not in self._by_name:
            return None
        return cast(V, self._by_name[name](getattr(message, name)))


def derive(
    kind: type[D],
    message: type[M],
    *,
    absent: Mapping[str, object] | None = None,
    **special: Codec[Any, Any],
) -> Codec[D, M]:
    """Derives the codec of a pair.

    `absent` has the fields that the message lacks, with the values that they are decoded as.
    `special` has codecs of fields, or of the elements of repeated fields, that follow other rules.
    Raises TypeError when a side has a field that the other side lacks.
    """
    hints, defaults = _members(kind)
    given = dict(absent or {})
    fields: dict[str, Any] = {field.name: field for field in message.DESCRIPTOR.fields}
    if unmatched := (hints.keys() - given.keys()) ^ fields.keys():
        raise TypeError(f"{kind.__name__} and {message.__name__} differ in {sorted(unmatched)}")
    names: dict[str, object] = {"Kind": kind, "Message": message}
    encoded, decoded = [], []
    for name, field in fields.items():
        default = defaults.get(name)
        parts = _Field(field, hints[name], default, special.get(name))
        names[f"encode_{name}"], names[f"decode_{name}"] = parts.encode, parts.decode
        names[f"default_{name}"] = default
        encoded.append(f"{name}={parts.encoded()}")
        decoded.append(f"{name}={parts.decoded()}")
    for name, value in given.items():
        names[f"default_{name}"] = value
        decoded.append(f"{name}=default_{name}")
    source = (
        f"def encode(value): return Message({', '.join(encoded)})\n"
        f"def decode(message): return Kind({', '.join(decoded)})"
    )
    compiled = _compiled(source, names)
    return Codec(kind, cast(Any, compiled["encode"]), cast(Any, compiled["decode"]))


def _compiled(source: str, names: dict[str, object]) -> dict[str, object]:
    """Defines functions from source, as `dataclasses` does: no loop over fields per message."""
    exec(source, names)
    return names


def _members(kind: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the types and the defaults of the fields that the constructor takes."""
    hints = get_type_hints(kind)
    if dataclasses.is_dataclass(kind):
        found = [field for field in dataclasses.fields(kind) if field.init]
        defaults = {f.name: f.default for f in found if f.default is not dataclasses.MISSING}
        return {field.name: hints[field.name] for field in found}, defaults
    named: Any = kind  # a named tuple
    return {name: hints[name] for name in named._fields}, named._field_defaults


class _Field:
    """One field: expressions over `value` and `message`, and the functions that they call."""

    def __init__(
        self,
        field: FieldDescriptor,
        hint: Any,  # noqa: ANN401 - any type
        default: object,
        special: Codec[Any, Any] | None,
    ) -> None:
        self._field = field
        arms = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        self._optional = NoneType in arms
        (inner,) = (arm for arm in arms if arm is not NoneType)
        if field.is_repeated:
            inner = get_args(inner)[1 if _is_map(field) else 0]
        found = _translation(_value_field(field), inner, default) if special is None else special
        self.encode = None if found is None else found.encode
        self.decode = None if found is None else found.decode

    def encoded(self) -> str:
        """Returns the expression of the constructor's argument; None leaves a field unset."""
        name, value = self._field.name, f"value.{self._field.name}"
        if self.encode is None:
            return value
        if _is_map(self._field):
            return f"{{key: encode_{name}(one) for key, one in {value}.items()}}"
        if self._field.is_repeated:
            return f"map(encode_{name}, {value})"
        call = f"encode_{name}({value})"
        return f"None if {value} is None else {call}" if self._optional else call

    def decoded(self) -> str:
        name, value = self._field.name, f"message.{self._field.name}"
        if _is_map(self._field):
            call = "one" if self.decode is None else f"decode_{name}(one)"
            return f"{{key: {call} for key, one in {value}.items()}}"
        if self._field.is_repeated:
            return (
                f"tuple({value})" if self.decode is None else f"tuple(map(decode_{name}, {value}))"
            )
        call = value if self.decode is None else f"decode_{name}({value})"
        if not self._field.has_presence:
            return f"{call} or None" if self._optional else call
        if self._optional or self._field.message_type is None:
            return f"{call} if message.HasField({name!r}) else default_{name}"
        return call


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _value_field(field: FieldDescriptor) -> FieldDescriptor:
    if field.message_type is None or not _is_map(field):
        return field
    return field.message_type.fields_by_name["value"]


def _translation(
    field: FieldDescriptor,
    hint: Any,  # noqa: ANN401 - any type
    default: object,
) -> Codec[Any, Any] | None:
    """Returns the codec of a single value; None where Python and message have the same value."""
    if field.enum_type is not None:
        unset = "" if default == "" else None
        words: EnumWords[int] = EnumWords(
            cast(Any, EnumTypeWrapper(field.enum_type)), field.name, unset=unset
        )
        return Codec(str, words.number.__getitem__, cast(Any, words.word.__getitem__))
    if field.message_type is None:
        return None
    message: Any = GetMessageClass(field.message_type)
    if get_origin(hint) in (tuple, Sequence):
        return _tuple(field.message_type, message, get_args(hint))
    return _plain(hint, message)


@functools.cache
def _plain(kind: type, message: type[Any]) -> Codec[Any, Any]:
    return derive(kind, message)


def _tuple(descriptor: Descriptor, message: type[Any], hints: tuple[Any, ...]) -> Codec[Any, Any]:
    """Derives the codec of a tuple: of the fields in order, or of the only, repeated, field."""
    names = [field.name for field in descriptor.fields]
    if not descriptor.fields[0].is_repeated:
        fields = ", ".join(f"{name}={name}" for name in names)
        source = f"def encode(value): {', '.join(names)} = value; return Message({fields})"
        encode = _compiled(source, {"Message": message})["encode"]
        return Codec(tuple, cast(Any, encode), cast(Any, attrgetter(*names)))
    (name,) = names
    element = _translation(descriptor.fields[0], hints[0], None)
    if element is None:
        return Codec(
            tuple, lambda value: message(**{name: value}), lambda m: tuple(getattr(m, name))
        )

    def encode_all(value: Iterable[object]) -> Any:  # noqa: ANN401 - a message
        return message(**{name: map(element.encode, value)})

    return Codec(tuple, encode_all, lambda m: tuple(map(element.decode, getattr(m, name))))
