"""The written form of the events and effects of `Machine.step`.

A recording is JSON, one line per step after a head line, so that it can be read, searched and cut
by hand. Values become plain data here and events are built again; drivers handle the files.

    {"millrace_recording": 3, "scheduler": {...}, "zero_unix_s": 1767225600.0}
    {"now_s": 81.25, "event": ["Submitted", {"request": {...}}], "effects": [["Place", {...}], ...]}
    {"now_s": 81.30, "event": ["Tick", {}], "raised": "IntegrityError: ..."}

The codec follows the dataclasses' fields and needs no change for new ones. A field that has its
default value is left out. A report is written as an event is, with its type's name. Infinite and
undefined floats, which JSON lacks, are written as strings.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import cache
from typing import Any

from millrace.core.config import SchedulerConfig
from millrace.core.errors import ConfigError, MillraceError
from millrace.core.scheduler import events
from millrace.core.scheduler.effects import Effect
from millrace.core.scheduler.reports import Report

#: Raised by one whenever a reader of the last number would misread the present format.
FORMAT = 3


def _by_name(union: Any) -> Mapping[str, type]:  # noqa: ANN401 - a type known at run time
    return {kind.__name__: kind for kind in typing.get_args(union)}


_EVENTS = _by_name(events.Event)
#: Types of fields whose values are written with the names of their types.
_NAMED: Mapping[Any, Mapping[str, type]] = {Report: _by_name(Report)}
_OF_NAMED = frozenset(kind for kinds in _NAMED.values() for kind in kinds.values())
_SCALARS = frozenset({str, int, bool, type(None)})


class RecordingError(MillraceError):
    """A recording can't be written or read: says which file, line and field."""


def head(config: SchedulerConfig, zero_unix_s: float | None = None) -> dict[str, Any]:
    """Returns a recording's first line. The settings are whole: a default may change one day.

    `zero_unix_s`: the Unix time of `now_s` 0; None: the clock is no wall clock.
    """
    section = {f.name: plain(getattr(config, f.name)) for f in dataclasses.fields(config)}
    line = {"millrace_recording": FORMAT, "scheduler": section}
    return line if zero_unix_s is None else {**line, "zero_unix_s": zero_unix_s}


def config_of(line: Mapping[str, Any]) -> SchedulerConfig:
    """Returns the settings in a first line.

    Raises RecordingError for another format or bad settings.
    """
    if (found := line.get("millrace_recording")) is None:
        raise RecordingError("it is no recording: its first line has no millrace_recording")
    if found != FORMAT:
        raise RecordingError(f"millrace_recording is {found!r}; this version reads {FORMAT}")
    try:
        config: SchedulerConfig = built(SchedulerConfig, line["scheduler"], "scheduler")
    except (ConfigError, KeyError) as error:
        raise RecordingError(f"the head's settings: {error}") from error
    return config


def plain_event(event: events.Event) -> list[Any]:
    """Returns the event, with its type's name."""
    return [type(event).__name__, plain(event)]


def plain_effects(effects: Iterable[Effect]) -> list[list[Any]]:
    """Returns effects in order, each with its type's name."""
    return [[type(effect).__name__, plain(effect)] for effect in effects]


def event_of(data: object) -> events.Event:
    """Returns the event that `plain_event` wrote. Raises RecordingError."""
    event: events.Event = _built_named(_EVENTS, data, "event")
    return event


def plain(value: Any) -> Any:  # noqa: ANN401 - any value that events, effects and settings hold
    """Returns strings, numbers, None, lists, and objects with string keys."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is float:
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(kind):
        fields = _plain_fields(value, kind)
        return [kind.__name__, fields] if kind in _OF_NAMED else fields
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    raise RecordingError(f"{value!r} has no written form")


def _plain_fields(value: object, kind: type) -> dict[str, Any]:
    written = {}
    for name, default in _defaults(kind):
        item = getattr(value, name)
        if item is not default and (default is dataclasses.MISSING or item != default):
            written[name] = item if type(item) in _SCALARS else plain(item)
    return written


@cache
def _defaults(kind: type) -> tuple[tuple[str, Any], ...]:
    """Returns names and defaults of the fields that its constructor takes."""
    return tuple((f.name, f.default) for f in dataclasses.fields(kind) if f.init)


def built(wanted: Any, data: Any, path: str) -> Any:  # noqa: ANN401 - a type known at run time
    """Returns the value of type `wanted` that `plain` wrote.

    Raises RecordingError naming the field.
    """
    try:
        if dataclasses.is_dataclass(wanted):
            return _built_dataclass(wanted, data, path)
        if wanted in _NAMED:
            return _built_named(_NAMED[wanted], data, path)
        if isinstance(wanted, type) and issubclass(wanted, tuple):  # a named tuple
            kinds = zip(_hints(wanted).values(), data, strict=True)
            return wanted(*(built(kind, item, path) for kind, item in kinds))
        origin = typing.get_origin(wanted)
        if origin in (types.UnionType, typing.Union):
            return _built_union(wanted, data, path)
        if origin is not None:
            return _built_collection(origin, typing.get_args(wanted), data, path)
        return _built_scalar(wanted, data)
    except (TypeError, ValueError, AttributeError) as error:
        raise RecordingError(f"{path} is {data!r}: {error}") from error


def _built_named(kinds: Mapping[str, type], data: object, path: str) -> Any:  # noqa: ANN401
    match data:
        case [str(name), dict(fields)] if name in kinds:
            return built(kinds[name], fields, name)
    raise RecordingError(f"{data!r} is no {path}")


def _built_dataclass(wanted: Any, data: Any, path: str) -> Any:  # noqa: ANN401
    hints = _hints(wanted)
    if unknown := data.keys() - hints.keys():
        raise RecordingError(f"{path} has no field {min(unknown)}")
    return wanted(**{k: built(hints[k], item, f"{path}.{k}") for k, item in data.items()})


def _built_union(wanted: Any, data: Any, path: str) -> Any:  # noqa: ANN401
    kinds = [kind for kind in typing.get_args(wanted) if kind is not type(None)]
    if data is None:
        return None
    if len(kinds) > 1:
        raise TypeError(f"{wanted} is more than one type or None")
    return built(kinds[0], data, path)


def _built_collection(origin: Any, of: tuple[Any, ...], data: Any, path: str) -> Any:  # noqa: ANN401
    if issubclass(origin, Mapping):
        items = data.items()
        return {of[0](key): built(of[1], item, f"{path}.{key}") for key, item in items}
    if origin not in (tuple, list):
        raise TypeError(f"{origin} can't be read")
    kinds = of * len(data) if origin is list else of
    if len(of) == 2 and of[1] is Ellipsis:
        kinds = of[:1] * len(data)
    pairs = zip(kinds, data, strict=True)
    return origin(built(kind, item, f"{path}[{i}]") for i, (kind, item) in enumerate(pairs))


def _built_scalar(wanted: Any, data: Any) -> Any:  # noqa: ANN401
    if isinstance(wanted, type) and issubclass(wanted, Enum):
        return wanted(data)
    if wanted is float and (type(data) is int or data in ("inf", "-inf", "nan")):
        return float(data)
    if wanted not in (str, int, bool, float):
        raise TypeError(f"{wanted} can't be read")
    if type(data) is not wanted:
        raise TypeError(f"it must be {wanted.__name__}")
    return data


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    if not dataclasses.is_dataclass(kind):
        return hints
    return {f.name: hints[f.name] for f in dataclasses.fields(kind) if f.init}
