"""The board's events: what happened on a fleet, one JSON object per line.

The live scheduler, a replayed recording and the simulator write the same lines; the page `/board`,
`millrace top` and `millrace sim compare` read them. The first line is the head. Every other line
has the time `t`, in seconds by the writer's clock, and the `kind` of its event:

    {"millrace_board": 1, "source": "live", "zero_unix_s": 1767225600.0}
    {"t": 81.25, "kind": "arrived", "id": "r7", "slo_class": "chat", "prompt_tokens": 812, ...}

A field that has its default value is left out. Readers ignore kinds and fields that they do not
know. A first line that follows later begins a new run: readers forget the run before.
docs/reference/board.md lists kinds and fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millrace.core.errors import MillraceError
from millrace.core.request import Chunk
from millrace.core.scheduler.recording import RecordingError, built, plain

#: Raised by one whenever a reader of the last number would misread the present lines.
FORMAT = 1


class BoardError(MillraceError):
    """A line is no line of a board: says which field is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The first line. `source`: live | recording | simulation.

    `zero_unix_s`: the Unix time of `t` 0; None where the clock is no one's wall clock.
    """

    source: str
    title: str = ""
    zero_unix_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """An instance joined, or takes work again or no more. `role`: prefill | decode | mixed |
    kvp."""

    id: str
    role: str
    model: str = ""  # hash of the model
    node: str = ""
    kv_pages: int = 0
    takes_work: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceGone:
    """The instance left or died, with all that it held."""

    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What an instance holds; written when it has changed, at most once a heartbeat."""

    id: str
    used_pages: int = 0  # held or reserved
    running: int = 0  # prefill: tasks that compute; otherwise sequences in the batch
    waiting: int = 0  # tasks, or sequences on their way to the batch
    queue_s: float = 0.0  # predicted seconds of prefill that it holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The scheduler's settings and counts; written when they have changed, as `Usage` is."""

    policy: str
    improvement_rate: float = 0.0
    queued: int = 0  # requests that no prefill instance has yet
    queued_s: float = 0.0  # predicted seconds of their prefill
    preemptions: int = 0  # so far


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A request came. `since_s`: how long before `t`, where the board began after the arrival."""

    id: str
    slo_class: str = "default"
    tenant: str = "default"
    prompt_tokens: int = 0
    max_new_tokens: int = 0
    ttft_slo_s: float | None = None
    since_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The request has memory for its KV at `kv_ids`, the KV owner first, the KVP workers after."""

    id: str
    kv_ids: tuple[str, ...] = ()
    predicted_ttft_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Prefill instances have the request's chunks; a later plan replaces an earlier one."""

    id: str
    attempt: int = 1
    chunks: tuple[Chunk, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRuns:
    """The chunk computes at these instances, from now on."""

    id: str
    chunk: int = 0
    tokens: int = 0
    instances: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkStops:
    """The chunk computes no more. `why`: done | suspended | lost. `by`: the requests that suspended
    it."""

    id: str
    chunk: int = 0
    why: str = "done"
    by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The request's new state, as `RequestState` names it; or "refused". `message` says why."""

    id: str
    state: str
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """The request has its first token. `in_time`: None without an objective."""

    id: str
    ttft_s: float
    in_time: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something a reader of the board should know."""

    text: str


BoardEvent = (
    Instance
    | InstanceGone
    | Usage
    | Fleet
    | Arrived
    | Placed
    | Planned
    | ChunkRuns
    | ChunkStops
    | State
    | FirstToken
    | Notice
)

KINDS: Mapping[str, type[BoardEvent]] = {
    "instance": Instance,
    "gone": InstanceGone,
    "usage": Usage,
    "fleet": Fleet,
    "arrived": Arrived,
    "placed": Placed,
    "planned": Planned,
    "runs": ChunkRuns,
    "stops": ChunkStops,
    "state": State,
    "first_token": FirstToken,
    "notice": Notice,
}
_KIND_OF = {event: kind for kind, event in KINDS.items()}


def head_line(head: Head) -> dict[str, Any]:
    """Returns the first line."""
    return {"millrace_board": FORMAT, **plain(head)}


def line_of(event: BoardEvent, now_s: float) -> dict[str, Any]:
    """Returns the line of an event at `now_s`."""
    return {"t": round(now_s, 6), "kind": _KIND_OF[type(event)], **plain(event)}


def read_line(line: Mapping[str, Any]) -> tuple[float, Head | BoardEvent | None]:
    """Returns the time and the event of a line; the time of a head is 0.

    The event is None for an unknown kind. Raises BoardError for another format and bad fields.
    """
    fields = dict(line)
    try:
        if (number := fields.pop("millrace_board", None)) is not None:
            if number != FORMAT:
                raise BoardError(f"millrace_board is {number!r}; this version reads {FORMAT}")
            return 0.0, _read(Head, fields)
        now_s, kind = float(fields.pop("t")), KINDS.get(str(fields.pop("kind")))
        return now_s, None if kind is None else _read(kind, fields)
    except (KeyError, TypeError, ValueError) as error:
        raise BoardError(f"no line of a board: {error!r}") from error


def _read(kind: type[Any], fields: dict[str, Any]) -> Any:  # noqa: ANN401 - a value of `kind`
    known = {name: value for name, value in fields.items() if name in kind.__slots__}
    try:
        return built(kind, known, kind.__name__)
    except RecordingError as error:
        raise BoardError(str(error)) from error
