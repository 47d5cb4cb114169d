"""Translates between the enums of messages and the words that stand for them in Python."""

from __future__ import annotations

import re
from typing import Generic, TypeVar, cast

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from millrace.core.errors import MillraceError

E = TypeVar("E", bound=int)
K = TypeVar("K")
V = TypeVar("V")


class MessageError(MillraceError):
    """A peer sent an invalid message. The error names the field, the value and the range."""


class EnumWords(Generic[E]):
    """The words of one enum in one field: `ROLE_KVP` is "kvp".

    `number` maps words to numbers, `word` maps numbers to words. Both raise MessageError, which
    names the `field` and its value, for a value that the enum lacks. The word of the enum's zero,
    UNSPECIFIED, is `unset`; with None the field must be specified.
    """

    def __init__(self, kind: type[E], field: str, *, unset: str | None = None) -> None:
        wrapper = cast(EnumTypeWrapper, kind)
        prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", wrapper.DESCRIPTOR.name).upper() + "_"
        words = {
            name.removeprefix(prefix).lower(): number for name, number in wrapper.items() if number
        }
        known = f"{field} is {{!r}}; it must be {' or '.join(words)}"
        if unset is not None:
            words[unset] = 0
        self.number: dict[str, E] = _Known(cast("dict[str, E]", words), known)
        self.word: dict[int, str] = _Known({number: word for word, number in words.items()}, known)


class _Known(dict[K, V]):
    """Raises MessageError for a key that it lacks."""

    def __init__(self, items: dict[K, V], known: str) -> None:
        super().__init__(items)
        self._known = known

    def __missing__(self, key: K) -> V:
        raise MessageError(self._known.format(key))
