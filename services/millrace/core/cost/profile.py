"""A hardware profile: all that the planners and the simulator know of one model on one device.

Tetris section 5.1 fits its model offline for each GPU and model. A profile is the file with such a
fit, the operator tables, the origin of both, and their errors. The codec works on plain dicts;
`millrace.profiles` reads the files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from millrace.core.cost.latency import Latency, SpLatency
from millrace.core.cost.operators import DecodeAttention, OperatorModel, Table
from millrace.core.errors import ConfigError

#: The version of the JSON's layout; a reader refuses any other version.
FORMAT = 1

_TABLES = (
    "qkv_proj",
    "o_proj",
    "gate_up_proj",
    "down_proj",
    "attn",
    "history_factor",
    "lm_head",
)
_CONSTANTS = ("kv_read_s", "overhead_s", "kvp_message_s", "kvp_token_s")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One model on one kind of worker.

    kv_bytes_per_token: of the whole model, over all TP ranks. kv_transfer_bytes_s: of one worker's
    KV to another, by backend. ring_step_s: seconds that a step of the attention ring costs per
    layer beyond compute. mixed: `operators` for passes that hold decodes and chunks at once, if
    such passes were measured; the decodes of `operators` come from steps of their own. measured_sp:
    degrees of `prefill` beyond 1 that groups were measured at; the others are modelled. errors:
    median relative error on held-out measurements, by table. checks: the same against measurements
    of another origin, to which nothing was fitted. sources and assumptions: sentences.
    """

    name: str
    model: str
    device: str
    tp: int
    layers: int
    kv_bytes_per_token: int
    prefill: SpLatency
    operators: OperatorModel
    kv_transfer_bytes_s: Mapping[str, float]
    ring_step_s: float
    mixed: OperatorModel | None = None
    measured_sp: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    errors: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    checks: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    assumptions: tuple[str, ...] = ()

    @property
    def mixed_batches(self) -> OperatorModel:
        """Returns the model of passes of decodes and chunks at once: the measured one where there
        is one.
        """
        return self.operators if self.mixed is None else self.mixed

    def to_json(self) -> dict[str, object]:
        """Returns plain dicts, lists, numbers and strings; `from_json` reads them back equal."""
        return {
            "format": FORMAT,
            "name": self.name,
            "model": self.model,
            "device": self.device,
            "tp": self.tp,
            "layers": self.layers,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "kv_transfer_bytes_s": dict(self.kv_transfer_bytes_s),
            "ring_step_s": self.ring_step_s,
            "measured_sp": list(self.measured_sp),
            "sources": list(self.sources),
            "errors": dict(self.errors),
            "checks": dict(self.checks),
            "assumptions": list(self.assumptions),
            "prefill": {
                str(sp): _latency_json(self.prefill.by_sp[sp]) for sp in self.prefill.degrees
            },
            "operators": _operators_json(self.operators),
            **({} if self.mixed is None else {"mixed": _operators_json(self.mixed)}),
        }

    @classmethod
    def from_json(cls, data: object) -> Profile:
        """Reads what `to_json` wrote. Raises ConfigError naming the field, value and range."""
        top = _mapping(data, "profile")
        if top.get("format") != FORMAT:
            raise ConfigError(f"profile.format is {top.get('format')!r}; it must be {FORMAT}")
        layers = _whole(top, "layers")
        return cls(
            name=_text(top, "name"),
            model=_text(top, "model"),
            device=_text(top, "device"),
            tp=_whole(top, "tp"),
            layers=layers,
            kv_bytes_per_token=_whole(top, "kv_bytes_per_token"),
            prefill=_sp_latency(_mapping(top.get("prefill"), "prefill")),
            operators=_operators(top.get("operators"), "operators", layers),
            mixed=_operators(top["mixed"], "mixed", layers) if "mixed" in top else None,
            kv_transfer_bytes_s=_numbers(top, "kv_transfer_bytes_s"),
            ring_step_s=_number(top, "ring_step_s"),
            measured_sp=_degrees(top, "measured_sp"),
            sources=_texts(top, "sources"),
            errors=_numbers(top, "errors"),
            checks=_numbers(top, "checks"),
            assumptions=_texts(top, "assumptions"),
        )


def _latency_json(latency: Latency) -> dict[str, object]:
    return {
        "a": latency.a,
        "b": latency.b,
        "c": latency.c,
        "d": latency.d,
        "points": [list(point) for point in latency.points],
    }


def _operators_json(operators: OperatorModel) -> dict[str, object]:
    decode = operators.decode_attn
    return {
        **{name: getattr(operators, name) for name in _CONSTANTS},
        **({"attn_call_s": operators.attn_call_s} if operators.attn_call_s else {}),
        **{name: _table_json(getattr(operators, name)) for name in _TABLES},
        "decode_attn": {
            "batches": list(decode.batches),
            "tables": [_table_json(table) for table in decode.tables],
        },
    }


def _table_json(table: Table) -> list[list[float]]:
    return [list(table.xs), list(table.ys)]


def _sp_latency(data: Mapping[str, object]) -> SpLatency:
    by_sp: dict[int, Latency] = {}
    for key in data:
        if not key.isdecimal():
            raise ConfigError(f"prefill has the SP degree {key!r}; it must be a whole number")
        by_sp[int(key)] = _named(f"prefill.{key}", partial(_latency, data[key]))
    return _named("prefill", lambda: SpLatency(by_sp=MappingProxyType(by_sp)))


def _latency(data: object) -> Latency:
    fields = _mapping(data, "latency")
    points = []
    for point in _list(fields.get("points"), "points"):
        tokens, seconds = _floats(point, "points", length=2)
        points.append((int(tokens), seconds))
    return Latency(
        a=_number(fields, "a"),
        b=_number(fields, "b"),
        c=_number(fields, "c"),
        d=_number(fields, "d"),
        points=tuple(points),
    )


def _operators(value: object, where: str, layers: int) -> OperatorModel:
    data = _mapping(value, where)
    tables = {name: _named(f"{where}.{name}", partial(_table, data.get(name))) for name in _TABLES}
    constants = {name: _number(data, name) for name in _CONSTANTS}
    if "attn_call_s" in data:
        constants["attn_call_s"] = _number(data, "attn_call_s")
    decode = _mapping(data.get("decode_attn"), f"{where}.decode_attn")
    batches = _floats(decode.get("batches"), f"{where}.decode_attn.batches")
    rows = _list(decode.get("tables"), f"{where}.decode_attn.tables")
    decode_attn = _named(
        f"{where}.decode_attn",
        lambda: DecodeAttention(
            batches=tuple(int(batch) for batch in batches),
            tables=tuple(_table(row) for row in rows),
        ),
    )
    return OperatorModel(
        layers=layers,
        qkv_proj=tables["qkv_proj"],
        o_proj=tables["o_proj"],
        gate_up_proj=tables["gate_up_proj"],
        down_proj=tables["down_proj"],
        attn=tables["attn"],
        history_factor=tables["history_factor"],
        lm_head=tables["lm_head"],
        decode_attn=decode_attn,
        **constants,
    )


def _table(data: object) -> Table:
    rows = _list(data, "a table")
    if len(rows) != 2:
        raise ConfigError(f"a table has {len(rows)} rows; it must be [xs, ys]")
    return Table(xs=_floats(rows[0], "xs"), ys=_floats(rows[1], "ys"))


def _named(where: str, read: Callable[[], _T]) -> _T:
    try:
        return read()
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _mapping(value: object, name: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {value!r:.60}; it must be an object")
    return value


def _list(value: object, name: str) -> Sequence[object]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{name} is {value!r:.60}; it must be a list")
    return value


def _floats(value: object, name: str, length: int | None = None) -> tuple[float, ...]:
    items = _list(value, name)
    if length is not None and len(items) != length:
        raise ConfigError(f"{name} has an entry of {len(items)} numbers; it must be {length}")
    return tuple(_finite(item, name) for item in items)


def _finite(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{name} is {value!r:.60}; it must be a finite number")
    return value


def _number(data: Mapping[str, object], name: str) -> float:
    value = _finite(data.get(name), name)
    if value < 0:
        raise ConfigError(f"{name} is {value}; it must be 0 or more")
    return value


def _whole(data: Mapping[str, object], name: str) -> int:
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r:.60}; it must be a whole number of 1 or more")
    return value


def _degrees(data: Mapping[str, object], name: str) -> tuple[int, ...]:
    """Returns the degrees; None in a file that was written before groups could be measured."""
    degrees = _floats(data.get(name, ()), name)
    if not all(sp >= 2 and sp == int(sp) for sp in degrees):
        raise ConfigError(f"{name} is {list(degrees)}; it must be whole numbers of 2 or more")
    return tuple(map(int, degrees))


def _text(data: Mapping[str, object], name: str) -> str:
    value = data.get(name)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name} is {value!r:.60}; it must be a text")
    return value


def _texts(data: Mapping[str, object], name: str) -> tuple[str, ...]:
    items = _list(data.get(name), name)
    return tuple(_text({name: item}, name) for item in items)


def _numbers(data: Mapping[str, object], name: str) -> Mapping[str, float]:
    items = _mapping(data.get(name), name)
    return MappingProxyType({key: _number(items, key) for key in items})
